"""The context manager of a deferred block.

``__enter__`` sets a trace function on the caller's frame. This function raises a private exception at the next instruction, and
``__exit__`` catches the exception. So the body never runs in place. The trace function of a debugger or of coverage is restored after
that one instruction. Then ``__exit__`` gives the compiled body to a backend, which decides where and when the body runs. At the end,
``__exit__`` binds saved names in the user's frame.

The call that creates the tracer is evaluated once, at the usual time. Context managers after it in the header belong to the deferred body.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

from .backend import LOCAL, Backend
from .block import Block, Scope, block_at
from .errors import BLOCK_NAME, WithBlockNotFoundError, ignore_new_frames, is_internal, show_only_users_frames
from .frames import write_back
from .saving import mount, save, saves
from .source import body_lines

__all__ = ["Tracer", "WithBlockNotFoundError", "save"]


class _SkipBody(BaseException):
    """Raised in the user's frame to leave the body before its first instruction."""


def _raise_skip(frame: types.FrameType, event: str, argument: Any) -> None:
    raise _SkipBody


#: Sets the exception that Python regards as being handled, or ``None``. It becomes the ``__context__`` of exceptions that are raised.
_set_handled_exception = ctypes.pythonapi.PyErr_SetHandledException
_set_handled_exception.argtypes, _set_handled_exception.restype = [ctypes.py_object], None


def _continue_context(failure: BaseException, handled: BaseException | None) -> None:
    """Append ``handled``, the exception being handled around the block, to the contexts of ``failure``, as if the block ran in place."""
    contexts = [failure]
    while contexts[-1].__context__ is not None and contexts[-1].__context__ not in contexts:
        contexts.append(contexts[-1].__context__)
    if handled not in contexts and contexts[-1].__context__ is None:
        contexts[-1].__context__ = handled


