"""Invokes: several blocks, each with its own input or over the whole batch, in one run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..config import CONFIG
from ..tracing import Tracer
from .interleaver import Interleaver, active_interleaver

if TYPE_CHECKING:
    from .tracer import InterleavingTracer


@dataclass(eq=False)
class Invoke:
    """A block that waits for its run.

    Attributes:
        function: The block.
        args: Its input; without any the block sees the whole batch.
        kwargs: Its input, by name.
        publish: Shows the variables of the block to the others.
    """

    function: Callable[[], None]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    publish: Callable[[], None] | None = None

    @property
    def has_input(self) -> bool:
        """Whether the invoke adds rows to the batch."""
        return bool(self.args or self.kwargs)


class Invoker(Tracer):
    """The context manager of ``tracer.invoke(...)``: hands its block to the trace instead of running it."""

    def __init__(self, trace: InterleavingTracer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self._trace = trace
        self._input = (args, kwargs)

    def run(self) -> None:
        """Add the block to the trace."""
        assert self.scope is not None and self.info is not None
        shared = self.scope
        publish: Callable[[], None] | None = None
        if CONFIG.APP.CROSS_INVOKER:
            self.scope = branch = shared.branch(self.info)
            publish = branch.publish
        else:
            self.scope = own = shared.copy()
            self._trace.on_end(lambda: shared.take_saved(own))
        args, kwargs = self._input
        self._trace.add_invoke(Invoke(self.compile(), args, kwargs, publish))


class Barrier:
    """Lets ``participants`` invokes wait for each other; call it in each of them."""

    def __init__(self, trace: InterleavingTracer, participants: int) -> None:
        if not isinstance(participants, int) or isinstance(participants, bool):
            raise TypeError(
                f"tracer.barrier takes the number of its participants, not a {type(participants).__name__}."
            )
        if participants < 1:
            raise ValueError(f"A barrier needs at least one participant, not {participants}.")
        self.participants = participants
        self._trace = trace
        self._arrived: list[Any] = []

    def __call__(self) -> None:
        """Wait until all participants have called."""
        run = active_interleaver()
        if run is None or run.current is None or self._trace.opens_invokes:
            raise ValueError(
                "A barrier can be called inside an invoke only: make it in front of the invokes and call it in them."
            )
        self._wait(run)

    def _wait(self, run: Interleaver) -> None:
        mediator = run.current
        assert mediator is not None
        if run.recorder is not None:
            run.recorder.barrier(self, self.participants)
        if len(self._arrived) + 1 < self.participants:
            self._arrived.append(mediator)
            mediator.pause(f"barrier({self.participants})")
            return
        run.ready.extend(self._arrived)
        self._arrived.clear()
