"""A program bound to a model: a function of the model's input and of the program's named inputs."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Sequence
from dataclasses import replace
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


#: Kinds of nodes that do something beside the graph of a compiled model, so that it is not enough to call that.
_BESIDES = frozenset({"log", "stop", "barrier", "backward"})


class _Interpreter(Interpreter):
    """Interprets a program on tensors of the caller, to which gradients flow."""

    def _require_grad(self, node: Node) -> None:
        source = node["value"]["ref"][0]
        if not (self.job.nodes[source]["do"] == "const" and self.values[source][0].requires_grad):
            super()._require_grad(node)


class Inputs:
    """The values of the tensors that a program takes: its named inputs, constants, and weights of the model."""

    def __init__(self, job: Job, model: NNsight) -> None:
        self._model = model
        self.names = sorted({node["tensor"] for node in job.nodes if node["do"] == "const"})
        self._weights = sorted({node["name"] for node in job.nodes if node["do"] == "weight"})
        self.values = {name: job.tensors[name] for name in self.names}
        self.device = torch.device("cpu")
        self._placed: dict[str, torch.Tensor] | None = None

    def placed(self, anew: bool = False) -> dict[str, torch.Tensor]:
        """Return the values by name, where the model is, or ``anew``, was at the time of the latest call that asked."""
        if anew or self._placed is None:
            self.device = device_of(self._model._module)
            self._placed = None
            placed = {name: value.to(self.device) for name, value in self.values.items()}
            if any(placed[name] is not value for name, value in self.values.items()):
                return placed  # copies, which would not follow an edit of the values
            self._placed = placed
        return self._placed

    def put(self, name: str, value: Any) -> torch.Tensor:
        """Give the input ``name`` another value, from the next call on, and return it as a tensor; errors are those of :meth:`checked`."""
        self.values[name], self._placed = self.checked(name, value), None
        return self.values[name]

    def weights(self) -> list[torch.Tensor]:
        """Return the weights."""
        module = self._model._module
        parts = [name.rpartition(".") for name in self._weights]
        return [getattr(module.get_submodule(path), attribute) for path, _, attribute in parts]

    def checked(self, name: str, value: Any) -> torch.Tensor:
        """Return ``value`` as a tensor for the input ``name``.

        Raises:
            TypeError: If it is neither a number nor a tensor of the dtype and the number of dimensions that the program was recorded with.
        """
        like = self.values[name]
        if type(value) in (int, float) and like.dim() == 0:
            return torch.tensor(value, dtype=like.dtype, device="cpu")
        if isinstance(value, torch.Tensor) and value.dtype == like.dtype and value.dim() == like.dim():
            return value
        given = isinstance(value, torch.Tensor)
        found = f"{value.dtype} with {value.dim()} dimensions" if given else type(value).__name__
        other_dtype = given and value.dim() == like.dim()
        raise TypeError(
            f"The input `{name}` was recorded as a {'float or ' if like.dim() == 0 else ''}tensor of {like.dtype} with {like.dim()} "
            f"dimensions, and is given {found}. {f'Pass `value.to({like.dtype})`, or r' if other_dtype else 'R'}ecord the program with "
            "a value like this."
        )


class BoundProgram:
    """A program as a function of one model; made by :meth:`nnsight.Program.bind`.

    A call takes the input of the model as ``model.trace(...)`` does, and values of the named inputs by name. It returns the saved values
    by name. On a compiled model, calls after the first one for a captured graph run the lowered graph and no Python of the program.

    Attributes:
        report: How the latest call ran.
        inputs: The values of what it takes.
    """

    def __init__(self, job: Job, model: NNsight, inputs: Sequence[str], values: dict[str, torch.Tensor] | None = None) -> None:
        self._job, self._model, self._names = job, model, tuple(inputs)
        forward = inspect.signature(type(model._module).forward).parameters
        self._unnamed = frozenset(inputs_of(job).keys() - {*inputs, *forward})
        self.inputs = Inputs(job, model)
        self.inputs.values |= values or {}
        self._runs: KnownRuns | None = None  # what is known of runs on the compiled model
        kinds = {node["do"] for node in job.nodes}
        self._differentiates = "backward" in kinds
        self._is_pure = kinds.isdisjoint(_BESIDES)  # whether all that it does is in the graph
        self.report = Report()
        self._inlined: InlinedProgram | None = None

    def make_inlinable(self) -> None:
        """Let functions under ``torch.compile`` have calls in their graphs, if the program can be hooks of the model's modules."""
        self.inputs.placed(anew=True)  # finds the device of the model
        with contextlib.suppress(InvalidProgramError):
            self._inlined = InlinedProgram(self._model._module, self._job)

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Run the model with the program; return the saved values by name.

        In a function under ``torch.compile``, the call is part of that function's graph; the input is then what the module takes, without
        a tokenizer. A program that prints, stops the model, has gradients or several invokes, or looks into generations or ``.source``,
        runs as Python beside the graph, and is an error with ``fullgraph=True``.

        Raises:
            TypeError: If the value of an input does not fit the program, or `bind` was not given its name.
            InvalidProgramError: If the program does not fit the input of the model.
            ExecutionFailedError: If the program fails while it runs.
        """
        given = {name: self.inputs.checked(name, kwargs.pop(name)) for name in self._names if name in kwargs}
        for name in kwargs:
            if name in self._unnamed:
                raise TypeError(f"`{name}` is an input of the program: name it, as in `program.bind(model, inputs=[{name!r}])`.")
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
        """Run ``driver`` on prepared arguments; return the output of the model, if ``returns``, and the saved values by name."""
        inputs = self.inputs
        compiled = self._is_pure and getattr(driver, "replays", None) is not None
        if compiled and self._runs is not None:
            tensors = [*({**inputs.placed(), **given} if given else inputs.placed()).values(), *inputs.weights()]
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
        with self._runs.written_down() as journal:
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
        """Run the nodes one by one; return the output of the model, the trees of the saved values, and the tensors in them."""
        job = replace(self._job, tensors=constants)
        interpreter = _Interpreter(self._model, job, Limits(seconds=float("inf")))
        interpreter.on_log = print
        blocks = interpreter.mediators(0)
        if journal is not None:
            from ..fx.replay.known_runs import listening

            for block in blocks:
                assert block.intervention is not None
                block.intervention = listening(journal, block.intervention)
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
    """Raise an :class:`InvalidProgramError` unless a program has the inputs ``names``; ``fixed`` says why some are none."""
    there = inputs_of(job)
    for name in names:
        if name in there:
            continue
        why = fixed.get(name, "no call of torch in the block uses a tensor or a float of this name from outside")
        has = f"Its inputs are {', '.join(sorted(there))}." if there else "It has no inputs."
        raise InvalidProgramError(f"`{name}` is no input of this program: {why}. {has}")
