"""Bound programs: a program and a model, as a function of the model's input and of the program's named inputs."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Sequence
from dataclasses import replace
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch

from ..modeling.base import NNsight
from ..modeling.generation import Generation
from ..runtime.interleaver import Interleaver
from ..runtime.modules.interception import is_compiling
from ..runtime.report import Report
from ..runtime.uncompiled import leave_to_python, uncompiled
from .format.errors import InvalidProgramError
from .format.limits import Limits
from .format.nodes import Node
from .format.payload import Job, inputs_of
from .format.results import Tensors, values_of
from .inlined import InlinedProgram
from .run.execution import run_blocks
from .run.fake_runs import device_of
from .run.interpreter import Interpreter

if TYPE_CHECKING:
    from ..fx.replay.known_runs import KnownRuns


#: Kinds of nodes with effects outside the graph of a compiled model. A program with such a node is interpreted in each call.
_OUTSIDE_GRAPH = frozenset({"log", "stop", "barrier", "backward"})


class _BoundInterpreter(Interpreter):
    """Interprets a program on tensors of the caller. Gradients flow to these tensors."""

    def _require_grad(self, node: Node) -> None:
        source = node["value"]["ref"][0]
        if not (self.job.nodes[source]["do"] == "const" and self.values[source][0].requires_grad):
            super()._require_grad(node)


class Inputs:
    """The tensors that a program uses: its named inputs, its constants, and weights of the model.

    Args:
        job: The program.
        model: The model that the program is bound to.
        given: Tensors of the user, by name, in place of tensors of the program.
    """

    def __init__(self, job: Job, model: NNsight, given: dict[str, torch.Tensor]) -> None:
        self._model = model
        self.names = sorted({node["tensor"] for node in job.nodes if node["do"] == "const"})
        self._weights = sorted({node["name"] for node in job.nodes if node["do"] == "weight"})
        self.values = {**{name: job.tensors[name] for name in self.names}, **given}
        self._given = set(given)
        self.device = torch.device("cpu")
        self._placed: dict[str, torch.Tensor] | None = None
        self._copied: list[tuple[torch.Tensor, int]] = []  # the values of which `_placed` has copies, each with its version

    def placed(self, anew: bool = False) -> dict[str, torch.Tensor]:
        """Return the inputs and constants by name, on the device of the model. Only with ``anew`` is that device looked up again.

        A copy on the device is made again after an edit of the value in place. Vectors of the user are copied for each call, because an
        edit through ``.data`` or NumPy cannot be seen, and so are tensors whose copy depends on the grad mode.
        """
        device = device_of(self._model._module) if anew else self.device
        if self._placed is not None and device == self.device and all(value._version == version for value, version in self._copied):
            return self._placed
        self.device, self._placed = device, None
        outside = {name: value for name, value in self.values.items() if value.device != device}
        vectors = any(value.dim() > 0 and name in self._given for name, value in outside.items())
        if vectors or any(value.requires_grad or value.is_inference() for value in outside.values()):
            return {name: value.to(device) for name, value in self.values.items()}
        with torch.inference_mode(False):
            self._placed = {name: value.to(device) for name, value in self.values.items()}
        self._copied = [(value, value._version) for value in outside.values()]
        return self._placed

    def put(self, name: str, value: Any) -> torch.Tensor:
        """Set the value of the input ``name`` for later calls, and return it as a tensor. Raises the errors of :meth:`checked`."""
        self.values[name], self._placed = self.checked(name, value), None
        self._given.add(name)
        return self.values[name]

    def weights(self) -> list[torch.Tensor]:
        """Return the weights of the model that the program uses."""
        module = self._model._module
        parts = [name.rpartition(".") for name in self._weights]
        return [getattr(module.get_submodule(path), attribute) for path, _, attribute in parts]

    def checked(self, name: str, value: Any) -> torch.Tensor:
        """Return ``value`` as a tensor for the input ``name``.

        Raises:
            TypeError: If ``value`` is neither a tensor with the dtype and number of dimensions of the recording, nor a number for an
                input without dimensions.
        """
        like = self.values[name]
        given = isinstance(value, torch.Tensor)
        if given:
            if value.dtype == like.dtype and value.dim() == like.dim():
                return value
        elif like.dim() == 0 and _is_number(value, like.dtype):
            device = "cpu" if self.device.type == "meta" else self.device
            return torch.full((), value, dtype=like.dtype, device=device)  # on a GPU at once: a copy from the CPU would wait for it
        found = f"{value.dtype} with {value.dim()} dimensions" if given else type(value).__name__
        other_dtype = given and value.dim() == like.dim()
        raise TypeError(
            f"The input `{name}` was recorded as a {'float or ' if like.dim() == 0 else ''}tensor of {like.dtype} with {like.dim()} "
            f"dimensions, and is given {found}. {f'Pass `value.to({like.dtype})`, or r' if other_dtype else 'R'}ecord the program with "
            "such a value."
        )


def _is_number(value: Any, dtype: torch.dtype) -> bool:
    """Whether ``value`` is a number, also one of NumPy, that a tensor of ``dtype`` can have."""
    if type(value) not in (int, float) and (not isinstance(value, Real) or isinstance(value, bool)):
        return False
    return dtype.is_floating_point or dtype.is_complex or int(value) == value


class BoundProgram:
    """A program as a function of the input of one model. :meth:`nnsight.Program.bind` makes it.

    A call takes the input of the model as ``model.trace(...)`` does, and values of the named inputs by name. It returns the saved values
    by name. On a compiled model, the first call for a captured graph interprets the program. Later calls run only the lowered graph.

    Attributes:
        report: How the latest call ran.
        inputs: The tensors that the program uses.
    """

    def __init__(self, job: Job, model: NNsight, inputs: Sequence[str], values: dict[str, torch.Tensor] | None = None) -> None:
        self._job, self._model, self._names = job, model, tuple(inputs)
        forward = inspect.signature(type(model._module).forward).parameters
        self._unnamed = frozenset(inputs_of(job).keys() - {*inputs, *forward})
        self.inputs = Inputs(job, model, values or {})
        self._runs: KnownRuns | None = None  # effects of earlier runs on the compiled model
        kinds = {node["do"] for node in job.nodes}
        self._differentiates = "backward" in kinds
        self._is_pure = kinds.isdisjoint(_OUTSIDE_GRAPH)  # whether all its effects are in the graph
        self.report = Report()
        self._inlined: InlinedProgram | None = None

    def make_inlinable(self) -> None:
        """Let dynamo trace calls into the graph of a function under ``torch.compile``, if hooks of modules can express the program."""
        self.inputs.placed(anew=True)  # looks up the device of the model
        with contextlib.suppress(InvalidProgramError):
            self._inlined = InlinedProgram(self._model._module, self._job)

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Run the model with the program, and return the saved values by name.

        In a function under ``torch.compile``, the call becomes part of the graph of that function. The input is then the input of the
        module itself, such as token ids. Some programs break the graph and run as Python, which is an error with ``fullgraph=True``: those
        that print, stop the model, compute gradients, or have several invokes, and those of generations or of ``.source``.

        Raises:
            TypeError: If the value of an input does not fit the program, or if ``bind`` was not given its name.
            InvalidProgramError: If the program does not fit the input of the model.
            ExecutionFailedError: If the program fails while it runs.
        """
        given = {name: self.inputs.checked(name, kwargs.pop(name)) for name in self._names if name in kwargs}
        for name in kwargs:
            if name in self._unnamed:
                raise TypeError(f"`{name}` is an input of the program that `bind` was not given: `program.bind(model, inputs=[{name!r}])`.")
        if is_compiling() and self._inlined is not None:
            values = {**self.inputs.values, **given}
            return self._inlined({name: value.to(self.inputs.device) for name, value in values.items()}, args, kwargs)
        return self._call(args, kwargs, given)

    @uncompiled
    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any], given: dict[str, torch.Tensor]) -> dict[str, Any]:
        leave_to_python("a program that is bound to a model")
        model, call = self._model, self._job.runs[0]["call"]
        generation: Any = Generation(model) if call == "generate" else None  # type: ignore[arg-type]
        driver = model._driver(False if self._differentiates else None, generation)
        args, kwargs = (model if generation is None else generation)._prepare_input(*args, **kwargs)[:2]
        return self.run(driver, args, kwargs, given)[1]

    def run(
        self, driver: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: dict[str, torch.Tensor], returns: bool = False
    ) -> tuple[Any, dict[str, Any]]:
        """Run ``driver`` on prepared arguments. Return the output of the model (if ``returns``) and the saved values by name."""
        inputs = self.inputs
        compiled = self._is_pure and getattr(driver, "replays", None) is not None
        if compiled and self._runs is not None:
            placed = inputs.placed()
            if given:
                placed = {**placed, **{name: value.to(inputs.device) for name, value in given.items()}}
            tensors = [*placed.values(), *inputs.weights()]
            replayed = self._runs.replay(driver, tensors, (args, kwargs))
            if replayed is not None:
                output, saved, self.report = replayed
                return output, saved
        report = self.report = Report()
        constants = {**inputs.placed(anew=True), **{name: value.to(inputs.device) for name, value in given.items()}}
        if not compiled:
            output, saves, made = self.interpret(driver, args, kwargs, constants, report, returns)
            return output, values_of(saves, made)
        if self._runs is None:
            from ..fx.replay.known_runs import KnownRuns

            self._runs = KnownRuns()
        tensors = [*constants.values(), *inputs.weights()]
        with self._runs.keeping_journal() as journal:
            output, saves, made = self.interpret(driver, args, kwargs, constants, report, returns, journal)
            saved = values_of(saves, made)
            self._runs.learn(driver, journal, saved, tensors, report)
        return output, saved

    def interpret(
        self,
        driver: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        constants: dict[str, torch.Tensor],
        report: Report,
        returns: bool = False,
        journal: Any = None,
    ) -> tuple[Any, dict[str, Any], dict[str, torch.Tensor]]:
        """Run the model and interpret the nodes. Return the output of the model, the trees of the saved values, and their tensors."""
        job = replace(self._job, tensors=constants)
        interpreter = _BoundInterpreter(self._model, job, Limits(seconds=float("inf")))
        interpreter.on_log = print
        blocks = interpreter.mediators(0)
        if journal is not None:
            from ..fx.replay.known_runs import with_early_calls

            for block in blocks:
                assert block.intervention is not None
                block.intervention = with_early_calls(journal, block.intervention)
        interleaver = Interleaver(blocks)
        interleaver.returns, interleaver.inputs = returns, list(constants.values())
        if journal is not None and len(blocks) == 1:
            interleaver.output_location = f"{self._model._tree.path}.output"
        output: list[Any] = []

        def call() -> Any:
            output.append(driver(interleaver, args, kwargs, report))
            return output[0]

        with torch.enable_grad() if self._differentiates else contextlib.nullcontext():
            run_blocks(interleaver, [interpreter], call)
        tensors = Tensors()
        return output[0] if output else None, interpreter.saved(tensors.tree), tensors


def check_names(job: Job, names: Sequence[str], fixed: dict[str, str]) -> None:
    """Raise an :class:`InvalidProgramError` unless a program has the inputs ``names``. ``fixed`` has the reasons, by name."""
    there = inputs_of(job)
    for name in names:
        if name in there:
            continue
        why = fixed.get(name, "no call of torch in the block uses a tensor or a float from outside that has this name")
        has = f"Its inputs are {', '.join(sorted(there))}." if there else "It has no inputs."
        raise InvalidProgramError(f"`{name}` is not an input of this program: {why}. {has}")
