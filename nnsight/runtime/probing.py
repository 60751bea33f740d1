"""Running a model on fakes to find which sizes follow from the number of rows.

Two runs on :mod:`~nnsight.runtime.rows.fakes`, with two numbers of rows, are compared. The numbers are primes that divide no size of the
model and its input, so that a multiple of them is no coincidence. A generation is run up to the end of the first forward pass.

One run with a symbolic number of rows would not do: of the 54 models in tests/zoo, ten fail on symbolic sizes (experts and recurrent
layers, mostly) and three turn the symbol into a number. Neither happens with two runs.
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
from .rows.batch_axes import FIRST, SEQUENCES, BatchDims, Place, Rows, leaf_paths
from .rows.fakes import Guesses, fake_argument, fake_modules, isolated, quiet_fakes
from .rows.row_order import MIXED, RowOrder, outer_of

logger = logging.getLogger("nnsight.runtime")

#: What was done in this process; ``counts["probes"]`` is how often models were probed.
counts: Counter[str] = Counter()

#: Kinds of input that are remembered for one model.
_KINDS = 64

#: Calls a root module, ``call(root, args, kwargs)``.
Call = Callable[[torch.nn.Module, tuple[Any, ...], dict[str, Any]], Any]


@dataclass(frozen=True)
class ProbedInput:
    """A leaf of the arguments."""

    dim: int | None  # the dimension with the rows, if any
    kind: Any  # what of it can decide how the model runs, to be compared


#: The shape of a tensor, and how often the batch is repeated in its dimension.
Shape = tuple[tuple[int, ...], int]


@dataclass
class Seen:
    """What was seen in a run."""

    rows: int  # the number of rows
    values: dict[str, list[dict[str, Shape]]] = field(default_factory=dict)  # by location, occurrence and leaf
    in_containers: dict[str, Shape] = field(default_factory=dict)  # the same for tensors in batched containers, by class and attribute
    error: Exception | None = None  # what ended the run early


class _Finished(BaseException):
    """Ends a probe once the root module has returned; no ``except Exception`` of a model stops it."""


class _Probe(Interleaver):
    """A run that records the shapes at all locations."""

    def __init__(self, root_path: str, seen: Seen) -> None:
        super().__init__([])
        self._root = f"{root_path}.output"
        self.seen = seen
        self.offer = lambda run, location, value: run.handle(location, value)
        self.waited = Everywhere()

    def handle(self, location: str, value: Any, iterate: bool = True) -> Any:
        shapes = {}
        leaves = pytree.tree_leaves(value, is_leaf=is_batched_container)
        for path, leaf in zip(leaf_paths(value), leaves, strict=True):
            if isinstance(leaf, torch.Tensor):
                shapes[path] = (tuple(leaf.shape), outer_of(leaf))
            elif is_batched_container(leaf):
                on_tensors(leaf, self._see_carried)
        self.seen.values.setdefault(location, []).append(shapes)
        if location == self._root:
            raise _Finished
        return value

    def _see_carried(self, place: str, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel():
            self.seen.in_containers[place] = (tuple(tensor.shape), outer_of(tensor))
        return tensor

    def is_waited(self, location: str) -> bool:
        return True


#: For each model the state of its modules, and what is known for the structures and kinds of input it was run with.
_Known = list[tuple[pytree.TreeSpec, tuple[Any, ...], BatchDims]]
_cache: weakref.WeakKeyDictionary[torch.nn.Module, tuple[tuple[int, int], _Known]] = weakref.WeakKeyDictionary()


def find_batch_dims(modules: ModuleTree, call: Call | None, joined: Any, parts: Sequence[Any], sizes: Sequence[int]) -> BatchDims:
    """Return what is known of the dimensions of ``modules``; probe them if they are run this way for the first time.

    Args:
        modules: The modules and the locations they have.
        call: How the run calls the root module, if not simply with the arguments.
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
    for other_structure, other_kind, dims in known:
        if other_kind == kind and other_structure == structure:
            return dims
    dims = _probed(modules, call, joined, inputs, sum(sizes))
    del known[_KINDS:]
    known.insert(0, (structure, kind, dims))
    return dims


def describe_inputs(joined: Any, leaves: Sequence[Any], parts: Sequence[Any], sizes: Sequence[int]) -> list[ProbedInput]:
    """Return, for each of the ``leaves`` of ``joined``, along which dimension the leaves of ``parts`` were joined in it."""
    total, positional = sum(sizes), len(pytree.tree_leaves(joined[0], is_leaf=is_batched_container))
    known: list[tuple[pytree.TreeSpec, list[str]]] = []  # most parts are alike
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
        dim = 0 if FIRST.fit(leaf, total) else None  # shared by the invokes, or built anew
        if all(isinstance(piece, torch.Tensor) and piece.dim() == leaf.dim() for piece in pieces):
            dim = next((dim for dim in range(leaf.dim()) if _is_joined(leaf, pieces, sizes, dim)), None)
        inputs.append(ProbedInput(dim, (leaf.dim(), dim, leaf.dtype)))
    return inputs


