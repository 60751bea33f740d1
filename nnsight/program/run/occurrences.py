"""A cache of the values at the locations of a model on fake tensors, for later runs with inputs of the same sizes.

A block that only reads and edits in place changes no size. So the next run with such inputs has fake tensors of the same sizes at the same
locations, and they are offered to the blocks without running the model. The fake tensors are new ones each time (:class:`FreshFakes`),
because each of them stands for one value of one run, also in lists of the user that wait for results. If a block replaces a value, skips a
module, or asks for a value that cannot be kept, the model runs. It gets the values that the blocks have seen, up to their present location.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import operator
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from ...runtime.batched_containers import is_batched_container, on_tensors
from ...runtime.interleaver import Everywhere, Interleaver, active_run
from ..format.errors import InvalidProgramError
from ..format.trees import is_text

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, types.FunctionType)


def tensors_at(value: Any) -> list[Any]:
    """Return the leaves of a value at a location, in the order that client and server share. The tensors of caches are leaves, too."""
    return [leaf for _, leaf in places_of(value)]


def places_of(value: Any) -> list[tuple[tuple[int, int | None], Any]]:
    """Return the places and leaves of a value. A place is the number of a leaf, and the number of a tensor inside if that is a cache."""
    found: list[tuple[tuple[int, int | None], Any]] = []
    for number, leaf in enumerate(pytree.tree_leaves(value, is_leaf=is_batched_container)):
        if not is_batched_container(leaf):
            found.append(((number, None), leaf))
            continue
        inside: list[torch.Tensor] = []
        on_tensors(leaf, lambda _, tensor, inside=inside: inside.append(tensor) or tensor)  # type: ignore[misc]
        found += [((number, place), tensor) for place, tensor in enumerate(inside)]
    return found


def leaf_at(value: Any, node: dict[str, Any]) -> Any:
    """Return the leaf of a value that a node names. Raise an :class:`InvalidProgramError` if there is none, or if lists do not fit."""
    if "lists" in node and lists_in(value[node["key"]] if "key" in node else value) != node["lists"]:
        raise InvalidProgramError(
            "a list in the value there has another length than in the recording, and the program depends on its length. Record the program "
            "for inputs with this length"
        )
    leaves = pytree.tree_leaves(value, is_leaf=is_batched_container)
    number = number_of(value, node)
    if number < len(leaves) and "inside" in node:
        cache = _returned(leaves[number])
        leaves, number = tensors_at(cache) if is_batched_container(cache) else [], node["inside"]
    if number >= len(leaves):
        raise InvalidProgramError(f"the value there has no tensor number {number}")
    return leaves[number]


def _returned(leaf: Any) -> Any:
    """Return a leaf. If it is a deferred output of a compiled model, such as a cache, wait until the model returns it."""
    wait = getattr(type(leaf), "_object", None)
    return leaf if wait is None else wait(leaf)


def keys_of(value: Any) -> list[tuple[str, int]]:
    """Return, for each leaf of a dict, its key and the number of the first leaf at that key. Return an empty list for another value."""
    found: list[tuple[str, int]] = []
    if isinstance(value, dict) and all(map(is_text, value)):
        for key, item in value.items():
            found += [(key, len(found))] * len(pytree.tree_leaves(item, is_leaf=is_batched_container))
    return found


def lists_in(value: Any) -> list[int]:
    """Return the lengths of all lists in a value, in order."""
    found: list[int] = []

    def visit(spec: Any) -> None:
        if spec.type is list:
            found.append(spec.num_children)
        for child in spec.children():
            visit(child)

    visit(structure_of(value))
    return found


def number_of(value: Any, node: dict[str, Any]) -> int:
    """Return the number of the leaf that a node names. In a dict, nodes count from a key, because other inputs can have other keys."""
    number: int = node["leaf"]
    if "key" not in node:
        return number
    first = next((first for key, first in keys_of(value) if key == node["key"]), None)
    if first is None:
        raise InvalidProgramError(f"the value there has no `{node['key']}`")
    return first + number


def with_leaf(value: Any, node: dict[str, Any], new: torch.Tensor) -> Any:
    """Return ``value`` with ``new`` in place of the leaf that ``node`` names."""
    leaves, structure = pytree.tree_flatten(value, is_leaf=is_batched_container)
    leaves[number_of(value, node)] = new
    return pytree.tree_unflatten(leaves, structure)


def structure_of(value: Any) -> Any:
    """Return how the leaves of a value are nested. A cache is a leaf."""
    return pytree.tree_structure(value, is_leaf=is_batched_container)


class Occurrence(NamedTuple):
    """A value at a location. ``leaves`` is ``None`` if the value cannot be kept."""

    location: str
    leaves: tuple[Any, ...] | None
    structure: Any

    def value(self, fresh: FreshFakes) -> Any:
        """Return the value, in new containers, with new fake tensors."""
        assert self.leaves is not None
        return pytree.tree_unflatten([_copied(leaf, fresh) for leaf in self.leaves], self.structure)

    def again(self, fresh: FreshFakes, value: Any) -> Any:
        """Return the kept value, or the model's own ``value`` if it cannot be kept or contains a cache."""
        return value if self.leaves is None or any(map(is_batched_container, self.leaves)) else self.value(fresh)


