"""Values as JSON and named tensors, and back, without pickle.

What a block uses is of four kinds. Plain data is written down. Tensors go to a table of their own. Parts of the model are
written as their path, and become the parts of whatever model reads the file. Functions, classes and Python modules are
written as the name they can be imported by. Anything else is refused, with the name of the variable that holds it: a file
that could bring back any object would have to run code of its own to do so.

A value that has an identity (a list, a tensor) is written once, in a table that the others point into. So two variables that
hold the same list hold the same list again. Entries point backwards only, so reading the table is one pass.
"""

from __future__ import annotations

import base64
import enum
import importlib
import math
import pickle
import sys
import types
from typing import Any

import safetensors.torch
import torch

from ..envoy import Envoy

#: A value in JSON: a scalar as it is, anything else ``{"at": index}`` into the table.
Term = Any

_SCALARS = (type(None), bool, str)
_SEQUENCES: dict[type, str] = {list: "list", tuple: "tuple", set: "set", frozenset: "frozenset", torch.Size: "size"}
_MAKE = {name: kind for kind, name in _SEQUENCES.items()}
_OF_TORCH = (torch.dtype, torch.layout, torch.memory_format)


class ValueWriter:
    """Writes values of a model's user down.

    Args:
        model: The root of the model. Its parts are written as paths.

    Attributes:
        table: What the terms point into.
        tensors: Tensors by name; complete after :meth:`finish`.
    """

    def __init__(self, model: Envoy) -> None:
        module = model._module
        self.table: list[dict[str, Any]] = []
        self.tensors: dict[str, torch.Tensor] = {}
        self._model = model
        self._device = _device_of(module)
        self._parts: dict[int, tuple[str, str]] = {
            id(part): (kind, path)
            for kind, found in (
                ("buffer", module.named_buffers()),
                ("parameter", module.named_parameters()),
                ("module", module.named_modules()),
            )
            for path, part in found
        }
        self._written: dict[int, Term] = {}
        self._alive: list[Any] = []  # an identity is one as long as the object lives
        self._pending: list[tuple[dict[str, Any], torch.Tensor, str, str]] = []

    def write(self, value: Any, label: str, user: str) -> Term:
        """Return ``value`` as a term.

        Args:
            value: What to write.
            label: How the user knows it: the name of a variable.
            user: Who uses it; the subject of error messages.

        Raises:
            TypeError: If it cannot be written; the message names it and says what to do.
        """
        if type(value) in _SCALARS:
            return value
        if type(value) is int and value.bit_length() < 64:
            return value
        if type(value) is float and math.isfinite(value):
            return value
        if id(value) in self._written:
            if self._written[id(value)] is None:
                raise self._refusal(
                    label, user, "which contains itself", "Break the cycle, or build it inside the block."
                )
            return self._written[id(value)]
        self._written[id(value)] = None
        self._alive.append(value)
        entry = self._entry(value, label, user)
        self.table.append(entry)
        term = self._written[id(value)] = {"at": len(self.table) - 1}
        return term

    def finish(self) -> None:
        """Fill :attr:`tensors`. Tensors that share memory still do when they are read.

        Raises:
            TypeError: If tensors of different types share memory.
        """
        groups: dict[Any, list[tuple[dict[str, Any], torch.Tensor, str, str]]] = {}
        for item in self._pending:
            tensor = item[1]
            alone = tensor.numel() == 0 or tensor.is_conj() or tensor.is_neg()
            key = id(tensor) if alone else (str(tensor.device), tensor.untyped_storage().data_ptr())
            groups.setdefault(key, []).append(item)
        for group in groups.values():
            name = f"tensor {len(self.tensors)}"
            data = group[0][1].detach()
            if len(group) > 1:
                for _, tensor, label, user in group:
                    if tensor.dtype != data.dtype:
                        fix = "Write a copy of one of them: `.clone()`."
                        raise self._refusal(label, user, "which shares its memory with a tensor of another type", fix)
                start = min(tensor.storage_offset() for _, tensor, *_ in group)
                stop = max(tensor.storage_offset() + _extent(tensor) for _, tensor, *_ in group)
                data = data.as_strided((stop - start,), (1,), start)
                for entry, tensor, *_ in group:
                    place = (list(tensor.shape), list(tensor.stride()), tensor.storage_offset() - start)
                    entry["view"] = place
            data = data.resolve_conj().resolve_neg()
            if data.is_complex():
                data = torch.view_as_real(data)
                for entry, *_ in group:
                    entry["complex"] = True
            for entry, *_ in group:
                entry["data"] = name
            self.tensors[name] = data.cpu().contiguous().clone()

    def _entry(self, value: Any, label: str, user: str) -> dict[str, Any]:
        """Return the row of the table for a value."""
        kind = type(value)
        if kind in _SEQUENCES:
            items = [self.write(item, f"{label}[{number}]", user) for number, item in enumerate(value)]
            return {"type": _SEQUENCES[kind], "items": items}
        if kind is dict:
            items = [
                [self.write(key, f"a key of {label}", user), self.write(item, f"{label}[{key!r}]", user)]
                for key, item in value.items()
            ]
            return {"type": "dict", "items": items}
        if kind in (slice, range):
            parts = [value.start, value.stop, value.step]
            return {"type": kind.__name__, "items": [self.write(part, label, user) for part in parts]}
        if kind is float:
            return {"type": "float", "text": repr(value)}
        if kind is int:
            return {"type": "int", "text": hex(value)}
        if kind is complex:
            return {"type": "complex", "items": [self.write(part, label, user) for part in (value.real, value.imag)]}
        if kind in (bytes, bytearray):
            return {"type": kind.__name__, "text": base64.b64encode(value).decode()}
        if value is Ellipsis:
            return {"type": "ellipsis"}
        if isinstance(value, _OF_TORCH):
            return {"type": "name", "module": "torch", "name": str(value).removeprefix("torch.")}
        if kind is torch.device:
            return {"type": "device", "text": str(value)}
        return self._part_or_tensor(value, label, user) or self._named(value, label, user)

    def _part_or_tensor(self, value: Any, label: str, user: str) -> dict[str, Any] | None:
        """Return the row for a part of the model or a tensor."""
        if isinstance(value, Envoy):
            if value._tree is not self._model._tree:
                fix = "An edit can use the parts of its own model only."
                raise self._refusal(label, user, f"the module `{value._path}` of another model", fix)
            return {"type": "envoy", "path": value._path.partition(".")[2]}
        if isinstance(value, (torch.nn.Module, torch.Tensor)) and id(value) in self._parts:
            kind, path = self._parts[id(value)]
            return {"type": kind, "path": path}
        if isinstance(value, torch.nn.Module):
            fix = (
                f"Make it a part of the model, here and where the edits are imported: `model.{label} = {label}`; or let "
                "the block use its tensors."
            )
            raise self._refusal(label, user, f"the module {type(value).__name__}, which is not part of the model", fix)
        if isinstance(value, torch.Tensor):
            return self._tensor(value, label, user)
        if type(value).__module__ == "numpy":
            import numpy

            if isinstance(value, numpy.generic) or type(value) is numpy.ndarray:
                try:
                    tensor = torch.from_numpy(numpy.array(value))
                except TypeError as error:
                    raise self._refusal(label, user, "an array of this type", str(error)) from error
                kind_name = "array" if type(value) is numpy.ndarray else "number"
                return {"type": kind_name, "items": [self.write(tensor, label, user)]}
        return None

    def _tensor(self, value: torch.Tensor, label: str, user: str) -> dict[str, Any]:
        why = _unwritable(value)
        if why is not None:
            raise self._refusal(label, user, *why)
        entry: dict[str, Any] = {"type": "tensor", "requires_grad": value.requires_grad}
        entry["device"] = "model" if value.device == self._device else str(value.device)
        if isinstance(value, torch.nn.Parameter):
            entry["is_parameter"] = True
        self._pending.append((entry, value, label, user))
        return entry

    def _named(self, value: Any, label: str, user: str) -> dict[str, Any]:
        """Return the row for what can be imported, or for a value that its importable class brings back."""
        kind = type(value)
        if isinstance(value, enum.Enum) and value.name in kind.__members__:
            return {"type": "member", "items": [self.write(kind, label, user)], "text": value.name}
        if isinstance(value, tuple) and hasattr(kind, "_fields") and hasattr(kind, "_make"):
            items = [self.write(item, f"{label}.{name}", user) for name, item in zip(kind._fields, value, strict=True)]
            return {"type": "namedtuple", "items": [self.write(kind, label, user), *items]}
        if isinstance(value, types.ModuleType):
            if sys.modules.get(value.__name__) is value and value.__name__ != "__main__":
                return {"type": "name", "module": value.__name__, "name": ""}
            raise self._refusal(
                label, user, f"the Python module {value.__name__}, which cannot be imported by that name"
            )
        found = _import_name(value)
        if found is not None:
            return {"type": "name", "module": found[0], "name": found[1]}
        if isinstance(value, (types.FunctionType, type)):
            name = value.__qualname__
            what = "a lambda" if "<lambda>" in name else f"`{name}`"
            fix = "Define it inside the block, or put it into a Python file that can be imported where the edits are."
            raise self._refusal(label, user, f"{what}, defined where no import reaches it", fix)
        raise self._refusal(label, user, f"an object of type {kind.__module__}.{kind.__qualname__}")

    @staticmethod
    def _refusal(label: str, user: str, what: str, fix: str | None = None) -> TypeError:
        fix = fix or (
            "Tensors, numbers, text, containers of these, parts of the model, and what can be imported by name can be "
            "exported: make the object inside the block from such values."
        )
        return TypeError(f"{user} uses `{label}`, {what}: it cannot be exported. {fix}")


