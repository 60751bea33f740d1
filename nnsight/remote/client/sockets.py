"""One WebSocket of a server, as a client has it, and what can be wrong with an answer.

What the frames are is said in :mod:`~nnsight.remote.protocol`. The server is not trusted: a frame that is not as it should be ends the
socket.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, TypeGuard

from websockets.exceptions import ConnectionClosed
from websockets.protocol import State
from websockets.sync.client import ClientConnection

from ..protocol import JobStatus, Message, is_id, join_packet, split_packet


class RemoteError(RuntimeError):
    """A server refused a request, failed at a job, or cannot be reached.

    Args:
        message: What happened.
        code: Status code of HTTP, if the server gave one.
    """

    def __init__(self, message: str, code: int | None = None) -> None:
        super().__init__(message)
        self.code = code


class RemoteConnectionError(RemoteError, ConnectionError):
    """A server cannot be reached. A job that it has goes on."""


class LostError(Exception):
    """An attempt failed in a way that another may not."""


def refusal(host: str, code: int, detail: str) -> RemoteError | LostError:
    """Return the error to raise for an answer with this status code of HTTP."""
    if code in (502, 503, 504):
        return LostError(detail)
    return RemoteError(f"{host} refused the request: {detail}", code)


class Socket:
    """A WebSocket of a server, see :mod:`~nnsight.remote.protocol`.

    Args:
        host: Address of the server.
        connection: The connection.
        timeout: How long the server may take to begin, and to answer, in seconds.
        serves_many: Whether it is for one job after the other.

    Attributes:
        session_id: What the server calls it.
        takes: How long the payload of a job may be that is submitted through it; 0 if none is.

    Raises:
        LostError: If it does not begin as it should.
    """

    def __init__(self, host: str, connection: ClientConnection, timeout: float, serves_many: bool) -> None:
        self._host, self._connection, self._timeout, self.serves_many = host, connection, timeout, serves_many
        try:
            hello = json.loads(connection.recv(timeout))
            self.session_id = str(hello["session_id"])
            self.takes = int(hello.get("takes", 0))
        except (ConnectionClosed, TimeoutError, ValueError, LookupError, TypeError, AttributeError) as error:
            connection.close()
            raise LostError(f"the WebSocket did not begin as it should: {error}") from error

    @property
    def usable(self) -> bool:
        """Whether it is open, as far as is known here."""
        return self._connection.state is State.OPEN

    def close(self) -> None:
        """End it."""
        self._connection.close()

    def submit(self, envelope: dict[str, Any], payload: bytes) -> list[tuple[Message, bytes | None]]:
        """Submit a job and return the first messages about it; the result comes with the one that says so.

        Raises:
            RemoteError: If the server refuses it.
            LostError: If another attempt may do better.
        """
        try:
            self._connection.send(join_packet(envelope, payload))
            content, result = _packet(self._connection.recv(self._timeout))
        except (ConnectionClosed, TimeoutError) as error:
            raise LostError(f"the WebSocket ended before an answer came: {error}") from error
        if isinstance(content, dict) and isinstance(content.get("code"), int):
            raise refusal(self._host, content["code"], str(content.get("detail"))[:2000])
        return _with_result(content, result)

    def messages(self, job_id: str) -> Iterator[tuple[Message, bytes | None]]:
        """Yield the messages about a job, each with the result that comes along with it.

        Raises:
            ConnectionClosed: If the socket ends.
            LostError: If something else comes than should.
        """
        while True:
            content, result = _packet(self._connection.recv())
            if isinstance(content, dict):  # of a server that sends one message in a frame, and its result in the next
                data, content = content.get("data"), [content]
                if isinstance(data, dict) and data.get("inline") is True:
                    binary = self._connection.recv()
                    result = binary if isinstance(binary, bytes) else b""
            for message, belongs in _with_result(content, result):
                if message["id"] == job_id:
                    yield message, belongs


def _packet(frame: str | bytes) -> tuple[Any, bytes]:
    """Return what is in a frame.

    Raises:
        LostError: If it is no packet.
    """
    try:
        return (json.loads(frame), b"") if isinstance(frame, str) else split_packet(frame)
    except (ValueError, RecursionError) as error:
        raise LostError(f"the server sent a frame that cannot be read: {error}") from error


def _with_result(content: Any, result: bytes) -> list[tuple[Message, bytes | None]]:
    """Return messages, of which the last has the result if it says that it has one.

    Raises:
        LostError: If they are none.
    """
    if not isinstance(content, list) or not content or not all(map(is_message, content)):
        raise LostError("the server sent a frame that has no messages")
    data = content[-1]["data"]
    inline = isinstance(data, dict) and data.get("inline") is True
    return [*((message, None) for message in content[:-1]), (content[-1], result if inline else None)]


def is_message(message: Any) -> TypeGuard[Message]:
    """Whether ``message`` is one, as far as a client relies on it."""
    return (
        isinstance(message, dict)
        and is_id(message.get("id"))
        and message.get("status") in list(JobStatus)
        and isinstance(message.get("description"), str)
        and isinstance(message.get("number"), int)
        and "data" in message
    )
