"""State of tracing that belongs to no single tracer: what is saved, and what was compiled.

A backend that runs a block brackets that with :meth:`Globals.enter` and :meth:`Globals.exit`, so that ``.save()`` has a
table to mark things in. Within the ``with`` statement the tracer has opened it already, and the two only nest; they matter where
a block runs at another time or in another thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar, Token
from typing import Any

from ...tracing import block, saving, source
from ...util import Object

#: For each entering that is still open, how to undo it; ``None`` where a table was open already.
_entered: ContextVar[tuple[Token[Any] | None, ...]] = ContextVar("nnsight_entered", default=())


class _TracingCache:
    """What was made of the source of blocks, once for each place in the code."""

    def clear(self) -> None:
        """Forget it. The next trace at each place reads and compiles its block anew."""
        block._blocks.clear()
        source._trees.clear()


class _Globals:
    """The state of this thread and context."""

    cache = _TracingCache()

    @property
    def saves(self) -> Mapping[int, Any]:
        """The saved objects by identity, so that ``id(value) in Globals.saves``; empty outside of a trace."""
        return saving.saves.get() or {}

    def enter(self) -> None:
        """Open a table of saves, unless one is open, and offer ``.save()`` as :attr:`CONFIG.APP.PYMOUNT` says. Nests."""
        saving.mount()
        _entered.set((*_entered.get(), saving.saves.set({}) if saving.saves.get() is None else None))

    def exit(self) -> None:
        """Undo the latest :meth:`enter`.

        Raises:
            ValueError: If there is none.
        """
        if not _entered.get():
            raise ValueError("Globals.exit() without Globals.enter(): call both, in this order, in the same thread.")
        *outer, token = _entered.get()
        _entered.set(tuple(outer))
        if token is not None:
            saving.saves.reset(token)


Globals = _Globals()

__all__ = ["Globals", "Object"]
