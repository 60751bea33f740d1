"""Stops in a compiled engine: an operation in the model's graph that hands a module's output to the blocks.

vLLM compiles the model as one graph, inside of which no Python runs. For each *tapped* module there is an operation in that
graph, ``nnsight::handoff``. It calls the step of the engine with the module's output, or its input, so any block can work on its
rows, and everything between two taps stays compiled. Three choices have a reason.

* A tap has to be there before the first forward pass, which vLLM traces; so it is made when the model is loaded. The class of the
  module is replaced by a subclass of that one class, which dynamo traces as any other. Dynamo would not see hooks.
* The operation returns nothing and writes to its argument. Where pieces of a graph are replayed (CUDA graphs), the next piece reads
  from the address that it has always read from, so a new tensor would be ignored. The arguments are copies, because the model may know a
  value under other names, too.
* The tapped modules are part of vLLM's configuration (``additional_config``), and so of the key of its compile cache: else vLLM could load
  the graph of other taps.
"""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ...runtime.interleaver import active_interleaver
from ..steering.graph_functions import EditFunction, registered
from ..steering.graph_parts import add_part, edited, is_layer
from ..steering.graph_programs import GraphProgram, module_of
from ..steering.tables import RowSlots, tables_part
from .kept_values import KeptValues, define, parsed, value_of
from .spread import columns_of
from .step_programs import StopProgram
from .steps import EngineStep

#: Name of the operation in vLLM's list of splitting operations.
HANDOFF = "nnsight::handoff"

#: Part of the key of the compile cache. Raise it with every change of what is put into a graph.
_FORMAT = 8


def _handoff(leaves: list[torch.Tensor], form: str, location: str) -> None:
    """Offer the value with these tensors at ``location``, and write the result into them."""
    step: Any = active_interleaver()
    if not isinstance(step, EngineStep) or location not in step.waited:
        if isinstance(step, EngineStep):
            step.counts[location] = 1
        return
    value = value_of(parsed(form), leaves)
    left = pytree.tree_leaves(step.meet(location, value))
    for kept, new in zip(pytree.tree_leaves(value), left, strict=True):
        if new is not kept and isinstance(kept, torch.Tensor):
            kept.copy_(new)


define("handoff", "(Tensor(a!)[] leaves, str form, str location) -> ()", _handoff)


@dataclass(frozen=True)
class Layout:
    """What is put into the graph of a compiled model."""

    taps: tuple[str, ...] = ()  # modules whose output is handed to blocks, as paths or patterns; with `.input` behind them, their input
    captures: tuple[str, ...] = ()  # likewise, modules whose values are copied for blocks that read them, see `kept_values`
    edits: tuple[str, ...] = ()  # likewise, layers with tables for edits, see `steering.tables`
    slots: int = 16  # how many different edits the tables have room for
    rank: int = 1  # how many directions each edit may remove
    functions: tuple[str, ...] = ()  # digests of the functions of these layers, see `steering.graph_functions`
    programs: tuple[str, ...] = ()  # digests of programs, see `steering.graph_programs`
    programmed: tuple[str, ...] = ()  # the modules at which these have parts

    @property
    def only_tables(self) -> bool:
        """Whether there are tables for edits, or programs, and nothing that hands values to blocks."""
        return bool(self.edits or self.programmed) and not self.taps and not self.captures

    @property
    def modules(self) -> list[str]:
        """The modules that it names."""
        places = (*self.taps, *self.captures)
        return [*at_side(places, "input"), *at_side(places, "output"), *self.edits, *self.programmed]

    @property
    def description(self) -> dict[str, Any]:
        """The layout as plain data, which vLLM makes a part of its cache key."""
        return {"format": _FORMAT, **asdict(self)}

    @classmethod
    def described(cls, description: Mapping[str, Any]) -> Layout:
        """Return the layout with this description."""
        return cls(**{name: value for name, value in description.items() if name != "format"})


def at_side(places: Iterable[str], side: str) -> list[str]:
    """Return the modules among ``places`` that are named with a side, ``"input"`` or ``"output"``; the latter is the default."""
    found = []
    for place in places:
        path, _, tail = place.rpartition(".")
        at = {"input": "input", "inputs": "input", "output": "output"}.get(tail)
        if (at or "output") == side:
            found.append(place if at is None else path)
    return found


