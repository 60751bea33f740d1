"""A progress line for captures and lowerings of calls that take more than two seconds.

Captures and lowerings are *steps* (:func:`step`). Each step starts a thread. Once the call of the model (:func:`call`) has taken two
seconds, the thread draws a progress line on ``stderr``, or a widget in a notebook, until the step ends.

Only steps of the main thread are shown, and none of lowerings in the background or of servers. Nothing is written to a file.
``CONFIG.APP.PROGRESS = False``, ``TQDM_DISABLE=1``, or a logger ``nnsight.fx`` that drops warnings switches the line off.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from tqdm.auto import tqdm

from ..config import CONFIG

logger = logging.getLogger("nnsight.fx")

#: The name of the step that can run in the background.
LOWERING = "lowering"

#: Seconds of a call in which nothing is shown.
DELAY = 2.0

#: Seconds between two updates; also the least time before a later step of the call is shown.
_INTERVAL = 0.5


class _Bar(tqdm):  # type: ignore[misc] # a class without types
    monitor_interval = 0  # with any other value tqdm starts a thread that never ends

    def __init__(self, **options: Any) -> None:
        if not (_IN_NOTEBOOK or sys.stderr.isatty()):  # each update would be another line in a file
            options["disable"] = True
        super().__init__(**options)


#: Whether ``tqdm.auto`` draws widgets.
_IN_NOTEBOOK = any(base.__name__ == "tqdm_notebook" for base in tqdm.__mro__)


class _Call:
    """A call of a model, and the number of its finished steps."""

    def __init__(self, name: str, hint: str) -> None:
        self.name, self.hint = name, hint
        self.started, self.done = time.monotonic(), 0

    def draw(self, doing: str, over: threading.Event) -> None:
        """Show a progress line for the step ``doing`` until ``over`` is set."""
        if over.wait(max(self.started + DELAY - time.monotonic(), _INTERVAL)):
            return
        hint = f" {self.hint}" if doing == LOWERING else ""  # a capture cannot run in the background
        bar = None
        try:
            bar = _Bar(leave=False, bar_format=f"nnsight: {doing} {self.name}, {self.done} steps done, {{elapsed}}{hint}")
            bar.start_t -= time.monotonic() - self.started
            while not bar.disable:
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
def call(name: str, hint: str = "") -> Iterator[None]:
    """Wrap a call of the model ``name``. ``hint`` says how a user can avoid waiting for lowerings."""
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
def step(doing: str) -> Iterator[None]:
    """Wrap a step, whose name ``doing`` is shown, such as "capturing"."""
    is_main = threading.current_thread() is threading.main_thread()
    if not (is_main and CONFIG.APP.PROGRESS and logger.isEnabledFor(logging.WARNING)):
        yield
        return
    here = _outermost or _Call("the model", "")
    over = threading.Event()
    thread = threading.Thread(target=here.draw, args=(doing, over), name="nnsight-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        here.done += 1
        over.set()
        thread.join()
