"""Errors of a client: refusals of the server, and failures of the connection."""

from __future__ import annotations


class RemoteError(RuntimeError):
    """A server refused a request, failed at a job, or cannot be reached.

    Args:
        message: What happened.
        code: HTTP status code, if the server sent one.
    """

    def __init__(self, message: str, code: int | None = None) -> None:
        super().__init__(message)
        self.code = code


class RemoteConnectionError(RemoteError, ConnectionError):
    """A server cannot be reached. Submitted jobs continue there."""


class RetryableError(Exception):
    """An attempt failed, but another attempt may succeed."""


def refusal(host: str, code: int, detail: str) -> RemoteError | RetryableError:
    """Return the error for an answer with the HTTP status ``code``."""
    if code in (502, 503, 504):
        return RetryableError(detail)
    return RemoteError(f"{host} refused the request: {detail}", code)
