"""Programs as a part of the compiled graph of an engine.

``programs={"name": program}`` puts a :class:`nnsight.Program` into the graph when the engine starts, as if it were part of the model's
source. Requests ask for it by name. A program is recorded on the model of transformers, without weights. It reads and edits hidden states
``[batch, positions, hidden]``: outputs of layers, attention, MLPs and norms. Here it runs for each token separately, as a batch of one with
one position. So requests are never mixed, and a program that looks at several positions is refused when the engine starts.

The nodes of a program at one location become a :class:`.GraphPart`, which is traced with make_fx under ``torch.vmap``. The rows of a step
are the batch of vmap. Parameters of requests have a row for each token, and other tensors of the program are constants. If a later part
uses a value, the value is stored in a buffer with a row for each token.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...modeling.forms import describe
from ...program.baking import Segment, compiled_segment, segments
from ...program.format.errors import InvalidProgramError
from ...program.format.operators import DRAWING, is_in_place
from ...program.format.payload import Job
from ...program.format.trees import is_ref, references, with_references
from ...program.program import Program
from .graph_functions import completed, traced_on
from .graph_parts import GraphPart

#: Kinds of nodes that use the model of transformers in other ways than through a location.
_OF_THE_MODEL = {"weight": "a weight of the model", "apply": "a call of a module", "skip": "a skip", "grad": "gradients"}

#: Names that programs cannot use for parameters, because they are arguments of :meth:`.VLLM.steer`.
_RESERVED = frozenset({"self", "vector", "scale", "remove", "layers", "start"})

#: Number of rows with which a program is traced and checked.
ROWS = 7


@dataclass(frozen=True, eq=False)
class GraphProgram:
    """A program for the graph of an engine.

    Attributes:
        name: The name by which requests ask for it.
        job: The program as data.
        segments: Its nodes by location.
        defaults: Parameters that requests can give, with their default values, float32 on the CPU.
        fixed: For other names of the block, why they are no parameters.
        digest: Equal for programs that have the same name and parameters and do the same.
    """

    name: str
    job: Job
    segments: Sequence[Segment]
    defaults: Mapping[str, torch.Tensor]
    fixed: Mapping[str, str]
    digest: str

    @classmethod
    def of(cls, name: str, given: Any) -> GraphProgram:
        """Return the program that a user gives.

        Args:
            name: Its name.
            given: A :class:`nnsight.Program`, a file of one, or a tuple of either and the names of its parameters. By default, its named
                floating-point inputs with at most one dimension are parameters, unless :meth:`.VLLM.steer` has an argument of that name.

        Raises:
            TypeError: If ``given`` has another type, or if the program has no input with the name of a parameter.
            ValueError: If the name is no identifier, or if the program has something that cannot be in the graph.
        """
        program, names = _program_of(name, given)
        known: dict[Any, GraphProgram] = vars(program).setdefault("_in_engines", {})
        if (name, *names) not in known:
            known[name, *names] = cls._create(name, program, names)
        return known[name, *names]

    @classmethod
    def _create(cls, name: str, program: Program, names: list[str]) -> GraphProgram:
        job = program._job
        try:
            found = _segments(job)
        except InvalidProgramError as error:
            raise ValueError(_CANNOT.format(name=name, error=error)) from error
        defaults = {key: job.tensors[key].detach().to("cpu", torch.float32) for key in names}
        digest = hashlib.sha256(b"\n".join([name.encode(), *(key.encode() for key in names), program._meaning()])).hexdigest()
        return cls(name, job, found, defaults, program._fixed, digest)

    @property
    def modules(self) -> list[str]:
        """The paths of the modules at whose outputs it has parts."""
        return [module_of(segment.site) for segment in self.segments]

    def parts(self, widths: Mapping[str, int], dtype: torch.dtype, device: torch.device) -> dict[str, GraphPart]:
        """Return the traced parts by location. ``widths`` has the number of channels at each location.

        Raises:
            ValueError: If the program cannot be traced, or looks at several positions.
        """
        run = _Run(self, widths, dtype, device)
        try:
            run.check_rows()
            return run.parts()
        except ValueError as error:
            raise ValueError(_CANNOT.format(name=self.name, error=error)) from error

    def parameters(self, given: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Add defaults to the parameters that a request gives. Raise ``ValueError`` if one is unknown or has a wrong shape."""
        unknown = next((name for name in given if name not in self.defaults), "")
        why = self.fixed.get(unknown, "no call of torch in the program uses a tensor or float of this name from outside")
        return completed(f"steer({self.name!r}", self.defaults, given, f": {why}")


