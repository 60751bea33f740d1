"""Taps: identity operations that mark locations inside a dynamo graph.

While dynamo traces a model, every intercepted module call passes its arguments and its result through :func:`tap`. Dynamo keeps the call as
one node, with the location as a constant, so the captured graph shows the input and output of every module. Splicing removes all taps.

A value may consist of nested containers. Its leaves are arguments of the tap, and its structure is a string, because a graph cannot contain
a ``TreeSpec`` (:func:`~nnsight.fx.capturing.structures.describe`). A leaf that a graph cannot contain, such as a cache object, stays in the
model, and blocks see an :class:`Opaque` instead.

Records (:mod:`~nnsight.fx.capturing.structures`) are containers, too. Objects of plain classes are not if they are arguments of the module:
they may be anything, such as a cache. The model keeps its lists, dicts and records, and the results of the tap are stored in them. So a
module may fill a list that other code also holds. Other containers are new objects.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ...runtime.modules.recorded_outputs import record_replaced
from .structures import (
    DICT,
    KEPT_CLASSES,
    MUTABLE_CONTAINERS,
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

#: Prefix of the constant that stands for a leaf that a graph cannot contain.
OPAQUE_MARK = "\0opaque:"

_CONSTANTS = (bool, int, float, str, torch.SymInt, torch.SymFloat, torch.SymBool)
_SIMPLE = (torch.Tensor, type(None), *_CONSTANTS)


class Opaque:
    """Stands, in a compiled trace, for an object in a value that the captured graph does not contain.

    A block may pass it on, for instance as part of a replaced tuple. Any other use is a ``TypeError``.
    """

    #: For lower layers, which cannot import this class.
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
    """Return the tensors among ``leaves``. In a graph, the node of this call marks ``location``."""
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


torch.compiler.allow_in_graph(tap)


def tapped_call(
    input_location: str, output_location: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Make a call between two taps. Dynamo executes it in a shorter way, see :mod:`~nnsight.fx.capturing.traced_calls`."""
    return tapped_call_of_any(input_location, output_location, call, args, kwargs)


