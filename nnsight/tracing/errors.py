"""Errors of the tracing layer, and tracebacks that show the user's code.

A block runs later than where it is written, under several frames of this package. Its own frames have the user's file and line, because it
is compiled from the user's syntax tree. So a readable traceback is the original one without this package's frames. ``CONFIG.APP.DEBUG``
keeps them.

An exception gets an entry for each frame it leaves, so the frames between the block and the user's ``with`` add theirs last. But a trace
function of the user's frame is called with the exception when it arrives there: :func:`show_only_users_frames` sets one for that moment.
``except`` clauses, loggers, notebooks and test runners then see the same traceback.
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

#: Packages whose frames only carry the run (module calls, compiled graphs), never the cause of an error.
_CALLERS = ("/torch/nn/modules/module.py", "/torch/_dynamo/eval_frame.py", "/torch/_dynamo/external_utils.py")

#: Where torch computes on fake tensors, as in scans and in what records a block for a server.
_FAKES = "/_subclasses/fake_tensor.py"


class WithBlockNotFoundError(Exception):
    """The source of a ``with`` block cannot be found, or the block has a form that cannot be deferred."""


def is_internal(code: types.CodeType) -> bool:
    """Whether ``code`` belongs to this package rather than to the user or to a library."""
    return code.co_filename.startswith(PACKAGE_DIRECTORY)


def clean_traceback(traceback: types.TracebackType | None) -> types.TracebackType | None:
    """Return ``traceback`` without the frames that only carried the run.

    Frames of this package and of the machinery of torch are dropped. If the error came out of a block, the frames of the model that had
    stopped for it are dropped too.
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
    """Return ``entries`` without the machinery by which torch computes on fake tensors.

    It is some 15 frames of dispatch and shape rules, and the line that called it says which operation failed.
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
    """Yield ``error`` and all exceptions it is shown with: causes, contexts, members of groups."""
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
    """Clear the frames that an exception nobody will see has left, and those that led to it; not those of ``handled``, which was there.

    A library that keeps the exception in one of these frames would keep all of them, and the model, until the garbage collector runs.
    """
    kept = [] if handled is None else list(map(id, chain(handled)))
    for each in chain(error):
        if id(each) not in kept:
            clear_frames(each.__traceback__)


def wrap_exception(error: BaseException, info: object = None) -> BaseException:
    """Return ``error``, same object and type, with a traceback that shows the user's lines; backends may pass ``tracer.info``."""
    if CONFIG.APP.DEBUG:
        return error
    for shown in chain(error):
        cleaned = clean_traceback(shown.__traceback__)
        if cleaned is not None:
            shown.__traceback__ = cleaned
    return error


def show_only_users_frames(error: BaseException, frame: types.FrameType) -> None:
    """Prepare ``error`` for being raised, out of frames of this package, into the user's ``frame``.

    Its traceback will be the entry of ``frame``, followed by what :func:`clean_traceback` leaves of the present one.
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
    """Trace nothing: a trace function for the time in which only one frame is traced."""


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """Return a sentence that names similar ``candidates``, with a blank before it; nothing if there are none."""
    near = difflib.get_close_matches(name, list(candidates), n=3)
    return f" Did you mean {', '.join(f'`{match}`' for match in near)}?" if near else ""


def user_position_now(skip: str | tuple[str, ...] = "\0") -> tuple[str, int]:
    """Return file and line of the user's code that is running: the innermost frame that is not this package's.

    Frames of files under ``skip`` are passed over as well, unless they are blocks.
    """
    return user_position_of(sys._getframe(1), skip)


def user_position_of(frame: types.FrameType | None, skip: str | tuple[str, ...] = "\0") -> tuple[str, int]:
    """Return file and line of the innermost frame, from ``frame`` outwards, that is the user's."""
    while frame is not None:
        code = frame.f_code
        if code.co_name == BLOCK_NAME or not (is_internal(code) or code.co_filename.startswith(skip)):
            return code.co_filename, frame.f_lineno
        frame = frame.f_back
    return "<unknown>", 0
