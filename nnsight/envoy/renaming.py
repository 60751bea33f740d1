"""Further names of modules, as ``rename=`` gives them.

| key | names |
|---|---|
| ``"mlp"``, ``"transformer.h"`` | what the path leads to, from each module from which it leads anywhere |
| ``".transformer.h"`` | the same, from the root only if it leads anywhere from there |
| ``"*.blocks"`` | a ``*`` is any one child; one match for each module from which it starts |
| a class of modules | the one child of that class, of each module that has one |

A value is a name or a list of names, for the module from which the key starts. One that begins with a dot is for the root, and the part
before the last dot of ``"ffn.down"`` says how far to go along the key: ``{"ffn.w2": "ffn.down"}`` names a child of ``ffn``. Keys that
lead nowhere are skipped, so that one dict serves several architectures. Keys may go through the names that other keys give.
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
    """Raise a ``TypeError`` unless ``names`` can be given as ``rename=``."""
    if not isinstance(names, Mapping) or not all(isinstance(key, str) or _is_class(key) for key in names):
        raise TypeError(
            f"rename= is a dict from path, or class of modules, to new name, as in {{'transformer.h': 'layers'}}, not {names!r}."
        )


def add_names(root: Envoy, names: Mapping[Any, str | Sequence[str]], warn: bool = True) -> None:
    """Give the modules below ``root`` further names; with ``warn``, warn if none of the keys leads anywhere.

    Raises:
        TypeError: If a new name is none.
        ValueError: If a name is taken, or a key has several matches of which it can name one.
    """
    known, met = _by_module(root), False
    named = -1
    while named != (now := sum(len(envoy._aliases) for envoy in known.values())):  # keys may go through names of other keys
        named = now
        met = _add_once(root, names, known)
    if names and warn and not met:
        keys = ", ".join(f"`{_shown(key)}`" for key in names)
        warnings.warn(f"rename: there is no module {keys} below `{root._path}`, so it has no effect.", UserWarning, stacklevel=2)


def _add_once(root: Envoy, names: Mapping[Any, str | Sequence[str]], known: dict[torch.nn.Module, Envoy]) -> bool:
    """Give the further names that the keys lead to now; return whether there are any."""
    met = False
    for key, given in names.items():
        new_names = [given] if isinstance(given, str) else given
        if not isinstance(new_names, Sequence) or not all(isinstance(name, str) for name in new_names):
            raise TypeError(f"rename: the new name of `{_shown(key)}` is a string or a list of strings, not {given!r}.")
        for start, trail in _matches(root, key, known):
            met = True
            for name in new_names:
                *prefix, last = name.removeprefix(".").split(".")
                if name.startswith(".") and not prefix:
                    root._add_alias(last, trail[-1])
                elif name.startswith(".") or (prefix and _parts(key)[: len(prefix)] != prefix) or len(prefix) >= len(trail):
                    raise ValueError(
                        f"rename: {name!r} is no name for `{_shown(key)}`: what is before the last dot has to be the start of the path."
                    )
                else:
                    (trail[len(prefix) - 1] if prefix else start)._add_alias(last, trail[-1])
    return met


class NamedClasses(dict[Any, type[Envoy]]):
    """Classes of envoys by type or end of path, where the path may have further names: those that ``names`` gives in ``tree``."""

    def __init__(self, classes: Mapping[Any, type[Envoy]], names: Mapping[Any, str | Sequence[str]], tree: ModuleTree) -> None:
        super().__init__(classes)
        self._names, self._tree, self._version = names, weakref.ref(tree), -1

    def paths_of(self, module: torch.nn.Module, path: str) -> list[str]:
        """Return all paths of a module, of which ``path`` is the first."""
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
    """Return ``envoys=`` so that the further names of ``rename=`` count in it."""
    if not names or not isinstance(classes, Mapping) or not any(isinstance(key, str) for key in classes):
        return classes
    return NamedClasses(classes, names, tree)


def _matches(root: Envoy, key: Any, known: dict[torch.nn.Module, Envoy]) -> Iterator[tuple[Envoy, list[Envoy]]]:
    """Yield each envoy from which ``key`` leads somewhere, with the envoys along the way."""
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
            raise ValueError(f"rename: `{_shown(key)}` has several matches below `{start._path}`, and can name one: {paths}.")
        if found:
            yield start, found[0]


def _trails(start: Envoy, parts: Sequence[str], known: dict[torch.nn.Module, Envoy]) -> list[list[Envoy]]:
    """Return the ways along ``parts`` from ``start``, each as the envoys that it leads through."""
    trails: list[list[Envoy]] = [[]]
    for part in parts:
        trails = [[*trail, child] for trail in trails for child in _step(trail[-1] if trail else start, part, known)]
    return trails


def _step(envoy: Envoy, part: str, known: dict[torch.nn.Module, Envoy]) -> list[Envoy]:
    """Return the modules that a part of a path means: by name, by further name, or by a property that returns one of the model."""
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
