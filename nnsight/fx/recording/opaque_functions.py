"""Makes two kinds of functions visible to a recording: compiled functions and ``torch.autograd.Function``.

``__torch_function__`` does not see the calls that these functions make on a lazy tensor:

* Dynamo would trace a function that the user has compiled with ``torch.compile``. It runs as Python instead, so that its calls become
  part of the graph.
* Torch calls the ``forward`` of a ``torch.autograd.Function`` from C++. To autograd, the function is one operation with its own
  ``backward``. Since torch 2.14, ``apply`` itself is C++, so it cannot be replaced where user code refers to it. But each call of it
  reads three attributes of the class: ``_backward_cls``, ``forward`` and ``setup_context``, in this order.

For neither does torch have a public hook for a single thread. So while any recording is active (:data:`shown`), dynamo's choice of a
callback and the attribute look-up of these classes are replaced for all threads. Calls outside of a recording are not affected.
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
        """Return dynamo's callback for the frames of a compiled function; ``None`` runs them as Python."""
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


#: The change that makes both kinds visible; each recording enters it while it is active.
made_visible = SharedChange(_replace, _put_back)


def _is_recording() -> bool:
    if not torch._C._len_torch_function_stack():
        return False
    return any(isinstance(mode, CallRecorder) for mode in torch.overrides._get_current_function_mode_stack())


def _attribute(cls: Any, name: str) -> Any:
    """Look up an attribute of a ``torch.autograd.Function``. Inside ``apply``, return a replacement that the recording can see."""
    found = type.__getattribute__(cls, name)
    if name not in ("_backward_cls", "setup_context", "forward"):
        return found
    caller = sys._getframe(1)
    place = (id(cls), id(caller), caller.f_lasti)  # the C++ code reads all attributes within one Python instruction
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
    """A call of ``Function.apply``. Its C++ code disables gradients before it reads ``forward``, so ``grad_enabled`` is kept here."""

    place: tuple[int, int, int]
    grad_enabled: bool
    is_recorded: bool = False

    def run(self, cls: Any, forward: Any, *args: Any, **kwargs: Any) -> Any:
        """Let the recording of the first lazy argument apply the function; run ``forward`` if it does not, or if there is none."""
        _calls.last = None
        given = args[1:] if cls.setup_context is _base_setup_context else args
        recording = next((argument._recording for argument in given if isinstance(argument, LazyTensor)), None)
        if recording is not None:
            with torch.set_grad_enabled(self.grad_enabled):
                self.is_recorded, result = recording.apply(cls.apply, given, kwargs)
                if self.is_recorded:
                    _calls.last = self
                    return tuple(map(_with_gradient, result)) if isinstance(result, tuple) else _with_gradient(result)
        return forward(*args, **kwargs)


def _no_context(ctx: Any, inputs: Any, output: Any) -> None:
    """Replaces ``setup_context`` after the recording has applied the function."""


def _with_gradient(result: Any) -> Any:
    """Return a view of a tensor that requires a gradient: the C++ code would detach the tensor itself, because it saw no gradients."""
    if isinstance(result, torch.Tensor) and result.requires_grad and not result._is_view():
        return result.view_as(result)
    return result


#: For each thread, the call whose attributes were read last.
_calls = threading.local()

for _function in (_attribute, _Call.run):
    skip_code(_function.__code__)  # dynamo must not compile them where compiled code runs `apply` between two graphs
