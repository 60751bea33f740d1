"""Edits: blocks that run in every later trace of a model.

``with model.edit() as edited:`` does not run the model. Its block is kept, with the values its variables have now, and each
trace of ``edited`` runs it before the blocks of the trace, as if it stood at the top of every one of them.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..tracing import Block, Scope, Tracer


@dataclass(frozen=True, eq=False)
class Edit:
    """A block that is kept.

    Attributes:
        block: Its code.
        scope: The values its variables had when it was defined.
        module_globals: The globals of the user's module.
        target: What the block's ``as`` name stands for. A weak reference: the edit belongs to it.
    """

    block: Block
    scope: Scope
    module_globals: dict[str, Any]
    target: weakref.ref[Any]

    def function(self) -> Callable[[], None]:
        """Return the block as a function for one run, on variables of its own."""
        return self.block.bind(self.scope.copy(), self.target(), self.module_globals)

    def __deepcopy__(self, memo: dict[int, Any]) -> Edit:
        """An edit names locations, which a copy of the model has too."""
        return self


class EditingTracer(Tracer):
    """The context manager of ``model.edit()``.

    Args:
        edits: Where the block goes.
        edited: The model that has the edit; what ``as`` binds.
    """

    def __init__(self, edits: list[Edit], edited: Any) -> None:
        super().__init__()
        self._edits = edits
        self._edited = edited

    @property
    def target_value(self) -> Any:
        """The edited model."""
        return self._edited

    def _close(self) -> None:
        super()._close()
        self._edited = None
        self._edits = []

    def execute(self, function: Callable[[], None]) -> Any:
        """Keep the block."""
        assert isinstance(function, types.FunctionType)
        assert self.info is not None and self.scope is not None and self._frame is not None
        self._edits.append(Edit(self.info, self.scope.copy(), self._frame.f_globals, weakref.ref(self._edited)))
