"""What survives a trace: the objects marked by ``.save()``.

A mark is kept on the run, not on the object: a table from object identity to the object, held in a context
variable, so that two threads tracing at once do not see each other's marks. The outermost tracer opens the table
and, when it ends, rebinds in the user's frame every name whose value is marked.

``.save()`` as a method of *every* object is part of the public language (``list().save()``,
``hidden.shape[-1].save()``, also in helper functions far from any block). It is mounted on ``object`` with the first
trace and stays: mounting for each run would invalidate the interpreter's type caches each time. Outside a run
the method raises. ``CONFIG.APP.PYMOUNT = False`` before the first trace leaves ``object`` alone.
"""

from __future__ import annotations

import ctypes
import gc
import types
from contextvars import ContextVar
from typing import Any, TypeVar

from ..config import CONFIG

T = TypeVar("T")

#: Marked objects of the current run by identity; ``None`` outside of a run.
saves: ContextVar[dict[int, Any] | None] = ContextVar("nnsight_saves", default=None)


def save(value: T) -> T:
    """Mark ``value`` so that the names bound to it are still bound after the trace.

    Args:
        value: Any object. Containers are kept with what they hold.

    Returns:
        The same object.

    Raises:
        ValueError: Outside a trace, where nothing could be saved.
    """
    table = saves.get()
    if table is None:
        raise ValueError("save() was called outside a trace, where it would have no effect: call it inside the block.")
    table[id(value)] = value
    return value


class _SaveMethod:
    """Makes ``save`` a method of every object, but not an attribute of any class.

    Binding libraries look a method up on the class before they define it and refuse to overload a foreign one.
    """

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            raise AttributeError(f"type object {getattr(owner, '__name__', '?')!r} has no attribute 'save'")
        return types.MethodType(save, instance)


def mount() -> None:
    """Make ``save`` a method of ``object``; later calls do nothing."""
    if not CONFIG.APP.PYMOUNT or "save" in object.__dict__:
        return
    # ``object.__dict__`` is a read-only view; the dictionary behind it is its only referent.
    (namespace,) = gc.get_referents(object.__dict__)
    namespace["save"] = _SaveMethod()
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(object))
