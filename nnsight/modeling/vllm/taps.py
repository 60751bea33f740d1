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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ...runtime.interleaver import active_interleaver
from .steering import Slots, add_tables, steered
from .steps import Step

#: Name of the operation as vLLM's list of splitting operations has it.
HANDOFF = "nnsight::handoff"

#: Part of the key of the compile cache: to be raised when what is put into a graph changes.
_FORMAT = 2


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


@dataclass(frozen=True)
class Layout:
    """What is put into the graph of a compiled model.

    Attributes:
        taps: Modules whose output is handed to blocks, as paths or patterns.
        edits: Layers with tables for edits, likewise; see :mod:`.steering`.
        slots: How many different edits the tables have room for.
        rank: How many directions each may read.
    """

    taps: tuple[str, ...] = ()
    edits: tuple[str, ...] = ()
    slots: int = 16
    rank: int = 1

    @property
    def description(self) -> dict[str, Any]:
        """What ``additional_config`` says of it: plain data that vLLM makes a key of."""
        return {"format": _FORMAT, **asdict(self)}

    @classmethod
    def described(cls, description: Mapping[str, Any]) -> Layout:
        """Return the layout with this description."""
        given = {name: value for name, value in description.items() if name != "format"}
        return cls(**{**given, "taps": tuple(given["taps"]), "edits": tuple(given["edits"])})


@dataclass(frozen=True)
class Tapped:
    """A model with what a layout puts into it.

    Attributes:
        locations: Where blocks can stop.
        rows: The slot of each row of a step, ``[tokens]``, which every layer with tables looks at.
        slots: Who has which entry of the tables.
        rank: As in the layout.
        steered: Where the tables apply.
    """

    locations: list[str]
    rows: torch.Tensor
    slots: Slots
    rank: int
    steered: list[str]


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
            raise ValueError(f"taps and edits: the model has no module {tap!r}. Paths begin with one of: {children}.")
        found |= named
    return found


def tap(model: torch.nn.Module, layout: Layout, rows: torch.Tensor, hidden: int, dtype: torch.dtype) -> Tapped:
    """Put what ``layout`` says into ``model``, which has not run yet.

    Args:
        model: The model.
        layout: The layout.
        rows: Zeros, int64, for the longest step of the engine.
        hidden: Channels of the hidden state.
        dtype: Of the hidden state.
    """
    stops, steered = tapped_modules(model, layout.taps), tapped_modules(model, layout.edits)
    for path, module in (stops | steered).items():
        module.nnsight_location = _location(path)  # type: ignore[assignment]
        module.nnsight_hands_over = path in stops  # type: ignore[assignment]
        module.nnsight_steers = path in steered  # type: ignore[assignment]
        if path in steered:
            add_tables(module, rows, layout.slots, layout.rank, hidden, dtype)
        base: Any = type(module)
        module.__class__ = _tapped(base)
    tables = {_location(path): module for path, module in steered.items()}
    return Tapped([*map(_location, stops)], rows, Slots(tables, layout.slots), layout.rank, list(tables))


def _location(path: str) -> str:
    return f"model.{path}.output"


@functools.cache
def _tapped(base: Any) -> Any:
    """Return the class of modules ``base`` with a ``forward`` that steers its output and hands it over."""
    forward_of_base: Callable[..., Any] = base.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = forward_of_base(self, *args, **kwargs)
        if self.nnsight_steers:
            output = steered(self, output)
        if self.nnsight_hands_over:
            output = _handed_over(output, self.nnsight_location)
        return output

    return type(f"Tapped{base.__name__}", (base,), {"forward": forward, "nnsight_base": base, "__module__": __name__})


def _handed_over(output: Any, location: str) -> Any:
    """Return ``output`` of a module as the blocks leave it. Dynamo traces this."""
    if isinstance(output, torch.Tensor):
        first = output.clone()
        torch.ops.nnsight.handoff(first, None, location)
        return first
    first, second = output[0].clone(), None if output[1] is None else output[1].clone()
    torch.ops.nnsight.handoff(first, second, location)
    return (first, second, *output[2:])
