"""Functions of upper layers that lower layers call.

Imports go from an upper layer to a lower one, also inside functions. If a lower layer needs a function above it, as
``model.trace(..., remote=True)`` needs a backend of :mod:`nnsight.remote`, it asks for that function by name here. The package itself
provides the names, with the module of each, which is imported when the function is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_modules: dict[str, str] = {}


def provide(**modules: str) -> None:
    """Say in which module each of these functions is: ``provide(component_of="nnsight.modeling.component")``."""
    _modules.update(modules)


def late(name: str) -> Any:
    """Return the function with this name."""
    return getattr(import_module(_modules[name]), name)


def load(name: str) -> None:
    """Import the module of a function. If dynamo traces this call, it makes it at once: the module may tell dynamo about more functions."""
    import_module(_modules[name])


load._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as `torch._dynamo.assume_constant_result`, without importing dynamo
