"""The captures of a model: why it is captured, how often, and whether one captured graph is a whole call.

Dynamo captures again whenever a guard fails, on grad mode, sizes or flags for example. After eight captures of one function it runs the
function as Python. That limit is too low for a notebook. So this package has a limit of its own (:data:`MAX_CAPTURES`), and gives a reason
for each capture (:mod:`~nnsight.fx.capturing.reasons`).

Intercepting the calls of modules costs as much as the rest of a call of a small model. A call in which no block waits, such as a replay,
omits it if the call runs one captured graph and nothing else: dynamo has compiled code for the arguments, each of its captures was a
whole call, and it has not given up on the model. Dynamo gives up only in calls that may compile, so each of those is watched.

A call may fail while dynamo traces it (a string instead of a tensor, a hook that raises). Dynamo then compiles the function around the
model into code that calls the model as Python. This code has no guards, so all later calls would run it. Or dynamo marks the code of a
function, which all modules of a class share, to run as Python. Both are undone.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import CodeType
from typing import Any

import torch

from ...runtime.report import Capture
from .. import progress
from ..counters import counters
from ..torch_compat import allow_code, compiled_entries, forget_entries, frames_seen, graph_breaks_seen
from .dynamo import CacheMiss, capturing, left_uncompiled
from .reasons import REMEDIES, Situation, reason_of

logger = logging.getLogger("nnsight.fx")

#: The number of captures of a model after which calls that need another one run uncompiled; ``compile(max_captures=...)`` changes it.
MAX_CAPTURES = 256

#: The number of captures after which a warning is logged, once for a model.
MANY_CAPTURES = 16

#: The prefix of dynamo's names for code after a graph break.
_RESUMED = "torch_dynamo_resume_in_"


class TooManyCapturesError(RuntimeError):
    """A call needs more captures than ``compile(max_captures=...)`` allows, and must not run uncompiled (``fullgraph=True``)."""


class Captures:
    """The captures of one compiled function.

    Args:
        code: The code object of the function.
        first: The reason for its first capture.
        limit: The largest number of captures.
        alike: The largest number of modules with one ``forward``. After a graph break, each of them may be captured ``limit`` times.
        fullgraph: Whether it is an error to run a call uncompiled.
        parameters: Names of the parameters of the model's ``forward``.

    Attributes:
        first: The reason for the first capture.
        uncompiled: Why a call that dynamo did not capture runs uncompiled, and the remedy; ``None`` if there was no such call.
        count: The number of captures.
        whole: The number of captures of a whole call.
        forgotten: The number of invalidated entries of failed calls. They still count towards dynamo's limits.
        suffice: Whether a call for which dynamo has compiled code runs one captured graph and nothing else.
    """

    def __init__(
        self,
        code: CodeType,
        first: Capture | None = None,
        limit: int = MAX_CAPTURES,
        alike: int = 1,
        fullgraph: bool = False,
        parameters: Sequence[str] = (),
    ) -> None:
        self.uncompiled: tuple[str, str] | None = None
        self._code, self.first, self._parameters = code, first or Capture("the first call"), parameters
        self._limit, self._alike, self._fullgraph = limit, alike, fullgraph
        self._given: list[frozenset[str]] = []  # names of the arguments of each captured call
        self._kinds: Counter[str] = Counter()
        self.count = 0
        self.whole = 0
        self.forgotten = 0
        self.suffice = False
        self._may_suffice = True
        self._watched = 0  # calls that may compile and have not ended
        self._started = 0
        self._lock = threading.Lock()
        self._here = threading.local()

    def around(self, miss: CacheMiss, capture: Callable[[], Any]) -> Any:
        """Let dynamo capture a call, or run it uncompiled if the limit is reached; see :func:`~.dynamo.watch_captures`."""
        is_function = miss.code is self._code
        situation = Situation(miss.variables, self._parameters, self._given)
        self._here.reason = reason = self._reason(miss, situation, is_function)
        if len(miss.entries) >= self._limit * (1 if is_function else self._alike):
            return self._refuse(reason, len(miss.entries))
        breaks = graph_breaks_seen() if is_function else {}
        with progress.step("capturing"), capturing():
            result = capture()
        if is_function:
            if result.guarded_code is None:
                self.note_failure(breaks)
            else:
                self._given.append(situation.given())
        return result

    def _reason(self, miss: CacheMiss, situation: Situation, is_function: bool) -> Capture:
        if miss.entries:
            return reason_of(miss.failed_guards(), situation)
        if is_function:
            return Capture("torch has dropped its earlier captures", "model") if self.whole else self.first
        name = miss.code.co_qualname
        if _RESUMED in name:
            return Capture("the model continues after a graph break", "break")
        return Capture(f"the first call of `{name}`, after a graph break", "break")

    def _refuse(self, reason: Capture, count: int) -> Any:
        remedy = f"{REMEDIES.get(reason.kind, '')} Or allow more captures: `compile(max_captures={4 * count})`.".strip()
        why = f"the model has been captured {count} times, which is the limit, and no capture fits this call: {reason}"
        self.uncompiled = (why, remedy)
        if self._fullgraph:
            raise TooManyCapturesError(f"This call cannot run compiled: {why}. {remedy}")
        self.give_up()
        return left_uncompiled()

    def note_failure(self, before: dict[str, int]) -> tuple[str, str]:
        """Set :attr:`uncompiled` after a call that dynamo did not capture, and return it; ``before`` are the earlier graph breaks."""
        found = [text for text, count in graph_breaks_seen().items() if count > before.get(text, 0)]
        why = found[-1].strip().split("\n", 1)[0] if found else "torch does not capture such a call"
        remedy = 'TORCH_LOGS="graph_breaks,recompiles" shows where and why; `trace(..., compile=False)` runs a trace eagerly.'
        self.uncompiled = (why, remedy)
        return self.uncompiled

    def add(self, is_whole: bool, is_symbolic: bool) -> Capture:
        """Count a capture, and return its reason. ``is_symbolic`` is whether the captured graph has symbolic sizes."""
        reason: Capture = getattr(self._here, "reason", self.first)
        if reason.kind == "size" and is_symbolic and "->" in reason.reason:
            reason = Capture(f"{reason}, sizes are symbolic from here on", reason.kind, reason.guard)
        counters.add_capture(reason.kind)
        logger.info("captured because: %s", reason)
        self.count += 1
        self.whole += is_whole
        if not is_whole:
            self.give_up()
        self._count_kind(reason)
        return reason

    def _count_kind(self, reason: Capture) -> None:
        if reason.kind in ("first", "break"):
            return
        self._kinds[reason.kind] += 1
        if self._kinds.total() == MANY_CAPTURES * self._alike:
            ((kind, times),) = self._kinds.most_common(1)
            text = "a model has been captured %d times. The most frequent kind of reason is %r (%d times), the latest reason: %s. %s"
            logger.warning(text, self.count, kind, times, reason, REMEDIES.get(kind, ""))

    def give_up(self) -> None:
        """Keep ``suffice`` at ``False`` from now on, so that every call intercepts the modules."""
        self._may_suffice = self.suffice = False

    def note_start(self) -> None:
        """Note that a call of the model begins in this thread."""
        self._here.whole = None

    def note_dispatch(self, is_whole: bool) -> None:
        """Note that a captured graph is called in this thread, and whether it is a whole call."""
        self._here.whole = is_whole
        if self._watched:
            self._here.dispatched = True

    @property
    def ran_nothing(self) -> bool:
        """Whether no captured graph was called in this thread since the last :meth:`note_start`."""
        return getattr(self._here, "whole", False) is None

    @property
    def ran_whole(self) -> bool:
        """Whether a captured graph was called in this thread since the last :meth:`note_start`, and the latest one is a whole call."""
        return bool(getattr(self._here, "whole", False))

    @contextlib.contextmanager
    def undone_if_it_fails(self, modules: Iterable[torch.nn.Module]) -> Iterator[None]:
        """If the call in this context fails, invalidate the code that dynamo compiled for it, and let dynamo compile all ``modules`` again.

        If the call made a capture of a whole call, nothing is undone: dynamo had finished with the model, and something else failed.
        """
        seen, whole = frames_seen(), self.whole
        known = compiled_entries(self._code) if self.count else ()
        try:
            yield
        except BaseException:
            if frames_seen() != seen and self.whole == whole:
                self.forgotten += forget_entries(self._code, known)
                for code in {getattr(module.forward, "__code__", None) for module in modules}:
                    if isinstance(code, CodeType):
                        allow_code(code)
            raise

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Set ``suffice`` after the call in this context, which may compile: did it succeed, run a graph, and overlap no other?"""
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
