"""A progress line for captures and lowerings that take more than two seconds.

Captures and lowerings are *steps* (:func:`step`); a loop announces its number of steps (:func:`expected`). The outermost of these starts a
thread. Once the steps of one call of a model (:func:`call`) have taken two seconds together, the thread draws a progress bar on ``stderr``,
or a widget in a notebook, until the step ends.

Only steps of the main thread are shown, none of the background or of a server. ``CONFIG.APP.PROGRESS = False``, ``TQDM_DISABLE=1``, or a
logger ``nnsight.fx`` that drops warnings switches the line off.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

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


class _Call(threading.local):
    """The steps of one call of a model so far, in this thread."""

    def __init__(self) -> None:
        self.begin("the model", "")
        self.depth = 0  # of calls
        self.line: _Line | None = None

    def begin(self, name: str, hint: str) -> None:
        """Start anew."""
        self.name, self.hint = name, hint
        self.seconds = 0.0
        self.done = 0
        self.left = 0  # announced steps
        self.doing = ""


_here = _Call()


class _Bar(tqdm):  # type: ignore[misc] # a class without types
    monitor_interval = 0  # with another one tqdm starts a thread that stays


class _Line:
    """The line of a call, and the thread that draws it."""

    def __init__(self, call: _Call) -> None:
        self._name, self._hint = call.name, call.hint
        self._started = time.monotonic() - call.seconds
        self._delay = max(DELAY - call.seconds, _INTERVAL)
        self._over = threading.Event()
        self.state = ("", 0, 0)
        self._thread = threading.Thread(target=self._draw, name="nnsight-progress", daemon=True)
        self._thread.start()

    def close(self) -> float:
        """Remove the line, and return the seconds that the steps of the call have taken."""
        self._over.set()
        self._thread.join()
        return time.monotonic() - self._started

    def _draw(self) -> None:
        if self._over.wait(self._delay):
            return
        bar = None
        try:
            bar = self._bar()
            while not bar.disable:
                doing, done, total = self.state
                bar.n, bar.total = done, total
                bar.bar_format = f"{_SHAPE} {self._hint}" if LOWERING in doing else _SHAPE  # no hint helps against a capture
                bar.set_description_str(f"{doing} ({total - done} left)" if total > done + 1 else doing, refresh=False)
                bar.refresh()
                if self._over.wait(_INTERVAL):
                    break
        except Exception:  # a closed stream, or a notebook without widgets, must not disturb the program
            logger.debug("the progress line cannot be shown", exc_info=True)
        finally:
            if bar is not None:
                with contextlib.suppress(Exception):
                    bar.close()

    def _bar(self) -> Any:
        bar = _Bar(total=1, leave=False, bar_format=_SHAPE)
        if not bar.disable:
            bar.start_t -= time.monotonic() - self._started
        return bar


@contextlib.contextmanager
def call(name: str, hint: str = "") -> Iterator[None]:
    """Surround a call of a model called ``name``, whose steps are timed together; ``hint`` says how not to wait for a lowering."""
    if _here.depth == 0 and _here.line is None:
        _here.begin(name, hint)
    _here.depth += 1
    try:
        yield
    finally:
        _here.depth -= 1


@contextlib.contextmanager
def expected(count: int) -> Iterator[None]:
    """Surround a loop of ``count`` steps."""
    with _line():
        before = _here.left
        _here.left += count
        try:
            yield
        finally:
            _here.left = before


@contextlib.contextmanager
def step(doing: str) -> Iterator[None]:
    """Surround a step: ``doing`` says what it does, as in "capturing"."""
    with _line():
        _here.doing = f"nnsight: {doing} {_here.name}"
        _show()
        try:
            yield
        finally:
            _here.done += 1
            _here.left = max(_here.left - 1, 0)
            _show()


@contextlib.contextmanager
def _line() -> Iterator[None]:
    """Start a line, if there is none; it is shown once the call has waited long enough."""
    if _here.line is not None or not _is_shown():
        yield
        return
    if _here.depth == 0:
        _here.begin("the model", "")
    _here.line = _Line(_here)
    try:
        yield
    finally:
        line, _here.line = _here.line, None
        _here.seconds = line.close()


def _show() -> None:
    if _here.line is not None:
        _here.line.state = (_here.doing, _here.done, _here.done + max(_here.left, 1))


def _is_shown() -> bool:
    is_main = threading.current_thread() is threading.main_thread()
    return is_main and CONFIG.APP.PROGRESS and logger.isEnabledFor(logging.WARNING)
