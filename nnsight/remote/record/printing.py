"""What a block prints, on its way from the recording to the user.

``print`` needs text, and the text of a value of the model is where the model runs. So while a block is recorded, the text of such a value
is a *mark*, and standard output is listened to: a line with a mark in it becomes a node, ``log``, with the values in place of the marks.
So does each line behind the first of these, which keeps them in order; the lines before it are shown at once. A mark that was not
printed has gone where nobody could replace it, and the block is refused.

The server makes the text of each ``log`` when it comes to it, and sends it to whoever waits for the job.
"""

from __future__ import annotations

import contextlib
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch

from ..wire.errors import NotExpressibleError
from ..wire.formats import is_format
from .refusals import here, why_demand

if TYPE_CHECKING:
    from .recorded_calls import NodeRecorder

#: A mark is its number between two characters that nobody prints.
_MARK = re.compile("\ue000(\\d+)\ue001")


class Prints:
    """Writes down what a block prints.

    Args:
        recorder: Writes down everything else.
    """

    def __init__(self, recorder: NodeRecorder) -> None:
        self._recorder = recorder
        self._marks: list[dict[str, Any]] = []
        self._why: dict[int, str] = {}  # why a mark is refused unless it is printed
        self._line = ""
        self._block: int | None = None
        self._sends = False

    @property
    def listens(self) -> bool:
        """Whether it is the turn of a block."""
        return self._recorder.listens

    def mark(self, tensor: torch.Tensor, spec: str | None) -> str:
        """Return what stands for the text of ``tensor``, formatted as ``spec`` says unless that is ``None``."""
        piece: dict[str, Any] = {}
        if spec is not None:
            if spec and tensor.dim():
                raise TypeError("unsupported format string passed to Tensor.__format__")
            format(
                False if tensor.dtype == torch.bool else 1.0 if tensor.is_floating_point() else 1, spec
            )  # or an error
            if not is_format(spec):
                raise NotExpressibleError(here(f"The format {spec!r} cannot be sent: use a width below 100."))
            piece["format"] = spec
        # A copy, for the tensor may be edited before the text is printed.
        piece["value"] = self._recorder.reference(self._recorder.operator(torch.ops.aten.clone.default, (tensor,), {}))
        self._why[len(self._marks)] = here(why_demand("__repr__" if spec is None else "__format__"))
        self._marks.append(piece)
        return f"\ue000{len(self._marks) - 1}\ue001"

    def write(self, text: str, show: Callable[[str], Any]) -> None:
        """Take text that is written; ``show`` writes what need not be sent."""
        self._block = self._recorder.block
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            self._sends = self._sends or _MARK.search(line) is not None
            if self._sends:
                self._send(line)
            else:
                show(line + "\n")

    def flush(self, show: Callable[[str], Any]) -> None:
        """Show the beginning of a line, if it need not be sent: somebody may be asked for the rest."""
        if self._line and not self._sends and _MARK.search(self._line) is None:
            show(self._line)
            self._line = ""

    def end(self, show: Callable[[str], Any] | None = None) -> None:
        """Take the line that has no end."""
        line, self._line = self._line, ""
        if not line:
            return
        if not self._sends and _MARK.search(line) is None:
            (show or sys.stdout.write)(line)
            return
        before, self._recorder.block = self._recorder.block, self._block
        try:
            self._send(line)
        finally:
            self._recorder.block = before

    def check(self) -> None:
        """Raise unless all text of values was printed.

        Raises:
            NotExpressibleError: With the line where it was made.
        """
        if self._why:
            raise NotExpressibleError(next(iter(self._why.values())))

    def _send(self, line: str) -> None:
        parts: list[Any] = list(_MARK.split(line))
        for place in range(1, len(parts), 2):
            number = int(parts[place])
            self._why.pop(number, None)
            parts[place] = self._marks[number]
        self._recorder.emit("log", text=[part for part in parts if part != ""])


class _Console:
    """Standard output while blocks are recorded, in whatever thread."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        prints = _recorded.get()
        if prints is None or not prints.listens:
            self.stream.write(text)
        else:
            prints.write(text, self.stream.write)
        return len(text)

    def flush(self) -> None:
        prints = _recorded.get()
        if prints is not None and prints.listens:
            prints.flush(self.stream.write)
        self.stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


#: What is recorded in this context.
_recorded: ContextVar[Prints | None] = ContextVar("nnsight_recorded_prints", default=None)
_lock = threading.Lock()
#: The console, once for each recording that listens.
_open: list[_Console] = []


@contextlib.contextmanager
def listening(prints: Prints) -> Iterator[None]:
    """Let ``prints`` hear what this context prints while it is the turn of a block."""
    with _lock:
        console = _open[0] if _open else _Console(sys.stdout)
        if not _open and sys.stdout is not None:
            sys.stdout = console
        _open.append(console)
    token = _recorded.set(prints)
    try:
        yield
        prints.end()
    finally:
        _recorded.reset(token)
        with _lock:
            _open.pop()
            if not _open and sys.stdout is console:  # else somebody has replaced it meanwhile
                sys.stdout = console.stream
