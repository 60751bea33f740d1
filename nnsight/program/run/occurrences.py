"""A cache of the values at the locations of a model on fake tensors, for later runs with inputs of the same sizes.

A block that only reads, edits in place, and replaces tensors by others of their size changes no size. So the next run with such inputs has
fake tensors of the same sizes at the same locations, and they are offered to the blocks without running the model. The fake tensors are new
ones each time (:class:`FreshFakes`), because each of them stands for one value of one run, also in lists of the user that wait for results.

If a block replaces a tensor by one of another size, skips a module, or asks for a value that cannot be kept, the model runs. It gets the
values that the blocks have seen, up to their present location. It also runs if a block asks for a value with memory that was replaced,
because the model may pass on either the replacement or the tensor that was there before.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import operator
import types
from collections.abc import Callable, Set
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from ...runtime.batched_containers import is_batched_container, on_tensors
from ...runtime.interleaver import Everywhere, Interleaver, active_run
from ..format.errors import InvalidProgramError
from ..format.sizes import has_unknown_size
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
        return pytree.tree_unflatten([copied(leaf, fresh) for leaf in self.leaves], self.structure)

    def with_tensors(self, fresh: FreshFakes) -> Occurrence:
        """Return the same occurrence with new fake tensors."""
        return self if self.leaves is None else self._replace(leaves=tuple(copied(leaf, fresh) for leaf in self.leaves))

    def again(self, fresh: FreshFakes, replaced: Set[int], value: Any) -> Any:
        """Return the kept value, or the model's own ``value`` if it cannot be kept, contains a cache, or has memory that was replaced."""
        if self.leaves is None or any(map(is_batched_container, self.leaves)) or self.shares(replaced):
            return fresh.on(value)
        return self.left_as(fresh, self.value(fresh), value)

    def left_as(self, fresh: FreshFakes, left: Any, value: Any) -> Any:
        """Return ``left``, with which the model continues in place of its own ``value``."""
        own = pytree.tree_leaves(value, is_leaf=is_batched_container)
        for leaf, known in zip(own, self.leaves or (), strict=False):
            if isinstance(leaf, FakeTensor) and isinstance(known, FakeTensor):
                fresh.link(leaf, fresh(known))
        return left

    def shares(self, memory: Set[int]) -> bool:
        """Whether a tensor of the value has memory that is in ``memory``."""
        return bool(memory) and any(isinstance(leaf, torch.Tensor) and _memory(leaf) in memory for leaf in self.leaves or ())


class FreshFakes:
    """Maps known fake tensors to new ones, which share memory as the known ones do. Tensors in ``kept`` memory are mapped to themselves.

    If the model runs after all, its own tensors are *linked* to the new ones that blocks have got in their place. The model still has its
    own tensors in variables, and may pass them on.
    """

    def __init__(self, kept: frozenset[int]) -> None:
        self._kept = kept
        self._made: dict[int, torch.Tensor] = {}
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._linked: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # own and new tensors, by `id` of the own ones
        self._linked_memory: dict[int, torch.UntypedStorage] = {}

    def link(self, own: torch.Tensor, new: torch.Tensor) -> None:
        """Note that ``new`` is a tensor that the model has computed again as ``own``."""
        if own is not new:
            self._linked[id(own)] = own, new
            self._linked_memory[_memory(own)] = new.untyped_storage()

    def on(self, value: Any) -> Any:
        """Return a value of the model with new tensors in place of those that are linked, or share memory with them."""
        return pytree.tree_map(self._on_leaf, value, is_leaf=is_batched_container) if self._linked else value

    def _on_leaf(self, leaf: Any) -> Any:
        if not isinstance(leaf, FakeTensor):
            return leaf
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            memory = self._linked_memory.get(_memory(leaf))
            if memory is not None and id(leaf) not in self._linked:
                self._linked[id(leaf)] = leaf, _view(memory, leaf)
        return self._linked[id(leaf)][1] if id(leaf) in self._linked else leaf

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
        return _view(new, known)


def _view(memory: torch.UntypedStorage, known: FakeTensor) -> torch.Tensor:
    """Return a fake tensor in ``memory`` with the metadata of ``known``."""
    like = torch.empty(0, dtype=known.dtype, device="meta")
    like.set_(memory, known.storage_offset(), known.size(), known.stride())
    return FakeTensor(known.fake_mode, like, known.device)


