"""Attributes of envoys that are not attributes of their modules, and messages about missing attributes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ..runtime.errors import NNsightDeprecationWarning
from ..runtime.iteration import Iterations, IteratorTracer, Steps
from ..tracing.errors import did_you_mean

if TYPE_CHECKING:
    from .envoy import Envoy


_TORCH_CONTAINERS = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.Sequential)


def entries(envoy: Envoy) -> Callable[[Any], Any] | None:
    """Return the look-up of the entries of a module that has ``__getitem__``, as modules; ``None`` for torch's containers and others."""
    module: Any = envoy._module
    return None if isinstance(module, _TORCH_CONTAINERS) or not hasattr(type(module), "__getitem__") else module.__getitem__


def envoy_of_entry(envoy: Envoy, entry: Any) -> Any:
    """Return the envoy below ``envoy`` of a module that its ``__getitem__`` has returned, or a list of them for several modules.

    Raises:
        AttributeError: If it is no module of the model.
    """
    if isinstance(entry, (list, tuple, torch.nn.ModuleList)):
        return [envoy_of_entry(envoy, item) for item in entry]
    found = next((below for below in envoy.modules() if below._module is entry), None)
    if found is None:
        raise AttributeError(f"`{envoy._path}[...]` is a {type(entry).__name__} that is no module of the model, so it has no envoy.")
    return found


def iterated(envoy: Envoy) -> list[Envoy]:
    """Return the envoys of the modules over which a module iterates, if these are its entries; else its children."""
    module: Any = envoy._module
    children = list(envoy._children.values())
    look_up = entries(envoy)
    if look_up is None or not hasattr(type(module), "__len__"):
        return children
    found = list(module) if hasattr(type(module), "__iter__") else [look_up(number) for number in range(len(module))]
    known = {below._module: below for below in envoy.modules()} if all(isinstance(item, torch.nn.Module) for item in found) else {}
    return [known[item] for item in found] if all(item in known for item in found) else children


def _device(envoy: Envoy) -> torch.device | None:
    """Return the device of the first parameter, or else of the first buffer; None if the module has neither."""
    module = envoy._module
    return next((tensor.device for tensors in (module.parameters(), module.buffers()) for tensor in tensors), None)


def _devices(envoy: Envoy) -> set[torch.device]:
    """Return the devices of the parameters, or of the buffers if the module has no parameters."""
    module = envoy._module
    return {parameter.device for parameter in module.parameters()} or {buffer.device for buffer in module.buffers()}


def _root(envoy: Envoy) -> Any:
    """Return the root envoy of the model that ``envoy`` is part of; None if the root is gone."""
    roots: list[Any] = sorted(envoy._tree.roots, key=lambda root: len(root._edits))  # a copy with edits comes last
    below = envoy._path.removeprefix(envoy._tree.path).split(".")[1:]
    return envoy if not below else next((root for root in roots if root._descend(below) is envoy), None)


def _parent(envoy: Envoy) -> Envoy | None:
    """Return the envoy that has ``envoy`` as a child; None for a root, and None if the root is gone."""
    root, below = _root(envoy), envoy._path.removeprefix(envoy._tree.path).split(".")[1:-1]
    return None if root is envoy or root is None else root._descend(below)


def _original(envoy: Envoy) -> Envoy:
    """Return ``envoy``, if it mirrors the module inside of a ``torch.compile`` wrapper that the user passed."""
    if "_unwrapped" not in envoy.__dict__:
        raise AttributeError(unknown_attribute(envoy, "_orig_mod"))
    return envoy


class _DeprecatedIterations(Iterations):
    """The value of ``model.iter``. Choosing steps from it warns that ``tracer.iter`` replaces it."""

    def __getitem__(self, steps: Steps) -> IteratorTracer:
        _warn("iter")
        return super().__getitem__(steps)


def _all() -> IteratorTracer:
    _warn("all()")
    return Iterations()[:]


def _warn(name: str) -> None:
    """Warn about a deprecated attribute, at the line that calls the caller of this function."""
    warnings.warn(f"`model.{name}` is deprecated: use `tracer.{name}` of the trace's tracer.", NNsightDeprecationWarning, stacklevel=3)


#: Attributes of envoys that are looked up if the module has no attribute of that name.
DERIVED: dict[str, Callable[[Envoy], Any]] = {
    "all": lambda envoy: _all,
    "device": _device,
    "devices": _devices,
    "iter": lambda envoy: _DeprecatedIterations(),
    "parent": _parent,
    "root": _root,
    "_model": lambda envoy: envoy._module,
    "_orig_mod": _original,
}


def with_child_named(base: type[Envoy], name: str) -> type[Envoy]:
    """Return a subclass of ``base`` in which ``nns_<name>`` is the attribute ``name`` of ``base``, and ``name`` is the child module."""
    moved = getattr(base, name)
    warnings.warn(
        f"The child module `{name}` shadows an attribute of envoys: `.{name}` is the child, `.nns_{name}` the attribute.",
        UserWarning,
        stacklevel=2,
    )

    def child(self: Envoy) -> Envoy:
        return self._children[name]

    namespace = {name: property(child), f"E_{name}": property(child), f"nns_{name}": moved, "__module__": base.__module__, "_moved": name}
    return type(base.__name__, (base,), namespace)


def ends_with(path: str, end: str) -> bool:
    """Whether ``path`` ends with the components of ``end``, where ``*`` stands for any one component."""
    parts = end.strip(".").split(".")
    last = path.split(".")[-len(parts) :]
    return len(last) == len(parts) and all(part in ("*", found) for part, found in zip(parts, last, strict=True))


def unknown_attribute(envoy: Envoy, name: str) -> str:
    """Return the error message for a missing attribute of an envoy. It lists similar names and the children."""
    candidates = [*envoy._children, *(key for key in dir(type(envoy)) if not key.startswith("_"))]
    hint = did_you_mean(name, candidates)
    children = ", ".join(list(envoy._children)[:8]) + (", …" if len(envoy._children) > 8 else "")
    inside = f" Its child modules: {children}." if children else ""
    parent, _, own = envoy._path.rpartition(".")
    if parent and own in ("input", "inputs", "output"):  # the user may mean the value, whose name the child took
        inside += f" The {own} of `{parent}` is `{parent}.nns_{own}`."
    return f"`{envoy._path}` ({type(envoy._module).__name__}) has no attribute `{name}`.{hint}{inside}"


def check_root(module: Any, path: Any, interleaver: Any, parent: Any) -> None:
    """Raise a ``TypeError`` for invalid arguments of a root envoy."""
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"An envoy mirrors a torch.nn.Module, not {type(module).__name__}.")
    if not isinstance(path, str) or not path or not all(part.isidentifier() or part.isdecimal() for part in path.split(".")):
        raise TypeError(f"path= must be a dotted name with which locations begin, such as 'model'; got {path!r}.")
    if interleaver is not None:
        raise TypeError(
            "interleaver= must be None: each run has an interleaver of its own. To add a module to a model, set it as an attribute: "
            "`self.extra = module`."
        )
    if parent is not None:
        raise TypeError("parent= must be None: to add a module below another, set it as an attribute: `model.layer.adapter = module`.")
