"""The client side of a WebSocket.

:mod:`~nnsight.remote.protocol` defines the frames. The client does not trust the server: it closes the socket after a malformed frame.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, TypeGuard

from websockets.exceptions import ConnectionClosed
from websockets.protocol import State
from websockets.sync.client import ClientConnection

from ..protocol import JobStatus, Message, is_id, join_packet, split_packet
from .errors import RetryableError, refusal


class Socket:
    """A WebSocket for one job, or for several jobs one after the other.

    ``timeout`` is the maximum wait for the first frame, and for the answer to a submission, in seconds.

    Attributes:
        session_id: The server's name of the WebSocket.
        takes: Maximum size of a payload that may be submitted through it, in bytes; 0 if the server accepts no submissions.
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
            raise RetryableError(f"the first frame of the WebSocket is missing or malformed: {error}") from error

    @property
    def usable(self) -> bool:
        """Whether the connection is open, as far as this side knows."""
        return self._connection.state is State.OPEN

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def submit(self, envelope: dict[str, Any], payload: bytes) -> list[tuple[Message, bytes | None]]:
        """Submit a job and return its first messages, each with its result or ``None``. Raises :func:`refusal` if the server refuses."""
        try:
            self._connection.send(join_packet(envelope, payload))
            while True:
                content, result = _packet(self._connection.recv(self._timeout))
                if isinstance(content, dict) and isinstance(content.get("code"), int):
                    raise refusal(self._host, content["code"], str(content.get("detail"))[:2000])
                found = _with_result(content, result)
                if found[0][0]["id"] != self._latest:  # skip repeated messages of the previous job, if it was posted twice
                    return found
        except (ConnectionClosed, TimeoutError) as error:
            raise RetryableError(f"the WebSocket ended without an answer: {error}") from error

    def messages(self, job_id: str) -> Iterator[tuple[Message, bytes | None]]:
        """Yield the messages of a job, each with its result or ``None``.

        Raises:
            ConnectionClosed: If the socket ends.
            RetryableError: If a frame is malformed.
        """
        self._latest = job_id
        while True:
            for message, result in _with_result(*_packet(self._connection.recv())):
                if message["id"] == job_id:
                    yield message, result


def _packet(frame: str | bytes) -> tuple[Any, bytes]:
    """Return content and bytes of a frame. Raises a :class:`RetryableError` if it is not a packet."""
    try:
        return split_packet(frame if isinstance(frame, bytes) else b"")
    except ValueError as error:
        raise RetryableError(f"the server sent a malformed frame: {error}") from error


def _with_result(content: Any, result: bytes) -> list[tuple[Message, bytes | None]]:
    """Return pairs of message and result or ``None``. Only the last message can have a result. Raises :class:`RetryableError` otherwise."""
    if not isinstance(content, list) or not content or not all(map(is_message, content)):
        raise RetryableError("the server sent a frame without messages")
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
