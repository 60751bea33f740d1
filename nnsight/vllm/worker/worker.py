"""vLLM's worker with a model runner that knows the runs of requests.

vLLM is told the class by name (``worker_cls``). The worker makes its own model runner, which then stops for blocks. When the model is
loaded, taps, captures and tables are put into it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from safetensors.torch import load, save
from vllm.config import CompilationMode
from vllm.platforms import current_platform

from ..steering.graph_functions import register
from ..steering.graph_parts import write
from ..steering.graph_programs import GraphProgram
from .engine_taps import Layout, tap
from .hooks import stop
from .runner import check

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker


#: The parts of the graph that edits ask for, with the parameters of each, by location.
Asked = Mapping[str, Mapping[str, Mapping[str, torch.Tensor]]]


def packed(asked: Asked) -> bytes:
    """Return edits for :meth:`Worker.nnsight_write` of another process: a safetensors file, which is data only."""
    tensors = {f"{location}|{part}|": torch.zeros(0) for location, parts in asked.items() for part in parts}
    for location, parts in asked.items():
        for part, parameters in parts.items():
            tensors |= {f"{location}|{part}|{name}": value.clone() for name, value in parameters.items()}  # none shares memory
    return save({key: tensor.contiguous() for key, tensor in tensors.items()})


def unpacked(data: bytes) -> Asked:
    """Return the edits that :func:`packed` was given."""
    found: dict[str, dict[str, dict[str, torch.Tensor]]] = {}
    for key, value in load(data).items():
        location, part, name = key.split("|")
        found.setdefault(location, {}).setdefault(part, {}).update({name: value} if name else {})
    return found


class Worker(PlatformWorker):  # type: ignore[misc]
    """A worker whose model runner offers the values of a step to the requests' blocks."""

    #: Whether the model has tables where it is not compiled, too.
    always_tapped = False

    def init_device(self) -> None:
        check(self.vllm_config, self._layout().only_tables)
        super().init_device()
        stop(self.model_runner, self.vllm_config.use_v2_model_runner)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        layout = self._layout()
        if layout.modules and (self.always_tapped or layout.programs or self.vllm_config.compilation_config.mode != CompilationMode.NONE):
            runner, config = self.model_runner, self.vllm_config.model_config
            rows = torch.zeros(runner.max_num_tokens, dtype=torch.int64, device=self.device)
            runner.tapped = tap(runner.get_model(), layout, rows, config.get_hidden_size(), config.dtype)

    def _layout(self) -> Layout:
        return Layout.described(self.vllm_config.additional_config.get("nnsight", {}))

    def nnsight_locations(self) -> list[str]:
        """Return the locations that have tables for edits."""
        return list(self.model_runner.tapped.steered)

    def nnsight_write(self, slot: int, edits: Asked | bytes) -> None:
        """Write edits, or :func:`packed` edits, to the entry ``slot`` of all tables."""
        asked = unpacked(edits) if isinstance(edits, bytes) else edits
        for location, module in self.model_runner.tapped.tables.items():
            write(module, slot, asked.get(location, {}))


class ServingWorker(Worker):
    """The worker of a server, in another process, where no block steers between modules. It reads programs from their files."""

    always_tapped = True

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        files = self.vllm_config.additional_config["nnsight_programs"]
        programs = [GraphProgram.of(name, path) for name, path in files.items()]  # held until they are found
        found = set(map(register, programs))
        if found != set(self._layout().programs):
            raise ValueError("A file of --programs has changed since the server was started.")
        super().load_model(*args, **kwargs)
