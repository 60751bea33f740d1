"""What a block reads from outside, and how a replay sees that it is as it was.

The *guards* of a block are variables, and what is reached from them: attributes, and what a function that the block calls reads of
its own globals, closure and defaults. A replay (:mod:`nnsight.fx.replay.replay`) compares them with what they were; which
comparison is needed depends on the kind of object:

==============  =========================================================================================
``"tensor"``    type, shape, strides, dtype, device, and whether it requires a gradient; not its values
``"constant"``  numbers, strings, dtypes and tuples of them: equal, and of the same type
``"object"``    envoys, functions of torch, Python modules and instances: the same object
``"function"``  a Python function that is followed: the same code, and as many defaults
``"module"``    a module that is called: of the same class, with nothing around its ``forward``
``"children"``  a container of modules: of the same class, with the same modules
``"items"``     a list, tuple or dict of tensors and constants: each of its items
``"members"``   a list, tuple or dict of anything: its keys, or its length; what is taken out of it is a guard of its own
``"filled"``    a list that the block appends to, and does not look at: whether it is another one of these
==============  =========================================================================================

A Python function may be another object each time, as one that is defined around the block is: what it does follows from its
code, and from what it reads, which are guards, too.

A :class:`GuardPlan` reads the guards in each replay. It looks up what is on the way to several once, so one more guard costs about a
microsecond.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn.modules import module as torch_module

from ...runtime.modules.interception import INTERCEPTED_CODE, INTERCEPTED_METHOD

#: Longest container whose items are compared, and longest loop that is followed, one by one.
LONGEST = 128

_CONSTANT_TYPES = (
    bool, int, float, complex, str, bytes, type(None), type(...), range, slice,
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size,
)

#: Classes of tensors that have no methods of their own.
TENSORS = (torch.Tensor, torch.nn.Parameter)

_PLAIN_LOOKUP: frozenset[Any] = frozenset(
    kind.__getattribute__ for kind in (object, types.ModuleType, types.SimpleNamespace)
)

_CALL: Any = torch.nn.Module.__call__
_CALL_IMPL: Any = torch.nn.Module._call_impl
if _CALL.__code__.co_filename != torch_module.__file__ or _CALL_IMPL.__code__.co_filename != torch_module.__file__:
    _CALL = None  # somebody has replaced them: no call of a module is known to be plain
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = tuple(getattr(torch_module, f"_global{name}") for name in _HOOKS)

#: How modules are iterated over that only hold others.
CONTAINERS = (torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict)
_ITERATED: tuple[Any, ...] = (torch.nn.Sequential.__iter__, torch.nn.ModuleList.__iter__)
_INDEXED: tuple[Any, ...] = tuple(kind.__getitem__ for kind in CONTAINERS)


class GuardStep(NamedTuple):
    """The way from an object to one that is reached from it: a key of :data:`WAYS`, and a name or a number."""

    how: str
    what: Any

    def of(self, value: Any) -> Any:
        """Return what is reached from ``value``.

        Raises:
            LookupError: If there is nothing, or code would have to run to tell.
        """
        try:
            return WAYS[self.how](value, self.what)
        except (AttributeError, TypeError, ValueError) as error:
            raise LookupError(self.what) from error


class GuardPath(NamedTuple):
    """The way to something that a block reads from outside.

    Attributes:
        start: A variable; or a module of the model, which stays the same as long as the model has the same modules.
        steps: What is reached from it.
    """

    start: str | weakref.ref[torch.nn.Module]
    steps: tuple[GuardStep, ...] = ()

    def to(self, how: str, what: Any) -> GuardPath:
        """Return the way to what is one step further."""
        return GuardPath(self.start, (*self.steps, GuardStep(how, what)))

    def __str__(self) -> str:
        start = self.start if isinstance(self.start, str) else type(self.start()).__name__
        return "".join((start, *(f"[{step.what!r}]" if step.how == "item" else f".{step.what}" for step in self.steps)))


def look_up(value: Any, name: str) -> Any:
    """Return an attribute of an instance or a Python module without running any code of its class.

    Raises:
        KeyError: If it is not simply stored there.
    """
    kind = type(value)
    if kind.__getattribute__ not in _PLAIN_LOOKUP:
        raise KeyError(name)
    own = value.__dict__
    if hasattr(kind, name):
        found = type(_in_class(kind, name))
        if hasattr(found, "__set__") or hasattr(found, "__delete__"):
            raise KeyError(name)
        return own[name]
    if name in own or not isinstance(value, torch.nn.Module):
        return own[name]
    for table in (own["_parameters"], own["_buffers"], own["_modules"]):
        if name in table:
            return table[name]
    raise KeyError(name)


def class_attribute(value: Any, name: str) -> Any:
    """Return what the class of an instance has under a name, as it is there.

    Raises:
        KeyError: If there is nothing, or the instance has an attribute of that name.
    """
    kind = type(value)
    if kind.__getattribute__ not in _PLAIN_LOOKUP or name in getattr(value, "__dict__", ()):
        raise KeyError(name)
    return _in_class(kind, name)


def _in_class(kind: type, name: str) -> Any:
    for base in kind.__mro__:
        if name in base.__dict__:
            return base.__dict__[name]
    raise KeyError(name)


def _item(value: Any, key: Any) -> Any:
    if type(value) not in (list, tuple, dict):
        raise LookupError(key)
    return value[key]


def _global(function: Any, name: str) -> Any:
    found = function.__globals__
    return found[name] if name in found else function.__builtins__[name]


WAYS: dict[str, Callable[[Any, Any], Any]] = {
    "attribute": look_up,
    "class": class_attribute,
    "item": _item,
    "global": _global,
    "cell": lambda function, index: function.__closure__[index].cell_contents,
    "default": lambda function, index: function.__defaults__[index],
    "keyword": lambda function, name: function.__kwdefaults__[name],
}


def kind_of(value: Any) -> str | None:
    """Return how ``value`` is compared in a replay, ``None`` if it cannot be."""
    if isinstance(value, torch.Tensor):
        return "tensor" if type(value) in TENSORS else None
    if is_constant(value):
        return "constant"
    if type(value) in (list, tuple, dict):
        items, keys = (value.values(), value) if type(value) is dict else (value, ())
        if len(items) > LONGEST or not all(map(is_constant, keys)):
            return None
        return "items" if all(kind_of(item) in ("tensor", "constant") for item in items) else "members"
    return "object" if _can_be_referred_to(value) else None


def is_constant(value: Any) -> bool:
    if type(value) in (tuple, slice):
        return all(map(is_constant, value if type(value) is tuple else (value.start, value.stop, value.step)))
    return type(value) in _CONSTANT_TYPES


def _can_be_referred_to(value: Any) -> bool:
    try:
        weakref.ref(value)
    except TypeError:
        return isinstance(value, types.BuiltinFunctionType)
    return True


def is_called_plainly(module: torch.nn.Module) -> bool:
    """Whether a call of a module is a call of the ``forward`` of its class, and nothing else."""
    own, kind = module.__dict__, type(module)
    if own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]:
        return False
    if "forward" in own or own.get("_compiled_call_impl") is not None:
        return False
    if kind.__call__ is not _CALL or kind._call_impl is not _CALL_IMPL:
        return False
    return INTERCEPTED_METHOD not in own or _passes_on(own[INTERCEPTED_METHOD])


def _passes_on(call: Any) -> bool:
    """Whether a call of a module is intercepted by runs, which let pass what a block calls."""
    while isinstance(call, types.MethodType) and getattr(call.__func__, "__code__", None) is INTERCEPTED_CODE:
        call = call.__self__
    return getattr(call, "__func__", None) is _CALL_IMPL


def has_global_hooks() -> bool:
    """Whether there are hooks that each call of a module runs."""
    return any(_GLOBAL_HOOKS)


def holds_modules(value: Any, indexed: bool = False) -> bool:
    """Whether a value is a container of modules, iterated over, or indexed, as those of torch are."""
    if not isinstance(value, CONTAINERS):
        return False
    kind: Any = type(value)
    return kind.__getitem__ in _INDEXED if indexed else getattr(kind, "__iter__", None) in _ITERATED


def constant_key(value: Any) -> Any:
    """Return what is equal for equal constants of equal types: ``1 == 1.0 == True``, ``0.0 == -0.0``."""
    if type(value) is tuple:
        return tuple(map(constant_key, value))
    if type(value) in (float, complex, slice, range):
        return type(value), repr(value)
    return type(value), value


class Read:
    """What the guards of a block are.

    Attributes:
        key: What is equal if they are as they were.
        tensors: The tensors.
        objects: The objects that are compared by identity.
        filled: The lists that the block appends to.
    """

    def __init__(self) -> None:
        self.key: list[Any] = []
        self.tensors: list[torch.Tensor] = []
        self.objects: list[Any] = []
        self.filled: list[list[Any]] = []
        self._looked_at: set[int] = set()

    def add(self, value: Any, kind: str) -> bool:
        """Add one guard, neither a tensor nor an object; return whether it is of this kind."""
        key, objects = self.key, self.objects
        if kind == "function":
            if type(value) is not types.FunctionType:
                return False
            code = value.__code__
            defaults, named = value.__defaults__, value.__kwdefaults__
            key.append((id(code), len(defaults) if defaults else 0, tuple(named) if named else ()))
            objects.append(code)
        elif kind == "module":
            if not isinstance(value, torch.nn.Module) or not is_called_plainly(value):
                return False
            key.append(type(value))
        elif kind == "children":
            if not isinstance(value, CONTAINERS):
                return False
            children = value._modules
            key.append((type(value), *children, *map(id, children.values())))
            objects += [child for child in children.values() if child is not None]
        elif kind == "filled":
            if type(value) is not list:
                return False
            self.filled.append(value)
        elif kind_of(value) != kind:
            return False
        elif kind == "constant":
            key.append(constant_key(value))
        else:
            self._add_container(value, kind)
        return True

    def _add_container(self, value: Any, kind: str) -> None:
        self._looked_at.add(id(value))
        self.key.append((type(value), len(value), *(map(constant_key, value) if type(value) is dict else ())))
        for item in (value.values() if type(value) is dict else value) if kind == "items" else ():
            if isinstance(item, torch.Tensor):
                self.tensors.append(item)
                self.key.append(_tensor_key(item))
            else:
                self.key.append(constant_key(item))

    def finish(self) -> bool:
        """Compare which of the filled lists are one; return whether none of them is looked at."""
        numbers = list(map(id, self.filled))
        self.key += map(numbers.index, numbers)
        return self._looked_at.isdisjoint(numbers)


class GuardPlan:
    """The order in which the guards of a block are read, given with the kind of comparison that each needs."""

    def __init__(self, guards: tuple[tuple[GuardPath, str], ...]) -> None:
        self.guards = guards
        self._steps: list[tuple[int, Any, Any, str]] = []
        self._calls_modules = False
        places: dict[GuardPath, int] = {}
        for path, kind in guards:
            self._calls_modules = self._calls_modules or kind == "module"
            for length in range(len(path.steps) + 1):
                reached = GuardPath(path.start, path.steps[:length])
                wanted = kind if reached == path else ""
                place = places.get(reached)
                if place is not None and not wanted:
                    continue
                if length:
                    step = path.steps[length - 1]
                    parent = places[GuardPath(path.start, path.steps[: length - 1])]
                    self._steps.append((parent, WAYS[step.how], step.what, wanted))
                else:
                    self._steps.append((-1, None, path.start, wanted))
                if place is None:
                    places[reached] = len(self._steps) - 1

    def read(self, variable: Callable[[str], Any]) -> Read | None:
        """Return what the guards are now; ``None`` if one is of another kind."""
        if self._calls_modules and has_global_hooks():
            return None
        reading = Read()
        key, tensors, objects = reading.key, reading.tensors, reading.objects
        found: list[Any] = []
        try:
            for parent, way, what, kind in self._steps:
                value = way(found[parent], what) if way is not None else variable(what) if type(what) is str else what()
                found.append(value)
                if kind == "object":
                    key.append(id(value))
                    objects.append(value)
                elif kind == "tensor":
                    if type(value) not in TENSORS:
                        return None
                    tensors.append(value)
                    key.append(_tensor_key(value))
                elif kind and not reading.add(value, kind):
                    return None
        except (LookupError, AttributeError, TypeError, ValueError):
            return None
        return reading if not reading.filled or reading.finish() else None


def _tensor_key(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (
        type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.layout, tensor.requires_grad,
        tensor.is_leaf,
    )
