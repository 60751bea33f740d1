"""Guards: the objects that a block reads from outside, and their comparison in a replay.

The *guards* of a block are its variables from outside, and the objects reached from them: attributes, items, and the globals, closure
variables and defaults of the functions that the block calls. A replay (:mod:`nnsight.fx.replay.replay`) compares each of them with the
object of the recorded run. The comparison depends on the kind of object:

==============  =========================================================================================
``"tensor"``    type, shape, strides, dtype, device, and whether it requires a gradient; not its values
``"constant"``  numbers, strings, dtypes and tuples of them: equal, and of the same type
``"object"``    envoys, functions of torch, Python modules and instances: the same object
``"function"``  a Python function that is analysed: the same code, and as many defaults
``"module"``    a module that is called: the same class, and no hooks or own ``forward``
``"children"``  a container of modules: the same class, with the same modules
``"items"``     a list, tuple or dict of tensors and constants: each of its items
``"members"``   another list, tuple or dict: its keys, or its length; items that the block reads are guards
``"filled"``    a list that the block appends to, but does not read: the same aliasing with the other such lists
==============  =========================================================================================

A Python function may be a new object in each run, for example if it is defined next to the block. Its effects follow from its code and
from the objects that it reads, which are guards, too.

A :class:`GuardPlan` reads the guards in each replay. It looks up an object that leads to several guards only once, so one more guard costs
about a microsecond.
"""

from __future__ import annotations

import os
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.modules import module as torch_module

from ...runtime.modules.interception import INTERCEPTED_CODE, INTERCEPTED_METHOD

#: Most items of a container that is compared item by item, and of a loop that is analysed item by item.
LONGEST = 128

_CONSTANT_TYPES = (
    bool, int, float, complex, str, bytes, type(None), type(...), range, slice,
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size,
)

#: Classes of tensors that override no operations.
TENSORS = (torch.Tensor, torch.nn.Parameter)

#: The folder of torch.
_TORCH = f"{Path(torch.__file__).parent}{os.sep}"

_PLAIN_LOOKUP: frozenset[Any] = frozenset(
    kind.__getattribute__ for kind in (object, types.ModuleType, types.SimpleNamespace)
)

_CALL: Any = torch.nn.Module.__call__
_CALL_IMPL: Any = torch.nn.Module._call_impl
if _CALL.__code__.co_filename != torch_module.__file__ or _CALL_IMPL.__code__.co_filename != torch_module.__file__:
    _CALL = None  # another library has replaced them, so no call of a module is known to be plain
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = tuple(getattr(torch_module, f"_global{name}") for name in _HOOKS)

#: Containers of modules, and the methods with which they are iterated over and indexed.
CONTAINERS = (torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict)
_ITERATED: tuple[Any, ...] = (torch.nn.Sequential.__iter__, torch.nn.ModuleList.__iter__)
_INDEXED: tuple[Any, ...] = tuple(kind.__getitem__ for kind in CONTAINERS)


class GuardStep(NamedTuple):
    """One step of a path to an object: a key of :data:`LOOKUPS`, and the name, key or number to look up."""

    how: str
    what: Any

    def of(self, value: Any) -> Any:
        """Return the object that this step reaches from ``value``.

        Raises:
            LookupError: If there is no such object, or the look-up would have to run user code.
        """
        try:
            return LOOKUPS[self.how](value, self.what)
        except (AttributeError, TypeError, ValueError) as error:
            raise LookupError(self.what) from error


class GuardPath(NamedTuple):
    """The path to an object that a block reads from outside.

    Attributes:
        start: The name of a variable, or a module of the model. The version of the module tree is compared, so the module is the same.
        steps: The look-ups that lead from there to the object.
    """

    start: str | weakref.ref[torch.nn.Module]
    steps: tuple[GuardStep, ...] = ()

    def to(self, how: str, what: Any) -> GuardPath:
        """Return this path with one more step."""
        return GuardPath(self.start, (*self.steps, GuardStep(how, what)))

    def __str__(self) -> str:
        start = self.start if isinstance(self.start, str) else type(self.start()).__name__
        return "".join((start, *(f"[{step.what!r}]" if step.how == "item" else f".{step.what}" for step in self.steps)))


def look_up(value: Any, name: str) -> Any:
    """Return an attribute of an instance or a Python module without running any code of its class.

    Raises:
        KeyError: If the attribute is not in the ``__dict__``, or in the parameters, buffers or children of a module.
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
    if name in own or getattr(kind, "__getattr__", None) is not torch.nn.Module.__getattr__:
        return own[name]
    for table in (own["_parameters"], own["_buffers"], own["_modules"]):
        if name in table:
            return table[name]
    raise KeyError(name)


def class_attribute(value: Any, name: str) -> Any:
    """Return an attribute of the class of an instance, as it is stored in the class.

    Raises:
        KeyError: If there is no such attribute, or the instance has an attribute of this name.
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


