"""The value that a run has stopped at, and the rows of it that belong to each block, for drivers of one's own.

The engine needs none of it: :meth:`Mediator.visit` narrows and widens by itself, see :mod:`.batching`. A :class:`Batcher` is a look at
a run in the documented words. Inside a block it shows the value of the whole batch where the model stands. Outside of the
blocks it holds what a driver puts there for :meth:`Mediator.handle_value_event` and its kin.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..tracing.block import variables_of
from .batching import BatchGroup

if TYPE_CHECKING:
    from .interleaver import Interleaver
    from .mediator import Mediator


class Batcher:
    """The value and the rows of one run.

    Args:
        interleaver: The run.
    """

    __slots__ = ("_run",)

    def __init__(self, interleaver: Interleaver) -> None:
        self._run = interleaver

    @property
    def _standing(self) -> Mediator | None:
        """The block whose code is running, if the model stands at a location for it."""
        mediator = self._run.current
        return mediator if mediator is not None and mediator._location is not None else None

    @property
    def total_batch_size(self) -> int | None:
        """Rows of the whole batch; ``None`` where no block has rows of its own."""
        last = self.last_batch_group
        return None if last is None else last.total

    @property
    def last_batch_group(self) -> BatchGroup | None:
        """The rows at the end of the batch; unpacks to first row and number of rows."""
        groups = [mediator.batch_group for mediator in self._run.mediators if mediator.batch_group is not None]
        return max(groups, key=lambda group: group.start, default=None)

    @property
    def current_provider(self) -> str | None:
        """The passage at which :attr:`current_value` is, such as ``model.layer.output.i0``; ``None`` where nothing is offered."""
        mediator = self._standing
        return self._run._offered[0] if mediator is None else mediator.last_visited

    @current_provider.setter
    def current_provider(self, provider: str | None) -> None:
        if self._standing is not None:
            raise ValueError("A block cannot move the model: `current_provider` is for what calls the blocks.")
        self._run._offered = provider, self._run._offered[1]

    @property
    def current_value(self) -> Any:
        """The value of the whole batch.

        In a block it is what the model has where it stands, with what this block has made of its rows; assigning
        replaces it. Elsewhere it is what a driver has assigned.

        Raises:
            ValueError: If a block that has rows of its own assigns.
        """
        mediator = self._standing
        if mediator is None:
            return self._run._offered[1]
        visit = variables_of(_frame_of_visit(mediator))
        left = visit["self"]._value
        return left if visit["view"] is None else visit["view"].widen(left)

    @current_value.setter
    def current_value(self, value: Any) -> None:
        mediator = self._standing
        if mediator is None:
            self._run._offered = self._run._offered[0], value
        elif mediator.batch_group is not None:
            raise ValueError("A block replaces its own rows only: use `swap(mediator.batch_group, value)`.")
        else:
            mediator.swap(f"{mediator.last_visited}", value)

    def narrow(self, batch_group: BatchGroup | Sequence[int] | None) -> Any:
        """Return the rows ``batch_group`` of :attr:`current_value`; all for ``None``.

        Args:
            batch_group: As a mediator has it, or first row and number of rows.
        """
        return self.current_value if batch_group is None else self._view(batch_group).value

    def swap(self, batch_group: BatchGroup | Sequence[int] | None, value: Any) -> None:
        """Replace the rows ``batch_group`` of :attr:`current_value` by ``value``; all for ``None``.

        Raises:
            ReplacementShapeError: If ``value`` does not fit in their place.
            ValueError: If a block replaces rows of another.
        """
        mediator = self._standing
        if mediator is not None and mediator.batch_group is not None:
            if batch_group is None or tuple(batch_group) != tuple(mediator.batch_group):
                raise ValueError("A block replaces its own rows only: those of `mediator.batch_group`.")
            mediator.swap(f"{mediator.last_visited}", value)
        else:
            self.current_value = value if batch_group is None else self._view(batch_group).widen(value)

    def _view(self, batch_group: BatchGroup | Sequence[int]) -> Any:
        if not isinstance(batch_group, BatchGroup):
            start, size = batch_group
            last = self.last_batch_group
            if last is None:
                raise ValueError(
                    "How many rows the whole batch has is not known, as no block of this run has rows of its own: give a "
                    "`BatchGroup(start, size, total)`."
                )
            batch_group = BatchGroup(start, size, last.total, last.dims)
        location, _, number = (self.current_provider or "").rpartition(".i")
        return batch_group.view(location, int(number or 0), self.current_value)


def check_batcher(batcher: Any) -> None:
    """Raise unless ``batcher`` adds nothing to the one that each run has.

    Raises:
        TypeError: For a class of one's own: the engine would not call it.
    """
    if type(batcher) is not Batcher:
        raise TypeError(
            f"A run narrows and widens values by itself and would not call the {type(batcher).__name__}: an interleaver takes "
            "no batcher of one's own. Give each mediator its `batch_group`; where rows lie is said by `BatchGroup(..., dims=...)`."
        )


def _frame_of_visit(mediator: Mediator) -> types.FrameType:
    """Return the frame in which the model waits for ``mediator``, which stands at a location."""
    from .mediator import Mediator

    worker = mediator.worker
    assert worker is not None and worker.parent is not None
    frame = worker.parent.gr_frame
    code = Mediator.visit.__code__
    while frame is not None and (frame.f_code is not code or variables_of(frame)["self"] is not mediator):
        frame = frame.f_back
    assert frame is not None
    return frame
