"""Probes: runs of a model on fake tensors that find the batch axis of each value.

A probe runs the model twice on :mod:`~nnsight.runtime.rows.fakes`, with two numbers of rows, and compares the shapes. The numbers are
primes that divide no size of the model and its input, so a size that is a multiple of them in both runs is no coincidence. A generation is
run up to the end of its first forward pass.

One run with a symbolic number of rows is not enough: of the 54 models in tests/zoo, ten fail on symbolic sizes (mostly experts and
recurrent layers) and three turn the symbol into a number. Two runs with concrete sizes have neither problem.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from .batched_containers import is_batched_container, on_tensors
from .interleaver import Everywhere, Interleaver, active_run
from .modules.tree import ModuleTree
from .rows.batch_axes import FIRST, MIXED_ROWS, SEQUENCES, BatchDims, OccurrenceRows, Rows, leaf_paths, lists_in
from .rows.fakes import Guesses, fake_argument, fake_modules, isolated, quiet_fakes
from .rows.row_order import MIXED, RowOrder, outer_of

logger = logging.getLogger("nnsight.runtime")

#: Counters of this process; ``counts["probes"]`` is the number of probes.
counts: Counter[str] = Counter()

#: Maximum number of kinds of input in the cache of one model.
_KINDS = 64

#: Calls a root module, ``call(root, args, kwargs)``.
Call = Callable[[torch.nn.Module, tuple[Any, ...], dict[str, Any]], Any]


@dataclass(frozen=True)
class ProbedInput:
    """A leaf of the arguments."""

    dim: int | None  # the dimension with the rows, if any
    kind: Any  # a cache key: the properties of the leaf that can decide how the model runs


#: The shape of a tensor, and how often the batch is repeated in its batch axis (`Rows.outer`).
Shape = tuple[tuple[int, ...], int]


@dataclass
class ProbedShapes:
    """The shapes that were recorded in one run of a probe."""

    rows: int  # the number of rows in this run
    values: dict[str, list[dict[str, Shape]]] = field(default_factory=dict)  # shapes by location, occurrence and leaf
    lists: dict[str, list[set[str]]] = field(default_factory=dict)  # lists with one item for each row, by location and occurrence
    in_containers: dict[str, Shape] = field(default_factory=dict)  # shapes of tensors in batched containers, by class and attribute
    error: Exception | None = None  # the error that ended the run early


class _Finished(BaseException):
    """Ends a run of a probe when the root module has returned. It is no ``Exception``, so that no model catches it."""


class _Probe(Interleaver):
    """A run that records the shapes at all locations in ``shapes``."""

    def __init__(self, root_path: str, shapes: ProbedShapes) -> None:
        super().__init__([])
        self._root = f"{root_path}.output"
        self.shapes = shapes
        self.offer = lambda run, location, value: run.handle(location, value)
        self.waited = Everywhere()

    def handle(self, location: str, value: Any, iterate: bool = True) -> Any:
        shapes = {}
        leaves = pytree.tree_leaves(value, is_leaf=is_batched_container)
        for path, leaf in zip(leaf_paths(value), leaves, strict=True):
            if isinstance(leaf, torch.Tensor):
                shapes[path] = (tuple(leaf.shape), outer_of(leaf))
            elif is_batched_container(leaf):
                on_tensors(leaf, self._record_in_container)
        self.shapes.values.setdefault(location, []).append(shapes)
        lists = {path for path, found in lists_in(value) if len(found) == self.shapes.rows}
        self.shapes.lists.setdefault(location, []).append(lists)
        if location == self._root:
            raise _Finished
        return value

    def _record_in_container(self, place: str, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel():
            self.shapes.in_containers[place] = (tuple(tensor.shape), outer_of(tensor))
        return tensor

    def is_waited(self, location: str) -> bool:
        return True


#: The cache of probes. For each model: the version of its modules, and the result for each structure and kind of input.
_Known = list[tuple[pytree.TreeSpec, tuple[Any, ...], BatchDims]]
_cache: weakref.WeakKeyDictionary[torch.nn.Module, tuple[tuple[int, int], _Known]] = weakref.WeakKeyDictionary()


def find_batch_dims(modules: ModuleTree, call: Call | None, joined: Any, parts: Sequence[Any], sizes: Sequence[int]) -> BatchDims:
    """Return the batch axes of the values of a model. The model is probed if it runs with this kind of input for the first time.

    Args:
        modules: The modules of the model and their locations.
        call: Calls the root module as the run does, such as in a generation; ``None`` if the run calls it with the arguments directly.
        joined: The arguments of the run, ``(args, kwargs)``.
        parts: The arguments of each invoke.
        sizes: The number of rows of each invoke.
    """
    leaves, structure = pytree.tree_flatten(joined, is_leaf=is_batched_container)
    inputs = describe_inputs(joined, leaves, parts, sizes)
    now = (modules.version, modules.opened)
    version, known = _cache.get(modules.root, (None, []))
    if version != now:
        known = []
        _cache[modules.root] = (now, known)
    kind = (call is None, modules.root.training, torch.is_grad_enabled(), *(leaf.kind for leaf in inputs))
    if call is None:  # a number may choose what the model does; those of a generation are mostly lengths
        kind += tuple(leaf for leaf in leaves if type(leaf) is int)
    for other_structure, other_kind, dims in known:
        if other_kind == kind and other_structure == structure:
            return dims
    dims = _probed(modules, call, joined, inputs, sum(sizes))
    del known[_KINDS:]
    known.insert(0, (structure, kind, dims))
    return dims


def describe_inputs(joined: Any, leaves: Sequence[Any], parts: Sequence[Any], sizes: Sequence[int]) -> list[ProbedInput]:
    """Return, for each of the ``leaves`` of ``joined``, the dimension along which the leaves of ``parts`` were joined."""
    total, positional = sum(sizes), len(pytree.tree_leaves(joined[0], is_leaf=is_batched_container))
    known: list[tuple[pytree.TreeSpec, list[str]]] = []  # most parts have the same structure, so its paths are computed once
    by_path = []
    for part in parts:
        pieces, structure = pytree.tree_flatten(part, is_leaf=is_batched_container)
        if not known or known[-1][0] != structure:
            known.append((structure, leaf_paths(part)))
        by_path.append(dict(zip(known[-1][1], pieces, strict=True)))
    inputs = []
    for number, (path, leaf) in enumerate(zip(leaf_paths(joined), leaves, strict=True)):
        if not isinstance(leaf, torch.Tensor):
            is_option = leaf is None or isinstance(leaf, bool) or (isinstance(leaf, str) and number >= positional)
            inputs.append(ProbedInput(None, leaf if is_option else type(leaf)))
            continue
        pieces = [part.get(path) for part in by_path]
        dim = 0 if FIRST.fit(leaf, total) else None  # for a tensor that the invokes share, or that `_batch` has built
        if all(isinstance(piece, torch.Tensor) and piece.dim() == leaf.dim() for piece in pieces):
            dim = next((dim for dim in range(leaf.dim()) if _is_joined(leaf, pieces, sizes, dim)), None)
        inputs.append(ProbedInput(dim, (leaf.dim(), dim, leaf.dtype)))
    return inputs


def _is_joined(leaf: torch.Tensor, parts: Sequence[Any], sizes: Sequence[int], dim: int) -> bool:
    entries, rest = divmod(leaf.shape[dim], max(sum(sizes), 1))
    return entries > 0 and not rest and all(part.shape[dim] == entries * size for part, size in zip(parts, sizes, strict=True))


def _probed(modules: ModuleTree, call: Call | None, joined: Any, inputs: Sequence[ProbedInput], total: int) -> BatchDims:
    """Probe a model and return its batch axes."""
    first, second = probe(modules, call, joined, inputs, total)
    error = first.error or second.error
    if error is not None:
        logger.warning(
            "Not all batch axes of %s are known, because it does not run on fake tensors (%s: %s). At locations that its run on fake "
            "tensors did not reach, the first dimension of a tensor is taken for its batch axis if it has the size of the batch.",
            type(modules.root).__name__,
            type(error).__name__,
            error,
        )
    dims = BatchDims()
    dims.in_containers.update(_compare(first.in_containers, second.in_containers, first, second))
    for location in first.values.keys() & second.values.keys():
        pairs = zip(first.values[location], second.values[location], strict=False)
        lists = [one & other for one, other in zip(first.lists[location], second.lists[location], strict=False)]
        shapes = [_compare(one, other, first, second) for one, other in pairs]
        found = [OccurrenceRows(rows, frozenset(paths)) for rows, paths in zip(shapes, lists, strict=True)]
        alike = all(one.rows == found[0].rows and one.row_lists == found[0].row_lists for one in found)
        dims.by_location[location] = (found[0],) if alike else tuple(found)
    if call is not None:  # the probe does not reach the sequences that a generation returns
        root = modules.paths[modules.root]
        for location in ("result", f"{root}.generator.output", f"{root}.generator.streamer.output"):
            dims.by_location[location] = (OccurrenceRows({}, otherwise=SEQUENCES),)
    return dims


def _compare(one: Mapping[str, Any], other: Mapping[str, Any], first: ProbedShapes, second: ProbedShapes) -> dict[str, Rows | None]:
    """Return the rows of each tensor that both runs of the probe have recorded."""
    found: dict[str, Rows | None] = {}
    for path, (shape, outer) in one.items():
        if path not in other or len(other[path][0]) != len(shape):
            continue
        grown = other[path][0]
        sizes = enumerate(zip(shape, grown, strict=True))
        dim = next((d for d, (few, many) in sizes if few and few % first.rows == 0 and few * second.rows == many * first.rows), None)
        if outer == MIXED or (dim is not None and outer != other[path][1]):
            found[path] = MIXED_ROWS
        elif dim is None:
            found[path] = None
        else:
            found[path] = Rows(dim, len(shape), outer, shape[dim] // first.rows // outer)
    return found


def probe(
    modules: ModuleTree, call: Call | None, joined: Any, inputs: Sequence[ProbedInput], total: int
) -> tuple[ProbedShapes, ProbedShapes]:
    """Run a model with two numbers of rows and return the shapes of both runs. If ``call`` fails, the module is called directly.

    ``inputs`` are the dimensions with rows in the arguments ``joined``, and ``total`` is the number of their rows.
    """
    leaves, structure = pytree.tree_flatten(joined, is_leaf=is_batched_container)
    best: tuple[ProbedShapes, ProbedShapes] | None = None
    with isolated():
        counts["probes"] += 1
        try:
            few, more = itertools.islice(_primes(modules.root, leaves, total), 2)
            for attempt in dict.fromkeys((call, None)):
                first, second = (_run(modules, attempt, leaves, structure, inputs, total, rows) for rows in (few, more))
                if best is None or len(first.values) > len(best[0].values):
                    best = first, second
                if first.error is None and second.error is None:
                    best[0].error = best[1].error = None
                    break
        except Exception as unexpected:  # for instance, a model that cannot be copied
            best = best or (ProbedShapes(1, error=unexpected), ProbedShapes(1))
    assert best is not None
    return best


def _run(
    modules: ModuleTree,
    call: Call | None,
    leaves: list[Any],
    structure: pytree.TreeSpec,
    inputs: Sequence[ProbedInput],
    total: int,
    rows: int,
) -> ProbedShapes:
    """Run a copy of the model on fake tensors with ``rows`` rows, and return the shapes at all locations."""
    root, shapes = modules.root, ProbedShapes(rows)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and not leaf.is_meta]
    copies = fake_modules(root, mode, tensors[0].device if tensors else "cpu")
    by_path = {path: copies[module] for module, path in modules.paths.items() if module in copies}
    token = active_run.set(_Probe(modules.paths[root], shapes))
    try:
        with mode, Guesses(), RowOrder(rows), modules.intercept(by_path), quiet_fakes:
            fakes = [fake_argument(leaf, entry.dim, total, rows, mode) for leaf, entry in zip(leaves, inputs, strict=True)]
            args, kwargs = pytree.tree_unflatten(fakes, structure)
            if call is None:
                copies[root](*args, **kwargs)
            else:
                call(copies[root], args, kwargs)
    except _Finished:
        for known in (shapes.values, shapes.lists):
            known["result"] = known[f"{modules.paths[root]}.output"]  # type: ignore[assignment]
    except Exception as error:
        shapes.error = error
    finally:
        active_run.reset(token)
    return shapes


def _primes(root: torch.nn.Module, leaves: Sequence[Any], total: int) -> Iterator[int]:
    """Yield primes above ``total`` that divide no size of the model's tensors and arguments, as numbers of rows."""
    tensors = [*root.parameters(), *root.buffers(), *(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))]
    sizes = {size for tensor in tensors for size in tensor.shape if size}
    for number in itertools.count(max(total, 4) + 1):
        if all(number % other for other in range(2, int(number**0.5) + 1)) and all(size % number for size in sizes):
            yield number
