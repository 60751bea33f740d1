"""Further names of modules: ``rename={key: name}``.

| key | renamed modules |
|---|---|
| ``"mlp"``, ``"transformer.h"`` | every module that has this path, seen from the root or from any module below it |
| ``".transformer.h"`` | the module with this path from the root; if the root has none, as without the dot |
| ``"*.blocks"`` | ``*`` stands for any one child; from each starting module, only one module may match |
| a class of modules | of each module, the only child of that class |

A value is a name or a list of names. The module from which the path starts gets the name as an attribute. A name with a leading dot becomes
an attribute of the root. A name with a path, as in ``{"ffn.w2": "ffn.down"}``, becomes an attribute of that module on the way, here of
``ffn``. Keys without a match are skipped, so one dict serves several architectures. Keys may contain names from other keys.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ..runtime.modules.tree import ModuleTree
from .envoy import Envoy, EnvoyClasses


def check_names(names: Any) -> None:
    """Raise a ``TypeError`` unless ``names`` is a valid value of ``rename=``."""
    if not isinstance(names, Mapping) or not all(isinstance(key, str) or _is_class(key) for key in names):
        raise TypeError(
            f"rename= must be a dict from paths or classes of modules to new names, as in {{'transformer.h': 'layers'}}; got {names!r}."
        )


def add_names(root: Envoy, names: Mapping[Any, str | Sequence[str]], warn: bool = True) -> None:
    """Give the modules below ``root`` the names of ``rename=``. With ``warn``, warn if no key has a match.

    Raises:
        TypeError: If a new name is not a string.
        ValueError: If a name is taken or invalid, or if a key has several matches from one module.
    """
    known, met = _by_module(root), False
    named = -1
    while named != (now := sum(len(envoy._aliases) for envoy in known.values())):  # keys may contain names from other keys
        named = now
        met = _add_once(root, names, known)
    if names and warn and not met:
        keys = ", ".join(f"`{_shown(key)}`" for key in names)
        warnings.warn(f"rename: there is no module {keys} below `{root._path}`, so it has no effect.", UserWarning, stacklevel=2)


def _add_once(root: Envoy, names: Mapping[Any, str | Sequence[str]], known: dict[torch.nn.Module, Envoy]) -> bool:
    """Add the names of all keys that have a match now. Returns whether any key has one."""
    met = False
    for key, given in names.items():
        new_names = [given] if isinstance(given, str) else given
        if not isinstance(new_names, Sequence) or not all(isinstance(name, str) for name in new_names):
            raise TypeError(f"rename: the new name of `{_shown(key)}` must be a string or a list of strings; got {given!r}.")
        for start, trail in _matches(root, key, known):
            met = True
            for name in new_names:
                *prefix, last = name.removeprefix(".").split(".")
                if name.startswith(".") and not prefix:
                    root._add_alias(last, trail[-1])
                elif name.startswith(".") or (prefix and _parts(key)[: len(prefix)] != prefix) or len(prefix) >= len(trail):
                    raise ValueError(
                        f"rename: {name!r} cannot name `{_shown(key)}`: the part before the last dot must be the beginning of the path."
                    )
                else:
                    (trail[len(prefix) - 1] if prefix else start)._add_alias(last, trail[-1])
    return met


class NamedClasses(dict[Any, type[Envoy]]):
    """Classes of envoys by type or end of path. Paths may contain the names that ``names``, the value of ``rename=``, adds to ``tree``."""

    def __init__(self, classes: Mapping[Any, type[Envoy]], names: Mapping[Any, str | Sequence[str]], tree: ModuleTree) -> None:
        super().__init__(classes)
        self._names, self._tree, self._version = names, weakref.ref(tree), -1

    def paths_of(self, module: torch.nn.Module, path: str) -> list[str]:
        """Return ``path``, followed by all paths of the module with original and further names."""
        tree = self._tree()
        if tree is not None and tree.version != self._version:
            root = Envoy(tree.root, path=tree.path)
            add_names(root, self._names, warn=False)
            self._version = tree.version
            self._paths: weakref.WeakKeyDictionary[torch.nn.Module, list[str]] = weakref.WeakKeyDictionary()
            pending = [(root, root._path)]
            while pending:
                envoy, known = pending.pop()
                self._paths.setdefault(envoy._module, []).append(known)
                pending.extend((child, f"{known}.{name}") for name, child in envoy._children.items())
                pending.extend((envoy.__dict__[name], f"{known}.{name}") for name in envoy._aliases)
        return [path, *self._paths.get(module, ())]

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


def with_names(classes: EnvoyClasses, names: Mapping[Any, str | Sequence[str]], tree: ModuleTree) -> EnvoyClasses:
    """Return ``classes``, the value of ``envoys=``, extended so that its paths may contain names of ``rename=``."""
    if not names or not isinstance(classes, Mapping) or not any(isinstance(key, str) for key in classes):
        return classes
    return NamedClasses(classes, names, tree)


def _matches(root: Envoy, key: Any, known: dict[torch.nn.Module, Envoy]) -> Iterator[tuple[Envoy, list[Envoy]]]:
    """Yield each envoy from which ``key`` has a match, with the envoys along the path. The last of these is the match."""
    starts = list(known.values())
    if isinstance(key, str) and key.startswith(".") and _trails(root, _parts(key), known):
        starts = [root]
    for start in starts:
        if isinstance(key, str):
            found = _trails(start, _parts(key), known)
        else:
            found = [[child] for child in start._children.values() if isinstance(child._module, key)]
        found = list({id(trail[-1]): trail for trail in found}.values())
        if len(found) > 1:
            paths = ", ".join(f"`{trail[-1]._path}`" for trail in found)
            raise ValueError(f"rename: `{_shown(key)}` has several matches below `{start._path}`, but can name only one: {paths}.")
        if found:
            yield start, found[0]


def _trails(start: Envoy, parts: Sequence[str], known: dict[torch.nn.Module, Envoy]) -> list[list[Envoy]]:
    """Return all matches of the path ``parts`` from ``start``, each as the list of envoys along the path."""
    trails: list[list[Envoy]] = [[]]
    for part in parts:
        trails = [[*trail, child] for trail in trails for child in _children_matching(trail[-1] if trail else start, part, known)]
    return trails


def _children_matching(envoy: Envoy, part: str, known: dict[torch.nn.Module, Envoy]) -> list[Envoy]:
    """Return the envoys that ``part`` of a path names: by child name, by further name, or by a property with a module of the model."""
    if part == "*":
        return list(envoy._children.values())
    for name in (part, part.removeprefix("E_")):
        if name in envoy._children:
            return [envoy._children[name]]
    if part in envoy._aliases:
        return [envoy.__dict__[part]]
    if not hasattr(type(envoy._module), part):
        return []
    module = getattr(envoy._module, part, None)
    return [known[module]] if isinstance(module, torch.nn.Module) and module in known else []


def _by_module(root: Envoy) -> dict[torch.nn.Module, Envoy]:
    return {envoy._module: envoy for envoy in Envoy.modules(root)}


def _is_class(key: Any) -> bool:
    return isinstance(key, type) and issubclass(key, torch.nn.Module)


def _parts(key: Any) -> list[str]:
    return key.strip(".").split(".") if isinstance(key, str) else []


def _shown(key: Any) -> str:
    return key if isinstance(key, str) else key.__name__
