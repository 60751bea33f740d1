"""A vLLM model without weights, on the meta device. Its modules can be printed and addressed before the engine starts.

vLLM's modules read global state while they are made: the current configuration, and the ranks of the parallel groups. So this module sets
up both, as for an engine, and removes them afterwards. vLLM shares the position tables of rotary embeddings in a global cache. The tables
made here have no values, so they must not stay in that cache.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from .groups import groups
from .prompts import config_of
from .worker.engine_taps import Layout
from .worker.runner import check


def skeleton_of(repo: str, options: Mapping[str, Any], layout: Layout) -> torch.nn.Module:
    """Return the model of an engine of ``repo`` with ``options``, without weights, on a single rank."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers import rotary_embedding
    from vllm.model_executor.model_loader.utils import initialize_model

    config = config_of(repo, options)
    check(config, layout.only_tables)
    own_positions = mock.patch.dict(getattr(rotary_embedding, "_ROPE_DICT", {}), clear=True)
    with set_current_vllm_config(config), groups.held(), _single_rank(), own_positions, torch.device("meta"):
        model: torch.nn.Module = initialize_model(config)
    return model.eval()


@contextmanager
def _single_rank() -> Iterator[None]:
    """Provide parallel groups with one member each inside of this context."""
    from vllm.distributed import (
        destroy_distributed_environment,
        destroy_model_parallel,
        init_distributed_environment,
        initialize_model_parallel,
        model_parallel_is_initialized,
    )

    if model_parallel_is_initialized():  # by an engine in this process; its groups suffice
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
