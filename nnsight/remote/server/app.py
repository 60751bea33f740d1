"""The gateway over HTTP. All input is untrusted and checked here.

A request is checked in this order: the key in its header, before the body is read; the announced length, and then the length that arrives;
the multipart body, whose parts are limited in number and size; the envelope; the first bytes of the payload. Ids are looked up among
jobs, never among files. The answer is the same for a job of another account and for a job that does not exist.
"""

from __future__ import annotations

import asyncio
import contextlib
import platform
import time
from collections.abc import AsyncIterator, Sequence
from importlib import metadata
from typing import Any

from fastapi import FastAPI
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.types import Message as AsgiMessage
from starlette.websockets import WebSocket

from ... import __version__
from ...program.format.operators import OPERATORS_HASH
from ...program.format.payload import VERSION
from ..protocol import CONTENT_TYPE, KEY_HEADER, VERSION_HEADER
from .envelopes import BAD_KEY, RefusedError, check_payload, checked_envelope, too_long
from .gateway import Gateway
from .jobs import ServerJob
from .keys import Account, Door, OpenDoor
from .sessions import Sessions

#: Maximum size of a multipart body without the payload, in bytes.
_FRAME = 128 * 1024


def create_app(gateway: Gateway, door: Door, more: Sequence[Route] = ()) -> FastAPI:
    """Return the application of ``gateway``. It starts and stops the gateway. ``door`` checks keys, and ``more`` are further routes."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await gateway.start()
        yield
        await gateway.stop()

    sessions = Sessions(gateway, door)

    async def subscribe(websocket: WebSocket) -> None:
        account = door.admit(websocket.headers.get(KEY_HEADER))
        job_id, after = websocket.query_params.get("job"), websocket.query_params.get("after", "0")
        if account is None:
            await websocket.send_denial_response(JSONResponse({"detail": BAD_KEY}, 401))
            return
        job = gateway.find(job_id, account) if job_id else None
        if (job_id and job is None) or not (after.isdecimal() and len(after) < 20):
            await websocket.send_denial_response(JSONResponse({"detail": _NO_JOB}, 404))
            return
        await sessions.serve(websocket, account, job, int(after))

    async def refused(request: Request, error: Any) -> Response:
        gateway.metrics.refused.labels(error.reason).inc()
        headers = {"Retry-After": "10"} if error.code in (429, 503) else None
        return JSONResponse({"detail": str(error)}, error.code, headers=headers)

    # Routes of Starlette instead of FastAPI, so that the handlers limit the body while they read it.
    return FastAPI(
        title="nnsight",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        routes=[
            *_job_routes(gateway, door, sessions),
            *_fact_routes(gateway, door),
            WebSocketRoute("/subscribe", subscribe),
            *more,
        ],
        exception_handlers={RefusedError: refused},
        lifespan=lifespan,
    )


_NO_JOB = "There is no such job: the id is wrong, the job belongs to another key, or the time for which jobs are kept is over."


def _account(request: Request, door: Door) -> Account:
    account = door.admit(request.headers.get(KEY_HEADER))
    if account is None:
        raise RefusedError(401, "key", BAD_KEY)
    return account


def _job(request: Request, gateway: Gateway, door: Door) -> ServerJob:
    job = gateway.find(request.path_params["job_id"], _account(request, door))
    if job is None:
        raise HTTPException(404, _NO_JOB)
    return job


def _job_routes(gateway: Gateway, door: Door, sessions: Sessions) -> list[Route]:
    async def submit(request: Request) -> Response:
        account, began = _account(request, door), time.time()
        timeout = asyncio.timeout(gateway.settings.upload)
        version = request.headers.get(VERSION_HEADER, "unknown")
        try:
            async with gateway.uploading(account), timeout, _form(request, account.bytes) as form:
                envelope, blob = checked_envelope(form.get("data"), version), form.get("blob")
                if not isinstance(blob, UploadFile):
                    raise RefusedError(400, "multipart", "The body has no file `blob` with the payload.")
                size = blob.size or 0
                check_payload(await blob.read(9), size, account.bytes, version)
                await blob.seek(0)
                job = await gateway.submit(account, envelope["model_key"], envelope["nonce"], blob.file, size)
                await gateway.secure(job, listened=sessions.attach(envelope["session_id"], job, account))
        except ClientDisconnect:
            raise RefusedError(400, "disconnect", "The connection ended before the end of the upload.") from None
        except TimeoutError:
            raise RefusedError(408, "upload", f"The upload took longer than {gateway.settings.upload:g} seconds.") from None
        # For a nonce whose job has finished, the answer is the latest message.
        return JSONResponse(job.messages[0] if job.created >= began or not job.status.finished else job.latest)

    async def response(request: Request) -> Response:
        return JSONResponse(_job(request, gateway, door).latest)

    async def cancel(request: Request) -> Response:
        job = _job(request, gateway, door)
        gateway.cancel(job)
        return JSONResponse(job.latest)

    async def result(request: Request) -> Response:
        job = _job(request, gateway, door)
        if job.result_size is None or not job.status.finished:
            raise HTTPException(409, f"The job has no result: it is {job.status.value}.")
        path = gateway.spool.result_path(job)
        headers = {"Cache-Control": "no-store"}
        if path is not None:
            return FileResponse(path, media_type=CONTENT_TYPE, headers=headers)
        return Response(gateway.spool.result(job), 200, headers, CONTENT_TYPE)

    return [
        Route("/request", submit, methods=["POST"]),
        Route("/response/{job_id}", response),
        Route("/request/{job_id}", cancel, methods=["DELETE"]),
        Route("/result/{job_id}", result),
    ]


def _fact_routes(gateway: Gateway, door: Door) -> list[Route]:
    async def status(request: Request) -> Response:
        deployments = {
            key: {
                "model_key": key,
                "repo_id": served.key.repo_id,
                "revision": served.key.revision,
                "application_state": "RUNNING" if served.engine.healthy else "UNHEALTHY",
                "deployment_level": "HOT",
                "dedicated": True,
                "waiting": len(served.queue),
            }
            for key, served in gateway.served.items()
        }
        return JSONResponse({"deployments": deployments})

    async def env(request: Request) -> Response:
        packages = {"nnsight": __version__}
        for name in ("torch", "transformers", "safetensors", "tokenizers", "accelerate"):
            with contextlib.suppress(metadata.PackageNotFoundError):
                packages[name] = metadata.version(name)
        versions = {"python_version": platform.python_version(), "packages": packages}
        return JSONResponse({**versions, "formats": {CONTENT_TYPE: VERSION}, "operators": OPERATORS_HASH})

    async def whoami(request: Request) -> Response:
        account = _account(request, door)
        # `email` and `tags` are for clients of nnsight 0.8.
        email = None if isinstance(door, OpenDoor) else account.name
        return JSONResponse({"name": account.name, "limits": account.limits(), "email": email, "tags": []})

    async def health(request: Request) -> Response:
        problems = gateway.problems
        status = "failing" if problems else "ok"
        return JSONResponse({"status": status, "problems": problems}, 503 if problems else 200)

    async def metrics(request: Request) -> Response:
        return Response(gateway.figures(), media_type="text/plain; version=0.0.4; charset=utf-8")

    endpoints = {"/status": status, "/env": env, "/whoami": whoami, "/health": health, "/metrics": metrics}
    return [Route(path, endpoint) for path, endpoint in endpoints.items()]


@contextlib.asynccontextmanager
async def _form(request: Request, most: int) -> AsyncIterator[Any]:
    """Read the parts of a body with a payload of at most ``most`` bytes. Raises a :class:`RefusedError` if the body is invalid."""
    left = most + _FRAME

    async def limited() -> AsgiMessage:
        nonlocal left
        message = await request.receive()
        left -= len(message.get("body", b""))
        if left < 0:
            raise too_long(most)
        return message

    checked = Request(request.scope, limited)
    announced = request.headers.get("content-length", "0")
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        message = "The body must be multipart/form-data with a field `data` and a file `blob`."
        raise RefusedError(415, "multipart", message)
    if announced.isdecimal() and int(announced) > left:
        with contextlib.suppress(RefusedError):  # read up to the limit, because clients send the body before they read the answer
            async for _ in checked.stream():
                pass
        raise too_long(most)
    try:
        form = await checked.form(max_files=1, max_fields=4, max_part_size=_FRAME // 2)
    except HTTPException as error:
        raise RefusedError(400, "multipart", f"The multipart body cannot be read: {error.detail}") from None
    except OSError as error:  # Starlette writes long files to disk
        message = f"The upload could not be stored: {error.strerror}. Try again later."
        raise RefusedError(507, "storage", message) from None
    try:
        yield form
    finally:
        await form.close()
