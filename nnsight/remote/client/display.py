"""What a user sees of a job that is waited for: one line that changes on a terminal, a line for each status elsewhere.

It goes to standard error, like progress bars. Remarks of the server are the user's own output and go to standard output, always.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType

from ..protocol import JobStatus, Message


class Progress:
    """Shows the messages of one job.

    Args:
        enabled: Whether statuses are shown.
    """

    def __init__(self, enabled: bool = True) -> None:
        self._enabled = enabled
        self._started = time.monotonic()
        self._width = 0

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end_line()

    def show(self, message: Message) -> None:
        """Show a message."""
        description = "".join(
            character if character.isprintable() or character == "\n" else "?" for character in message["description"]
        )
        if message["status"] == JobStatus.LOG.value:
            self._end_line()
            print(description)
            return
        if not self._enabled:
            return
        seconds = time.monotonic() - self._started
        line = f"[{message['id'][:8]}] {message['status']:<10} {seconds:6.1f}s  {description.splitlines()[0] if description else ''}"
        if sys.stderr.isatty():
            sys.stderr.write("\r" + line[:200].ljust(self._width))
            self._width = len(line[:200])
        else:
            sys.stderr.write(line + "\n")
        sys.stderr.flush()

    def _end_line(self) -> None:
        if self._width:
            sys.stderr.write("\n")
            self._width = 0
