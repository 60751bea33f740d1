"""Tensors in what modules take and return, and comparison up to rounding."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch


def tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors of ``value``, in order, looking into tuples, lists, dicts and what derives from them only."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in tensors(item)]
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in tensors(item)]
    return []


def all_tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors of ``value``, also those that are attributes of objects, such as caches of keys and values."""
    found: list[torch.Tensor] = []
    seen: set[int] = set()

    def walk(item: Any) -> None:
        if isinstance(item, torch.Tensor):
            found.append(item)
        elif id(item) in seen or isinstance(item, (torch.nn.Module, type)):
            return
        else:
            seen.add(id(item))
            children: Any = ()
            if isinstance(item, dict):
                children = item.values()
            elif isinstance(item, (tuple, list)):
                children = item
            elif hasattr(item, "__dict__") and (dataclasses.is_dataclass(item) or _of_transformers(item)):
                children = vars(item).values()
            for child in children:
                walk(child)

    walk(value)
    return found


def _of_transformers(item: Any) -> bool:
    return type(item).__module__.startswith("transformers")


def main(value: Any) -> torch.Tensor:
    """Return the first floating point tensor of ``value``: the hidden state of a layer, the logits of a model."""
    if isinstance(value, torch.Tensor):
        return value
    return next(tensor for tensor in tensors(value) if tensor.is_floating_point())


def replaced(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return ``value`` with ``function(main(value))`` in place of ``main(value)``."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, tuple):
        return (replaced(value[0], function), *value[1:])
    first = next(name for name, item in value.items() if tensors(item))
    return type(value)({**value, first: replaced(value[first], function)})


#: How far a number may be from the reference, as a part of the largest one of its tensor.
TOLERANCES = {torch.bfloat16: 8e-2, torch.float16: 1e-2}


def difference(found: Any, expected: Any, precision: torch.dtype = torch.float32) -> str | None:
    """Say where ``found`` differs from ``expected`` by more than rounding; None if nowhere.

    Both are dicts of tensors or of nested values. The tolerance follows the largest number of a tensor, and for the gradient of a
    parameter the largest of all gradients of its module: that of the bias of attention's keys is zero but for rounding.
    ``precision`` is the dtype of the model: some layers of a bfloat16 model return float32 tensors, which are as rough as the
    bfloat16 numbers that they come from.
    """
    if found.keys() != expected.keys():
        return f"found {sorted(found.keys() - expected.keys())} and not {sorted(expected.keys() - found.keys())}"
    compared, scales = 0, dict[str, float]()
    for name, wanted in expected.items():
        if _module_of(name):
            largest = [float(tensor.abs().max()) for tensor in all_tensors(wanted) if tensor.numel()]
            scales[_module_of(name)] = max([*largest, scales.get(_module_of(name), 0.0)])
    for name, wanted in expected.items():
        mine, others = all_tensors(found[name]), all_tensors(wanted)
        if len(mine) != len(others):
            return f"{name}: {len(mine)} tensors instead of {len(others)}"
        for index, (one, other) in enumerate(zip(mine, others, strict=True)):
            place = f"{name}[{index}]" if len(mine) > 1 else name
            if (one.shape, one.dtype, one.device.type) != (other.shape, other.dtype, other.device.type):
                return f"{place}: {one.dtype} {tuple(one.shape)} instead of {other.dtype} {tuple(other.shape)}"
            unlike = _unlike(one.detach(), other.detach(), precision, scales.get(_module_of(name), 0.0))
            if unlike:
                return f"{place}: {unlike}"
            compared += other.numel()
    return None if compared else "nothing was compared"


def _module_of(name: str) -> str:
    """Return the path of the module whose parameter has the gradient that is called ``name``; empty if it is no such gradient."""
    return name.removeprefix("gradient of ").rpartition(".")[0] if name.startswith("gradient of ") else ""


def _unlike(one: torch.Tensor, other: torch.Tensor, precision: torch.dtype, scale: float) -> str:
    if not other.numel():
        return ""
    if not other.is_floating_point():
        return "" if torch.equal(one, other) else f"{one.flatten()[:8].tolist()}, not {other.flatten()[:8].tolist()}"
    tolerance = max(TOLERANCES.get(dtype, 2e-4) for dtype in (other.dtype, precision))
    one, other = one.double(), other.double()
    finite = other.isfinite()
    if not torch.equal(one[~finite].nan_to_num(), other[~finite].nan_to_num()) or not one[finite].isfinite().all():
        return "infinities or NaN at other places"
    one, other = one[finite], other[finite]
    largest, off = (float(x.abs().max()) if x.numel() else 0.0 for x in (other, one - other))
    allowed = tolerance * max(scale, largest) + 2e-6
    return f"off by {off:.3g} where the largest is {largest:.3g}" if off > allowed else ""


def rough(tensor: torch.Tensor) -> torch.Tensor:
    """Return a number to differentiate, in which every element counts differently."""
    weights = torch.linspace(0.5, 1.5, tensor.shape[-1], device=tensor.device)
    return (tensor.float().tanh() * weights).sum()
