"""The user's view of a module: an envoy.

An envoy mirrors one ``torch.nn.Module`` and adds the values of its calls: ``.output``, ``.input``, ``.inputs``. Child modules are envoys
under their own names. All other attributes and methods are those of the module.

If a child module has the name of an attribute of envoys (BERT has modules called ``output``), the child keeps its name, and the attribute
moves to ``nns_<name>``.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self, TypeAlias

import torch

from ..compat import Interleaver
from ..late_binding import late, load
from ..runtime.interleaver import active_interleaver
from ..runtime.modules.eproperty import described
from ..runtime.modules.interception import call_alone, is_compiling
from ..runtime.modules.located import Located
from ..runtime.modules.tree import ModuleTree
from ..runtime.uncompiled import uncompiled
from ..tracing import Backend
from ..tracing.source import calls_for_with
from .attributes import DERIVED, ends_with, entries, envoy_of_entry, iterated, unknown_attribute, with_child_named
from .showing import shown
from .source import Source, source_of

#: The argument ``envoys=``, which chooses classes for the envoys of a tree; see :class:`Envoy`.
EnvoyClasses: TypeAlias = "type[Envoy] | Mapping[type[torch.nn.Module] | str, type[Envoy]] | None"


class Envoy(Located):
    """Mirror of ``module`` in the tree of a wrapped model.

    ``Envoy(module)`` without a ``tree`` is the root of a new tree, and a :class:`~nnsight.modeling.base.NNsight`. This also holds for
    user-defined subclasses.

    Args:
        module: The mirrored module.
        path: Path of the module, the prefix of its locations.
        interleaver: Must be None: each run has an interleaver of its own.
        rename: Further names of modules below a root, see :mod:`nnsight.envoy.renaming`.
        envoys: The class of the envoys below this one, or a dict of classes. A key is a type of modules (base classes count), or the end of
            a path: ``"attn"``, ``"mlp.act"``, ``"layers.*"`` for every entry of ``layers``. Types go first. Paths may use names of
            ``rename=``. Modules without a matching key get plain envoys.
        parent: Must be None: to add a module below another, set it as an attribute.
        tree: The tree of the envoy, which the root keeps alive; None for a new root.
        known: Existing envoys by module, so that a module with two parents has one envoy.
    """

    _path: str
    _module: torch.nn.Module
    _children: dict[str, Envoy]
    _version: int
    _envoys: EnvoyClasses
    _aliases: set[str]
    _shown_envoys: dict[str, Envoy]  # envoys of modules that are attributes, but not children, by attribute name

    def __new__(cls, *args: Any, tree: ModuleTree | None = None, **kwargs: Any) -> Self:
        is_root = tree is None and (args or kwargs)  # `copy` and `pickle` call this without arguments
        return super().__new__(late("root_class")(cls) if is_root else cls)

    def __init__(
        self,
        module: torch.nn.Module,
        path: str = "model",
        interleaver: None = None,
        rename: Mapping[Any, str | Sequence[str]] | None = None,
        envoys: EnvoyClasses = None,
        parent: None = None,
        *,
        tree: ModuleTree | None = None,
        known: dict[torch.nn.Module, Envoy] | None = None,
    ) -> None:
        assert tree is not None  # `__new__` gives roots another class, which creates the tree
        self.__dict__.update(_path=path, _module=module, _children={}, _envoys=envoys, _aliases=set(), _version=tree.version)
        self.__dict__.update(_shown_envoys={}, _tree_of_root=(weakref.ref(tree), tree._traced_call))
        known = {} if known is None else known
        known[module] = self
        for name, child in module._modules.items():
            if child is not None:
                self._adopt(name, child, known)

    # -- values of the running model -----------------------------------------------------------------------------

    @property
    def _fake_output(self) -> Any:
        """Output of the module in the latest scan, with fake tensors; None if the module did not run in that scan."""
        return self._fakes.get(f"{self._path}.output")

    @property
    def _fake_inputs(self) -> Any:
        """Arguments ``(args, kwargs)`` of the module in the latest scan, with fake tensors; None if it did not run in that scan."""
        return self._fakes.get(f"{self._path}.input")

    @property
    def _fakes(self) -> Mapping[str, Any]:
        """The values of the latest scan by location."""
        return self._tree.fakes

    @property
    def path(self) -> str:
        """Path of the module in the tree, the prefix of its locations."""
        return self._path

    @property
    def interleaving(self) -> bool:
        """Whether a run is active in this context."""
        return active_interleaver() is not None

    @property
    def interleaver(self) -> Interleaver:
        """The run that is active in this context; outside of a run, an interleaver without blocks that is not started."""
        return active_interleaver() or Interleaver()  # type: ignore[return-value]

    # -- the module by itself ------------------------------------------------------------------------------------

    @property
    def _as_root(self) -> Any:
        """A root for traces of this module alone; see :mod:`nnsight.modeling.component`."""
        return late("component_of")(self)

    @uncompiled
    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """Run this module alone on its own arguments, as :meth:`NNsight.trace <nnsight.modeling.base.NNsight.trace>` runs the model.

        Example:
            >>> with pipe.unet.trace(sample, timestep, encoder_hidden_states=prompt):
            ...     middle = pipe.unet.mid_block.output.save()
        """
        return self._as_root.trace(*args, **kwargs)

    @uncompiled
    def scan(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block, and this module alone on its own arguments, on fake tensors, which have shapes and dtypes but no values."""
        return self._as_root.scan(*args, **kwargs)

    @uncompiled
    def session(self, *args: Any, **kwargs: Any) -> Any:
        """Group traces of this module; see :meth:`NNsight.session <nnsight.modeling.base.NNsight.session>`."""
        return self._as_root.session(*args, **kwargs)

    @uncompiled
    def edit(self, *, inplace: bool = False, backend: Backend | None = None) -> Any:
        """Store a block that runs whenever this module runs alone, as :meth:`NNsight.edit` does for runs of the model."""
        return self._as_root.edit(inplace=inplace, backend=backend)

    def clear_edits(self) -> None:
        """Remove the blocks that :meth:`edit` stored."""
        self._as_root.clear_edits()

    # -- the module ----------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, hook: bool = False, **kwargs: Any) -> Any:
        """Call the module.

        Inside a block, the module is applied to the block's own values, in addition to its calls in the forward pass. Its torch hooks run,
        but its locations are not passed.

        With ``hook=True``, the locations of the module and of the modules below it are passed, so that other invokes can read and edit
        their values. This is meant for modules outside of the forward pass, such as an autoencoder that was added to the model.
        """
        if is_compiling():
            load("call_edited")  # registers with dynamo how it reads the active run
        run = active_interleaver()
        if run is None or run.current is None:
            if "_component" in self.__dict__ and self.__dict__["_component"]._edits_apply():
                return self._as_root(*args, **kwargs)
            return self._module(*args, **kwargs)
        if run.recorder is not None:
            return run.recorder.apply(self._path, self._module, args, kwargs, hook)
        if not hook:
            return call_alone(self._module, args, kwargs)
        args, kwargs = run.handle(f"{self._path}.input", (args, kwargs))
        skipped = () if is_compiling() else run.take_skip(f"{self._path}.input")
        if not skipped:
            run.lend_turn()
            try:
                output = call_alone(self._module, args, kwargs)
            finally:
                run.take_turn_back()
        return run.handle(f"{self._path}.output", skipped[0] if skipped else output)

    def __getitem__(self, key: Any) -> Any:
        """Return the child at an index, slice or key of a container; if the module has ``__getitem__``, the envoy of its entry."""
        if isinstance(key, str) and (key in self._children or key in self._aliases):
            return self._children[key] if key in self._children else self.__dict__[key]
        look_up = entries(self)
        if look_up is not None:
            return envoy_of_entry(self, look_up(key))
        if isinstance(key, str):
            raise KeyError(unknown_attribute(self, key))
        children = list(self._children.values())
        try:
            return children[key]
        except IndexError:
            raise IndexError(f"`{self._path}` has {len(children)} children; index {key} is out of range.") from None

    def __len__(self) -> int:
        """Return the length of the module. Raises a ``TypeError`` if the module has no length."""
        return len(self._module)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        return not hasattr(type(self._module), "__len__") or len(self) > 0

    def __iter__(self) -> Iterator[Envoy]:
        return iter(iterated(self))

    @property
    def source(self) -> Source:
        """The operations inside the module's ``forward``, by name; ``print(module.source)`` shows them.

        Raises:
            SourceError: If the ``forward`` has no Python source.

        Example:
            >>> with model.trace(prompt):
            ...     attention = model.transformer.h[0].attn.source.attention_interface_0.output[0].save()
        """
        return source_of(self)

    def modules(self, include_fn: Callable[[Envoy], bool] | None = None, names: bool = False) -> list[Any]:
        """Return this envoy and all envoys below it for which ``include_fn`` is true, each once; with ``names``, pairs of path and envoy.

        Children come before their parent, so this envoy comes last.
        """
        found: list[Envoy] = []
        entered: set[int] = set()
        pending: list[tuple[Envoy, bool]] = [(self, False)]
        while pending:
            envoy, children_are_done = pending.pop()
            if children_are_done:
                found.append(envoy)
            elif id(envoy) not in entered:
                entered.add(id(envoy))
                pending.append((envoy, True))
                pending.extend((child, False) for child in reversed(envoy._children.values()))
        chosen = [envoy for envoy in found if include_fn is None or include_fn(envoy)]
        return [(envoy._path, envoy) for envoy in chosen] if names else chosen

    def named_modules(self, include_fn: Callable[[Envoy], bool] | None = None) -> list[tuple[str, Envoy]]:
        """Return pairs of path and envoy, for this envoy and all envoys below it; see :meth:`modules`."""
        return Envoy.modules(self, include_fn, names=True)

    def get(self, path: str) -> Any:
        """Return the envoy or value at a dotted path below this envoy, such as ``"transformer.h.0.output"``."""
        value: Any = self
        for part in path.split("."):
            children = value._children if isinstance(value, Envoy) else {}
            value = children[part] if part in children else getattr(value, part)
        return value

    @property  # read at each value that a block reads, so it is fast
    def _tree(self) -> ModuleTree:  # type: ignore[override]
        """The tree of the root. If the root is gone: the tree of another wrapper of the model, else a new tree of this module alone."""
        own: ModuleTree | None = self.__dict__.get("_own_tree")
        if own is not None:
            return own
        reference, traced_call = self.__dict__["_tree_of_root"]
        tree: ModuleTree | None = reference()
        if tree is None:
            tree = ModuleTree.with_module(self._module)
            if tree is None:
                tree = self.__dict__["_own_tree"] = ModuleTree(self._module, self._path, traced_call)
            for envoy in Envoy.modules(self, lambda below: below.__dict__["_tree_of_root"][0]() is None):
                envoy.__dict__["_tree_of_root"] = weakref.ref(tree), traced_call
        return tree

    def __getattr__(self, name: str) -> Any:
        module = self.__dict__.get("_module")
        if module is None or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(name)
        try:
            value = getattr(module, name)
        except AttributeError:
            if name in DERIVED:
                return DERIVED[name](self)
            if name.removeprefix("E_") in DERIVED and name[2:] in self._children:
                return self._children[name[2:]]
            raise AttributeError(unknown_attribute(self, name)) from None
        if isinstance(value, torch.nn.Module):
            self._sync()
            return self._children[name] if name in self._children else self._envoy_of(name, value)
        if isinstance(value, types.MethodType) and value.__self__ is module and not name.startswith("_"):
            return self._method(name, value)
        return value

    def _envoy_of(self, name: str, module: torch.nn.Module) -> Any:
        """Return the envoy of a module that is the value of an attribute, but not a child, such as the value of a property."""
        known = self._shown_envoys.get(name)
        if known is not None and known._module is module:
            return known
        if module not in self._tree.paths:
            if getattr(self._module, name) is not module:  # a property that creates a new module at each read
                return module
            self._tree.add_module(self._module, name)
        for start in (self, *self._tree.roots):
            for envoy in Envoy.modules(start):
                if envoy._module is module:
                    return envoy
        path = self._tree.paths.get(module)
        if path is None:
            return module
        made = self._class_for(module, path)(module, path=path, tree=self._tree, envoys=self._envoys)
        self._shown_envoys[name] = made
        return made

    def _method(self, name: str, method: types.MethodType) -> Callable[..., Any]:
        """Wrap ``method`` so that its call in the header of a ``with`` statement is traced.

        If the method returns the module, as ``to`` and ``eval`` do, the wrapper returns this envoy. So calls can be chained.
        """
        if inspect.isgeneratorfunction(inspect.unwrap(method.__func__)):  # the method itself may be a context manager
            return method

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not is_compiling() and calls_for_with(sys._getframe(1)):
                roots: Any = self._tree.roots
                for root in sorted(roots, key=lambda root: len(root._edits)):  # a copy with edits comes last
                    return root._trace_method(self, name, args, kwargs)
            result = self._call_method(name, method, args, kwargs)
            return self if result is method.__self__ else result

        return call

    def _call_method(self, name: str, method: types.MethodType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call ``method`` of the module outside of the header of a ``with`` statement. Roots override this to apply their edits."""
        return method(*args, **kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, torch.nn.Module):
            setattr(self._module, name, value)
            self._sync()
            return
        run = active_interleaver()
        if run is not None and run.current is not None and name not in self.__dict__ and not hasattr(type(self), name):
            raise AttributeError(f"{unknown_attribute(self, name)} Assigning to it would have no effect on the run.")
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self._module)})

    def __repr__(self) -> str:
        """Return the module's ``repr``, with the names of ``rename=`` and with the described properties of classes of envoys."""
        if not any(described(type(envoy), Envoy) or envoy._aliases for envoy in Envoy.modules(self)):
            return repr(self._module)
        return repr(shown(self, Envoy))

    # -- keeping up with the module ------------------------------------------------------------------------------

    def _adopt(self, name: str, child: torch.nn.Module, known: dict[torch.nn.Module, Envoy]) -> None:
        """Add the envoy of ``child`` as the child ``name``, and create it if ``known`` has none."""
        envoy, path = known.get(child), self._tree.paths.get(child, f"{self._path}.{name}")
        if envoy is None:
            envoy = self._class_for(child, path)(child, path=path, tree=self._tree, known=known, envoys=self._envoys)
        envoy.__dict__["_path"] = path  # of a moved module
        self._children[name] = envoy
        if hasattr(type(self), name) and not hasattr(type(self), f"nns_{name}"):
            self.__class__ = with_child_named(type(self), name)
        self.__dict__[name] = envoy

    def _class_for(self, module: torch.nn.Module, path: str) -> type[Envoy]:
        """Return the class that ``envoys=`` chooses for the envoy of ``module`` at ``path``."""
        if isinstance(self._envoys, type):
            return self._envoys
        classes: Mapping[Any, type[Envoy]] = self._envoys or {}
        for kind in type(module).__mro__:
            if kind in classes:
                return classes[kind]
        ends = {end: chosen for end, chosen in classes.items() if isinstance(end, str)}
        paths = classes.paths_of(module, path) if ends and hasattr(classes, "paths_of") else [path]
        return next((chosen for end, chosen in ends.items() if any(ends_with(known, end) for known in paths)), Envoy)

    def _descend(self, parts: Sequence[str]) -> Envoy | None:
        """Return the envoy at a path of child names; None if there is none."""
        envoy: Envoy | None = self
        for part in parts:
            envoy = None if envoy is None else envoy._children.get(part)
        return envoy

    def _add_alias(self, name: str, target: Envoy) -> None:
        if self.__dict__.get(name) is target:
            return
        if not name.isidentifier():
            raise ValueError(f"rename: {name!r} is not a valid name; the new name of a module must be a Python identifier.")
        if name in self.__dict__ or hasattr(type(self), name) or hasattr(self._module, name):
            known = {**dict.fromkeys(self._aliases, "an alias already bound"), **dict.fromkeys(self._children, "a child module")}
            owner = next((kind for kind in reversed(type(self).__mro__) if name in vars(kind)), type(self._module)).__name__
            what = known.get(name, f"`{owner}.{name}`")
            raise ValueError(f"rename: {name!r} would shadow {what} of `{self._path}`. Choose another name.")
        self.__dict__[name] = target
        self._aliases.add(name)

    def _sync(self) -> None:
        """Mirror the present modules, if the tree has changed. Existing modules keep their envoys; those of removed ones leave the tree."""
        for envoy in () if self._tree.refresh() == self._version else (*self._tree.roots, self):
            tree = envoy._tree
            if envoy._version != tree.version:
                known = {below._module: below for below in Envoy.modules(envoy)}
                envoy._mirror(known, tree.version)
                for module in known.keys() - tree.paths.keys():
                    known[module].__dict__["_tree_of_root"] = lambda: None, tree._traced_call  # as if the root were gone

    def _update(self, module: torch.nn.Module) -> None:
        """Replace the mirrored module by ``module``. This envoy and the envoys below it stay, and find their new modules by name.

        Attributes of envoys that refer to replaced modules are updated, too.
        """
        replaced: dict[torch.nn.Module, torch.nn.Module] = {}
        moved: dict[Envoy, torch.nn.Module] = {}
        known: dict[torch.nn.Module, Envoy] = {}
        pending: list[tuple[Envoy, torch.nn.Module]] = [(self, module)]
        while pending:
            envoy, new = pending.pop()
            if new in known or envoy in moved:
                continue
            known[new], moved[envoy], replaced[envoy._module] = envoy, new, new
            children = [(envoy._children.get(name), child) for name, child in new._modules.items()]
            pending.extend((mirror, child) for mirror, child in reversed(children) if mirror is not None and child is not None)
        for envoy, new in moved.items():
            envoy.__dict__["_path"] = self._tree.paths.get(new, envoy._path)
            for name, value in envoy.__dict__.items():
                if isinstance(value, torch.nn.Module):
                    envoy.__dict__[name] = replaced.get(value, value)
        self._mirror(known, self._tree.refresh())

    def _mirror(self, known: dict[torch.nn.Module, Envoy], version: int) -> None:
        self.__dict__["_version"] = version
        for name in (*self._children, *self._aliases):
            self.__dict__.pop(name, None)
        self._children.clear()
        self._aliases.clear()
        for name, child in self._module._modules.items():
            if child is not None:
                self._adopt(name, child, known)
        for envoy in self._children.values():
            if envoy._version != version:
                envoy._mirror(known, version)


