"""What torch keeps for each thread, and for the process, that decides what a call does or how a graph is lowered."""

from __future__ import annotations

from typing import Any

import torch


def thread_state() -> tuple[Any, ...]:
    """What calls on this thread depend on."""
    kinds = {"cpu", torch._C._get_accelerator().type if torch.accelerator.is_available() else "cpu"}
    autocast = tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in sorted(kinds))
    level = torch._C._functorch.maybe_current_level()
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        autocast,
        torch.is_autocast_cache_enabled(),
        level,
    )


def process_state() -> tuple[Any, ...]:
    """What lowerings depend on besides; dynamo's guards name the same."""
    return (
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_num_threads(),
        torch.get_float32_matmul_precision(),
    )