@dataclass(frozen=True)
class Tapped:
    """A model with what a layout puts into it."""

    locations: list[str]  # where blocks can stop
    captured: list[str]  # where blocks can read when the model has run
    captures: KeptValues
    rows: RowSlots
    steered: list[str]  # locations with tables for edits
    tables: dict[str, Any]  # modules with tables for edits, or parameters of programs, by the location of their output
    rank: int


def tapped_modules(model: torch.nn.Module, taps: Iterable[str]) -> dict[str, torch.nn.Module]:
    """Return the modules of ``model`` that ``taps`` name, by path; raise ``ValueError`` if one names no module.

    Taps are paths as in ``named_modules``, or patterns such as ``"model.layers.*"``, in which ``*`` stands for one name.
    """
    found: dict[str, torch.nn.Module] = {}
    modules = dict(model.named_modules())
    for tap in taps:
        named = {path for path in modules if path.count(".") == tap.count(".") and fnmatch.fnmatchcase(path, tap)}
        if not named:
            children = ", ".join(path for path in modules if path and path.count(".") <= 1)
            raise ValueError(f"taps, captures, edits and programs: the model has no module {tap!r}. Paths begin with one of: {children}.")
        found |= {path: module for path, module in modules.items() if path in named}
    return found


def tap(model: torch.nn.Module, layout: Layout, rows: torch.Tensor, hidden: int, dtype: torch.dtype) -> Tapped:
    """Put what ``layout`` says into ``model``, which has not run yet, and whose hidden state has ``hidden`` channels of ``dtype``.

    ``rows`` are zeros, int64, for the longest step of the engine: the slot of each row, which every layer with tables reads.
    """
    named: dict[str, str] = {}
    for operation, places in (("capture", layout.captures), ("handoff", layout.taps)):  # a tap does what a capture does, and more
        for side in ("input", "output"):
            for path in tapped_modules(model, at_side(places, side)):
                named[f"model.{path}.{side}"] = operation
    steered = tapped_modules(model, layout.edits)
    parts = [tables_part(layout.rank, hidden, dtype), *(registered(digest).part(dtype) for digest in layout.functions)]
    programs = [registered(digest) for digest in layout.programs]
    modules: dict[str, Any] = {**tapped_modules(model, layout.modules)}
    for path, module in modules.items():
        module.nnsight_path = f"model.{path}"
        module.nnsight_takes = named.get(f"model.{path}.input", "")
        module.nnsight_returns = named.get(f"model.{path}.output", "")
        module.nnsight_calls, module.nnsight_parts = [], []
        module.nnsight_returns_parts = path in steered or is_layer(path)
        module.register_buffer("nnsight_rows", rows, persistent=False)
        if "capture" in (module.nnsight_takes, module.nnsight_returns):
            module.register_buffer("nnsight_mark", torch.zeros(1, device=rows.device), persistent=False)
        if path in steered:
            for part in parts:
                add_part(module, part, layout.slots, {})
        base: Any = type(module)
        module.__class__ = _tapped(base)
    for program in programs:
        carried: dict[str, torch.Tensor] = {}
        widths = {f"model.{path}.output": width_of(path, modules[path], hidden) for path in program.modules}
        for location, part in program.parts(widths, dtype, rows.device).items():
            add_part(modules[module_of(location)], part, layout.slots, carried)
    for module in modules.values():
        module.nnsight_steers = bool(module.nnsight_calls)
    locations, captured = ([place for place in named if named[place] == found] for found in ("handoff", "capture"))
    tables = {f"model.{path}.output": module for path, module in modules.items() if module.nnsight_steers}
    with_tables = [f"model.{path}.output" for path in steered]
    return Tapped(locations, captured, KeptValues(), RowSlots(rows), with_tables, tables, layout.rank)


def width_of(path: str, module: Any, hidden: int) -> int:
    """Return the number of channels of a module's output; raise ``ValueError`` if a device has a part of them only."""
    width = int(getattr(module, "output_size", hidden))
    if columns_of(module) is not None:
        raise ValueError(f"programs=: `{path}` has a part of its {width} channels on each device, and a program needs all of them.")
    return width


#: Most programs of requests that are kept traced.
_MOST_PROGRAMS = 64


