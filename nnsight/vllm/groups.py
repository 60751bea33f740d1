"""Users of the parallel groups of this process.

vLLM keeps its groups of devices, even a group of a single device, in global variables. All of its parts read these variables, and the
shutdown of an engine removes the groups. So this module counts their users, and keeps the groups until the last engine of the process has
ended. An engine that is being made counts, too: meanwhile, the garbage collector may end another engine that has no references.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Groups:
    """The groups of this process, and their users."""

    def __init__(self) -> None:
        #: For the id of each engine core, and of each :meth:`held` context: whether it has several devices.
        self._users: dict[int, bool] = {}
        #: Whether an engine has ended without removing the groups, because they had other users.
        self._abandoned = False

    @contextmanager
    def held(self, parallel: bool = False) -> Iterator[None]:
        """Keep the groups inside of this context. ``parallel`` says whether an engine with several devices is being made."""
        token = object()
        self._users[id(token)] = parallel
        try:
            yield
        finally:
            del self._users[id(token)]
            if self._abandoned and not self._users:
                from vllm.distributed import cleanup_dist_env_and_memory

                self._abandoned = False
                cleanup_dist_env_and_memory()

    def used_by(self, core: Any, parallel: bool) -> None:
        """Keep the groups for the engine core ``core`` until :meth:`shut_down`."""
        self._users[id(core)] = parallel

    def check_alone(self, parallel: bool) -> None:
        """Raise ``ValueError`` if an engine with several devices would share the groups with another engine. ``parallel`` says whether
        the next engine has several devices."""
        if self._users and (parallel or any(self._users.values())):
            gc.collect()  # ends engines without references
        if self._users and (parallel or any(self._users.values())):
            raise ValueError(
                "An engine with `tensor_parallel_size` above 1 has the process for itself, and this process already has another "
                "engine. Delete the model of that engine and all references to it, or use another process."
            )

    def shut_down(self, core: Any) -> None:
        """Shut an engine core down. If it is the last user, this removes the groups, too."""
        self._users.pop(id(core), None)
        if not self._users:
            self._abandoned = False
            core.shutdown()
            return
        self._abandoned = True
        core.structured_output_manager.clear_backend()
        core.model_executor.shutdown()
        core.scheduler.shutdown()
        gc.unfreeze()  # vLLM froze all objects when it made the engine


groups = Groups()
