"""Shows the status of a job while the client waits. On a terminal, one line is overwritten; elsewhere, each status gets a line.

Statuses go to standard error, like progress bars. ``LOG`` messages have text that the user's block prints, and go to standard output.
"""

from __future__ import annotations

import sys
import time

from ..protocol import JobStatus, Message


class Progress:
    """Shows the messages of one job. Statuses are shown if ``enabled``; with ``in_lines``, each gets a line on terminals, too."""

    def __init__(self, enabled: bool = True, in_lines: bool = False) -> None:
        self._enabled, self._in_place = enabled, not in_lines and sys.stderr.isatty()
        self._started = time.monotonic()
        self._width = 0

    def show(self, message: Message) -> None:
        """Show a message. Control characters are replaced by question marks."""
        description = "".join(character if character.isprintable() or character == "\n" else "?" for character in message["description"])
        if message["status"] == JobStatus.LOG.value:
            self.close()
            print(description)
            return
        if not self._enabled:
            return
        seconds = time.monotonic() - self._started
        line = f"[{message['id'][:8]}] {message['status']:<10} {seconds:6.1f}s  {description.splitlines()[0] if description else ''}"
        if self._in_place:
            sys.stderr.write("\r" + line[:200].ljust(self._width))
            self._width = len(line[:200])
        else:
            sys.stderr.write(line + "\n")
        sys.stderr.flush()

    def close(self) -> None:
        """End the line that is overwritten."""
        if self._width:
            sys.stderr.write("\n")
            self._width = 0
