"""Forms of a program: the block of a feature is recorded, and what it saves comes from the program in another form.

A form is the backend of the traces of a wrapped model, so features do not know of it.

=========== ==========================================================================================================
``program`` ``trace(program=True)``: the recorded program is interpreted
``file``    it is recorded on a model without weights, written to a file, read again, and run on another, loaded model
``bound``   it is bound to a compiled model; later calls, of other sizes, call the program of the first one
``baked``   it is applied to the model and baked; the plain module runs, and ``torch.compile`` captures it as one graph
=========== ==========================================================================================================
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from nnsight import NNsight, Program
from nnsight.program.bound import BoundProgram
from nnsight.program.format.results import Tensors
from nnsight.program.format.trees import ABSENT, NONE
from nnsight.program.record.recorder import record
from nnsight.remote import InvalidProgramError
from nnsight.runtime.report import Report
from nnsight.tracing import Backend

from .values import difference, main

#: Features whose blocks are several invokes, so that their programs belong to inputs with these rows.
_INVOKES = ("batch", "generation")


class Form(Backend):
    """Records blocks, and runs their programs on ``model``.

    Attributes:
        model: The wrapped model that runs.
        programs: Those of the latest feature, in order.
        reports: How they ran.
        features: Names of the features that it is for; empty for all.
    """

    features: tuple[str, ...] = ()

    def __init__(self, model: NNsight) -> None:
        self.model = model
        self.programs: list[Program] = []
        self.reports: list[Report] = []

    def begin(self, feature: str, batch: int) -> None:
        """Forget the programs of earlier features."""
        self.programs, self.reports = [], []

    def result(self, found: dict[str, Any]) -> dict[str, Any]:
        """Return what is compared with the hooks, from what the feature returned."""
        return found

    def run(self, program: Program, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the saved values by name, for prepared arguments."""
        raise NotImplementedError

    def __call__(self, tracer: Any) -> None:
        recorded = record(tracer, super().__call__(tracer), for_other_inputs=True)
        program = tracer.program = Program(recorded.job, recorded.fixed)
        self.programs.append(program)
        recorded.fill(*_as_results(recorded.job.saves, self.run(program, *recorded.arguments)))


class Interpreted(Form):
    """The form of ``trace(program=True)``."""

    def __call__(self, tracer: Any) -> None:
        self.model._program_backend(tracer._call[1], None)(tracer)
        self.programs.append(tracer.program)
        self.reports.append(tracer.report)


class Filed(Form):
    """A file, run on a model that has never seen the block."""

    def run(self, program: Program, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            program.save(Path(folder) / "program.safetensors")
            loaded = Program.load(Path(folder) / "program.safetensors")
        assert loaded == program and hash(loaded) == hash(program) and repr(loaded) == repr(program), "the file is another program"
        bound = loaded.bind(self.model)
        found = bound(*args, **kwargs)
        self.reports.append(bound.report)
        return found


class Bound(Form):
    """A function of the compiled model: the first program of a feature, for all sizes that it fits."""

    def __init__(self, model: NNsight) -> None:
        super().__init__(model)
        self._kept: dict[Any, BoundProgram] = {}

    def begin(self, feature: str, batch: int) -> None:
        super().begin(feature, batch)
        self._key = feature, batch if feature in _INVOKES else None

    def run(self, program: Program, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        bound = self._kept.setdefault(self._key, program.bind(self.model))
        before = [(buffer, buffer.clone()) for buffer in self.model._module.buffers()]
        try:
            found = bound(*args, **kwargs)
        except InvalidProgramError as error:
            if "looked at" not in str(error):
                raise
            with torch.no_grad():  # the run had begun
                for buffer, value in before:
                    buffer.copy_(value)
            bound = self._kept[self._key] = program.bind(self.model)
            found = bound(*args, **kwargs)
        self.reports.append(bound.report)
        return found


class Baked(Form):
    """A plain module with hooks; for features that save what the model returns, as ``out``."""

    features = ("skip-result", "bfloat16")

    def run(self, program: Program, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        baked = self.model.apply(program).bake(*args, **kwargs)
        self._out = main(baked(*args, **kwargs))
        compiled = torch.compile(baked, fullgraph=True, backend="aot_eager")
        try:
            found = main(compiled(*args, **kwargs))
        except Exception as error:
            if "modified by an inplace operation" in str(error):  # autograd has saved what an edit changes, so there is no backward pass
                with torch.no_grad():
                    found = main(compiled(*args, **kwargs))
            elif _is_one_graph(self.model._module, args, kwargs):
                raise
            else:
                return {}
        wrong = difference({"out": found}, {"out": self._out}, found.dtype)
        assert not wrong, f"torch.compile: {wrong}"
        return {}

    def result(self, found: dict[str, Any]) -> dict[str, Any]:
        return {"out": self._out}


def _is_one_graph(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether torch captures the model itself as one graph."""
    try:
        torch.compile(module, fullgraph=True, backend="aot_eager")(*args, **kwargs)
    except Exception:
        return False
    return True


def formed(kind: type[NNsight]) -> type[NNsight]:
    """Return a class of wrapped models whose traces have the backend ``form`` that is set on them."""

    class Formed(kind):  # type: ignore[misc, valid-type]
        def _tracer(self, function: Any, args: Any, kwargs: Any, compile: Any, backend: Any, *rest: Any, **options: Any) -> Any:
            return super()._tracer(function, args, kwargs, compile, self.__dict__["form"], *rest, **options)

    return Formed


def _as_results(saves: dict[str, Any], found: dict[str, Any]) -> tuple[dict[str, Any], Tensors]:
    """Return the trees of saved values with what was found in place of references."""
    tensors = Tensors()
    return {name: _filled(saves[name], value, tensors) for name, value in found.items()}, tensors


def _filled(tree: Any, value: Any, tensors: Tensors) -> Any:
    if type(tree) is not dict:
        return tree
    ((kind, content),) = tree.items()
    if kind == "ref":
        return tensors.tree(value) if isinstance(value, torch.Tensor) else {"absent": NONE if value is None else "never computed"}
    if kind in ("list", "tuple"):
        rest = iter(value)
        return {kind: [item if "absent" in _kinds(item) else _filled(item, next(rest, ABSENT), tensors) for item in content]}
    if kind == "dict":
        return {kind: [[key, _filled(item, value[key], tensors)] for key, item in content]}
    return tree


def _kinds(tree: Any) -> Any:
    return tree if type(tree) is dict else ()


FORMS: dict[str, type[Form]] = {"program": Interpreted, "file": Filed, "bound": Bound, "baked": Baked}
