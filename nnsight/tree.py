"""The modules of one wrapped model, by path, and what a run needs of them.

All envoys of a model share one :class:`ModuleTree`. It holds modules and never envoys, so an envoy tree is free of
reference cycles and goes away with its last user. The tree notices when somebody replaces, adds or removes a
submodule after wrapping, so that a run never intercepts modules that are no longer part of the model.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch

from .runtime.instrumentation import Instrumentation, TracedCall

_trees: weakref.WeakValueDictionary[int, ModuleTree] = weakref.WeakValueDictionary()


class ModuleTree:
    """Paths of the modules below ``root``.

    A module that is reachable by several paths has one location, that of the first path.

    Args:
        root: The wrapped module.
        path: Prefix of all locations.
        traced_call: What intercepted calls do while dynamo traces them.

    Attributes:
        paths: Path of each module.
        version: Grows whenever the modules are found to have changed.
    """

    @classmethod
    def of(cls, root: torch.nn.Module, traced_call: TracedCall | None = None) -> ModuleTree:
        """Return the tree of ``root`` under the path ``model``; wrapping one model twice shares it.

        Sharing lets runs of both wrappers, in several threads at once, use one interception.
        """
        found = _trees.get(id(root))
        if found is None or found.root is not root or found._traced_call is not traced_call:
            found = _trees[id(root)] = cls(root, traced_call=traced_call)
        return found

    def __init__(self, root: torch.nn.Module, path: str = "model", traced_call: TracedCall | None = None) -> None:
        self.root = root
        self.path = path
        self._traced_call = traced_call
        self.paths: dict[torch.nn.Module, str] = {}
        self.version = 0
        self._parents: list[tuple[dict[str, torch.nn.Module | None], tuple[torch.nn.Module | None, ...]]] = []
        self._leaves: list[dict[str, torch.nn.Module | None]] = []
        self._instrumentation: Instrumentation | None = None
        self._scan()

    def _scan(self) -> None:
        named = dict(self.root.named_modules())
        self.paths = {module: f"{self.path}.{name}" if name else self.path for name, module in named.items()}
        children = [module._modules for module in named.values()]
        self._parents = [(known, tuple(known.values())) for known in children if known]
        self._leaves = [known for known in children if not known]
        self.version += 1
        self._instrumentation = None

    def refresh(self) -> int:
        """Look for submodules that were added, removed or replaced; return the version of what is there now."""
        unchanged = not any(self._leaves)
        for children, known in self._parents:
            unchanged = unchanged and tuple(children.values()) == known
        if not unchanged:
            self._scan()
        return self.version

    @property
    def instrumentation(self) -> Instrumentation:
        """Interception of all calls in the tree; install it for the time of a run."""
        if self._instrumentation is None:
            modules = {path: module for module, path in self.paths.items()}
            self._instrumentation = Instrumentation(modules, self._traced_call)
        return self._instrumentation

    def names(self) -> Iterable[str]:
        """Yield the paths of all modules."""
        return self.paths.values()
