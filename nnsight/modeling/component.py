"""Components: modules of a wrapped model that are traced by themselves.

``with model.unet.trace(sample, timestep):`` calls only that module, with its own arguments. Its locations keep their paths in the whole
model, and ``tracer.result`` is the output of the module. A trace of a component loads the weights of the model. If the model is compiled,
the component is compiled with the same options, as a graph of its own. Regions that are equal in both graphs are lowered once.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from ..envoy.envoy import Envoy
from ..runtime.interleaver import active_interleaver
from ..runtime.modules.hook_state import HookState
from ..runtime.modules.tree import ModuleTree
from ..runtime.tracer import Driver
from ..tracing import Backend
from .base import NNsight
from .tracing import ModelTracer, session_backend

if TYPE_CHECKING:
    from ..fx.driver import CompiledDriver


class Subtree:
    """The tree ``whole`` of a model, with the module at ``path`` as its root."""

    def __init__(self, whole: ModuleTree, path: str) -> None:
        self._whole = weakref.ref(whole)
        self.path = path
        self._known: tuple[int, torch.nn.Module] | None = None
        self._version = 0
        self._seen = -1  # the version of the whole tree for which `_version` was computed
        self._modules: dict[torch.nn.Module, str] = {}
        self._attached = HookState(())

    @property
    def version(self) -> int:
        """A number that grows when the modules of this subtree, or hooks attached to them, change; other changes do not affect it."""
        seen = self.whole.version
        if seen != self._seen:
            below = f"{self.path}."
            modules = {module: path for module, path in self.whole.paths.items() if f"{path}.".startswith(below)}
            if modules != self._modules:
                self._modules, self._attached = modules, HookState(modules)
                self._version += 1
            elif self._attached.changed():
                self._version += 1
            self._seen = seen
        return self._version

    @property
    def whole(self) -> ModuleTree:
        """The tree of the model. Only the wrapper of the model keeps it alive."""
        whole = self._whole()
        if whole is None:
            raise ValueError(f"The model of `{self.path}` no longer exists: keep a reference to its wrapper.")
        return whole

    @property
    def root(self) -> torch.nn.Module:
        """The current module at the path; raises ``ValueError`` if there is none."""
        version = self.whole.version
        if self._known is None or self._known[0] != version:
            module = self.whole.module_at(self.path)
            if module is None:
                raise ValueError(
                    f"The model has no module at `{self.path}`, or no longer has one, so it cannot be traced by itself."
                )
            self._known = version, module
        return self._known[1]

    @property
    def fakes(self) -> Any:
        """The fake values at each location in the latest scan."""
        return self.whole.fakes

    @fakes.setter
    def fakes(self, seen: Any) -> None:
        self.whole.fakes = seen

    def __getattr__(self, name: str) -> Any:
        return getattr(self.whole, name)


class Component(NNsight):
    """The root envoy for traces of the module of ``envoy`` alone; :meth:`Envoy.trace` and similar methods make it."""

    _subtree: Subtree
    _followed: CompiledDriver | None

    def __init__(self, envoy: Envoy) -> None:
        self.__dict__.update(
            _subtree=Subtree(envoy._tree, envoy._path),
            _edits=[],
            _compiled_edits=None,
            _rename={},
            _compiled=None,
            _followed=None,
            _compile_by_default=False,
            _whole=lambda: None,
        )
        self._mirror_as(envoy)

    def _mirror_as(self, envoy: Envoy) -> None:
        """Copy the children and names of ``envoy``."""
        own = {name: value for name, value in envoy.__dict__.items() if name != "_component"}
        self.__dict__.update(own, _children=dict(envoy._children), _aliases=set(envoy._aliases))

    def _model(self) -> NNsight | None:
        """Return the wrapper of the model, or ``None`` if it no longer exists; only a weak reference is kept here."""
        found: NNsight | None = self.__dict__["_whole"]()
        if found is None:
            roots: list[Any] = sorted(self._tree.roots, key=lambda root: len(root._edits))
            mine = set(map(id, self._children.values()))
            has_mine = (root for root in roots if not mine.isdisjoint(map(id, Envoy.modules(root))))
            found = next(has_mine, roots[0] if roots else None)
            if found is not None:
                self.__dict__["_whole"] = weakref.ref(found)
        return found

    def _driver(self, compile: bool | str | None, function: Any = None) -> Driver:
        self._follow()
        return super()._driver(compile, function)

    def _follow(self) -> None:
        """Load the model, mirror its current module at this path, and take over its choice of driver."""
        model = self._model()
        dispatch = getattr(type(model), "dispatch", None)
        if dispatch is not None:
            dispatch(model)
        self._tree.refresh()
        module = self._subtree.root
        if module is not self._module:
            self._update(module)
        if model is not None and self._followed is not model._compiled:
            self.__dict__.update(_followed=model._compiled, _compiled=None)
        if model is not None and self._compiled is None:
            self.__dict__["_compile_by_default"] = model._compile_by_default

    def _compiled_driver(self) -> CompiledDriver:
        if self._compiled is None and self._followed is not None:
            return self._make_driver(self._followed.options)
        return super()._compiled_driver()

    def _make_driver(self, options: dict[str, Any]) -> CompiledDriver:
        from ..fx.driver import CompiledDriver

        tree: Any = self._subtree
        driver = self.__dict__["_compiled"] = CompiledDriver(tree, options)
        if self._followed is not None and self._followed.options == options:
            driver.share_regions(self._followed)
        return driver

    @property
    def _scanned(self) -> Any:
        return self._subtree

    def _tracer(
        self, function: Any, args: Any, kwargs: Any, compile: Any, backend: Any, tracer_cls: Any = None, **options: bool
    ) -> ModelTracer:
        if backend is None and session_backend.get() is not None:
            self._refuse_remote()
        return super()._tracer(function, args, kwargs, compile, backend, tracer_cls, **options)

    def _remote_backend(
        self, remote: bool | str, backend: Backend | None, blocking: bool, kwargs: dict[str, Any] | None = None
    ) -> Backend | None:
        if remote is not False:
            self._refuse_remote()
        return super()._remote_backend(remote, backend, blocking, kwargs)

    def _refuse_remote(self) -> None:
        raise ValueError(
            f"`{self._path}` is one module, and servers run only whole models: trace the model remotely, or this module in this process."
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if active_interleaver() is None:
            self._follow()
        return super().__call__(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(f"`{self._path}` is a module of a model, and cannot be copied or pickled by itself: copy or pickle the model.")


def component_of(envoy: Envoy) -> Component:
    """Return the component of ``envoy``; it is cached on the envoy."""
    envoy._tree.refresh()
    if envoy._module in envoy._tree.paths:  # otherwise the component mirrors the module that has replaced it
        envoy._sync()
    found: Component | None = envoy.__dict__.get("_component")
    if found is None or found._subtree._whole() is not envoy._tree or found._path != envoy._path:
        for root in envoy._tree.roots:
            refuse = getattr(type(root), "_refuse_component", None)
            if refuse is not None:
                refuse(root, envoy)
        made = envoy.__dict__["_component"] = Component(envoy)
        if found is not None:  # the tree was replaced, or the module has moved
            made._edits.extend(edit.of(made) for edit in found._edits)
        return made
    if found._module is not envoy._module or found._version != envoy._version:
        found._mirror_as(envoy)
    return found