class ValueReader:
    """Brings back what a :class:`ValueWriter` wrote.

    Args:
        model: The root of the model whose parts stand for those that were written.
        table: The table that the terms point into.
        tensors: Tensors by name.

    Raises:
        ValueError: If the model lacks a part, or a device is missing.
        ImportError: If something cannot be imported.
        KeyError: Or another look-up or type error, if the table is damaged.
    """

    def __init__(self, model: Envoy, table: list[dict[str, Any]], tensors: dict[str, torch.Tensor]) -> None:
        self._model = model
        self._device = _device_of(model._module)
        self._tensors = tensors
        self._moved: dict[tuple[str, torch.device], torch.Tensor] = {}
        self._values: list[Any] = []
        for entry in table:
            self._values.append(self._value(entry))

    def read(self, term: Term) -> Any:
        """Return the value of a term."""
        if isinstance(term, dict):
            index = term["at"]
            if not isinstance(index, int) or index < 0:
                raise KeyError(index)
            return self._values[index]
        return term

    def _value(self, entry: dict[str, Any]) -> Any:
        kind, text = entry["type"], entry.get("text", "")
        if kind in ("envoy", "module", "parameter", "buffer"):
            return self._part(kind, entry["path"])
        if kind == "tensor":
            return self._tensor(entry)
        if kind == "name":
            return _import(entry["module"], entry["name"])
        items = entry.get("items", [])
        if kind == "dict":
            return {self.read(key): self.read(value) for key, value in items}
        values = [self.read(item) for item in items]
        match kind:
            case _ if kind in _MAKE:
                return _MAKE[kind](values)
            case "slice":
                return slice(*values)
            case "range":
                return range(*values)
            case "float":
                return float(text)
            case "int":
                return int(text, 16)
            case "complex":
                return complex(*values)
            case "bytes":
                return base64.b64decode(text)
            case "bytearray":
                return bytearray(base64.b64decode(text))
            case "ellipsis":
                return Ellipsis
            case "device":
                return torch.device(text)
            case "array":
                return values[0].cpu().numpy()
            case "number":
                return values[0].cpu().numpy()[()]
            case "member":
                return values[0][text]
            case "namedtuple":
                return values[0]._make(values[1:])
            case _:
                raise KeyError(kind)

    def _part(self, kind: str, path: str) -> Any:
        """Return what the model has at a path."""
        root: Any = self._model
        try:
            if kind == "envoy":
                found = root._descend(path.split(".")) if path else root
                if found is None:
                    raise AttributeError(path)
                return found
            found = getattr(root._module, {"module": "get_submodule"}.get(kind, f"get_{kind}"))(path)
        except AttributeError:
            what = "module" if kind == "envoy" else kind
            raise ValueError(f"The edits use the {what} `model.{path}`, which this model does not have.") from None
        tensors = [*found.parameters()] if kind == "module" else [found]
        if any(tensor.is_meta for tensor in tensors):
            raise ValueError(
                f"The edits use the weights of `model.{path}`, which are not loaded yet. Load them first, with `model.dispatch()`."
            )
        return found

    def _tensor(self, entry: dict[str, Any]) -> torch.Tensor:
        name = entry["data"]
        device = torch.device(self._device if entry["device"] == "model" else entry["device"])
        key = (name, device)
        if key not in self._moved:
            stored = self._tensors[name]
            try:
                self._moved[key] = (torch.view_as_complex(stored) if entry.get("complex") else stored).to(device)
            except (RuntimeError, AssertionError) as error:
                raise ValueError(
                    f"The edits use a tensor on the device {device}, which cannot be used here: {error}"
                ) from error
        tensor = self._moved[key]
        if "view" in entry:
            tensor = tensor.as_strided(*entry["view"])
        if entry.get("is_parameter"):
            return torch.nn.Parameter(tensor, requires_grad=entry["requires_grad"])
        return tensor.requires_grad_(entry["requires_grad"])


