"""A model of vLLM without weights, on the meta device: its modules, to be printed and addressed.

vLLM's modules ask the process what they are a part of while they are made: for its configuration and for the ranks of parallel
groups. So both are set up for the moment, as they are for an engine, and taken down again. Positions' tables are shared between
modules by a cache of the process; those made here have no values, and may not stay in it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from .groups import groups
from .worker.engine_taps import Layout
from .worker.runner import check


def skeleton_of(repo: str, options: Mapping[str, Any], layout: Layout | None = None) -> torch.nn.Module:
    """Return the model that an engine of ``repo`` with ``options`` has, without weights, as on a single rank."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model

    options = {name: value for name, value in options.items() if name != "tensor_parallel_size"}
    with torch.device("cpu"):  # the caller's default may be the meta device already
        config = EngineArgs(model=repo, **options).create_engine_config()
    check(config, layout is not None and layout.only_tables)
    with set_current_vllm_config(config), groups.held(), _single_rank(), _own_positions(), torch.device("meta"):
        model: torch.nn.Module = initialize_model(config)
    return model.eval()


@contextmanager
def _single_rank() -> Iterator[None]:
    """Let parallel groups be there, each with one member."""
    from vllm.distributed import (
        destroy_distributed_environment,
        destroy_model_parallel,
        init_distributed_environment,
        initialize_model_parallel,
        model_parallel_is_initialized,
    )

    if model_parallel_is_initialized():  # an engine lives in this process
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        with torch.device("cpu"):
            init_distributed_environment(1, 0, f"file://{Path(folder) / 'store'}", 0, backend="gloo")
            initialize_model_parallel()
        try:
            yield
        finally:
            destroy_model_parallel()
            destroy_distributed_environment()


@contextmanager
def _own_positions() -> Iterator[None]:
    """Keep the tables of positions that are made inside out of the cache of the process."""
    from vllm.model_executor.layers import rotary_embedding

    cache: dict[Any, Any] = getattr(rotary_embedding, "_ROPE_DICT", {})
    kept = dict(cache)
    cache.clear()
    try:
        yield
    finally:
        cache.clear()
        cache.update(kept)
