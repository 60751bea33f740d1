"""Errors of the tracing layer, and tracebacks that show the user's code.

A block runs at the end of its ``with`` statement or later, under several frames of this package. The block's own frames have the user's
file and line, because the block is compiled from the user's syntax tree. So a readable traceback is the original one without the frames
of this package. ``CONFIG.APP.DEBUG`` keeps them.

An exception gets a traceback entry for each frame that it leaves, so the frames between the block and the user's ``with`` add their entries
last. A trace function of the user's frame is called when the exception arrives there: :func:`show_only_users_frames` sets one for that
moment. ``except`` clauses, loggers, notebooks and test runners then see the same traceback.
"""

from __future__ import annotations

import difflib
import sys
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from traceback import clear_frames
from typing import Any

from ..config import CONFIG

PACKAGE_DIRECTORY = str(Path(__file__).resolve().parent.parent) + "/"

#: Name of the function that a block is compiled to; shows in tracebacks.
BLOCK_NAME = "__nnsight_block__"

#: Files of torch whose frames only pass calls on (of modules, of compiled graphs). They never contain the cause of an error.
_CALLERS = ("/torch/nn/modules/module.py", "/torch/_dynamo/eval_frame.py", "/torch/_dynamo/external_utils.py")

#: The file in which torch computes on fake tensors. Scans and the recording of remote programs use them.
_FAKES = "/_subclasses/fake_tensor.py"


class WithBlockNotFoundError(Exception):
    """The source of a ``with`` block cannot be found, or the block has a form that cannot be deferred."""


def is_internal(code: types.CodeType) -> bool:
    """Whether ``code`` belongs to this package rather than to the user or to a library."""
    return code.co_filename.startswith(PACKAGE_DIRECTORY)


def clean_traceback(traceback: types.TracebackType | None) -> types.TracebackType | None:
    """Return ``traceback`` without the frames of this package and of the call machinery of torch; ``None`` if no entry is left.

    If a block raised the error, the frames of the model that waited for the block are dropped too.
    """
    kept: list[types.TracebackType] = []
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if code.co_name == BLOCK_NAME and not (kept and kept[0].tb_frame.f_code.co_name == BLOCK_NAME):
            kept.clear()
        if not is_internal(code) and not code.co_filename.endswith(_CALLERS):
            kept.append(traceback)
        traceback = traceback.tb_next
    result: types.TracebackType | None = None
    for entry in reversed(_without_fakes(kept)):
        result = types.TracebackType(result, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return result


def _without_fakes(entries: list[types.TracebackType]) -> list[types.TracebackType]:
    """Return ``entries`` without the frames in which torch computes on fake tensors.

    These are some 15 frames of dispatch and shape rules. The line of the caller already says which operation failed.
    """
    files = [entry.tb_frame.f_code.co_filename for entry in entries]
    first = next((number for number, file in enumerate(files) if file.endswith(_FAKES)), None)
    if first is None:
        return entries
    library = files[first].removesuffix(_FAKES) + "/"
    while first and files[first - 1].startswith(library) and not files[first - 1].startswith(f"{library}nn/"):
        first -= 1
    rest = zip(entries[first:], files[first:], strict=True)
    return entries[:first] + [entry for entry, file in rest if not file.startswith(library)]


def chain(error: BaseException) -> Iterator[BaseException]:
    """Yield ``error`` and all exceptions that Python prints with it: causes, contexts, members of groups."""
    pending: list[BaseException | None] = [error]
    seen: set[int] = set()
    while pending:
        current = pending.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        pending += (current.__cause__, current.__context__)
        if isinstance(current, BaseExceptionGroup):
            pending += current.exceptions


def release_frames(error: BaseException, handled: BaseException | None) -> None:
    """Clear the frames in the tracebacks of ``error`` and of its causes and contexts, except those of ``handled`` and of its chain.

    Call this for an exception that is not raised any further. If a library keeps the exception in a variable of one of these frames, the
    reference cycle would keep all frames, and the model, alive until the garbage collector runs.
    """
    kept = [] if handled is None else list(map(id, chain(handled)))
    for each in chain(error):
        if id(each) not in kept:
            clear_frames(each.__traceback__)


def wrap_exception(error: BaseException, info: object = None) -> BaseException:
    """Clean the tracebacks of ``error`` and its chain in place, and return ``error``. Backends may pass ``tracer.info``; it is not used."""
    if CONFIG.APP.DEBUG:
        return error
    for shown in chain(error):
        cleaned = clean_traceback(shown.__traceback__)
        if cleaned is not None:
            shown.__traceback__ = cleaned
    return error


def show_only_users_frames(error: BaseException, frame: types.FrameType) -> None:
    """Prepare ``error`` to be raised from frames of this package into the user's ``frame``.

    There, its traceback becomes the entry of ``frame``, followed by the present entries that :func:`clean_traceback` keeps.
    """
    if CONFIG.APP.DEBUG:
        return
    wrap_exception(error)
    kept = clean_traceback(error.__traceback__)
    debugger, local = sys.gettrace(), frame.f_trace

    def arrived(frame: types.FrameType, event: str, argument: Any) -> Any:
        sys.settrace(debugger)
        frame.f_trace = local
        if event == "exception" and argument[1] is error:
            argument[2].tb_next = kept
        return local if local is None else local(frame, event, argument)

    frame.f_trace = arrived
    sys.settrace(ignore_new_frames)


def ignore_new_frames(frame: types.FrameType, event: str, argument: Any) -> None:
    """Global trace function that traces no new frame, while the trace function of one existing frame is active."""


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """Return a sentence that lists similar ``candidates``, with a leading space; an empty string if there are none."""
    near = difflib.get_close_matches(name, list(candidates), n=3)
    return f" Did you mean {', '.join(f'`{match}`' for match in near)}?" if near else ""


def user_position_now(skip: str | tuple[str, ...] = "\0") -> tuple[str, int]:
    """Return file and line of the user's code that is running: the innermost frame outside of this package.

    Frames of files whose paths begin with ``skip`` are skipped as well. Frames of blocks are never skipped.
    """
    return user_position_of(sys._getframe(1), skip)


def user_position_of(frame: types.FrameType | None, skip: str | tuple[str, ...] = "\0") -> tuple[str, int]:
    """Do the same as :func:`user_position_now`, beginning with ``frame`` and going outwards."""
    while frame is not None:
        code = frame.f_code
        if code.co_name == BLOCK_NAME or not (is_internal(code) or code.co_filename.startswith(skip)):
            return code.co_filename, frame.f_lineno
        frame = frame.f_back
    return "<unknown>", 0
