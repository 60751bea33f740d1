"""Checks indices of operators against sizes, because some kernels do not, and on a GPU an index out of range ends the process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from ...runtime.rows.fakes import MOST_COUNTED
from ..format.errors import InvalidProgramError

#: Attribute of the fake tensor of a constant that may be an index: the real constant.
CONSTANT = "_nnsight_constant"


def check_indices(operator: Any, args: list[Any], kwargs: dict[str, Any]) -> None:
    """Check that an operator does not access memory outside of its tensors, and that the size of its result is bounded.

    Raises:
        IndexError: If an index is out of range.
        ValueError: If numbers that are counted, or repeats, are too large, or if a quantile is not between 0 and 1.
        InvalidProgramError: If indices have a dtype that cannot index, or if there are too many of them.
    """
    name, names = _signature(operator)
    rule = _INDEXED.get(name)
    if rule is None and name not in _COUNTED:
        return
    given = dict(zip(names, args, strict=False)) | kwargs
    if name in ("bincount", "repeat_interleave"):
        _check_count(name, given)
    elif name in ("quantile", "nanquantile"):
        _check_fraction(given["q"])
    for index, size, negative in rule(given) if rule is not None else ():
        if isinstance(index, torch.Tensor):
            _check_range(index, size, negative)


@functools.cache
def _signature(operator: Any) -> tuple[str, tuple[str, ...]]:
    """Return the name of an operator, and the names of its arguments."""
    return operator._schema.name.removeprefix("aten::"), tuple(argument.name for argument in operator._schema.arguments)


def _check_range(index: torch.Tensor, size: int, negative: bool) -> None:
    if index.dtype in (torch.bool, torch.uint8):
        return
    if index.dtype not in (torch.int64, torch.int32, torch.int16, torch.int8):
        raise InvalidProgramError(f"Indices have to be integers, not {index.dtype}.")
    values = getattr(index, CONSTANT, index)
    if isinstance(values, FakeTensor) or values.numel() == 0:
        return
    with unset_fake_temporarily():
        low, high = (int(bound) for bound in torch.aminmax(values))
    if high >= size or low < (-size if negative else 0):
        raise IndexError(f"an index points outside of its tensor: from {low} to {high}, for a size of {size}")


def _check_fraction(q: Any) -> None:
    """Raise an error if the fraction of a quantile is out of range, because GPU kernels compute an index from it without a check."""
    if isinstance(q, torch.Tensor) and not isinstance(q, FakeTensor) and not bool(((q >= 0) & (q <= 1)).all()):
        raise ValueError("the fraction of a quantile is not between 0 and 1")


def _check_count(name: str, given: dict[str, Any]) -> None:
    """Raise an error if the result would be larger than the rehearsal has counted."""
    values = given["self"] if name == "bincount" else given["repeats"]
    if not isinstance(values, torch.Tensor) or isinstance(values, FakeTensor) or values.numel() == 0:
        return
    most, size = max(given.get("minlength", 0), MOST_COUNTED), int(values.max()) + 1
    wanted = given.get("output_size")
    if name == "repeat_interleave" and size <= most:
        size = int(values.sum())
    if size > most or wanted not in (None, size):
        raise ValueError(f"the result would have size {size}; in a program, its arguments allow {wanted or most}")


def _along(given: dict[str, Any], negative: bool = False) -> Iterator[tuple[Any, int, bool]]:
    source = given["self"]
    size = source.shape[given["dim"]] if source.dim() else 1
    yield given["index"], size, negative


def _along_dim(given: dict[str, Any]) -> Iterator[tuple[Any, int, bool]]:
    source, dim = given["self"], given.get("dim")
    yield given["indices"], source.numel() if dim is None else source.shape[dim], False


def _advanced(given: dict[str, Any]) -> Iterator[tuple[Any, int, bool]]:
    source, dim = given["self"], 0
    for index in given["indices"]:
        if index is None:
            dim += 1
        elif index.dtype in (torch.bool, torch.uint8):
            dim += index.dim()
        else:
            if dim >= source.dim():
                raise InvalidProgramError("There are more indices than dimensions.")
            yield index, source.shape[dim], True
            dim += 1


def _classes(given: dict[str, Any]) -> Iterator[tuple[Any, int, bool]]:
    target, source = given["target"], given["self"]
    target = getattr(target, CONSTANT, target)
    if isinstance(target, torch.Tensor) and source.dim() and not target.is_floating_point():  # floats are probabilities
        if isinstance(target, FakeTensor):
            return
        with unset_fake_temporarily():
            kept = target.masked_fill(target == given.get("ignore_index", -100), 0)
        yield kept, source.shape[1] if source.dim() > 1 else source.shape[0], False


#: Operators whose numbers are checked, not only indices.
_COUNTED = frozenset({"bincount", "repeat_interleave", "quantile", "nanquantile"})

_INDEXED: dict[str, Callable[[dict[str, Any]], Iterable[tuple[Any, int, bool]]]] = {
    **dict.fromkeys(
        "gather index_select scatter scatter_ scatter_add scatter_add_ scatter_reduce scatter_reduce_".split(), _along
    ),
    **dict.fromkeys(
        "index_add index_add_ index_copy index_copy_ index_fill index_fill_".split(),
        lambda given: _along(given, given.get("value") is not None),
    ),
    **dict.fromkeys("index index_put index_put_".split(), _advanced),
    "embedding": lambda given: [(given["indices"], given["weight"].shape[0], False)],
    "take_along_dim": _along_dim,
    "take": lambda given: [(given["index"], given["self"].numel(), True)],
    **dict.fromkeys(("nll_loss_forward", "nll_loss_nd", "cross_entropy_loss"), _classes),
}