class Stops:
    """Edits and programs of requests, for the places where an engine with this model runner, configuration and functions stops.

    Equal ones are one object.
    """

    def __init__(self, runner: Any, config: Any, functions: Mapping[str, EditFunction]) -> None:
        self._runner, self._config, self._functions = runner, config, functions
        self._programs: dict[str, StopProgram] = {}  # by digest, least recently used first
        self._edits: dict[tuple[str, str, int], StopProgram] = {}

    def of_program(self, program: GraphProgram) -> StopProgram:
        """Return a program, traced; raise ``ValueError`` if it cannot run there."""
        known = self._programs.pop(program.digest, None)
        if known is None:
            modules, hidden = tapped_modules(self._runner.get_model(), program.modules), self._config.get_hidden_size()
            widths = {f"model.{path}.output": width_of(path, modules[path], hidden) for path in program.modules}
            known = StopProgram(program.parts(widths, self._config.dtype, self._runner.device), program.digest)
        self._programs[program.digest] = known
        if len(self._programs) > _MOST_PROGRAMS:
            del self._programs[next(iter(self._programs))]
        return known

    def of_edit(self, location: str, name: str, rank: int) -> StopProgram:
        """Return the edit by tables, or by the function with this name, of the hidden state at ``location``."""
        key = (location, name, rank)
        if key not in self._edits:
            dtype, device = self._config.dtype, self._runner.device
            part = self._functions[name].part(dtype) if name else tables_part(rank, self._config.get_hidden_size(), dtype)
            held = replace(part, constants=[constant.to(device) for constant in part.constants])
            self._edits[key] = StopProgram({location: held})
        return self._edits[key]


@functools.cache
def _tapped(base: Any) -> Any:
    """Return the class of modules ``base`` with a ``forward`` that steers its output, and hands over its input and output."""
    forward_of_base: Callable[..., Any] = base.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.nnsight_takes:
            args, kwargs = _shown(self, (args, kwargs), self.nnsight_takes, ".input")
        output = forward_of_base(self, *args, **kwargs)
        if self.nnsight_steers:
            output = edited(self, output)
        if self.nnsight_returns:
            output = _shown(self, output, self.nnsight_returns, ".output")
        return output

    return type(f"Tapped{base.__name__}", (base,), {"forward": forward, "nnsight_base": base, "__module__": __name__})


def _shown(module: Any, value: Any, operation: str, side: str) -> Any:
    """Return ``value`` as the blocks leave it. Dynamo traces this."""
    leaves: list[torch.Tensor] = []
    form = _form_of(value, leaves)
    if not leaves:
        return value
    if operation == "capture":
        torch.ops.nnsight.capture(leaves, module.nnsight_mark, form, module.nnsight_path + side)
        return value
    leaves = [leaf.clone() for leaf in leaves]
    torch.ops.nnsight.handoff(leaves, form, module.nnsight_path + side)
    return _filled(value, list(leaves))


def _form_of(value: Any, leaves: list[torch.Tensor]) -> str:
    """Return the structure of ``value`` as a literal, with an index for each tensor, and add the tensors to ``leaves``.

    The operation gets the literal as a constant of the graph, so a graph from a cache has it, too. An item that is neither a tensor
    nor a container is ``...``: blocks cannot use it.
    """
    if isinstance(value, torch.Tensor):
        leaves.append(value)
        return str(len(leaves) - 1)
    if type(value) is tuple:
        return "(" + "".join([_form_of(item, leaves) + ", " for item in value]) + ")"
    if type(value) is list:
        return "[" + "".join([_form_of(item, leaves) + ", " for item in value]) + "]"
    if type(value) is dict:
        return "{" + "".join([repr(key) + ": " + _form_of(item, leaves) + ", " for key, item in value.items()]) + "}"
    return "None" if value is None else "..."


def _filled(value: Any, leaves: list[torch.Tensor]) -> Any:
    """Return ``value`` with other tensors, taken in order from ``leaves``."""
    if isinstance(value, torch.Tensor):
        return leaves.pop(0)
    if type(value) in (tuple, list):
        return type(value)([_filled(item, leaves) for item in value])
    if type(value) is dict:
        return {key: _filled(item, leaves) for key, item in value.items()}
    return value
