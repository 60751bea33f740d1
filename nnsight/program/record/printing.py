"""Prints of a block that is recorded.

``print`` needs text, and the text of a value exists only in the process that runs the model. So during a recording, the text of a value
is a *mark*, and standard output is replaced. A printed line with a mark becomes a ``log`` node, with the values in place of the marks.
Lines after it become ``log`` nodes, too, which keeps their order. Lines before it are shown at once. If a mark is never printed, the block
used the text in another way, and is refused.

The server makes the text of each ``log`` node when the run reaches it, and sends it to the client. If the block raises an error, no run
reaches it: the lines are shown without the values.
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

from ..format.errors import NotExpressibleError
from ..format.formats import is_format
from .refusals import here, refused, why_demand

if TYPE_CHECKING:
    from .recorded_calls import NodeRecorder

#: A mark is a number between two private-use characters.
_MARK = re.compile("\ue000(\\d+)\ue001")


class Prints:
    """Records the prints of a block."""

    def __init__(self, recorder: NodeRecorder) -> None:
        self.recorder = recorder
        self._marks: list[dict[str, Any]] = []
        self._why: dict[int, str] = {}  # for each mark that is not printed yet: the error if it never is
        self._line = ""  # the beginning of a line that has not ended
        self._block: int | None = None  # the block that printed last
        self._sends = False  # whether lines become nodes
        self._sent: list[str] = []  # the lines that became nodes and that no run has shown

    def mark(self, tensor: torch.Tensor, spec: str | None) -> str:
        """Return a mark for the text of ``tensor``. ``spec`` is the format specification of an f-string, or ``None`` for ``repr``."""
        piece: dict[str, Any] = {}
        if spec is not None:
            if spec and tensor.dim():
                raise TypeError("unsupported format string passed to Tensor.__format__")
            number = False if tensor.dtype == torch.bool else 1.0 if tensor.is_floating_point() else 1
            format(number, spec)  # raises the error of an invalid format here
            if not is_format(spec):
                raise refused(f"The format {spec!r} cannot be sent: use a width below 100.")
            piece["format"] = spec
        # The block may edit the tensor before it prints the text, so the node refers to a copy.
        piece["value"] = self.recorder.reference(self.recorder.operator(torch.ops.aten.clone.default, (tensor,), {}))
        self._why[len(self._marks)] = here(why_demand("__repr__" if spec is None else "__format__"))
        self._marks.append(piece)
        return f"\ue000{len(self._marks) - 1}\ue001"

    def write(self, text: str, show: Callable[[str], Any]) -> None:
        """Record written text, or pass it to ``show`` if it need not be part of the program."""
        self._block = self.recorder.block
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            self._sends = self._sends or _MARK.search(line) is not None
            if self._sends:
                self._send(line)
            else:
                show(line + "\n")

    def flush(self, show: Callable[[str], Any]) -> None:
        """Show the beginning of a line, such as a prompt for input, if it need not be part of the program."""
        if self._line and not self._sends and _MARK.search(self._line) is None:
            show(self._line)
            self._line = ""

    def end(self) -> None:
        """Record or show the last line, if it has no line end."""
        line, self._line = self._line, ""
        if not line:
            return
        if not self._sends and _MARK.search(line) is None:
            sys.stdout.write(line)
            return
        with self.recorder.turn_of(self._block):
            self._send(line)

    def catch_up(self) -> None:
        """Note that all recorded lines have been shown. Later lines without values are shown at once again."""
        self._sends = False
        self._sent.clear()

    def give_up(self) -> None:
        """Show the lines that no run will show, with a placeholder for each value."""
        print(_MARK.sub("<value>", "".join(f"{line}\n" for line in self._sent) + self._line), end="")
        self._line = ""
        self.catch_up()

    def check(self) -> None:
        """Raise a :class:`NotExpressibleError`, with the line of the block, if a mark was not printed."""
        if self._why:
            raise NotExpressibleError(next(iter(self._why.values())))

    def _send(self, line: str) -> None:
        self._sent.append(line)
        parts: list[Any] = list(_MARK.split(line))
        for place in range(1, len(parts), 2):
            number = int(parts[place])
            self._why.pop(number, None)
            parts[place] = self._marks[number]
        self.recorder.emit("log", text=[part for part in parts if part != ""])


class _Console:
    """Standard output of all threads during recordings."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        prints = _recorded.get()
        if prints is None or not prints.recorder.listens:
            self.stream.write(text)
        else:
            prints.write(text, self.stream.write)
        return len(text)

    def flush(self) -> None:
        prints = _recorded.get()
        if prints is not None and prints.recorder.listens:
            prints.flush(self.stream.write)
        self.stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


#: The prints of the recording in this context.
_recorded: ContextVar[Prints | None] = ContextVar("nnsight_recorded_prints", default=None)
_lock = threading.Lock()
#: A stack with an entry for each active recording. All entries are the same console.
_open: list[_Console] = []


@contextlib.contextmanager
def captured_output(prints: Prints) -> Iterator[None]:
    """Pass the output of blocks in this context to ``prints``."""
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
            if not _open and sys.stdout is console:  # otherwise, other code has replaced it
                sys.stdout = console.stream
