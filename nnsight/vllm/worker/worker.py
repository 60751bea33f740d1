"""vLLM's worker, with a model runner that stops for the blocks of requests.

vLLM gets the name of the class as ``worker_cls``. After vLLM's worker has made its model runner, this class installs hooks into it. After
the model has been loaded, this class puts taps, captures and tables into the model.
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
from ..steering.pairs import find_forms
from .engine_taps import Layout, tap
from .hooks import install_hooks
from .runner import check

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker


#: Tokens of the run that shows how layers return the hidden state.
_FEW_TOKENS = 8

#: Parameters of edits: by location, by name of the part of the graph, by name of the parameter.
Asked = Mapping[str, Mapping[str, Mapping[str, torch.Tensor]]]


def packed(asked: Asked) -> bytes:
    """Return edits as safetensors data, which :meth:`Worker.nnsight_write` accepts from another process: it contains no code."""
    tensors = {f"{location}|{part}|": torch.zeros(0) for location, parts in asked.items() for part in parts}
    for location, parts in asked.items():
        for part, parameters in parts.items():
            tensors |= {f"{location}|{part}|{name}": value.clone() for name, value in parameters.items()}  # no shared memory
    return save({key: tensor.contiguous() for key, tensor in tensors.items()})


def unpacked(data: bytes) -> Asked:
    """Return the edits in data that :func:`packed` returned."""
    found: dict[str, dict[str, dict[str, torch.Tensor]]] = {}
    for key, value in load(data).items():
        location, part, name = key.split("|")
        found.setdefault(location, {}).setdefault(part, {}).update({name: value} if name else {})
    return found


class Worker(PlatformWorker):  # type: ignore[misc]
    """A worker whose model runner offers the values of a step to the blocks of the requests."""

    #: Whether the model gets taps, captures and tables even if it is not compiled.
    always_tapped = False

    def init_device(self) -> None:
        check(self.vllm_config, self._layout().only_tables)
        super().init_device()
        install_hooks(self.model_runner, self.vllm_config.use_v2_model_runner)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        layout, runner, config = self._layout(), self.model_runner, self.vllm_config.model_config
        runner.batched = config.using_transformers_backend()
        if not runner.batched:  # layers of transformers return no pairs
            few = min(_FEW_TOKENS, runner.max_num_tokens)
            v2 = {"skip_attn": True} if self.vllm_config.use_v2_model_runner else {}
            find_forms(runner.get_model(), lambda: runner._dummy_run(few, is_profile=True, **v2))
        if layout.modules and (self.always_tapped or layout.programs or self.vllm_config.compilation_config.mode != CompilationMode.NONE):
            rows = torch.zeros(runner.max_num_tokens, dtype=torch.int64, device=self.device)
            runner.tapped = tap(runner.get_model(), layout, rows, config.get_hidden_size(), config.dtype, runner.batched)

    def _layout(self) -> Layout:
        return Layout.described(self.vllm_config.additional_config.get("nnsight", {}))

    def nnsight_locations(self) -> list[str]:
        """Return the locations that have tables for edits."""
        return list(self.model_runner.tapped.steered)

    def nnsight_write(self, slot: int, edits: Asked | bytes) -> None:
        """Write edits, or the result of :func:`packed`, to the entry ``slot`` of all tables."""
        asked = unpacked(edits) if isinstance(edits, bytes) else edits
        for location, module in self.model_runner.tapped.tables.items():
            write(module, slot, asked.get(location, {}))


class ServingWorker(Worker):
    """The worker of a server, in a process of its own: it reads programs from their files, and edits always go through tables."""

    always_tapped = True

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        files = self.vllm_config.additional_config["nnsight_programs"]
        programs = [GraphProgram.of(name, path) for name, path in files.items()]  # the registry has weak references only
        found = set(map(register, programs))
        if found != set(self._layout().programs):
            raise ValueError("A file of --programs has changed since the server was started.")
        super().load_model(*args, **kwargs)
