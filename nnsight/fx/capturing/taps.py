"""Taps: identity operations that mark locations inside a dynamo graph.

While dynamo traces a model, every intercepted module call passes its arguments and its result through :func:`tap`. Dynamo
keeps the call as one node of the graph, with the location as a constant, so the captured graph says where
every module's input and output are. A tap that nobody waits for is removed before lowering and costs nothing.

A value may be any nest of containers. Its leaves go through the tap one by one; the nest itself is kept as a string
(dynamo can hold a string in the graph where it cannot hold a ``TreeSpec``), see :func:`describe` and
:func:`parse_structure`. Leaves that a graph cannot hold (a cache object, say) stay where they are and appear as
:class:`Opaque`.

Some objects that hold tensors are containers, too, although ``pytree`` does not know their classes; :func:`flatten` and
:func:`unflatten` do. These *records* are dataclasses, instances of subclasses of ``dict``, and of other classes of Python what a module
returns without having been given it: an object that modules pass on to each other may be anything, such as a cache, and stays closed.
With lists, dicts and records the model goes on with the object that it made, whose tensors are then those
behind the tap: a module may fill a list that it was given, and who else has the list sees that. The others are made anew.
"""

from __future__ import annotations

import ast
import dataclasses
import sys
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import torch
from torch.utils import _pytree as pytree

#: Prefix of the constant that stands for a leaf no graph can hold.
OPAQUE_MARK = "\0opaque:"

_TUPLE, _DICT = "builtins:tuple", "builtins:dict"

#: Containers that can be changed, and what a description has of them, and of what ``pytree`` gives back as a tuple.
_FILLED = (list, dict, OrderedDict, defaultdict, deque)
_KEPT = (*[f"'{kind.__module__}:{kind.__qualname__}'" for kind in _FILLED], "'torch:Size'")

_CONSTANTS = (bool, int, float, str, torch.SymInt, torch.SymFloat, torch.SymBool)
_SIMPLE = (torch.Tensor, type(None), *_CONSTANTS)


class Opaque:
    """Stands, in a compiled trace, for an object inside a value that the captured graph does not contain.

    It may be moved along (returned as part of a replaced tuple, for instance). Anything else raises.
    """

    #: For layers that do not know this class.
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
    """Make a call between two taps; runs while dynamo traces, which is why common values take a short way."""
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


#: Of the arguments of a call ``module(tensor)``, as :func:`describe` has it.
_ONE_TENSOR = f"({_TUPLE!r},None,(({_TUPLE!r},None,(None,)),({_DICT!r},[],()),))"


def _structure_of_call(args: str, names: list[str], named: str) -> str:
    return f"({_TUPLE!r},None,(({_TUPLE!r},None,({args})),({_DICT!r},{names!r},({named})),))"


def _short_way(location: str, values: list[Any], structure: str) -> list[Any] | None:
    """Pass ``values`` through a tap if each is a tensor or a constant; ``None`` if one is not. Every line costs dynamo time."""
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
        behind = _short_way(location, list(value), f"({_TUPLE!r},None,({'None,' * len(value)}))")
        if behind is not None:
            return tuple(behind)
        parts = [_flattened(item, given) for item in value]
        structure = f"({_TUPLE!r},None,({''.join([part[2] for part in parts])}))"
        return tuple(_through(location, parts, structure))
    part = _flattened(value, given)
    return _through(location, [part], part[2][:-1])[0]


class _Kept:
    """A value that holds containers which can be changed: the model goes on with these, not with others that are like them.

    Args:
        value: The value.
        spec: How it nests, to ``pytree``.
        given: As for :func:`_flattened`.
    """

    def __init__(self, value: Any, spec: pytree.TreeSpec, given: Sequence[Any] | None) -> None:
        self.value, self.spec, self.given = value, spec, given


