"""State that all tracers share: the table of saved values, and the cache of compiled blocks.

A backend that runs a block calls :meth:`Globals.enter` before and :meth:`Globals.exit` after it, so that ``.save()`` has a table of saved
values. Within the ``with`` statement, the tracer has already opened the table, and the calls have no effect. They are needed when a
block runs at another time or in another thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar, Token
from typing import Any

from ...tracing import block, saving, source
from ...util import Object

#: For each open call of :meth:`Globals.enter`, the token that undoes it; ``None`` if a table was open already.
_entered: ContextVar[tuple[Token[Any] | None, ...]] = ContextVar("nnsight_entered", default=())


class _TracingCache:
    """The cache of syntax trees and compiled blocks, by place in the code."""

    def clear(self) -> None:
        """Clear the cache. The next trace at each place reads and compiles its block again."""
        block._blocks.clear()
        source._trees.clear()


class _Globals:
    """The state of tracing in this thread and context."""

    cache = _TracingCache()

    @property
    def saves(self) -> Mapping[int, Any]:
        """The saved objects by ``id``, so that ``id(value) in Globals.saves`` is a test; empty outside of a trace."""
        return saving.saves.get() or {}

    def enter(self) -> None:
        """Open a table of saved values, unless one is open, and mount ``.save()`` if :attr:`CONFIG.APP.PYMOUNT` is set. Calls can nest."""
        saving.mount()
        _entered.set((*_entered.get(), saving.saves.set({}) if saving.saves.get() is None else None))

    def exit(self) -> None:
        """Undo the latest :meth:`enter`.

        Raises:
            ValueError: If there is no open :meth:`enter` in this thread and context.
        """
        if not _entered.get():
            raise ValueError("Globals.exit() without Globals.enter(): call both, in this order, in the same thread.")
        *outer, token = _entered.get()
        _entered.set(tuple(outer))
        if token is not None:
            saving.saves.reset(token)


Globals = _Globals()

__all__ = ["Globals", "Object"]
