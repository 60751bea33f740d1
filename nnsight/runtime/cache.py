"""``tracer.cache()``: the activations of many modules in one object.

A cache observes values as they leave their location, after the blocks of the run have edited them, so it has what the model computed
with. It reads as ``cache["model.transformer.h.0"].output`` or ``cache.model.transformer.h[0].output``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from ..tracing import save
from ..tracing.errors import did_you_mean

if TYPE_CHECKING:
    from .interleaver import Interleaver
    from .mediator import Mediator


class MissingEntryError(AttributeError, KeyError, IndexError):
    """Something was looked up in a cache that it does not hold; by key, number and attribute alike."""

    __str__ = Exception.__str__  # not that of KeyError, which quotes


class CacheEntry:
    """Values of one module. When the module ran several times, each is a list with one item for each call.

    ``len(entry)`` is the number of calls, ``entry[i]`` and iteration give the entry of one call.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._values: dict[str, list[Any]] = {"input": [], "output": []}

    def __len__(self) -> int:
        return max(map(len, self._values.values()))

    def __getitem__(self, call: int) -> CacheEntry:
        call = range(len(self))[call]
        one = CacheEntry(self.path)
        one._values = {key: values[call : call + 1] for key, values in self._values.items()}
        return one

    def __iter__(self) -> Iterator[CacheEntry]:
        return (self[call] for call in range(len(self)))

    def _get(self, key: str) -> Any:
        found = self._values[key]
        return found[0] if len(found) == 1 else found or None

    @property
    def output(self) -> Any:
        """What the module returned; None if outputs are not kept."""
        return self._get("output")

    @property
    def inputs(self) -> Any:
        """All arguments of the module, as ``(args, kwargs)``; None if inputs are not kept."""
        return self._get("input")

    @property
    def input(self) -> Any:
        """The first argument of the module; None if there was none, or inputs are not kept."""
        first = [args[0] if args else next(iter(kwargs.values()), None) for args, kwargs in self._values["input"]]
        return first[0] if len(first) == 1 else first or None

    def __repr__(self) -> str:
        counts = ", ".join(f"{len(values)} {key}" for key, values in self._values.items() if values)
        return f"CacheEntry({self.path}: {counts or 'empty'})"


class CacheCalls(list[CacheEntry], CacheEntry):
    """The entry of a module that ran several times, which is also the list of the entries of its calls."""

    def __init__(self, entry: CacheEntry) -> None:
        list.__init__(self, entry)
        self.__dict__.update(vars(entry))

    __repr__ = CacheEntry.__repr__


def resolve_alias(path: str, aliases: Mapping[str, str]) -> str:
    """Return the module's own path for one that may go through further names."""
    for alias, known in aliases.items():
        if path == alias or path.startswith(f"{alias}."):
            return resolve_alias(known + path.removeprefix(alias), aliases)
    return path


def paths_to_cache(modules: Any, known: Sequence[str], aliases: Mapping[str, str]) -> list[str]:
    """Return the paths of what the user chose: envoys or paths; all of ``known`` for ``None``."""
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
            named = module if isinstance(module, str) else path
            raise ValueError(f"tracer.cache(): no module of this model has the path {named!r}.{did_you_mean(path, known)}")
        paths.append(path)
    return paths


