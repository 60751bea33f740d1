"""Results in the user's variables.

After a recording the variables of the block hold fakes, also inside of lists and objects of the user. When results arrive, lists
and dicts are filled in place, and names get the tensors. Values that a loop never computed because it ended early are left out
of lists; names for them stay unbound.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ...runtime.batched_containers import is_batched_container, on_tensors
from ...runtime.cache import Cache
from ...tracing.saving import save, saves
from ..format.payload import Job, encode
from ..format.results import unpack_results
from ..format.trees import ABSENT, NONE, leaves


@dataclass
class Recorded:
    """A recorded block: the job to run, and the saved values to fill with its results, which have fakes for tensors.

    ``known`` has each fake with its node and output, by its identity; a fake that is alive keeps its identity. ``fixed`` says why names
    are no inputs of the program. ``arguments`` are those of the model in the latest run, and ``tensors`` what the program takes by name.
    """

    job: Job
    values: dict[str, Any]
    known: dict[int, tuple[torch.Tensor, int, int]]
    scope: Any
    fixed: dict[str, str] = field(default_factory=dict)
    arguments: tuple[Any, dict[str, Any]] = ((), {})
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    _found: dict[tuple[int, int], Any] = field(default_factory=dict)
    _done: dict[int, Any] = field(default_factory=dict)

    def payload(self) -> bytes:
        """Return the job as bytes."""
        return encode(self.job)

    def bind(self, results: bytes) -> dict[str, Any]:
        """Give the user's saved names their values, from a container of results; return them by name.

        Lists and dicts that the user saved are filled in place. Other names are bound in the block's scope, unless the ``with`` statement
        has ended, as it has for a job that was not waited for.
        """
        return self.fill(*unpack_results(results))

    def fill(self, found: dict[str, Any], tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
        """As :meth:`bind`, from the trees of the saved values and the tensors in them."""
        for name, tree in self.job.saves.items():
            for (kind, content), (other, result) in zip(leaves(tree), leaves(found.get(name)), strict=False):
                if kind == "ref":
                    missing = None if result == NONE else ABSENT
                    self._found[content[0], content[1]] = tensors[result] if other == "tensor" else missing
        bound = {}
        for name, value in self.values.items():
            new = self._filled(value)
            if new is not ABSENT:
                bound[name] = new
            self._set(name, new)
        return bound

    def forget(self) -> None:
        """Leave the saved names unbound: no results will come."""
        for name in self.values:
            self._set(name, ABSENT)

    def _filled(self, value: Any) -> Any:
        """Return ``value`` with results in place of fakes."""
        if isinstance(value, torch.Tensor):
            known = self.known.get(id(value))
            return value if known is None else self._found.get(known[1:], value)
        if id(value) in self._done:
            return self._done[id(value)]
        if isinstance(value, list):
            self._done[id(value)] = value
            value[:] = [new for item in value if (new := self._filled(item)) is not ABSENT]
        elif isinstance(value, dict):
            self._done[id(value)] = value
            for key, item in list(value.items()):
                new = self._filled(item)
                if new is ABSENT:
                    del value[key]
                elif new is not item:
                    value[key] = new
        elif isinstance(value, tuple):
            items = [new for item in value if (new := self._filled(item)) is not ABSENT]
            if any(new is not old for new, old in zip(items, value, strict=False)) or len(items) != len(value):
                return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        elif isinstance(value, Cache):
            for entry in value._entries.values():
                for values in entry._values.values():
                    filled = [pytree.tree_map(self._activation, item, is_leaf=is_batched_container) for item in values]
                    values[:] = [item for item in filled if item is not ABSENT]
        elif is_batched_container(value):
            return on_tensors(value, lambda _, tensor: self._filled(tensor))
        return value

    def _activation(self, leaf: Any) -> Any:
        """Return a leaf of a cache of activations; key-value caches stay where the model is."""
        return None if is_batched_container(leaf) else self._filled(leaf)

    def _set(self, name: str, value: Any) -> None:
        """Bind a name of the block, if the block is still there."""
        cell = None if self.scope is None else self.scope.cells.get(name)
        if cell is None or saves.get() is None:
            return
        if value is ABSENT:
            del cell.cell_contents
        else:
            cell.cell_contents = save(value)