def _device_of(module: torch.nn.Module) -> torch.device:
    """Return where a model is, as far as that can be said: where its first parameter is."""
    first = next(module.parameters(), None)
    return torch.device("cpu") if first is None or first.is_meta else first.device


def _extent(tensor: torch.Tensor) -> int:
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _unwritable(tensor: torch.Tensor) -> tuple[str, str] | None:
    """Return why a tensor cannot be written, and what to do about it."""
    plain = "Use a plain tensor with the same values."
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return f"a tensor of type {type(tensor).__name__}", plain
    if tensor.is_meta:
        return "a tensor on the meta device, which has no values", "Load the weights first."
    if tensor.is_quantized or tensor.is_nested or tensor.layout != torch.strided:
        kind = "quantized" if tensor.is_quantized else "nested" if tensor.is_nested else "sparse"
        return f"a {kind} tensor", plain
    if tensor.grad_fn is not None:
        return "a tensor that was computed with gradients", "The graph behind it cannot be exported: use `.detach()`."
    if not tensor.is_complex():
        try:
            safetensors.torch.save({"probe": torch.empty(0, dtype=tensor.dtype)})
        except (KeyError, safetensors.SafetensorError):
            return f"a tensor of type {tensor.dtype}", "Convert it to a type that safetensors has."
    return None


