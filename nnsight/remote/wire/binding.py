"""Results in the user's variables.

On the client, the block has left its variables with fakes in them: the very tensors, lists and objects that the user will look
at. When results arrive, lists and dicts are filled in place, and names get the tensors. What a loop that ended early never
computed is left out of lists, and names for it stay unbound.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from ...runtime.cache import Cache
from ...runtime.carriers import is_carrier, on_tensors
from ...tracing.saving import save, saves
from .results import unpack_results
from .trees import ABSENT, NONE


class Binding:
    """Where the results of a job go.

    Args:
        values: What the user saved, by name, with fakes for tensors.
        fakes: The fakes by identity: kept, so that their identities stay theirs.
        references: Node and output that each fake stands for, by its identity.
        trees: The saves of the job.
        scope: The variables of the block.
    """

    def __init__(
        self,
        values: dict[str, Any],
        fakes: dict[int, torch.Tensor],
        references: dict[int, tuple[int, int]],
        trees: dict[str, Any],
        scope: Any,
    ) -> None:
        self.values, self.fakes, self.references, self._trees, self._scope = values, fakes, references, trees, scope
        self._found: dict[tuple[int, int], Any] = {}
        self._done: dict[int, Any] = {}

    def bind(self, results: bytes) -> dict[str, Any]:
        """Fill the user's variables; return what they are by name."""
        found, tensors = unpack_results(results)
        for name, tree in self._trees.items():
            self._match(tree, found.get(name), tensors)
        bound = {}
        for name, value in self.values.items():
            new = self._filled(value)
            if new is not ABSENT:
                bound[name] = new
            self._set(name, new)
        return bound

    def forget(self) -> None:
        """Leave the names that were saved unbound: nothing will come."""
        for name in self.values:
            self._set(name, ABSENT)

    def _match(self, sent: Any, received: Any, tensors: dict[str, torch.Tensor]) -> None:
        """Note which tensor stands where a reference was sent."""
        if type(sent) is not dict or type(received) is not dict:
            return
        (kind, content), (other, result) = *sent.items(), *received.items()
        if kind == "ref":
            missing = None if result == NONE else ABSENT
            self._found[content[0], content[1]] = tensors[result] if other == "tensor" else missing
        elif kind in ("list", "tuple") and other == kind:
            for item, made in zip(content, result, strict=False):
                self._match(item, made, tensors)
        elif kind == "dict" and other == kind:
            for (_, item), (_, made) in zip(content, result, strict=False):
                self._match(item, made, tensors)

    def _filled(self, value: Any) -> Any:
        """Return ``value`` with results in place of fakes."""
        if isinstance(value, torch.Tensor):
            reference = self.references.get(id(value))
            return value if reference is None else self._found.get(reference, value)
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
                    filled = [pytree.tree_map(self._activation, item, is_leaf=is_carrier) for item in values]
                    values[:] = [item for item in filled if item is not ABSENT]
        elif is_carrier(value):
            return on_tensors(value, lambda _, tensor: self._filled(tensor))
        return value

    def _activation(self, leaf: Any) -> Any:
        """Return a leaf of what a cache of activations keeps; key-value caches stay where the model is."""
        return None if is_carrier(leaf) else self._filled(leaf)

    def _set(self, name: str, value: Any) -> None:
        """Bind a name of the block, if the block is still there."""
        cell = None if self._scope is None else self._scope.cells.get(name)
        if cell is None or saves.get() is None:
            return
        if value is ABSENT:
            del cell.cell_contents
        else:
            cell.cell_contents = save(value)
