"""The parts of a mediator that only extensions use, read off what the engine keeps; see :mod:`.surface`."""

from __future__ import annotations

import sys
import types
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from greenlet import greenlet

from ..tracing.block import Branch, variables_of
from .cache import Cache


class MediatorSurface:
    """Members of :class:`~nnsight.runtime.mediator.Mediator` for extensions."""

    __slots__ = ()

    _hooks: list[Any] | None
    intervention: Callable[..., Any] | None

    def __enter__(self: Any) -> Any:
        """Return the mediator, which ends with the ``with`` statement: for one that is started without ``with run:``."""
        return self

    def __exit__(self: Any, kind: object, error: BaseException | None, traceback: object) -> None:
        self.cancel()

    def __getstate__(self: Any) -> dict[str, Any]:
        """Return what a copy, or another process, needs to run the block. Whether a function can be pickled is another matter.

        Raises:
            ValueError: If the block runs or has run.
        """
        if self.intervention is None:
            raise ValueError(f"The block of {self.name!r} has begun already: copy or pickle a mediator before its run.")
        return {
            "intervention": self.intervention,
            "info": self.info,
            "name": self.name,
            "batch_group": self.batch_group,
            "publish": self._publish,
            "iteration": self.iteration,
            "all_stop": self.all_stop,
        }

    def __setstate__(self: Any, state: dict[str, Any]) -> None:
        given = dict(state)
        iteration, self._all_stop = given.pop("iteration"), given.pop("all_stop")
        type(self).__init__(self, **given)
        self.iteration = iteration

    # -- what it knows ------------------------------------------------------------------------------------------

    @property
    def idx(self: Any) -> int | None:
        """Position among the blocks of the run; ``None`` outside of one."""
        run = self.interleaver
        return run.mediators.index(self) if run is not None and self in run.mediators else None

    @property
    def worker(self: Any) -> greenlet | None:
        """The greenlet that runs the block."""
        return self._greenlet

    @property
    def frame(self: Any) -> types.FrameType | None:
        """The frame of the block's function; ``None`` before it has started and after it has ended."""
        if self._greenlet is None or not self._greenlet:
            return None
        inner: types.FrameType | None = self._greenlet.gr_frame or sys._getframe(1)
        main, repeated = type(self)._main.__code__, _Repeated.__call__.__code__
        called: types.FrameType | None = None
        while inner is not None:
            outer = inner.f_back
            if outer is not None and outer.f_code is main and variables_of(outer).get("self") is self:
                return called if inner.f_code is repeated else inner
            called, inner = inner, outer
        return None

    @property
    def original_globals(self: Any) -> dict[str, Any]:
        """The globals of the block's function, which a run leaves as they are; empty once the block has ended."""
        frame = self.frame
        if frame is not None:
            return frame.f_globals
        function = self.intervention
        while isinstance(function, (partial, _Repeated)):
            function = function.func
        return getattr(function, "__globals__", {})

    @property
    def args(self: Any) -> tuple[Any, ...]:
        """What the block's function is called with; nothing, unless it is set before the run."""
        return self.intervention.args if isinstance(self.intervention, partial) else ()

    @args.setter
    def args(self: Any, args: Iterable[Any]) -> None:
        function = self.intervention
        if function is None:
            raise ValueError(f"The block of {self.name!r} has begun already, so it can be given no arguments any more.")
        self.intervention = partial(function.func if isinstance(function, partial) else function, *args)

    @property
    def all_stop(self: Any) -> int | None:
        """How often the block runs; ``None`` where nothing was said, which is once."""
        return getattr(self, "_all_stop", None)

    def _repeat(self: Any, times: int) -> None:
        """Let the block run several times."""
        if isinstance(times, bool) or not isinstance(times, int):
            raise TypeError(f"`stop` is how often the block runs, an int; not {type(times).__name__}.")
        if times < 1:
            raise ValueError(f"`stop` is how often the block runs, at least once; not {times}.")
        self._all_stop, self.intervention = times, _Repeated(self.intervention, times)

    @property
    def skip_container(self: Any) -> dict[str, Any] | None:
        """What the block wants modules to return unrun that the model is about to call, by input location; else ``None``."""
        skips = {} if self.interleaver is None else self.interleaver.skips
        return {location: asked[self] for location, asked in skips.items() if self in asked} or None

    @property
    def user_cache(self: Any) -> list[Cache]:
        """The caches that this block has opened in the run."""
        caches: dict[int, Cache] = {}
        observers = {} if self.interleaver is None else self.interleaver.observers
        for mediator, observer in (pair for pairs in observers.values() for pair in pairs):
            cache = getattr(getattr(observer, "func", None), "__self__", None)
            if mediator is self and isinstance(cache, Cache):
                caches[id(cache)] = cache
        return list(caches.values())

    def set_user_cache(self: Any, cache: Cache) -> None:
        """Let ``cache`` keep what its modules return, and are given, from here on; of the rows of this block.

        Raises:
            ValueError: If the block is in no run.
            OutOfOrderError: If the run can never offer one of its locations.
        """
        run = self.interleaver
        if run is None:
            raise ValueError(f"{self.name!r} is in no run, so there is nothing for the cache to keep.")
        for path, key in cache._locations():
            run.check_request(f"{path}.{key}")
            run.observe(f"{path}.{key}", partial(cache.observe, path, key), self)

    @property
    def history(self: Any) -> set[str]:
        """The passages that the run has made so far, such as ``model.layer.output.i0``."""
        counts = {} if self.interleaver is None else self.interleaver.counts
        return {f"{location}.i{number}" for location, count in counts.items() for number in range(count)}

    @property
    def iteration_tracker(self: Any) -> Counter[str]:
        """How often the run has passed each location so far; 0 for others. A copy."""
        return Counter({} if self.interleaver is None else self.interleaver.counts)

    @property
    def hooks(self: Any) -> list[Any]:
        """Handles with a method ``remove()``, called when the run ends. For hooks that the author of a property registers."""
        if self._hooks is None:
            self._hooks = []
        return self._hooks

    def remove_hooks(self: Any) -> None:
        """Remove the :attr:`hooks`."""
        hooks, self._hooks = self._hooks or [], None
        for hook in hooks:
            hook.remove()

    @property
    def transform(self: Any) -> Callable[[], Any] | None:
        """Called without arguments when the block moves on; what it returns replaces the value of this visit."""
        return self._on_leave[-1] if self._on_leave else None

    @transform.setter
    def transform(self: Any, function: Callable[[], Any]) -> None:
        self.on_leave(function)

    # -- what it shares -----------------------------------------------------------------------------------------

    def push(self: Any) -> None:
        """Show the variables of the block to the others now, and not only where it waits."""
        if self._publish is not None:
            self._publish()

    def pull(self: Any) -> None:
        """Bind the variables that this block assigns, and has not assigned yet, to what other blocks have pushed.

        Variables that it only reads are shared, so there is nothing to move.
        """
        branch = getattr(self._publish, "__self__", None)
        if isinstance(branch, Branch):
            branch.pull()

    @property
    def cross_invoker(self: Any) -> bool:
        """Whether the block shows its variables to others, while it can still run."""
        return self._publish is not None


class _Repeated:
    """A block that runs several times, each time for the next passage of its locations."""

    def __init__(self, func: Callable[..., Any], times: int) -> None:
        self.func = func
        self._times = times

    def __call__(self, *args: Any) -> None:
        from .iteration import IteratorTracer

        for _ in IteratorTracer(range(self._times)):
            self.func(*args)
