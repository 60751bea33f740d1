"""Lazy models, whose weights are loaded when they are needed.

A model given by name begins on the *meta device*: its tensors have sizes but no memory. It can be printed, navigated, edited and scanned.

Loading makes new modules (perhaps of other classes, on several devices, or quantised), and the envoys get these modules. Changes of the
lazy model are repeated on the loaded one: modules that were added, replaced or removed, hooks, training mode, and frozen weights. Wrappers
that share the lazy model, such as the copies of ``edit()``, are loaded together.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from ...runtime.eager import EagerDriver
from ...runtime.interleaver import active_interleaver
from ...runtime.modules.interception import is_compiling
from ...runtime.tracer import Driver
from .loadable import LoadableMixin
from .meta_device import MetaDevice  # noqa: F401 - scripts import it from here

#: Methods of modules that read or change weights. On a lazy model, they load it first.
_ABOUT_WEIGHTS = frozenset(
    (
        *("_apply", "apply", "bfloat16", "cpu", "cuda", "double", "float", "half", "load_state_dict", "push_to_hub"),
        *("resize_token_embeddings", "save_pretrained", "share_memory", "state_dict", "to", "type", "xpu"),
    )
)

#: Attributes of a module that map numbers to hooks.
_HOOK_TABLES = (
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_backward_hooks", "_backward_pre_hooks"),
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
)


class LoadingError(OSError):
    """A model could not be loaded. Its ``__cause__`` is the error of the library that failed to load it."""


@contextlib.contextmanager
def naming(name: str | os.PathLike[str]) -> Iterator[None]:
    """Add the name of the model to errors in the block. Other errors than ``TypeError`` and ``ImportError`` become a ``LoadingError``."""
    try:
        yield
    except (TypeError, ImportError) as error:  # an unknown option, or a missing package
        error.add_note(f"This happened while {os.fspath(name)!r} was loaded.")
        raise
    except Exception as error:
        raise LoadingError(f"{os.fspath(name)!r} could not be loaded: {type(error).__name__}: {error}") from error


@dataclass(eq=False)
class _InitialModule:
    """The initial state of a module of the lazy model, from which later changes are found."""

    path: str  # its path in the model
    module: torch.nn.Module
    children: dict[str, torch.nn.Module | None]
    training: bool
    frozen: set[str]  # names of its own parameters that do not require gradients
    hooks: dict[str, set[int]]  # for each of `_HOOK_TABLES`, the numbers of its hooks

    @classmethod
    def of(cls, path: str, module: torch.nn.Module) -> _InitialModule:
        hooks = {table: set(module.__dict__[table]) for table in _HOOK_TABLES}
        return cls(path, module, dict(module._modules), module.training, _frozen(module), hooks)


@dataclass(eq=False)
class _Weights:
    """The loading state of the weights of one model, which all its wrappers share."""

    dispatched: bool  # whether they are loaded
    args: tuple[Any, ...] = ()  # arguments of `_load`; empty once loaded
    kwargs: dict[str, Any] = field(default_factory=dict)  # likewise, by name
    made: list[_InitialModule] = field(default_factory=list)  # the initial state of the lazy model; empty once loaded
    lock: threading.Lock = field(default_factory=threading.Lock)  # held while they are loaded

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, lock=threading.Lock())


class MetaMixin(LoadableMixin):
    """A root class whose model is lazy: subclasses define :meth:`_load` and :meth:`_load_meta`.

    ``dispatch=True`` loads the weights at once; all other arguments are those of :class:`LoadableMixin`.

    Example:
        >>> class Net(MetaMixin):
        ...     def _load_meta(self, width):
        ...         return torch.nn.Linear(width, 2)
        ...     def _load(self, width):
        ...         return torch.nn.Linear(width, 2)
        >>> model = Net(3)
        >>> model.dispatched, model.weight.device.type
        (False, 'meta')
        >>> model.dispatch()
        >>> model.weight.device.type
        'cpu'
    """

    _weights: _Weights

    def __init__(self, *args: Any, dispatch: bool = False, **kwargs: Any) -> None:
        loaded = bool(args) and isinstance(args[0], torch.nn.Module)
        self.__dict__["_weights"] = _Weights(dispatched=dispatch or loaded)
        super().__init__(*args, **kwargs)

    @property
    def dispatched(self) -> bool:
        """Whether the weights are loaded."""
        return self._weights.dispatched

    def dispatch(self) -> None:
        """Load the weights, unless they are loaded. Envoys stay the same objects and get the modules with weights.

        Several threads may call this at the same time; one of them loads. If loading fails, the model stays lazy and usable.

        Raises:
            LoadingError: If the weights cannot be read.
            TypeError: If :meth:`_load` does not return a module.
        """
        weights = self._weights
        if weights.dispatched:
            return
        with weights.lock:
            if weights.dispatched:
                return
            loaded = self._load(*weights.args, **weights.kwargs)
            if not isinstance(loaded, torch.nn.Module):
                raise TypeError(f"{type(self).__name__}._load returned {type(loaded).__name__}, not a torch.nn.Module.")
            _carry_over(self._module, weights.made, loaded)
            for root in self._tree.replace_root(loaded):
                root._update(loaded)
            weights.args, weights.kwargs, weights.made = (), {}, []
            weights.dispatched = True

    def _change_modules(self, change: Callable[[], None]) -> None:
        """Call ``change``, which edits modules in place; loading does not repeat this, because :meth:`_load` makes the same change."""
        weights = self._weights
        before = {entry.module: dict(entry.module._modules) for entry in weights.made}
        try:
            change()
        finally:
            paths = {module: path for path, module in self._module.named_modules()} if before else {}
            for entry in weights.made:
                entry.path, now = paths.pop(entry.module, entry.path), entry.module._modules
                entry.children.update({name: child for name, child in now.items() if child is not before[entry.module].get(name)})
            weights.made.extend(_InitialModule.of(path, module) for module, path in paths.items())
            for root in self._tree.replace_root(self._module):
                root._update(self._module)

    def _first_module(self, *args: Any, **kwargs: Any) -> torch.nn.Module:
        weights = self._weights
        if weights.dispatched:
            return self._load(*args, **kwargs)
        with torch.device("meta"):
            module = self._load_meta(*args, **kwargs)
        if isinstance(module, torch.nn.Module):
            weights.args, weights.kwargs = args, kwargs
            weights.made = [_InitialModule.of(path, part) for path, part in module.named_modules()]
        return module

    def _load_meta(self, *args: Any, **kwargs: Any) -> torch.nn.Module:
        """Return the model that :meth:`_load` returns, without weights; subclasses define this method.

        The meta device is torch's default device during the call, so plain construction of the modules is enough.
        """
        raise NotImplementedError(
            f"{type(self).__name__} does not know how to make its model without weights. Define `_load_meta(self, *args, "
            "**kwargs)` in it, or pass `dispatch=True` to load the weights at once."
        )

    def _driver(self, *args: Any, **kwargs: Any) -> Driver:
        self.dispatch()
        return super()._driver(*args, **kwargs)

    def _run_plainly(self, generation: Any, inputs: tuple[Any, ...], kwargs: dict[str, Any], compile: bool | str | None) -> Any:
        """Run a generation without a block, with the edits of this model, compiled or not."""
        self.dispatch()
        args, kwargs = generation._prepare_input(*inputs, **kwargs)
        if self._edits_apply():
            edits = self._compiled_edits if self._compile_by_default and compile in (None, True) else None
            if edits is not None and edits.edits == self._edits and edits.are_same_at_each_step and active_interleaver() is None:
                return edits.generate(self, generation, args, kwargs)
            return self._call_edited(generation, args, kwargs, compile=compile)
        driver: Any = self._driver(compile)
        if isinstance(driver, EagerDriver) or active_interleaver() is not None:
            return generation(*args, **kwargs)
        return driver.call_function(generation, args, kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model, with its weights; see :meth:`NNsight.__call__ <nnsight.modeling.base.NNsight.__call__>`."""
        if is_compiling() or active_interleaver() is None:
            self.dispatch()
        return super().__call__(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        if name not in _ABOUT_WEIGHTS or self.dispatched or active_interleaver() is not None:
            return found

        def call_loaded(*args: Any, **kwargs: Any) -> Any:
            self.dispatch()
            return getattr(self._module, name)(*args, **kwargs)

        return call_loaded


Meta = MetaMixin


def _frozen(module: torch.nn.Module) -> set[str]:
    return {name for name, weight in module._parameters.items() if weight is not None and not weight.requires_grad}


def _carry_over(lazy: torch.nn.Module, made: list[_InitialModule], loaded: torch.nn.Module) -> None:
    """Repeat on ``loaded`` the changes of ``lazy`` since its initial state ``made``."""
    there = dict(loaded.named_modules())
    counterparts = {entry.module: there[entry.path] for entry in made if entry.path in there}
    for entry in made:
        target = counterparts.get(entry.module)
        if target is None:
            continue
        now = entry.module._modules
        for name in entry.children.keys() - now.keys():
            target._modules.pop(name, None)
        for name, child in now.items():
            if name not in entry.children or child is not entry.children[name]:
                target._modules[name] = None if child is None else counterparts.get(child, child)
        if entry.module.training != entry.training:
            target.training = entry.module.training
        for name in _frozen(entry.module) - entry.frozen:
            weight = target._parameters.get(name)
            if weight is not None:
                weight.requires_grad_(False)
        for table, before in entry.hooks.items():
            hooks, others = entry.module.__dict__[table], target.__dict__[table]
            if hooks.keys() - before:
                for key in before:
                    hooks.pop(key, None)
                hooks.update(others)
                target.__dict__[table] = hooks  # the same object, so that handles of the hooks still remove them
    for module in list(lazy.modules()):  # modules that the user added can contain modules of the lazy model
        if module not in counterparts:
            for name, child in module._modules.items():
                if child in counterparts:
                    module._modules[name] = counterparts[child]
