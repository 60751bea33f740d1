"""Room on the interpreter's stack, so that calls deep inside an engine do not each ask the system for memory.

CPython keeps the frames of a thread in chunks of 16 KB. A call whose frame does not fit into the current chunk gets another one from the
system, and gives it back when it returns. The depth of the caller decides which call that is. If a model makes this call for each of
its layers, every step of the engine maps, touches and unmaps memory as often as the model has layers. That took 3 to 5 percent of a
step of a GPT-2 with 12 layers, on a machine with two cores, when a trace called the engine. It took nothing when vLLM's ``generate`` did,
which happened to be fewer frames deep.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

#: Slots of a frame of 256 KB. The chunk for it has 512 KB, and nearly half of it is left for the calls below.
_SLOTS = 1 << 15


def with_room(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return ``function(*arguments)``, called with more than 200 KB of contiguous stack for frames of Python.

    The code of this function claims a stack of so many slots, though it uses few. Pages that are not touched take no memory.
    """
    return function(*arguments)


with_room.__code__ = with_room.__code__.replace(co_stacksize=_SLOTS)