def _flattened(value: Any, given: Sequence[Any] | None = None) -> tuple[list[Any], Any, str]:
    """Return the leaves of ``value``, how they nest (``None`` for a leaf), and that as text with a comma.

    Args:
        value: Of the model.
        given: What the module was given, as this function returns it: objects among its leaves stay closed; ``None`` for all that are
            neither dataclasses nor dicts.
    """
    if _is_simple(value):
        return [value], None, "None,"
    leaves, spec = pytree.tree_flatten(value)
    # Dynamo is slower with generators.
    if any([_is_record(leaf, given) for leaf in leaves if not _is_simple(leaf)]):  # noqa: C419
        parts = [_flattened_leaf(leaf, given) for leaf in leaves]
        texts = [part[1] for part in parts]
        texts.reverse()
        return [leaf for part in parts for leaf in part[0]], _Kept(value, spec, given), describe(spec, texts) + ","
    text = describe(spec) + ","
    kept = any([name in text for name in _KEPT])  # noqa: C419
    return leaves, _Kept(value, spec, given) if kept else spec, text


def _is_simple(value: Any) -> bool:
    return isinstance(value, _SIMPLE)


def _flattened_leaf(value: Any, given: Sequence[Any] | None) -> tuple[list[Any], str]:
    """Return the leaves and the text of what ``pytree`` takes for a leaf; a record with tensors is none."""
    if not _is_simple(value) and _is_record(value, given):
        kind, (keys, names) = type(value), _entries(value)
        parts = [_flattened(dict.__getitem__(value, key), given) for key in keys]
        parts += [_flattened(getattr(value, name, None), given) for name in names]
        leaves = [leaf for part in parts for leaf in part[0]]
        if any([isinstance(leaf, torch.Tensor) for leaf in leaves]):  # noqa: C419
            described = "".join([part[2] for part in parts])
            return leaves, f"({kind.__module__ + ':' + kind.__qualname__!r},{(keys, names)!r},({described})),"
    return [value], "None,"


def _through(location: str, parts: list[tuple[list[Any], Any, str]], structure: str) -> list[Any]:
    """Pass all leaves of ``parts`` through one tap; return the values that the parts are then."""
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
    """Return ``value`` with other leaves, of which the last is the first, and which are used up.

    Containers that can be changed stay the same objects, so that whoever else has them sees what becomes of them.
    """
    if spec.is_leaf():
        return leaves.pop() if _is_simple(value) else _put_back_entries(value, leaves, given)
    kind = type(value)
    if kind is torch.Size:
        for _ in value:
            leaves.pop()
        return value
    if kind in _FILLED:
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
    """The same for what ``pytree`` takes for a leaf."""
    kind = type(value)
    if not _holds_tensors(value, given):
        return leaves.pop()
    keys, names = _entries(value)
    for key in keys:
        held = dict.__getitem__(value, key)
        new = _put_back(held, pytree.tree_flatten(held)[1], leaves, given)
        if _is_made_anew(held, given):
            _set_item(value, key, new)
    made = {}
    for name in names:
        held = getattr(value, name, None)
        made[name] = _put_back(held, pytree.tree_flatten(held)[1], leaves, given)
        if not is_frozen(kind) and _is_made_anew(held, given):
            object.__setattr__(value, name, made[name])
    return kind(**made) if is_frozen(kind) else value


def _set_item(record: Any, key: Any, value: Any) -> None:
    """Set an item of an instance of a subclass of ``dict``, past what the class makes of that."""
    (OrderedDict if isinstance(record, OrderedDict) else dict).__setitem__(record, key, value)


def _holds_tensors(value: Any, given: Sequence[Any] | None) -> bool:
    return any([isinstance(leaf, torch.Tensor) for leaf in _flattened_leaf(value, given)[0]])  # noqa: C419


def _is_made_anew(value: Any, given: Sequence[Any] | None) -> bool:
    """Whether :func:`_put_back` gives another object for ``value``, which holds tensors."""
    if isinstance(value, torch.Tensor):
        return True
    kind = type(value)
    if kind in _FILLED or _is_simple(value) or (kind_of_record(kind) and not is_frozen(kind)):
        return False
    return any([isinstance(leaf, torch.Tensor) for leaf in _flattened(value, given)[0]])  # noqa: C419


def _marked(leaf: Any) -> Any:
    """Return ``leaf`` as a graph can hold it."""
    if isinstance(leaf, _SIMPLE):
        return leaf
    kind = type(leaf)
    return OPAQUE_MARK + kind.__module__ + "." + kind.__qualname__