class ObservedRun(Interleaver):
    """The run that the modules of the model see. It notes the occurrences, and passes them on to the ``run`` of the blocks.

    ``seen`` has a function for each occurrence that the blocks have already seen: from the model's value to the value that they left.
    ``occurrences`` is ``None`` after an effect other than an edit in place, and ``alike`` says whether all sizes are those of a run without
    blocks nevertheless. ``given`` has the values of the model with their leaves. ``fresh`` made the values that the blocks have seen.
    """

    __slots__ = ("_fresh", "_run", "_seen", "alike", "given", "occurrences")

    def __init__(self, run: Interleaver, seen: list[Callable[[Any], Any]], fresh: FreshFakes | None) -> None:
        super().__init__([])
        self._run, self._seen, self._fresh = run, list(reversed(seen)), fresh
        self.given: list[tuple[Any, list[Any]]] = []
        self.occurrences: list[Occurrence] | None = None if seen else []
        self.alike = not seen
        self.offer = lambda run, location, value: run.handle(location, value)
        self.waited, self.counts, self.skips = Everywhere(), run.counts, run.skips

    def handle(self, location: str, value: Any, iterate: bool = True) -> Any:
        if self._seen:
            return self._seen.pop()(value)
        if self._fresh is not None:
            value = self._fresh.on(value)
        if self.occurrences is not None:
            leaves, structure = pytree.tree_flatten(value, is_leaf=is_batched_container)
            kept = None
            with contextlib.suppress(Exception):  # the value has a cache that cannot be copied, or another object
                kept = tuple(map(copied, leaves))
            self.occurrences.append(Occurrence(location, kept, structure))
            self.given.append((value, leaves))
        if location not in self._run.waited:
            self.counts[location] = self.counts.get(location, 0) + 1
            return value
        left, replaced = _offer(self._run, location, value)
        if replaced != []:
            self.occurrences = None
        self.alike = self.alike and replaced is not None
        return left

    def is_waited(self, location: str) -> bool:
        return True


def _offer(run: Interleaver, location: str, value: Any) -> tuple[Any, list[int] | None]:
    """Offer a value to the blocks of a run.

    Returns:
        The value that they leave, and the numbers of the leaves that they replaced by tensors of the same size, strides, dtype and device.
        ``None`` in place of the numbers if they did something else that may change later values.
    """
    (before, inside), structure = _split(value), structure_of(value)
    left = run.offer(run, location, value)
    if run.skips or structure_of(left) != structure:
        return left, None
    after, inside_after = _split(left)
    if len(inside) != len(inside_after) or not all(map(operator.is_, inside, inside_after)):
        return left, None
    replaced = [number for number, (old, new) in enumerate(zip(before, after, strict=True)) if old is not new]
    return left, replaced if all(_is_like(before[number], after[number]) for number in replaced) else None


def _split(value: Any) -> tuple[list[Any], list[Any]]:
    """Return the leaves of a value, and the tensors in its caches."""
    leaves = pytree.tree_leaves(value, is_leaf=is_batched_container)
    return leaves, [tensor for leaf in leaves if is_batched_container(leaf) for tensor in tensors_at(leaf)]


def _is_like(old: Any, new: Any) -> bool:
    """Whether the model computes the same sizes with ``new`` in place of ``old``."""
    if not (isinstance(old, FakeTensor) and isinstance(new, FakeTensor)) or has_unknown_size(new):
        return False
    with torch._C.DisableTorchFunction():
        return (old.shape, old.stride(), old.dtype, old.device) == (new.shape, new.stride(), new.dtype, new.device)


def _memory(tensor: torch.Tensor) -> int:
    with torch._C.DisableTorchFunction():
        return tensor.untyped_storage()._cdata


def copied(leaf: Any, tensor: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor) -> Any:
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
    replaced: frozenset[int] = frozenset()  # the memory of the kept tensors that blocks have replaced
    for number, occurrence in enumerate(occurrences):
        location = occurrence.location
        if location not in run.waited and (number < len(occurrences) - 1 or "result" not in run.waited):
            run.counts[location] = run.counts.get(location, 0) + 1
        elif occurrence.leaves is None or occurrence.shares(replaced):
            return False, go_on(seen)
        else:
            value, new = _offer(run, location, occurrence.value(fresh))
            if new is None:
                return False, go_on([*seen, functools.partial(occurrence.left_as, fresh, value)])
            if new:
                seen.append(functools.partial(occurrence.left_as, fresh, value))
                replaced |= {_memory(occurrence.leaves[leaf]) for leaf in new}
                continue
        seen.append(functools.partial(occurrence.again, fresh, replaced))
    return True, value


class Observed(NamedTuple):
    """A call of a model.

    Attributes:
        output: The output of the model.
        occurrences: The values at its locations, or ``None`` if they cannot be offered again.
        alike: Whether the sizes are those of a call without blocks, so that the occurrences of such a call can be offered.
    """

    output: Any
    occurrences: list[Occurrence] | None
    alike: bool


def observed(
    call: Callable[[], Any],
    run: Interleaver | None = None,
    seen: list[Callable[[Any], Any]] | None = None,
    fresh: FreshFakes | None = None,
) -> Observed:
    """Call a model within ``run``, or without blocks. For ``seen`` and ``fresh`` see :class:`ObservedRun`."""
    observing = ObservedRun(Interleaver([]) if run is None else run, seen or [], fresh)
    token = active_run.set(observing)
    try:
        output = call()
    finally:
        active_run.reset(token)
    for value, leaves in observing.given:  # the model may have changed a container that a module returned, and a replay would not do that
        now = pytree.tree_leaves(value, is_leaf=is_batched_container)
        if len(now) != len(leaves) or not all(map(operator.is_, now, leaves)):
            return Observed(output, None, False)
    return Observed(output, observing.occurrences, observing.alike)
