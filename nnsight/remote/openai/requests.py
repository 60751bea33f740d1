"""What a request asks for, in OpenAI's form. All of it is untrusted, and checked here.

A field that is not known, or that asks for something that is not done, is refused: an answer that leaves something out looks like any
other. Steering is asked for as on vLLM's server of this package, in ``vllm_xargs``; see :mod:`nnsight.steering.choices`.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from ...steering.choices import PREFIX, Choice

#: Most prompts and answers of a request, texts to stop at, and likely tokens beside each one.
_MOST_ROWS, _MOST_STOPS, _MOST_LOGPROBS = 64, 16, 20


class BadRequestError(ValueError):
    """A request that cannot be done as it asks; ``code`` is the HTTP status, and ``param`` the field."""

    def __init__(self, message: str, param: str | None = None, code: int = 400) -> None:
        super().__init__(message)
        self.param, self.code = param, code


class _Checked(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class _StreamOptions(_Checked):
    include_usage: bool = False


_Stops = Annotated[
    list[Annotated[str, Field(min_length=1)]],
    Field(max_length=_MOST_STOPS),
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
]
_Token = Annotated[int, Field(strict=False, ge=0)]  # also as a text, which keys in JSON are


class Body(_Checked):
    """The JSON of a request, of either kind. With ``temperature`` 0 the likeliest token is always chosen."""

    model: str
    max_tokens: int = Field(0, ge=1)  # 0 if the request does not say
    n: int = Field(1, ge=1, le=_MOST_ROWS)
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, ge=0, le=1)
    top_k: int = Field(0, ge=-1, lt=2**31)  # 0 or -1 for all
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: _Stops = []
    presence_penalty: float = Field(0.0, ge=-2, le=2)  # taken from the logits of tokens that were made already
    frequency_penalty: float = Field(0.0, ge=-2, le=2)  # likewise, times how often each was made
    logit_bias: dict[_Token, Annotated[float, Field(ge=-100, le=100)]] = {}  # added to the logits of tokens
    stream: bool = False
    stream_options: _StreamOptions = _StreamOptions()
    vllm_xargs: dict[str, Any] = {}
    # Other values of these ask for something that is not done.
    best_of: Literal[1] = 1
    echo: Literal[False] = False
    response_format: dict[Literal["type"], Literal["text"]] = {}
    suffix: Literal[""] = ""
    tools: list[Any] = Field([], max_length=0)
    tool_choice: Literal["none", "auto"] = "auto"
    # These have no meaning here.
    metadata: Any = None
    store: Any = None
    user: Any = None

    @property
    def likely(self) -> int | None:
        """How many of the likeliest tokens are told beside each one; ``None`` to tell nothing."""
        return None

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always chosen: dividing by less would overflow."""
        return self.temperature < 1e-4

    def prompts(self, tokenizer: Any) -> list[list[int]]:
        """Return the token ids of each prompt; raise a :class:`BadRequestError` if the tokenizer has none for it."""
        raise NotImplementedError


class CompletionBody(Body):
    """The JSON of a request to complete prompts: texts, or token ids."""

    prompt: str | list[int] | list[str | list[int]]
    logprobs: int | None = Field(None, ge=0, le=_MOST_LOGPROBS)

    @property
    def likely(self) -> int | None:
        return self.logprobs

    def prompts(self, tokenizer: Any) -> list[list[int]]:
        is_one = isinstance(self.prompt, str) or all(isinstance(item, int) for item in self.prompt)
        given: Any = [self.prompt] if is_one else self.prompt
        made = [tokenizer.encode(item) if isinstance(item, str) else item for item in given]
        if not all(0 <= token < len(tokenizer) for ids in made for token in ids):
            raise BadRequestError("`prompt` has numbers that are no token ids of this model.", "prompt")
        return made


class _ChatMessage(_Checked, extra="allow"):
    role: str
    content: str


class ChatBody(Body):
    """The JSON of a request to go on with a chat."""

    messages: list[_ChatMessage] = Field(min_length=1)
    max_completion_tokens: int = Field(0, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=_MOST_LOGPROBS)

    @property
    def likely(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    def prompts(self, tokenizer: Any) -> list[list[int]]:
        if not getattr(tokenizer, "chat_template", None):
            raise BadRequestError("This model has no chat template: use /v1/completions.", "messages")
        messages = [message.model_dump() for message in self.messages]
        try:
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # templates raise errors of their own, for roles that they do not know
            raise BadRequestError(f"The chat template of the model refuses the messages: {error}", "messages") from error
        return [tokenizer.encode(text, add_special_tokens=False)]


def parse(data: bytes | bytearray, chat: bool) -> Body:
    """Return the body of a request, in which ``null`` is as good as nothing; raise a :class:`BadRequestError` if it is none."""
    try:
        given = json.loads(data)
        if isinstance(given, dict):
            given = {name: value for name, value in given.items() if value is not None}
        body = (ChatBody if chat else CompletionBody).model_validate(given)
    except ValidationError as error:
        found = error.errors()[0]
        param = str(found["loc"][0]) if found["loc"] else None
        raise BadRequestError(f"{'The body' if param is None else f'`{param}`'}: {found['msg']}.", param) from error
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"The body is no JSON: {error}") from error
    if isinstance(body, ChatBody) and body.top_logprobs and not body.logprobs:
        raise BadRequestError("`top_logprobs` is for chats that ask for `logprobs`.", "top_logprobs")
    return body


class Wanted(NamedTuple):
    """What a request asks of a model: its ``body`` with the most tokens of an answer, the ids of its prompts, and how it is steered."""

    body: Body
    prompts: list[list[int]]
    choice: Choice | None


def wanted(body: Body, tokenizer: Any, longest: int) -> Wanted:
    """Return what ``body`` asks of a model; ``longest`` is how many tokens a prompt and its answer may have.

    Raises:
        BadRequestError: If the model cannot do that.
    """
    prompts = body.prompts(tokenizer)
    if not 0 < len(prompts) * body.n <= _MOST_ROWS:
        raise BadRequestError(f"A request has 1 to {_MOST_ROWS} answers: its prompts times `n`.", "n")
    if not all(prompts):
        raise BadRequestError("A prompt has one token at least.", "prompt")
    room = longest - max(map(len, prompts))
    if room < 1:
        raise BadRequestError(f"The prompt has {max(map(len, prompts))} tokens, and prompt and answer may have {longest}.", "prompt")
    most = body.max_tokens or min(room, 16)
    if isinstance(body, ChatBody):
        most = body.max_completion_tokens or body.max_tokens or room
    if most > room:
        raise BadRequestError(f"`max_tokens`: there is room for {room} tokens behind the prompt.", "max_tokens")
    if not all(token < len(tokenizer) for token in body.logit_bias):
        raise BadRequestError("`logit_bias` has keys that are no token ids of this model.", "logit_bias")
    try:
        choice = Choice.of(body.vllm_xargs, PREFIX) if body.vllm_xargs else None
    except ValueError as error:
        raise BadRequestError(str(error), "vllm_xargs") from error
    return Wanted(body.model_copy(update={"max_tokens": most}), prompts, choice)
