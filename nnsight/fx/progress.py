"""A progress line for captures and lowerings of calls that take more than two seconds.

Captures and lowerings are *steps* (:func:`step`); a loop announces its number of steps (:func:`expected`). The outermost of these starts a
thread. Once the call of the model (:func:`call`) has taken two seconds, the thread draws a progress bar on ``stderr``, or a widget in a
notebook, until the step ends.

Only steps of the main thread are shown, none of the background or of a server. ``CONFIG.APP.PROGRESS = False``, ``TQDM_DISABLE=1``, or a
logger ``nnsight.fx`` that drops warnings switches the line off.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator

from tqdm.auto import tqdm

from ..config import CONFIG

logger = logging.getLogger("nnsight.fx")

#: The step that can be done in the background.
LOWERING = "lowering"

#: Seconds for which nothing is shown.
DELAY = 2.0

#: Seconds between two updates, and before a step is shown once a line has been.
_INTERVAL = 0.5

_SHAPE = "{desc}: {n_fmt}/{total_fmt} |{bar}| {elapsed}"


class _Bar(tqdm):  # type: ignore[misc] # a class without types
    monitor_interval = 0  # with another one tqdm starts a thread that stays


class _Call:
    """A call of a model, with its steps so far."""

    def __init__(self, name: str = "the model", hint: str = "") -> None:
        self.name, self.hint = name, hint
        self.started = time.monotonic()
        self.doing = ""
        self.done = self.left = 0
        self.over: threading.Event | None = None  # of the line

    @contextlib.contextmanager
    def line(self) -> Iterator[None]:
        """Have a thread draw the line, if there is none."""
        if self.over is not None:
            yield
            return
        self.over = threading.Event()
        thread = threading.Thread(target=self._draw, args=(self.over,), name="nnsight-progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self.over.set()
            self.over = None
            thread.join()

    def _draw(self, over: threading.Event) -> None:
        if over.wait(max(self.started + DELAY - time.monotonic(), _INTERVAL)):
            return
        bar = None
        try:
            bar = _Bar(total=1, leave=False, bar_format=_SHAPE)
            bar.start_t = self.started
            while not bar.disable:
                bar.n, bar.total = self.done, self.done + max(self.left, 1)
                bar.bar_format = f"{_SHAPE} {self.hint}" if self.doing == LOWERING else _SHAPE  # no hint helps against a capture
                left = f" ({self.left} left)" if self.left > 1 else ""
                bar.set_description_str(f"nnsight: {self.doing} {self.name}{left}", refresh=False)
                bar.refresh()
                if over.wait(_INTERVAL):
                    break
        except Exception:  # a closed stream, or a notebook without widgets, must not disturb the program
            logger.debug("the progress line cannot be shown", exc_info=True)
        finally:
            if bar is not None:
                with contextlib.suppress(Exception):
                    bar.close()


#: The outermost call of a model under way in the main thread.
_outermost: _Call | None = None


@contextlib.contextmanager
def call(name: str = "the model", hint: str = "") -> Iterator[None]:
    """Surround a call of a model called ``name``; ``hint`` says how not to wait for a lowering."""
    global _outermost  # noqa: PLW0603 - there is one main thread
    if _outermost is not None or threading.current_thread() is not threading.main_thread():
        yield
        return
    _outermost = _Call(name, hint)
    try:
        yield
    finally:
        _outermost = None


@contextlib.contextmanager
def expected(count: int) -> Iterator[None]:
    """Surround a loop of ``count`` steps."""
    with _shown() as here:
        if here is None:
            yield
            return
        before, here.left = here.left, here.left + count
        try:
            yield
        finally:
            here.left = before


@contextlib.contextmanager
def step(doing: str) -> Iterator[None]:
    """Surround a step: ``doing`` says what it does, as in "capturing"."""
    with _shown() as here:
        if here is not None:
            here.doing = doing
        try:
            yield
        finally:
            if here is not None:
                here.done, here.left = here.done + 1, max(here.left - 1, 0)


@contextlib.contextmanager
def _shown() -> Iterator[_Call | None]:
    """Return the call under way, with a line for it; ``None`` if none is shown."""
    is_main = threading.current_thread() is threading.main_thread()
    if not (is_main and CONFIG.APP.PROGRESS and logger.isEnabledFor(logging.WARNING)):
        yield None
        return
    with call():
        assert _outermost is not None
        with _outermost.line():
            yield _outermost
