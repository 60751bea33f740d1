"""Words for the report of a cut: what needed a value, and what does the same without one."""

from __future__ import annotations

from typing import Any

_BRANCH = "`torch.where(condition, a, b)`"
_NUMBER = "the tensor itself: arithmetic, comparisons and indexing take it, and `torch.where` chooses by it"
_SHOWN = "`.save()`, and show the value behind the block"
_OUTSIDE = "torch functions, or `.save()` and the other library behind the block"
_SELECT = "a result of a fixed size: `torch.where(mask, x, 0)`, `masked_fill`, `topk`"
_COMPARED = "`(a == b).all()` or `torch.isclose(a, b).all()`, which stay tensors"
_AFTERWARDS = "`.save()`, and do this behind the block"

#: What is called on a tensor before its gradient is asked for, or on a loss.
ABOUT_BACKWARD = frozenset("backward grad register_hook retain_grad requires_grad_ grad_fn computed".split())

#: What does the same without a value, by the name of what needs one.
_INSTEAD = {
    **dict.fromkeys(("__bool__", "is_nonzero", "__contains__"), _BRANCH),
    **dict.fromkeys("__int__ __float__ __complex__ __index__ item tolist".split(), _NUMBER),
    **dict.fromkeys("__repr__ __str__ __format__".split(), _SHOWN),
    **dict.fromkeys("numpy __array__ __dlpack__ to_dlpack data_ptr storage untyped_storage".split(), _OUTSIDE),
    **dict.fromkeys("__getitem__ nonzero masked_select unique unique_consecutive repeat_interleave where".split(), _SELECT),
    **dict.fromkeys("equal allclose".split(), _COMPARED),
    **dict.fromkeys("__deepcopy__ __reduce_ex__".split(), "`.clone()`, or " + _AFTERWARDS),
    **dict.fromkeys(ABOUT_BACKWARD, "`with loss.backward():`"),
}

#: Functions behind methods: operators that come from inside a transform of ``torch.func``, and what a backward pass begins with.
_METHODS = {"_local_scalar_dense": "item", "computed": "backward"}


def name_of(function: Any) -> str:
    """Return how a user calls ``function``."""
    name = str(getattr(function, "__name__", None) or getattr(function, "name", function)).partition(".")[0]
    return _METHODS.get(name, name)


def instead_of(name: str) -> str:
    """Return what to write in place of a call of ``name`` that needs a value."""
    return _INSTEAD.get(name, f"tensor operations such as `torch.where`, or {_AFTERWARDS}")
