"""Caches of a fixed size for generations, made before the model runs.

A static cache of transformers makes its tensors when a layer first writes to it. In a compiled model that is inside of a graph. Then
they are results of the first graph, and unknown inputs of those that follow: there is no CUDA graph of code that edits such inputs. Tensors
that are there before are inputs with one address for the whole generation.

The memory of a model's last cache is kept, and the next generation of this size gets it, unless a value that somebody has still lies in it.
So CUDA graphs of the steps are recorded once, and not for each generation.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..runtime.interleaver import Interleaver
from ..runtime.rows.fakes import fake_modules, same_generators
from ..runtime.switching.modes import autocast_of_thread
from .scanning import GuessesOfModel, fake_mode

logger = logging.getLogger("nnsight.modeling")


class _Part(NamedTuple):
    """What one token writes to the keys, or the values, of one layer of a cache."""

    heads: int
    size: int
    dtype: torch.dtype
    device: torch.device

    def of_no_token(self, rows: int) -> torch.Tensor:
        """Return what no token at all would write."""
        return torch.zeros((rows, self.heads, 0, self.size), dtype=self.dtype, device=self.device)


class _Memory(NamedTuple):
    """Where a tensor of a cache lies."""

    storage: torch.UntypedStorage
    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def is_free(self) -> bool:
        """Whether no tensor is left that lies there."""
        return int(torch._C._storage_Use_Count(self.storage._cdata)) == 1

    def cleared(self) -> torch.Tensor:
        """Return a tensor of zeros there."""
        made = torch.empty(0, dtype=self.dtype, device=self.storage.device)
        return made.set_(self.storage, 0, self.size, self.stride).zero_()


_lock = threading.Lock()

#: For each model, the kind of its last cache, and the attributes that its layers began with, with memory in the place of tensors.
_last: weakref.WeakKeyDictionary[torch.nn.Module, tuple[Any, list[dict[str, Any]]]] = weakref.WeakKeyDictionary()

#: For each model, what its cache depended on when a layout was found, and the layout; ``None`` for one whose cache is made otherwise.
_known: weakref.WeakKeyDictionary[torch.nn.Module, tuple[Any, Sequence[tuple[_Part, _Part]] | None]] = weakref.WeakKeyDictionary()


def static_cache(module: Any, rows: int, positions: int) -> Any:
    """Return an empty static cache of transformers for a decoder, ``None`` if its layout is not known.

    Args:
        module: A model of transformers that generates.
        rows: How many rows it is called with.
        positions: How many tokens a row may have.
    """
    from transformers.cache_utils import StaticCache, StaticLayer, StaticSlidingWindowLayer

    from ..fx.torch_compat import mark_static_address

    state = module.dtype, module.device, autocast_of_thread()
    known, layout = _known.get(module, (None, None))
    if known != state:
        layout = _layers_of(module)
        _known[module] = state, layout
    cache = StaticCache(config=module.config.get_text_config(decoder=True), max_cache_len=positions)
    kinds = {type(layer) for layer in cache.layers}
    if layout is None or len(cache.layers) != len(layout) or not kinds <= {StaticLayer, StaticSlidingWindowLayer}:
        return None
    kind = state, rows, positions, [type(layer) for layer in cache.layers], torch.is_inference_mode_enabled()
    with _lock:  # one of two threads gets the memory
        last, kept = _last.get(module, (None, []))
        if last == kind and all(item.is_free for attributes in kept for item in attributes.values() if isinstance(item, _Memory)):
            for layer, attributes in zip(cache.layers, kept, strict=True):
                for name, item in attributes.items():
                    setattr(layer, name, item.cleared() if isinstance(item, _Memory) else item)
        else:
            for layer, (keys, values) in zip(cache.layers, layout, strict=True):
                layer.lazy_initialization(keys.of_no_token(rows), values.of_no_token(rows))
            _last[module] = kind, [{name: _memory(value) for name, value in vars(layer).items()} for layer in cache.layers]
    for value in (value for layer in cache.layers for value in vars(layer).values()):
        if isinstance(value, torch.Tensor):
            mark_static_address(value, guard=False)  # the next cache has other tensors
    return cache


def _memory(value: Any) -> Any:
    """Return where a tensor lies; other values as they are."""
    if not isinstance(value, torch.Tensor):
        return value
    return _Memory(value.untyped_storage(), value.size(), value.stride(), value.dtype)


def _layers_of(module: Any) -> Sequence[tuple[_Part, _Part]] | None:
    """Return what the layers of a cache hold, of a call of fakes with one token."""
    from transformers import DynamicCache

    device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    mode = fake_mode()
    try:
        with torch.no_grad(), same_generators(), mode, Interleaver([]), GuessesOfModel():
            copy = fake_modules(module, mode, device)[module]
            output = copy(torch.zeros((1, 1), dtype=torch.int64, device=device), use_cache=True)
        cache = next(value for value in output.values() if isinstance(value, DynamicCache))
        return [(_part(layer.keys), _part(layer.values)) for layer in cache.layers]
    except Exception as error:  # of a model that keeps no keys and values, or more
        logger.debug("%s makes its static cache while it runs: %s: %s", type(module).__name__, type(error).__name__, error)
        return None


def _part(tensor: torch.Tensor) -> _Part:
    return _Part(tensor.shape[1], tensor.shape[3], tensor.dtype, tensor.device)
