"""Nodes and events as a splice looks at them: what they use, what they edit, and how a torch function becomes a node."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from ..effects import Kind, kind_of
from ..program import (
    Apply,
    Call,
    Declare,
    Enter,
    External,
    Input,
    Leave,
    Nest,
    Number,
    Reference,
    Skip,
    Value,
    Write,
)
from ..torch_compat import is_held_by_argument


def appended_to(node: torch.fx.Node) -> torch.fx.Node | None:
    """Return what was stored before ``node``.

    That is what ``node`` concatenates with new entries (perhaps it is a part or another layout of that); or, if a cache that the model
    was given holds it, what it moves to a device or adds to. What was stored before comes from outside, or has no entries yet. Any
    other concatenation is the module's own.
    """
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if name == "cat" and node.args and isinstance(node.args[0], (list, tuple)) and isinstance(node.args[0][0], torch.fx.Node):
        first = node.args[0][0]
        example = first.meta.get("example_value")
        is_empty = isinstance(example, torch.Tensor) and 0 in [size for size in example.shape if isinstance(size, int)]
        return first if first.op == "placeholder" or is_empty else None
    source = node.args[0] if node.args else None
    if not isinstance(source, torch.fx.Node):
        return None
    if name in ("to", "add", "iadd") and source.op == "placeholder" and is_held_by_argument(source):
        return source
    return source if _passes_on(node) and appended_to(source) is not None else None


def _passes_on(node: torch.fx.Node) -> bool:
    """Whether ``node`` is a part of its first argument, or the same in another place or layout."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return node.target is operator.getitem or name in ("contiguous", "clone", "to", "detach")


#: What makes the same as functions that take the sizes from another tensor.
LIKE_FUNCTIONS: dict[str, Callable[..., Any]] = {"zeros_like": torch.zeros, "ones_like": torch.ones, "empty_like": torch.zeros}


def _tensors_of(node: torch.fx.Node) -> list[torch.fx.Node]:
    return [item for item in node.all_input_nodes if isinstance(item.meta.get("example_value"), torch.Tensor)]


def is_made_of_sizes(node: torch.fx.Node) -> bool:
    """Whether a tensor is made of numbers alone, or is one that is, in another place or layout."""
    tensors = _tensors_of(node)
    if tensors:
        return _passes_on(node) and all(map(is_made_of_sizes, tensors))
    return node.op == "call_function" and kind_of(node) is Kind.NEW


def edited_by(node: torch.fx.Node) -> torch.fx.Node | None:
    """Return the tensor that ``node`` changes in place and returns, if it does."""
    if isinstance(node.meta.get("example_value"), (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return None  # ``+=`` of a number makes another one
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    operates = node.op == "call_function" and name in _IN_PLACE and getattr(operator, name) is node.target
    if operates or (node.op == "call_method" and name.endswith("_") and not name.endswith("__")):
        return node.args[0] if isinstance(node.args[0], torch.fx.Node) else None
    return None


#: Operators that change their first argument.
_IN_PLACE = frozenset("iadd isub imul itruediv ifloordiv imod ipow iand ior ixor ilshift irshift".split())


def references(event: Any) -> list[Reference]:
    """Return the tensors an event uses."""
    if isinstance(event, Write):
        return [event.source]
    if isinstance(event, Skip):
        return [source for _, source in event.sources]
    if isinstance(event, (Enter, Apply)):
        return list(event.operands)
    if isinstance(event, Leave):
        return list(event.results)
    if not isinstance(event, Call):
        return []
    found: list[Reference] = []
    pending: list[Any] = [*event.args, *(value for _, value in event.kwargs)]
    while pending:
        item = pending.pop()
        if isinstance(item, (Value, Input, External)):
            found.append(item)
        elif isinstance(item, Nest):
            pending.extend(item.items)
    return found


def numbers(event: Any) -> list[Number]:
    """Return the numbers of a program that an event uses."""
    found: list[Number] = []
    pending: list[Any] = []
    if isinstance(event, Declare):
        pending = [*event.shape, *(event.stride or ())]
    elif isinstance(event, Call):
        pending = [*event.args, *(value for _, value in event.kwargs)]
    while pending:
        item = pending.pop()
        if isinstance(item, Number):
            found.append(item)
        elif isinstance(item, Nest):
            pending.extend(item.items)
    return found


#: Methods that read better as the operator they implement.
_OPERATORS: dict[str, Callable[..., Any]] = {
    "__add__": operator.add,
    "__sub__": operator.sub,
    "__mul__": operator.mul,
    "__truediv__": operator.truediv,
    "__floordiv__": operator.floordiv,
    "__mod__": operator.mod,
    "__matmul__": operator.matmul,
    "__pow__": operator.pow,
    "__neg__": operator.neg,
    "__invert__": operator.invert,
    "__and__": operator.and_,
    "__or__": operator.or_,
    "__xor__": operator.xor,
    "__eq__": operator.eq,
    "__ne__": operator.ne,
    "__lt__": operator.lt,
    "__le__": operator.le,
    "__gt__": operator.gt,
    "__ge__": operator.ge,
    "__getitem__": operator.getitem,
    "__setitem__": operator.setitem,
    "__iadd__": operator.iadd,
    "__isub__": operator.isub,
    "__imul__": operator.imul,
    "__itruediv__": operator.itruediv,
}


def emit(graph: torch.fx.Graph, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.fx.Node:
    """Add a node for a torch function as ``__torch_function__`` receives it."""
    name = getattr(function, "__name__", "")
    if name == "__get__":  # the getter of a property, ``Tensor.T``
        return graph.call_function(getattr, (args[0], function.__self__.__name__))
    qualname = getattr(function, "__qualname__", "")
    is_method = type(function).__name__ in ("method_descriptor", "wrapper_descriptor") or qualname.startswith("Tensor.")
    if is_method or getattr(function, "__module__", None) == "torch._tensor":
        if name in _OPERATORS and not kwargs:
            return graph.call_function(_OPERATORS[name], args)
        return graph.call_method(name, args, kwargs)
    return graph.call_function(function, args, kwargs)