_CANNOT = "The program {name!r} cannot run in an engine: {error}"


def module_of(location: str) -> str:
    """Return the path of the module whose output is at ``location``, without the leading ``model.``."""
    return location.removeprefix("model.").removesuffix(".output")


class PartsOf:
    """The parts of a job: its nodes at each location, traced under vmap, so that they work on each row separately.

    ``found`` are the nodes by location. ``parameters`` are the names of the tensors that differ between rows. ``values`` are all tensors by
    name. ``samples`` are example tensors of the value at each location, with :data:`ROWS` rows. ``kept`` names values that parts give
    besides the values for later parts: ``v3.0`` is output 0 of node 3.
    """

    def __init__(
        self,
        name: str,
        job: Job,
        found: Sequence[Segment],
        parameters: Collection[str],
        values: Mapping[str, torch.Tensor],
        samples: Sequence[Sequence[torch.Tensor]],
        kept: Collection[str] = (),
    ) -> None:
        self._name, self._names, self._segments, self._values, self._samples = name, parameters, found, values, samples
        self._functions = [compiled_segment(job, segment, None) for segment in found]
        used = [{number for _, node in segment.nodes for number, _ in references(node)} for segment in found]
        made = [{number for number, _ in segment.nodes} for segment in found]
        edited = {
            node["args"][0]["ref"][0] for node in job.nodes if node["do"] == "op" and is_in_place(node["name"]) and is_ref(node["args"][0])
        }
        of_constants = {number for number, node in enumerate(job.nodes) if node["do"] == "const" and number not in edited}
        later = [made[at] & set().union(*used[at + 1 :]) - of_constants for at in range(len(found))]
        self._gives = [[f"v{number}" for number in sorted(numbers)] for numbers in later]
        for at, numbers in enumerate(made):
            self._gives[at] += sorted(key for key in kept if int(key[1:].partition(".")[0]) in numbers)
        self._takes = [[f"v{number}" for number in sorted(used[at] - made[at] - of_constants)] for at in range(len(found))]
        self._edited = {job.nodes[number].get("tensor") for number in edited}
        #: For each part: the names of its tensors, by their key in the state of the part.
        self._tensors = [
            {
                **{f"const {node['tensor']}": node["tensor"] for _, node in segment.nodes if node["do"] == "const"},
                **{f"v{number}": job.nodes[number]["tensor"] for number in sorted(of_constants & used[at] - made[at])},
            }
            for at, segment in enumerate(found)
        ]

    def _row(self, at: int, leaves: Sequence[torch.Tensor], state: dict[str, Any]) -> list[torch.Tensor]:
        """Run part ``at`` on the tensors of one row, ``[1, ...]``, and return them changed. ``state`` has the other values of the nodes."""
        raise NotImplementedError

    def parts(self) -> dict[str, GraphPart]:
        """Return the traced parts by location."""
        kept: dict[str, torch.Tensor] = {}  # example values for later parts, with a row per token
        parts: dict[str, GraphPart] = {}
        graphs: dict[str, torch.fx.GraphModule] = {}
        for at, segment in enumerate(self._segments):
            tensors, takes, samples = self._tensors[at], self._takes[at], self._samples[at]
            parameters = [place for place, key in tensors.items() if key in self._names]
            constants = [place for place, key in tensors.items() if key not in self._names]
            places = [*parameters, *takes, *constants]

            def of_a_row(*given: torch.Tensor, at: int = at, places: list[str] = places, count: int = len(samples)) -> Any:
                state = dict(zip(places, given[count:], strict=True))
                for place in state.keys() & self._tensors[at].keys():
                    if self._tensors[at][place] in self._edited:
                        state[place] = state[place].clone()
                made = self._row(at, [leaf[None] for leaf in given[:count]], state)
                new = [leaf[0].to(old.dtype) for leaf, old in zip(made, given[:count], strict=True)]
                return *new, *(_of_state(state, key) for key in self._gives[at])

            axes = (0,) * (len(samples) + len(parameters) + len(takes)) + (None,) * len(constants)
            given = [self._values[tensors[place]].expand(ROWS, *self._values[tensors[place]].shape) for place in parameters]
            given += [kept[key] for key in takes] + [self._values[tensors[place]] for place in constants]
            like = self._structure_key(at, parameters, constants, [*samples, *given])
            more: list[torch.Tensor] = []
            if like in graphs:  # a loop over layers has equal parts at all layers
                graph, results = graphs[like], graphs[like](*samples, *given)
            else:
                graph, more, results = traced_on(torch.vmap(of_a_row, in_dims=axes), [*samples, *given], _line_of(segment))
            if not more:
                graphs[like] = graph
            for result, sample in zip(results, samples, strict=False):
                if result.shape != sample.shape:
                    wrong = f"the shape {list(result.shape[1:])} in place of {list(sample.shape[1:])}"
                    raise ValueError(f"{_line_of(segment)} leaves {wrong} for each token at `{segment.site}`.")
            kept |= dict(zip(self._gives[at], results[len(samples) :], strict=True))
            gives = {key: kept[key][0] for key in self._gives[at]}
            others = [*(self._values[tensors[place]].detach() for place in constants), *more]
            asked = tuple(tensors[place] for place in parameters)
            defaults = {key: self._values[key] for key in asked}
            parts[segment.site] = GraphPart(self._name, graph, asked, defaults, others, takes, gives)
        return parts

    def _structure_key(self, at: int, parameters: list[str], constants: list[str], given: list[torch.Tensor]) -> str:
        """Return a text that is equal for parts with equal graphs: the nodes, with node numbers and names renumbered in order of use."""
        numbers: dict[int, int] = {}
        names: dict[str, int] = {}

        def renumbered(node: int, output: int) -> Any:
            return {"ref": [numbers.setdefault(node, len(numbers)), output]}

        nodes = []
        for number, node in self._segments[at].nodes:
            numbers.setdefault(number, len(numbers))
            shown = {key: value for key, value in node.items() if key not in ("site", "line", "run", "block")}
            if "tensor" in shown:
                shown["tensor"] = names.setdefault(shown["tensor"], len(names))
            nodes.append(with_references(shown, renumbered))
        keys = [key[1:].partition(".") for key in (*self._takes[at], *self._gives[at])]
        values = [(numbers.setdefault(int(number), len(numbers)), output) for number, _, output in keys]
        tensors = [[names.setdefault(self._tensors[at][place], len(names)) for place in places] for places in (parameters, constants)]
        forms = [(list(tensor.shape), str(tensor.dtype), str(tensor.device)) for tensor in given]
        return json.dumps([nodes, values, len(self._takes[at]), tensors, forms])


