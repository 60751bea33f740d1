"""``tracer.cache()``: the activations of many modules in one object.

A cache observes each value as it leaves its location, after the blocks of the run have edited it. So it has the values with which the
model continued. Read it as ``cache["model.transformer.h.0"].output`` or ``cache.model.transformer.h[0].output``.
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
from .batched_containers import is_batched_container, is_cache, on_tensors

if TYPE_CHECKING:
    from .interleaver import Interleaver
    from .mediator import Mediator


class MissingEntryError(AttributeError, KeyError, IndexError):
    """A cache has no entry for a path, an index or an attribute. It is an error of all three kinds of look-up."""

    __str__ = Exception.__str__  # KeyError would put the message in quotes


class CacheEntry:
    """The cached values of one module. If the module ran several times, each value is a list with one item for each call.

    ``len(entry)`` is the number of calls. ``entry[i]`` is the entry of one call, and iteration yields these entries.
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
        """The output of the module; None if the cache does not keep outputs."""
        return self._get("output")

    @property
    def inputs(self) -> Any:
        """All arguments of the module, as ``(args, kwargs)``; None if the cache does not keep inputs."""
        return self._get("input")

    @property
    def input(self) -> Any:
        """The first argument of the module; None if it had no argument, or if the cache does not keep inputs."""
        first = [args[0] if args else next(iter(kwargs.values()), None) for args, kwargs in self._values["input"]]
        return first[0] if len(first) == 1 else first or None

    def __repr__(self) -> str:
        counts = ", ".join(f"{len(values)} {key}" for key, values in self._values.items() if values)
        return f"CacheEntry({self.path}: {counts or 'empty'})"


class CacheCalls(list[CacheEntry], CacheEntry):
    """The entry of a module that ran several times. It is also a list of the entries of the single calls."""

    def __init__(self, entry: CacheEntry) -> None:
        list.__init__(self, entry)
        self.__dict__.update(vars(entry))

    __repr__ = CacheEntry.__repr__


def resolve_alias(path: str, aliases: Mapping[str, str]) -> str:
    """Return the module's own path for ``path``, which may contain aliases of modules."""
    for alias, known in aliases.items():
        if path == alias or path.startswith(f"{alias}."):
            return resolve_alias(known + path.removeprefix(alias), aliases)
    return path


def paths_to_cache(modules: Any, known: Sequence[str], aliases: Mapping[str, str]) -> list[str]:
    """Return the paths of ``modules``, which are envoys or ``known`` paths; for ``None`` all ``known`` paths."""
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
    """A mapping from module paths to entries, readable by attribute too. It contains only modules that ran, in the order of first calls.

    Args:
        paths: Paths of the modules to keep.
        aliases: Module path by alias, for renamed modules.
        device: As for :meth:`.InterleavingTracer.cache`; likewise ``dtype``, ``detach`` and ``non_blocking``.
        keys: The values to keep of each module: ``"output"``, ``"input"`` or both.

    Raises:
        TypeError: If ``dtype`` is not a torch dtype.
        RuntimeError: If torch does not know the ``device``.
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
            raise TypeError(f"The dtype of a cache must be a torch dtype, such as torch.float16, not {dtype!r}.")
        if device is not None:
            torch.device(device)  # raises here, at the user's line, for a name that torch does not know
        self._entries = {path: CacheEntry(path) for path in paths}
        self._aliases = aliases
        self._device, self._dtype, self._detach = device, dtype, detach
        self._keys, self._non_blocking = tuple(keys), non_blocking

    def attach(self, run: Interleaver, mediator: Mediator) -> None:
        """Start to keep the values of ``run``, narrowed to the rows of ``mediator``.

        Raises:
            OutOfOrderError: If the run can never offer one of the locations.
        """
        run.caches.append((mediator, self))
        for path, key in itertools.product(self._entries, self._keys):
            run.check_request(f"{path}.{key}")
            run.observe(f"{path}.{key}", partial(self.observe, path, key), mediator)

    def uncalled_modules(self) -> list[str]:
        """Return the paths of the modules that were not called."""
        return [path for path, entry in self._entries.items() if not len(entry)]

    def observe(self, path: str, key: str, value: Any) -> None:
        """Keep a copy of ``value``, which has just left ``<path>.<key>``."""
        if not len(self._entries[path]):  # the first call: entries are in the order in which modules first ran
            self._entries[path] = self._entries.pop(path)
        self._entries[path]._values[key].append(pytree.tree_map(self._copied, value, is_leaf=is_batched_container))

    def _copied(self, leaf: Any) -> Any:
        if is_batched_container(leaf) and not is_cache(type(leaf)):  # the keys and values of a cache grow with each module
            return on_tensors(leaf, lambda _, tensor: self._copied(tensor))
        if not isinstance(leaf, torch.Tensor):
            return leaf
        kept = leaf.detach() if self._detach else leaf
        dtype = self._dtype if leaf.is_floating_point() else None
        # Always a copy, so that later in-place edits do not change the cached value.
        return kept.to(device=self._device, dtype=dtype, copy=True, non_blocking=self._non_blocking)

    def save(self) -> Cache:
        """Return the cache. A cache is always saved; this method exists so that ``tracer.cache().save()`` works.

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
        """Return a view of the entries at and below ``path``; raises :class:`MissingEntryError` if no cached module is there."""
        start = resolve_alias(path, self._aliases)
        if not any(known == start or known.startswith(f"{start}.") for known in (*self._entries, *self._aliases)):
            raise MissingEntryError(f"The cache has no module at `{path}`, nor below it.{did_you_mean(path, list(self._entries))}")
        return CacheView(self, path)

    def _rooted(self, path: str) -> str:
        """Return ``path`` with the name of the root module in front, if it is missing."""
        root = next(iter(self._entries), path).partition(".")[0]
        return path if path.partition(".")[0] == root else f"{root}.{path}"


class CacheView:
    """A cache seen from a path inside it, such as ``cache.model.transformer``. As a collection it has the cached paths at and below it."""

    def __init__(self, cache: Cache, path: str) -> None:
        self._cache, self._path = cache, path

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._cache[self._path], name) if name in ("output", "input", "inputs") else self[name]

    def save(self) -> CacheView:
        """Return this view. Its cache is always saved."""
        return save(self)

    def __getitem__(self, index: int | str) -> CacheView:
        return self._cache.view(f"{self._path}.{index}")

    def __iter__(self) -> Iterator[str]:
        start = resolve_alias(self._path, self._cache._aliases)
        return (path for path in self._cache if path == start or path.startswith(f"{start}."))

    def __contains__(self, path: str) -> bool:
        return path in set(self) or f"{self._path}.{path}" in self._cache

    def keys(self) -> list[str]:
        """Return the cached paths at and below this path."""
        return list(iter(self))

    def __len__(self) -> int:
        """Return the number of calls of the module at this path; for a container, which is not called, how many modules below it ran."""
        return len(self._cache[self._path]) if self._path in self._cache else len(self.keys())

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"CacheView({self._path})"
