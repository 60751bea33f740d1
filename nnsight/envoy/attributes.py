"""Attributes of envoys that need more than a look at the module."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ..tracing.errors import did_you_mean

if TYPE_CHECKING:
    from .envoy import Envoy


def _device(module: torch.nn.Module) -> torch.device | None:
    """Return where the first parameter is, or the first buffer; None without any."""
    return next((tensor.device for tensors in (module.parameters(), module.buffers()) for tensor in tensors), None)


def _devices(module: torch.nn.Module) -> set[torch.device]:
    """Return where the parameters are, or, without any, the buffers."""
    return {parameter.device for parameter in module.parameters()} or {buffer.device for buffer in module.buffers()}


#: Attributes of envoys whose modules have none of that name.
DERIVED: dict[str, Callable[[torch.nn.Module], Any]] = {"device": _device, "devices": _devices}


def with_child_named(base: type[Envoy], name: str) -> type[Envoy]:
    """Return ``base`` with its attribute ``name`` moved to ``nns_<name>``, to make room for a child module."""
    moved = getattr(base, name)
    warnings.warn(
        f"A child module is called `{name}`, as is an attribute of envoys: `.{name}` is the child, `.nns_{name}` the attribute.",
        UserWarning,
        stacklevel=2,
    )

    def child(self: Envoy) -> Envoy:
        return self._children[name]

    namespace = {name: property(child), f"nns_{name}": moved, "__module__": base.__module__, "_moved": name}
    return type(base.__name__, (base,), namespace)


def unknown_attribute(envoy: Envoy, name: str) -> str:
    """Return the message about an attribute that an envoy does not have: similar names, and the children."""
    candidates = [*envoy._children, *(key for key in dir(type(envoy)) if not key.startswith("_"))]
    hint = did_you_mean(name, candidates)
    children = ", ".join(list(envoy._children)[:8]) + (", …" if len(envoy._children) > 8 else "")
    inside = f" Its child modules: {children}." if children else ""
    return f"`{envoy._path}` ({type(envoy._module).__name__}) has no attribute `{name}`.{hint}{inside}"
