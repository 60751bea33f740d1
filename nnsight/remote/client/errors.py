"""The errors of a client, which come from the server or from the way there."""

from __future__ import annotations


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
    """A server cannot be reached. Its jobs go on."""


class LostError(Exception):
    """An attempt failed, and another one may succeed."""


def refusal(host: str, code: int, detail: str) -> RemoteError | LostError:
    """Return the error for an answer with this status code of HTTP."""
    if code in (502, 503, 504):
        return LostError(detail)
    return RemoteError(f"{host} refused the request: {detail}", code)
