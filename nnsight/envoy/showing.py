"""Further names and described properties in the output of ``print(model)``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..runtime.modules.eproperty import described

if TYPE_CHECKING:
    from .envoy import Envoy


def shown(envoy: Envoy, base: type[Envoy]) -> torch.nn.Module:
    """Return a copy of the module for ``repr``, extended by the names and properties of its envoy. Properties of ``base`` are left out."""
    module = envoy._module
    stand_in: torch.nn.Module = object.__new__(type(module))
    names: dict[str, list[str]] = {name: [name] for name in envoy._children}
    added = [f"{name}: {description}" for name, description in described(type(envoy), base).items()]
    for alias in sorted(envoy._aliases, reverse=True):
        target = envoy.__dict__[alias]
        own_name = next((name for name, child in envoy._children.items() if child is target), None)
        if own_name is None:
            added.append(f"({alias}) -> {target._path.removeprefix(envoy._path).removeprefix('.')}")
        else:
            names[own_name].insert(0, alias)
    children = {
        "/".join(names.get(name, [name])): shown(envoy._children[name], base) if name in names else child
        for name, child in module._modules.items()
    }
    stand_in.__dict__.update(module.__dict__, _modules=children)
    if added:
        own = module.extra_repr()
        stand_in.__dict__["extra_repr"] = lambda: "\n".join([own, *added] if own else added)
    return stand_in
