"""The bodies of requests in OpenAI's format. They are untrusted and checked here.

An unknown field, or a value that is not supported, is refused, because a client would not notice that the answer ignores it. Steering is
requested in ``vllm_xargs``, as for this package's vLLM server; see :mod:`nnsight.steering.choices`.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from ...steering.choices import PREFIX, Choice

#: Maximum number of answers of a request, of stop texts, and of likely tokens for each position.
_MAX_ANSWERS, _MAX_STOPS, _MAX_LOGPROBS = 64, 16, 20


class BadRequestError(ValueError):
    """A request is malformed or cannot be served. ``code`` is the HTTP status, and ``param`` is the field."""

    def __init__(self, message: str, param: str | None = None, code: int = 400) -> None:
        super().__init__(message)
        self.param, self.code = param, code


class _Checked(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class _StreamOptions(_Checked):
    include_usage: bool = False


_Stops = Annotated[
    list[Annotated[str, Field(min_length=1)]],
    Field(max_length=_MAX_STOPS),
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
]
_Token = Annotated[int, Field(strict=False, ge=0)]  # not strict, because keys in JSON are strings


class Body(_Checked):
    """The JSON fields that both kinds of requests have. With ``temperature`` 0, the likeliest token is always chosen."""

    model: str
    max_tokens: int = Field(0, ge=1)  # 0 if the request does not set it
    n: int = Field(1, ge=1, le=_MAX_ANSWERS)
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, ge=0, le=1)
    top_k: int = Field(0, ge=-1, lt=2**31)  # 0 or -1 for all
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: _Stops = []
    presence_penalty: float = Field(0.0, ge=-2, le=2)  # subtracted from the logits of tokens that the answer contains
    frequency_penalty: float = Field(0.0, ge=-2, le=2)  # subtracted as often as the answer contains the token
    logit_bias: dict[_Token, Annotated[float, Field(ge=-100, le=100)]] = {}  # added to the logits of tokens
    stream: bool = False
    stream_options: _StreamOptions = _StreamOptions()
    vllm_xargs: dict[str, Any] = {}
    # Other values of these fields are not supported.
    best_of: Literal[1] = 1
    echo: Literal[False] = False
    response_format: dict[Literal["type"], Literal["text"]] = {}
    suffix: Literal[""] = ""
    tools: list[Any] = Field([], max_length=0)
    tool_choice: Literal["none", "auto"] = "auto"
    # These fields are accepted and ignored.
    metadata: Any = None
    store: Any = None
    user: Any = None

    @property
    def likely(self) -> int | None:
        """How many of the likeliest tokens are returned for each position; ``None`` if no log probabilities are requested."""
        return None

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always chosen. A division by smaller temperatures would overflow."""
        return self.temperature < 1e-4

    def prompts(self, tokenizer: Any) -> list[list[int]]:
        """Return the token ids of each prompt. Raises a :class:`BadRequestError` if the model cannot read a prompt."""
        raise NotImplementedError


class CompletionBody(Body):
    """The JSON of a request to complete prompts. A prompt is a text or a list of token ids."""

    prompt: str | list[int] | list[str | list[int]]
    logprobs: int | None = Field(None, ge=0, le=_MAX_LOGPROBS)

    @property
    def likely(self) -> int | None:
        return self.logprobs

    def prompts(self, tokenizer: Any) -> list[list[int]]:
        is_one = isinstance(self.prompt, str) or all(isinstance(item, int) for item in self.prompt)
        given: Any = [self.prompt] if is_one else self.prompt
        made = [tokenizer.encode(item) if isinstance(item, str) else item for item in given]
        if not all(0 <= token < len(tokenizer) for ids in made for token in ids):
            raise BadRequestError("`prompt` contains numbers that are not token ids of this model.", "prompt")
        return made


class _ChatMessage(_Checked, extra="allow"):
    role: str
    content: str


class ChatBody(Body):
    """The JSON of a request to continue a chat."""

    messages: list[_ChatMessage] = Field(min_length=1)
    max_completion_tokens: int = Field(0, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=_MAX_LOGPROBS)

    @property
    def likely(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    def prompts(self, tokenizer: Any) -> list[list[int]]:
        if not getattr(tokenizer, "chat_template", None):
            raise BadRequestError("This model has no chat template: use /v1/completions.", "messages")
        messages = [message.model_dump() for message in self.messages]
        try:
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # templates raise errors of any type, such as for unknown roles
            raise BadRequestError(f"The chat template of the model refuses the messages: {error}", "messages") from error
        return [tokenizer.encode(text, add_special_tokens=False)]


def parse(data: bytes | bytearray, chat: bool) -> Body:
    """Parse the body of a request. A field that is ``null`` counts as missing. Raises a :class:`BadRequestError` if it is malformed."""
    try:
        given = json.loads(data)
        json.dumps(given, ensure_ascii=False).encode()  # raises a `ValueError` for half a surrogate pair, which is no text
        if isinstance(given, dict):
            given = {name: value for name, value in given.items() if value is not None}
        body = (ChatBody if chat else CompletionBody).model_validate(given)
    except ValidationError as error:
        found = error.errors()[0]
        param = str(found["loc"][0]) if found["loc"] else None
        raise BadRequestError(f"{'The body' if param is None else f'`{param}`'}: {found['msg']}.", param) from error
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"The body is not valid JSON: {error}") from error
    if isinstance(body, ChatBody) and body.top_logprobs and not body.logprobs:
        raise BadRequestError("`top_logprobs` needs `logprobs`: set it to true.", "top_logprobs")
    return body


class CheckedRequest(NamedTuple):
    """A request that a model can serve."""

    body: Body  # its `max_tokens` is set
    prompts: list[list[int]]  # token ids
    choice: Choice | None  # the steering


def checked(body: Body, tokenizer: Any, longest: int) -> CheckedRequest:
    """Check ``body`` against the model of ``tokenizer``. ``longest`` is the maximum number of tokens of a prompt and its answer.

    Raises:
        BadRequestError: If the model cannot serve the request.
    """
    prompts = body.prompts(tokenizer)
    if not 0 < len(prompts) * body.n <= _MAX_ANSWERS:
        raise BadRequestError(f"A request must have 1 to {_MAX_ANSWERS} answers: the number of its prompts times `n`.", "n")
    if not all(prompts):
        raise BadRequestError("A prompt must have at least one token.", "prompt")
    room = longest - max(map(len, prompts))
    if room < 1:
        message = f"The prompt has {max(map(len, prompts))} tokens, but prompt and answer may only have {longest} together."
        raise BadRequestError(message, "prompt")
    most = body.max_tokens or min(room, 16)
    if isinstance(body, ChatBody):
        most = body.max_completion_tokens or body.max_tokens or room
    if most > room:
        raise BadRequestError(f"`max_tokens`: after the prompt, there is room for {room} tokens.", "max_tokens")
    if not all(token < len(tokenizer) for token in body.logit_bias):
        raise BadRequestError("`logit_bias` has keys that are not token ids of this model.", "logit_bias")
    try:
        choice = Choice.of(body.vllm_xargs, PREFIX) if body.vllm_xargs else None
    except ValueError as error:
        raise BadRequestError(str(error), "vllm_xargs") from error
    return CheckedRequest(body.model_copy(update={"max_tokens": most}), prompts, choice)