def _noted(execute: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the method ``execute`` of a tracer, so that a call clears ``_deferred``: the block runs."""

    @functools.wraps(execute)
    def noted(self: Tracer, function: Callable[[], None]) -> Any:
        self._deferred = False
        return execute(self, function)

    return noted


class Tracer:
    """Captures the body of its ``with`` statement and defers it.

    ``backend`` is called with the tracer once the body is captured. The default backend runs the body in this process.

    Raises:
        TypeError: If ``backend`` cannot be called.
    """

    Info = Block  # the class of `info`
    #: The warning about an object that is never entered.
    never_entered = "{} was created but never entered, so nothing ran. Use it in a `with` statement with a block."
    is_part = False  # whether the block, if it runs in another block, is a part of it, as the body of an `if` is
    runs_once = ""  # error message if the object is entered for a second time; empty if it can run again

    def __init__(self, backend: Backend | None = None) -> None:
        self._entered = True  # no warning of `__del__` if the next line raises
        if backend is not None and not callable(backend):
            raise TypeError(f"A backend must be callable with the tracer, such as a `Backend`; got {type(backend).__name__}.")
        self._entered = False
        self._deferred = False  # whether the backend returned without running the block
        self.backend = LOCAL if backend is None else backend
        self.info: Block | None = None  # the captured block, while the context is open
        self.scope: Scope | None = None  # its variables, while the context is open
        self.module_globals: dict[str, Any] = {}  # the globals of its module, while the context is open
        self._frame: types.FrameType | None = None  # the frame that contains the `with` statement
        self._previous: tuple[Any, Any, bool] | None = None  # trace functions of the thread and of the frame; `f_trace_opcodes`

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "execute" in vars(cls):
            cls.execute = _noted(cls.execute)  # type: ignore[method-assign]

    def __enter__(self) -> Any:
        if self._entered and self.runs_once:
            raise ValueError(self.runs_once)
        if self._frame is not None:
            raise ValueError(f"This {type(self).__name__} is already entered: it cannot be entered again inside its own block.")
        self._entered = True
        frame = sys._getframe(1)
        while frame.f_code.co_name == "__enter__" and is_internal(frame.f_code) and frame.f_back is not None:
            frame = frame.f_back
        self._frame, self.module_globals = frame, frame.f_globals
        try:
            self.capture()
        except BaseException as error:
            self._close()
            show_only_users_frames(error, frame)
            raise
        self._previous = (sys.gettrace(), frame.f_trace, frame.f_trace_opcodes)
        frame.f_trace = _raise_skip
        frame.f_trace_opcodes = True
        sys.settrace(ignore_new_frames)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> bool:
        frame, previous = self._frame, self._previous
        assert frame is not None and previous is not None
        debugger, frame.f_trace, frame.f_trace_opcodes = previous
        sys.settrace(debugger)
        if debugger is not None:  # the debugger sees this function return, so it must see the call: coverage counts both
            own_frame = sys._getframe()
            own_frame.f_trace = debugger(own_frame, "call", None)
        try:
            if kind is not _SkipBody or error is None:
                return False
            _set_handled_exception(None)  # not the private exception; the user's frame restores the exception that it was handling
            self.run()
        except BaseException as failure:
            assert error is not None
            _continue_context(failure, error.__context__)
            show_only_users_frames(failure, frame)
            raise
        finally:
            if not self._deferred:
                self._close()
        return True

    def __del__(self) -> None:
        if not getattr(self, "_entered", True):
            warnings.warn(self.never_entered.format(type(self).__name__), RuntimeWarning, stacklevel=2)

    def capture(self) -> Block:
        """Find and compile the block that is being entered, set :attr:`info` and :attr:`scope`, and return ``info``.

        Raises:
            WithBlockNotFoundError: If the source of the block cannot be found.
            SyntaxError: If the block contains a statement that cannot be deferred.
            ValueError: If the tracer is not being entered by a ``with`` statement.
        """
        if self._frame is None:
            raise ValueError(f"This {type(self).__name__} is not entered: it captures the block of its `with` statement.")
        self.info = block_at(self._frame)
        self.scope = self.info.open_scope(self._frame)
        return self.info

    #: ``parse(source, line)``: number and text of the lines of the block whose ``with`` statement begins at ``line``.
    parse = staticmethod(body_lines)

    def replay(self) -> dict[str, Any] | None:
        """Replay the effects of the block without running it, if they are known. Returns the values that the block saves, by name."""
        return None

    def run(self) -> None:
        """Call the backend with an open table of saves, then bind saved names in the user's frame, even if the block failed.

        If the backend returns without running the block, it may run the block later: the tracer stays open until then.
        """
        assert self.info is not None and self.scope is not None and self._frame is not None
        frame, scope = self._frame, self.scope
        mount()
        outermost = saves.get() is None
        token = saves.set({}) if outermost else None
        self._deferred = True  # until `execute`
        values: dict[str, Any] | None = None
        try:
            if self.backend is LOCAL:
                values = self.replay()
            if values is None:
                self.backend(self)
        except BaseException:
            self._deferred = False
            raise
        finally:
            try:
                self._bind(frame, scope, values, every=self.is_part and not outermost)
            finally:
                if token is not None:
                    saves.reset(token)

    def _bind(self, frame: types.FrameType, scope: Scope, values: dict[str, Any] | None, every: bool) -> None:
        """Bind the names of the block in the user's frame: those with saved values, or with ``every`` all that it assigns."""
        assert self.info is not None
        bound = self.info.bindings(self.target_value)
        if not self.owns_scope:
            for name, value in bound.items():  # in case the body, which binds them too, did not run
                scope.cells[name].cell_contents = value
            return
        if values is None:
            marked, stored = saves.get() or {}, self.info.stored if every else ()
            values = {name: value for name, value in scope.items() if name in stored or id(value) in marked}
        write_back(frame, {**values, **bound})
        if not self._deferred:
            scope.clear()

    @property
    def owns_scope(self) -> bool:
        """Whether the scope belongs to this block alone, rather than to an enclosing block."""
        return self._frame is not None and self._frame.f_code.co_name != BLOCK_NAME

    def compile(self) -> Callable[[], None]:
        """Return the captured body, bound to its scope."""
        assert self.info is not None and self.scope is not None
        return self.info.bind(self.scope, self.target_value, self.module_globals)

    @property
    def target_value(self) -> Any:
        """The value that ``as`` binds: this tracer, unless a subclass chooses another object."""
        return self

    @_noted
    def execute(self, function: Callable[[], None]) -> Any:
        """Run the body and return its result. Subclasses run the body together with a model."""
        return function()

    def _close(self) -> None:
        self.info = self.scope = self._frame = self._previous = None
        self.module_globals = {}
