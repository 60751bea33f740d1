"""Routes of OpenAI's interface, for the server of programs: ``/v1/models``, ``/v1/completions`` and ``/v1/chat/completions``.

The keys of the server apply, as ``Authorization: Bearer KEY`` or in the server's own header. The queue limit of an account also limits its
number of simultaneous requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ...steering.choices import Addition
from ...steering.layers import count_of, layers_path
from ...steering.registry import Vectors
from ..protocol import KEY_HEADER
from ..server.keys import Account, Door
from .batches import Generator
from .completions import Completion
from .requests import BadRequestError, Body, CheckedRequest, checked, parse

#: Maximum size of a body in bytes, and of the time for its upload in seconds.
_MAX_BYTES, _UPLOAD = 4 * 2**20, 60.0


class OpenAIModel:
    """A model behind these routes. Requests can name ``vectors``, and at most ``together`` answers share a batch.

    Raises:
        ValueError: If the model cannot be served so, see :class:`~.batches.Generator`, or if a vector does not fit the model.
    """

    def __init__(self, model: Any, vectors: Vectors, together: int = 8) -> None:
        model.dispatch()
        self.model, self.vectors = model, vectors
        at = layers_path(model)
        self.layers = range(count_of(model, at))
        config = model._module.config.get_text_config()
        self.hidden = int(config.hidden_size)
        self.longest = int(getattr(config, "max_position_embeddings", 0) or getattr(config, "max_seq_len", 0) or 2**20)
        vectors.fit(self.hidden)
        self.generator = Generator(model, at, together, self.longest)
        self.created = int(time.time())

    def additions(self, request: CheckedRequest) -> dict[int, Addition]:
        """Return the steering of a request, by layer. Raises a :class:`BadRequestError` if it does not fit the model."""
        if request.choice is None:
            return {}
        try:
            return request.choice.at_layers(self.vectors, self.layers, self.hidden, None)
        except ValueError as error:
            raise BadRequestError(str(error), "vllm_xargs") from error


class _Run:
    """One request with its answers."""

    def __init__(self, served: OpenAIModel, request: CheckedRequest) -> None:
        self.request, self._changed, loop = request, asyncio.Event(), asyncio.get_running_loop()
        additions = served.additions(request)
        seed = request.body.seed
        first = secrets.randbits(62) if seed is None else seed % 2**62

        def tell() -> None:
            with contextlib.suppress(RuntimeError):  # the server has stopped, but the generating thread goes on for the next one
                loop.call_soon_threadsafe(self._changed.set)

        start = request.choice.start if request.choice else 0
        places = [(prompt, number) for prompt in request.prompts for number in range(request.body.n)]
        self.answers = [
            Completion(prompt, request.body, additions, served.model.tokenizer, tell, first + number, start) for prompt, number in places
        ]
        for answer in self.answers:
            served.generator.submit(answer)

    async def grown(self) -> AsyncIterator[None]:
        """Yield at first, whenever an answer has grown, and at the end of all answers. Raises the error of an answer that failed."""
        while True:
            self._changed.clear()
            is_over = self.is_over  # read before the answers: what ends while the caller sends them is told in another round
            failed = next((answer.error for answer in self.answers if answer.error is not None), None)
            if failed is not None:
                raise failed
            yield
            if is_over:
                return
            await self._changed.wait()

    @property
    def is_over(self) -> bool:
        """Whether all answers have ended."""
        return all(answer.is_over for answer in self.answers)

    def cancel(self) -> None:
        for answer in self.answers:
            answer.cancel()
        self._changed.set()

    def usage(self) -> dict[str, int]:
        prompt, made = sum(map(len, self.request.prompts)), sum(len(answer.tokens) for answer in self.answers)
        return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}


def openai_routes(models: Mapping[str, OpenAIModel], door: Door) -> list[Route]:
    """Return the routes. ``models`` are the served models by their names in requests; ``door`` checks keys."""
    running: list[tuple[str, _Run]] = []  # requests with the names of their accounts; the next request drops those that are over

    def answering(chat: bool) -> Any:
        async def answer(request: Request) -> Response:
            try:
                account = _account(request, door)
                body = parse(await _body(request), chat)
                served = models.get(body.model)
                if served is None:
                    raise BadRequestError(f"{body.model!r} is not served here. Served models: {', '.join(models)}.", "model", 404)
                asked = await asyncio.to_thread(checked, body, served.model.tokenizer, served.longest)  # long texts take a while
                running[:] = [(name, run) for name, run in running if not run.is_over]
                if sum(name == account.name for name, _ in running) >= account.queue:
                    message = f"This key has {account.queue} running requests, which is its limit. Wait for some of them to end."
                    raise BadRequestError(message, None, 429)
                run = _Run(served, asked)
            except BadRequestError as error:
                return _refusal(error)
            running.append((account.name, run))
            head = _head(chat, body)
            if body.stream:
                return StreamingResponse(_events(run, chat, head), media_type="text/event-stream")
            try:
                async for _ in run.grown():
                    if await request.is_disconnected():
                        run.cancel()
                choices = [_choice(chat, index, made) for index, made in enumerate(run.answers)]
                return JSONResponse({**head, "choices": choices, "usage": run.usage()})
            except Exception:
                return _refusal(BadRequestError("The server failed. Its operator finds the cause in the log.", None, 500))
            finally:
                run.cancel()

        return answer

    return [
        *_listings(models, door),
        Route("/v1/completions", answering(chat=False), methods=["POST"]),
        Route("/v1/chat/completions", answering(chat=True), methods=["POST"]),
    ]


def _listings(models: Mapping[str, OpenAIModel], door: Door) -> list[Route]:
    """Return the routes that list models and vectors."""
    started = [{"id": name, "object": "model", "created": served.created, "owned_by": "nnsight"} for name, served in models.items()]

    def listing(content: Callable[[], Any]) -> Any:
        async def answer(request: Request) -> Response:
            try:
                _account(request, door)
            except BadRequestError as error:
                return _refusal(error)
            return JSONResponse(content())

        return answer

    def vectors() -> Any:
        found = [(model, name, served.vectors) for model, served in models.items() for name in served.vectors]
        return {"vectors": [{"model": model, "name": name, "layers": known.layers(name)} for model, name, known in found]}

    return [
        Route("/v1/models", listing(lambda: {"object": "list", "data": started})),
        Route("/v1/nnsight/vectors", listing(vectors)),
    ]


def _account(request: Request, door: Door) -> Account:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    account = door.admit(key.strip() if scheme.lower() == "bearer" else request.headers.get(KEY_HEADER))
    if account is None:
        raise BadRequestError("The key is missing or unknown: send it as `Authorization: Bearer KEY`.", None, 401)
    return account


async def _body(request: Request) -> bytearray:
    """Read the body of a request. Raises a :class:`BadRequestError` if it is too long or arrives too slowly."""
    data = bytearray()
    try:
        async with asyncio.timeout(_UPLOAD):
            async for chunk in request.stream():
                data += chunk
                if len(data) > _MAX_BYTES:
                    raise BadRequestError(f"The body is longer than {_MAX_BYTES} bytes.", None, 413)
    except TimeoutError:
        raise BadRequestError(f"The upload took longer than {_UPLOAD:g} seconds.", None, 408) from None
    return data


def _refusal(error: BadRequestError) -> Response:
    kind = "invalid_request_error" if error.code < 500 else "server_error"
    content = {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}
    return JSONResponse(content, error.code, headers={"Retry-After": "1"} if error.code == 429 else None)


def _head(chat: bool, body: Body) -> dict[str, Any]:
    kind = ("chat.completion.chunk" if body.stream else "chat.completion") if chat else "text_completion"
    name = f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}"
    return {"id": name, "object": kind, "created": int(time.time()), "model": body.model}


def _choice(chat: bool, index: int, answer: Completion) -> dict[str, Any]:
    content: dict[str, Any] = {"message": {"role": "assistant", "content": answer.text}} if chat else {"text": answer.text}
    return {"index": index, **content, "logprobs": _logprobs(chat, answer, 0), "finish_reason": answer.reason}


def _logprobs(chat: bool, answer: Completion, first: int) -> Any:
    """Return the log probabilities of the tokens from ``first`` on, in the format of chats or of completions."""
    if answer.sampling.likely is None:
        return None
    found = answer.logprobs[first:]
    if not chat:
        return {
            "tokens": [one.text for one in found], "token_logprobs": [one.value for one in found],
            "top_logprobs": [dict(one.likely) for one in found], "text_offset": [one.offset for one in found],
        }  # fmt: skip

    def entry(text: str, value: float) -> dict[str, Any]:
        return {"token": text, "logprob": value, "bytes": list(text.encode())}

    return {"content": [{**entry(one.text, one.value), "top_logprobs": [entry(*other) for other in one.likely]} for one in found]}


async def _events(run: _Run, chat: bool, head: dict[str, Any]) -> AsyncIterator[str]:
    """Yield the events of a stream: the new text of each answer, its end, and the numbers of tokens if the request asks for them."""

    def event(choices: list[dict[str, Any]], **more: Any) -> str:
        return f"data: {json.dumps({**head, 'choices': choices, **more})}\n\n"

    sent, told, ended = [0] * len(run.answers), [0] * len(run.answers), [False] * len(run.answers)
    try:
        if chat:
            for index in range(len(run.answers)):
                yield event([{"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}])
        async for _ in run.grown():
            for index, answer in enumerate(run.answers):
                reason, text = answer.reason, answer.text[sent[index] :]
                if (not text and reason is None) or ended[index]:
                    continue
                sent[index] += len(text)
                ended[index] = reason is not None
                content: dict[str, Any] = {"delta": {"content": text} if text else {}} if chat else {"text": text}
                logprobs = _logprobs(chat, answer, told[index])
                told[index] += len(logprobs.get("content", logprobs.get("tokens"))) if logprobs else 0
                yield event([{"index": index, **content, "logprobs": logprobs, "finish_reason": reason}])
        if run.request.body.stream_options.include_usage:
            yield event([], usage=run.usage())
        yield "data: [DONE]\n\n"
    except Exception:
        failure = {"message": "The server failed.", "type": "server_error", "param": None, "code": 500}
        yield f"data: {json.dumps({'error': failure})}\n\n"
    finally:
        run.cancel()
