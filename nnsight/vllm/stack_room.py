"""Room on the interpreter's stack, so that calls deep inside an engine do not repeatedly ask the system for memory.

CPython keeps the frames of a thread in chunks of 16 KB. A call whose frame does not fit into the current chunk gets a new chunk from the
system, and returns it when the call ends. The depth of the stack decides which call that is. If a model makes this call once per layer,
every step of the engine maps, touches and unmaps memory once per layer. With a GPT-2 of 12 layers on two cores, this took 3 to 5 percent
of a step when a trace called the engine. It took nothing when vLLM's ``generate`` called it, because that stack was fewer frames deep.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

#: Stack slots of a frame of 256 KB. CPython allocates a chunk of 512 KB for it, and nearly half of the chunk is left for inner calls.
_SLOTS = 1 << 15


def with_room(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return ``function(*arguments)``, called with more than 200 KB of contiguous stack for Python frames.

    The code object of this function declares :data:`_SLOTS` stack slots, but uses few. Pages that are not touched take no memory.
    """
    return function(*arguments)


with_room.__code__ = with_room.__code__.replace(co_stacksize=_SLOTS)