def tapped_call_of_any(
    input_location: str, output_location: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Make a call between two taps, with arguments and an output of any kind."""
    parts = [_flattened(value) for value in args]
    named = [_flattened(value) for value in kwargs.values()]
    texts = "".join([part[2] for part in parts]), "".join([part[2] for part in named])
    given = [*parts, *named]
    new = _tap_parts(input_location, given, structure_of_call(texts[0], list(kwargs), texts[1]))
    args = tuple(new[: len(args)])
    kwargs = dict(zip(kwargs, new[len(args) :]))  # noqa: B905 - dynamo is slower with `strict`
    return tapped_output(output_location, call, call(*args, **kwargs), given)


def tapped_output(location: str, call: Callable[..., Any], output: Any, given: Sequence[Any]) -> Any:
    """Return the output of a call with its tensors passed through a tap. It has no variables: dynamo would name nodes after them."""
    if ".source." in location:  # an operation, which can be any callable
        return tapped(location, output, given)
    return record_replaced(call, output, tapped(location, output, given))


def structure_of_call(args: str, names: list[str], named: str) -> str:
    """Return the structure of the arguments of a call, as :func:`describe` writes it; ``args`` and ``named`` are those of the arguments."""
    return f"({TUPLE!r},None,(({TUPLE!r},None,({args})),({DICT!r},{names!r},({named})),))"


def structure_of_tuple(items: str) -> str:
    """Return the structure of a tuple, as :func:`describe` writes it; ``items`` are those of its items."""
    return f"({TUPLE!r},None,({items}))"


def _with_tensors(leaves: list[Any], tensors: list[torch.Tensor]) -> list[Any]:
    """Return ``leaves`` with their tensors replaced by ``tensors``, in order."""
    found, position = [], 0
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            found.append(tensors[position])
            position += 1
        else:
            found.append(leaf)
    return found


def tapped(location: str, value: Any, given: Sequence[Any] = ()) -> Any:
    """Return ``value``, a module's result, with its tensors passed through a tap. For ``given`` see :func:`_flattened`."""
    if isinstance(value, torch.Tensor):
        return tap(location, [value], "None")[0]
    if type(value) is tuple:
        parts = [_flattened(item, given) for item in value]
        return tuple(_tap_parts(location, parts, structure_of_tuple("".join([part[2] for part in parts]))))
    part = _flattened(value, given)
    return _tap_parts(location, [part], part[2][:-1])[0]


class _KeptContainer:
    """A value with containers or records that the model keeps, and its ``pytree`` structure. For ``given`` see :func:`_flattened`."""

    def __init__(self, value: Any, spec: pytree.TreeSpec, given: Sequence[Any] | None) -> None:
        self.value, self.spec, self.given = value, spec, given


def _flattened(value: Any, given: Sequence[Any] | None = None) -> tuple[list[Any], Any, str]:
    """Return the leaves of ``value``, its structure (``None`` for a leaf), and the structure as text with a comma.

    ``given`` are the arguments of the module, as this function returned them. An object of a plain class is a leaf, and not a container, if
    it is among their leaves, or if ``given`` is ``None``.
    """
    if _is_simple(value):
        return [value], None, "None,"
    leaves, spec = pytree.tree_flatten(value)
    # Dynamo is slower with generators.
    if any([is_record(leaf, given) for leaf in leaves if not _is_simple(leaf)]):  # noqa: C419
        parts = [_flattened_leaf(leaf, given) for leaf in leaves]
        texts = [part[1] for part in parts]
        texts.reverse()
        return [leaf for part in parts for leaf in part[0]], _KeptContainer(value, spec, given), describe(spec, texts) + ","
    text = describe(spec) + ","
    kept = any([name in text for name in KEPT_CLASSES])  # noqa: C419
    return leaves, _KeptContainer(value, spec, given) if kept else spec, text


def flatten(value: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """Return the leaves of a value, and its structure. Records that hold tensors are containers."""
    leaves, spec = pytree.tree_flatten(value)
    if any(kind_of_record(type(leaf)) for leaf in leaves):
        leaves, _, text = _flattened(value, ())
        spec = parse_structure(text[:-1])
    return leaves, spec


def _is_simple(value: Any) -> bool:
    return isinstance(value, _SIMPLE)


def _flattened_leaf(value: Any, given: Sequence[Any] | None) -> tuple[list[Any], str]:
    """Return the leaves and the description of a leaf of ``pytree``, which may be a record with tensors."""
    if not _is_simple(value) and is_record(value, given):
        kind, (keys, names) = type(value), entries(value)
        parts = [_flattened(dict.__getitem__(value, key), given) for key in keys]
        parts += [_flattened(getattr(value, name, None), given) for name in names]
        leaves = [leaf for part in parts for leaf in part[0]]
        if any([isinstance(leaf, torch.Tensor) for leaf in leaves]):  # noqa: C419
            described = "".join([part[2] for part in parts])
            return leaves, f"({kind.__module__ + ':' + kind.__qualname__!r},{(keys, names)!r},({described})),"
    return [value], "None,"


def _tap_parts(location: str, parts: list[tuple[list[Any], Any, str]], structure: str) -> list[Any]:
    """Pass all leaves of ``parts``, results of :func:`_flattened`, through one tap; return the values with the new tensors."""
    leaves = [leaf for part in parts for leaf in part[0]]
    all_new = _with_tensors(leaves, tap(location, [_marked(leaf) for leaf in leaves], structure))
    start = 0
    values = []
    for found, spec, _ in parts:
        new_leaves = all_new[start : start + len(found)]
        start += len(found)
        if isinstance(spec, _KeptContainer):
            new_leaves.reverse()
            values.append(_put_back(spec.value, spec.spec, new_leaves, spec.given))
        else:
            values.append(new_leaves[0] if spec is None else pytree.tree_unflatten(new_leaves, spec))
    return values


def _put_back(value: Any, spec: pytree.TreeSpec, leaves: list[Any], given: Sequence[Any] | None) -> Any:
    """Return ``value`` with ``leaves``, consumed from the end. Mutable containers are filled and not rebuilt: other code may hold them."""
    if spec.is_leaf():
        return leaves.pop() if _is_simple(value) else _put_back_entries(value, leaves, given)
    kind = type(value)
    if kind is torch.Size:
        for _ in value:
            leaves.pop()
        return value
    if kind in MUTABLE_CONTAINERS:
        keys = list(value) if issubclass(kind, dict) else list(range(len(value)))
        for key, child in zip(keys, spec.children()):  # noqa: B905 - dynamo is slower with `strict`
            held = value[key]
            new = _put_back(held, child, leaves, given)
            if _is_rebuilt(held, given):
                value[key] = new
        return value
    node = pytree.SUPPORTED_NODES[spec.type]
    parts = node.flatten_fn(value)[0]
    children = [_put_back(part, child, leaves, given) for part, child in zip(parts, spec.children())]  # noqa: B905 - as above
    return node.unflatten_fn(children, spec.context)


def _put_back_entries(value: Any, leaves: list[Any], given: Sequence[Any] | None) -> Any:
    """Return ``value``, a leaf of ``pytree`` that may be a record, with ``leaves``, consumed from the end."""
    kind = type(value)
    if not any([isinstance(leaf, torch.Tensor) for leaf in _flattened_leaf(value, given)[0]]):  # noqa: C419
        return leaves.pop()
    keys, names = entries(value)
    for key in keys:
        held = dict.__getitem__(value, key)
        new = _put_back(held, pytree.tree_flatten(held)[1], leaves, given)
        if _is_rebuilt(held, given):
            set_item(value, key, new)
    made = {}
    for name in names:
        held = getattr(value, name, None)
        made[name] = _put_back(held, pytree.tree_flatten(held)[1], leaves, given)
        if not is_frozen(kind) and _is_rebuilt(held, given):
            object.__setattr__(value, name, made[name])
    return kind(**made) if is_frozen(kind) else value


def _is_rebuilt(value: Any, given: Sequence[Any] | None) -> bool:
    """Whether ``value`` contains tensors and :func:`_put_back` returns another object for it."""
    if isinstance(value, torch.Tensor):
        return True
    kind = type(value)
    if kind in MUTABLE_CONTAINERS or _is_simple(value) or (kind_of_record(kind) and not is_frozen(kind)):
        return False
    return any([isinstance(leaf, torch.Tensor) for leaf in _flattened(value, given)[0]])  # noqa: C419


def _marked(leaf: Any) -> Any:
    """Return ``leaf``, or a constant that stands for it if a graph cannot contain it."""
    if isinstance(leaf, _SIMPLE):
        return leaf
    return OPAQUE_MARK + full_name(type(leaf))


def full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


for _of_class in (kind_of_record, names_of_fields, has_attributes, is_frozen, full_name):
    torch.compiler.assume_constant_result(_of_class)

