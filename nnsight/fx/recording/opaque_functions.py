"""Functions of a block whose calls torch would keep from a recording.

``__torch_function__`` does not see what two kinds of functions do with a lazy tensor:

* A function that the user has compiled with ``torch.compile``: dynamo would trace it with the lazy tensor. It runs as Python
  instead, so that its calls become part of the graph.
* A ``torch.autograd.Function``: torch runs its ``forward`` in C++, and to autograd it is one call with a gradient of its own. Since
  torch 2.14 ``apply`` itself is C++, and user code may hold it. But for each call it asks the class for ``_backward_cls``, then for
  ``forward``, then for ``setup_context``.

Torch has no public hook for either that is limited to a thread. So dynamo's choice of a callback and the look-up of attributes of these
classes are replaced, for all threads, while any recording is active (:data:`shown`). Calls outside of a recording go on as they would.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import threading
from typing import Any

import torch

from ...shared_changes import SharedChange
from ..torch_compat import eval_frame, set_counted_frames, skip_code
from .calls import CallRecorder
from .lazy import LazyTensor

_FunctionMeta: Any = torch.autograd.function.FunctionMeta
_base_setup_context = torch.autograd.function._SingleLevelFunction.setup_context


def _replace() -> Any:
    chosen = eval_frame._callback_from_stance

    def callback_from_stance(callback: Any) -> Any:
        """Return what dynamo is to do with the frames of a compiled function: ``None`` for nothing."""
        if callback in (None, False) or not _is_recording():
            return chosen(callback)
        set_counted_frames(-1)
        return None

    eval_frame._callback_from_stance = callback_from_stance
    _FunctionMeta.__getattribute__ = _attribute
    return chosen


def _put_back(chosen: Any) -> None:
    eval_frame._callback_from_stance = chosen
    del _FunctionMeta.__getattribute__


#: Entered by each recording while it is active.
shown = SharedChange(_replace, _put_back)


def _is_recording() -> bool:
    if not torch._C._len_torch_function_stack():
        return False
    return any(isinstance(mode, CallRecorder) for mode in torch.overrides._get_current_function_mode_stack())


def _attribute(cls: Any, name: str) -> Any:
    """Look up an attribute of a ``torch.autograd.Function``; if torch asks for it in a call, one that the recording sees."""
    found = type.__getattribute__(cls, name)
    if name not in ("_backward_cls", "setup_context", "forward"):
        return found
    caller = sys._getframe(1)
    place = (id(cls), id(caller), caller.f_lasti)  # C++ asks for all in one instruction of Python
    if name == "_backward_cls":
        _calls.last = None
        if torch._C._len_torch_function_stack():
            for mode in torch.overrides._get_current_function_mode_stack():
                if hasattr(mode, "check_autograd_function"):  # a recorder of programs
                    mode.check_autograd_function(cls)
        _calls.last = _Call(place, torch.is_grad_enabled())
        return found
    call: _Call | None = getattr(_calls, "last", None)
    if call is None or call.place != place:
        return found
    if name == "forward":
        return found if call.is_recorded else functools.partial(call.run, cls, found)
    if found is _base_setup_context or not call.is_recorded:
        return found
    _calls.last = None
    return _no_context


@dataclasses.dataclass(slots=True)
class _Call:
    """A call of ``Function.apply`` in C++, which switches gradients off before it asks for ``forward``."""

    place: tuple[int, int, int]
    grad_enabled: bool
    is_recorded: bool = False

    def run(self, cls: Any, forward: Any, *args: Any, **kwargs: Any) -> Any:
        """Run ``forward``, or have the recording of a lazy argument apply the function."""
        _calls.last = None
        given = args[1:] if cls.setup_context is _base_setup_context else args
        recording = next((argument._recording for argument in given if isinstance(argument, LazyTensor)), None)
        if recording is not None:
            with torch.set_grad_enabled(self.grad_enabled):
                self.is_recorded, result = recording.apply(cls.apply, given, kwargs)
                if self.is_recorded:
                    _calls.last = self
                    return tuple(map(_kept, result)) if isinstance(result, tuple) else _kept(result)
        return forward(*args, **kwargs)


def _no_context(ctx: Any, inputs: Any, output: Any) -> None:
    """Stand for ``setup_context`` once the recording has applied the function."""


def _kept(result: Any) -> Any:
    """Return a tensor from which C++, which saw no gradients, does not take its gradient: a view."""
    if isinstance(result, torch.Tensor) and result.requires_grad and not result._is_view():
        return result.view_as(result)
    return result


#: In each thread: the call of which C++ has asked last.
_calls = threading.local()

for _function in (_attribute, _Call.run):
    skip_code(_function.__code__)  # between two graphs of compiled code, dynamo does not compile torch's own `apply` either
