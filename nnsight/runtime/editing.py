"""Edits: blocks that run in every later trace of a model.

``with model.edit() as edited:`` does not run the model. Its block is kept, with the present values of its variables, and each trace of
``edited`` runs it before the blocks of the trace. A plain call, ``edited(x)``, is a run without other blocks.

An edit has no reference to the model that has it, because such a cycle would keep the weights until the cycle collector runs. So a variable
that holds the model is kept as a name, and bound when the block runs. This is also how an edit is given to another model, :meth:`Edit.of`.
"""

from __future__ import annotations

import sys
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ..tracing import Backend, Block, Scope, Tracer
from ..tracing.excerpt import Excerpt
from .controls import RunControls


@dataclass(frozen=True, eq=False)
class Edit:
    """A block that is kept."""

    block: Block  # its code
    scope: Scope  # the values its variables had when it was defined
    module_globals: dict[str, Any]  # the globals of the user's module
    source: Excerpt  # its text
    target: weakref.ref[Any]  # the model that has it, and what the block's `as` name stands for. A weak reference: the edit belongs to it
    roots: frozenset[str] = frozenset()  # variables that stand for that model too

    def function(self) -> Callable[[], None]:
        """Return the block as a function for one run, on variables of its own."""
        scope, target = self.scope.copy(), self.target()
        for name in self.roots:
            scope.cells[name].cell_contents = target
        bound = (RunControls(), target) if isinstance(self.block.target, tuple) else target
        return self.block.bind(scope, bound, self.module_globals)

    def of(self, model: Any) -> Edit:
        """Return this edit as one that ``model`` has."""
        return replace(self, target=weakref.ref(model))


class EditingTracer(RunControls, Tracer):
    """The context manager of ``model.edit()``, which adds its block to ``edits`` of the model ``edited``.

    ``as edited`` binds the edited model, ``as (tracer, edited)`` a tracer as well.
    """

    def __init__(self, edits: list[Edit], edited: Any, backend: Backend | None = None) -> None:
        super().__init__(backend)
        self._edits = edits
        self._edited = edited
        self._source: Excerpt | None = None

    def __enter__(self) -> Any:
        self._source = Excerpt.of(sys._getframe(1))
        return super().__enter__()

    @property
    def target_value(self) -> Any:
        """The edited model; with two names behind ``as``, this tracer and the model."""
        two = self.info is not None and isinstance(self.info.target, tuple)
        return (self, self._edited) if two else self._edited

    def _close(self) -> None:
        super()._close()
        self._edited = self._source = None
        self._edits = []

    def execute(self, function: Callable[[], None]) -> Any:
        """Keep the block."""
        assert isinstance(function, types.FunctionType)
        assert self.info is not None and self.scope is not None and self._source is not None
        kept = self.scope.copy()
        roots = {name for name, value in kept.items() if value is self._edited}
        for name in roots:
            del kept.cells[name].cell_contents
        target = weakref.ref(self._edited)
        self._edits.append(Edit(self.info, kept, self.module_globals, self._source, target, frozenset(roots)))
