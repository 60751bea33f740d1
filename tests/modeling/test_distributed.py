"""Models spread over processes: data parallel, sharded by FSDP, and tensor parallel, against plain hooks in each process."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from nnsight import NNsight

from ..conftest import Hooks

pytestmark = pytest.mark.slow

PROCESSES = 2
IDS = torch.arange(1, 13).reshape(2, 6)
VECTOR = torch.linspace(-1.0, 1.0, 32)


def saved(folder: Path) -> Path:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=64, use_cache=False)).save_pretrained(folder)
    return folder


def spread(kind: str, folder: Path) -> torch.nn.Module:
    """Return the model of this process."""
    load = transformers.AutoModelForCausalLM.from_pretrained
    if kind == "tensor parallel":
        return load(folder, tp_plan="auto").eval()  # type: ignore[no-any-return]
    model = load(folder).eval()
    if kind == "data parallel":
        return torch.nn.parallel.DistributedDataParallel(model)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (PROCESSES,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)  # type: ignore[no-any-return]


def add(hidden: Any) -> Any:
    return (hidden[0] + VECTOR, *hidden[1:]) if isinstance(hidden, tuple) else hidden + VECTOR


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.detach(), expected.detach(), rtol=1e-4, atol=1e-4)


def check(kind: str, folder: Path) -> None:
    """Compare traces, edits and programs with hooks, in this process."""
    module = spread(kind, folder)
    path = "module.model.layers.1" if kind == "data parallel" else "model.layers.1"
    expected = Hooks(module).output(path, add)(input_ids=IDS).logits
    grads: list[torch.Tensor] = []

    def watch(layer: torch.nn.Module, args: Any, output: Any) -> None:
        output.register_hook(grads.append)

    with module.get_submodule(path).register_forward_hook(watch):
        module(input_ids=IDS).logits.sum().backward()
    module.zero_grad()

    for backend in (None, "aot_eager"):
        model = NNsight(module, compile=False if backend is None else {"backend": backend})
        layer = model.get(path)
        for _ in range(2):
            with model.trace(input_ids=IDS) as tracer:
                layer.output += VECTOR
                logits = model.output.logits.save()
            close(logits, expected)
        assert backend is None or tracer.report.graphs >= 1
        with model.trace(input_ids=IDS):
            hidden = layer.output
            loss = model.output.logits.sum()
            with loss.backward():
                grad = hidden.grad.save()
        close(grad, grads[0])
        module.zero_grad()

    model = NNsight(module, compile={"backend": "aot_eager"})
    layer = model.get(path)
    with model.scan(input_ids=IDS):
        size = layer.output.shape.save()
    assert size == (2, 6, 32)
    with model.trace(input_ids=IDS, program=True) as tracer:
        layer.output += VECTOR
        logits = model.output.logits.save()
    close(logits, expected)
    steered = tracer.program.bind(model, inputs=["VECTOR"])
    for _ in range(2):
        close(steered(input_ids=IDS, VECTOR=VECTOR)["logits"], expected)
    with NNsight(module).edit() as edited:
        edited.get(path).output += VECTOR
    edited.compile(backend="aot_eager")
    for _ in range(2):
        close(edited(input_ids=IDS).logits, expected)
    if kind == "sharded":
        with pytest.raises(ValueError, match="cannot be baked: the model cannot be copied: FSDP"):
            edited.bake(input_ids=IDS)
    else:
        close(edited.bake(input_ids=IDS)(input_ids=IDS).logits, expected)


def run(rank: int, kind: str, folder: Path, port: int) -> None:
    """Run one process of the group."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(PROCESSES))
    torch.distributed.init_process_group("gloo")
    try:
        check(kind, folder)
        torch.distributed.barrier()
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("kind", ["data parallel", "sharded", "tensor parallel"])
def test_a_model_of_several_processes(kind: str, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(run, (kind, saved(tmp_path), port), PROCESSES)  # type: ignore[no-untyped-call]
