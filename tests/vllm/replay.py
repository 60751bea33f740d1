"""An engine on a CPU whose graphs are split into pieces and replayed, as CUDA graphs are; test_replay.py runs it in its own process.

vLLM compiles in pieces, and replays them, on GPUs only. Here its platform for CPUs is told to do so, and a piece is "recorded" by noting
the tensors that it was called with and returned: later calls read from those, whatever they are given, and write what they return there. So
a value that a piece behind a tap would have to be told about, rather than find at its old address, is lost here as it is on a GPU.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from vllm.compilation.passes.utility.fix_functionalization import FixFunctionalizationPass
from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.platforms.cpu import CpuPlatform

from nnsight.vllm import VLLM
from nnsight.vllm.worker.engine_taps import HANDOFF

SIZES = [1, 2, 4, 8, 16, 32]
COUNTS = {"recorded": 0, "replayed": 0}


class Recorded:
    """Stands in for vLLM's wrapper of CUDA graphs."""

    def __init__(self, runnable: Any, vllm_config: Any, runtime_mode: Any, cudagraph_options: Any = None) -> None:
        self._runnable, self._mode = runnable, runtime_mode
        self._known: dict[Any, tuple[Any, Any]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_runnable"], name)

    @classmethod
    def clear_all_graphs(cls) -> None:
        """There is nothing outside of the objects."""

    def __call__(self, *args: Any) -> Any:
        context = get_forward_context() if is_forward_context_available() else None
        if context is None or context.cudagraph_runtime_mode != self._mode:
            return self._runnable(*args)
        if context.batch_descriptor not in self._known:
            COUNTS["recorded"] += 1
            self._known[context.batch_descriptor] = args, self._runnable(*args)
            return self._known[context.batch_descriptor][1]
        COUNTS["replayed"] += 1
        old, result = self._known[context.batch_descriptor]
        for kept, new in zip(_leaves(result), _leaves(self._runnable(*old)), strict=True):
            if kept.data_ptr() != new.data_ptr():
                kept.copy_(new)
        return result


def _leaves(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in (value if isinstance(value, (tuple, list)) else [value]) if isinstance(leaf, torch.Tensor)]


def replay() -> None:
    """Let engines be compiled in pieces, which are replayed."""
    checked = CpuPlatform.check_and_update_config.__func__  # type: ignore[attr-defined]

    def check(cls: Any, config: Any) -> None:
        wanted = config.compilation_config.mode
        checked(cls, config)
        if wanted == CompilationMode.VLLM_COMPILE:
            chosen = config.compilation_config
            chosen.mode, chosen.cudagraph_mode = wanted, CUDAGraphMode.PIECEWISE
            chosen.ir_enable_torch_wrap = True
            chosen.cudagraph_capture_sizes, chosen.max_cudagraph_capture_size = SIZES, SIZES[-1]

    CpuPlatform.check_and_update_config = classmethod(check)  # type: ignore[assignment]
    FixFunctionalizationPass.__call__ = lambda self, graph: None  # type: ignore[assignment] # it looks for operations of CUDA
    CpuPlatform.get_static_graph_wrapper_cls = classmethod(lambda cls: f"{__name__}.Recorded")  # type: ignore[assignment]


def clamp(hidden: torch.Tensor, limit: float = 1.0) -> torch.Tensor:
    return hidden.clamp(min=-limit, max=limit)


def found(model: VLLM, prompts: list[list[int]], vector: torch.Tensor) -> dict[str, Any]:
    """Run requests of all kinds at once, twice; return their tokens, and what was captured."""
    layers, sampling = model.model.layers, {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True}
    tokens, states = [], []
    for _ in range(2):
        results: list[Any] = []
        with model.trace(**sampling) as tracer:
            with tracer.invoke(prompts[0]):
                results.append(tracer.result)
            with tracer.invoke(prompts[0]):
                layers[1].steer(add=vector, use="clamp", limit=5.0)
                results.append(tracer.result)
            with tracer.invoke(prompts[1]):
                for _ in tracer.iter[:6]:
                    layers[2].residual += vector
                results.append(tracer.result)
            with tracer.invoke(prompts[1]):
                captured = [].save()
                for _ in tracer.iter[:6]:
                    captured.append(layers[3].residual)
                results.append(tracer.result)
        tokens.append([list(result.outputs[0].token_ids) for result in results])
        states.append(torch.cat(list(captured)).tolist())
    return {"tokens": tokens, "states": states, "counts": COUNTS}


def main(folder: str, prompts: list[list[int]], vector: list[float]) -> None:
    replay()
    ends = [*CompilationConfig._attention_ops, "vllm::unified_kv_cache_update", "vllm::unified_mla_kv_cache_update", HANDOFF]
    model = VLLM(
        folder, dtype="float32", max_model_len=256, kv_cache_memory_bytes=64 << 20,
        taps=["model.layers.2"], captures=["model.layers.3"], edits={"modules": ["model.layers.1"], "functions": {"clamp": clamp}},
        compilation_config={"mode": 3, "cudagraph_mode": "PIECEWISE", "splitting_ops": ends, "compile_sizes": []},
    )  # fmt: skip
    print("found", json.dumps(found(model, prompts, torch.tensor(vector))))


if __name__ == "__main__":
    main(*json.loads(sys.argv[1]))
