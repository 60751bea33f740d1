"""Taps of a compiled engine: operations in the model's graph that hand the values of modules to blocks.

vLLM compiles the model as one graph, and no Python runs inside of it. For each *tapped* module, the graph gets an operation,
``nnsight::handoff``. It calls the step of the engine with the module's output or input, so blocks can work on their rows. Everything
between two taps stays compiled. Three design decisions:

* vLLM traces the first forward pass, so taps are made earlier, when the model is loaded. The class of a tapped module is replaced by a
  subclass, which dynamo traces like any other class. Dynamo would not see hooks.
* The operation returns nothing and writes to its argument. With CUDA graphs, each piece of the graph reads from the address that was
  recorded, so it would ignore a new tensor. The arguments are copies, because the model may have aliases of a value.
* The tapped modules are part of vLLM's configuration (``additional_config``), and so of the key of its compile cache. Otherwise vLLM could
  load a graph with other taps.
"""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ...runtime.interleaver import active_interleaver
from ..steering.graph_functions import EditFunction, registered
from ..steering.graph_parts import add_part, edited, is_layer
from ..steering.graph_programs import GraphProgram, module_of
from ..steering.pairs import SUM, WHOLE, form_of
from ..steering.tables import RowSlots, tables_part
from .kept_values import KeptValues, define, parsed, value_of
from .spread import columns_of
from .step_programs import StopProgram
from .steps import EngineStep

#: Name of the operation in vLLM's list of splitting operations.
HANDOFF = "nnsight::handoff"

#: Part of the key of the compile cache. Increment it whenever the code that is put into a graph changes.
_FORMAT = 9


def _handoff(leaves: list[torch.Tensor], form: str, location: str) -> None:
    """Offer the value with the tensors ``leaves`` and the structure ``form`` at ``location``, and write the result into ``leaves``."""
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
    """The taps, captures, tables and programs in the graph of a compiled model."""

    taps: tuple[str, ...] = ()  # modules whose output is handed to blocks, as paths or patterns; with suffix `.input`, their input
    captures: tuple[str, ...] = ()  # likewise, modules whose values are copied for blocks that read them, see `kept_values`
    edits: tuple[str, ...] = ()  # layers with tables for edits, as paths or patterns, see `steering.tables`
    slots: int = 16  # number of different edits for which the tables have entries
    rank: int = 1  # most directions that an edit may remove
    functions: tuple[str, ...] = ()  # digests of the functions of these layers, see `steering.graph_functions`
    programs: tuple[str, ...] = ()  # digests of programs, see `steering.graph_programs`
    programmed: tuple[str, ...] = ()  # modules at which these programs have parts

    @property
    def only_tables(self) -> bool:
        """Whether it has tables for edits, or programs, but no taps or captures, which hand values to blocks."""
        return bool(self.edits or self.programmed) and not self.taps and not self.captures

    @property
    def modules(self) -> list[str]:
        """The paths and patterns of all its modules."""
        places = (*self.taps, *self.captures)
        return [*at_side(places, "input"), *at_side(places, "output"), *self.edits, *self.programmed]

    @property
    def description(self) -> dict[str, Any]:
        """The layout as plain data, which vLLM includes in the key of its compile cache."""
        return {"format": _FORMAT, **asdict(self)}

    @classmethod
    def described(cls, description: Mapping[str, Any]) -> Layout:
        """Return the layout with the given :attr:`description`."""
        return cls(**{name: value for name, value in description.items() if name != "format"})


def at_side(places: Iterable[str], side: str) -> list[str]:
    """Return the paths among ``places`` whose suffix is ``side``, ``"input"`` or ``"output"``. No suffix means ``"output"``."""
    found = []
    for place in places:
        path, _, tail = place.rpartition(".")
        at = {"input": "input", "inputs": "input", "output": "output"}.get(tail)
        if (at or "output") == side:
            found.append(place if at is None else path)
    return found


