"""Work for another thread, taken together.

Going to a thread and back costs a job more than most of what is done there, and so does a transaction. What comes while the thread is busy
waits, and then goes there at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

Item = TypeVar("Item")
Made = TypeVar("Made")


class Batches(Generic[Item, Made]):
    """Calls a function in a thread, with all that has come during the call before.

    Args:
        function: Returns what came of each item, or what is wrong with it; what it raises is wrong with all of them.
    """

    def __init__(self, function: Callable[[Sequence[Item]], Sequence[Made | Exception]]) -> None:
        self._function = function
        self._waiting: list[tuple[Item, asyncio.Future[Made]]] = []
        self._working: asyncio.Task[None] | None = None

    def add(self, item: Item) -> asyncio.Future[Made]:
        """Return what will have come of an item. Whether or not somebody waits for that, the item is worked on."""
        future: asyncio.Future[Made] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        if self._working is None:
            self._working = asyncio.create_task(self._work())
        return future

    async def idle(self) -> None:
        """Return when nothing is left to do."""
        while self._working is not None:
            await asyncio.wait([self._working])

    async def _work(self) -> None:
        try:
            while self._waiting:
                batch, self._waiting = self._waiting, []
                try:
                    made = await asyncio.to_thread(self._function, [item for item, _ in batch])
                except Exception as error:
                    made = [error] * len(batch)
                for (_, future), outcome in zip(batch, made, strict=True):
                    if future.done():  # nobody waits any more
                        continue
                    if isinstance(outcome, Exception):
                        future.set_exception(outcome)
                        future.exception()  # seen, whether or not somebody waits
                    else:
                        future.set_result(outcome)
        finally:
            self._working = None
