"""``tracer.cache()``: the activations of many modules in one object.

A cache looks at values as they leave their location, after the blocks of the run have had their turn, so it holds what the
model went on with. It reads as ``cache["model.transformer.h.0"].output`` or ``cache.model.transformer.h[0].output``.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..tracing import save


class CacheEntry:
    """Values of one module. When the module ran several times, each is a list with one item for each call.

    Attributes:
        path: The module's path.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._values: dict[str, list[Any]] = {"input": [], "output": []}

    def add(self, key: str, value: Any) -> None:
        """Append what the module was given or returned at one call."""
        self._values[key].append(value)

    def seen(self, key: str) -> int:
        """Return how many values there are of the module's ``"input"`` or ``"output"``."""
        return len(self._values[key])

    def _get(self, key: str, option: str) -> Any:
        found = self._values[key]
        if not found:
            raise AttributeError(
                f"The cache has no {key} of `{self.path}`: the module did not run in this trace, or the cache was made without "
                f"`{option}=True`."
            )
        return found[0] if len(found) == 1 else found

    @property
    def output(self) -> Any:
        """What the module returned."""
        return self._get("output", "include_output")

    @property
    def inputs(self) -> Any:
        """All arguments of the module, as ``(args, kwargs)``."""
        return self._get("input", "include_inputs")

    @property
    def input(self) -> Any:
        """The first argument of the module."""
        inputs = self.inputs
        if any(not args and not kwargs for args, kwargs in _listed(inputs)):
            raise ValueError(f"`{self.path}` was called without arguments, so it has no `.input`.")
        first = [args[0] if args else next(iter(kwargs.values())) for args, kwargs in _listed(inputs)]
        return first if isinstance(inputs, list) else first[0]

    def __repr__(self) -> str:
        counts = ", ".join(f"{len(values)} {key}" for key, values in self._values.items() if values)
        return f"CacheEntry({self.path}: {counts or 'empty'})"


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def resolve_alias(path: str, aliases: Mapping[str, str]) -> str:
    """Return the module's own path for one that may go through further names."""
    for alias, known in aliases.items():
        if path == alias or path.startswith(f"{alias}."):
            return resolve_alias(known + path.removeprefix(alias), aliases)
    return path


def paths_to_cache(modules: Any, known: Sequence[str], aliases: Mapping[str, str]) -> list[str]:
    """Return the paths of what the user chose: envoys or paths; all of ``known`` for ``None``.

    Raises:
        TypeError: If ``modules`` is no list of envoys and paths.
        ValueError: If one is not known.
    """
    if modules is None:
        return list(known)
    one = isinstance(modules, str) or hasattr(modules, "_path")
    if one and not isinstance(getattr(modules, "_module", None), torch.nn.ModuleList):
        raise TypeError("tracer.cache() takes a list of modules: write `modules=[...]` around this one.")
    paths: list[str] = []
    for module in modules:
        path = resolve_alias(module, aliases) if isinstance(module, str) else getattr(module, "_path", None)
        if path is None:
            raise TypeError(
                f"tracer.cache() takes modules of the wrapped model, such as `model.layer`, or their paths; not "
                f"{type(module).__name__}."
            )
        if path not in known:
            near = difflib.get_close_matches(path, known, n=3)
            hint = f" Did you mean {', '.join(f'`{match}`' for match in near)}?" if near else ""
            named = module if isinstance(module, str) else path
            raise ValueError(f"tracer.cache(): no module of this model has the path {named!r}.{hint}")
        paths.append(path)
    return paths


class Cache(Mapping[str, CacheEntry]):
    """Activations by module path, and by attribute along the path.

    Args:
        paths: The modules to keep.
        aliases: Path by further name of a module, for renamed modules.
        device: Where tensors are kept; ``None`` leaves them where they are.
        dtype: What floating point tensors are kept as; ``None`` keeps theirs.
        detach: Whether tensors are detached from autograd.
        keys: What is kept of each module: ``"output"``, ``"input"`` or both.

    Raises:
        TypeError: If ``dtype`` is no dtype.
        RuntimeError: If ``device`` is no device.
    """

    def __init__(
        self,
        paths: Iterable[str],
        aliases: Mapping[str, str],
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        detach: bool,
        keys: Sequence[str] = ("output",),
    ) -> None:
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise TypeError(f"The dtype of a cache is one of torch, such as torch.float16; not {dtype!r}.")
        if device is not None:
            torch.device(device)  # raises for a name that torch does not know, here rather than in the model
        self._entries = {path: CacheEntry(path) for path in paths}
        self._aliases = aliases
        self._device, self._dtype, self._detach = device, dtype, detach
        self._keys = tuple(keys)

    def _locations(self) -> Iterator[tuple[str, str]]:
        """Yield path and key of everything that is to be kept."""
        return itertools.product(self._entries, self._keys)

    def _missed(self) -> list[str]:
        """Return the paths of modules of which something is to be kept, and nothing has been seen."""
        return [path for path, entry in self._entries.items() if not any(entry.seen(key) for key in self._keys)]

    def observe(self, path: str, key: str, value: Any) -> None:
        """Keep a copy of ``value``, which is at ``<path>.<key>`` now."""
        self._entries[path].add(key, pytree.tree_map(self._kept, value))

    def _kept(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        kept = leaf.detach() if self._detach else leaf
        dtype = self._dtype if leaf.is_floating_point() else None
        # A copy in any case: later edits in place are not this module's.
        return kept.to(device=self._device, dtype=dtype, copy=True)

    def save(self) -> Cache:
        """Return the cache, which is saved without further ado.

        Raises:
            ValueError: Outside a trace.
        """
        return save(self)

    def __getitem__(self, path: str) -> CacheEntry:
        resolved = resolve_alias(path, self._aliases)
        if resolved not in self._entries:
            raise KeyError(
                f"`{path}` is not in the cache; it has {len(self._entries)} modules, by paths such as "
                f"`{next(iter(self._entries), '-')}`."
            )
        return self._entries[resolved]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return _CacheView(self, name)


class _CacheView:
    """A position along a path of a cache."""

    def __init__(self, cache: Cache, path: str) -> None:
        self._cache, self._path = cache, path

    def __getattr__(self, name: str) -> Any:
        if name in ("output", "input", "inputs"):
            return getattr(self._cache[self._path], name)
        if name.startswith("_"):
            raise AttributeError(name)
        return _CacheView(self._cache, f"{self._path}.{name}")

    def save(self) -> _CacheView:
        """Return this position; its cache is saved without further ado."""
        return save(self)

    def __getitem__(self, index: int | str) -> _CacheView:
        return _CacheView(self._cache, f"{self._path}.{index}")

    def __repr__(self) -> str:
        return f"CacheView({self._path})"