class Cache(Mapping[str, "CacheEntry | CacheCalls"]):
    """Activations by module path, and by attribute along the path. It has the modules that ran, in that order, no others.

    Args:
        paths: The modules to keep.
        aliases: Path by further name of a module, for renamed modules.
        device: As for :meth:`.InterleavingTracer.cache`.
        dtype: Likewise.
        detach: Likewise.
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
        non_blocking: bool = False,
    ) -> None:
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise TypeError(f"The dtype of a cache is one of torch, such as torch.float16; not {dtype!r}.")
        if device is not None:
            torch.device(device)  # raises for a name that torch does not know, here rather than in the model
        self._entries = {path: CacheEntry(path) for path in paths}
        self._aliases = aliases
        self._device, self._dtype, self._detach = device, dtype, detach
        self._keys, self._non_blocking = tuple(keys), non_blocking

    def attach(self, run: Interleaver, mediator: Mediator) -> None:
        """Keep what passes in ``run`` from here on, of the rows of ``mediator``.

        Raises:
            OutOfOrderError: If the run can never offer one of the locations.
        """
        run.caches.append((mediator, self))
        for path, key in itertools.product(self._entries, self._keys):
            run.check_request(f"{path}.{key}")
            run.observe(f"{path}.{key}", partial(self.observe, path, key), mediator)

    def missed(self) -> list[str]:
        """Return the paths of the modules that were not called."""
        return [path for path, entry in self._entries.items() if not len(entry)]

    def observe(self, path: str, key: str, value: Any) -> None:
        """Keep a copy of ``value``, which is at ``<path>.<key>`` now."""
        if not len(self._entries[path]):  # comes behind those that ran before
            self._entries[path] = self._entries.pop(path)
        self._entries[path]._values[key].append(pytree.tree_map(self._kept, value))

    def _kept(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        kept = leaf.detach() if self._detach else leaf
        dtype = self._dtype if leaf.is_floating_point() else None
        # A copy in any case: later edits in place are not this module's.
        return kept.to(device=self._device, dtype=dtype, copy=True, non_blocking=self._non_blocking)

    def save(self) -> Cache:
        """Return the cache, which is saved already.

        Raises:
            ValueError: Outside a trace.
        """
        return save(self)

    def __getitem__(self, path: str) -> CacheEntry | CacheCalls:
        entry = self._entries.get(resolve_alias(path, self._aliases)) or self._entries.get(resolve_alias(self._rooted(path), self._aliases))
        if entry is None:
            raise MissingEntryError(
                f"`{path}` is not in the cache; it has {len(self)} modules, by paths such as `{next(iter(self), '-')}`."
            )
        if not len(entry):
            raise MissingEntryError(f"The cache has nothing of `{path}`: the module did not run after the cache was made.")
        return entry if len(entry) == 1 else CacheCalls(entry)

    def __iter__(self) -> Iterator[str]:
        return (path for path, entry in self._entries.items() if len(entry))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def keys(self) -> list[str]:  # type: ignore[override]
        """Return the paths of the modules that ran, in that order."""
        return list(self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self.view(self._rooted(name))

    def view(self, path: str) -> CacheView:
        """Return the position at a path, which leads to modules that are kept; raise :class:`MissingEntryError` if it leads to none."""
        start = resolve_alias(path, self._aliases)
        if not any(known == start or known.startswith(f"{start}.") for known in (*self._entries, *self._aliases)):
            raise MissingEntryError(f"The cache has no module at `{path}`, nor below it.{did_you_mean(path, list(self._entries))}")
        return CacheView(self, path)

    def _rooted(self, path: str) -> str:
        """Return ``path``, which may lack the name of the root, with it."""
        root = next(iter(self._entries), path).partition(".")[0]
        return path if path.partition(".")[0] == root else f"{root}.{path}"


class CacheView:
    """A position along a path of a cache. As a collection it has the paths of the cache from there on."""

    def __init__(self, cache: Cache, path: str) -> None:
        self._cache, self._path = cache, path

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._cache[self._path], name) if name in ("output", "input", "inputs") else self[name]

    def save(self) -> CacheView:
        """Return this position, whose cache is saved already."""
        return save(self)

    def __getitem__(self, index: int | str) -> CacheView:
        return self._cache.view(f"{self._path}.{index}")

    def __iter__(self) -> Iterator[str]:
        start = resolve_alias(self._path, self._cache._aliases)
        return (path for path in self._cache if path == start or path.startswith(f"{start}."))

    def __contains__(self, path: str) -> bool:
        return path in set(self) or f"{self._path}.{path}" in self._cache

    def keys(self) -> list[str]:
        """Return the paths of the cache from here on."""
        return list(iter(self))

    def __len__(self) -> int:
        """Return how often the module here ran; of a container, which does not run, how many modules below it did."""
        return len(self._cache[self._path]) if self._path in self._cache else len(self.keys())

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"CacheView({self._path})"
