"""The user's view of a module: an envoy.

An envoy mirrors one ``torch.nn.Module`` and adds the values of its calls: ``.output``, ``.input``, ``.inputs``. Child modules are envoys
under their own names; other attributes and methods are those of the module. Paths such as ``model.transformer.h.0`` name locations.

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

#: Which class the envoys of a tree have.
EnvoyClasses: TypeAlias = "type[Envoy] | Mapping[type[torch.nn.Module] | str, type[Envoy]] | None"


class Envoy(Located):
    """Mirror of ``module`` in the tree of a wrapped model.

    Without a ``tree`` it is the root of its own, and an :class:`~nnsight.modeling.base.NNsight`; so is that of a class of envoys of yours.

    Args:
        module: The mirrored module.
        path: Its path, the prefix of its locations.
        interleaver: None: each run has one of its own.
        rename: Further names of modules below a root, see :mod:`nnsight.envoy.renaming`.
        envoys: The class of the envoys below: one class, or a class for each type of module (looked up along the
            module's base classes) or else end of a path (``"attn"``, ``"mlp.act"``, ``"layers.*"`` for every entry of ``layers``),
            also in names that ``rename=`` gives; plain envoys for modules it does not name.
        parent: None: an envoy below another is made by setting a module as its attribute.
        tree: The tree it belongs to, which its root keeps alive; a new one is made for a root.
        known: Envoys made so far, by module, so that a module shared by two parents has one envoy.
    """

    _path: str
    _module: torch.nn.Module
    _children: dict[str, Envoy]
    _version: int
    _envoys: EnvoyClasses
    _aliases: set[str]
    _shown_envoys: dict[str, Envoy]  # those of modules that are attributes and no children

    def __new__(cls, *args: Any, tree: ModuleTree | None = None, **kwargs: Any) -> Self:
        is_root = tree is None and (args or kwargs)  # a copy has no arguments
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
        assert tree is not None  # a root without one is made by its own class
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
        """What the module returned in the latest scan, as fake tensors; None if it did not run in it."""
        return self._fakes.get(f"{self._path}.output")

    @property
    def _fake_inputs(self) -> Any:
        """All arguments of the module's call in the latest scan, ``(args, kwargs)`` with fake tensors, or None likewise."""
        return self._fakes.get(f"{self._path}.input")

    @property
    def _fakes(self) -> Mapping[str, Any]:
        """What passed each location of the model in the latest scan."""
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
        """The run that is active in this context; outside of one, a run without blocks that never started."""
        run: Any = active_interleaver()
        return run or Interleaver()

    # -- the module by itself ------------------------------------------------------------------------------------

    @property
    def _as_root(self) -> Any:
        """This module as the root of traces of its own; see :mod:`nnsight.modeling.component`."""
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
        """Run the block, and this module alone on its own arguments, on fake tensors: sizes and types without values."""
        return self._as_root.scan(*args, **kwargs)

    @uncompiled
    def session(self, *args: Any, **kwargs: Any) -> Any:
        """Group traces; see :meth:`NNsight.session <nnsight.modeling.base.NNsight.session>`."""
        return self._as_root.session(*args, **kwargs)

    @uncompiled
    def edit(self, *, inplace: bool = False, backend: Backend | None = None) -> Any:
        """Keep a block for runs of this module by itself, as :meth:`NNsight.edit` does for those of the model."""
        return self._as_root.edit(inplace=inplace, backend=backend)

    def clear_edits(self) -> None:
        """Forget the blocks of :meth:`edit`."""
        self._as_root.clear_edits()

    # -- the module ----------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, hook: bool = False, **kwargs: Any) -> Any:
        """Call the module.

        Inside a block the module is applied to the block's own values, outside its normal place in the forward pass: its torch
        hooks run, and no location is passed.

        With ``hook`` the locations of the module, and of those below it, are passed all the same, so that other invokes can read
        and edit them: for modules that are not part of the forward pass, such as an autoencoder added to the model.
        """
        if is_compiling():
            load("call_edited")  # dynamo then knows what the active run is
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
        """Return the length of the module, which is a ``TypeError`` if it has none."""
        module: Any = self._module
        return len(module)

    def __bool__(self) -> bool:
        return not hasattr(type(self._module), "__len__") or len(self) > 0

    def __iter__(self) -> Iterator[Envoy]:
        return iter(iterated(self))

    @property
    def source(self) -> Source:
        """The operations inside the module's ``forward``, by name; ``print`` it to see them.

        Raises:
            SourceError: If the ``forward`` has no Python source.

        Example:
            >>> with model.trace(prompt):
            ...     attention = model.transformer.h[0].attn.source.attention_interface_0.output[0].save()
        """
        return source_of(self)

    def modules(self, include_fn: Callable[[Envoy], bool] | None = None, names: bool = False) -> list[Any]:
        """Return this envoy and all below it for which ``include_fn`` is true, each once; with ``names``, pairs of path and envoy.

        Children come before the envoy that has them, this one comes last.
        """
        found: list[Envoy] = []
        entered: set[int] = set()
        pending: list[tuple[Envoy, bool]] = [(self, False)]
        while pending:
            envoy, is_behind_its_children = pending.pop()
            if is_behind_its_children:
                found.append(envoy)
            elif id(envoy) not in entered:
                entered.add(id(envoy))
                pending.append((envoy, True))
                pending.extend((child, False) for child in reversed(envoy._children.values()))
        chosen = [envoy for envoy in found if include_fn is None or include_fn(envoy)]
        return [(envoy._path, envoy) for envoy in chosen] if names else chosen

    def named_modules(self, include_fn: Callable[[Envoy], bool] | None = None) -> list[tuple[str, Envoy]]:
        """Return path and envoy of this module and all below it; see :meth:`modules`."""
        return Envoy.modules(self, include_fn, names=True)

    def get(self, path: str) -> Any:
        """Return what a dotted path below this envoy names, such as ``"transformer.h.0.output"``."""
        value: Any = self
        for part in path.split("."):
            children = value._children if isinstance(value, Envoy) else {}
            value = children[part] if part in children else getattr(value, part)
        return value

    @property  # asked at each value that a block reads
    def _tree(self) -> ModuleTree:  # type: ignore[override]
        """The tree, which the root holds; without that, the one of another wrapper of the model, else one of this module alone."""
        own: ModuleTree | None = self.__dict__.get("_own_tree")
        if own is not None:
            return own
        reference, traced_call = self.__dict__["_tree_of_root"]
        tree: ModuleTree | None = reference()
        if tree is None:
            tree = ModuleTree.with_module(self._module)
            if tree is None:
                tree = self.__dict__["_own_tree"] = ModuleTree(self._module, self._path, traced_call)
            for envoy in Envoy.modules(self):
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
            if name in self._children:
                return self._children[name]
            return self._envoy_of(name, value)
        if isinstance(value, types.MethodType) and value.__self__ is module and not name.startswith("_"):
            return self._method(name, value)
        return value

    def _envoy_of(self, name: str, module: torch.nn.Module) -> Any:
        """Return the envoy of a module that is an attribute ``name`` and no child: that of a property, or one set past ``nn.Module``."""
        known = self._shown_envoys.get(name)
        if known is not None and known._module is module:
            return known
        if module not in self._tree.paths:
            if getattr(self._module, name) is not module:  # one that is made each time
                return module
            self._tree.take_in(self._module, name)
        starts: list[Envoy] = [self, *self._tree.roots]
        for start in starts:
            for _, envoy in Envoy.named_modules(start):
                if envoy._module is module:
                    return envoy
        path = self._tree.paths.get(module)
        if path is None:
            return module
        made = self._class_for(module, path)(module, path=path, tree=self._tree, envoys=self._envoys)
        self._shown_envoys[name] = made
        return made

    def _method(self, name: str, method: types.MethodType) -> Callable[..., Any]:
        """Return ``method``, which in the header of a ``with`` statement is traced.

        A method that returns the module, such as ``to`` and ``eval``, returns this envoy: calls are chained on wrapped models too.
        """
        if inspect.isgeneratorfunction(inspect.unwrap(method.__func__)):  # a context manager of its own
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
        """Call ``method`` of the module, outside the header of a ``with`` statement; roots run their edits beside it."""
        return method(*args, **kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, torch.nn.Module):
            setattr(self._module, name, value)
            self._sync()
            return
        run = active_interleaver()
        if run is not None and run.current is not None and name not in self.__dict__ and not hasattr(type(self), name):
            raise AttributeError(f"{unknown_attribute(self, name)} Assigning to it would do nothing to the run.")
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self._module)})

    def __repr__(self) -> str:
        """Return what torch shows of the module, with further names and with the described properties that classes of envoys add."""
        if not any(described(type(envoy), Envoy) or envoy._aliases for envoy in Envoy.modules(self)):
            return repr(self._module)
        return repr(shown(self, Envoy))

    # -- keeping up with the module ------------------------------------------------------------------------------

    def _adopt(self, name: str, child: torch.nn.Module, known: dict[torch.nn.Module, Envoy]) -> None:
        """Mirror ``child`` under ``name``."""
        envoy = known.get(child)
        if envoy is None:
            path = self._tree.paths.get(child, f"{self._path}.{name}")
            envoy = self._class_for(child, path)(child, path=path, tree=self._tree, known=known, envoys=self._envoys)
        self._children[name] = envoy
        if hasattr(type(self), name) and not hasattr(type(self), f"nns_{name}"):
            self.__class__ = with_child_named(type(self), name)
        self.__dict__[name] = envoy

    def _class_for(self, module: torch.nn.Module, path: str) -> type[Envoy]:
        """Return the class of the envoy of ``module``, which is at ``path``."""
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
        """Return the envoy that a path of child names leads to."""
        envoy: Envoy | None = self
        for part in parts:
            envoy = None if envoy is None else envoy._children.get(part)
        return envoy

    def _add_alias(self, name: str, target: Envoy) -> None:
        if self.__dict__.get(name) is target:
            return
        if not name.isidentifier():
            raise ValueError(f"rename: {name!r} is not a name; the new name of a module is one word.")
        if name in self.__dict__ or hasattr(type(self), name) or hasattr(self._module, name):
            known = {**dict.fromkeys(self._aliases, "an alias already bound"), **dict.fromkeys(self._children, "a child module")}
            owner = next((kind for kind in reversed(type(self).__mro__) if name in vars(kind)), type(self._module))
            what = known.get(name, f"`{owner.__name__}.{name}`")
            raise ValueError(f"rename: {name!r} would hide an attribute of `{self._path}`, {what}. Choose another name.")
        self.__dict__[name] = target
        self._aliases.add(name)

    def _sync(self) -> None:
        """Mirror the modules as they are now; envoys of modules that stayed keep their identity."""
        version = self._tree.refresh()
        if version != self._version:
            self._mirror({envoy._module: envoy for envoy in Envoy.modules(self)}, version)

    def _update(self, module: torch.nn.Module) -> None:
        """Mirror ``module``; this envoy and those below keep their identity, and find their modules by name.

        Attributes of envoys that are modules of the former tree become those of the new one, too.
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