def _import_name(value: Any) -> tuple[str, str] | None:
    """Return module and name by which a function, a class or the like can be imported."""
    name = getattr(value, "__name__", None)
    if not isinstance(name, str):
        return None
    candidates = [(getattr(value, "__module__", None), getattr(value, "__qualname__", name))]
    owner = getattr(value, "__objclass__", None)  # of a method such as torch.Tensor.add
    if owner is not None:
        candidates.append((owner.__module__, f"{owner.__qualname__}.{name}"))
    candidates.append((candidates[0][0], name))
    for module_name, path in candidates:
        if (
            isinstance(module_name, str)
            and _lookup(sys.modules.get(module_name), path) is value
            and module_name != "__main__"
        ):
            return module_name, path
    if isinstance(value, (types.FunctionType, type)):
        return None  # a look through all modules would find copies that `from x import y` made in somebody's file
    module_name = pickle.whichmodule(value, name)  # type: ignore[attr-defined]
    found = _lookup(sys.modules.get(module_name), name) is value and module_name != "__main__"
    return (module_name, name) if found else None


def _lookup(module: types.ModuleType | None, path: str) -> Any:
    value: Any = module
    for part in path.split("."):
        value = getattr(value, part, None)
    return value


def _import(module_name: str, path: str) -> Any:
    try:
        value: Any = importlib.import_module(module_name)
        for part in path.split(".") if path else ():
            value = getattr(value, part)
    except (ImportError, AttributeError) as error:
        name = f"{module_name}.{path}" if path else module_name
        raise ImportError(f"The edits use `{name}`, which cannot be imported here: {error}") from error
    return value
