"""Functions of this package that dynamo must not compile, inside functions that a user compiles with ``torch.compile``.

Dynamo can trace a call of a model into the function around it, see :mod:`nnsight.fx.inlining`. If it cannot trace a call, Python makes the
call, and dynamo compiles the functions inside. Blocks and the code that runs them must not be compiled, because they read the frames of
their callers and wait in greenlets. So their code objects are marked, and dynamo skips them and the functions they call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

from ..late_binding import load
from ..tracing import Backend, Tracer
from .modules.interception import is_compiling

F = TypeVar("F", bound=Callable[..., Any])

_SKIP, _DEFAULT = eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT


def uncompiled(function: F, callees: Any = _SKIP) -> F:
    """Mark a function that dynamo must run as Python, with all functions that it calls. Dynamo may still inline it into a caller."""
    code = getattr(function, "__wrapped__", function).__code__
    eval_frame.set_code_exec_strategy(code, eval_frame._FrameExecStrategy(_SKIP, callees))
    return function


def uncompiled_itself(function: F) -> F:
    """Mark a function that dynamo must run as Python. Dynamo may compile the functions that it calls."""
    return uncompiled(function, _DEFAULT)


def leave_to_python(what: str) -> None:
    """If dynamo is tracing, let the traced function run as Python, because ``what`` cannot be traced; an error with ``fullgraph=True``."""
    if is_compiling():
        load("call_edited")  # dynamo then knows what `leave_frame` is
        leave_frame(what)


def leave_frame(what: str) -> None:
    """Do nothing. If dynamo traces this call, it runs the traced function as Python instead, see :mod:`nnsight.fx.inlining`."""


for _function in (Tracer.__enter__, Tracer.__exit__, Tracer.__del__, Backend.__call__):
    uncompiled(_function)
