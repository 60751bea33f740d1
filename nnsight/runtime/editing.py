"""Edits: blocks that run in every later trace of a model.

``with model.edit() as edited:`` does not run the model. It stores the block with the present values of its variables. Each trace of
``edited`` runs the stored block before its own blocks. A plain call, ``edited(x)``, runs only the edits.

A model owns its edits. An edit has no strong reference to its model, because such a cycle would keep the weights until the cycle collector
runs. Variables that hold the model are stored as names and bound when the block runs. So :meth:`Edit.of` can move an edit to another model.
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
from ..tracing.frames import variables_of
from .controls import RunControls


@dataclass(eq=False)
class Edit:
    """A stored block. Only :meth:`rebind` changes it."""

    block: Block  # its code
    scope: Scope  # the values that its variables had when it was defined
    module_globals: dict[str, Any]  # the globals of the user's module; those that the block reads, if it was defined at module level
    source: Excerpt  # its text
    target: weakref.ref[Any]  # the model that owns the edit; the block's `as` name is bound to it
    roots: frozenset[str] = frozenset()  # other variables of the block that are bound to this model

    def function(self) -> Callable[[], None]:
        """Return the block as a function for one run, on a copy of its variables."""
        scope, target = self.scope.copy(), self.target()
        for name in self.roots:
            scope.cells[name].cell_contents = target
        bound = (RunControls(), target) if isinstance(self.block.target, tuple) else target
        return self.block.bind(scope, bound, self.module_globals)

    @property
    def variables(self) -> dict[str, Any]:
        """The variables from outside that the block uses, by name."""
        used = {name: self.module_globals[name] for name in self.block.looked_up if name in self.module_globals}
        return {**used, **dict(self.scope.items())}

    def rebind(self, name: str, value: Any) -> None:
        """Let the variable ``name`` of the block be ``value`` in later runs. A variable of the user's module stays as it is."""
        if name in self.scope.cells:
            self.scope.cells[name].cell_contents = value
        else:
            self.module_globals = {**_looked_up(self.block, self.module_globals), name: value}

    def of(self, model: Any) -> Edit:
        """Return a copy of this edit for ``model``."""
        return replace(self, target=weakref.ref(model), scope=self.scope.copy())


class EditingTracer(RunControls, Tracer):
    """The context manager of ``model.edit()``. It adds its block to ``edits``, the list of edits of the model ``edited``.

    ``as edited`` binds the edited model; ``as (tracer, edited)`` also binds a tracer.
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
        """The value that ``as`` binds: the edited model, or this tracer and the model if ``as`` has two names."""
        two = self.info is not None and isinstance(self.info.target, tuple)
        return (self, self._edited) if two else self._edited

    def _close(self) -> None:
        super()._close()
        self._edited = self._source = None
        self._edits = []

    def execute(self, function: Callable[[], None]) -> Any:
        """Store the block as an edit of the model."""
        assert isinstance(function, types.FunctionType)
        assert self.info is not None and self.scope is not None and self._source is not None
        kept = self.scope.copy()
        roots = {name for name, value in kept.items() if value is self._edited}
        for name in roots:
            del kept.cells[name].cell_contents
        target = weakref.ref(self._edited)
        self._edits.append(Edit(self.info, kept, self._globals_of_edit(), self._source, target, frozenset(roots)))

    def _globals_of_edit(self) -> dict[str, Any]:
        """Return the globals of the edit. At module level, the variables of the block are globals, and their current values are kept.

        They do not contain the name of the module, for which dynamo would read the variables from the module.
        """
        assert self.info is not None and self._frame is not None
        given = self.module_globals
        if variables_of(self._frame) is not self._frame.f_globals:
            return given
        return _looked_up(self.info, given)


def _looked_up(block: Block, module_globals: dict[str, Any]) -> dict[str, Any]:
    """Return those of ``module_globals`` that a block reads."""
    return {name: value for name, value in module_globals.items() if name == "__builtins__" or name in block.looked_up}
