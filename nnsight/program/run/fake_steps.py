"""The steps of a generation on fake tensors. Most steps are simulated without running the model.

After the first step, each step decodes one token for each row. The values at the locations have the same sizes in each of these steps,
apart from values that grow with the cache. So two steps run and are compared. Values with equal sizes in both are offered again in later
steps, without running the model (:mod:`~nnsight.program.run.occurrences`). The model runs a step if a block asks for a value of another
size, replaces a value by one of another size, or skips a module. If blocks replace values in the two steps, both run once more without
blocks. The cache grows in each step, whether the model runs or not. Growth is simulated for ``DynamicCache`` only; with any other cache,
the model runs in each step.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from ...runtime.batched_containers import is_batched_container
from ...runtime.interleaver import Interleaver
from ..counts import counts
from .occurrences import FreshFakes, Occurrence, copied, observed, replay

if TYPE_CHECKING:
    from .costs import Costs

#: Number of the first step that may be simulated. Earlier steps run.
_FIRST = 3


class FakeSteps:
    """For each step of a generation, calls ``forward`` of a model on fake tensors, or offers the values of an earlier step.

    ``storages`` are the storages of the model, see :class:`FreshFakes`. ``costs`` counts the operations.
    """

    def __init__(
        self, forward: Callable[..., Any], interleaver: Interleaver, storages: frozenset[int], costs: Costs | None
    ) -> None:
        def counted(*args: Any, **kwargs: Any) -> Any:
            counts["fake_steps"] += 1
            return forward(*args, **kwargs)

        self._forward, self._interleaver, self._storages, self._costs = counted, interleaver, storages, costs
        self._number = 0
        self._known: list[list[Occurrence] | None] = []  # occurrences of the steps that are compared
        self._outputs: list[Any] = []
        self._flops: list[int] = []
        self._common: list[Occurrence] | None = None  # the occurrences to offer in simulated steps

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the model in the next step."""
        number, self._number = self._number, self._number + 1
        caches = [value for value in kwargs.values() if is_batched_container(value)]
        layers = _layers_of(caches[0]) if len(caches) == 1 else None
        if number == 0 or layers is None or torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        if number < _FIRST:
            return self._compared(args, kwargs)
        if number == _FIRST:
            self._common = self._found()
        if self._common is None:
            return self._forward(*args, **kwargs)
        fresh = FreshFakes(self._storages)
        ran: list[Any] = []

        def go_on(seen: list[Callable[[Any], Any]]) -> Any:
            ran.append(observed(functools.partial(self._forward, *args, **kwargs), self._interleaver, seen, fresh).output)

        if not replay(self._common, self._interleaver, fresh, go_on)[0]:
            return ran[0]
        for layer in layers:
            layer.keys, layer.values = _grown(layer.keys), _grown(layer.values)
        if self._costs is not None:
            first, second = self._flops
            self._costs.add(max(first + (number - 1) * (second - first), 0), of_model=True)
        return pytree.tree_map(
            lambda leaf: fresh(leaf) if isinstance(leaf, torch.Tensor) else caches[0] if is_batched_container(leaf) else leaf,
            self._outputs[-1],
            is_leaf=is_batched_container,
        )

    def _compared(self, args: Any, kwargs: Any) -> Any:
        """Run a step, and keep its occurrences, output and number of operations."""
        start = 0 if self._costs is None else self._costs.of_model
        same_args, same_kwargs = pytree.tree_map(
            lambda leaf: copied(leaf) if is_batched_container(leaf) else leaf, (args, kwargs), is_leaf=is_batched_container
        )
        made = observed(functools.partial(self._forward, *args, **kwargs), self._interleaver)
        self._flops.append(0 if self._costs is None else self._costs.of_model - start)
        output = made.output
        if made.occurrences is None and made.alike:
            with contextlib.nullcontext() if self._costs is None else self._costs.apart():
                made = observed(functools.partial(self._forward, *same_args, **same_kwargs))
        self._known.append(made.occurrences)
        self._outputs.append(made.output)
        return output

    def _found(self) -> list[Occurrence] | None:
        """Return the occurrences that the compared steps have in common; ``None`` if later steps may differ from them."""
        if len(self._known) != _FIRST - 1 or None in self._known or not _alike(*self._outputs):
            return None
        first, second = (known or [] for known in self._known)
        if [found.location for found in first] != [found.location for found in second]:
            return None
        return [
            occurrence if same and not any(map(is_batched_container, occurrence.leaves or ())) else occurrence._replace(leaves=None)
            for occurrence, same in zip(second, map(_same, first, second), strict=True)
        ]


def _layers_of(cache: Any) -> list[Any] | None:
    """Return the layers of a cache that grows by one position in each step; ``None`` for an empty cache, or another kind of cache."""
    from transformers import cache_utils

    layer = getattr(cache_utils, "DynamicLayer", None)
    if layer is None or type(cache) is not cache_utils.DynamicCache or not cache.layers:
        return None
    known = all(type(found) is layer and isinstance(found.keys, torch.Tensor) for found in cache.layers)
    return list(cache.layers) if known else None


def _grown(states: torch.Tensor) -> torch.Tensor:
    """Return the keys or values of a layer with one more position."""
    *sizes, positions, width = states.shape
    return states.new_empty((*sizes, positions + 1, width))


def _same(one: Occurrence, other: Occurrence) -> bool:
    """Whether two occurrences have kept values with equal sizes."""
    if one.leaves is None or other.leaves is None or one.structure != other.structure:
        return False
    return all(map(_same_leaf, one.leaves, other.leaves))


def _alike(one: Any, other: Any) -> bool:
    """Whether two outputs of the model have equal sizes, apart from caches."""
    leaves, others = (pytree.tree_leaves(output, is_leaf=is_batched_container) for output in (one, other))
    return len(leaves) == len(others) and type(one) is type(other) and all(map(_same_leaf, leaves, others))


def _same_leaf(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and one.stride() == other.stride() and one.dtype == other.dtype
    return (is_batched_container(one) and is_batched_container(other)) or one is other or (type(one) is type(other) and one == other)
