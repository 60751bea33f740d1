"""A model of vLLM without weights, on the meta device: its modules, to be printed and addressed.

vLLM's modules read the process while they are made: its configuration and the ranks of its parallel groups. So both are set up for that
time, as they are for an engine, and taken down again. A cache of the process shares the tables of positions between modules;
the tables made here have no values, and may not stay in it.
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
    """Return the model of an engine of ``repo`` with ``options``, without weights, as on a single rank."""
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
    """Set up parallel groups, each with one member, inside of this."""
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
