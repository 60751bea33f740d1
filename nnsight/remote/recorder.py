"""The client's side: a block becomes data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .payload import Job


class Recorded:
    """A recorded block.

    Attributes:
        job: What is to be run.
    """

    job: Job

    def payload(self) -> bytes:
        """Return the job as bytes."""
        raise NotImplementedError

    def bind(self, results: bytes) -> dict[str, Any]:
        """Give the user's saved names their values, from a container of results; return them by name.

        Containers that the user saved are filled in place; other names are bound in the block's scope, which brings them
        home when the tracer ends. May be called later than the ``with`` statement ended (a job that was not waited for):
        then only the containers are filled.
        """
        raise NotImplementedError


def record(tracer: Any, function: Callable[[], None]) -> Recorded:
    """Run the block of a trace on fakes, without weights, and return it as data.

    Args:
        tracer: The tracer of ``model.trace(...)`` or ``model.generate(...)``.
        function: Its block, as ``Backend.__call__`` returns it.

    Raises:
        NotExpressibleError: If the block needs values or Python that cannot be sent.
    """
    raise NotImplementedError
