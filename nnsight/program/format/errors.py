"""Errors of programs: a payload is invalid, a program fails while it runs, or a block cannot be a program."""

from __future__ import annotations


class InvalidProgramError(ValueError):
    """A payload is malformed, uses something that is denied, or exceeds a limit. The message gives the reason.

    Raised before the model is touched.
    """


class ExecutionFailedError(RuntimeError):
    """A valid program failed while it ran. The message names the location, and the line of the block if the client sent it."""


class NotExpressibleError(ValueError):
    """A block needs Python at a point where a program can contain only operations on tensors.

    Raised on the client, before the program is sent. The message names the user's file and line, and an alternative.
    """


def require(met: bool, message: str) -> None:
    """Raise an :class:`InvalidProgramError` with ``message`` unless the condition ``met`` holds."""
    if not met:
        raise InvalidProgramError(message)