def _of_state(state: Mapping[str, Any], key: str) -> torch.Tensor:
    """Return the value in ``state`` that a part gives under the name ``key``, such as ``v3`` or ``v3.0``."""
    name, _, output = key.partition(".")
    found: Any = state[name]
    if isinstance(found, torch.Tensor):
        return found
    if not output:
        raise ValueError("A node with several outputs is used at another location.")
    value: torch.Tensor = found[int(output)]
    return value


class _Run(PartsOf):
    """The parts of a :class:`GraphProgram`. Each row is one token."""

    def __init__(self, program: GraphProgram, widths: Mapping[str, int], dtype: torch.dtype, device: torch.device) -> None:
        job, found = program.job, program.segments
        values = {key: value.detach().to(device, _dtype_of(value, dtype)) for key, value in job.tensors.items()}
        draw = torch.Generator().manual_seed(0)
        samples = [[torch.randn(ROWS, widths[segment.site], generator=draw).to(device, dtype)] for segment in found]
        super().__init__(program.name, job, found, program.defaults, values, samples)

    def _row(self, at: int, leaves: Sequence[torch.Tensor], state: dict[str, Any]) -> list[torch.Tensor]:
        return [self._functions[at](leaves[0][None].clone(), None, state)[0]]

    def check_rows(self) -> None:
        """Raise ``ValueError`` unless the program does the same to each token alone as to several tokens in one sequence."""
        state = {f"const {key}": value for key, value in self._values.items()}
        state, *alone = [{key: value.clone() for key, value in state.items()} for _ in range(1 + ROWS)]
        with torch.no_grad():
            for at, segment in enumerate(self._segments):
                (sample,) = self._samples[at]
                try:
                    (together,) = self._row(at, [sample], state)
                    each = torch.cat([self._row(at, [sample[row : row + 1]], alone[row])[0] for row in range(ROWS)])
                except Exception as error:
                    raise ValueError(
                        f"{_line_of(segment)} failed on a value {list(sample.shape)} at `{segment.site}`: {type(error).__name__}: {error}"
                    ) from error
                scale = float(together.abs().amax())
                if together.shape != each.shape or not torch.allclose(together.float(), each.float(), rtol=1e-2, atol=1e-3 * scale):
                    raise ValueError(
                        f"{_line_of(segment)} looks at several positions, or at one by its number. The rows of a step belong to different "
                        "requests. Use taps and a block instead."
                    )


