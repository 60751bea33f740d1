"""Taps: identity operations that mark locations inside a dynamo graph.

While dynamo traces a model, every intercepted module call passes its arguments and its result through :func:`tap`. Dynamo
keeps the call as one node of the graph, with the location as a constant, so the captured graph says where
every module's input and output are. A tap that nobody waits for is removed before lowering and costs nothing.

A value may be any nest of containers. Its leaves go through the tap one by one; the nest itself is kept as a string
(dynamo can hold a string in the graph where it cannot hold a ``TreeSpec``), see :func:`describe` and
:func:`parse_structure`. Leaves that a graph cannot hold (a cache object, say) stay where they are and appear as
:class:`Opaque`.
"""

from __future__ import annotations

import ast
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

#: Prefix of the constant that stands for a leaf no graph can hold.
OPAQUE_MARK = "\0opaque:"

_TUPLE, _DICT = "builtins:tuple", "builtins:dict"

_CONSTANTS = (bool, int, float, str, torch.SymInt, torch.SymFloat, torch.SymBool)


class Opaque:
    """Stands, in a compiled trace, for an object inside a value that the captured graph does not contain.

    It may be moved along (returned as part of a replaced tuple, for instance). Anything else raises.
    """

    def __init__(self, kind: str, location: str) -> None:
        self.__dict__["kind"] = kind
        self.__dict__["location"] = location

    def _refuse(self) -> TypeError:
        kind, location = self.__dict__["kind"], self.__dict__["location"]
        return TypeError(
            f"The {kind} at `{location}` is a Python object that the captured graph does not contain, so a compiled "
            "trace cannot look inside. Read the modules that produce its tensors, or use `trace(..., compile=False)`."
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        raise self._refuse()

    def __getitem__(self, key: Any) -> Any:
        raise self._refuse()

    def __setattr__(self, name: str, value: Any) -> None:
        raise self._refuse()

    def __repr__(self) -> str:
        return f"<{self.__dict__['kind']} at {self.__dict__['location']}, not in the captured graph>"


def tap(location: str, leaves: list[Any], structure: str) -> list[torch.Tensor]:
    """Return the tensors among ``leaves``; the node for this call marks ``location`` in a graph."""
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


torch._dynamo.allow_in_graph(tap)


def tapped_call(
    input_location: str,
    output_location: str,
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Make a call between two taps; runs while dynamo traces, which is why common values take a short way."""
    parts = [_flattened(value) for value in args]
    named = [_flattened(value) for value in kwargs.values()]
    described = "".join([part[2] for part in parts]), "".join([part[2] for part in named])
    structure = f"({_TUPLE!r},None,(({_TUPLE!r},None,({described[0]})),({_DICT!r},{list(kwargs)!r},({described[1]})),))"
    values = _through(input_location, [*parts, *named], structure)
    args = tuple(values[: len(parts)])
    kwargs = dict(zip(kwargs, values[len(parts) :]))  # noqa: B905 - dynamo is slower with `strict`
    return tapped(output_location, call(*args, **kwargs))


def tapped(location: str, value: Any) -> Any:
    """Return ``value`` with its tensors passed through a tap."""
    if isinstance(value, torch.Tensor):
        return tap(location, [value], "None")[0]
    if type(value) is tuple:
        parts = [_flattened(item) for item in value]
        structure = f"({_TUPLE!r},None,({''.join([part[2] for part in parts])}))"
        return tuple(_through(location, parts, structure))
    part = _flattened(value)
    return _through(location, [part], part[2][:-1])[0]


def _flattened(value: Any) -> tuple[list[Any], pytree.TreeSpec | None, str]:
    """Return the leaves of ``value``, how they nest (``None`` for a leaf), and that as text with a comma."""
    if value is None or isinstance(value, (torch.Tensor, *_CONSTANTS)):
        return [value], None, "None,"
    leaves, spec = pytree.tree_flatten(value)
    return leaves, spec, describe(spec) + ","


def _through(location: str, parts: list[tuple[list[Any], pytree.TreeSpec | None, str]], structure: str) -> list[Any]:
    """Pass all leaves of ``parts`` through one tap; return the values that the parts are then."""
    leaves = [leaf for part in parts for leaf in part[0]]
    tensors = tap(location, [_marked(leaf) for leaf in leaves], structure)
    position = 0
    values = []
    for found, spec, _ in parts:
        behind = []
        for leaf in found:
            if isinstance(leaf, torch.Tensor):
                behind.append(tensors[position])
                position += 1
            else:
                behind.append(leaf)
        values.append(behind[0] if spec is None else pytree.tree_unflatten(behind, spec))
    return values


def _marked(leaf: Any) -> Any:
    """Return ``leaf`` as a graph can hold it."""
    if leaf is None or isinstance(leaf, (torch.Tensor, *_CONSTANTS)):
        return leaf
    kind = type(leaf)
    return OPAQUE_MARK + kind.__module__ + "." + kind.__qualname__


def describe(spec: pytree.TreeSpec) -> str:
    """Return ``spec`` as a Python literal: ``None`` for a leaf, else ``(type, context, children)``."""
    if spec.is_leaf():
        return "None"
    kind = spec.type
    context = spec.context
    if isinstance(context, type):  # a namedtuple's class
        name, context = context.__module__ + ":" + context.__qualname__, None
    else:
        name = kind.__module__ + ":" + kind.__qualname__
        if kind is defaultdict:
            context = list(context[1])
        elif kind is OrderedDict:
            context = list(context)
    children = "".join([describe(child) + "," for child in spec.children()])
    return "(" + repr(name) + "," + repr(context) + ",(" + children + "))"


def parse_structure(text: str) -> pytree.TreeSpec:
    """Return the ``TreeSpec`` that :func:`describe` turned into ``text``.

    Raises:
        LookupError: If a class named in it can no longer be found.
    """
    return _build_spec(ast.literal_eval(text))


def _build_spec(described: Any) -> pytree.TreeSpec:
    if described is None:
        return pytree.treespec_leaf()
    name, context, children = described
    kind = _find_class(name)
    specs = [_build_spec(child) for child in children]
    if issubclass(kind, tuple) and kind is not tuple and hasattr(kind, "_fields"):
        return pytree.TreeSpec(pytree.namedtuple, kind, specs)  # type: ignore[attr-defined]
    if kind is defaultdict:
        context = [None, context]
    return pytree.TreeSpec(kind, context, specs)


def _find_class(name: str) -> Any:
    module_name, _, qualname = name.partition(":")
    found: Any = sys.modules.get(module_name)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    if found is not None:
        return found
    known = [*pytree.SUPPORTED_NODES, *tuple.__subclasses__()]
    for kind in known:
        if f"{kind.__module__}:{kind.__qualname__}" == name:
            return kind
    raise LookupError(f"The class {qualname} of module {module_name}, part of a captured value, cannot be found.")
