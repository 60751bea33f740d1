"""Routes for vectors on vLLM's server, and a guard in front of vLLM's routes.

vLLM ignores unknown fields of a request, and some of its endpoints and modes also ignore extra parameters. A request for steering would
then get an unsteered answer without any notice. The guard refuses such requests with the status 400. It runs after vLLM's authentication.
"""

from __future__ import annotations

import json
from typing import Any

from fastapi import APIRouter, FastAPI, HTTPException, Request
from starlette.middleware import Middleware
from starlette.responses import JSONResponse
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.exceptions import VLLMValidationError

from .client import SteeringClient, is_ours, refused

#: The endpoints that read ``vllm_xargs``.
STEERABLE = ("/v1/completions", "/v1/chat/completions", "/v1/chat/completions/batch", "/v1/responses", "/v1/messages")

#: Most bytes that a file may have in addition to its numbers.
_HEADER_BYTES = 1 << 20

router = APIRouter(prefix="/v1/nnsight/vectors")


def install(app: FastAPI) -> None:
    """Add the routes and the guard to vLLM's application."""
    app.include_router(router)
    app.user_middleware.append(Middleware(Guard))  # the innermost middleware, behind authentication
    app.middleware_stack = None  # the first request builds it again


@router.get("")
async def list_vectors(request: Request) -> dict[str, Any]:
    """Return the vectors, the programs, the layers and the entries that requests can use."""
    client: SteeringClient = request.app.state.engine_client
    return {
        "vectors": [{"name": name, "layers": client.vectors.layers(name)} for name in client.vectors],
        "layers": sorted(client.places),
        "programs": [
            {"name": name, "parameters": {key: list(value.shape) for key, value in program.defaults.items()}}
            for name, program in client.programs.items()
        ],
        "entries": {"count": client.entries.count, "in_use": client.entries.in_use},
    }


@router.put("/{name}")
async def register(name: str, request: Request) -> dict[str, Any]:
    """Register the vector in the body: a safetensors file, or a control vector in GGUF."""
    client: SteeringClient = request.app.state.engine_client
    if name in client.vectors:
        raise HTTPException(409, f"There is a vector {name!r} already: remove it first, or choose another name.")
    config = client.vllm_config.model_config
    most = 8 * config.get_hidden_size() * config.get_total_num_hidden_layers() + _HEADER_BYTES
    data = bytearray()
    async for chunk in request.stream():  # read to the end, or some clients would not get the answer
        if len(data) <= most:
            data += chunk
    if len(data) > most:
        raise HTTPException(413, f"The file has more than {most} bytes. No vector of this model needs that many.")
    try:
        client.vectors.add_parsed(name, bytes(data), f"the file for {name!r}")
    except ValueError as error:
        raise HTTPException(400, str(error)) from error
    except ImportError as error:
        raise HTTPException(501, str(error)) from error
    client.salted_edits.cache_clear()  # the name may have stood for another vector
    return {"name": name, "layers": client.vectors.layers(name)}


@router.delete("/{name}")
async def remove(name: str, request: Request) -> dict[str, Any]:
    """Remove a vector. Running requests go on with it."""
    client: SteeringClient = request.app.state.engine_client
    try:
        client.vectors.remove(name)
    except KeyError as error:
        raise HTTPException(404, error.args[0]) from error
    client.salted_edits.cache_clear()
    return {"name": name}


class Guard:
    """Middleware that refuses a request for steering that vLLM would ignore, or that is not possible."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Check a JSON request, and pass it on."""
        if scope["type"] != "http" or scope["method"] != "POST":
            return await self._app(scope, receive, send)
        messages: list[Any] = []
        while not messages or (messages[-1]["type"] == "http.request" and messages[-1].get("more_body")):
            messages.append(await receive())
        body = b"".join(message.get("body", b"") for message in messages)

        async def again() -> Any:
            return messages.pop(0) if messages else await receive()

        if b"nnsight" in body.lower():
            try:
                _check(scope, body)
            except VLLMValidationError as error:
                answer = JSONResponse(create_error_response(error).model_dump(), status_code=400)
                return await answer(scope, again, send)
        return await self._app(scope, again, send)


def _check(scope: Any, body: bytes) -> None:
    """Raise ``VLLMValidationError`` if the request asks for steering and would not be steered."""
    try:
        request = json.loads(body)
    except ValueError:
        return  # vLLM reports the error
    if not isinstance(request, dict):
        return
    misplaced = sorted(filter(is_ours, request))
    if misplaced:
        raise refused(
            f"{', '.join(misplaced)}: put parameters for steering into `vllm_xargs`, as in "
            '{"vllm_xargs": {"nnsight_vector": "name"}}.'
        )
    extra = request.get("vllm_xargs")
    if not isinstance(extra, dict) or not any(map(is_ours, extra)):
        return
    path = scope["path"].removeprefix(scope.get("root_path", ""))
    if path not in STEERABLE:
        raise refused(f"{path} cannot be steered. These endpoints can: {', '.join(STEERABLE)}.")
    if request.get("use_beam_search"):
        raise refused("Beam search cannot be steered: vLLM does not pass the parameters on.")
    scope["app"].state.engine_client.edits_of(extra)
