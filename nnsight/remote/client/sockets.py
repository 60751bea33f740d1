"""The client's side of a WebSocket.

:mod:`~nnsight.remote.protocol` defines the frames. The server is not trusted: a malformed frame ends the socket.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, TypeGuard

from websockets.exceptions import ConnectionClosed
from websockets.protocol import State
from websockets.sync.client import ClientConnection

from ..protocol import JobStatus, Message, is_id, join_packet, split_packet
from .errors import LostError, refusal


class Socket:
    """A WebSocket for one job, or for several, one after the other; ``timeout`` is for the first frame, and for an answer.

    Attributes:
        session_id: Its name at the server.
        takes: Most bytes of a payload that is submitted through it; 0 if none is.
    """

    def __init__(self, host: str, connection: ClientConnection, timeout: float, serves_many: bool) -> None:
        self._host, self._connection, self._timeout, self.serves_many = host, connection, timeout, serves_many
        self._latest = ""  # the id of the latest job
        try:
            hello = json.loads(connection.recv(timeout))
            self.session_id = str(hello["session_id"])
            self.takes = int(hello.get("takes", 0))
        except (ConnectionClosed, TimeoutError, ValueError, LookupError, TypeError, AttributeError) as error:
            connection.close()
            raise LostError(f"the WebSocket did not begin as it should: {error}") from error

    @property
    def usable(self) -> bool:
        """Whether it seems to be open."""
        return self._connection.state is State.OPEN

    def close(self) -> None:
        """End it."""
        self._connection.close()

    def submit(self, envelope: dict[str, Any], payload: bytes) -> list[tuple[Message, bytes | None]]:
        """Submit a job and return its first messages, each with the result that comes along; raise :func:`refusal` if there are none."""
        try:
            self._connection.send(join_packet(envelope, payload))
            while True:
                content, result = _packet(self._connection.recv(self._timeout))
                if isinstance(content, dict) and isinstance(content.get("code"), int):
                    raise refusal(self._host, content["code"], str(content.get("detail"))[:2000])
                found = _with_result(content, result)
                if found[0][0]["id"] != self._latest:  # the messages of a job that was posted twice are sent twice
                    return found
        except (ConnectionClosed, TimeoutError) as error:
            raise LostError(f"the WebSocket ended before an answer came: {error}") from error

    def messages(self, job_id: str) -> Iterator[tuple[Message, bytes | None]]:
        """Yield the messages of a job, each with the result that comes along.

        Raises:
            ConnectionClosed: If the socket ends.
            LostError: If a frame is malformed.
        """
        self._latest = job_id
        while True:
            for message, result in _with_result(*_packet(self._connection.recv())):
                if message["id"] == job_id:
                    yield message, result


def _packet(frame: str | bytes) -> tuple[Any, bytes]:
    """Return the content of a frame; raise a :class:`LostError` if it is no packet."""
    try:
        return split_packet(frame if isinstance(frame, bytes) else b"")
    except ValueError as error:
        raise LostError(f"the server sent a frame that cannot be read: {error}") from error


def _with_result(content: Any, result: bytes) -> list[tuple[Message, bytes | None]]:
    """Return messages with their results: only the last can have one, and then says so. Raise a :class:`LostError` for anything else."""
    if not isinstance(content, list) or not content or not all(map(is_message, content)):
        raise LostError("the server sent a frame that has no messages")
    data = content[-1]["data"]
    inline = isinstance(data, dict) and data.get("inline") is True
    return [*((message, None) for message in content[:-1]), (content[-1], result if inline else None)]


def is_message(message: Any) -> TypeGuard[Message]:
    """Whether ``message`` has the fields that a client uses."""
    return (
        isinstance(message, dict)
        and is_id(message.get("id"))
        and message.get("status") in list(JobStatus)
        and isinstance(message.get("description"), str)
        and isinstance(message.get("number"), int)
        and "data" in message
    )
