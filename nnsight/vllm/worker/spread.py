"""The spread of values over the devices of a tensor-parallel engine, and the assembly of whole values.

With several devices, each device has a part of the heads and of the inner channels of a layer. Most values are *alike* on all devices:
hidden states, outputs of attention and MLP, logits. Values between a column-parallel and a row-parallel layer are *spread*: each device has
a part of the last axis. A merged layer (query, key and value; gate and up) outputs several values side by side, and each of them is spread
separately. So the parts of each value are joined, in the order of a single device. If there are fewer key-value heads than devices,
neighbouring devices have the same head, and the whole value has it once.

The class of a module determines which of its values are spread. All other values are compared between the devices before a block sees
them, so a block never gets a part in place of a whole value: see :meth:`Spreads.of`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .calls import untapped_class

_ACTIVATIONS = ("vllm.model_executor.layers.activation", "torch.nn.modules.activation")


@dataclass(frozen=True)
class Spread:
    """The spread of the last axis of a value over devices."""

    #: For each of the values side by side: the number of channels per device, and how many neighbouring devices have the same channels.
    segments: tuple[tuple[int, int], ...]

    @property
    def width(self) -> int:
        """The number of channels of one device."""
        return sum(width for width, _ in self.segments)

    def whole_width(self, devices: int) -> int:
        """Return the number of channels of the whole value on ``devices`` devices."""
        return sum(width * devices // copies for width, copies in self.segments)

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Join the ``parts`` of all devices, in the order of the devices, to the whole value."""
        pieces, start = [], 0
        for width, copies in self.segments:
            pieces += [part[..., start : start + width] for part in parts[::copies]]
            start += width
        return torch.cat(pieces, -1)

    def part(self, whole: torch.Tensor, rank: int, devices: int) -> torch.Tensor:
        """Return the part of ``whole`` that belongs to device ``rank`` of ``devices``."""
        pieces, start = [], 0
        for width, copies in self.segments:
            mine = start + rank // copies * width
            pieces.append(whole[..., mine : mine + width])
            start += devices // copies * width
        return torch.cat(pieces, -1)


class Spreads:
    """The spreads of the values of ``model``, which is the model of one device."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._modules = {f"model.{name}" if name else "model": module for name, module in model.named_modules()}

    def module(self, path: str) -> torch.nn.Module:
        """Return the module at ``path``."""
        return self._modules[path]

    def parts_of(self, location: str, leaves: Sequence[Any], rank: int, devices: int) -> list[Any]:
        """Return ``leaves``, whole values at ``location``, with each spread value replaced by the part of device ``rank``."""
        path, _, side = location.rpartition(".")
        tensors = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.dim()]
        found = list(leaves)
        for index, spread in zip(tensors, self._rules(self.module(path), path, side, len(tensors)), strict=False):
            if spread is not None and leaves[index].shape[-1] == spread.whole_width(devices):
                found[index] = spread.part(leaves[index], rank, devices)
        return found

    def of(self, location: str, leaves: Sequence[Any]) -> list[Spread | None]:
        """Return the spread of each of ``leaves``, this device's tensors of the value at ``location``.

        The spread is ``None`` for a leaf without a rule, which has to be alike on all devices.
        """
        path, _, side = location.rpartition(".")
        module = self._modules.get(path)
        found: list[Spread | None] = [None] * len(leaves)
        if module is None:
            return found
        tensors = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.dim()]
        for index, spread in zip(tensors, self._rules(module, path, side, len(tensors)), strict=False):
            # A value of another width is not spread by this rule, and is compared between devices.
            if spread is not None and leaves[index].shape[-1] == spread.width:
                found[index] = spread
        is_activation = untapped_class(module).__module__ in _ACTIVATIONS
        if not any(found) and is_activation and (sibling := self._row_parallel_sibling(path)) is not None:
            width = sibling.input_size_per_partition
            choices = {width: Spread(((width, 1),)), 2 * width: Spread(((width, 1), (width, 1)))}
            for index in tensors:
                found[index] = choices.get(leaves[index].shape[-1])
        return found

    def _rules(self, module: Any, path: str, side: str, count: int) -> list[Spread | None]:
        """Return the spreads of the first tensors in the input or output (``side``) of ``module``, according to its class."""
        from vllm.model_executor.layers.attention import Attention
        from vllm.model_executor.layers.linear import RowParallelLinear
        from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase

        kind = untapped_class(module)
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

    def _row_parallel_sibling(self, path: str) -> Any:
        """Return the sibling of the module at ``path`` that is a row-parallel layer with spread input, or ``None``."""
        from vllm.model_executor.layers.linear import RowParallelLinear

        return next((found for found in self._siblings(path) if untapped_class(found) is RowParallelLinear and _is_parallel(found)), None)


def _is_parallel(module: Any) -> bool:
    return module.tp_size > 1 and module.input_is_parallel


def columns_of(module: Any) -> Spread | None:
    """Return the spread of the output of ``module`` if it is a column-parallel layer whose output is spread, otherwise ``None``."""
    from vllm.model_executor.layers.linear import ColumnParallelLinear, MergedColumnParallelLinear, QKVParallelLinear

    kind = untapped_class(module)
    if kind not in (ColumnParallelLinear, MergedColumnParallelLinear, QKVParallelLinear):
        return None
    if module.tp_size == 1 or module.gather_output:
        return None
    if kind is QKVParallelLinear:
        copies = module.num_kv_head_replicas
        query, key = module.num_heads * module.head_size, module.num_kv_heads * module.head_size
        return Spread(((query, 1), (key, copies), (module.num_kv_heads * module.v_head_size, copies)))
    return Spread(tuple((size, 1) for size in module.output_partition_sizes))
