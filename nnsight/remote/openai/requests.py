"""What a request asks for, in OpenAI's form. All of it is untrusted, and checked here.

A field that is not known, or that asks for something that is not done, is refused: an answer that leaves something out looks like any
other. Steering is asked for as on vLLM's server of this package, in ``vllm_xargs``; see :mod:`nnsight.steering.choices`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ...steering.choices import PREFIX, Choice


class BadRequestError(ValueError):
    """A request that cannot be done as it asks; ``code`` is the HTTP status, and ``param`` the field."""

    def __init__(self, message: str, param: str | None = None, code: int = 400) -> None:
        super().__init__(message)
        self.param, self.code = param, code


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. With ``temperature`` 0 it is always the likeliest."""

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int  # 0 for all
    seed: int | None
    stop: tuple[str, ...]
    presence: float = 0.0  # taken from the logits of tokens that were made already
    frequency: float = 0.0  # likewise, times how often each was made
    bias: tuple[tuple[int, float], ...] = ()  # added to the logits of tokens
    logprobs: int | None = None  # how many of the likeliest tokens are told beside each one; ``None`` to tell nothing

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always chosen: dividing by less would overflow."""
        return self.temperature < 1e-4


@dataclass(frozen=True)
class Wanted:
    """A request: the token ids of its prompts, how many answers each gets, and how."""

    model: str
    prompts: tuple[tuple[int, ...], ...]
    count: int
    sampling: Sampling
    choice: Choice | None
    stream: bool
    usage: bool  # whether a stream ends with the numbers of tokens


#: Fields that ask for nothing if they have one of these values, and for something that is not done otherwise.
_OFF: dict[str, tuple[Any, ...]] = {
    "best_of": (None, 1), "echo": (None, False), "response_format": (None, {"type": "text"}), "suffix": (None, ""), "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
}  # fmt: skip

#: Fields that have no meaning here.
_IGNORED = frozenset({"metadata", "store", "user"})

_KNOWN = frozenset(
    "frequency_penalty logit_bias logprobs max_tokens model n presence_penalty seed stop stream stream_options temperature top_k top_p "
    "vllm_xargs".split()
)

#: Most prompts and answers of a request, texts to stop at, and likely tokens beside each one.
_MOST_ROWS, _MOST_STOPS, _MOST_LOGPROBS = 64, 16, 20


def parse(body: Any, chat: bool, tokenizer: Any, longest: int) -> Wanted:
    """Return what the JSON of a request asks for; ``longest`` is how many tokens a prompt and its answer may have.

    Raises:
        BadRequestError: If it asks for something that is not done, or is no such request.
    """
    if not isinstance(body, dict):
        raise BadRequestError("The body is a JSON object.")
    own = {"messages", "max_completion_tokens", "top_logprobs"} if chat else {"prompt"}
    for name, value in body.items():
        if name in _OFF:
            if value not in _OFF[name]:
                raise BadRequestError(f"`{name}` is not done here: leave it out.", name)
        elif name not in _KNOWN | own | _IGNORED:
            raise BadRequestError(f"`{name}` is unknown.", name)
    if not isinstance(body.get("model"), str):
        raise BadRequestError("`model` is the name of a model, see /v1/models.", "model")
    prompts = _of_messages(body.get("messages"), tokenizer) if chat else _of_prompt(body.get("prompt"), tokenizer)
    count = _integer(body, "n", 1, 1, _MOST_ROWS)
    if not 0 < len(prompts) * count <= _MOST_ROWS:
        raise BadRequestError(f"A request has 1 to {_MOST_ROWS} answers: its prompts times `n`.", "n")
    room = longest - max(map(len, prompts))
    if room < 1:
        raise BadRequestError(f"The prompt has {max(map(len, prompts))} tokens, and prompt and answer may have {longest}.", "prompt")
    if not all(prompts):
        raise BadRequestError("A prompt has one token at least.", "prompt")
    name = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
    sampling = Sampling(
        _integer(body, name, min(room, 16 if not chat else room), 1, room),
        _number(body, "temperature", 1.0, 0.0, 100.0),
        _number(body, "top_p", 1.0, 0.0, 1.0),
        max(_integer(body, "top_k", 0, -1, 2**31), 0),
        _integer(body, "seed", None, -(2**63), 2**63 - 1),
        _stops(body.get("stop")),
        _number(body, "presence_penalty", 0.0, -2.0, 2.0),
        _number(body, "frequency_penalty", 0.0, -2.0, 2.0),
        _bias(body.get("logit_bias"), tokenizer),
        _logprobs(body, chat),
    )
    options = body.get("stream_options") or {}
    if not isinstance(options, dict) or options.keys() - {"include_usage"}:
        raise BadRequestError("`stream_options` has `include_usage` only.", "stream_options")
    return Wanted(
        body["model"], prompts, count, sampling, _choice(body.get("vllm_xargs")), body.get("stream") is True,
        options.get("include_usage") is True,
    )  # fmt: skip


def _choice(extra: Any) -> Choice | None:
    if extra is None or extra == {}:
        return None
    if not isinstance(extra, dict):
        raise BadRequestError("`vllm_xargs` is an object, as in {\"nnsight_vector\": \"name\"}.", "vllm_xargs")
    try:
        return Choice.of(extra, PREFIX)
    except ValueError as error:
        raise BadRequestError(str(error), "vllm_xargs") from error


def _of_messages(messages: Any, tokenizer: Any) -> tuple[tuple[int, ...], ...]:
    good = isinstance(messages, list) and all(
        isinstance(message, dict) and isinstance(message.get("role"), str) and isinstance(message.get("content"), str)
        for message in messages
    )
    if not good or not messages:
        raise BadRequestError("`messages` is a list of objects with `role` and `content`, both texts.", "messages")
    if not getattr(tokenizer, "chat_template", None):
        raise BadRequestError("This model has no chat template: use /v1/completions.", "messages")
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # templates raise errors of their own, for roles that they do not know
        raise BadRequestError(f"The chat template of the model refuses the messages: {error}", "messages") from error
    return (tuple(tokenizer.encode(text, add_special_tokens=False)),)


def _of_prompt(prompt: Any, tokenizer: Any) -> tuple[tuple[int, ...], ...]:
    if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and all(_is_id(item, tokenizer) for item in prompt)):
        prompt = [prompt]
    if not isinstance(prompt, list):
        raise BadRequestError("`prompt` is a text, a list of token ids, or a list of these.", "prompt")
    made = []
    for item in prompt:
        if isinstance(item, str):
            made.append(tuple(tokenizer.encode(item)))
        elif isinstance(item, list) and all(_is_id(number, tokenizer) for number in item):
            made.append(tuple(item))
        else:
            raise BadRequestError("`prompt` is a text, a list of token ids of this model, or a list of these.", "prompt")
    return tuple(made)


def _is_id(value: Any, tokenizer: Any) -> bool:
    return type(value) is int and 0 <= value < len(tokenizer)


def _stops(value: Any) -> tuple[str, ...]:
    texts = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or len(texts) > _MOST_STOPS or not all(isinstance(text, str) and text for text in texts):
        raise BadRequestError(f"`stop` is a text, or a list of at most {_MOST_STOPS}, none of them empty.", "stop")
    return tuple(texts)


def _bias(value: Any, tokenizer: Any) -> tuple[tuple[int, float], ...]:
    try:
        found = tuple((int(token), float(amount)) for token, amount in (value or {}).items())
    except (AttributeError, TypeError, ValueError):
        found = ((-1, 0.0),)
    if not all(_is_id(token, tokenizer) and abs(amount) <= 100 for token, amount in found):
        raise BadRequestError("`logit_bias` is an object with token ids of this model, and numbers from -100 to 100.", "logit_bias")
    return found


def _logprobs(body: dict[str, Any], chat: bool) -> int | None:
    if not chat:
        told: int | None = _integer(body, "logprobs", None, 0, _MOST_LOGPROBS)
        return told
    count: int = _integer(body, "top_logprobs", 0, 0, _MOST_LOGPROBS)
    asked = body.get("logprobs")
    if asked not in (None, False, True) or (count and not asked):
        raise BadRequestError("`logprobs` is true or false in a chat, and `top_logprobs` is for those that ask for them.", "logprobs")
    return count if asked else None


def _integer(body: dict[str, Any], name: str, default: Any, least: int, most: int) -> Any:
    value = body.get(name)
    if value is None:
        return default
    if type(value) is not int or not least <= value <= most:
        raise BadRequestError(f"`{name}` is an integer from {least} to {most}, not {value!r}.", name)
    return value


def _number(body: dict[str, Any], name: str, default: float, least: float, most: float) -> float:
    value = body.get(name)
    if value is None:
        return default
    if type(value) not in (int, float) or not math.isfinite(value) or not least <= value <= most:
        raise BadRequestError(f"`{name}` is a number from {least:g} to {most:g}, not {value!r}.", name)
    return float(value)
