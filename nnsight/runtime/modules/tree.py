"""The module tree of a wrapped model: the paths of its modules, their interception, and their opened functions.

All envoys of a model share one :class:`ModuleTree`. It refers to envoys weakly, so there are no reference cycles, and envoys are freed with
their last user. The tree detects submodules that were replaced, added or removed after wrapping, so that runs intercept the present modules
of the model.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from ..interleaver import Interleaver
from .hook_state import HookState
from .interception import Instrumentation, TracedCall
from .listing import Operation, SourceError, listing_of, no_operation
from .mentions import Chains
from .operations import Operations, forward_of, layers_of, resolved_callee

if TYPE_CHECKING:
    from ...envoy.envoy import Envoy

_trees: weakref.WeakValueDictionary[int, ModuleTree] = weakref.WeakValueDictionary()


class ModuleTree:
    """The modules of ``root``, itself included, with their paths.

    A module that is reachable by several paths has the locations of the first path only.

    Args:
        root: The wrapped module.
        path: Prefix of all locations.
        traced_call: Makes intercepted calls while dynamo traces them, see :func:`.intercepted`.
    """

    @classmethod
    def of(cls, root: torch.nn.Module, traced_call: TracedCall | None = None, path: str = "model") -> ModuleTree:
        """Return the tree of ``root`` with the prefix ``path``. All wrappers of one model with the same arguments share one tree."""
        found = _trees.get(id(root))
        if found is None or found.root is not root or found._traced_call is not traced_call or found.path != path:
            found = _trees[id(root)] = cls(root, path, traced_call)
        return found

    @classmethod
    def with_module(cls, module: torch.nn.Module) -> ModuleTree | None:
        """Return the tree of a wrapped model that contains ``module``, or None."""
        return next((tree for tree in list(_trees.values()) if module in tree.paths), None)

    def __init__(self, root: torch.nn.Module, path: str = "model", traced_call: TracedCall | None = None) -> None:
        self.root = root
        self.path = path
        self._traced_call = traced_call
        self._operations = Operations(traced_call)
        self._mentioned: set[tuple[int, Chains]] = set()
        self._opening = threading.RLock()
        self.paths: dict[torch.nn.Module, str] = {}
        self._attribute_modules: list[tuple[torch.nn.Module, str]] = []  # owner and name of modules that are no children
        self.version = 0  # grows when a change of the modules, their hooks or their `forward` is detected
        self._parents: list[tuple[dict[str, torch.nn.Module | None], tuple[tuple[str, torch.nn.Module | None], ...]]] = []
        self._leaves: list[dict[str, torch.nn.Module | None]] = []
        self._instrumentation: Instrumentation | None = None
        #: All interceptions in use, with their modules: those of the tree, or copies.
        self._interceptions: weakref.WeakKeyDictionary[Instrumentation, Mapping[str, torch.nn.Module]] = weakref.WeakKeyDictionary()
        self.roots: weakref.WeakSet[Envoy] = weakref.WeakSet()  # the root envoys
        self.fakes: Mapping[str, Any] = {}  # the values at each location in the latest scan, with fake tensors, which use no memory
        self._scan()

    def _scan(self) -> None:
        named = dict(self.root.named_modules())
        for owner, name in self._attribute_modules:
            module, path = getattr(owner, name, None), next((path for path, known in named.items() if known is owner), None)
            if isinstance(module, torch.nn.Module) and path is not None:
                found = module.named_modules(prefix=f"{path}.{name}".removeprefix("."))
                known = set(named.values())
                named.update((below, part) for below, part in found if part not in known)
        self.paths = {module: f"{self.path}.{name}" if name else self.path for name, module in named.items()}
        children = [module._modules for module in named.values()]
        self._parents = [(known, tuple(known.items())) for known in children if known]
        self._leaves = [known for known in children if not known]
        self._attached = HookState(named.values())
        self.version += 1
        self._instrumentation = None

    def add_module(self, owner: torch.nn.Module, name: str) -> None:
        """Add a module that is the attribute ``name`` of ``owner`` and not a child, with its submodules. Active runs intercept them too."""
        running, before = self._instrumentation, set(self.paths)
        self._attribute_modules.append((owner, name))
        self._scan()
        if running is not None:
            running.include({path: module for module, path in self.paths.items() if module not in before})
            self._instrumentation = running

    def replace_root(self, root: torch.nn.Module) -> list[Envoy]:
        """Make ``root`` the root of the tree; return the root envoys, which must be updated."""
        if _trees.get(id(self.root)) is self:
            _trees[id(root)] = _trees.pop(id(self.root))
        self.root, self._attribute_modules = root, []
        self._scan()
        return list(self.roots)

    def refresh(self) -> int:
        """Detect submodules and hooks that were added, removed or replaced since the last call; return the present :attr:`version`."""
        if any(self._leaves) or any(tuple(children.items()) != known for children, known in self._parents):
            self._scan()
        elif self._attached.changed():
            self.version += 1
        return self.version

    @property
    def instrumentation(self) -> Instrumentation:
        """The interception of all calls in the tree, a context manager for the time of a run."""
        if self._instrumentation is None:
            self._instrumentation = self.intercept({path: module for module, path in self.paths.items()})
        return self._instrumentation

    def intercept(self, modules: Mapping[str, torch.nn.Module]) -> Instrumentation:
        """Return the interception of all calls of ``modules``, by path: the modules of the tree, or copies of them."""
        made = Instrumentation(modules, self._traced_call)
        with self._opening:
            self._interceptions[made] = modules
        for path in self._operations.opened & modules.keys():
            self._replace_forward(made, path, modules[path])
        return made

    # -- operations ------------------------------------------------------------------------------------------------

    def open_source(self, path: str, run: Interleaver | None = None) -> None:
        """Let runs stop at the operations of the function at ``path``, including ``run``, the active run whose block asks for them."""
        with self._opening:  # another thread that opens the same function continues when it is installed
            self._open_source(path, run)

    def _open_source(self, path: str, run: Interleaver | None) -> None:
        if not self._operations.open(path):
            return
        outermost = path.partition(".source.")[0]
        module = self.module_at(outermost)
        if module is None:
            return
        if outermost != path:
            self._operations.open(outermost)
        for made, modules in [*self._interceptions.items()]:
            if outermost in modules:
                self._replace_forward(made, outermost, modules[outermost])
        if run is not None and run.counts.get(f"{path}.input", 0):
            run.uncounted.add(path)

    @property
    def refused(self) -> Mapping[str, str]:
        """The reasons why functions that operations called could not be opened, by the path of the operation."""
        return self._operations.refused

    def called_at(self, path: str) -> Any:
        """Return the function that the operation at ``path`` last called while it was open; ``None`` without such a call."""
        return self._operations.called.get(path)

    def unknown_operation(self, location: str) -> str | None:
        """Return an error message if ``location`` belongs to an operation that the called function does not have; otherwise ``None``."""
        path, found, name = location.rpartition(".source.")
        called = self.called_at(path) if found else None
        if called is None:
            return None
        listing = listing_of(layers_of(called, f"`{path}`")[-1])
        name = name.rpartition(".")[0]
        return None if listing.aliases.get(name, name) in listing.operations else no_operation(path, name, listing)

    @property
    def opened(self) -> int:
        """The number of opened functions; it never decreases."""
        return len(self._operations.opened)

    @property
    def sources(self) -> frozenset[str]:
        """The paths of the opened functions."""
        return frozenset(self._operations.opened)

    def open_mentioned(self, chains: Chains) -> None:
        """Let runs stop at all operations that ``chains`` may mention: the operations with these names, in any module."""
        known = self.version, chains
        if known in self._mentioned:
            return
        for module, path in list(self.paths.items()):
            try:
                listing = listing_of(layers_of(forward_of(module)[1], path)[-1])
            except SourceError:
                continue
            for chain in chains:
                operation = listing.operations.get(listing.aliases.get(chain[0], chain[0]))
                if operation is None:
                    continue
                self.open_source(path)
                inside = f"{path}.source.{operation.name}"
                if len(chain) > 1 and operation.callee is not None and _may_be_opened(self.callee(path, operation), inside):
                    for name in chain[1:]:
                        self.open_source(inside)
                        inside = f"{inside}.source.{name}"
        self._mentioned.add(known)  # last, because another thread that finds it here skips the work

    def callee(self, path: str, operation: Operation) -> Any:
        """Return the object that ``operation`` in ``forward`` of the module at ``path`` calls; ``None`` if it is known only in a run."""
        module = self.module_at(path)
        return None if module is None else resolved_callee(operation, module, layers_of(forward_of(module)[1], path)[-1])

    def module_at(self, path: str) -> torch.nn.Module | None:
        """Return the module at ``path``, or ``None`` if there is no module."""
        return next((module for module, known in self.paths.items() if known == path), None)

    def _replace_forward(self, instrumentation: Instrumentation, path: str, module: torch.nn.Module) -> None:
        operations = self._operations  # a closure over `self` would be a reference cycle, because the tree owns the interception

        def replacement() -> tuple[dict[str, Any], str, Any]:
            name, function = forward_of(module)
            return module.__dict__, name, operations.intercept(path, function)

        instrumentation.replace(path, replacement)

    def names(self) -> Iterable[str]:
        """Return the paths of all modules."""
        return self.paths.values()


def _may_be_opened(callee: Any, path: str) -> bool:
    try:
        return callee is None or bool(listing_of(layers_of(callee, path)[-1]))
    except SourceError:
        return False
