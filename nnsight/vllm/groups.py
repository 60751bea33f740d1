"""Who uses the parallel groups of this process.

vLLM keeps the groups of devices that compute together, even those of a single one, in variables of the process. All of its parts
read them there, and an engine that is shut down removes them. So they have to stay until the last engine of the process has ended,
and also while another one is being made: an engine without references ends at the next garbage collection, which may be in the middle of
that.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Groups:
    """The groups of this process, and their users."""

    def __init__(self) -> None:
        #: The identity of each engine core, and of each :meth:`held` context; and whether it has several devices.
        self._users: dict[int, bool] = {}
        #: Whether an engine has ended and left the groups to others.
        self._left = False

    @contextmanager
    def held(self, parallel: bool = False) -> Iterator[None]:
        """Keep the groups inside of this; ``parallel`` says whether an engine with several devices is being made."""
        token = object()
        self._users[id(token)] = parallel
        try:
            yield
        finally:
            del self._users[id(token)]
            if self._left and not self._users:
                from vllm.distributed import cleanup_dist_env_and_memory

                self._left = False
                cleanup_dist_env_and_memory()

    def used_by(self, core: Any, parallel: bool) -> None:
        """Keep the groups for an engine core, until :meth:`shut_down`."""
        self._users[id(core)] = parallel

    def check_alone(self, parallel: bool) -> None:
        """Raise a ``ValueError`` if one of the engines here, or the next one (``parallel``), has several devices: they share one group."""
        if self._users and (parallel or any(self._users.values())):
            gc.collect()  # ends engines without references
        if self._users and (parallel or any(self._users.values())):
            raise ValueError(
                "An engine with `tensor_parallel_size` above 1 has the process for itself, and this process has another engine "
                "already. Delete the model that it belongs to, and all references to it, or use another process."
            )

    def shut_down(self, core: Any) -> None:
        """Shut an engine core down; the last user takes the groups with it."""
        self._users.pop(id(core), None)
        if not self._users:
            self._left = False
            core.shutdown()
            return
        self._left = True
        core.structured_output_manager.clear_backend()
        core.model_executor.shutdown()
        core.scheduler.shutdown()
        gc.unfreeze()  # as vLLM does, which froze all objects when it made the engine


groups = Groups()
