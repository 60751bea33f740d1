"""The nodes of a program, and the checks of nodes that need no model.

A program is a list of nodes in the order in which the client recorded them. Each node belongs to a run of the model and to a block of
that run. The nodes of a block run in order; the nodes of several blocks take turns as blocks do. The result of a node is named by
the position of the node in the list, so a reference can only point backwards.

=================  ======================================================================================================
``read``           reads the tensor ``leaf`` of the value at ``site``, at occurrence ``at``; with ``key``, the value is a dict
                   and the tensor is in that item; ``inside``: number of a tensor in the leaf, which is a cache; ``copy``: read
                   a copy; ``lists``: the lengths that the lists in the value must have, which are those of the recording
``const``          the tensor ``tensor`` of the container
``weight``         the parameter or buffer ``name`` of the model
``op``             applies the operator ``name`` of the table to ``args`` and ``kwargs``; ``copy``: copies the result
``apply``          applies the module ``module`` to ``args`` and ``kwargs``; ``copy``: copies the results
``write``          replaces the tensor ``leaf`` at ``site`` by ``value``; ``in_place``: copies ``value`` into the memory of
                   that tensor
``skip``           the module whose input is ``site`` returns ``value`` without running
``barrier``        waits until ``of`` blocks are at the barrier ``id``
``stop``           ends the run
``requires_grad``  from here on, gradients flow to ``value``
``backward``       a backward pass from ``value``, with ``gradient`` if ``value`` is not a scalar, ``retain_graph`` and
                   ``create_graph``; the nodes of the block from here to ``end`` run during the pass
``grad``           the gradient with respect to ``wrt``; an edit of it in place changes the gradient that flows on
``set_grad``       replaces the gradient with respect to ``wrt`` by ``value``
``end``            ends the nodes of a backward pass
``size``           refuses the program unless dimension ``dim`` of ``value`` is ``size``, as in the recording
``log``            prints a line: ``text`` is a list of strings and of values, each value with an optional ``format``
=================  ======================================================================================================

Every node may have ``line``, the line of the user's block, for messages. ``loop`` says that the block waits for ``site`` in a loop over
occurrences, and the run may have fewer occurrences than the recording. ``no_grad`` on an ``op`` or ``apply`` disables autograd for it.

Memory is tracked by operator schemas. The result of an operator is *owned* by the program. A view, which may share memory with its first
argument, is owned if that argument is owned, or if the node has ``copy``. In-place operators write to owned memory only. Activations
change through ``write`` nodes only, and weights never change.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container
from typing import TYPE_CHECKING, Any

import torch

from .errors import InvalidProgramError, require
from .formats import is_format
from .limits import Limits
from .operators import OPERATORS, STRINGS, is_in_place, is_view
from .trees import (
    DTYPES,
    FLOATS,
    Budget,
    check_tree,
    is_finite,
    is_int,
    is_text,
    references,
    write_tree,
)

if TYPE_CHECKING:
    from .payload import Job

Node = dict[str, Any]

_COMMON = {"do", "run", "block"}
_OPTIONAL = {"line"}

#: Keys of each kind of node, required and optional.
_KEYS: dict[str, tuple[set[str], set[str]]] = {
    "read": ({"site", "at", "leaf"}, {"key", "inside", "lists", "copy", "loop"}),
    "const": ({"tensor"}, set()),
    "weight": ({"name"}, set()),
    "op": ({"name", "args"}, {"kwargs", "copy", "no_grad"}),
    "apply": ({"module", "args", "kwargs"}, {"copy", "no_grad"}),
    "write": ({"site", "at", "leaf", "value"}, {"key", "inside", "lists", "in_place", "loop"}),
    "skip": ({"site", "at", "value"}, {"loop"}),
    "barrier": ({"id", "of"}, set()),
    "stop": (set(), set()),
    "requires_grad": ({"value"}, set()),
    "backward": ({"value"}, {"gradient", "retain_graph", "create_graph"}),
    "grad": ({"wrt"}, set()),
    "set_grad": ({"wrt", "value"}, set()),
    "end": (set(), set()),
    "size": ({"value", "dim", "size"}, set()),
    "log": ({"text"}, set()),
}

#: Kinds of nodes that have no result.
_EFFECTS = frozenset({"write", "skip", "barrier", "stop", "requires_grad", "backward", "set_grad", "end", "size", "log"})

#: Kinds of nodes that are allowed only within a backward pass, and all kinds that are allowed there.
_OF_PASS = frozenset({"grad", "set_grad", "end"})
IN_PASS = _OF_PASS | {"op", "const", "weight", "apply", "size", "log"}

_REF = frozenset({"ref"})
_VALUES = frozenset({"ref", "list", "tuple", "dict", "float"})
_SITE = re.compile(r"(?:[A-Za-z_][A-Za-z0-9_]*|\d+)(?:\.(?:[A-Za-z_][A-Za-z0-9_]*|\d+))*", re.ASCII)

#: Maximum number of characters in one string of a ``log`` node.
_LONGEST_TEXT = 10_000

MEMORY_FORMATS = {
    "preserve_format": torch.preserve_format,
    "contiguous_format": torch.contiguous_format,
    "channels_last": torch.channels_last,
}

#: Reasons why certain operators are not in the table.
_DENIED = {
    "empty": "it gives uninitialised memory",
    "as_strided": "it gives views of arbitrary memory",
    "set_": "it replaces the memory of a tensor",
    "resize_": "it gives uninitialised memory",
    "rand": "it draws from the random numbers of the server",
    "from_file": "it reads files",
    "_local_scalar_dense": "it gives a value to Python",
}


def check_nodes(job: Job, limits: Limits, budget: Budget) -> None:
    """Check the nodes of a job as far as that is possible without a model.

    Raises:
        InvalidProgramError: If a node is invalid. The message has the number of the node and the reason.
    """
    require(type(job.nodes) is list, "The program is not a list of nodes.")
    require(len(job.nodes) <= limits.nodes, f"The program has {len(job.nodes)} nodes; the limit is {limits.nodes}.")
    logs = sum(type(node) is dict and node.get("do") == "log" for node in job.nodes)
    require(logs <= limits.logs, f"The program prints more than {limits.logs} lines, which is the limit.")
    checker = _Checker(job, budget)
    for number, node in enumerate(job.nodes):
        try:
            checker.add(node)
        except InvalidProgramError as error:
            what = node.get("do") if type(node) is dict else None
            line = node.get("line") if type(node) is dict else None
            raise InvalidProgramError(
                f"Node {number}{f' ({what})' if is_text(what) else ''}{f', line {line}' if is_int(line) else ''}: {error}"
            ) from None
    require(not checker.differentiating, "A backward pass has no `end` node.")


class _Checker:
    """Checks the nodes of a job one after the other."""

    def __init__(self, job: Job, budget: Budget) -> None:
        self._job, self._budget = job, budget
        self.before: list[Node] = []
        self.owned: list[bool] = []  # whether the program owns the memory of the result, by node
        self.stopped: set[tuple[int, int]] = set()  # run and block of each block that has stopped
        self.differentiating: set[tuple[int, int]] = set()  # run and block of each block that is within a backward pass

    def add(self, node: Node) -> None:
        """Check a node."""
        self._check_form(node)
        do, block = node["do"], (node["run"], node["block"])
        self.owned.append(self._check_kind(node))
        require(not self.before or node["run"] >= self.before[-1]["run"], "it belongs to an earlier run than the node before it")
        self.before.append(node)
        require(block not in self.stopped, "its block has already stopped")
        if do == "stop":
            self.stopped.add(block)
        require(do in IN_PASS or block not in self.differentiating, "it is not allowed within a backward pass")
        require(do not in _OF_PASS or block in self.differentiating, "it is allowed within a backward pass only")
        if do == "backward":
            self.differentiating.add(block)
        elif do == "end":
            self.differentiating.remove(block)

    def _check_form(self, node: Node) -> None:
        """Check which keys a node has, and the values that do not depend on its kind."""
        known = type(node) is dict and type(node.get("do")) is str and node["do"] in _KEYS
        require(known, "it is not a node of a known kind")
        required, optional = _KEYS[node["do"]]
        complete = _COMMON | required <= node.keys() <= _COMMON | required | optional | _OPTIONAL
        require(complete, "it lacks a required key, or has an unknown one")
        require(is_int(node["run"]) and 0 <= node["run"] < len(self._job.runs), "`run` is not the number of a run")
        blocks = self._job.runs[node["run"]]["blocks"]
        require(is_int(node["block"]) and 0 <= node["block"] < blocks, "`block` is not the number of a block of its run")
        for key in ("copy", "no_grad", "loop", "in_place", "retain_graph", "create_graph"):
            require(key not in node or type(node[key]) is bool, f"`{key}` is not a boolean")
        for key in ("at", "leaf", "inside", "line", "id", "dim"):
            require(key not in node or (is_int(node[key]) and 0 <= node[key] < 2**31), f"`{key}` is not an integer from 0 to 2**31 - 1")
        require("key" not in node or is_text(node["key"]), "`key` is not a short printable string")
        lists = node.get("lists", [])
        require(type(lists) is list and all(is_int(item) and item >= 0 for item in lists), "`lists` is not a list of lengths")
        for key in ("site", "module", "name"):
            named = key not in node or (is_text(node[key]) and _SITE.fullmatch(node[key]) is not None)
            require(named, f"`{key}` is not a path")
        located = "site" not in node or node["site"] == "result" or node["site"].endswith((".output", ".input"))
        require(located, "`site` is neither an input nor an output nor the result")

    def _check_kind(self, node: Node) -> bool:
        """Check the keys that are specific to the kind of a node. Return whether the program owns the memory of its result."""
        blocks = self._job.runs[node["run"]]["blocks"]
        match node["do"]:
            case "op":
                owned = self._check_op(node)
                return owned or bool(node.get("copy"))
            case "const":
                known = type(node["tensor"]) is str and node["tensor"] in self._job.tensors
                require(known, "the container has no such tensor")
            case "skip":
                require(node["site"].endswith(".input"), "a module is skipped at its input")
                self._check_tree(node["value"], _VALUES)
            case "barrier":
                require(is_int(node["of"]) and 1 <= node["of"] <= blocks, f"`of` is not a number of blocks from 1 to {blocks}")
            case "apply":
                for key, kind in (("args", "list"), ("kwargs", "dict")):
                    require(type(node[key]) is dict and kind in node[key], f"`{key}` is not a {kind}")
                    self._check_tree(node[key], _VALUES)
                named = all(is_text(name) and name.isidentifier() for name, _ in node["kwargs"]["dict"])
                require(named, "the name of an argument is not an identifier")
            case "log":
                self._check_log(node)
            case "write":
                in_place = "inside" not in node or bool(node.get("in_place"))
                require(in_place, "a tensor inside a cache can be written to in place only")
                self._check_reference(node["value"], "`value`")
            case "requires_grad" | "backward" | "grad" | "set_grad" | "size":
                require("size" not in node or (is_int(node["size"]) and node["size"] >= 0), "`size` is not a size")
                for key in ("value", "gradient", "wrt"):
                    if key in node:
                        self._check_reference(node[key], f"`{key}`")
        return node["do"] == "grad" or bool(node.get("copy"))

    def _check_tree(self, tree: Any, kinds: frozenset[str]) -> None:
        check_tree(tree, kinds, self._budget)
        check_references(tree, self.before)

    def _check_reference(self, tree: Any, name: str) -> None:
        self._check_tree(tree, _REF)
        require(type(tree) is dict, f"{name} is not a reference to a tensor")

    def _check_log(self, node: Node) -> None:
        require(type(node["text"]) is list, "`text` is not a list")
        for piece in node["text"]:
            self._budget.spend(0)
            if type(piece) is str and len(piece) <= _LONGEST_TEXT:
                continue
            formed = type(piece) is dict and {"value"} <= piece.keys() <= {"value", "format"}
            require(formed, "`text` contains an item that is neither a value nor a string of permitted length")
            require("format" not in piece or is_format(piece["format"]), "a number has a format that is not permitted")
            self._check_reference(piece["value"], "a value of `text`")

    def _check_op(self, node: Node) -> bool:
        """Check an operator. Return whether the program owns the memory of its result."""
        name, args, kwargs = node["name"], node["args"], node.get("kwargs", {})
        operator = OPERATORS.get(name)
        if operator is None:
            raise InvalidProgramError(why_not(name))
        formed = type(args) is list and type(kwargs) is dict and all(type(key) is str for key in kwargs)
        require(formed, "`args` is not a list, or `kwargs` is not an object")
        schema = operator._schema.arguments
        positional = [argument for argument in schema if not argument.kwarg_only]
        require(len(args) <= len(positional), f"`{name}` takes {len(positional)} arguments, not {len(args)}")
        given = {argument.name: value for argument, value in zip(positional, args, strict=False)}
        known = not given.keys() & kwargs.keys() and kwargs.keys() <= {argument.name for argument in schema}
        require(known, f"`{name}` gets an argument that it does not have, or one argument twice")
        given |= kwargs
        base = name.split(".")[1]
        for argument in schema:
            if argument.name in given:
                allowed = STRINGS.get((base, argument.name), frozenset())
                self._check_argument(given[argument.name], str(argument.real_type), allowed, argument.name)
            else:
                require(argument.has_default_value(), f"`{name}` lacks its argument `{argument.name}`")
        several = base != "einsum" or len(given["tensors"]) > 1
        require(several, "`einsum` of one tensor may return a view of it; it has to be sent as `permute`, `diagonal` and `sum`")
        drops = base == "scaled_dot_product_attention" and given.get("dropout_p", 0.0) != 0.0
        require(not drops, "`dropout_p` would draw from the random number generator of the server; it has to be 0")
        if not is_in_place(name) and not is_view(name):
            return True
        first = given[schema[0].name]
        owned = type(first) is dict and self.owned[first["ref"][0]]
        if is_in_place(name) and not owned:
            raise InvalidProgramError(
                f"`{name}` would write to memory that the program does not own: activations change through `write` only, weights and "
                "constants never change"
            )
        return owned

    def _check_argument(self, value: Any, kind: str, strings: Container[str], name: str) -> None:
        self._budget.spend(0)
        if kind.startswith("Optional["):
            if value is None:
                return
            kind = kind[len("Optional[") : -1]
        if kind.startswith("List["):
            inner = kind[len("List[") : -1]
            if type(value) is list:
                for item in value:
                    self._check_argument(item, inner, strings, name)
                return
            require(inner == "int", f"`{name}` is not a list")
            kind = inner
        require(_is_argument(value, kind, strings), f"`{name}` is not of type {kind}")
        if kind == "Tensor" and type(value) is dict and "float" not in value:
            self._check_tree(value, _REF)


def why_not(name: str) -> str:
    """Return the reason why programs may not use the operator ``name``."""
    base = name.split(".")[1] if name.count(".") == 2 else name
    stem = base.removesuffix("_like").removesuffix("_permuted").removesuffix("_strided").removeprefix("new_")
    for key in (base, stem, base.removesuffix("_"), "rand" if base.startswith("rand") else base):
        if key in _DENIED:
            return f"the operator `{name}` is denied: {_DENIED[key]}"
    return f"there is no operator `{name}` that programs may use"


def check_references(tree: Any, nodes: list[Node]) -> None:
    """Raise an error unless each reference of a checked tree names one of ``nodes`` that has a result."""
    for node, _ in references(tree):
        require(node < len(nodes), f"it refers to node {node}, which does not come before it")
        require(nodes[node]["do"] not in _EFFECTS, f"it refers to node {node}, which has no result")


def _is_argument(value: Any, kind: str, strings: Container[str]) -> bool:
    if type(value) is dict:
        if len(value) != 1:
            return False
        ((form, content),) = value.items()
        if kind == "Tensor" and form == "float":
            kind = "number"
        allowed: Any = {
            "Tensor": ("ref", None),
            "number": ("float", FLOATS),
            "float": ("float", FLOATS),
            "ScalarType": ("dtype", DTYPES),
            "Layout": ("layout", {"strided"}),
            "Device": ("device", {"model"}),
            "MemoryFormat": ("memory_format", MEMORY_FORMATS),
            "str": ("str", strings),
        }.get(kind)
        if allowed is None or form != allowed[0]:
            return False
        return allowed[1] is None or (type(content) is str and content in allowed[1])
    match kind:
        case "bool":
            return type(value) is bool
        case "int" | "SymInt":
            return is_int(value)
        case "float":
            return is_finite(value)
        case "number" | "Tensor":  # a number in place of a tensor stands for a tensor without dimensions
            return type(value) is bool or is_finite(value)
    return False


def write_argument(value: Any, reference: Callable[[torch.Tensor], Any]) -> Any:
    """Return an argument of an operator as JSON. ``reference(tensor)`` returns the JSON of a tensor.

    Raises:
        TypeError: If the argument has a type that programs cannot contain.
    """
    if isinstance(value, (list, tuple)):
        return [write_argument(item, reference) for item in value]

    def leaf(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return reference(item)
        if isinstance(item, torch.device):
            return {"device": "model"}
        if item is torch.strided:
            return {"layout": "strided"}
        for name, known in MEMORY_FORMATS.items():
            if item is known:
                return {"memory_format": name}
        raise TypeError(f"{type(item).__name__} {item!r}")

    return write_tree(value, leaf)
