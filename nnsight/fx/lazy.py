"""Lazy tensors: what a block holds while its operations are being recorded.

A :class:`LazyTensor` knows its fake (sizes, dtype and device are real Python values) and which value of the program it is. When the
compiled graph has run, the object itself *becomes* the real tensor, by ``torch.utils.swap_tensors``: wherever the
user has put it, in a list, a dict or an object, there is then an ordinary ``torch.Tensor``.
"""

from __future__ import annotations

from typing import Any

import torch

_SEED = torch.empty(0, device="meta")


class LazyTensor(torch.Tensor):
    """A tensor whose value is not computed yet.

    Attributes:
        _index: Number of the program's value it stands for.
        _fake: Fake tensor with its metadata.
        _recording: The recording it belongs to.
    """

    _index: int
    _fake: torch.Tensor
    _recording: Any

    def __hash__(self) -> int:
        return id(self)  # stays the same when the object becomes a real tensor

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Let the recording of the first lazy argument handle the call; its mode is not active here."""
        for argument in torch.utils._pytree.tree_leaves((args, kwargs)):
            if isinstance(argument, LazyTensor):
                return argument._recording.call(function, args, kwargs or {})
        return NotImplemented


#: To the user it is a tensor, also in the messages of TypeErrors.
LazyTensor.__name__ = LazyTensor.__qualname__ = "Tensor"


def make_lazy(index: int, fake: torch.Tensor, recording: Any) -> LazyTensor:
    """Return a lazy tensor for value ``index`` of ``recording``."""
    with torch._C.DisableTorchFunctionSubclass():
        lazy = torch.Tensor._make_subclass(LazyTensor, _SEED)
    lazy._index, lazy._fake, lazy._recording = index, fake, recording
    return lazy


def become(lazy: LazyTensor, real: torch.Tensor) -> None:
    """Turn ``lazy`` into ``real``. ``real`` must not be used by the caller afterwards."""
    with torch._C.DisableTorchFunction():
        lazy.__dict__.clear()
        try:
            torch.utils.swap_tensors(lazy, real)
        except RuntimeError:  # something else refers to the tensor: share its memory and its gradient instead
            torch.utils.swap_tensors(lazy, real.view_as(real))
