"""The nodes of a program, and what can be checked of them without a model.

A program is a list of nodes in the order in which the client recorded them. Each belongs to a run of the model and to a block of
that run; the nodes of a block are done in their order, those of several blocks take turns as blocks do. What a node makes is named by
its position in the list, so a reference can point backwards only.

=================  ======================================================================================================
``read``           the tensor ``leaf`` of the value at ``site``, at its passage number ``at``; ``inside``: the number of a
                   tensor in that leaf, if it is a cache; ``copy``: a copy of it
``const``          the tensor ``tensor`` of the container
``weight``         the parameter or buffer ``name`` of the model
``op``             the operator ``name`` of the table, applied to ``args`` and ``kwargs``
``apply``          the module ``module``, applied to ``args`` and ``kwargs``; ``copy``: copies of what it returns
``write``          ``value`` takes the place of tensor ``leaf`` at ``site``; ``in_place``: its values do, in the memory of
                   that tensor
``skip``           the module whose input is ``site`` returns ``value`` without running
``barrier``        waits until ``of`` blocks are at the barrier ``id``
``stop``           ends the run
``requires_grad``  from here on, gradients flow to ``value``
``backward``       a backward pass from ``value``, with ``gradient`` unless that is a scalar, ``retain_graph`` and
                   ``create_graph``; the nodes of the block from here to ``end`` run along with it
``grad``           the gradient with respect to ``wrt``: a copy, which flows on with what is written to it
``set_grad``       ``value`` flows on in place of the gradient with respect to ``wrt``
``end``            ends what runs along with the pass
``size``           refuses the program unless dimension ``dim`` of ``value`` is ``size``, at which the block looked
``log``            prints a line: ``text`` is a list of strings, and of values with the ``format`` of a number, if they have one
=================  ======================================================================================================

Every node may have ``line``, the user's, for messages. ``loop`` says that ``site`` is waited for in a loop over passages, which may
turn out shorter.

Memory is tracked by schemas: a result of an operator is *owned* by the program unless it is a view, and then it belongs to what it
is a view of. Operators in place write to owned memory only; activations change by ``write`` alone, and weights never.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

import torch

from .errors import InvalidProgramError
from .formats import is_format
from .limits import Limits
from .operators import NAMES, OPERATORS, STRINGS, is_in_place, is_view
from .trees import DTYPES, FLOATS, Budget, check_tree, is_int, is_text, references

if TYPE_CHECKING:
    from .payload import Job

Node = dict[str, Any]

_COMMON = {"do", "run", "block"}
_OPTIONAL = {"line"}

#: Keys of each kind of node, required and optional.
_KEYS: dict[str, tuple[set[str], set[str]]] = {
    "read": ({"site", "at", "leaf"}, {"inside", "copy", "loop"}),
    "const": ({"tensor"}, set()),
    "weight": ({"name"}, set()),
    "op": ({"name", "args"}, {"kwargs"}),
    "apply": ({"module", "args", "kwargs"}, {"copy"}),
    "write": ({"site", "at", "leaf", "value"}, {"inside", "in_place", "loop"}),
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

#: Kinds of nodes that make nothing.
_EFFECTS = frozenset({"write", "skip", "barrier", "stop", "requires_grad", "backward", "set_grad", "end", "size", "log"})

#: Kinds of nodes that stand within a backward pass only, and those that may stand there besides.
_OF_PASS = frozenset({"grad", "set_grad", "end"})
IN_PASS = _OF_PASS | {"op", "const", "weight", "apply", "size", "log"}

_VALUES = frozenset({"ref", "list", "tuple", "dict", "float"})
_SITE = re.compile(r"(?:[A-Za-z_][A-Za-z0-9_]*|\d+)(?:\.(?:[A-Za-z_][A-Za-z0-9_]*|\d+))*", re.ASCII)

#: Text between two values that are printed.
_LONGEST_TEXT = 10_000

MEMORY_FORMATS = {
    "preserve_format": torch.preserve_format,
    "contiguous_format": torch.contiguous_format,
    "channels_last": torch.channels_last,
}

#: Why an operator is not in the table, for those that people ask for.
_DENIED = {
    "empty": "it gives uninitialised memory",
    "as_strided": "it gives views of arbitrary memory",
    "set_": "it replaces the memory of a tensor",
    "resize_": "it gives uninitialised memory",
    "rand": "it draws from the random numbers of the server",
    "from_file": "it reads files",
    "nonzero": "the size of its result depends on values",
    "masked_select": "the size of its result depends on values",
    "_local_scalar_dense": "it gives a value to Python",
}


def check_nodes(job: Job, limits: Limits, budget: Budget) -> None:
    """Check everything about the nodes of a job that needs no model.

    Raises:
        InvalidProgramError: With the number of the node and the reason.
    """
    if type(job.nodes) is not list:
        raise InvalidProgramError("The program is no list of nodes.")
    if len(job.nodes) > limits.nodes:
        raise InvalidProgramError(f"The program has {len(job.nodes)} nodes; the limit is {limits.nodes}.")
    if sum(type(node) is dict and node.get("do") == "log" for node in job.nodes) > limits.logs:
        raise InvalidProgramError(f"The program prints more than {limits.logs} lines, which is the limit.")
    owned: list[bool] = []
    before: list[Node] = []
    stopped: set[tuple[int, int]] = set()
    differentiating: set[tuple[int, int]] = set()
    for number, node in enumerate(job.nodes):
        try:
            _check_node(node, job, budget, before, owned)
            if before and node["run"] < before[-1]["run"]:
                raise InvalidProgramError("it belongs to a run that is over")
            before.append(node)
            if (node["run"], node["block"]) in stopped:
                raise InvalidProgramError("its block has stopped before")
            if node["do"] == "stop":
                stopped.add((node["run"], node["block"]))
            _check_pass(node, differentiating)
        except InvalidProgramError as error:
            what = node.get("do") if type(node) is dict else None
            line = node.get("line") if type(node) is dict else None
            raise InvalidProgramError(
                f"Node {number}{f' ({what})' if is_text(what) else ''}{f', line {line}' if is_int(line) else ''}: {error}"
            ) from None
    if differentiating:
        raise InvalidProgramError("A backward pass has no end.")


def _check_pass(node: Node, differentiating: set[tuple[int, int]]) -> None:
    """Note where backward passes begin and end, and refuse what may not stand there."""
    do, block = node["do"], (node["run"], node["block"])
    if block in differentiating and do not in IN_PASS:
        raise InvalidProgramError("it stands within a backward pass")
    if block not in differentiating and do in _OF_PASS:
        raise InvalidProgramError("it stands outside of a backward pass")
    if do == "backward":
        differentiating.add(block)
    elif do == "end":
        differentiating.remove(block)


def _check_node(node: Node, job: Job, budget: Budget, before: list[Node], owned: list[bool]) -> None:
    if type(node) is not dict or type(do := node.get("do")) is not str or do not in _KEYS:
        raise InvalidProgramError("it is no node of a known kind")
    required, optional = _KEYS[do]
    if not _COMMON | required <= node.keys() or not node.keys() <= _COMMON | required | optional | _OPTIONAL:
        raise InvalidProgramError("it lacks a key, or has one that it should not have")
    if not (is_int(node["run"]) and 0 <= node["run"] < len(job.runs)):
        raise InvalidProgramError("it belongs to no run")
    if not (is_int(node["block"]) and 0 <= node["block"] < job.runs[node["run"]]["blocks"]):
        raise InvalidProgramError("it belongs to no block of its run")
    for key in ("copy", "loop", "in_place", "retain_graph", "create_graph"):
        if key in node and type(node[key]) is not bool:
            raise InvalidProgramError(f"`{key}` is no boolean")
    for key in ("at", "leaf", "inside", "line", "id", "dim"):
        if key in node and not (is_int(node[key]) and 0 <= node[key] < 2**31):
            raise InvalidProgramError(f"`{key}` is no number of that kind")
    for key in ("site", "module", "name"):
        if key in node and not (is_text(node[key]) and _SITE.fullmatch(node[key])):
            raise InvalidProgramError(f"`{key}` is no path")
    if "site" in node and node["site"] != "result" and not node["site"].endswith((".output", ".input")):
        raise InvalidProgramError("`site` is neither an input nor an output nor the result")
    owned.append(_CHECKS[do](node, job, budget, before, owned) if do in _CHECKS else False)


def _check_const(node: Node, job: Job, budget: Budget, before: list[Node], owned: list[bool]) -> bool:
    if type(node["tensor"]) is not str or node["tensor"] not in job.tensors:
        raise InvalidProgramError("the container has no such tensor")
    return False


def _check_read(node: Node, job: Job, budget: Budget, before: list[Node], owned: list[bool]) -> bool:
    return bool(node.get("copy", False))


def _check_write(node: Node, job: Job, budget: Budget, before: list[Node], owned: list[bool]) -> bool:
    check_tree(node["value"], frozenset({"ref"}), budget)
    if type(node["value"]) is not dict:
        raise InvalidProgramError("`value` is no reference to a tensor")
    check_references(node["value"], before)
    if "inside" in node and not node.get("in_place"):
        raise InvalidProgramError("a tensor inside of a cache is written to in place only")
    return False


def _check_size(node: Node, job: Job, budget: Budget, before: list[Node], owned: list[bool]) -> bool:
    if not (is_int(node["size"]) and node["size"] >= 0):
        raise InvalidProgramError("`size` is none")
    return _check_gradients(node, job, budget, before, owned)


def _check_gradients(node: Node, job: Job, budget: Budget, before: list[Node], owned: list[bool]) -> bool:
    for key in ("value", "gradient", "wrt"):
        if key in node:
            check_tree(node[key], frozenset({"ref"}), budget)
            if type(node[key]) is not dict:
                raise InvalidProgramError(f"`{key}` is no reference to a tensor")
            check_references(node[key], before)
    return node["do"] == "grad"


def _check_log(node: Node, job: Job, budget: Budget, before: list[Node], owned: list[bool]) -> bool:
    if type(node["text"]) is not list:
        raise InvalidProgramError("`text` is no list")
    for piece in node["text"]:
        budget.spend(0)
        if type(piece) is str and len(piece) <= _LONGEST_TEXT:
            continue
        if type(piece) is not dict or not {"value"} <= piece.keys() <= {"value", "format"}:
            raise InvalidProgramError("`text` has something in it that cannot be printed")
        if "format" in piece and not is_format(piece["format"]):
            raise InvalidProgramError("a number is to be formatted as none can be")
        check_tree(piece["value"], frozenset({"ref"}), budget)
        if type(piece["value"]) is not dict:
            raise InvalidProgramError("`text` has a value that is no reference to a tensor")
        check_references(piece["value"], before)
    return False


def _check_skip(node: Node, job: Job, budget: Budget, before: list[Node], owned: list[bool]) -> bool:
    if not node["site"].endswith(".input"):
        raise InvalidProgramError("a module is skipped at its input")
    check_tree(node["value"], _VALUES, budget)
    check_references(node["value"], before)
    return False


def _check_barrier(node: Node, job: Job, budget: Budget, before: list[Node], owned: list[bool]) -> bool:
    if not (is_int(node["of"]) and 1 <= node["of"] <= job.runs[node["run"]]["blocks"]):
        raise InvalidProgramError("`of` is no number of blocks")
    return False


def _check_apply(node: Node, job: Job, budget: Budget, before: list[Node], owned: list[bool]) -> bool:
    for key, kind in (("args", "list"), ("kwargs", "dict")):
        tree = node[key]
        if type(tree) is not dict or kind not in tree:
            raise InvalidProgramError(f"`{key}` is no {kind}")
        check_tree(tree, _VALUES, budget)
        check_references(tree, before)
    if not all(is_text(name) and name.isidentifier() for name, _ in node["kwargs"]["dict"]):
        raise InvalidProgramError("the name of an argument is no name")
    return bool(node.get("copy", False))


def _check_op(node: Node, job: Job, budget: Budget, before: list[Node], owned: list[bool]) -> bool:
    name, args, kwargs = node["name"], node["args"], node.get("kwargs", {})
    operator = OPERATORS.get(name)
    if operator is None:
        raise InvalidProgramError(why_not(name))
    if type(args) is not list or type(kwargs) is not dict or not all(type(key) is str for key in kwargs):
        raise InvalidProgramError("its arguments are no list and no object")
    schema = operator._schema.arguments
    positional = [argument for argument in schema if not argument.kwarg_only]
    if len(args) > len(positional):
        raise InvalidProgramError(f"`{name}` takes {len(positional)} arguments, not {len(args)}")
    given = {argument.name: value for argument, value in zip(positional, args, strict=False)}
    if given.keys() & kwargs.keys() or not kwargs.keys() <= {argument.name for argument in schema}:
        raise InvalidProgramError(f"`{name}` has no such argument, or has it already")
    given |= kwargs
    base = name.split(".")[1]
    for argument in schema:
        if argument.name in given:
            allowed = STRINGS.get((base, argument.name), frozenset())
            _check_argument(given[argument.name], str(argument.real_type), allowed, argument.name, before, budget)
        elif not argument.has_default_value():
            raise InvalidProgramError(f"`{name}` lacks its argument `{argument.name}`")
    if base == "scaled_dot_product_attention" and given.get("dropout_p", 0.0) != 0.0:
        raise InvalidProgramError("`dropout_p` draws from the random numbers of the server; it has to be 0")
    if is_in_place(name):
        if not _is_owned(given[schema[0].name], owned):
            raise InvalidProgramError(
                f"`{name}` would write to memory that the program does not own: activations change by `write` alone, weights "
                "and constants never"
            )
        return True
    return _is_owned(given[schema[0].name], owned) if is_view(name) else True


def _is_owned(argument: Any, owned: list[bool]) -> bool:
    return type(argument) is dict and owned[argument["ref"][0]]


def why_not(name: str) -> str:
    """Return why there is no operator ``name``."""
    base = name.split(".")[1] if name.count(".") == 2 else name
    stem = base.removesuffix("_like").removesuffix("_permuted").removesuffix("_strided").removeprefix("new_")
    for key in (base, stem, base.removesuffix("_"), "rand" if base.startswith("rand") else base):
        if key in _DENIED:
            return f"the operator `{name}` is denied: {_DENIED[key]}"
    return f"there is no operator `{name}` that programs may use"


def check_references(tree: Any, nodes: list[Node]) -> None:
    """Raise if a tree refers to anything but what one of ``nodes`` makes."""
    for node, _ in references(tree):
        if node >= len(nodes):
            raise InvalidProgramError(f"it refers to node {node}, which does not come before it")
        if nodes[node]["do"] in _EFFECTS:
            raise InvalidProgramError(f"it refers to node {node}, which makes nothing")


def _check_argument(
    value: Any, kind: str, strings: frozenset[str], name: str, nodes: list[Node], budget: Budget
) -> None:
    budget.spend(0)
    if kind.startswith("Optional["):
        if value is None:
            return
        kind = kind[len("Optional[") : -1]
    if kind.startswith("List["):
        inner = kind[len("List[") : -1]
        if type(value) is list:
            for item in value:
                _check_argument(item, inner, strings, name, nodes, budget)
            return
        if inner != "int":
            raise InvalidProgramError(f"`{name}` is no list")
        kind = inner
    if not _is_argument(value, kind, strings):
        raise InvalidProgramError(f"`{name}` is not of type {kind}")
    if kind == "Tensor" and type(value) is dict:
        check_tree(value, frozenset({"ref"}), budget)
        check_references(value, nodes)


def _is_argument(value: Any, kind: str, strings: frozenset[str]) -> bool:
    if type(value) is dict:
        if len(value) != 1:
            return False
        ((form, content),) = value.items()
        if kind == "Tensor" and form == "float":
            kind = "number"
        allowed = {
            "Tensor": ("ref", None),
            "number": ("float", FLOATS),
            "float": ("float", FLOATS),
            "ScalarType": ("dtype", DTYPES),
            "Layout": ("layout", {"strided"}),
            "Device": ("device", {"model"}),
            "MemoryFormat": ("memory_format", MEMORY_FORMATS),
            "str": ("str", strings),
        }.get(kind)
        return (
            allowed is not None
            and form == allowed[0]
            and (allowed[1] is None or (type(content) is str and content in allowed[1]))
        )
    if kind == "bool":
        return type(value) is bool
    if kind in ("int", "SymInt"):
        return is_int(value)
    if kind == "float":
        return is_int(value) or (type(value) is float and math.isfinite(value))
    if kind in ("number", "Tensor"):  # a number in place of a tensor is one without dimensions
        return type(value) is bool or is_int(value) or (type(value) is float and math.isfinite(value))
    return False


_CHECKS = {
    "const": _check_const,
    "read": _check_read,
    "write": _check_write,
    "skip": _check_skip,
    "barrier": _check_barrier,
    "apply": _check_apply,
    "op": _check_op,
    "size": _check_size,
    "log": _check_log,
    **dict.fromkeys(("requires_grad", "backward", "grad", "set_grad"), _check_gradients),
}


def write_argument(value: Any, reference: Any) -> Any:
    """Return an argument of an operator as JSON; ``reference(tensor)`` gives that of a tensor.

    Raises:
        TypeError: If an argument is of a type that programs do not have.
    """
    if isinstance(value, torch.Tensor):
        return reference(value)
    if value is None or type(value) is bool or is_int(value):
        return value
    if type(value) is float:
        return (
            value if math.isfinite(value) else {"float": "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"}
        )
    if isinstance(value, (list, tuple)):
        return [write_argument(item, reference) for item in value]
    if isinstance(value, torch.dtype) and value in DTYPES.values():
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": "model"}
    if value is torch.strided:
        return {"layout": "strided"}
    for name, known in MEMORY_FORMATS.items():
        if value is known:
            return {"memory_format": name}
    if type(value) is str:
        return {"str": value}
    raise TypeError(f"{type(value).__name__} {value!r}")


def read_argument(value: Any, lookup: Any, device: torch.device) -> Any:
    """Return the argument of an operator that checked JSON stands for; ``lookup(node, output)`` gives tensors."""
    if type(value) is list:
        return [read_argument(item, lookup, device) for item in value]
    if type(value) is not dict:
        return value
    ((form, content),) = value.items()
    match form:
        case "ref":
            return lookup(*content)
        case "float":
            return FLOATS[content]
        case "dtype":
            return DTYPES[content]
        case "layout":
            return torch.strided
        case "device":
            return device
        case "memory_format":
            return MEMORY_FORMATS[content]
        case _:
            return content


__all__ = ["NAMES", "Node", "check_nodes", "check_references", "read_argument", "why_not", "write_argument"]
