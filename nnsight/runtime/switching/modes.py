"""Modes of a thread that change what an operation does: grad mode, inference mode, autocast."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .mode_stacks import default_devices

#: For each kind of device: its name, whether autocast is on, and the autocast dtype.
Autocast = tuple[tuple[str, bool, torch.dtype], ...]


def _kinds() -> list[str]:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return ["cpu"] if accelerator is None else ["cpu", accelerator.type]


def autocast_of_thread() -> Autocast:
    """Return the autocast of the current thread."""
    return tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _kinds())


def set_autocast_of_thread(autocast: Autocast) -> None:
    """Set the autocast of the current thread."""
    for kind, enabled, dtype in autocast:
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)


def thread_state() -> tuple[Any, ...]:
    """Return the state of the current thread on which calls depend, except for the modes on stacks."""
    level = torch._C._functorch.maybe_current_level()
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    return (*modes, autocast_of_thread(), torch.is_autocast_cache_enabled(), level)


def process_state() -> tuple[Any, ...]:
    """Return the state of the process on which lowerings depend. Dynamo has guards on the same state."""
    return (
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_num_threads(),
        torch.get_float32_matmul_precision(),
    )


def replay_state() -> tuple[Any, ...] | None:
    """Return the state that, with the arguments and the graph, determines a replay; ``None`` if a function mode sees the calls."""
    devices = default_devices()
    if devices is None:
        return None
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch._C._is_any_autocast_enabled()
    return (torch.get_default_dtype(), devices, *modes)


def _autocast_now() -> tuple[Any, ...]:
    """Return whether the autocast cache is on, then the kind of device and the dtype of each autocast that is on; ``()`` if none is on."""
    if not torch._C._is_any_autocast_enabled():
        return ()
    enabled = [(kind, dtype) for kind, is_on, dtype in autocast_of_thread() if is_on]
    return (torch.is_autocast_cache_enabled(), *enabled)


@dataclass(frozen=True)
class Modes:
    """The modes of a thread at one time."""

    grad: bool  # whether gradients are enabled
    inference: bool  # whether inference mode is on
    autocast: tuple[Any, ...]  # the result of `_autocast_now`
    dispatch: tuple[Any, Any]  # the dispatch keys that are included in and excluded from each call
    subclasses: bool  # whether tensor subclasses see calls; dynamo hides the calls that are already in a graph

    @staticmethod
    def now() -> Modes:
        """Return the modes of the current thread."""
        dispatch = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
        subclasses = torch._C._is_torch_function_enabled() or torch._C._is_torch_function_all_disabled()
        return Modes(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), _autocast_now(), dispatch, subclasses)

    def keys(self) -> contextlib.AbstractContextManager[None]:
        """Dispatch calls with the dispatch keys of these modes, even inside an operator, where torch excludes the keys already handled."""
        return torch._C._ForceDispatchKeyGuard(*self.dispatch)

    @property
    def hold(self) -> bool:
        """Whether the current thread has these modes."""
        return (
            torch.is_grad_enabled() == self.grad
            and torch.is_inference_mode_enabled() == self.inference
            and self.autocast_holds
            and (self.subclasses or not torch._C._is_torch_function_enabled())
        )

    @property
    def autocast_holds(self) -> bool:
        """Whether the current thread has the autocast of these modes."""
        if not self.autocast:
            return not torch._C._is_any_autocast_enabled()
        return _autocast_now() == self.autocast

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Set these modes on the current thread in this context."""
        with contextlib.ExitStack() as stack:
            if torch.is_inference_mode_enabled() != self.inference:
                stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            if not self.autocast_holds:
                for kind, _ in _autocast_now()[1:]:
                    stack.enter_context(torch.autocast(kind, enabled=False))
                for kind, dtype in self.autocast[1:]:
                    stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=self.autocast[0]))
            stack.enter_context(self.keys())
            if not self.subclasses:
                stack.enter_context(torch._C.DisableTorchFunctionSubclass())
            yield

    def of_a_block(self) -> contextlib.AbstractContextManager[None]:
        """Let tensor subclasses see the calls of a block that is resumed inside a graph with these modes."""
        return contextlib.nullcontext() if self.subclasses else torch._C._EnableTorchFunction()
