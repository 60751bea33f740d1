"""The mode contexts of a model and a block that take turns on one thread.

``with torch.inference_mode():`` in a block is for the block's operations, and not for the layers that the model runs before the block's
next location. So at the end of the block's turn its modes are stored and the model's are set, and at its next turn they are set again. A
block that sets no mode follows the model; only its grad mode stays the one it began with.

Settings of the program, such as ``torch.set_default_dtype`` and those of ``torch.backends``, are no modes: both share them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import is_grad_enabled, is_inference_mode_enabled
from torch._C import (
    _get_function_stack_at,
    _is_any_autocast_enabled,
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
)
from torch._C._autograd import _top_saved_tensors_default_hooks

from .mode_stacks import ModeStacks
from .modes import Autocast, autocast_of_thread, set_autocast_of_thread

#: Stores, when it is entered, all that inference mode changes, and restores it when it is left, in any order.
_Inference = torch._C._InferenceMode


class _Model(NamedTuple):
    """The modes of the model while the block has its turn; ``autocast`` is ``None`` if none is on."""

    grad: bool
    inference: bool
    autocast: Autocast | None
    stacks: ModeStacks
    remembered: Any


#: The same where there are no others: grad mode, and the number of function modes, to which the block adds its own.
_Plain = tuple[bool, int]


class ModeContexts:
    """Keeps the modes of one block apart from those of the model.

    :meth:`begin` and :meth:`end` stand around each turn of the block, on the model's side.
    """

    __slots__ = ("_autocast", "_inference", "_is_plain", "_stacks", "grad")

    def __init__(self) -> None:
        self.grad: bool | None = None  # grad mode of the block, once it has had a turn
        self._autocast: Autocast | None = None  # each of these only where it is not that of the model
        self._inference: Any = None
        self._stacks: ModeStacks | None = None
        self._is_plain = True  # none of these is there

    def begin(self) -> _Model | _Plain:
        """Give the thread the modes of the block; return those of the model."""
        if self._is_plain and _none_but_functions():
            grad = is_grad_enabled()
            if self.grad is not None and self.grad is not grad:
                _set_grad(self.grad)
            return grad, _len_torch_function_stack()
        grad, remembered = torch.is_grad_enabled(), None
        inference = torch.is_inference_mode_enabled()
        autocast = None
        if self._autocast is not None or torch._C._is_any_autocast_enabled():
            autocast = autocast_of_thread()
        stacks = ModeStacks.now()
        if self._inference is not None:
            remembered = _entered(inference)
            self._inference.__exit__(None, None, None)
            self._inference = None
            if autocast is not None:
                set_autocast_of_thread(autocast)
        if self.grad is not None and self.grad != torch.is_grad_enabled():
            _set_grad(self.grad)
        if self._autocast is not None:
            set_autocast_of_thread(self._autocast)
        if self._stacks is not None:
            self._stacks.inside(stacks).set()
            self._stacks = None  # what it has entered since will be seen at the end of the turn
        return _Model(grad, inference, autocast, stacks, remembered)

    def end(self, model: _Model | _Plain, over: bool) -> None:
        """Give the thread the modes of the model again, which :meth:`begin` has returned.

        If the block is ``over``, function and dispatch modes that it has set, and not only entered, stay set.
        """
        if not isinstance(model, _Model):
            grad, functions = model
            if _len_torch_function_stack() == functions and _none_but_functions():
                self.grad = is_grad_enabled()
                if self.grad is not grad:
                    _set_grad(grad)
                return
            model = _Model(grad, False, None, ModeStacks(tuple(map(_get_function_stack_at, range(functions)))), None)
        if not over and not model.stacks.have_their_lengths:
            self._stacks, rest = ModeStacks.now().apart_from(model.stacks)
            rest.set()
        if model.autocast is not None or torch._C._is_any_autocast_enabled():
            inner = autocast_of_thread()
            outer = model.autocast or tuple((kind, False, dtype) for kind, _, dtype in inner)
            self._autocast = None if inner == outer else inner
        else:
            inner, outer = (), None
            self._autocast = None
        self.grad = torch.is_grad_enabled()
        if torch.is_inference_mode_enabled() != model.inference:
            self._inference = _entered(model.inference)
        if model.remembered is not None:
            model.remembered.__exit__(None, None, None)
        if outer is not None and inner != outer:
            set_autocast_of_thread(outer)
        if torch.is_grad_enabled() != model.grad:
            _set_grad(model.grad)
        self._is_plain = self._autocast is None and self._inference is None and self._stacks is None


def _none_but_functions() -> bool:
    """Whether the thread has only the grad mode and function modes, as is usual; each turn asks twice, so it has to be quick."""
    return not (
        _is_any_autocast_enabled()
        or is_inference_mode_enabled()
        or _len_torch_dispatch_stack()
        or _top_saved_tensors_default_hooks(True)
    )


def _set_grad(enabled: bool) -> None:
    """Set the grad mode; no function mode is told, as it is no call of the block or the model."""
    with torch._C.DisableTorchFunction():
        torch._C._set_grad_enabled(enabled)


def _entered(inference: bool) -> Any:
    """Remember the modes of the thread, and set inference mode."""
    guard = _Inference(inference)
    guard.__enter__()
    return guard
