"""Lazy tensors: what a block holds while its operations are being recorded.

A :class:`LazyTensor` knows its fake (sizes, dtype and device are real Python values) and which value of the program it is. When the
compiled graph has run, the object itself *becomes* the real tensor, by ``torch.utils.swap_tensors``: wherever the
user has put it, in a list, a dict or an object, there is then an ordinary ``torch.Tensor``.

Torch calls of a block reach the recording as the user writes them, through ``__torch_function__``. The transforms of ``torch.func``
and ``torch.vmap`` take a call apart in C++; the ATen operators that result reach it through ``__torch_dispatch__``.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from ...runtime import gradients


class LazyTensor(torch.Tensor):
    """A tensor whose value is not computed yet.

    Attributes:
        _index: Number of the program's value it stands for.
        _fake: Fake tensor with its metadata.
        _recording: The recording it belongs to.
        _real: What it stands for, where a transform of torch still holds on to the lazy tensor itself.
    """

    _index: int
    _fake: torch.Tensor
    _recording: Any
    _real: torch.Tensor | None

    def __hash__(self) -> int:
        return id(self)  # stays the same when the object becomes a real tensor

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Let the recording of the first lazy argument handle the call; its mode is not active here."""
        for argument in torch.utils._pytree.tree_leaves((args, kwargs)):
            if isinstance(argument, LazyTensor):
                recording = argument._recording
                if torch._C._are_functorch_transforms_active():
                    return recording.transformed(function, args, kwargs or {})
                return recording.call(function, args, kwargs or {})
        return NotImplemented

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Record an operator that torch has made of a call."""
        for argument in torch.utils._pytree.tree_leaves((args, kwargs)):
            if isinstance(argument, LazyTensor):
                return argument._recording.call_operator(function, args, kwargs or {})
        return NotImplemented


#: To the user it is a tensor, also in the messages of TypeErrors.
LazyTensor.__name__ = LazyTensor.__qualname__ = "Tensor"


#: Attributes of a lazy tensor.
_OWN = frozenset({"_index", "_fake", "_recording", "_real"})


def make_lazy(index: int, fake: torch.Tensor, recording: Any) -> LazyTensor:
    """Return a lazy tensor for value ``index`` of ``recording``."""
    with torch._C.DisableTorchFunction():  # the active recording is not asked either
        lazy = torch.Tensor._make_wrapper_subclass(
            LazyTensor, fake.shape, strides=fake.stride(), dtype=fake.dtype, device=fake.device
        )
    lazy._index, lazy._fake, lazy._recording, lazy._real = index, fake, recording, None
    return lazy


def become(lazy: LazyTensor, real: torch.Tensor) -> bool:
    """Turn ``lazy`` into ``real``, which must not be used by the caller afterwards.

    Returns:
        Whether that was possible. Else something that torch keeps refers to the lazy tensor, which then has ``real`` inside.
    """
    with torch._C.DisableTorchFunction():
        attributes, lazy.__dict__ = lazy.__dict__, {}
        for share in (False, True):  # if something else refers to the real tensor: share its memory and its gradient
            with contextlib.suppress(RuntimeError):
                torch.utils.swap_tensors(lazy, real.view_as(real) if share else real)
                if share and real.requires_grad:
                    gradients.stand_for(lazy, real)
                if len(attributes) > len(_OWN):  # what the block has set on the tensor stays on it
                    lazy.__dict__.update({name: value for name, value in attributes.items() if name not in _OWN})
                return True
        lazy.__dict__ = {**attributes, "_real": real}
        return False


def is_filled(tensor: Any) -> bool:
    """Whether this is a lazy tensor that has a value and has not become it."""
    return isinstance(tensor, LazyTensor) and tensor._real is not None


def real_of(tensor: Any) -> Any:
    """Return what a lazy tensor stands for, if it is known, and anything else as it is."""
    return tensor._real if is_filled(tensor) else tensor
