"""Programs: recorded blocks that can be printed, stored, shared and run on other inputs.

A program is a recorded block (:mod:`~nnsight.program.record.recorder`) without the input of the model. It names locations, modules and
weights of the model, and operators of a fixed table. So loading a program runs nothing, and ``print`` shows everything that it does.
"""

from __future__ import annotations

import itertools
import json
import linecache
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..modeling.base import NNsight
from ..runtime.report import Break
from ..tracing import Block
from .as_python import python_of
from .bound import BoundProgram, check_names
from .format.errors import NotExpressibleError
from .format.nodes import Node
from .format.payload import Job, decode, encode, inputs_of
from .format.trees import references, with_references
from .run.program_block import ProgramBlock
from .run.validation import check_parts
from .saved_results import check_saves, with_own_results


class Program:
    """An intervention as data.

    ``tracer.program`` is the program of a trace, such as ``with model.trace(x, remote="program") as tracer:``. :meth:`load` reads a file.

    Args:
        job: A job with one run. The input of the model is left out.
        fixed: Reasons why names of the block are not inputs, by name.
        block: The block that was recorded.
        holes: Places where Python got the value of a tensor. Results that Python computed from it are constants of the job.

    Raises:
        ValueError: If the job has several runs.

    Example:
        >>> with model.trace("Hello", remote="program") as tracer:
        ...     model.transformer.h[1].output[:] += 2.0 * direction
        ...     logits = model.lm_head.output.save()
        >>> tracer.program.save("steering.safetensors")
        >>> Program.load("steering.safetensors").run(model, "The Eiffel Tower is in")["logits"]
    """

    def __init__(
        self, job: Job, fixed: dict[str, str] | None = None, block: Block | None = None, holes: Sequence[Break] = ()
    ) -> None:
        if len(job.runs) != 1:
            raise ValueError(f"A program belongs to one run of a model, and this job has {len(job.runs)}.")
        run = {**job.runs[0], "args": {"list": []}, "kwargs": {"dict": []}}
        used = {node["tensor"] for node in job.nodes if node["do"] == "const"}
        self.holes = tuple(holes)
        self._job = Job([run], job.nodes, job.saves, {name: job.tensors[name] for name in sorted(used)})
        self._fixed = fixed or {}
        self._filename, self._lines = ("", (1, 0)) if block is None else (block.filename, (block.line, block.last_line))

    # -- files -----------------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the program to one safetensors file, in the format that servers accept. Nothing is pickled.

        Raises:
            NotExpressibleError: If the program has holes.
        """
        self._check_whole()
        Path(path).write_bytes(encode(self._job))

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Program:
        """Return the program in a file. Nothing in it is run.

        Raises:
            FileNotFoundError: If there is no such file.
            InvalidProgramError: If the file is damaged or does not contain a program.
        """
        return Program(decode(Path(path).read_bytes()))

    def to_json(self) -> str:
        """Return the program as JSON, with the names of its constants but without their values."""
        return json.dumps(self._job.content(), indent=1)

    def _check_whole(self) -> None:
        """Raise a :class:`NotExpressibleError` if the program has holes."""
        if self.holes:
            raise NotExpressibleError(
                f"{self.holes[0]}. The results that Python computed from the value are constants of this program, and right for the input "
                "of its trace only. So it can be printed, but not saved, run or applied. Decide with `torch.where`, and compute with torch."
            )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Program) and self._meaning() == other._meaning()

    def __hash__(self) -> int:
        return hash(self._meaning())

    def _meaning(self) -> bytes:
        """Return bytes that are equal for programs with equal effects. They depend neither on the user's lines nor on names of inputs."""
        names: dict[str, int] = {}
        nodes = [{key: value for key, value in node.items() if key != "line"} for node in self._job.nodes]
        for node in nodes:
            if node["do"] == "const":
                node["tensor"] = names.setdefault(node["tensor"], len(names))
        tensors = [self._job.tensors[name].cpu().contiguous() for name in names]
        described = [(str(tensor.dtype), list(tensor.shape)) for tensor in tensors]
        text = json.dumps([self._job.runs, nodes, self._job.saves, described]).encode()
        return b"".join([text, *(tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors)])

    def then(self, other: Program) -> Program:
        """Return a program that has the effects of this program and then, at each location, the effects of ``other``.

        Inputs with one name become one input if their values are equal. Otherwise the input of ``other`` is renamed, as to ``alpha_2``.

        The model can pass one tensor on from a location to the next, such as from ``h[0].output`` to ``h[1].input``. If a program reads it
        at both and then edits it in place, both have the edit. Do not combine such a program with one that replaces the tensor in between.

        Raises:
            ValueError: If one program is for ``trace`` and the other for ``generate``, or if both save a value under the same name.
        """
        self._check_whole()
        other._check_whole()
        first, second = self._job, other._job
        if first.runs[0]["call"] != second.runs[0]["call"]:
            raise ValueError("One of these programs was recorded in `model.trace(...)` and the other in `model.generate(...)`.")
        twice = first.saves.keys() & second.saves.keys()
        if twice:
            raise ValueError(f"Both programs save a value as `{min(twice)}`: save one of them under another name.")
        tensors, names = dict(first.tensors), {}
        for name, tensor in second.tensors.items():
            labels = itertools.chain([name], (f"{name}_{number}" for number in itertools.count(2)))
            names[name] = next(label for label in labels if label not in tensors or _equal(tensors[label], tensor))
            tensors[names[name]] = tensor
        nodes, saves = with_references(
            [second.nodes, second.saves], lambda node, output: {"ref": [node + len(first.nodes), output]}
        )
        blocks, barriers = first.runs[0]["blocks"], 1 + max((node.get("id", -1) for node in first.nodes), default=-1)
        moved = [{**node, "block": node["block"] + blocks} for node in nodes]
        for node in moved:
            if node["do"] == "const":
                node["tensor"] = names[node["tensor"]]
            elif node["do"] == "barrier":
                node["id"] += barriers
        run = {**first.runs[0], "blocks": blocks + second.runs[0]["blocks"]}
        return Program(Job([run], [*first.nodes, *moved], {**first.saves, **saves}, tensors), {**other._fixed, **self._fixed})

    # -- runs ------------------------------------------------------------------------------------------------------

    def run(self, model: NNsight, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Run ``model`` once with this program, and return the saved values by name.

        The inputs of the program have their values of the recording. :meth:`bind` allows other values.

        Args:
            model: The model.
            *args: The input of the model, as in ``model.trace(...)``, or in ``model.generate(...)`` for a program of a generation.
            **kwargs: Keyword arguments of the model.

        Raises:
            InvalidProgramError: If the program does not fit the model or the input.
            ExecutionFailedError: If the program fails while it runs.
        """
        return self.bind(model)(*args, **kwargs)

    @property
    def inputs(self) -> dict[str, torch.Tensor]:
        """The inputs of the program by name, with their values in the recording: tensors and floats that the block takes from outside.

        A float is an input if the block uses it in calls of torch only, as in ``alpha * hidden``. Here it is a tensor without dimensions.
        """
        return inputs_of(self._job)

    def bind(self, model: NNsight, inputs: str | Sequence[str] = ()) -> BoundProgram:
        """Return this program as a function of the input of ``model``, and of the values of ``inputs``.

        A call runs neither a block nor a trace. If the model is compiled, it calls the lowered graph with the program spliced into it.
        An input that a call leaves out has its value of the recording. Gradients flow to the values that are passed. The saved values are
        on the device of ``model``, also if the block calls ``.cpu()``. Edits of ``model`` do not run during a call. A program that was
        recorded on a model with edits contains these edits.

        Args:
            model: The model.
            inputs: One or several names of :attr:`inputs`.

        Raises:
            TypeError: If ``model`` is not a wrapped model.
            InvalidProgramError: If the model lacks a part that the program names, or the program lacks one of ``inputs``.
            NotExpressibleError: If the program has holes, or a saved list contains an object that is not part of the program.

        Example:
            >>> with model.trace("Hello", remote="program") as tracer:
            ...     model.transformer.h[1].output[:] += alpha * direction
            ...     logits = model.lm_head.output.save()
            >>> steer = tracer.program.bind(model, inputs=["alpha", "direction"])
            >>> steer("The Eiffel Tower is in", alpha=2.0, direction=other)["logits"]
        """
        self._check_whole()
        if not isinstance(model, NNsight):
            raise TypeError(f"A program is bound to a wrapped model, such as `NNsight(module)`, and not to a {type(model).__name__}.")
        inputs = [inputs] if isinstance(inputs, str) else inputs
        check_names(self._job, inputs, self._fixed)
        model._sync()
        if hasattr(model, "dispatch"):
            model.dispatch()
        check_parts(self._job, model)
        check_saves(self._job)
        bound = BoundProgram(with_own_results(self._job), model, inputs)
        bound.make_inlinable()
        return bound

    def apply_to(self, model: NNsight) -> Any:
        """Return a copy of ``model`` that runs this program as an edit: in each of its traces and calls, like a block of ``model.edit()``.

        If :meth:`then` combined several programs into this one, each of them becomes an edit.

        Raises:
            InvalidProgramError: If the model lacks a part that the program names.
            ValueError: If the program has several invokes.
        """
        self._check_whole()
        job, edited = self._job, model
        check_parts(job, model)
        blocks = _blocks_of(job.nodes)
        if len(blocks) > 1 and any(map(_is_of_rows, blocks)):
            raise ValueError("A program with several invokes belongs to the inputs of these invokes, so it cannot be applied to a model.")
        for nodes in blocks:
            run_program = ProgramBlock(job, nodes[0][1]["block"] if nodes else 0)
            with edited.edit() as edited:
                run_program(edited)
        return edited

    # -- text and pictures -----------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        """Return one line for each node."""
        lines = [f"hole {hole}" for hole in self.holes]
        lines += [f"%{number} = {_shown(node)}" for number, node in enumerate(self._job.nodes)]
        lines += [f"save {name} = {_value(tree)}" for name, tree in self._job.saves.items()]
        return "\n".join(lines)

    def to_python(self) -> str:
        """Return the source of a function ``program(model, *args, **kwargs)``, which runs the program in a trace.

        The function takes the input of the model, a keyword argument for each of :attr:`inputs`, and the argument ``constants`` if there
        are :attr:`constants`. It returns the saved values by name. Comments name the lines of the block. They quote these lines in the
        process that recorded the program.

        Example:
            >>> Path("steering.py").write_text(program.to_python())
            >>> import steering
            >>> steering.program(model, "Hello", **program.inputs)["logits"]
        """
        return "".join(f"# hole {hole}\n" for hole in self.holes) + python_of(self._job, self._text_of_line)

    def _text_of_line(self, line: int) -> str:
        first, last = self._lines
        return linecache.getline(self._filename, line).strip() if first <= line <= last else ""

    @property
    def constants(self) -> dict[str, torch.Tensor]:
        """The tensors of the program that are not inputs, by name."""
        return {name: tensor for name, tensor in self._job.tensors.items() if name not in self.inputs}

    def to_dot(self) -> str:
        """Return the program as a graph in the DOT language of graphviz."""
        lines = ["digraph program {", "  node [shape=box, fontname=monospace, fontsize=10];"]
        for number, node in enumerate(self._job.nodes):
            style = ", style=filled, fillcolor=lightblue" if "site" in node else ""
            lines.append(f"  n{number} [label={_quoted(_title(node))}{style}];")
            lines += [f"  n{used} -> n{number};" for used, _ in dict.fromkeys(references(node))]
        for name, tree in self._job.saves.items():
            lines.append(f"  s_{len(lines)} [label={_quoted(name)}, shape=ellipse];")
            lines += [f"  n{used} -> s_{len(lines) - 1};" for used, _ in dict.fromkeys(references(tree))]
        return "\n".join([*lines, "}"])

    def draw(self) -> str:
        """Return a picture of the program, as SVG.

        Raises:
            ImportError: If the command ``dot`` of graphviz is not installed.
        """
        dot = shutil.which("dot")
        if dot is None:
            raise ImportError(
                "Drawing a program needs the command `dot` of graphviz, which is not installed here. Install graphviz with the package "
                "manager of your system, or pass `program.to_dot()` to another tool."
            )
        done = subprocess.run([dot, "-Tsvg"], input=self.to_dot().encode(), capture_output=True, check=True, timeout=60)
        return done.stdout.decode()

    def _repr_svg_(self) -> str | None:
        """Return the picture for notebooks, or ``None`` if graphviz is not installed. They show text then."""
        return None if shutil.which("dot") is None else self.draw()


def _blocks_of(nodes: Sequence[Node]) -> list[list[tuple[int, Node]]]:
    """Return the numbered nodes of each block. A program without nodes has one empty block."""
    numbered = sorted(enumerate(nodes), key=lambda item: item[1]["block"])
    return [list(found) for _, found in itertools.groupby(numbered, lambda item: item[1]["block"])] or [[]]


def _is_of_rows(nodes: Sequence[tuple[int, Node]]) -> bool:
    """Whether a block belongs to an invoke: it selects rows of the batch, waits for another block, or uses values of another block."""
    own = {number for number, _ in nodes}
    return any(
        node["do"] == "barrier"
        or any(used not in own for used, _ in references(node))
        or (node["do"] == "size" and after.get("name") == "aten.narrow.default" and after["args"][:2] == [node["value"], node["dim"]])
        for (_, node), (_, after) in itertools.pairwise([*nodes, (-1, {})])
    )


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.cpu(), other.cpu())


def _title(node: dict[str, Any]) -> str:
    what = node.get("site") or node.get("name") or node.get("module") or node.get("tensor") or ""
    number = f".i{node['at']}" if node.get("at") else ""
    return f"{node['do']} {what}{number}" if node["do"] != "op" else str(what)


#: Keys of nodes that a listing shows with their values, and boolean keys that it shows if they are set.
_SHOWN = ("key", "leaf", "inside", "value", "wrt", "gradient", "id", "of", "dim", "size", "text")
_SHOWN_FLAGS = ("copy", "in_place", "loop", "no_grad", "retain_graph", "create_graph")


def _shown(node: dict[str, Any]) -> str:
    parts = [_value(item) for item in node.get("args", [])] if node["do"] == "op" else []
    parts += [f"{key}={_value(value)}" for key, value in node.get("kwargs", {}).items()] if node["do"] == "op" else []
    if node["do"] == "apply":
        parts = [_value(node["args"]), _value(node["kwargs"])]
    parts += [f"{key}={_value(node[key])}" for key in _SHOWN if key in node]
    parts += [key for key in _SHOWN_FLAGS if node.get(key)]
    return f"{_title(node)}({', '.join(parts)})"


def _value(tree: Any) -> str:
    if type(tree) is list:
        return f"[{', '.join(map(_value, tree))}]"
    if type(tree) is not dict:
        return str(tree)
    ((kind, content),) = tree.items()
    if kind == "ref":
        return f"%{content[0]}" + (f".{content[1]}" if content[1] else "")
    if kind in ("list", "tuple"):
        return _value(content) if kind == "list" else f"({', '.join(map(_value, content))})"
    if kind == "dict":
        return "{" + ", ".join(f"{key!r}: {_value(item)}" for key, item in content) + "}"
    return str(content)


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
