"""Backends of ``torch.compile``, by the arguments that a user gives to it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from . import backward

#: Compiles ``(graph module, example inputs)`` to a callable, as a backend of ``torch.compile`` does.
BackendCallable = Callable[[torch.fx.GraphModule, list[Any]], Callable[..., Any]]


def resolve_backend(
    backend: Any = "inductor",
    mode: str | None = None,
    options: dict[str, Any] | None = None,
    dynamic: bool | None = None,
) -> BackendCallable:
    """Return the callable that ``torch.compile`` would use for these arguments."""
    if backend == "inductor":
        return _Inductor(mode, options, dynamic)
    return torch._TorchCompileWrapper(backend, mode, options, dynamic)


class _Inductor(torch._TorchCompileInductorWrapper):
    """Inductor with the options of ``torch.compile``; it lowers backward passes when they first run."""

    def __call__(self, model_: torch.fx.GraphModule, inputs_: list[Any], **_: Any) -> Callable[..., Any]:
        return backward.lower(model_, inputs_, self.config)


def without_fusion(backend: BackendCallable) -> BackendCallable:
    """Return ``backend`` with each operation in a kernel of its own if it is Inductor, for a graph that edits memory its inputs share.

    Such an edit becomes a copy into a part of a buffer. Inductor may fuse it with a read of other parts of that buffer, and then values
    and gradients are wrong (pytorch/pytorch issue 198270).
    """
    if not isinstance(backend, _Inductor):
        return backend
    unfused = copy.copy(backend)
    unfused.config = {**backend.config, "max_fusion_size": 1}
    return unfused


def backend_name(backend: BackendCallable) -> str:
    """Return how a user calls ``backend``."""
    name = getattr(backend, "compiler_name", None) or getattr(backend, "__name__", None)
    return str(name or type(backend).__name__)