#: The kinds of steps in a path, as functions of an object and the name, key or number to look up.
LOOKUPS: dict[str, Callable[[Any, Any], Any]] = {
    "attribute": look_up,
    "class": class_attribute,
    "item": _item,
    "global": _global,
    "cell": lambda function, index: function.__closure__[index].cell_contents,
    "default": lambda function, index: function.__defaults__[index],
    "keyword": lambda function, name: function.__kwdefaults__[name],
}


def kind_of(value: Any) -> str | None:
    """Return the kind of comparison for ``value``; ``None`` if a replay cannot compare it."""
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


def is_of_torch(attribute: Any) -> bool:
    """Whether a function or a descriptor is built in, or part of torch; users can add and replace functions and methods of torch."""
    attribute = attribute.fget if isinstance(attribute, property) else attribute
    code = getattr(attribute, "__code__", None)
    if code is not None:
        return str(code.co_filename).startswith(_TORCH)
    return type(attribute).__module__.partition(".")[0] in ("builtins", "torch")


def is_called_plainly(module: torch.nn.Module) -> bool:
    """Whether a call of a module only calls the ``forward`` of its class."""
    own, kind = module.__dict__, type(module)
    if own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]:
        return False
    if "forward" in own or own.get("_compiled_call_impl") is not None:
        return False
    if kind.__call__ is not _CALL or kind._call_impl is not _CALL_IMPL:
        return False
    return INTERCEPTED_METHOD not in own or _passes_on(own[INTERCEPTED_METHOD])


def _passes_on(call: Any) -> bool:
    """Whether the intercepted calls around a module end in torch's own: calls that a block makes pass through them."""
    while isinstance(call, types.MethodType) and getattr(call.__func__, "__code__", None) is INTERCEPTED_CODE:
        call = call.__self__
    return getattr(call, "__func__", None) is _CALL_IMPL


def has_global_hooks() -> bool:
    """Whether there are global hooks, which each call of a module runs."""
    return any(_GLOBAL_HOOKS)


def holds_modules(value: Any, indexed: bool = False) -> bool:
    """Whether a value is a container of modules with torch's own iteration or, if ``indexed``, indexing."""
    if not isinstance(value, CONTAINERS):
        return False
    kind: Any = type(value)
    return kind.__getitem__ in _INDEXED if indexed else getattr(kind, "__iter__", None) in _ITERATED


def constant_key(value: Any) -> Any:
    """Return a key that distinguishes constants of different types, and signed zeros, although ``1 == 1.0 == True`` and ``0.0 == -0.0``."""
    if type(value) is tuple:
        return tuple(map(constant_key, value))
    if type(value) in (float, complex, slice, range):
        return type(value), repr(value)
    return type(value), value


class GuardValues:
    """The present values of the guards of a block.

    Attributes:
        key: Comparison keys, equal if all guards hold.
        tensors: The tensors among the guards.
        objects: The objects that are compared by identity. They must stay alive as long as ``key`` is compared.
        filled: The lists that the block appends to.
    """

    def __init__(self) -> None:
        self.key: list[Any] = []
        self.tensors: list[torch.Tensor] = []
        self.objects: list[Any] = []
        self.filled: list[list[Any]] = []
        self._read: set[int] = set()

    def add(self, value: Any, kind: str) -> bool:
        """Add a guard of a kind other than ``"tensor"`` and ``"object"``. Returns whether ``value`` is of this kind."""
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
        self._read.add(id(value))
        self.key.append((type(value), len(value), *(map(constant_key, value) if type(value) is dict else ())))
        for item in (value.values() if type(value) is dict else value) if kind == "items" else ():
            if isinstance(item, torch.Tensor):
                self.tensors.append(item)
                self.key.append(_tensor_key(item))
            else:
                self.key.append(constant_key(item))

    def finish(self) -> bool:
        """Add the aliasing of the filled lists to the key. Returns whether no guard reads one of these lists."""
        numbers = list(map(id, self.filled))
        self.key += map(numbers.index, numbers)
        return self._read.isdisjoint(numbers)


class GuardPlan:
    """A plan for reading guards, given as paths with kinds of comparison, in which each look-up is made once."""

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
                    self._steps.append((parent, LOOKUPS[step.how], step.what, wanted))
                else:
                    self._steps.append((-1, None, path.start, wanted))
                if place is None:
                    places[reached] = len(self._steps) - 1

    def read(self, variable: Callable[[str], Any]) -> GuardValues | None:
        """Return the present values of the guards; ``None`` if one has another kind, or does not exist."""
        if self._calls_modules and has_global_hooks():
            return None
        reading = GuardValues()
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
