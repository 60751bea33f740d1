"""Structures of values: containers are flattened, described as text, and rebuilt.

``pytree`` knows the containers of Python. *Records* are containers whose classes it does not know: dataclasses, instances of subclasses of
``dict``, and objects of other classes if a module has returned them and they hold tensors.
"""

from __future__ import annotations

import ast
import dataclasses
import sys
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Sequence
from enum import Enum
from typing import Any

import torch
from torch.utils import _pytree as pytree

TUPLE, DICT = "builtins:tuple", "builtins:dict"

#: The type flag of classes that a ``class`` statement creates.
_HEAP_TYPE = 1 << 9

#: Mutable containers.
MUTABLE_CONTAINERS = (list, dict, OrderedDict, defaultdict, deque)

#: Names in descriptions, for classes whose objects the model keeps: mutable containers, and ``Size``, which ``pytree`` makes a tuple.
KEPT_CLASSES = (*[f"'{kind.__module__}:{kind.__qualname__}'" for kind in MUTABLE_CONTAINERS], "'torch:Size'")


def describe(spec: pytree.TreeSpec, texts: list[str] | None = None) -> str:
    """Return ``spec`` as a Python literal: ``None`` for a leaf, else ``(type, context, children)``.

    ``texts`` are descriptions to use for the leaves, each with a comma at its end. They are consumed from the end of the list.
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
    """Return the ``TreeSpec`` that ``text`` describes, see :func:`describe`.

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
    for kind in (*pytree.SUPPORTED_NODES, *tuple.__subclasses__()):
        if f"{kind.__module__}:{kind.__qualname__}" == name:
            return kind
    raise LookupError(f"A captured value contains an object of the class {qualname} of module {module_name}, which cannot be found.")


#: Known classes of records, by module and name.
_records: weakref.WeakValueDictionary[str, type] = weakref.WeakValueDictionary()


def kind_of_record(kind: type) -> str:
    """Return how instances of a class can be records: as a "dataclass", a "dict" or another "object"; ``""`` if they cannot."""
    found = _kind_of_record(kind)
    if found:
        _records[f"{kind.__module__}:{kind.__qualname__}"] = kind
    return found


def _kind_of_record(kind: type) -> str:
    if kind in pytree.SUPPORTED_NODES or issubclass(kind, (tuple, list, torch.Tensor, torch.nn.Module, type)):
        return ""
    if issubclass(kind, dict):
        return "dict" if kind not in (dict, *MUTABLE_CONTAINERS) else ""
    if kind.__getattribute__ is not object.__getattribute__:
        return ""
    sets_plainly = kind.__setattr__ is object.__setattr__
    if dataclasses.is_dataclass(kind):
        if kind.__dataclass_params__.frozen:  # type: ignore[attr-defined] # a new object is made, which must run none of its code
            sets_plainly = not hasattr(kind, "__post_init__") and all(field.init for field in dataclasses.fields(kind))
        return "dataclass" if sets_plainly else ""
    made_in_python = bool(kind.__flags__ & _HEAP_TYPE) and kind.__module__.partition(".")[0] not in ("torch", "builtins", "nnsight")
    return "object" if made_in_python and sets_plainly and not issubclass(kind, (BaseException, Enum)) else ""


def names_of_fields(kind: type) -> list[str]:
    """Return the names of the fields of a dataclass, or the names of the slots of another class."""
    if dataclasses.is_dataclass(kind) and not issubclass(kind, dict):
        return [field.name for field in dataclasses.fields(kind)]
    slots = [getattr(base, "__slots__", ()) for base in kind.__mro__]
    names = [name for found in slots for name in ((found,) if isinstance(found, str) else found)]
    return [name for name in names if not name.startswith("__")]


def has_attributes(kind: type) -> bool:
    """Whether instances of a class have a ``__dict__``."""
    return kind.__dictoffset__ != 0


def is_frozen(kind: type) -> bool:
    """Whether a class is a frozen dataclass whose instances are records."""
    return kind_of_record(kind) == "dataclass" and bool(kind.__dataclass_params__.frozen)  # type: ignore[attr-defined]


def is_record(value: Any, given: Sequence[Any] | None) -> bool:
    """Whether a leaf of ``pytree`` is a record. For ``given`` see :func:`~nnsight.fx.capturing.taps._flattened`."""
    found = kind_of_record(type(value))
    if found == "dict":
        return all([isinstance(key, (str, int)) for key in dict.keys(value)])  # noqa: C419
    if found != "object":
        return found == "dataclass"
    if given is None or any([value is leaf for part in given for leaf in part[0]]):  # noqa: C419
        return False
    held = [getattr(value, name, None) for name in entries(value)[1]]
    held += [item for items in held if type(items) is dict for item in items.values()]
    return any([isinstance(item, torch.Tensor) for item in held])  # noqa: C419


def entries(value: Any) -> tuple[list[Any], list[str]]:
    """Return the keys of a record, and the names of its attributes."""
    kind = type(value)
    found = kind_of_record(kind)
    if found == "dataclass":
        return [], names_of_fields(kind)
    keys = list(dict.keys(value)) if found == "dict" else []
    attributes = list(vars(value)) if has_attributes(kind) else []
    return keys, [*names_of_fields(kind), *attributes]


def _held(record: Any) -> list[Any]:
    """Return the values in a record, in the order of :func:`entries`."""
    keys, names = entries(record)
    return [dict.__getitem__(record, key) for key in keys] + [getattr(record, name, None) for name in names]


def leaves_of(value: Any, spec: pytree.TreeSpec) -> list[Any]:
    """Return the leaves of a value with the structure ``spec``.

    Raises:
        ValueError: If the value has another structure.
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
        expected = f"a {spec.type.__qualname__} with {len(spec.children())} parts"
        raise ValueError(f"expected {expected}, not a {kind.__qualname__} with {len(parts)}")
    return [leaf for part, child in zip(parts, spec.children(), strict=True) for leaf in leaves_of(part, child)]


def unflatten(leaves: list[Any], spec: pytree.TreeSpec) -> Any:
    """Return the value that :func:`~.taps.flatten` has flattened. Records are new objects."""
    return _rebuild(leaves[::-1], spec)


def _rebuild(leaves: list[Any], spec: pytree.TreeSpec) -> Any:
    """Return the value with ``leaves``, which are consumed from the end."""
    if spec.is_leaf():
        return leaves.pop()
    children = [_rebuild(leaves, child) for child in spec.children()]
    if spec.type is torch.Size:
        return torch.Size(children)
    if spec.type in pytree.SUPPORTED_NODES:
        return pytree.SUPPORTED_NODES[spec.type].unflatten_fn(children, spec.context)
    keys, names = spec.context
    record = spec.type.__new__(spec.type)
    for key, value in zip(keys, children, strict=False):
        set_item(record, key, value)
    for name, value in zip(names, children[len(keys) :], strict=True):
        object.__setattr__(record, name, value)
    return record


def set_item(record: Any, key: Any, value: Any) -> None:
    """Set an item of an instance of a subclass of ``dict``, without calling methods of that subclass."""
    (OrderedDict if isinstance(record, OrderedDict) else dict).__setitem__(record, key, value)
