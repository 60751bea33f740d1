"""Functions of a block whose calls torch would keep from a recording.

``__torch_function__`` does not see what two kinds of functions do with a lazy tensor:

* A function that the user has compiled with ``torch.compile``: dynamo would trace it with the lazy tensor. It runs as Python
  instead, so that its calls become part of the graph.
* A ``torch.autograd.Function``: torch runs its ``forward`` in C++, and to autograd it is one call with a gradient of its own.

Torch has no public hook for either that is limited to a thread. So one function of each kind is replaced, for all threads, while any
recording is active (:data:`shown`). Calls outside of a recording go on as they would.
"""

from __future__ import annotations

from typing import Any

import torch

from ...shared_changes import SharedChange
from ..torch_compat import eval_frame, set_counted_frames, skip_code
from .calls import CallRecorder
from .lazy import LazyTensor

#: What applies a ``torch.autograd.Function``, behind what ``torch.func`` makes of it.
_Applied: Any = torch.autograd.function._SingleLevelFunction


def _replace() -> Any:
    chosen = eval_frame._callback_from_stance

    def callback_from_stance(callback: Any) -> Any:
        """Return what dynamo is to do with the frames of a compiled function: ``None`` for nothing."""
        if callback in (None, False) or not _is_recording():
            return chosen(callback)
        set_counted_frames(-1)
        return None

    eval_frame._callback_from_stance = callback_from_stance
    _Applied.apply = classmethod(_apply)
    return chosen


def _put_back(chosen: Any) -> None:
    eval_frame._callback_from_stance = chosen
    del _Applied.apply


#: Entered by each recording while it is active.
shown = SharedChange(_replace, _put_back)


def _is_recording() -> bool:
    if not torch._C._len_torch_function_stack():
        return False
    return any(isinstance(mode, CallRecorder) for mode in torch.overrides._get_current_function_mode_stack())


def _apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    function = super(_Applied, cls).apply
    if torch._C._len_torch_function_stack():
        for mode in torch.overrides._get_current_function_mode_stack():
            if hasattr(mode, "check_autograd_function"):  # a recorder of programs
                mode.check_autograd_function(cls)
    for argument in args:
        if isinstance(argument, LazyTensor):
            return argument._recording.apply(function, args, kwargs)
    return function(*args, **kwargs)


skip_code(_apply.__code__)  # between two graphs of compiled code, dynamo does not compile torch's own `apply` either
