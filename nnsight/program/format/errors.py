"""Errors of remote execution: what was sent is wrong, what was sent fails, or what was written cannot be sent."""

from __future__ import annotations


class InvalidProgramError(ValueError):
    """A payload is malformed, uses something that is denied, or exceeds a limit. The message is the reason.

    Raised before the model is touched.
    """


class ExecutionFailedError(RuntimeError):
    """A valid program failed while it ran. The message has the location and, where the client gave it, its line."""


class NotExpressibleError(ValueError):
    """A block needs Python at a place where only operations on tensors can be sent.

    Raised on the client, before anything is sent. The message has the user's file and line and says what to write instead.
    """


def require(met: bool, message: str) -> None:
    """Raise :class:`InvalidProgramError` with ``message`` unless a condition is met."""
    if not met:
        raise InvalidProgramError(message)
