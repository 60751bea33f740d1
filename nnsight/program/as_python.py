"""Programs as Python: the source of a function that does the same as a program, in a trace. Users can read, change and run it.

Each value of the program is a variable. ``leaf`` selects a tensor from the value at a location, such as a tuple that a module returns.
``with_leaf`` replaces such a tensor. Operators are those of ``torch.ops.aten``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import groupby, takewhile
from typing import Any, NamedTuple

import torch

from .format.nodes import Node
from .format.payload import Job, inputs_of
from .format.trees import references
from .python_text import operator_text, returns_several, value_text
from .run.occurrences import leaf_at, tensors_at
from .run.occurrences import with_leaf as _with_leaf


def leaf(value: Any, number: int = 0, inside: int | None = None, lists: list[int] | None = None) -> Any:
    """Return tensor ``number`` of a nested value.

    Args:
        value: The value at a location, or an item of it.
        number: Number of the leaf, in the order of ``torch.utils._pytree``.
        inside: Number of the tensor inside that leaf, if the leaf is a key-value cache.
        lists: The lengths that the lists in the value must have.

    Raises:
        InvalidProgramError: If there is no such tensor, or a list has another length.
    """
    asked = {"leaf": number, "inside": inside, "lists": lists}
    return leaf_at(value, {name: said for name, said in asked.items() if said is not None})


def with_leaf(value: Any, new: torch.Tensor, number: int = 0, key: str | None = None) -> Any:
    """Return a nested value with ``new`` in place of its tensor ``number``, or of tensor ``number`` in its item ``key``."""
    return _with_leaf(value, {"leaf": number} if key is None else {"leaf": number, "key": key}, new)


def tensors(value: Any) -> list[Any]:
    """Return the tensors of a nested value."""
    return tensors_at(value)


class _Statement(NamedTuple):
    """A statement of the source."""

    text: str
    inside: tuple[_Statement, ...] | None  # the body of a ``with`` statement
    at: int  # the occurrence at which it runs
    no_grad: bool  # whether it runs under ``torch.no_grad()``
    line: int | None  # the line of the user's block


def python_of(job: Job, text_of_line: Callable[[int], str]) -> str:
    """Return the source of a function ``program(model, *args, **kwargs)`` that does the same as ``job``.

    Args:
        job: A program, which is a job with one run.
        text_of_line: Returns the text of a line of the user's block, or an empty string.
    """
    return _Writer(job, text_of_line).source()


class _Writer:
    def __init__(self, job: Job, text_of_line: Callable[[int], str]) -> None:
        self._job, self._text_of_line = job, text_of_line
        self._inputs = inputs_of(job)
        self._line: int | None = None  # the line of the user's block in the latest comment

    def source(self) -> str:
        """Return the whole text."""
        blocks = self._blocks()
        generates = self._job.runs[0]["call"] == "generate"
        body = [line for block in blocks for line in block]
        barriers = {node["id"]: node["of"] for node in self._job.nodes if node["do"] == "barrier"}
        made = [f"        barrier{number} = tracer.barrier({count})" for number, count in barriers.items()]
        call = "generate" if generates else "trace"
        given = "" if len(blocks) > 1 else "*args, **kwargs"
        text = "\n".join([*made, *body])
        device = ["    device = next(iter(model._module.parameters())).device"] if re.search(r"\bdevice\b", text) else []
        saves = ", ".join(f"{name!r}: {self._value(tree)}" for name, tree in self._job.saves.items())
        helpers = [name for name in ("leaf", "tensors", "with_leaf") if re.search(rf"\b{name}\(", text)]
        lines = ["import torch", *([f"from nnsight.program.as_python import {', '.join(helpers)}"] if helpers else [])]
        lines += ["", "aten = torch.ops.aten", "", "", f"def program({', '.join(self._parameters())}):"]
        lines += [*device, f"    with model.{call}({given}) as tracer:", text or "        pass", f"    return {{{saves}}}", ""]
        return "\n".join(lines)

    def _parameters(self) -> list[str]:
        used = {node["tensor"] for node in self._job.nodes if node["do"] == "const"}
        constants = ["constants"] if used - self._inputs.keys() else []
        return ["model", "*args", *constants, *sorted(self._inputs), "**kwargs"]

    def _blocks(self) -> list[list[str]]:
        """Return the source lines of each block. Blocks after the first are invokes without input, which see all rows."""
        found: dict[int, list[tuple[int, Node]]] = {}
        for number, node in enumerate(self._job.nodes):
            found.setdefault(node["block"], []).append((number, node))
        saved = dict.fromkeys(references(self._job.saves))
        blocks = []
        for order, block in enumerate(sorted(found)):
            statements = list(self._statements(iter(found[block])))
            numbers = {number for number, _ in found[block]}
            kept = dict.fromkeys(node for node, _ in saved if node in numbers and self._job.nodes[node]["do"] != "const")
            end = len(statements) - (found[block][-1][1]["do"] == "stop")
            statements[end:end] = [_Statement(f"v{node}.save()", None, statements[-1].at, False, None) for node in kept]
            if len(found) == 1:
                blocks.append(list(self._written(statements, 2)))
            else:
                lines = list(self._written(statements, 3))
                blocks.append([f"        with tracer.invoke({'*args, **kwargs' if order == 0 else ''}):", *lines])
        return blocks

    # -- statements ------------------------------------------------------------------------------------------------

    def _statements(self, nodes: Iterator[tuple[int, Node]], at: int = 0) -> Iterator[_Statement]:
        for number, node in nodes:
            if node["do"] == "const":  # expressions use constants by their names
                continue
            at = node.get("at", at)
            inside = None
            if node["do"] == "backward":
                inside = tuple(self._statements(takewhile(lambda item: item[1]["do"] != "end", nodes), at))
            yield _Statement(self._text(number, node), inside, at, bool(node.get("no_grad")), node.get("line"))

    def _written(self, statements: list[_Statement], depth: int) -> Iterator[str]:
        for (at, no_grad), group in groupby(statements, lambda statement: (statement.at, statement.no_grad)):
            headers = [f"with tracer.iter[{at}]:"] * bool(at) + ["with torch.no_grad():"] * no_grad
            for number, header in enumerate(headers):
                yield "    " * (depth + number) + header
            for statement in group:
                yield from self._lines_of(statement, depth + len(headers))

    def _lines_of(self, statement: _Statement, depth: int) -> Iterator[str]:
        text = "    " * depth + statement.text
        if statement.line is not None and statement.line != self._line:
            self._line = statement.line
            user = self._text_of_line(statement.line)
            text += f"  # line {statement.line}{': ' * bool(user)}{user}"
        yield text
        if statement.inside is not None:
            inside = [part._replace(at=0) for part in statement.inside]  # the `with` statement of the pass is in the loop already
            yield from self._written(inside, depth + 1) if inside else ["    " * (depth + 1) + "pass"]

    def _text(self, number: int, node: Node) -> str:
        """Return the statement for a node. For a backward pass it is the header of a ``with`` statement."""
        name, copied = f"v{number}", ".clone()" if node.get("copy") else ""
        match node["do"]:
            case "weight":
                return f"{name} = {_path('model.' + node['name'])}"
            case "read":
                return f"{name} = {self._leaf(node)}{copied}"
            case "write":
                value = self._value(node["value"])
                if node.get("in_place"):
                    return f"{self._leaf(node)}.copy_({value})"
                site = _location(node["site"])
                key = f", key={node['key']!r}" if "key" in node else ""
                return f"{site} = with_leaf({site}, {value}{self._leaf_number(node)}{key})"
            case "skip":
                return f"{_path(node['site'].removesuffix('.input'))}.skip({self._value(node['value'])})"
            case "op":
                made = operator_text(node, self._reference)
                several = copied and returns_several(node)
                return f"{name} = [item.clone() for item in {made}]" if several else f"{name} = {made}{copied}"
            case "apply":
                args = [self._value(item) for item in node["args"]["list"]]
                args += [f"{key}={self._value(item)}" for key, item in node["kwargs"]["dict"]]
                made = f"tensors({_path(node['module'])}({', '.join(args)}))"
                return f"{name} = [item.clone() for item in {made}]" if copied else f"{name} = {made}"
            case "barrier":
                return f"barrier{node['id']}()"
            case "stop":
                return "tracer.stop()"
            case "size":
                return f"assert {self._value(node['value'])}.shape[{node['dim']}] == {node['size']}"
            case "log":
                return f"print({self._printed(node['text'])})"
            case "requires_grad":
                return f"{self._value(node['value'])}.requires_grad_()"
            case "backward":
                given = [f"gradient={self._value(node['gradient'])}"] if "gradient" in node else []
                given += [f"{flag}=True" for flag in ("retain_graph", "create_graph") if node.get(flag)]
                return f"with {self._value(node['value'])}.backward({', '.join(given)}):"
            case "grad":
                return f"{name} = {self._value(node['wrt'])}.grad"
            case _:
                return f"{self._value(node['wrt'])}.grad = {self._value(node['value'])}"

    # -- parts of statements ---------------------------------------------------------------------------------------

    def _leaf(self, node: Node) -> str:
        key = f"[{node['key']!r}]" if "key" in node else ""
        lists = f", lists={node['lists']}" if "lists" in node else ""
        return f"leaf({_location(node['site'])}{key}{self._leaf_number(node)}{lists})"

    @staticmethod
    def _leaf_number(node: Node) -> str:
        inside = f", {node['inside']}" if "inside" in node else ""
        return f", {node['leaf']}{inside}" if node["leaf"] or inside else ""

    def _printed(self, pieces: list[Any]) -> str:
        parts = [repr(piece) if type(piece) is str else self._formatted(piece) for piece in pieces]
        return ", ".join([*parts, 'sep=""'])

    def _formatted(self, piece: dict[str, Any]) -> str:
        value = self._value(piece["value"])
        return f"format({value}.item(), {piece['format']!r})" if piece.get("format") else value

    def _value(self, tree: Any) -> str:
        """Return the expression for a nested value."""
        return value_text(tree, self._reference)

    def _reference(self, number: int, output: int) -> str:
        node = self._job.nodes[number]
        if node["do"] == "const":
            return str(node["tensor"]) if node["tensor"] in self._inputs else f"constants[{node['tensor']!r}]"
        return f"v{number}[{output}]" if returns_several(node) else f"v{number}"


def _location(site: str) -> str:
    return "tracer.result" if site == "result" else _path(site)


def _path(path: str) -> str:
    """Return the expression for a module or a location. The name of the root module is ``model``."""
    return "model" + "".join(f"[{part}]" if part.isdecimal() else f".{part}" for part in path.split(".")[1:])
