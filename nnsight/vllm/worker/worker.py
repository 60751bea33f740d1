"""vLLM's worker with a model runner that knows the runs of requests.

vLLM is told the class by name (``worker_cls``). The worker makes its own model runner, which is then made to stop for blocks
(:mod:`~nnsight.vllm.worker.hooks`); and when the model is loaded, what a compiled engine needs is put into it
(:mod:`~nnsight.vllm.worker.engine_taps`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from vllm.config import CompilationMode
from vllm.platforms import current_platform

from ..steering.tables import Steering
from .engine_taps import Layout, tap
from .hooks import stop
from .runner import check


def _platform_worker() -> Any:
    """Return vLLM's worker for this machine."""
    if current_platform.is_cpu():
        from vllm.v1.worker.cpu_worker import CPUWorker

        return CPUWorker
    from vllm.v1.worker.gpu_worker import Worker

    return Worker


_Base: Any = _platform_worker()


class Worker(_Base):  # type: ignore[misc]
    """A worker whose model runner offers the values of a step to the requests' blocks."""

    def init_device(self) -> None:
        description = self.vllm_config.additional_config.get("nnsight")
        check(self.vllm_config, bool(description) and Layout.described(description).only_tables)
        super().init_device()
        stop(self.model_runner, self.vllm_config.use_v2_model_runner)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        description = self.vllm_config.additional_config.get("nnsight")
        if description and self.vllm_config.compilation_config.mode != CompilationMode.NONE:
            runner, config = self.model_runner, self.vllm_config.model_config
            rows = torch.zeros(runner.max_num_tokens, dtype=torch.int64, device=self.device)
            layout = Layout.described(description)
            runner.tapped = tap(runner.get_model(), layout, rows, config.get_hidden_size(), config.dtype)

    def write_slot(self, slot: int, steering: Mapping[str, Steering]) -> None:
        """Write what another rank has taken a slot for to the tables of this one."""
        self.model_runner.tapped.slots.write(slot, steering)
