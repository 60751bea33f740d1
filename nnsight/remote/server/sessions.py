"""WebSockets: each tells one client about its jobs.

A socket says its ``session_id`` first; jobs submitted with that id are told about on it. A client that lost its socket opens another
with ``?job=...&after=...`` and goes on after the message it saw last. Each job of a socket has its own reader (:meth:`Job.follow`), so a
client that reads slowly holds up itself only. One that does not read at all is cut off after a while.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import uuid

from starlette.responses import JSONResponse
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from ..protocol import JobStatus, Message
from .gateway import Gateway
from .jobs import Job
from .keys import Account
from .spool import SHORT

_log = logging.getLogger("nnsight.remote.server")


class _Session:
    """One socket."""

    def __init__(self, websocket: WebSocket, account: Account | None, gateway: Gateway) -> None:
        self.id = str(uuid.uuid4())
        self.account = account
        self._websocket = websocket
        self._gateway = gateway
        self._jobs: asyncio.Queue[tuple[Job, int]] = asyncio.Queue()
        self._sending = asyncio.Lock()

    def add(self, job: Job, after: int) -> None:
        self._jobs.put_nowait((job, after))

    async def feed(self, only: bool) -> None:
        """Tell about the jobs of the session, or ``only`` about its first."""
        settings = self._gateway.settings
        await self._send({"session_id": self.id})
        first = await asyncio.wait_for(self._jobs.get(), settings.idle if self.account is None else None)
        if only:
            await self._tell(*first)
            return
        async with asyncio.TaskGroup() as readers:
            readers.create_task(self._tell(*first))
            while True:
                readers.create_task(self._tell(*await self._jobs.get()))

    async def listen(self) -> None:
        """Return when the client goes away. It has nothing to say."""
        try:
            while True:
                await self._websocket.receive_bytes()
        except (WebSocketDisconnect, KeyError):
            return

    async def _tell(self, job: Job, after: int) -> None:
        async for message in job.follow(after):
            size = job.result_size
            if (
                message["status"] == JobStatus.COMPLETED.value
                and size is not None
                and size <= self._gateway.settings.inline
            ):
                read = functools.partial(self._gateway.spool.result, job)
                result = read() if size < SHORT else await asyncio.to_thread(read)
                await self._send(Message(**{**message, "data": {**message["data"], "inline": True}}), result)
            else:
                await self._send(message)

    async def _send(self, message: object, binary: bytes | None = None) -> None:
        """Send a message, and what belongs to it right behind."""
        async with self._sending, asyncio.timeout(self._gateway.settings.send):
            await self._websocket.send_json(message)
            if binary is not None:
                await self._websocket.send_bytes(binary)


class Sessions:
    """All open sockets.

    Args:
        gateway: Has the jobs.
    """

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._open: dict[str, _Session] = {}

    def attach(self, session_id: str, job: Job, account: Account) -> bool:
        """Tell about ``job`` on a socket, and return whether there is one. If it is gone, its client will come back and ask."""
        session = self._open.get(session_id)
        if session is None or (session.account is not None and session.account.name != account.name):
            return False
        session.account = account
        session.add(job, job.messages[0]["number"])
        return True

    async def serve(self, websocket: WebSocket, account: Account | None, job: Job | None, after: int) -> None:
        """Accept a socket and tell about jobs on it until it closes; for ``job``, until that is finished."""
        if len(self._open) >= self._gateway.settings.sockets:
            detail = "The server has as many connections as it can take. Try again later."
            await websocket.send_denial_response(JSONResponse({"detail": detail}, 503))
            return
        await websocket.accept()
        session = _Session(websocket, account, self._gateway)
        self._open[session.id] = session
        self._gateway.metrics.sockets.set(len(self._open))
        if job is not None:
            session.add(job, after)
        feeding = asyncio.create_task(session.feed(only=job is not None))
        listening = asyncio.create_task(session.listen())
        try:
            await asyncio.wait([feeding, listening], return_when=asyncio.FIRST_COMPLETED)
        finally:
            del self._open[session.id]
            self._gateway.metrics.sockets.set(len(self._open))
            for task in (feeding, listening):
                task.cancel()
            failure, _ = await asyncio.gather(feeding, listening, return_exceptions=True)
            if isinstance(failure, Exception):
                _log.info("a socket was cut off", extra={"error": repr(failure)})
            if websocket.client_state is websocket.application_state is WebSocketState.CONNECTED:
                with contextlib.suppress(RuntimeError, TimeoutError, WebSocketDisconnect):
                    await asyncio.wait_for(websocket.close(), 1.0)