def _is_joined(leaf: torch.Tensor, parts: Sequence[Any], sizes: Sequence[int], dim: int) -> bool:
    entries, rest = divmod(leaf.shape[dim], max(sum(sizes), 1))
    return entries > 0 and not rest and all(part.shape[dim] == entries * size for part, size in zip(parts, sizes, strict=True))


def _probed(modules: ModuleTree, call: Call | None, joined: Any, inputs: Sequence[ProbedInput], total: int) -> BatchDims:
    """Return what two runs with two numbers of rows show."""
    first, second = probe(modules, call, joined, inputs, total)
    error = first.error or second.error
    if error is not None:
        logger.warning(
            "The batch dimensions of %s could not all be found out, because it does not run on fake tensors (%s: %s). With "
            "several invokes, tensors whose first dimension has the size of the batch count as its rows where it was not reached.",
            type(modules.root).__name__,
            type(error).__name__,
            error,
        )
    dims = BatchDims()
    dims.in_containers.update(_compare(first.in_containers, second.in_containers, first, second))
    for location in first.values.keys() & second.values.keys():
        pairs = zip(first.values[location], second.values[location], strict=False)
        found = [Place(_compare(one, other, first, second)) for one, other in pairs]
        alike = all(place.rows == found[0].rows for place in found)
        dims.places[location] = (found[0],) if alike else tuple(found)
    if call is not None:  # a generation returns what no forward pass does
        root = modules.paths[modules.root]
        for location in ("result", f"{root}.generator.output", f"{root}.generator.streamer.output"):
            dims.places[location] = (Place({}, SEQUENCES),)
    return dims


def _compare(one: Mapping[str, Any], other: Mapping[str, Any], first: Seen, second: Seen) -> dict[str, Rows | None]:
    """Return the rows of each tensor that both probes saw."""
    found: dict[str, Rows | None] = {}
    for path, (shape, outer) in one.items():
        if path not in other or len(other[path][0]) != len(shape):
            continue
        grown = other[path][0]
        sizes = enumerate(zip(shape, grown, strict=True))
        dim = next((d for d, (few, many) in sizes if few and few % first.rows == 0 and few * second.rows == many * first.rows), None)
        if dim is None or outer == MIXED or outer != other[path][1]:
            found[path] = None
        else:
            found[path] = Rows(dim, len(shape), outer, shape[dim] // first.rows // outer)
    return found


def probe(modules: ModuleTree, call: Call | None, joined: Any, inputs: Sequence[ProbedInput], total: int) -> tuple[Seen, Seen]:
    """Return what two runs with two numbers of rows have seen. If they fail with ``call``, the module alone is tried.

    ``inputs`` says which dimensions of the arguments ``joined`` have the rows, and ``total`` how many they are.
    """
    leaves, structure = pytree.tree_flatten(joined, is_leaf=is_batched_container)
    best: tuple[Seen, Seen] | None = None
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
        except Exception as unexpected:  # a model that cannot be copied, say
            best = best or (Seen(1, error=unexpected), Seen(1))
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
) -> Seen:
    """Run a copy of the model with ``rows`` rows."""
    root, seen = modules.root, Seen(rows)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and not leaf.is_meta]
    copies = fake_modules(root, mode, tensors[0].device if tensors else "cpu")
    by_path = {path: copies[module] for module, path in modules.paths.items() if module in copies}
    token = active_run.set(_Probe(modules.paths[root], seen))
    try:
        with mode, Guesses(), RowOrder(rows), modules.intercept(by_path), quiet_fakes:
            fakes = [fake_argument(leaf, entry.dim, total, rows, mode) for leaf, entry in zip(leaves, inputs, strict=True)]
            args, kwargs = pytree.tree_unflatten(fakes, structure)
            if call is None:
                copies[root](*args, **kwargs)
            else:
                call(copies[root], args, kwargs)
    except _Finished:
        seen.values["result"] = seen.values[f"{modules.paths[root]}.output"]
    except Exception as error:
        seen.error = error
    finally:
        active_run.reset(token)
    return seen


def _primes(root: torch.nn.Module, leaves: Sequence[Any], total: int) -> Iterator[int]:
    """Yield numbers of rows that are no factor of a size of the model."""
    tensors = [*root.parameters(), *root.buffers(), *(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))]
    sizes = {size for tensor in tensors for size in tensor.shape if size}
    for number in itertools.count(max(total, 4) + 1):
        if all(number % other for other in range(2, int(number**0.5) + 1)) and all(size % number for size in sizes):
            yield number
