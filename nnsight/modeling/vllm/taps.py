"""Stops in a compiled engine: an operation in the model's graph that hands a module's output to the blocks.

vLLM compiles the model as one graph, inside of which no Python runs. For each module that is *tapped* this puts an operation into that
graph, ``nnsight::handoff``. It calls the step of the engine with what the module returned, so any block can work on its rows, and
everything between two taps stays compiled. Three things are as they are for a reason.

* A tap has to be there before the first forward pass, which vLLM traces; so it is made when the model is loaded. The class of the
  module is replaced by a subclass of that one class, which dynamo traces as any other; hooks it would not see.
* The operation returns nothing and writes to its argument. Where pieces of a graph are replayed (CUDA graphs), the piece behind reads
  from the address that it has always read from, so a new tensor would be ignored. The argument is a copy: the output of a module
  may be known under other names, too.
* Which modules are tapped is part of vLLM's configuration (``additional_config``), and so of the key of its compile cache: else the graph
  of other taps could be loaded.
"""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ...runtime.interleaver import active_interleaver
from .steps import Step

#: Name of the operation as vLLM's list of splitting operations has it.
HANDOFF = "nnsight::handoff"

#: Part of the key of the compile cache: to be raised when what is put into a graph changes.
_FORMAT = 1


@torch.library.custom_op(HANDOFF, mutates_args=("first", "second"))
def _handoff(first: torch.Tensor, second: torch.Tensor | None, location: str) -> None:
    """Offer ``first``, or the pair of both, at ``location``, and write what came of it into them."""
    step: Any = active_interleaver()
    if not isinstance(step, Step) or location not in step.waited:
        if isinstance(step, Step):
            step.counts[location] = 1
        return
    value = first if second is None else (first, second)
    left = step.meet(location, value)
    for kept, new in zip((first, second), (left,) if second is None else left, strict=False):
        if new is not kept and kept is not None:
            kept.copy_(new)


@_handoff.register_fake
def _(first: torch.Tensor, second: torch.Tensor | None, location: str) -> None:
    return None


def layout_of(taps: Sequence[str]) -> dict[str, Any]:
    """Return what ``additional_config`` says of the taps."""
    return {"format": _FORMAT, "taps": list(taps)}


def tapped_modules(model: torch.nn.Module, taps: Iterable[str]) -> dict[str, torch.nn.Module]:
    """Return the modules of ``model`` that ``taps`` name, by path.

    Args:
        model: The model.
        taps: Paths as ``named_modules`` has them, or patterns such as ``"model.layers.*"``, in which ``*`` stands for one name.

    Raises:
        ValueError: If one names no module.
    """
    found: dict[str, torch.nn.Module] = {}
    modules = dict(model.named_modules())
    for tap in taps:
        depth = tap.count(".")
        named = {
            path: module
            for path, module in modules.items()
            if path.count(".") == depth and fnmatch.fnmatchcase(path, tap)
        }
        if not named:
            children = ", ".join(path for path in modules if path and path.count(".") <= 1)
            raise ValueError(f"taps: the model has no module {tap!r}. Paths begin with one of: {children}.")
        found |= named
    return found


def tap(model: torch.nn.Module, taps: Iterable[str]) -> list[str]:
    """Tap modules of ``model``, which has not run yet; return the locations."""
    locations = []
    for path, module in tapped_modules(model, taps).items():
        module.nnsight_location = f"model.{path}.output"  # type: ignore[assignment]
        module.__class__ = _tapped(type(module))
        locations.append(f"model.{path}.output")
    return locations


@functools.cache
def _tapped(base: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """Return ``base`` with a ``forward`` that hands its output over."""
    forward_of_base: Callable[..., Any] = base.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _handed_over(forward_of_base(self, *args, **kwargs), self.nnsight_location)

    return type(f"Tapped{base.__name__}", (base,), {"forward": forward, "__module__": __name__})


def _handed_over(output: Any, location: str) -> Any:
    """Return ``output`` of a module as the blocks leave it. Dynamo traces this."""
    if isinstance(output, torch.Tensor):
        first = output.clone()
        torch.ops.nnsight.handoff(first, None, location)
        return first
    first, second = output[0].clone(), None if output[1] is None else output[1].clone()
    torch.ops.nnsight.handoff(first, second, location)
    return (first, second, *output[2:])
