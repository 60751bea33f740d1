"""Backends decide where a captured block runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .tracer import Tracer


class Backend:
    """Decides where and when a compiled block runs.

    A subclass overrides ``__call__`` and gets the function from ``super().__call__(tracer)``. It runs the function with
    ``tracer.execute(function)``, or sends the block to another process.
    """

    def __call__(self, tracer: Tracer) -> Any:
        """Return the body of ``tracer`` as a function without arguments."""
        return tracer.compile()


class ExecutionBackend(Backend):
    """Runs the block in this process."""

    def __call__(self, tracer: Tracer) -> Any:
        return tracer.execute(super().__call__(tracer))


#: The backend of blocks for which the user chose none.
LOCAL = ExecutionBackend()
