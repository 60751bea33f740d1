"""WebSockets: each sends the messages of jobs to one client, and accepts short jobs from it.

The first frame of a socket contains its ``session_id``. The socket sends the messages of jobs that were submitted with this id or through
the socket. A client that lost its socket opens another one with ``?job=...&after=...`` and continues after the last message that it saw.
Each job of a socket has its own reader (:meth:`ServerJob.follow`), so a slow client delays only itself. If a client accepts no message
for some time, the server closes the socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import uuid
from typing import Any

from starlette.responses import JSONResponse
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from ..protocol import FRAMING, KEY_HEADER, VERSION_HEADER, JobStatus, Message, join_packet, split_packet
from .envelopes import BAD_KEY, RefusedError, check_payload, checked_envelope
from .gateway import Gateway
from .jobs import ServerJob
from .keys import Account, Door
from .spool import SHORT

_log = logging.getLogger("nnsight.remote.server")

#: Maximum size of a frame from a client, in bytes: a short payload and an envelope.
LONGEST_FRAME = SHORT + 2**13


class _Session:
    """One accepted socket."""

    def __init__(self, websocket: WebSocket, account: Account, gateway: Gateway, door: Door) -> None:
        self.id = str(uuid.uuid4())
        self.account = account
        self._websocket, self._gateway, self._door = websocket, gateway, door
        self._packs = websocket.query_params.get("framing") == FRAMING
        self._readers = asyncio.TaskGroup()
        self._takes = 0
        self._sending = asyncio.Lock()

    def add(self, job: ServerJob, after: int) -> bool:
        """Begin to send the messages of a job. Returns False if the socket is closing."""
        reader = self._send_messages(job, after)
        try:
            self._readers.create_task(reader)
        except RuntimeError:
            reader.close()
            return False
        return True

    async def feed(self, only: tuple[ServerJob, int] | None) -> None:
        """Send messages until the task is cancelled. ``only`` is a job and a message number: send only this job's later messages."""
        hello: dict[str, Any] = {"session_id": self.id}
        if only is None and self._packs:
            self._takes = hello["takes"] = SHORT
        async with self._readers:
            await self._websocket.send_json(hello)
            if only is not None:
                await self._send_messages(*only)
                return
            await asyncio.Event().wait()

    async def listen(self) -> None:
        """Accept jobs. Returns when the client disconnects or violates the protocol."""
        while True:
            frame = (await self._websocket.receive()).get("bytes")
            if frame is None or not self._takes:
                return
            try:
                job = await self._submit(frame)
            except RefusedError as error:
                self._gateway.metrics.refused.labels(error.reason).inc()
                await self._send({"code": error.code, "detail": str(error)})
            else:
                self.add(job, 0)

    async def _submit(self, frame: bytes) -> ServerJob:
        """Submit the job in a frame, and return it when it is synced or has ended. Raises a :class:`RefusedError` if it is refused."""
        headers = self._websocket.headers
        account = self._door.admit(headers.get(KEY_HEADER))  # checked again: the key may have been removed meanwhile
        if account is None:
            raise RefusedError(401, "key", BAD_KEY)
        try:
            content, payload = split_packet(frame)
        except ValueError as error:
            raise RefusedError(400, "envelope", str(error)) from None
        version = headers.get(VERSION_HEADER, "unknown")
        envelope = checked_envelope(content, version)
        check_payload(payload[:9], len(payload), account.bytes, version)
        nonce = envelope["nonce"]
        job = await self._gateway.submit(account, envelope["model_key"], nonce, io.BytesIO(payload), len(payload))
        await self._gateway.secure(job, listened=True)
        return job

    async def _send_messages(self, job: ServerJob, after: int) -> None:
        async for messages in job.follow(after):
            for ready in [messages] if self._packs else [[message] for message in messages]:
                result = await self._result(job, ready[-1])
                if result is not None:
                    ready[-1] = Message(**{**ready[-1], "data": {**ready[-1]["data"], "inline": True}})
                await self._send(ready, result)

    async def _result(self, job: ServerJob, message: Message) -> bytes | None:
        """Return the result that is sent together with ``message``, or None."""
        size = job.result_size
        if message["status"] != JobStatus.COMPLETED.value or size is None or size > self._gateway.settings.inline:
            return None
        known = job.result  # read once: another thread may remove it
        if known is not None:
            return known
        return self._gateway.spool.result(job) if size < SHORT else await asyncio.to_thread(self._gateway.spool.result, job)

    async def _send(self, content: Any, binary: bytes | None = None) -> None:
        """Send a packet. A client without packets gets a frame for the only message in ``content``, and one for its result."""
        async with self._sending, asyncio.timeout(self._gateway.settings.send):
            if self._packs:
                await self._websocket.send_bytes(join_packet(content, binary or b""))
                return
            await self._websocket.send_json(content[0])
            if binary is not None:
                await self._websocket.send_bytes(binary)


class Sessions:
    """All open sockets."""

    def __init__(self, gateway: Gateway, door: Door) -> None:
        self._gateway, self._door = gateway, door
        self._open: dict[str, _Session] = {}
        gateway.metrics.sockets.set_function(lambda: len(self._open))

    def attach(self, session_id: str, job: ServerJob, account: Account) -> bool:
        """Send the messages of ``job`` on a socket. Returns False if the socket is gone; then its client reconnects and asks."""
        session = self._open.get(session_id)
        if session is None or session.account.name != account.name:
            return False
        return session.add(job, job.messages[0]["number"])

    async def serve(self, websocket: WebSocket, account: Account, job: ServerJob | None, after: int) -> None:
        """Accept a socket and serve it until it closes. With ``job``, send only its messages after ``after``, until it is finished."""
        if len(self._open) >= self._gateway.settings.sockets:
            detail = "The server has reached its maximum number of connections. Try again later."
            await websocket.send_denial_response(JSONResponse({"detail": detail}, 503))
            return
        await websocket.accept()
        session = _Session(websocket, account, self._gateway, self._door)
        self._open[session.id] = session
        feeding = asyncio.create_task(session.feed(None if job is None else (job, after)))
        listening = asyncio.create_task(session.listen())
        try:
            await asyncio.wait([feeding, listening], return_when=asyncio.FIRST_COMPLETED)
        finally:
            del self._open[session.id]
            for task in (feeding, listening):
                task.cancel()
            for failure in await asyncio.gather(feeding, listening, return_exceptions=True):
                if isinstance(failure, Exception):
                    _log.info("a socket was closed after an error", extra={"error": repr(failure)})
            if websocket.client_state is websocket.application_state is WebSocketState.CONNECTED:
                with contextlib.suppress(RuntimeError, TimeoutError, WebSocketDisconnect):
                    await asyncio.wait_for(websocket.close(), 1.0)
