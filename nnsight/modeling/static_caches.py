"""Caches of a fixed size for generations, laid out before the model runs.

A static cache of transformers makes its tensors when a layer first writes to it. In a compiled model that is inside of a graph, so the tensors
are results of the first graph and unknown inputs of those that follow: a CUDA graph would copy them at each step, and Inductor makes none. Made
before, they are inputs with one address for the whole generation.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..runtime.interleaver import Interleaver
from ..runtime.rows.fakes import fake_modules, same_generators
from ..runtime.switching.modes import autocast_of_thread
from .scanning import fake_mode

logger = logging.getLogger("nnsight.modeling")


class _LayerShape(NamedTuple):
    """What one token writes to one layer of a cache: heads and their size, for keys and values, and dtype and device of these."""

    keys: tuple[int, int]
    values: tuple[int, int]
    dtype: torch.dtype
    device: torch.device


#: For each model, what its cache depended on when a layout was found, and the layout; ``None`` for one whose cache is made otherwise.
_known: weakref.WeakKeyDictionary[torch.nn.Module, tuple[Any, Sequence[_LayerShape] | None]] = weakref.WeakKeyDictionary()


def static_cache(module: Any, rows: int, positions: int) -> Any:
    """Return an empty static cache of transformers for a decoder, ``None`` if its layout is not known.

    Args:
        module: A model of transformers that generates.
        rows: How many rows it is called with.
        positions: How many tokens a row may have.
    """
    from transformers.cache_utils import StaticCache, StaticLayer, StaticSlidingWindowLayer

    state = module.dtype, module.device, autocast_of_thread()
    known, shapes = _known.get(module, (None, None))
    if known != state:
        shapes = _layers_of(module)
        _known[module] = state, shapes
    cache = StaticCache(config=module.config.get_text_config(decoder=True), max_cache_len=positions)
    kinds = {type(layer) for layer in cache.layers}
    if shapes is None or len(cache.layers) != len(shapes) or not kinds <= {StaticLayer, StaticSlidingWindowLayer}:
        return None
    for layer, shape in zip(cache.layers, shapes, strict=True):
        keys, values = (
            torch.zeros((rows, heads, 0, size), dtype=shape.dtype, device=shape.device) for heads, size in (shape.keys, shape.values)
        )
        layer.lazy_initialization(keys, values)
        for value in vars(layer).values():
            if isinstance(value, torch.Tensor):
                torch._dynamo.mark_static_address(value, guard=False)  # type: ignore[attr-defined] # the next cache has other tensors
    return cache


def _layers_of(module: Any) -> Sequence[_LayerShape] | None:
    """Return what the layers of a cache hold, of a call of fakes with one token."""
    from transformers import DynamicCache

    device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    mode = fake_mode()
    try:
        with torch.no_grad(), same_generators(), mode, Interleaver([]):
            copy = fake_modules(module, mode, device)[module]
            output = copy(torch.zeros((1, 1), dtype=torch.int64, device=device), use_cache=True)
        cache = next(value for value in output.values() if isinstance(value, DynamicCache))
        return [
            _LayerShape(_heads(layer.keys), _heads(layer.values), layer.keys.dtype, layer.keys.device) for layer in cache.layers
        ]
    except Exception as error:  # of a model that keeps no keys and values, or more
        logger.debug("%s makes its static cache while it runs: %s: %s", type(module).__name__, type(error).__name__, error)
        return None


def _heads(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.shape[1], tensor.shape[3]
