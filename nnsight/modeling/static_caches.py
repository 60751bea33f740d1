"""Static key-value caches for generations, allocated before the model runs.

A static cache of transformers allocates its tensors when a layer first writes to it. In a compiled model, this happens inside a graph. The
tensors are then results of the first graph and inputs of later ones, at an address that is not known in advance. Code that edits such
inputs in place cannot run as a CUDA graph. Tensors that are allocated before have one address for the whole generation.

The memory of a model's last cache is kept and used again by the next generation of the same size, unless another tensor still uses it.
So CUDA graphs of the steps are recorded once, not for each generation.
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
    """The shape, dtype and device of the keys, or of the values, that one layer writes to a cache for one token."""

    heads: int
    size: int
    dtype: torch.dtype
    device: torch.device

    def of_no_token(self, rows: int) -> torch.Tensor:
        """Return an empty tensor ``[rows, heads, 0, size]``, as the keys or values of zero tokens."""
        return torch.zeros((rows, self.heads, 0, self.size), dtype=self.dtype, device=self.device)


class _Memory(NamedTuple):
    """The storage of a tensor of a cache, and its layout there."""

    storage: torch.UntypedStorage
    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def is_free(self) -> bool:
        """Whether no tensor uses the storage."""
        return int(torch._C._storage_Use_Count(self.storage._cdata)) == 1

    def cleared(self) -> torch.Tensor:
        """Return a tensor in this storage, filled with zeros."""
        made = torch.empty(0, dtype=self.dtype, device=self.storage.device)
        return made.set_(self.storage, 0, self.size, self.stride).zero_()


_lock = threading.Lock()

#: For each model, the key of its last cache, and the initial attributes of its layers, with a :class:`_Memory` for each tensor.
_last_caches: weakref.WeakKeyDictionary[torch.nn.Module, tuple[Any, list[dict[str, Any]]]] = weakref.WeakKeyDictionary()

#: For each model, the state for which its layout was found, and the layout: keys and values of each layer; ``None`` if there is none.
_layouts: weakref.WeakKeyDictionary[torch.nn.Module, tuple[Any, Sequence[tuple[_Part, _Part]] | None]] = weakref.WeakKeyDictionary()


def static_cache(module: Any, rows: int, positions: int) -> Any:
    """Return an empty static cache of transformers for a decoder; ``None`` if its layout cannot be determined.

    Args:
        module: A model of transformers that generates.
        rows: The batch size of its calls.
        positions: The maximal number of tokens in a row.
    """
    from transformers.cache_utils import StaticCache, StaticLayer, StaticSlidingWindowLayer

    from ..fx.torch_compat import mark_static_address

    state = module.dtype, module.device, autocast_of_thread()
    known, layout = _layouts.get(module, (None, None))
    if known != state:
        layout = _layers_of(module)
        _layouts[module] = state, layout
    cache = StaticCache(config=module.config.get_text_config(decoder=True), max_cache_len=positions)
    kinds = {type(layer) for layer in cache.layers}
    if layout is None or len(cache.layers) != len(layout) or not kinds <= {StaticLayer, StaticSlidingWindowLayer}:
        return None
    kind = state, rows, positions, [type(layer) for layer in cache.layers], torch.is_inference_mode_enabled()
    with _lock:  # two threads must not take the same memory
        last, kept = _last_caches.get(module, (None, []))
        if last == kind and all(item.is_free for attributes in kept for item in attributes.values() if isinstance(item, _Memory)):
            for layer, attributes in zip(cache.layers, kept, strict=True):
                for name, item in attributes.items():
                    setattr(layer, name, item.cleared() if isinstance(item, _Memory) else item)
        else:
            for layer, (keys, values) in zip(cache.layers, layout, strict=True):
                layer.lazy_initialization(keys.of_no_token(rows), values.of_no_token(rows))
            _last_caches[module] = kind, [{name: _memory(value) for name, value in vars(layer).items()} for layer in cache.layers]
    for value in (value for layer in cache.layers for value in vars(layer).values()):
        if isinstance(value, torch.Tensor):
            mark_static_address(value, guard=False)  # no guard: the next cache has other tensors
    return cache


def _memory(value: Any) -> Any:
    """Return the memory of a tensor; other values as they are."""
    if not isinstance(value, torch.Tensor):
        return value
    return _Memory(value.untyped_storage(), value.size(), value.stride(), value.dtype)


def _layers_of(module: Any) -> Sequence[tuple[_Part, _Part]] | None:
    """Return the keys and values of the layers of a cache, from a call of a fake copy with one token; ``None`` if it has no such cache."""
    from transformers import DynamicCache

    device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    mode = fake_mode()
    try:
        with torch.no_grad(), same_generators(), mode, Interleaver([]), GuessesOfModel():
            copy = fake_modules(module, mode, device)[module]
            output = copy(torch.zeros((1, 1), dtype=torch.int64, device=device), use_cache=True)
        cache = next(value for value in output.values() if isinstance(value, DynamicCache))
        return [(_part(layer.keys), _part(layer.values)) for layer in cache.layers]
    except Exception as error:  # from a model whose cache has no keys and values, or also other state
        logger.debug("%s makes its static cache while it runs: %s: %s", type(module).__name__, type(error).__name__, error)
        return None


def _part(tensor: torch.Tensor) -> _Part:
    return _Part(tensor.shape[1], tensor.shape[3], tensor.dtype, tensor.device)
