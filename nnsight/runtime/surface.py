"""The parts of an interleaver that only extensions use, and the events and exceptions of a run.

The engine itself needs :meth:`~nnsight.runtime.interleaver.Interleaver.handle` and the request, swap and skip of a mediator. What
stands here is for those who write tracers, drivers and properties of their own against the documented names. Nearly all of it is
read off what the engine keeps anyway, and what is not is kept from its first use on. That of a mediator is in
:mod:`.mediator_surface`, and how a driver serves a block in :mod:`.exchange`.

A *requester* is the name of a location, with or without the number of a passage: ``model.layer.output`` is the passage that
requests of the block ask for now, ``model.layer.output.i2`` is the third one.
"""

from __future__ import annotations

import types
import warnings
from enum import Enum
from typing import TYPE_CHECKING, Any

from .batcher import Batcher

if TYPE_CHECKING:
    import torch

    from .mediator import Mediator


#: Behind a location: what the model has returned by then, for blocks that were shown what stands for it.
RETURNED = " (returned)"


class Events(Enum):
    """What a block can ask of its run, see :meth:`Exchange.send`."""

    VALUE = "value"
    SWAP = "swap"
    END = "end"
    EXCEPTION = "exception"
    SKIP = "skip"
    BARRIER = "barrier"


class EarlyStopException(Exception):
    """Raised in a block by ``tracer.stop()``; ends the run without being an error."""


class SkipException(Exception):
    """Raised in a block that stands at the input of a module: ends the block, and the module returns ``value`` unrun.

    Args:
        value: What the module returns.
    """

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.value = value


def split_requester(requester: str) -> tuple[str, int | None]:
    """Return location and number of the passage that ``requester`` names; ``None`` if it names no passage."""
    location, dot, number = requester.rpartition(".i")
    return (location, int(number)) if dot and number.isdecimal() else (requester, None)


class InterleaverSurface:
    """Members of :class:`~nnsight.runtime.interleaver.Interleaver` for extensions."""

    __slots__ = ()

    @property
    def batcher(self: Any) -> Batcher:
        """The value that the run has stopped at, and the rows of each block. A new look at them each time."""
        return Batcher(self)

    @property
    def _offered(self) -> tuple[str | None, Any]:
        """What a driver of one's own offers, and where."""
        return getattr(self, "_held_out", (None, None))

    @_offered.setter
    def _offered(self: Any, offered: tuple[str | None, Any]) -> None:
        self._held_out = offered

    @property
    def defer_exceptions(self) -> bool:
        """Whether what a block raises ends that block only, and is kept as its ``deferred_exception``; false by default.

        For runs that serve several users: the error of one must not end the run of the others. Whoever sets it has to look.
        """
        return getattr(self, "_defers", False)

    @defer_exceptions.setter
    def defer_exceptions(self: Any, defers: bool) -> None:
        self._defers = defers

    def wrap_module(self: Any, module: torch.nn.Module, path: str | None = None) -> None:
        """Let blocks wait for the calls of a module that is no part of the model, from now to the end of this run.

        The modules of the model need no preparation: they are intercepted while the run is active. A graph
        that a compiled trace has captured does not contain the locations: trace with ``compile=False``.

        Args:
            module: The module.
            path: Prefix of its locations, ``<path>.input`` and ``<path>.output``.

        Raises:
            ValueError: If the run is not active, if ``path`` is missing for a module that the model does not have, or if the
                module is known by another path.
        """
        from .instrumentation import intercept_alone

        if not self.interleaving or not self.mediators:
            raise ValueError("A module is intercepted for the time of a run: wrap it in a block, or in `with interleaver:`.")
        known = None if self.tree is None else self.tree.paths.get(module)
        if known is not None and path in (None, known):
            return
        if known is not None:
            raise ValueError(f"The {type(module).__name__} is `{known}` in this model: it cannot be `{path}` too.")
        if path is None:
            raise ValueError(f"The {type(module).__name__} is no module of this model: say by what `path` its calls are known.")
        hooks = (self.current or self.mediators[0]).hooks
        hooks.append(types.SimpleNamespace(remove=intercept_alone(module, path), wrapped=path))

    def is_uncaptured(self: Any, location: str) -> bool:
        """Whether ``location`` is of a module that :meth:`wrap_module` has wrapped in a compiled run."""
        if getattr(getattr(self.tracer, "report", None), "mode", None) != "compiled":
            return False
        path = location.rpartition(".")[0]
        return any(getattr(hook, "wrapped", None) == path for mediator in self.mediators for hook in mediator.hooks)

    def check_cache_full(self: Any) -> None:
        """Warn of the modules that a cache of this run was to keep, and that have not been called since it was made."""
        for mediator in self.mediators:
            for cache in mediator.user_cache:
                missed = cache._missed()
                if missed:
                    warnings.warn(
                        f"A cache of {mediator.name!r} has nothing of {', '.join(f'`{path}`' for path in missed)}: not called "
                        "in this run since the cache was made.",
                        UserWarning,
                        stacklevel=2,
                    )

    def initialize(self: Any, mediators: list[Mediator], tracer: Any = None, batcher: Batcher | None = None) -> None:
        """Prepare for a new run, with nothing of an earlier one.

        Raises:
            ValueError: If this run is active.
        """
        if self.interleaving:
            raise ValueError("This interleaver is in the middle of a run; initialize it before or after.")
        type(self).__init__(self, mediators, tracer, batcher)
        self.defer_exceptions, self._offered = False, (None, None)

    def iterate_requester(self: Any, requester: str) -> str:
        """Return ``requester`` with the number of the passage that the running block asks for now.

        ``model.layer.output`` becomes ``model.layer.output.i0``; a requester that has a number keeps it.

        Raises:
            ValueError: If no block is running.
        """
        if self.current is None:
            raise ValueError(f"Which passage of `{requester}` is meant, is known while a block runs only.")
        location, occurrence = split_requester(requester)
        return requester if occurrence is not None else f"{location}.i{self.current.next_occurrence(location)}"

    def check_dangling_mediators(self: Any) -> None:
        """End the blocks after the model has returned; the same as :meth:`Interleaver.finish`."""
        self.finish()

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        """Return one without blocks: a run belongs to its model and its thread, and cannot be copied."""
        return type(self)([])