class FreshFakes:
    """Maps known fake tensors to new ones, which share memory as the known ones do. Tensors in ``kept`` memory are mapped to themselves."""

    def __init__(self, kept: frozenset[int]) -> None:
        self._kept = kept
        self._made: dict[int, torch.Tensor] = {}
        self._storages: dict[int, torch.UntypedStorage] = {}

    def __call__(self, known: torch.Tensor) -> torch.Tensor:
        """Return the new fake tensor for ``known``."""
        if not isinstance(known, FakeTensor):
            return known
        if id(known) not in self._made:
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                self._made[id(known)] = self._make(known)
        return self._made[id(known)]

    def _make(self, known: FakeTensor) -> torch.Tensor:
        storage = known.untyped_storage()
        if storage._cdata in self._kept:
            return known
        new = self._storages.get(storage._cdata)
        if new is None:
            new = torch.empty(storage.nbytes(), dtype=torch.uint8, device="meta").untyped_storage()
            self._storages[storage._cdata] = new
        like = torch.empty(0, dtype=known.dtype, device="meta")
        like.set_(new, known.storage_offset(), known.size(), known.stride())
        return FakeTensor(known.fake_mode, like, known.device)


class ObservedRun(Interleaver):
    """The run that the modules of the model see. It notes the occurrences, and passes them on to the ``run`` of the blocks.

    ``seen`` has a function for each occurrence that the blocks have already seen: from the model's value to the value that they left.
    ``occurrences`` is ``None`` after an effect that may change later sizes. ``given`` has the values of the model with their leaves.
    """

    __slots__ = ("_run", "_seen", "given", "occurrences")

    def __init__(self, run: Interleaver, seen: list[Callable[[Any], Any]]) -> None:
        super().__init__([])
        self._run, self._seen, self.given = run, list(reversed(seen)), list[tuple[Any, list[Any]]]()
        self.occurrences: list[Occurrence] | None = None if seen else []
        self.offer = lambda run, location, value: run.handle(location, value)
        self.waited, self.counts, self.skips = Everywhere(), run.counts, run.skips

    def handle(self, location: str, value: Any, iterate: bool = True) -> Any:
        if self._seen:
            return self._seen.pop()(value)
        if self.occurrences is not None:
            leaves, structure = pytree.tree_flatten(value, is_leaf=is_batched_container)
            kept = None
            with contextlib.suppress(Exception):  # the value has a cache that cannot be copied, or another object
                kept = tuple(map(_copied, leaves))
            self.occurrences.append(Occurrence(location, kept, structure))
            self.given.append((value, leaves))
        if location not in self._run.waited:
            self.counts[location] = self.counts.get(location, 0) + 1
            return value
        left, changed = _offer(self._run, location, value)
        if changed:
            self.occurrences = None
        return left

    def is_waited(self, location: str) -> bool:
        return True


def _offer(run: Interleaver, location: str, value: Any) -> tuple[Any, bool]:
    """Offer a value to the blocks of a run. Return the value that they leave, and whether they did more than edit it in place."""
    before, structure = tensors_at(value), structure_of(value)
    left = run.offer(run, location, value)
    after = tensors_at(left)
    same = len(before) == len(after) and all(map(operator.is_, before, after))
    return left, bool(run.skips) or not same or structure_of(left) != structure


def _copied(leaf: Any, tensor: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor) -> Any:
    """Return a leaf with ``tensor(...)`` applied to its tensors. A cache is copied, because the model continues to fill it."""
    if isinstance(leaf, torch.Tensor):
        return tensor(leaf)
    if isinstance(leaf, _PLAIN):
        return leaf
    if not is_batched_container(leaf):
        raise TypeError(f"A {type(leaf).__name__} cannot be kept.")
    tensors: dict[int, Any] = {}

    def note(_: str, found: torch.Tensor) -> torch.Tensor:
        tensors[id(found)] = tensor(found)
        return found

    on_tensors(leaf, note)
    return copy.deepcopy(leaf, tensors)


def replay(
    occurrences: list[Occurrence], run: Interleaver, fresh: FreshFakes, go_on: Callable[[list[Callable[[Any], Any]]], Any]
) -> tuple[bool, Any]:
    """Offer occurrences to the blocks of a run. Return whether this completed the run, and the output of the model.

    The last occurrence is the output of the model. It is ``None`` here if no block waits for it. If the run is not completed this way,
    ``go_on(seen)`` runs the model; for ``seen`` see :class:`ObservedRun`.
    """
    value: Any = None
    seen: list[Callable[[Any], Any]] = []
    for number, occurrence in enumerate(occurrences):
        location = occurrence.location
        if location not in run.waited and (number < len(occurrences) - 1 or "result" not in run.waited):
            run.counts[location] = run.counts.get(location, 0) + 1
        elif occurrence.leaves is None:
            return False, go_on(seen)
        else:
            value, changed = _offer(run, location, occurrence.value(fresh))
            if changed:
                return False, go_on([*seen, lambda _: value])  # noqa: B023 - called before the loop goes on
        seen.append(functools.partial(occurrence.again, fresh))
    return True, value


def observed(
    run: Interleaver, seen: list[Callable[[Any], Any]], call: Callable[[], Any]
) -> tuple[Any, list[Occurrence] | None]:
    """Call a model within ``run``. Return its output, and its occurrences, or ``None`` if they cannot be offered again."""
    observing = ObservedRun(run, seen)
    token = active_run.set(observing)
    try:
        output = call()
    finally:
        active_run.reset(token)
    for value, leaves in observing.given:  # the model may have changed a container that a module returned, and a replay would not do that
        now = pytree.tree_leaves(value, is_leaf=is_batched_container)
        if len(now) != len(leaves) or not all(map(operator.is_, now, leaves)):
            return output, None
    return output, observing.occurrences
