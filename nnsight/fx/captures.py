"""Whether what dynamo has captured of a model is all there is to a call of it.

Calls of modules are intercepted while a run is active: dynamo has to see the taps when it captures, and where the model runs as
Python the interception itself offers values. To install and remove it costs as much as the rest of a call of a small
model. Somebody who waits at no location, such as a replay, can do without it if nothing but one captured graph is going to run.

That is so if dynamo has compiled code for the arguments (:func:`~nnsight.fx.compat.caller_of_compiled` asks for no more than that), each of
its captures was a whole call, and dynamo has not given up on the model. It gives up, for example, at its limit of recompiles, and only
in calls that may compile. So each of those is watched: one that called no captured graph ends it for good.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch


class Captures:
    """The captures of one compiled function.

    Attributes:
        count: How many there have been.
        whole: How many of them were of a whole call.
        forgotten: How many things dynamo has compiled for calls that failed, and forgotten again; they count for its limits.
        suffice: Whether a call that dynamo has compiled code for runs one captured graph and nothing else.
        broken: Whether one of them was not a whole call: dynamo captures frames of modules, too.
    """

    def __init__(self) -> None:
        self.count = 0
        self.whole = 0
        self.forgotten = 0
        self.suffice = False
        self.broken = False
        self._may_suffice = True
        self._watched = 0  # calls that may compile and have not ended
        self._started = 0
        self._lock = threading.Lock()
        self._here = threading.local()

    def add(self, is_whole: bool) -> None:
        """Count a capture."""
        self.count += 1
        self.whole += is_whole
        self.broken = self.broken or not is_whole
        if not is_whole or self.count >= torch._dynamo.config.recompile_limit:
            self.give_up()

    def give_up(self) -> None:
        """Let captures suffice never again."""
        self._may_suffice = self.suffice = False

    def note_start(self) -> None:
        """Note that a call of the model begins, in this thread."""
        self._here.whole = False

    def note_dispatch(self, is_whole: bool) -> None:
        """Note that a captured graph is called, and whether it was captured of a whole call."""
        self._here.whole = is_whole
        if self._watched:
            self._here.dispatched = True

    @property
    def ran_whole(self) -> bool:
        """Whether a graph of a whole call was the last that was called in this thread, since a call began."""
        return bool(getattr(self._here, "whole", False))

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Watch a call that may compile."""
        if not self._may_suffice:
            yield
            return
        with self._lock:
            self.suffice = False
            self._watched += 1
            self._started += 1
            number = self._started
        self._here.dispatched = False
        succeeded = False
        try:
            yield
            succeeded = True
        finally:
            with self._lock:
                self._watched -= 1
                if not self._here.dispatched and succeeded:
                    self.give_up()
                alone = self._watched == 0 and number == self._started
                self.suffice = self._may_suffice and succeeded and alone