def describe(spec: pytree.TreeSpec, texts: list[str] | None = None) -> str:
    """Return ``spec`` as a Python literal: ``None`` for a leaf, else ``(type, context, children)``.

    Args:
        spec: The structure.
        texts: The same, with a comma each, for what stands where it has leaves; the last one first. They are used up.
    """
    if spec.is_leaf():
        return "None" if texts is None else texts.pop()[:-1]
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
    children = "".join([describe(child, texts) + "," for child in spec.children()])
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
    record = _records.get(name)
    if record is not None:
        return record
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


# -- records -------------------------------------------------------------------------------------------------------------

#: Classes of records that were met, by module and name.
_records: weakref.WeakValueDictionary[str, type] = weakref.WeakValueDictionary()


def kind_of_record(kind: type) -> str:
    """Return whether instances of a class may be looked into: as a "dataclass", a "dict" or another "object"; ``""`` if not."""
    found = _kind_of_record(kind)
    if found:
        _records[f"{kind.__module__}:{kind.__qualname__}"] = kind
    return found


def _kind_of_record(kind: type) -> str:
    if kind in pytree.SUPPORTED_NODES or issubclass(kind, (tuple, list, torch.Tensor, torch.nn.Module, type)):
        return ""
    if issubclass(kind, dict):
        return "dict" if kind not in (dict, *_FILLED) else ""
    if kind.__getattribute__ is not object.__getattribute__:
        return ""
    if dataclasses.is_dataclass(kind):
        return "dataclass" if _only_holds_values(kind) else ""
    made_in_python = bool(kind.__flags__ & _HEAP_TYPE) and kind.__module__.partition(".")[0] not in ("torch", "builtins")
    plain = made_in_python and _sets_attributes_plainly(kind) and not issubclass(kind, (BaseException, Enum))
    return "object" if plain else ""


#: The flag of classes that were made by a ``class`` statement.
_HEAP_TYPE = 1 << 9


def _only_holds_values(kind: type) -> bool:
    """Whether nothing happens when an instance of a dataclass is made, if it cannot be changed, or else when it is changed."""
    if kind.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        return not hasattr(kind, "__post_init__") and all(field.init for field in dataclasses.fields(kind))
    return _sets_attributes_plainly(kind)


def _sets_attributes_plainly(kind: Any) -> bool:
    return kind.__setattr__ is object.__setattr__


def names_of_fields(kind: type) -> list[str]:
    """Return the names of the fields of a dataclass, or of the slots of another class."""
    if dataclasses.is_dataclass(kind) and not issubclass(kind, dict):
        return [field.name for field in dataclasses.fields(kind)]
    slots = [getattr(base, "__slots__", ()) for base in kind.__mro__]
    names = [name for found in slots for name in ((found,) if isinstance(found, str) else found)]
    return [name for name in names if not name.startswith("__")]


def has_attributes(kind: type) -> bool:
    """Whether instances of a class have attributes of their own choice."""
    return kind.__dictoffset__ != 0


def is_frozen(kind: type) -> bool:
    """Whether objects of a class of records cannot be changed."""
    return kind_of_record(kind) == "dataclass" and bool(kind.__dataclass_params__.frozen)  # type: ignore[attr-defined]


for _told in (kind_of_record, names_of_fields, has_attributes, is_frozen):  # of a class they are constants to dynamo
    torch.compiler.assume_constant_result(_told)


def _is_record(value: Any, given: Sequence[Any] | None) -> bool:
    """Whether a leaf of ``pytree`` is looked into; ``given`` as for :func:`_flattened`."""
    found = kind_of_record(type(value))
    if found == "dict":
        return all([isinstance(key, (str, int)) for key in dict.keys(value)])  # noqa: C419
    if found != "object":
        return found == "dataclass"
    if given is None or any([value is leaf for part in given for leaf in part[0]]):  # noqa: C419
        return False
    held = [getattr(value, name, None) for name in _entries(value)[1]]
    held += [item for items in held if type(items) is dict for item in items.values()]
    return any([isinstance(item, torch.Tensor) for item in held])  # noqa: C419


