"""Where a captured block runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .tracer import Tracer


class Backend:
    """Decides what happens to a compiled block.

    A subclass overrides ``__call__``, gets the function from ``super().__call__(tracer)`` and either runs it
    with ``tracer.execute(function)`` or sends it elsewhere.
    """

    def __call__(self, tracer: Tracer) -> Any:
        """Return the body of ``tracer`` as a function without arguments."""
        return tracer.compile()


class ExecutionBackend(Backend):
    """Runs the block in this process."""

    def __call__(self, tracer: Tracer) -> Any:
        return tracer.execute(super().__call__(tracer))


#: Where blocks run that were given no backend.
HERE = ExecutionBackend()
