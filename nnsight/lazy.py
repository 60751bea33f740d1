"""Lazy submodules: attributes of a package that are imported on first use.

Python makes a module an attribute of its package only when something imports the module. With :func:`submodules`, the attribute access
imports it, so ``nnsight.intervention.interleaver.OutOfOrderError`` works after ``import nnsight``, and that import stays fast.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterable
from importlib import import_module
from types import ModuleType


def load(package: str, name: str, home: str) -> ModuleType:
    """Import the module ``home`` of ``package``, for its attribute ``name``.

    Raises:
        ImportError: If the import fails. An ``AttributeError`` is converted, because Python would report it as a missing attribute.
    """
    try:
        return import_module(home, package)
    except AttributeError as error:
        raise ImportError(f"`{package}.{name}` could not be imported from `{package}{home}`: {error}") from error


def submodules(package: str, path: Iterable[str]) -> tuple[Callable[[str], ModuleType], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` for a package with this ``__name__`` and ``__path__``: they offer its submodules."""
    names = [module.name for module in pkgutil.iter_modules(path) if not module.name.startswith("_")]

    def find(name: str) -> ModuleType:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return load(package, name, f".{name}")

    def listed() -> list[str]:
        return sorted({*vars(import_module(package)), *names})

    return find, listed
