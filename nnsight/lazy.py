"""Modules of a package as its attributes, imported when first used.

Python binds a module in its package once somebody has imported it. A package that calls :func:`submodules` needs no import:
``nnsight.intervention.interleaver.OutOfOrderError`` works after ``import nnsight``, which stays as light as it was.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterable
from importlib import import_module
from types import ModuleType


def load(package: str, name: str, home: str) -> ModuleType:
    """Import the module ``home`` of ``package``, for its attribute ``name``.

    Raises:
        ImportError: If the import fails, also where it fails with an ``AttributeError``: to Python, one from here means that there
            is no such name, and it drops the cause.
    """
    try:
        return import_module(home, package)
    except AttributeError as error:
        raise ImportError(f"`{package}.{name}` could not be imported from `{package}{home}`: {error}") from error


def submodules(package: str, path: Iterable[str]) -> tuple[Callable[[str], ModuleType], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package whose modules are its attributes.

    Args:
        package: Its ``__name__``.
        path: Its ``__path__``.

    Example:
        >>> __getattr__, __dir__ = submodules(__name__, __path__)
    """
    names = [module.name for module in pkgutil.iter_modules(path) if not module.name.startswith("_")]

    def find(name: str) -> ModuleType:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return load(package, name, f".{name}")

    def listed() -> list[str]:
        return sorted({*vars(import_module(package)), *names})

    return find, listed