def _line_of(segment: Segment) -> str:
    return f"line {segment.nodes[0][1].get('line', '?')}"


def _program_of(name: str, given: Any) -> tuple[Program, list[str]]:
    """Return the program that a user gives, and the names of its parameters; see :meth:`GraphProgram.of`."""
    what, names = given if isinstance(given, tuple) and len(given) == 2 else (given, None)
    program = Program.load(what) if isinstance(what, (str, os.PathLike)) else what
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"{name!r} is no name for a program: a name has letters, digits and underscores, and does not begin with a digit.")
    if not isinstance(program, Program):
        raise TypeError(f"programs= is a dict of programs, or files of programs, by name, not {{{name!r}: {describe(given)}}}.")
    program._check_whole()
    inputs = program.inputs
    if names is None:
        names = [key for key, value in inputs.items() if value.dim() <= 1 and value.is_floating_point() and key not in _RESERVED]
    wrong = [key for key in names if key not in inputs or key in _RESERVED]
    if wrong:
        known = ", ".join(inputs) or "none"
        why = f"the inputs are: {known}"
        if wrong[0] in _RESERVED:
            why = "steer() has an argument of this name: record the program with another name"
        raise TypeError(f"programs={{{name!r}: ...}} has no parameter {wrong[0]!r}: {why}.")
    return program, list(names)


def _segments(job: Job) -> Sequence[Segment]:
    """Return the segments of a job up to the last one with an edit. Raise ``InvalidProgramError`` if the graph cannot have them."""
    if job.runs[0]["call"] != "trace" or len({node["block"] for node in job.nodes}) > 1:
        raise InvalidProgramError("it has several invokes, or belongs to `generate`. Record it in `model.trace(...)`, in one block.")
    found = list(segments(job))
    while found and not any(node["do"] in ("write", "skip") for _, node in found[-1].nodes):
        found.pop()
    if not found:
        raise InvalidProgramError("it edits nothing.")
    sites = [segment.site for segment in found]
    for segment in found:
        line = _line_of(segment)
        if not segment.site.endswith(".output") or sites.count(segment.site) > 1:
            raise InvalidProgramError(f"{line} is at `{segment.site}`, and only outputs of modules can be edited, each of them once.")
        for _, node in segment.nodes:
            line = node.get("line", "?")
            why = _OF_THE_MODEL.get(node["do"])
            if why is None and node.get("name") in DRAWING:
                why = "random numbers"
            if why is not None:
                raise InvalidProgramError(f"line {line} has {why}, which a program in an engine cannot use. Use taps and a block instead.")
            if node["do"] == "size" and node["dim"] in (0, 1):
                raise InvalidProgramError(
                    f"line {line} looks at the number of prompts or of positions. `hidden.unflatten(-1, (heads, size))` and `flatten(-2)` "
                    "need neither."
                )
    return found


def _dtype_of(value: torch.Tensor, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a program's tensor in a graph with hidden states of ``dtype``. Numbers are float32, to keep their precision."""
    return value.dtype if not value.is_floating_point() else dtype if value.dim() else torch.float32