@dataclass(frozen=True)
class Tapped:
    """The parts that a layout has put into a model."""

    locations: list[str]  # locations of taps, at which blocks can stop
    captured: list[str]  # locations of captures, which blocks can read after the model has run
    captures: KeptValues
    rows: RowSlots
    steered: list[str]  # locations with tables for edits
    tables: dict[str, Any]  # modules with tables for edits or for parameters of programs, by the location of their output
    rank: int  # most directions that an edit may remove


def tapped_modules(model: torch.nn.Module, taps: Iterable[str]) -> dict[str, torch.nn.Module]:
    """Return the modules of ``model`` that ``taps`` name, by path. Raise ``ValueError`` if a tap names no module.

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


def tap(
    model: torch.nn.Module, layout: Layout, rows: torch.Tensor, hidden: int, dtype: torch.dtype, batched: bool = False
) -> Tapped:
    """Put the parts of ``layout`` into ``model``, which has not run yet. Its hidden state has ``hidden`` channels of ``dtype``.

    ``rows`` has the slot of each row, which every layer with tables reads: zeros, int64, with as many rows as the longest step has.
    For ``batched`` see :class:`.RequestRows`.
    """
    named: dict[str, str] = {}
    for operation, places in (("capture", layout.captures), ("handoff", layout.taps)):  # a tap takes precedence, because it allows edits
        for side in ("input", "output"):
            for path in tapped_modules(model, at_side(places, side)):
                named[f"model.{path}.{side}"] = operation
    steered = tapped_modules(model, layout.edits)
    edited_paths = {*steered, *(path for digest in layout.programs for path in registered(digest).modules)}
    parts = [tables_part(layout.rank, hidden, dtype), *(registered(digest).part(dtype) for digest in layout.functions)]
    programs = [registered(digest) for digest in layout.programs]
    modules: dict[str, Any] = {**tapped_modules(model, layout.modules)}
    for path, module in modules.items():
        module.nnsight_path = f"model.{path}"
        module.nnsight_takes = named.get(f"model.{path}.input", "")
        module.nnsight_returns = named.get(f"model.{path}.output", "")
        module.nnsight_calls, module.nnsight_parts = [], []
        module.nnsight_returns_parts = (path in steered or is_layer(path)) and not _is_whole(module, path, edited_paths)
        module.nnsight_batched = batched
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


def _is_whole(module: Any, path: str, edited_paths: Collection[str]) -> bool:
    """Whether a layer returns the whole hidden state in the first tensor. Raise ``ValueError`` if that has to be known, and is not."""
    return path in edited_paths and form_of(module, f"model.{path}.output") == WHOLE


def width_of(path: str, module: Any, hidden: int) -> int:
    """Return the number of channels of a module's output. Raise ``ValueError`` if the channels are spread over devices."""
    width = int(getattr(module, "output_size", hidden))
    if columns_of(module) is not None:
        raise ValueError(f"programs=: each device has only a part of the {width} channels of `{path}`, and a program needs all of them.")
    return width


#: Most traced programs of requests that are kept in the cache.
_MAX_PROGRAMS = 64


