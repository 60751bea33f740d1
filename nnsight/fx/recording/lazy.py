"""Lazy tensors: the tensors that a block gets while its operations are recorded.

A :class:`LazyTensor` has a fake tensor, whose sizes, dtype and device are real Python values, and the number of a value of the program.
When the compiled graph has run, the object itself *becomes* the real tensor, by ``torch.utils.swap_tensors``. So wherever the user has
stored it, in a list, a dict or an object, there is then an ordinary ``torch.Tensor``.

The recording sees the torch calls of a block as the user writes them, through ``__torch_function__``. The transforms of ``torch.func``
and ``torch.vmap`` decompose a call in C++. The recording sees the resulting ATen operators, through ``__torch_dispatch__``.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from ...runtime.rows.gradient_sources import share_gradient


class LazyTensor(torch.Tensor):
    """A tensor whose value is not computed yet.

    Attributes:
        _index: Number of its value in the program.
        _fake: Fake tensor with its metadata.
        _recording: The recording it belongs to.
        _real: The computed tensor, if the object could not become it because torch still refers to the lazy form.
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
        """Let the recording of the first lazy argument handle the call. Called where the mode of that recording is not active."""
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
        """Record an operator that a transform has made from a call."""
        for argument in torch.utils._pytree.tree_leaves((args, kwargs)):
            if isinstance(argument, LazyTensor):
                return argument._recording.call_operator(function, args, kwargs or {})
        return NotImplemented


#: So that messages of TypeErrors name the type that the user expects.
LazyTensor.__name__ = LazyTensor.__qualname__ = "Tensor"


#: Attributes that a real tensor does not inherit from its lazy tensor.
_ATTRIBUTES = frozenset({"_index", "_fake", "_recording", "_real"})


def make_lazy(index: int, fake: torch.Tensor, recording: Any) -> LazyTensor:
    """Return a lazy tensor for value ``index`` of ``recording``."""
    with torch._C.DisableTorchFunction():  # the active recording must not intercept this
        lazy = torch.Tensor._make_wrapper_subclass(
            LazyTensor, fake.shape, strides=fake.stride(), dtype=fake.dtype, device=fake.device
        )
    lazy._index, lazy._fake, lazy._recording, lazy._real = index, fake, recording, None
    return lazy


def become(lazy: LazyTensor, real: torch.Tensor, early: bool = False) -> bool:
    """Turn ``lazy`` into ``real``, which the caller must not use afterwards.

    Returns:
        Whether that was possible. It is not while a torch transform refers to the lazy tensor, which then has ``real`` as an attribute.
        With ``early``, it is also not possible if torch refers to ``real``; then nothing has changed.
    """
    with torch._C.DisableTorchFunction():
        attributes, lazy.__dict__ = lazy.__dict__, {}
        # A real tensor that something else refers to cannot be swapped; a view of it can.
        for share in (False,) if early else (False, True):
            with contextlib.suppress(RuntimeError):
                torch.utils.swap_tensors(lazy, real.view_as(real) if share else real)
                if share and real.requires_grad:
                    share_gradient(lazy, real)
                if len(attributes) > len(_ATTRIBUTES):  # keep the attributes that the block has set
                    lazy.__dict__.update({name: value for name, value in attributes.items() if name not in _ATTRIBUTES})
                return True
        lazy.__dict__ = attributes if early else {**attributes, "_real": real}
        return False


def is_filled(tensor: Any) -> bool:
    """Whether this is a lazy tensor that is computed but could not become the real tensor."""
    return isinstance(tensor, LazyTensor) and tensor._real is not None


def real_of(tensor: Any) -> Any:
    """Return the real tensor of a filled lazy tensor; any other object is returned unchanged."""
    return tensor._real if is_filled(tensor) else tensor
