"""Values of an edit as JSON and named tensors, without pickle.

These values can be written: ``None``, Booleans, numbers and strings; the types of :data:`_CONTAINERS`; tensors; parts of the model, as
their paths; programs; and functions, classes and Python modules, as their import names. Any other value is refused, because code would
have to run to read it.

Scalars are JSON. Every other value is a row of a table, ``{kind: content}``. References to it have the form ``{"at": row}``, so that a list
or a tensor of two variables is still one object after reading. Two tensors that share memory do not share it after reading. Rows refer only
to earlier rows.
"""

from __future__ import annotations

import functools
import importlib
import pickle
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any

import safetensors.torch
import torch

from ..envoy.envoy import Envoy
from ..late_binding import late

#: A value in JSON: a scalar as it is, or ``{"at": row}``.
Term = Any

_SCALARS = (types.NoneType, bool, int, float, str)

#: For each type: a function that lists the parts of a value, and one that makes a value from its parts.
_CONTAINERS: dict[type, tuple[Callable[[Any], Iterable[Any]], Callable[[list[Any]], Any]]] = {
    list: (list, list),
    tuple: (list, tuple),
    set: (list, set),
    frozenset: (list, frozenset),
    dict: (lambda value: (list(value), list(value.values())), lambda parts: dict(zip(*parts, strict=True))),
    slice: (lambda value: (value.start, value.stop, value.step), lambda parts: slice(*parts)),
    range: (lambda value: (value.start, value.stop, value.step), lambda parts: range(*parts)),
    complex: (lambda value: (value.real, value.imag), lambda parts: complex(*parts)),
    torch.Size: (list, torch.Size),
    torch.device: (lambda value: (str(value),), lambda parts: torch.device(*parts)),
}
_MAKE = {kind.__name__: make for kind, (_, make) in _CONTAINERS.items()}

#: For each kind of part of the model: the method that finds a part by its path.
_PARTS: dict[str, Callable[[torch.nn.Module, str], torch.nn.Module | torch.Tensor]] = {
    "module": torch.nn.Module.get_submodule,
    "parameter": torch.nn.Module.get_parameter,
    "buffer": torch.nn.Module.get_buffer,
}


class ValueWriter:
    """Writes values that an edit of ``model`` uses: rows into :attr:`table`, and tensors by name into :attr:`tensors`."""

    def __init__(self, model: Envoy) -> None:
        module = model._module
        self.table: list[dict[str, Any]] = []
        self.tensors: dict[str, torch.Tensor] = {}
        self._model = model
        self._device = _device_of(module)
        parts = {"buffer": module.named_buffers(), "parameter": module.named_parameters(), "module": module.named_modules()}
        self._parts = {id(part): (kind, path) for kind, found in parts.items() for path, part in found}
        self._rows: dict[int, int | None] = {}
        self._alive: list[Any] = []  # keeps the ids in `_rows` valid

    def write(self, value: Any) -> Term:
        """Return ``value`` as a term.

        Raises:
            TypeError: If it cannot be written. The message names the part that cannot, and says what to do.
        """
        if type(value) in _SCALARS:
            return value
        if id(value) not in self._rows:
            self._rows[id(value)] = None
            self._alive.append(value)
            self.table.append(self._row(value))
            self._rows[id(value)] = len(self.table) - 1
        row = self._rows[id(value)]
        if row is None:
            raise _refusal("a container that contains itself", "Build it inside the block.")
        return {"at": row}

    def _row(self, value: Any) -> dict[str, Any]:
        kind = type(value)
        if kind in _CONTAINERS:
            return {kind.__name__: [self.write(part) for part in _CONTAINERS[kind][0](value)]}
        if isinstance(value, Envoy):
            if value._tree is not self._model._tree:
                raise _refusal(f"the module `{value._path}` of another model", "An edit can use the parts of its own model only.")
            return {"envoy": value._path.partition(".")[2]}
        if id(value) in self._parts:
            part, path = self._parts[id(value)]
            return {part: path}
        if kind in (torch.Tensor, torch.nn.Parameter):
            return {"tensor": self._tensor(value)}
        if isinstance(value, late("ProgramBlock")):
            return {"program": self._tensor(value.as_tensor())["name"]}
        return {"import": _import_name(value)}

    def _tensor(self, value: torch.Tensor) -> dict[str, Any]:
        if value.grad_fn is not None:
            raise _refusal("a tensor that was computed with gradients", "Its autograd graph cannot be exported: use `.detach()`.")
        name = f"tensor {len(self.tensors)}"
        try:
            data = value.detach().cpu().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
            safetensors.torch.save({name: data})
        except Exception as error:  # the type of the error depends on the kind of tensor
            what = f"a tensor that safetensors cannot hold ({type(error).__name__}: {error})"
            raise _refusal(what, "Use a plain tensor with the same values.") from error
        self.tensors[name] = data
        device = None if value.device == self._device else str(value.device)  # `None`: the device of the model
        return {"name": name, "device": device, "requires_grad": value.requires_grad}