class StopPrograms:
    """A cache of the edits and programs of requests that run where the engine stops. Equal edits and programs are the same object.

    ``runner`` is vLLM's model runner, and ``config`` its model configuration. ``functions`` are those of the engine.
    """

    def __init__(self, runner: Any, config: Any, functions: Mapping[str, EditFunction]) -> None:
        self._runner, self._config, self._functions = runner, config, functions
        self._programs: dict[str, StopProgram] = {}  # by digest, least recently used first
        self._edits: dict[tuple[str, str, int], StopProgram] = {}

    def of_program(self, program: GraphProgram) -> StopProgram:
        """Return ``program``, traced for this engine. Raise ``ValueError`` if it cannot run in an engine."""
        known = self._programs.pop(program.digest, None)
        if known is None:
            modules, hidden = tapped_modules(self._runner.get_model(), program.modules), self._config.get_hidden_size()
            widths = {f"model.{path}.output": width_of(path, modules[path], hidden) for path in program.modules}
            known = StopProgram(
                program.parts(widths, self._config.dtype, self._runner.device), program.digest, self._pairs_of(program.modules)
            )
        self._programs[program.digest] = known
        if len(self._programs) > _MAX_PROGRAMS:
            del self._programs[next(iter(self._programs))]
        return known

    def of_edit(self, location: str, name: str, rank: int) -> StopProgram:
        """Return an edit of the hidden state at ``location``: by the function ``name``, or, if that is empty, by the sum of tables."""
        key = (location, name, rank)
        if key not in self._edits:
            dtype, device = self._config.dtype, self._runner.device
            part = self._functions[name].part(dtype) if name else tables_part(rank, self._config.get_hidden_size(), dtype)
            held = replace(part, constants=[constant.to(device) for constant in part.constants])
            self._edits[key] = StopProgram({location: held}, pairs=self._pairs_of([module_of(location)]))
        return self._edits[key]

    def _pairs_of(self, paths: Iterable[str]) -> set[str]:
        """Return the locations after the layers among ``paths`` whose hidden state is a sum. Raise ``ValueError`` if this is not known."""
        modules = {f"model.{path}.output": self._runner.get_model().get_submodule(path) for path in paths if is_layer(path)}
        return {location for location, module in modules.items() if form_of(module, location) == SUM}


@functools.cache
def _tapped(base: Any) -> Any:
    """Return a subclass of the module class ``base`` whose ``forward`` steers its output, and hands over its input and output."""
    forward_of_base: Callable[..., Any] = base.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.nnsight_takes:
            args, kwargs = _handed_over(self, (args, kwargs), self.nnsight_takes, ".input")
        output = forward_of_base(self, *args, **kwargs)
        if self.nnsight_steers:
            output = edited(self, output)
        if self.nnsight_returns:
            output = _handed_over(self, output, self.nnsight_returns, ".output")
        return output

    return type(f"Tapped{base.__name__}", (base,), {"forward": forward, "nnsight_base": base, "__module__": __name__})


def _handed_over(module: Any, value: Any, operation: str, side: str) -> Any:
    """Call ``operation`` on ``value``, and return the value as blocks leave it. Dynamo traces this."""
    leaves: list[torch.Tensor] = []
    form = _form_of(value, leaves)
    if not leaves:
        return value
    if operation == "capture":
        if module.nnsight_batched:
            leaves = [_without_batch(leaf) for leaf in leaves]
        torch.ops.nnsight.capture(leaves, module.nnsight_mark, form, module.nnsight_path + side)
        return value
    leaves = [leaf.clone() for leaf in leaves]
    torch.ops.nnsight.handoff(leaves, form, module.nnsight_path + side)
    return _with_leaves(value, list(leaves))


def _without_batch(leaf: torch.Tensor) -> torch.Tensor:
    """Return a tensor ``[1, tokens, ...]`` of the Transformers backend without its batch, in which buffers of captures have no room. A
    floating-point tensor with two dimensions has no batch: vLLM's own modules get and return it."""
    return leaf[0] if leaf.dim() > 2 or (leaf.dim() == 2 and not leaf.is_floating_point()) else leaf


def _form_of(value: Any, leaves: list[torch.Tensor]) -> str:
    """Return the structure of ``value`` as the text of a Python literal with an index for each tensor. Add the tensors to ``leaves``.

    For example, ``(hidden, None)`` has the form ``"(0, None, )"``. The literal is a constant of the graph, so it is also in graphs from
    vLLM's cache. An item that is neither a tensor nor a container becomes ``...``: blocks cannot use it.
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


def _with_leaves(value: Any, leaves: list[torch.Tensor]) -> Any:
    """Return ``value`` with its tensors replaced by ``leaves``, in order. This empties ``leaves``."""
    if isinstance(value, torch.Tensor):
        return leaves.pop(0)
    if type(value) in (tuple, list):
        return type(value)([_with_leaves(item, leaves) for item in value])
    if type(value) is dict:
        return {key: _with_leaves(item, leaves) for key, item in value.items()}
    return value
