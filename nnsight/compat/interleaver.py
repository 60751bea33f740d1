"""A run, its current value and the rows of its blocks, with the documented names of earlier versions."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..runtime import interleaver as runtime
from ..runtime.interleaver import split_requester
from ..runtime.rows.batching import BatchGroup, View

if TYPE_CHECKING:
    import torch

    from ..runtime.mediator import Mediator

Rows = BatchGroup | Sequence[int]


class Batcher:
    """The current value of a run, and the rows of each block in it.

    In a block, it is the value at the location where the model has stopped. In a driver, it is the value that the driver has assigned for
    :meth:`Mediator.handle_value_event` and similar methods. Rows are a ``batch_group``, or the first row and the number of rows.
    """

    def __init__(self, run: Interleaver) -> None:
        self._run = run

    @property
    def last_batch_group(self) -> BatchGroup | None:
        """The last rows of the batch; ``None`` if no block has rows of its own."""
        groups = [mediator.batch_group for mediator in self._run.mediators if mediator.batch_group is not None]
        return max(groups, key=lambda group: group.start, default=None)

    total_batch_size = property(lambda self: getattr(self.last_batch_group, "total", None), doc="Rows of the whole batch.")

    @property
    def current_provider(self) -> str | None:
        """Location and occurrence of the value, such as ``model.layer.output.i0``. Drivers can assign it, blocks cannot."""
        return self._run.offered[0] if self._run.current is None else self._run.current.last_visited

    @current_provider.setter
    def current_provider(self, provider: str | None) -> None:
        if self._run.current is not None:
            raise ValueError("A block cannot move the model: only a driver, which calls the blocks, can assign `current_provider`.")
        self._run.offered = provider, self.current_value

    @property
    def current_value(self) -> Any:
        """The value of the whole batch, with the edits that the running block has made to its rows; an assignment replaces it."""
        return self._run.offered[1] if self._run.current is None else self._run.current.whole_value

    @current_value.setter
    def current_value(self, value: Any) -> None:
        self.swap(None, value)

    def narrow(self, batch_group: Rows | None) -> Any:
        """Return the rows ``batch_group`` of the value; all rows for ``None``."""
        return self.current_value if batch_group is None else self._view(batch_group).value

    def swap(self, batch_group: Rows | None, value: Any) -> None:
        """Replace the rows ``batch_group`` of the value; all rows for ``None``. A block with rows of its own can replace only these."""
        mediator = self._run.current
        own = None if mediator is None else mediator.batch_group
        if own is not None and (batch_group is None or tuple(batch_group) != tuple(own)):
            raise ValueError("A block can replace only its own rows: use `swap(mediator.batch_group, value)`.")
        if own is None and batch_group is not None:
            value = self._view(batch_group).widen(value)
        if mediator is None:
            self._run.offered = self.current_provider, value
        else:
            mediator.swap(f"{mediator.last_visited}", value)

    def _view(self, rows: Rows) -> View:
        if not isinstance(rows, BatchGroup):
            last = self.last_batch_group
            if last is None:
                raise ValueError("The number of rows of the batch is not known: no block of this run has rows. Pass a `BatchGroup`.")
            rows = BatchGroup(rows[0], rows[1], last.total, last.dims)
        location, occurrence = split_requester(self.current_provider or "")
        return rows.view(location, occurrence or 0, self.current_value)


class Interleaver(runtime.Interleaver):
    """One run, see :class:`nnsight.runtime.interleaver.Interleaver`."""

    def __init__(self, mediators: Iterable[Mediator] = (), tracer: Any = None, batcher: None = None, **options: Any) -> None:
        if batcher is not None:
            raise TypeError("An interleaver takes no batcher, since it has its own: pass a `batch_group` to each mediator instead.")
        super().__init__(mediators, tracer, **options)
        #: Whether an error of a block ends only that block, and is kept as its `deferred_exception`: for runs that serve several users.
        self.defer_exceptions = False
        self.offered: tuple[str | None, Any] = (None, None)  # the provider and the value that a driver has assigned to the batcher

    batcher = property(Batcher, doc="The current value of the run, and the rows of each block.")

    def initialize(self, mediators: list[Mediator], tracer: Any = None, batcher: None = None) -> None:
        """Reset this object for a new run. Raises ``ValueError`` during a run."""
        if self.interleaving:
            raise ValueError("This interleaver is in the middle of a run: initialize it before or after the run.")
        Interleaver.__init__(self, mediators, tracer, batcher)

    def iterate_requester(self, requester: str) -> str:
        """Return ``requester`` with the occurrence that the running block asks for now, as in ``model.layer.output.i0``."""
        if self.current is None:
            raise ValueError(f"The occurrence of `{requester}` depends on the running block, and no block is running.")
        location, occurrence = split_requester(requester)
        return requester if occurrence is not None else f"{location}.i{self.current.next_occurrence(location)}"

    def wrap_module(self, module: torch.nn.Module) -> None:
        """Do nothing for a module of the model, which needs no preparation; raise ``ValueError`` for another module."""
        if self.tree is None or module not in self.tree.paths:
            name = type(module).__name__
            raise ValueError(f"The {name} is not a module of the model that runs here. Make it one: `model.extra = module`.")

    def check_dangling_mediators(self) -> None:
        """End the blocks after the model has returned. An alias of :meth:`finish`."""
        self.finish()

    def check_cache_full(self) -> None:
        """Warn of modules that a cache of this run should keep, but that have not been called since the cache was made."""
        for mediator, cache in self.caches:
            missed = ", ".join(f"`{path}`" for path in cache.uncalled_modules())
            if missed:
                message = f"A cache of {mediator.name!r} has nothing of {missed}: not called since the cache was made."
                warnings.warn(message, UserWarning, stacklevel=2)

    def __deepcopy__(self, memo: dict[int, Any]) -> Interleaver:
        """Return a new run without blocks, because a run belongs to its model and its thread, and cannot be copied."""
        return Interleaver()
