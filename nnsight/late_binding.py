"""Functions of upper layers that lower layers call.

A layer imports only from layers below it, even inside functions. Sometimes a lower layer needs a function of a layer above it:
``model.trace(..., remote=True)`` needs a backend of :mod:`nnsight.remote`. It then looks the function up by name here. The package itself
registers the names and their modules. A module is imported when one of its functions is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_modules: dict[str, str] = {}


def provide(**modules: str) -> None:
    """Register the module of each of these functions: ``provide(component_of="nnsight.modeling.component")``."""
    _modules.update(modules)


def late(name: str) -> Any:
    """Return the registered function with this name; imports its module on first use."""
    return getattr(import_module(_modules[name]), name)


def load(name: str) -> None:
    """Import the module of a function. Dynamo makes this call while it traces it, so the import can register functions with dynamo."""
    import_module(_modules[name])


load._dynamo_marked_constant = True  # type: ignore[attr-defined]  # like `torch._dynamo.assume_constant_result`, without importing dynamo
