"""The variables of running code, before and since Python 3.13."""

from __future__ import annotations

import ctypes
import inspect
import sys
import types
from typing import Any

_HAS_SNAPSHOTS = sys.version_info < (3, 13)

#: Writes the snapshot ``frame.f_locals`` back to the frame, before Python 3.13.
_LOCALS_TO_FAST: Any = None
if _HAS_SNAPSHOTS:
    _LOCALS_TO_FAST = ctypes.pythonapi.PyFrame_LocalsToFast
    _LOCALS_TO_FAST.argtypes, _LOCALS_TO_FAST.restype = [ctypes.py_object, ctypes.c_int], None

#: Where Python 3.12 keeps the frame of the interpreter in a frame object, and in it the code, the globals and the variables, in bytes.
_FRAME, _CODE, _GLOBALS, _VARIABLES = 24, 0, 24, 40


def is_function(frame: types.FrameType) -> bool:
    """Whether the frame belongs to a function, which does not keep its variables in a dictionary."""
    return bool(frame.f_code.co_flags & inspect.CO_OPTIMIZED)


def variables_of(frame: types.FrameType) -> Any:
    """Return the variables of ``frame``: a dictionary, which is a snapshot for functions before Python 3.13.

    For a module or a class body, it is the dictionary itself. With comprehensions in that code, ``frame.f_locals`` of Python 3.12 is a
    copy as soon as a trace function has run there: their loop variables are variables of the frame, with values of that moment.
    """
    if sys.version_info[:2] == (3, 12) and frame.f_code.co_nlocals and not is_function(frame):
        inner = _word(id(frame) + _FRAME)
        found = _word(inner + _VARIABLES)
        if (_word(inner + _CODE), _word(inner + _GLOBALS)) == (id(frame.f_code), id(frame.f_globals)) and found:
            return ctypes.cast(found, ctypes.py_object).value
    return frame.f_locals


def _word(address: int) -> int:
    return ctypes.c_size_t.from_address(address).value


def forget_snapshot(frame: types.FrameType, variables: Any) -> None:
    """Clear the snapshot of the variables that a frame keeps before Python 3.13, once its variables are read.

    Otherwise the snapshot keeps a tensor alive that the user deletes. The next read fills it again.
    """
    if _HAS_SNAPSHOTS and is_function(frame):
        variables.clear()


def write_back(frame: types.FrameType, values: dict[str, Any]) -> None:
    """Bind ``values`` as variables of ``frame``."""
    variables = variables_of(frame)
    variables.update(values)
    if _HAS_SNAPSHOTS and is_function(frame):
        if values:
            _LOCALS_TO_FAST(frame, 0)
        variables.clear()  # even without values: the trace function that skips the body causes a snapshot
