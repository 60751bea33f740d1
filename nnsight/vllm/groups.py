"""Who uses the parallel groups of this process.

vLLM keeps the groups of devices that compute together, even those of a single one, in variables of the process: whatever it makes finds
them there, and an engine that is shut down takes them away. So they have to stay until the last engine of the process has ended,
and also while another one is being made: an engine that nobody refers to any more ends at the next collection of
garbage, which may be in the middle of that.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Groups:
    """The groups of this process, and what uses them."""

    def __init__(self) -> None:
        #: The identity of each engine core, or of what is being made; and whether it has several devices.
        self._users: dict[int, bool] = {}
        #: Whether an engine has ended and left the groups to others.
        self._left = False

    @contextmanager
    def held(self, parallel: bool = False) -> Iterator[None]:
        """Let the groups that are there stay meanwhile.

        Args:
            parallel: Whether what is being made has several devices.
        """
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
        """Say that an engine core uses them, until :meth:`shut_down`."""
        self._users[id(core)] = parallel

    def check_alone(self, parallel: bool) -> None:
        """Raise if there is an engine that another one cannot be beside.

        Args:
            parallel: Whether the other one has several devices.

        Raises:
            ValueError: If this process is one of several of an engine: vLLM has one group of devices in a process.
        """
        if self._users and (parallel or any(self._users.values())):
            gc.collect()  # what nobody uses any more ends now
        if self._users and (parallel or any(self._users.values())):
            raise ValueError(
                "An engine with `tensor_parallel_size` above 1 has the process for itself, and this process has another engine "
                "already. Delete the model that it belongs to, and what refers to it, or use another process."
            )

    def shut_down(self, core: Any) -> None:
        """Shut an engine core down; with the last user the groups go, too."""
        self._users.pop(id(core), None)
        if not self._users:
            self._left = False
            core.shutdown()
            return
        self._left = True
        core.structured_output_manager.clear_backend()
        core.model_executor.shutdown()
        core.scheduler.shutdown()
        gc.unfreeze()  # as vLLM does: it froze what was there when the engine was made


groups = Groups()