def read_values(model: Envoy, table: list[dict[str, Any]], tensors: dict[str, torch.Tensor]) -> list[Any]:
    """Return the values of the rows of a table, with parts of ``model``. Only the import of Python modules runs code.

    Raises the errors of :meth:`.Editable.import_edits`. A damaged table raises ``LookupError`` or another error.
    """
    values: list[Any] = []
    for row in table:
        ((kind, content),) = row.items()
        if kind in _MAKE:
            values.append(_MAKE[kind]([read_term(part, values) for part in content]))
        elif kind == "envoy" or kind in _PARTS:
            values.append(_part(model, kind, content))
        elif kind == "tensor":
            place = _device_of(model._module) if content["device"] is None else content["device"]
            try:
                tensor = tensors[content["name"]].to(place)
            except (RuntimeError, AssertionError) as error:
                raise ValueError(f"The edits use a tensor on the device {place}, which cannot be used here: {error}") from error
            values.append(tensor.requires_grad_(content["requires_grad"]))
        elif kind == "program":
            values.append(late("ProgramBlock").from_tensor(tensors[content]))
        elif kind == "import":
            values.append(_import(*content))
        else:
            raise LookupError(kind)
    return values


def read_term(term: Term, values: list[Any]) -> Any:
    """Return the value of a term; ``values`` are those of the table."""
    return values[term["at"]] if isinstance(term, dict) else term


def _part(model: Envoy, kind: str, path: str) -> Any:
    """Return the part of the model at a path; raise ``ValueError`` if there is none, or it has no weights yet."""
    try:
        found: Any = model._descend(path.split(".") if path else []) if kind == "envoy" else _PARTS[kind](model._module, path)
    except AttributeError:
        found = None
    if found is None:
        raise ValueError(f"The edits use the part `model.{path}`, which this model does not have.")
    tensors = [] if kind == "envoy" else found.parameters() if kind == "module" else [found]
    if any(tensor.is_meta for tensor in tensors):
        raise ValueError(
            f"The edits use the weights of `model.{path}`, which are not loaded yet. Load them first, with `model.dispatch()`."
        )
    return found


def _refusal(what: str, fix: str | None = None) -> TypeError:
    fix = fix or (
        "Only tensors, numbers, text, containers of these, parts of the model, and functions, classes and modules that can be imported "
        "by name can be exported: make the object inside the block from such values."
    )
    return TypeError(f"{what}: it cannot be exported. {fix}")


def _device_of(module: torch.nn.Module) -> torch.device:
    """Return the device of the first parameter of a model; the CPU if the model has none, or it is on the meta device."""
    first = next(module.parameters(), None)
    return torch.device("cpu") if first is None or first.is_meta else first.device


def _import_name(value: Any) -> tuple[str, str]:
    """Return the names of the module and of the attribute by which a function, class or Python module can be imported."""
    module: str
    name: str | None
    if isinstance(value, torch.dtype):
        module, name = "torch", str(value).removeprefix("torch.")
    elif isinstance(value, types.ModuleType):
        module, name = value.__name__, ""
    else:
        has_place = isinstance(value, (types.FunctionType, type))  # the `__qualname__` of a function in C can name a private class
        name = getattr(value, "__qualname__" if has_place else "__name__", None)
        if not isinstance(name, str):
            raise _refusal(f"an object of type {type(value).__module__}.{type(value).__qualname__}")
        module = pickle.whichmodule(value, name)  # type: ignore[attr-defined]
    try:
        found = module != "__main__" and _named(sys.modules.get(module), name) is value
    except AttributeError:
        found = False
    if not found:
        fix = "Define it inside the block, or in a Python file that can be imported wherever the edits are imported."
        raise _refusal(f"`{name or module}`, which cannot be imported by that name", fix)
    return module, name


def _named(module: Any, name: str) -> Any:
    """Return the attribute of a module with a dotted name; the module itself for an empty name."""
    return functools.reduce(getattr, name.split(".") if name else [], module)


def _import(module: str, name: str) -> Any:
    try:
        return _named(importlib.import_module(module), name)
    except Exception as error:  # a module may raise anything while it is imported
        what = f"{module}.{name}".rstrip(".")
        raise ImportError(f"The edits use `{what}`, which cannot be imported here: {error}") from error
