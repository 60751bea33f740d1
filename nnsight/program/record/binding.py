"""Binding results to the user's variables.

After a recording, the variables of the block hold fake tensors, also inside lists and objects of the user. When the results arrive, the
fake tensors become the results, wherever they are. Torch refuses this for some of them, and gradients need the result itself: for these,
lists and dicts are filled in place, and names are bound to the results. A loop that ended early has not computed some values. Lists do not
contain such values, and names for them stay unbound.
"""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from ...runtime.batched_containers import is_batched_container, on_tensors
from ...runtime.cache import Cache
from ...tracing.saving import save, saves
from ..format.payload import Job, encode
from ..format.results import unpack_results
from ..format.trees import ABSENT, NONE, leaves

#: References to a fake tensor that only :attr:`Recorded.known` holds: by its tuple, a variable, and the argument of ``sys.getrefcount``.
_OWN_REFERENCES = 3


@dataclass
class Recorded:
    """A recorded block: the job to run, and the saved ``values``, whose fake tensors are replaced by results.

    ``known`` has each fake tensor with its node and output, by its ``id``, and keeps it alive. ``scope`` has the variables of the block.
    ``fixed`` has the reasons why names are not inputs of the program. ``arguments`` are the arguments of the model in the latest run, and
    ``tensors`` are the tensors that the program takes, by name. ``facts`` are those of :func:`.facts_of` the model that was recorded.
    """

    job: Job
    values: dict[str, Any]
    known: dict[int, tuple[torch.Tensor, int, int]]
    scope: Any
    fixed: dict[str, str] = field(default_factory=dict)
    arguments: tuple[Any, dict[str, Any]] = ((), {})
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)
    kept: frozenset[int] = frozenset()  # the memory of the fake model, whose tensors must not become others
    _found: dict[tuple[int, int], Any] = field(default_factory=dict)
    _done: dict[int, Any] = field(default_factory=dict)

    def payload(self) -> bytes:
        """Return the job as bytes."""
        return encode(self.job)

    def bind(self, results: bytes) -> dict[str, Any]:
        """Bind the user's saved names to the values in a container of results, and return these values by name.

        Lists and dicts that the user saved are filled in place. Other names are bound in the block's scope. They are not bound if the
        ``with`` statement has ended, which is the case if the trace did not wait for its job.
        """
        return self.fill(*unpack_results(results))

    def fill(self, found: dict[str, Any], tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
        """Do the same as :meth:`bind`, with the trees of the saved values and their tensors."""
        for name, tree in self.job.saves.items():
            for (kind, content), (other, result) in zip(leaves(tree), leaves(found.get(name)), strict=False):
                if kind == "ref":
                    missing = None if result == NONE else ABSENT
                    self._found[content[0], content[1]] = tensors[result] if other == "tensor" else missing
        self._fill_fakes()
        bound = {}
        for name, value in self.values.items():
            new = self._filled(value)
            if new is not ABSENT:
                bound[name] = new
            self._set(name, new)
        return bound

    @property
    def program(self) -> Job:
        """The job with the values that have names only."""
        return replace(self.job, saves={name: tree for name, tree in self.job.saves.items() if name in self.values})

    def forget(self) -> None:
        """Unbind the saved names, because no results will arrive."""
        for name in self.values:
            self._set(name, ABSENT)

    def _filled(self, value: Any) -> Any:
        """Return ``value`` with results in place of fake tensors."""
        if id(value) in self._done:
            return self._done[id(value)]
        if isinstance(value, torch.Tensor):
            known = self.known.get(id(value))
            return value if known is None else self._found.get(known[1:], value)
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
                if hasattr(value, "n_sequence_fields") and len(items) == len(value):  # such as the result of `hidden.max(-1)`
                    return type(value)(items)
                return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        elif isinstance(value, Cache):
            for entry in value._entries.values():
                for values in entry._values.values():
                    filled = [pytree.tree_map(self._activation, item, is_leaf=is_batched_container) for item in values]
                    values[:] = [item for item in filled if item is not ABSENT]
        elif is_batched_container(value):
            return on_tensors(value, lambda _, tensor: self._filled(tensor))
        return value

    def _fill_fakes(self) -> None:
        """Turn the fake tensors that the user holds into their results, wherever they are.

        A view refers to its base, and torch swaps no tensor that others refer to. So views, which are newer, come first.
        """
        for key in [*self.known]:
            fake = self.known[key][0]
            if sys.getrefcount(fake) <= _OWN_REFERENCES:  # nobody else has it
                del self.known[key]
        for fake, node, output in reversed([*self.known.values()]):
            real = self._found.get((node, output))
            if isinstance(fake, FakeTensor) and isinstance(real, torch.Tensor) and fake.untyped_storage()._cdata not in self.kept:
                memo = fake.fake_mode.fake_tensor_converter.meta_converter.tensor_memo  # has weak references, which torch refuses
                for known in [known for known, value in memo.items() if value is fake]:
                    del memo[known]
                with contextlib.suppress(RuntimeError):
                    torch.utils.swap_tensors(fake, real.view_as(real) if real.requires_grad else real.detach())
                    self._done[id(fake)] = real if real.requires_grad else fake

    def _activation(self, leaf: Any) -> Any:
        """Return the result for a leaf of a cache of activations. Key-value caches are not sent, so they become ``None``."""
        return None if is_batched_container(leaf) else self._filled(leaf)

    def _set(self, name: str, value: Any) -> None:
        """Bind a name in the scope of the block, unless the ``with`` statement has ended."""
        cell = None if self.scope is None else self.scope.cells.get(name)
        if cell is None or saves.get() is None:
            return
        if value is ABSENT:
            del cell.cell_contents
        else:
            cell.cell_contents = save(value)