def _entries(value: Any) -> tuple[list[Any], list[str]]:
    """Return the keys and the names of the attributes of a record."""
    kind = type(value)
    found = kind_of_record(kind)
    if found == "dataclass":
        return [], names_of_fields(kind)
    keys = list(dict.keys(value)) if found == "dict" else []
    attributes = list(vars(value)) if has_attributes(kind) else []
    return keys, [*names_of_fields(kind), *attributes]


def flatten(value: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """Return the leaves of a value and how they nest, with records that hold tensors as containers."""
    leaves, spec = pytree.tree_flatten(value)
    if not any(kind_of_record(type(leaf)) for leaf in leaves):
        return leaves, spec
    parts = [_flatten_leaf(leaf) for leaf in leaves]
    return [leaf for found, _ in parts for leaf in found], _grafted(spec, [inner for _, inner in reversed(parts)])


def _flatten_leaf(value: Any) -> tuple[list[Any], pytree.TreeSpec]:
    if not _is_record(value, []):
        return [value], pytree.treespec_leaf()
    parts = [flatten(held) for held in _held(value)]
    leaves = [leaf for found, _ in parts for leaf in found]
    if not any(isinstance(leaf, torch.Tensor) for leaf in leaves):
        return [value], pytree.treespec_leaf()
    return leaves, pytree.TreeSpec(type(value), _entries(value), [inner for _, inner in parts])


def _held(record: Any) -> list[Any]:
    """Return what a record holds."""
    keys, names = _entries(record)
    return [dict.__getitem__(record, key) for key in keys] + [getattr(record, name, None) for name in names]


def _grafted(spec: pytree.TreeSpec, parts: list[pytree.TreeSpec]) -> pytree.TreeSpec:
    """Return ``spec`` with ``parts``, the last one first, in place of its leaves."""
    if spec.is_leaf():
        return parts.pop()
    return pytree.TreeSpec(spec.type, spec.context, [_grafted(child, parts) for child in spec.children()])


def leaves_of(value: Any, spec: pytree.TreeSpec) -> list[Any]:
    """Return the leaves of a value as ``spec`` nests them, whatever it could be taken apart into otherwise.

    Raises:
        ValueError: If the value is built differently.
    """
    if spec.is_leaf():
        return [value]
    kind = type(value)
    if spec.type is torch.Size or kind_of_record(spec.type):
        parts = list(value) if spec.type is torch.Size else _held(value) if kind is spec.type else []
    else:
        node = pytree.SUPPORTED_NODES.get(pytree._get_node_type(value))
        parts = list(node.flatten_fn(value)[0]) if node is not None else []
    if len(parts) != len(spec.children()):
        raise ValueError(f"a {kind.__qualname__} of {len(parts)} parts is no {spec.type.__qualname__} of {len(spec.children())}")
    return [leaf for part, child in zip(parts, spec.children(), strict=True) for leaf in leaves_of(part, child)]


def unflatten(leaves: list[Any], spec: pytree.TreeSpec) -> Any:
    """Return the value that :func:`flatten` took apart; records are made anew."""
    return _made(list(reversed(leaves)), spec) if _is_unusual(spec) else pytree.tree_unflatten(leaves, spec)


def _is_unusual(spec: pytree.TreeSpec) -> bool:
    """Whether ``pytree`` alone cannot make the value."""
    if spec.is_leaf():
        return False
    return spec.type is torch.Size or spec.type not in pytree.SUPPORTED_NODES or any(map(_is_unusual, spec.children()))


def _made(leaves: list[Any], spec: pytree.TreeSpec) -> Any:
    """Return the value that has these leaves, the last one first; they are used up."""
    if spec.is_leaf():
        return leaves.pop()
    children = [_made(leaves, child) for child in spec.children()]
    if spec.type is torch.Size:
        return torch.Size(children)
    if spec.type in pytree.SUPPORTED_NODES:
        return pytree.SUPPORTED_NODES[spec.type].unflatten_fn(children, spec.context)
    keys, names = spec.context
    record = spec.type.__new__(spec.type)
    for key, value in zip(keys, children, strict=False):
        _set_item(record, key, value)
    for name, value in zip(names, children[len(keys) :], strict=True):
        object.__setattr__(record, name, value)
    return record
