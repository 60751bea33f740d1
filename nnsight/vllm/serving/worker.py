"""The worker of a server: it is told of edits by calls, and which request has which by its sampling parameters.

Parameters come as the bytes of a safetensors file, which is data only, with the keys ``location|table``. Behind a model runner of any kind
the tables are filled by :mod:`..worker`; this adds where the numbers come from.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from safetensors.torch import load, save

from ..steering.tables import Steering
from ..worker.engine_taps import Layout, tap
from ..worker.worker import Worker

#: Names in a request's sampling parameters; a user cannot say them.
SLOT, START = "nnsight-slot", "nnsight-start"

_TABLES = ("add", "gain", "down", "up")


def packed(edits: Mapping[str, Steering]) -> bytes:
    """Return ``edits`` by location as bytes, for :meth:`ServingWorker.nnsight_write`."""
    tensors = {f"{location}|{name}": getattr(found, name) for location, found in edits.items() for name in _TABLES}
    return save({key: tensor.contiguous() for key, tensor in tensors.items()})


def unpacked(data: bytes) -> dict[str, Steering]:
    """Return what :func:`packed` was given, apart from the first positions."""
    tensors = load(data)
    locations = dict.fromkeys(key.rpartition("|")[0] for key in tensors)
    found: dict[str, Steering] = {}
    for location in locations:
        add, gain, down, up = (tensors[f"{location}|{name}"] for name in _TABLES)
        found[location] = Steering(add, gain, down, up)
    return found


class ServingWorker(Worker):
    """A worker whose tables are written by calls from another process."""

    def init_device(self) -> None:
        super().init_device()
        runner: Any = self.model_runner
        base = type(runner)

        def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            _follow(self, scheduler_output)
            return base.execute_model(self, scheduler_output, *args, **kwargs)

        runner.__class__ = type(base.__name__, (base,), {"execute_model": execute_model})

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        runner, config = self.model_runner, self.vllm_config.model_config
        if runner.tapped is None:  # nothing is compiled, and the tables are the same
            rows = torch.zeros(runner.max_num_tokens, dtype=torch.int64, device=self.device)
            layout = Layout.described(self.vllm_config.additional_config["nnsight"])
            runner.tapped = tap(runner.get_model(), layout, rows, config.get_hidden_size(), config.dtype)

    def nnsight_locations(self) -> list[str]:
        """Return where there are tables."""
        return list(self.model_runner.tapped.steered)

    def nnsight_write(self, slot: int, data: bytes) -> None:
        """Write :func:`packed` parameters to the entry ``slot`` of all tables."""
        self.model_runner.tapped.slots.write(slot, unpacked(data))


def _follow(runner: Any, scheduler_output: Any) -> None:
    """Learn which requests of a step have which entry, and forget those that have ended."""
    for request in scheduler_output.finished_req_ids:
        runner.bookkeeping.remove(request)
    for new in scheduler_output.scheduled_new_reqs:
        extra = (new.sampling_params and new.sampling_params.extra_args) or {}
        if SLOT in extra:
            runner.bookkeeping.add(new.req_id, slot=(extra[SLOT], extra[START]))
