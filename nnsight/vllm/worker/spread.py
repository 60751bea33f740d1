"""How values are spread over the devices of a tensor-parallel engine, and how the whole is put together.

With several devices each has a part of the heads and of the inner channels of a layer. Most values are *alike* on all
devices: hidden states, outputs of attention and MLP, logits. Those between a column-parallel and a row-parallel layer are
*spread*: each device has some of the last axis. A merged layer (query, key and value; gate and up) has several values side by side,
each of them spread for itself, so the parts of each are joined, in the order that a single device has. If there are
fewer key-value heads than devices, neighbours have the same head, and the whole has it once.

The kind of a module says which of its values are spread. Everywhere else devices compare their values before a block sees them, so
a part is never taken for the whole: see :meth:`Spreads.of`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .calls import kind_of

_ACTIVATIONS = ("vllm.model_executor.layers.activation", "torch.nn.modules.activation")


@dataclass(frozen=True)
class Spread:
    """How the last axis of a value is spread."""

    #: For each of the values side by side: how many channels a device has, and how many neighbours have the same.
    segments: tuple[tuple[int, int], ...]

    @property
    def width(self) -> int:
        """Channels of one device."""
        return sum(width for width, _ in self.segments)

    def whole_width(self, devices: int) -> int:
        """Return the number of channels of all ``devices``."""
        return sum(width * devices // copies for width, copies in self.segments)

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the whole of the ``parts`` of all devices, in their order."""
        pieces, start = [], 0
        for width, copies in self.segments:
            pieces += [part[..., start : start + width] for part in parts[::copies]]
            start += width
        return torch.cat(pieces, -1)

    def part(self, whole: torch.Tensor, rank: int, devices: int) -> torch.Tensor:
        """Return the part that device ``rank`` of ``devices`` has of ``whole``."""
        pieces, start = [], 0
        for width, copies in self.segments:
            mine = start + rank // copies * width
            pieces.append(whole[..., mine : mine + width])
            start += devices // copies * width
        return torch.cat(pieces, -1)


class Spreads:
    """Knows which values of ``model``, the model of one device, are spread."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._modules = {f"model.{name}" if name else "model": module for name, module in model.named_modules()}

    def module(self, path: str) -> torch.nn.Module:
        """Return the module at ``path``."""
        return self._modules[path]

    def parts_of(self, location: str, leaves: Sequence[Any], rank: int, devices: int) -> list[Any]:
        """Return ``leaves``, whole values at ``location``, with the part of device ``rank`` in the place of each that is spread there."""
        path, _, side = location.rpartition(".")
        tensors = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.dim()]
        found = list(leaves)
        for index, spread in zip(tensors, self._rules(self.module(path), path, side, len(tensors)), strict=False):
            if spread is not None and leaves[index].shape[-1] == spread.whole_width(devices):
                found[index] = spread.part(leaves[index], rank, devices)
        return found

    def of(self, location: str, leaves: Sequence[Any]) -> list[Spread | None]:
        """Return how each of ``leaves``, the parts of a value at ``location``, is spread.

        ``None`` is for a leaf without a rule: it has to be alike on all devices.
        """
        path, _, side = location.rpartition(".")
        module = self._modules.get(path)
        found: list[Spread | None] = [None] * len(leaves)
        if module is None:
            return found
        tensors = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.dim()]
        for index, spread in zip(tensors, self._rules(module, path, side, len(tensors)), strict=False):
            # A rule does not apply to values of another width.
            if spread is not None and leaves[index].shape[-1] == spread.width:
                found[index] = spread
        if not any(found) and kind_of(module).__module__ in _ACTIVATIONS and (region := self._region(path)) is not None:
            width = region.input_size_per_partition
            choices = {width: Spread(((width, 1),)), 2 * width: Spread(((width, 1), (width, 1)))}
            for index in tensors:
                found[index] = choices.get(leaves[index].shape[-1])
        return found

    def _rules(self, module: Any, path: str, side: str, count: int) -> list[Spread | None]:
        """Return how the first tensors at a side of ``module`` are spread, by its kind."""
        from vllm.model_executor.layers.attention import Attention
        from vllm.model_executor.layers.linear import RowParallelLinear
        from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase

        kind = kind_of(module)
        column = columns_of(module)
        if column is not None:
            return [column] * count if side == "output" else []
        if kind is RowParallelLinear:
            spread = _is_parallel(module) and side == "input"
            return [Spread(((int(module.input_size_per_partition), 1),))] * count if spread else []
        if not issubclass(kind, (Attention, RotaryEmbeddingBase)):
            return []
        siblings = [columns_of(child) for child in self._siblings(path)]
        merged = next((found for found in siblings if found is not None and len(found.segments) == 3), None)
        if merged is None:
            return []
        query, key, value = (Spread((segment,)) for segment in merged.segments)
        if issubclass(kind, Attention):
            heads = Spread(((int(module.num_heads * module.head_size_v), 1),)) if hasattr(module, "head_size_v") else query
            return [query, key, value] if side == "input" else [heads]
        return [None, query, key] if side == "input" else [query, key]

    def _siblings(self, path: str) -> list[torch.nn.Module]:
        parent = self._modules.get(path.rpartition(".")[0])
        return [] if parent is None else list(parent.children())

    def _region(self, path: str) -> Any:
        """Return the row-parallel layer beside the module at ``path``, whose input is spread; ``None`` if there is none."""
        from vllm.model_executor.layers.linear import RowParallelLinear

        return next((found for found in self._siblings(path) if kind_of(found) is RowParallelLinear and _is_parallel(found)), None)


def _is_parallel(module: Any) -> bool:
    return module.tp_size > 1 and module.input_is_parallel


def columns_of(module: Any) -> Spread | None:
    """Return how the output of ``module`` is spread if it is a column-parallel layer."""
    from vllm.model_executor.layers.linear import ColumnParallelLinear, MergedColumnParallelLinear, QKVParallelLinear

    kind = kind_of(module)
    if kind not in (ColumnParallelLinear, MergedColumnParallelLinear, QKVParallelLinear):
        return None
    if module.tp_size == 1 or module.gather_output:
        return None
    if kind is QKVParallelLinear:
        copies = module.num_kv_head_replicas
        query, key = module.num_heads * module.head_size, module.num_kv_heads * module.head_size
        return Spread(((query, 1), (key, copies), (module.num_kv_heads * module.v_head_size, copies)))
    return Spread(tuple((size, 1) for size in module.output_partition_sizes))
