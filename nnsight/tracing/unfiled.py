"""Source text that is in no file: statements typed at a prompt, ``python -c``, strings passed to ``exec``.

Python compiles such text and forgets it, but a deferred block needs it. :func:`candidates` yields the possible texts, most likely first:
statements entered at prompts (:func:`watch_prompts` records them), the arguments of the interpreter, standard input if it is a file,
strings in variables of the running functions, and the cells that IPython runs for magics such as ``%%time``.

The caller uses a text only if the running code can have been compiled from it, see :mod:`nnsight.tracing.source`. Text from a pipe, and
strings that no variable refers to, are not found. Notebooks, doctest and the prompt of Python 3.13 keep their text in :mod:`linecache`,
so they need no search.
"""

from __future__ import annotations

import ast
import code
import contextlib
import ctypes
import functools
import linecache
import os
import stat
import sys
import tokenize
import types
from collections.abc import Callable, Iterator
from io import BytesIO
from typing import Any

from .parsing import parse

#: The statements that were entered at prompts, in order.
_entered: list[str] = []

#: How many frames are searched for the string that is executed. Runners such as profilers add a few frames of their own.
_CALLERS = 12


def candidates(frame: types.FrameType) -> Iterator[str]:
    """Yield texts from which the code of ``frame`` may have been compiled. Yields nothing for code from a file."""
    filename = frame.f_code.co_filename
    if not (filename.startswith("<") and filename.endswith(">")):
        return
    yield from reversed(_entered)
    if filename == "<string>":
        for argument in sys.orig_argv:
            yield argument
            yield argument.partition("c")[2]  # as in `-Ictext`
    if filename == "<stdin>":
        script = _standard_input()
        if script is not None:
            yield script
    yield from _held_by_callers(frame.f_back, frame.f_lineno)
    yield from _arguments_of_cell_magics()


def _standard_input() -> str | None:
    """Return all of standard input if it is a regular file, without moving the position in it."""
    try:
        status = os.fstat(0)
        if not stat.S_ISREG(status.st_mode):
            return None
        content = os.pread(0, status.st_size, 0)
        encoding, _ = tokenize.detect_encoding(BytesIO(content).readline)
        return content.decode(encoding)
    except (OSError, AttributeError, SyntaxError, UnicodeDecodeError):  # closed, a platform without `pread`, not text
        return None


def _held_by_callers(frame: types.FrameType | None, lines: int) -> Iterator[str]:
    """Yield the strings of at least ``lines`` lines among the variables of ``frame`` and the frames around it."""
    for _ in range(_CALLERS):
        if frame is None:
            return
        for value in list(frame.f_locals.values()):
            if type(value) is str and "with" in value and value.count("\n") + 1 >= lines:
                yield value
        frame = frame.f_back


def _arguments_of_cell_magics() -> Iterator[str]:
    """Yield the bodies of cells with a magic, latest first: IPython compiles such a cell as ``run_cell_magic(..., "<the body>")``."""
    for entry in reversed(list(linecache.cache.values())):
        text = "" if len(entry) == 1 else "".join(entry[2])
        if "run_cell_magic(" not in text:
            continue
        with contextlib.suppress(SyntaxError):
            for node in ast.walk(parse(text)):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value


# -- prompts ----------------------------------------------------------------------------------------------------------


def watch_prompts() -> None:
    """Record the statements that are entered at the prompts of this process from now on.

    :class:`code.InteractiveInterpreter` gets each statement as a string. Before Python 3.13, the interpreter's own prompt reads lines with
    a C function. It is replaced by a function that calls it and records the line.
    """
    plain = code.InteractiveInterpreter.runsource
    if not hasattr(plain, "__wrapped__"):
        code.InteractiveInterpreter.runsource = _keeping(plain)  # type: ignore[method-assign]
    if sys.version_info < (3, 13) and (hasattr(sys, "ps1") or sys.flags.interactive or sys.flags.inspect):
        _watch_terminal()


def _keeping(runsource: Callable[..., bool]) -> Callable[..., bool]:
    @functools.wraps(runsource)
    def wrapper(self: Any, source: str, *args: Any, **kwargs: Any) -> bool:
        _entered.append(source)
        more = runsource(self, source, *args, **kwargs)
        if more:  # the statement is incomplete: the next call repeats it together with its next line
            _entered.pop()
        return more

    return wrapper


#: ``char *reader(FILE *input, FILE *output, const char *prompt)``
_READER = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)
_readers: list[Any] = []  # keeps the callback alive: the interpreter has only a bare pointer to it


def _watch_terminal() -> None:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - sets the function that reads lines; the prompt would do so later
    try:
        slot = ctypes.c_void_p.in_dll(ctypes.pythonapi, "PyOS_ReadlineFunctionPointer")
    except ValueError:
        return
    if _readers or not slot.value:
        return
    plain = _READER(slot.value)

    def read(source: int | None, target: int | None, prompt: bytes | None) -> int | None:
        try:
            line: int | None = plain(source, target, prompt)
            if line:
                _note_line(prompt or b"", ctypes.string_at(line))
        except BaseException:  # an exception cannot leave a C callback; the prompt takes a missing line as an interrupt
            return None
        return line

    reader = _READER(read)
    _readers.append(reader)
    slot.value = ctypes.cast(reader, ctypes.c_void_p).value


def _note_line(prompt: bytes, line: bytes) -> None:
    """Record a line of a statement. Lines with other prompts come from ``input()`` and are ignored."""
    encoding = getattr(sys.stdin, "encoding", None) or "utf-8"
    text = line.decode(encoding, "replace")
    if prompt.decode(encoding, "replace") == str(getattr(sys, "ps1", ">>> ")):
        _entered.append(text)
    elif prompt.decode(encoding, "replace") == str(getattr(sys, "ps2", "... ")) and _entered:
        _entered[-1] += text
