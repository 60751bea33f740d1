"""The mode contexts of a model and a block that take turns on one thread.

``with torch.inference_mode():`` in a block applies to the block's operations, and not to the layers that the model runs before the block's
next location. So at the end of the block's turn its modes are stored and the model's are set, and at its next turn its modes are set again.
A block that sets no mode follows the model. Its grad mode is that in which the model was called, such as ``no_grad`` in ``generate``. Where
the model enables gradients for derivatives of its own, the block has them, too, so that these derivatives are those of the edited values.

Settings of the process, such as ``torch.set_default_dtype`` and those of ``torch.backends``, are not modes. Model and block share them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

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

if TYPE_CHECKING:
    from ..interleaver import Interleaver

#: A guard that stores all state that inference mode changes when it is entered, and restores it at its exit. Guards need not nest.
_Inference = torch._C._InferenceMode


class _Model(NamedTuple):
    """The modes of the model while the block has its turn; ``autocast`` is ``None`` if none is on."""

    grad: bool
    inference: bool
    autocast: Autocast | None
    stacks: ModeStacks
    remembered: Any


#: The modes of a model that has only a grad mode and function modes: the grad mode, and the number of function modes.
_Plain = tuple[bool, int]


class ModeContexts:
    """Separates the modes of one block from those of the model.

    The model's greenlet calls :meth:`begin` before each turn of the block, and :meth:`end` after it.
    """

    __slots__ = ("_autocast", "_followed", "_inference", "_is_plain", "_stacks", "grad")

    def __init__(self) -> None:
        self.grad: bool | None = None  # the grad mode that the block has set; `None` if it follows the model
        self._followed = False  # the grad mode that the block had last without setting one: when it sets this one again, it has set none
        self._autocast: Autocast | None = None  # this and the next two: the block's modes, `None` if they equal those of the model
        self._inference: Any = None
        self._stacks: ModeStacks | None = None
        self._is_plain = True  # whether all three are `None`

    def begin(self, run: Interleaver | None) -> _Model | _Plain:
        """Set the modes of the block in ``run`` on the thread; return those of the model."""
        called = None if run is None else run.grad
        if self._is_plain and _none_but_functions():
            grad = is_grad_enabled()
            self._set_grad(grad or bool(called))
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
        self._set_grad(grad or bool(called))
        if self._autocast is not None:
            set_autocast_of_thread(self._autocast)
        if self._stacks is not None:
            self._stacks.inside(stacks).set()
            self._stacks = None  # `end` reads the block's stacks again
        return _Model(grad, inference, autocast, stacks, remembered)

    def end(self, model: _Model | _Plain, over: bool) -> None:
        """Store the modes of the block, and set those of the model again, which :meth:`begin` has returned.

        If the block is ``over``, function and dispatch modes that are still on stay on, such as that of ``torch.set_default_device``.
        """
        if not isinstance(model, _Model):
            grad, functions = model
            if _len_torch_function_stack() == functions and _none_but_functions():
                self._store_grad()
                if is_grad_enabled() is not grad:
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
        self._store_grad()
        if torch.is_inference_mode_enabled() != model.inference:
            self._inference = _entered(model.inference)
        if model.remembered is not None:
            model.remembered.__exit__(None, None, None)
        if outer is not None and inner != outer:
            set_autocast_of_thread(outer)
        if torch.is_grad_enabled() != model.grad:
            _set_grad(model.grad)
        self._is_plain = self._autocast is None and self._inference is None and self._stacks is None

    def _set_grad(self, followed: bool) -> None:
        """Set the grad mode of the block, which is ``followed`` if it has set none."""
        if self.grad is None:
            self._followed = followed
        if self.grad_now is not is_grad_enabled():
            _set_grad(self.grad_now)

    def _store_grad(self) -> None:
        grad = is_grad_enabled()
        self.grad = None if grad is self._followed else grad

    @property
    def grad_now(self) -> bool:
        """The grad mode of the block, now or at the end of its last turn."""
        return self._followed if self.grad is None else self.grad


def _none_but_functions() -> bool:
    """Whether the thread has only the grad mode and function modes, as is usual. It must be fast: each turn calls it twice."""
    return not (
        _is_any_autocast_enabled()
        or is_inference_mode_enabled()
        or _len_torch_dispatch_stack()
        or _top_saved_tensors_default_hooks(True)
    )


def _set_grad(enabled: bool) -> None:
    """Set the grad mode. Function modes do not see it, because neither the block nor the model has made this call."""
    with torch._C.DisableTorchFunction():
        torch._C._set_grad_enabled(enabled)


def _entered(inference: bool) -> Any:
    """Store the modes of the thread, and switch inference mode on or off; return the guard that restores them at its exit."""
    guard = _Inference(inference)
    guard.__enter__()
    return guard
