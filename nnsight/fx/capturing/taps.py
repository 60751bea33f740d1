"""Taps: identity operations that mark locations inside a dynamo graph.

While dynamo traces a model, every intercepted module call passes its arguments and its result through :func:`tap`. Dynamo keeps the call as
one node, with the location as a constant, so the captured graph shows the input and output of every module. Splicing removes all taps.

A value may be any nest of containers. Its leaves are arguments of the tap, and its structure is a string, which a graph can hold where it
cannot hold a ``TreeSpec`` (:func:`~nnsight.fx.capturing.structures.describe`). A leaf that a graph cannot hold, such as a cache object,
stays in the model and appears as :class:`Opaque`.

Records (:mod:`~nnsight.fx.capturing.structures`) are containers, too, except for objects of plain classes that a module was given: they may
be anything, such as a cache. The model keeps its own lists, dicts and records, and the tensors behind the tap are stored in them, so a
module may fill a list that others hold as well. Other containers are new objects.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .structures import (
    DICT,
    FILLED,
    KEPT,
    TUPLE,
    describe,
    entries,
    has_attributes,
    is_frozen,
    is_record,
    kind_of_record,
    names_of_fields,
    parse_structure,
    set_item,
)

#: Prefix of the constant that stands for a leaf no graph can hold.
OPAQUE_MARK = "\0opaque:"

_CONSTANTS = (bool, int, float, str, torch.SymInt, torch.SymFloat, torch.SymBool)
_SIMPLE = (torch.Tensor, type(None), *_CONSTANTS)


class Opaque:
    """Stands, in a compiled trace, for an object inside a value that the captured graph does not contain.

    It may be passed on, for instance as part of a replaced tuple. Any other use raises.
    """

    #: For layers that do not import this class.
    is_opaque = True

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


torch.compiler.allow_in_graph(tap)


def tapped_call(
    input_location: str,
    output_location: str,
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Make a call between two taps. It runs while dynamo traces, so common values take a short way."""
    if len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor):
        return tapped(output_location, call(tap(input_location, [args[0]], _ONE_TENSOR)[0]))
    plain = _structure_of_call("None," * len(args), list(kwargs), "None," * len(kwargs))
    behind = _short_way(input_location, [*args, *kwargs.values()], plain)
    given: list[tuple[list[Any], Any, str]] = []
    if behind is None:
        parts = [_flattened(value) for value in args]
        named = [_flattened(value) for value in kwargs.values()]
        texts = "".join([part[2] for part in parts]), "".join([part[2] for part in named])
        given = [*parts, *named]
        behind = _through(input_location, given, _structure_of_call(texts[0], list(kwargs), texts[1]))
    args = tuple(behind[: len(args)])
    kwargs = dict(zip(kwargs, behind[len(args) :]))  # noqa: B905 - dynamo is slower with `strict`
    return tapped(output_location, call(*args, **kwargs), given)


#: The structure of the arguments of a call ``module(tensor)``, as :func:`describe` writes it.
_ONE_TENSOR = f"({TUPLE!r},None,(({TUPLE!r},None,(None,)),({DICT!r},[],()),))"


def _structure_of_call(args: str, names: list[str], named: str) -> str:
    return f"({TUPLE!r},None,(({TUPLE!r},None,({args})),({DICT!r},{names!r},({named})),))"


def _short_way(location: str, values: list[Any], structure: str) -> list[Any] | None:
    """Pass ``values`` through a tap if each is a tensor or a constant, else return ``None``. Every line costs dynamo time."""
    for value in values:
        if not isinstance(value, _SIMPLE):
            return None
    return _behind(values, tap(location, values, structure))


def _behind(leaves: list[Any], tensors: list[torch.Tensor]) -> list[Any]:
    """Return ``leaves`` with ``tensors`` in place of those among them."""
    found, position = [], 0
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            found.append(tensors[position])
            position += 1
        else:
            found.append(leaf)
    return found


def tapped(location: str, value: Any, given: Sequence[Any] = ()) -> Any:
    """Return ``value``, which a module returns, with its tensors passed through a tap; ``given`` as for :func:`_flattened`."""
    if isinstance(value, torch.Tensor):
        return tap(location, [value], "None")[0]
    if type(value) is tuple:
        behind = _short_way(location, list(value), f"({TUPLE!r},None,({'None,' * len(value)}))")
        if behind is not None:
            return tuple(behind)
        parts = [_flattened(item, given) for item in value]
        structure = f"({TUPLE!r},None,({''.join([part[2] for part in parts])}))"
        return tuple(_through(location, parts, structure))
    part = _flattened(value, given)
    return _through(location, [part], part[2][:-1])[0]


class _Kept:
    """A value with mutable containers, which the model keeps, and its ``pytree`` structure; ``given`` as for :func:`_flattened`."""

    def __init__(self, value: Any, spec: pytree.TreeSpec, given: Sequence[Any] | None) -> None:
        self.value, self.spec, self.given = value, spec, given


