"""The stacks that torch keeps for each thread: function modes (such as ``torch.device``), dispatch modes, hooks of saved tensors.

A model and its blocks share a thread. If a block waits inside ``with torch.device("cuda"):``, its mode is popped for the model's turn and
pushed again for the block's next turn.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch._C import (
    _get_dispatch_stack_at,
    _get_function_stack_at,
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
    _pop_torch_dispatch_stack,
    _pop_torch_function_stack,
    _push_on_torch_dispatch_stack,
    _push_on_torch_function_stack,
)
from torch._C._autograd import (
    _pop_saved_tensors_default_hooks,
    _push_saved_tensors_default_hooks,
    _top_saved_tensors_default_hooks,
)
from torch.utils._device import DeviceContext


def unseen(subclasses: bool) -> contextlib.AbstractContextManager[Any]:
    """Hide the calls of a graph from function modes, and from the ``__torch_function__`` of tensor subclasses.

    Subclasses see the calls nevertheless if ``subclasses`` is true and dynamo has not disabled torch functions.
    """
    if subclasses and torch._C._is_torch_function_enabled():
        return without_function_modes()
    return torch._C.DisableTorchFunction()


@contextlib.contextmanager
def without_function_modes() -> Iterator[None]:
    """Hide calls from function modes."""
    with contextlib.ExitStack() as stack:
        for _ in range(_len_torch_function_stack()):
            stack.enter_context(torch.overrides._pop_mode_temporarily())
        yield


def default_devices() -> tuple[torch.device, ...] | None:
    """Return the devices of ``torch.device`` contexts and ``torch.set_default_device``; ``None`` if another function mode is on."""
    count = _len_torch_function_stack()
    modes = [_get_function_stack_at(index) for index in range(count)] if count else []
    return tuple(mode.device for mode in modes) if all(type(mode) is DeviceContext for mode in modes) else None


class ModeStacks(NamedTuple):
    """The stacks of a thread at one time. The innermost mode is the last item."""

    functions: tuple[Any, ...] = ()  # modes that see torch functions
    dispatch: tuple[Any, ...] = ()  # modes that see operators
    hooks: tuple[Any, ...] = ()  # pairs of saved-tensor hooks, `(pack, unpack)`

    @staticmethod
    def now() -> ModeStacks:
        """Return the stacks of the current thread."""
        functions, dispatch = _len_torch_function_stack(), _len_torch_dispatch_stack()
        if not functions and not dispatch and _top_saved_tensors_default_hooks(True) is None:
            return NO_MODES
        return ModeStacks(
            tuple(map(_get_function_stack_at, range(functions))),
            tuple(map(_get_dispatch_stack_at, range(dispatch))),
            _saved_tensor_hooks(),
        )

    @property
    def have_their_lengths(self) -> bool:
        """Whether the current thread has as many modes as these stacks. A block only pushes and pops modes on top of them."""
        return _len_torch_function_stack() == len(self.functions) and self.why_not_lowerable is None

    @property
    def why_not_lowerable(self) -> str | None:
        """The reason why calls of the current thread cannot be recorded for a graph that runs with these stacks; ``None`` if they can."""
        if _len_torch_dispatch_stack() != len(self.dispatch):
            return "a TorchDispatchMode is on in the block"
        if _top_saved_tensors_default_hooks(True) != (self.hooks[-1] if self.hooks else None):
            return "hooks for saved tensors are set in the block"
        return None

    def apart_from(self, others: ModeStacks) -> tuple[ModeStacks, ModeStacks]:
        """Split these stacks into the modes that were entered inside of ``others``, and the rest.

        The mode of ``torch.set_default_device`` belongs to the rest, because it is a setting of the process.
        """
        known = (*others.functions, getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None))
        functions = _split(self.functions, known)
        dispatch = _split(self.dispatch, others.dispatch)
        count = len(others.hooks)
        own = ModeStacks(functions[0], dispatch[0], self.hooks[count:])
        return own, ModeStacks(functions[1], dispatch[1], self.hooks[:count])

    def inside(self, others: ModeStacks) -> ModeStacks:
        """Return the stacks with these modes entered inside of ``others``."""
        return ModeStacks(*(outer + own for own, outer in zip(self, others, strict=True)))

    def set(self) -> None:
        """Replace the stacks of the current thread by these."""
        for _ in range(_len_torch_function_stack()):
            _pop_torch_function_stack()
        for mode in self.functions:
            _push_on_torch_function_stack(mode)
        for _ in range(_len_torch_dispatch_stack()):
            _pop_torch_dispatch_stack(None)
        for mode in self.dispatch:
            _push_on_torch_dispatch_stack(mode)
        _pop_hooks()
        for pack, unpack in self.hooks:
            _push_saved_tensors_default_hooks(pack, unpack)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Replace the stacks of the current thread by these in this context."""
        if self.have_their_lengths:
            yield
            return
        before = ModeStacks.now()
        self.set()
        try:
            yield
        finally:
            before.set()


NO_MODES = ModeStacks()


def _split(modes: Sequence[Any], known: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Split ``modes`` into those that are not in ``known``, and those that are. Modes are compared by identity."""
    found = [any(mode is other for other in known) for mode in modes]
    new = tuple(mode for mode, is_known in zip(modes, found, strict=True) if not is_known)
    return new, tuple(mode for mode, is_known in zip(modes, found, strict=True) if is_known)


def _pop_hooks() -> list[Any]:
    """Pop all hooks of saved tensors; return them, the innermost first."""
    found = []
    while (top := _top_saved_tensors_default_hooks(True)) is not None:
        found.append(top)
        _pop_saved_tensors_default_hooks()
    return found


def _saved_tensor_hooks() -> tuple[Any, ...]:
    found = tuple(reversed(_pop_hooks()))  # torch gives access to the innermost hooks only
    for pack, unpack in found:
        _push_saved_tensors_default_hooks(pack, unpack)
    return found
