"""The objects that survive a trace: those marked by ``.save()``.

The marks are a table from identity to object in a context variable, so each thread that traces has its own table. The outermost tracer
opens the table. At its end, it binds every name whose value is marked in the user's frame.

``.save()`` works on *every* object (``list().save()``, ``hidden.shape[-1].save()``): the compiled block calls :func:`save_method` instead.
Helper functions outside of blocks are not rewritten. For them, the method is added to the built-in containers and numbers. It is not
added to ``object``, because some libraries list the attributes of classes, and others define a method ``save`` of their own.
"""

from __future__ import annotations

import ctypes
import gc
from contextvars import ContextVar
from typing import Any, TypeVar

from ..config import CONFIG

T = TypeVar("T")

#: Marked objects of the current run by identity; ``None`` outside of a run.
saves: ContextVar[dict[int, Any] | None] = ContextVar("nnsight_saves", default=None)


def save(value: T) -> T:
    """Mark ``value`` so that the names bound to it are still bound after the trace.

    A saved container keeps its items.

    Returns:
        The same object.

    Raises:
        ValueError: If no trace is active.
    """
    table = saves.get()
    if table is None:
        raise ValueError("save() was called outside a trace, where it would have no effect: call it inside the block.")
    table[id(value)] = value
    return value


def keep_mark(value: Any, successor: Any) -> None:
    """Mark ``successor``, which replaces ``value``, if ``value`` is marked."""
    table = saves.get()
    if table is not None and id(value) in table:
        table[id(successor)] = successor


def save_method(value: T) -> T:
    """Implement ``value.save()`` in a block: call the object's own method if it has one, else :func:`save`."""
    if isinstance(value, _MOUNTED):
        return save(value)
    own = getattr(value, "save", None)
    return save(value) if own is None else own()


_MOUNTED = (list, dict, tuple, set, int, float, str)
_mounted = False


def mount() -> None:
    """Make ``save`` a method of the built-in containers and numbers; later calls do nothing."""
    global _mounted
    if _mounted or not CONFIG.APP.PYMOUNT:
        return
    _mounted = True
    for kind in _MOUNTED:
        # ``kind.__dict__`` is a read-only proxy; the dictionary behind it is its only referent.
        (namespace,) = gc.get_referents(kind.__dict__)
        namespace.setdefault("save", save)
        ctypes.pythonapi.PyType_Modified(ctypes.py_object(kind))