def _flattened(value: Any, given: Sequence[Any] | None = None) -> tuple[list[Any], Any, str]:
    """Return the leaves of ``value``, its structure (``None`` for a leaf), and that as text with a comma.

    ``given`` are the arguments of the module, as this function returns them: plain objects among their leaves are not looked into; nor is
    any with ``None``.
    """
    if _is_simple(value):
        return [value], None, "None,"
    leaves, spec = pytree.tree_flatten(value)
    # Dynamo is slower with generators.
    if any([is_record(leaf, given) for leaf in leaves if not _is_simple(leaf)]):  # noqa: C419
        parts = [_flattened_leaf(leaf, given) for leaf in leaves]
        texts = [part[1] for part in parts]
        texts.reverse()
        return [leaf for part in parts for leaf in part[0]], _Kept(value, spec, given), describe(spec, texts) + ","
    text = describe(spec) + ","
    kept = any([name in text for name in KEPT])  # noqa: C419
    return leaves, _Kept(value, spec, given) if kept else spec, text


def flatten(value: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """Return the leaves of a value and its structure, with records that hold tensors as containers."""
    leaves, spec = pytree.tree_flatten(value)
    if any(kind_of_record(type(leaf)) for leaf in leaves):
        leaves, _, text = _flattened(value, ())
        spec = parse_structure(text[:-1])
    return leaves, spec


def _is_simple(value: Any) -> bool:
    return isinstance(value, _SIMPLE)


def _flattened_leaf(value: Any, given: Sequence[Any] | None) -> tuple[list[Any], str]:
    """Return the leaves and the text of a leaf of ``pytree``, which may be a record with tensors."""
    if not _is_simple(value) and is_record(value, given):
        kind, (keys, names) = type(value), entries(value)
        parts = [_flattened(dict.__getitem__(value, key), given) for key in keys]
        parts += [_flattened(getattr(value, name, None), given) for name in names]
        leaves = [leaf for part in parts for leaf in part[0]]
        if any([isinstance(leaf, torch.Tensor) for leaf in leaves]):  # noqa: C419
            described = "".join([part[2] for part in parts])
            return leaves, f"({kind.__module__ + ':' + kind.__qualname__!r},{(keys, names)!r},({described})),"
    return [value], "None,"


def _through(location: str, parts: list[tuple[list[Any], Any, str]], structure: str) -> list[Any]:
    """Pass all leaves of ``parts`` through one tap; return the values with the tensors behind it."""
    leaves = [leaf for part in parts for leaf in part[0]]
    new_leaves = _behind(leaves, tap(location, [_marked(leaf) for leaf in leaves], structure))
    start = 0
    values = []
    for found, spec, _ in parts:
        behind = new_leaves[start : start + len(found)]
        start += len(found)
        if isinstance(spec, _Kept):
            behind.reverse()
            values.append(_put_back(spec.value, spec.spec, behind, spec.given))
        else:
            values.append(behind[0] if spec is None else pytree.tree_unflatten(behind, spec))
    return values


def _put_back(value: Any, spec: pytree.TreeSpec, leaves: list[Any], given: Sequence[Any] | None) -> Any:
    """Return ``value`` with other ``leaves``, consumed from the end. Mutable containers stay the same objects, which others may hold."""
    if spec.is_leaf():
        return leaves.pop() if _is_simple(value) else _put_back_entries(value, leaves, given)
    kind = type(value)
    if kind is torch.Size:
        for _ in value:
            leaves.pop()
        return value
    if kind in FILLED:
        keys = list(value) if issubclass(kind, dict) else list(range(len(value)))
        for key, child in zip(keys, spec.children()):  # noqa: B905 - dynamo is slower with `strict`
            held = value[key]
            new = _put_back(held, child, leaves, given)
            if _is_made_anew(held, given):
                value[key] = new
        return value
    node = pytree.SUPPORTED_NODES[spec.type]
    parts = node.flatten_fn(value)[0]
    children = [_put_back(part, child, leaves, given) for part, child in zip(parts, spec.children())]  # noqa: B905 - as above
    return node.unflatten_fn(children, spec.context)


def _put_back_entries(value: Any, leaves: list[Any], given: Sequence[Any] | None) -> Any:
    """Return a leaf of ``pytree``, which may be a record, with other leaves."""
    kind = type(value)
    if not any([isinstance(leaf, torch.Tensor) for leaf in _flattened_leaf(value, given)[0]]):  # noqa: C419
        return leaves.pop()
    keys, names = entries(value)
    for key in keys:
        held = dict.__getitem__(value, key)
        new = _put_back(held, pytree.tree_flatten(held)[1], leaves, given)
        if _is_made_anew(held, given):
            set_item(value, key, new)
    made = {}
    for name in names:
        held = getattr(value, name, None)
        made[name] = _put_back(held, pytree.tree_flatten(held)[1], leaves, given)
        if not is_frozen(kind) and _is_made_anew(held, given):
            object.__setattr__(value, name, made[name])
    return kind(**made) if is_frozen(kind) else value


def _is_made_anew(value: Any, given: Sequence[Any] | None) -> bool:
    """Whether :func:`_put_back` returns another object for ``value``, which holds tensors."""
    if isinstance(value, torch.Tensor):
        return True
    kind = type(value)
    if kind in FILLED or _is_simple(value) or (kind_of_record(kind) and not is_frozen(kind)):
        return False
    return any([isinstance(leaf, torch.Tensor) for leaf in _flattened(value, given)[0]])  # noqa: C419


def _marked(leaf: Any) -> Any:
    """Return ``leaf`` as a graph can hold it."""
    if isinstance(leaf, _SIMPLE):
        return leaf
    return OPAQUE_MARK + _full_name(type(leaf))


def _full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


for _of_class in (kind_of_record, names_of_fields, has_attributes, is_frozen, _full_name):
    torch.compiler.assume_constant_result(_of_class)

