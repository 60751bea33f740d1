"""The occurrences that a block asks for: in a loop, in a step of it, and behind it."""

from __future__ import annotations

import sys
import types
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from greenlet import GreenletExit, greenlet

from ...tracing.errors import user_position_of
from ..interleaver import ANYWHERE

if TYPE_CHECKING:
    from ..interleaver import Interleaver


class Loops:
    """The part of a mediator that knows which occurrence the requests of its block ask for, inside of loops and outside."""

    __slots__ = ("_disregarded", "_greenlet", "_occurrence", "_visited", "interleaver", "iteration", "loops", "waiting")

    interleaver: Interleaver | None
    waiting: tuple[str, int] | None
    iteration: int | None
    loops: int
    _visited: tuple[str, int] | None
    _occurrence: int
    _disregarded: str | None
    _greenlet: greenlet | None

    if TYPE_CHECKING:  # what a mediator has

        @property
        def awaits_step(self) -> bool: ...

        def request(self, location: str) -> Any: ...

        def _stop_waiting(self) -> None: ...

        def _go(self, switch: Callable[..., Any], *arguments: Any) -> None: ...

        def _switch_to_model(self, location: str, occurrence: int) -> None: ...

    def leave_loop(self) -> None:
        """End the block in the loop where it waits for an occurrence that does not come."""
        assert self.waiting is not None and self._greenlet is not None
        location, occurrence = self.waiting
        if self.awaits_step:
            location = "model.input" if self._visited is None else self._visited[0]
        filename, line = user_position_of(self._greenlet.gr_frame)
        self._stop_waiting()
        self._go(self._greenlet.throw, GreenletExit)
        warnings.warn_explicit(
            f"The loop ended at `{location}.i{occurrence}`, which did not occur: the model had finished. What the loop "
            "did so far is kept; the rest of this step and the code after the loop were not run. Bound the loop, as in "
            "`tracer.iter[:3]`, or put what follows into an invoke of its own.",
            UserWarning,
            filename,
            line,
        )

    def advance(self, steps: int) -> None:
        """Let requests ask for the occurrence ``steps`` after the one they ask for now.

        Raises:
            TypeError: If ``steps`` is no int.
            ValueError: If it is negative: the model does not go back.
        """
        if isinstance(steps, bool) or not isinstance(steps, int):
            raise TypeError(f"next() takes an int, not {type(steps).__name__}.")
        if steps < 0:
            raise ValueError(f"next() cannot count from the end or backwards (got {steps}): the model does not go back.")
        here = self.iteration
        if here is None:  # the occurrence of the latest visit
            here = self._occurrence
        self.iteration = here + steps

    def begin_loop(self) -> tuple[int | None, object]:
        """Note that the block enters a loop over occurrences; return what :meth:`end_loop` and :meth:`keep_pace` are to be given."""
        self.loops += 1
        return self.iteration, self._visited

    def point_at(self, occurrence: int | None) -> None:
        """Let requests ask for ``occurrence``; see :attr:`iteration`."""
        self.iteration = occurrence

    def await_step(self, step: int) -> None:
        """Let the model run until anything of it occurs for the time that ``step`` says, so that there is something to ask for.

        A location that occurs more often than there are steps does not tell, unless the block asks for it.
        """
        run = self.interleaver
        assert run is not None
        if run.recorder is not None or not getattr(run.tracer, "awaits_steps", False):
            return
        if run.at is not None and run.at[1] >= step:
            return
        if self._disregarded is not None and _is_named(self._disregarded.split(".")[-2]):
            self._disregarded = None
        self._switch_to_model(ANYWHERE, step)

    def keep_pace(self, step: int, visited: object) -> bool:
        """Let the model run through ``step`` of a loop, in which the block has asked for nothing.

        Args:
            step: The occurrence.
            visited: What :meth:`begin_loop` returned.

        Returns:
            Whether it can be told where the step ends: in a generation, and when the loop has waited for something before.
        """
        interleaver = self.interleaver
        assert interleaver is not None
        location = getattr(interleaver.tracer, "pace", None)
        if location is None and self._visited is not visited and self._visited is not None:
            location = self._visited[0]
        if location is None or interleaver.recorder is not None:
            return False
        if interleaver.counts.get(location, 0) <= step:
            self.request(location)
        return True

    def end_loop(self, before: int | None) -> None:
        """Note that the block has left a loop, and let requests ask again for what they asked for ``before`` it."""
        self.loops -= 1
        self.iteration = before


def _is_named(name: str) -> bool:
    """Whether the code that is running in this block has an attribute of this ``name``."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if name in frame.f_code.co_names:
            return True
        frame = frame.f_back
    return False
