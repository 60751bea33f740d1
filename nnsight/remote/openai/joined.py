"""The key-value cache of a running batch. Answers join and leave the batch at any step.

All rows end at the same slot, and shorter rows begin later::

    slot    0 1 2 3 4 5 6 7      `end` is 5: the slot of the next token of each row
    row 0   a a a a a . . .      5 positions
    row 1   - - - b b . . .      2 positions
    row 2   - - - - - . . .      free

An attention mask hides slots without a token. The distance of two tokens is the same in slots and in positions, so sliding windows and
biases by distance are correct. Positions are counted for each row.

The prompt of a new answer is computed alone, and its cache of one row is copied to a free row. If the prompt is longer than ``end``, or if
there is no free slot, the rows are laid out again, so that they end where the longest of them ends. The numbers of rows and slots are
powers of two, as far as the limits allow. So a compiled model meets few sizes.

Layers with a state for each row instead of keys and values (convolutions, linear attention) are copied row by row.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from transformers import cache_utils
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer, StaticLayer

from ...fx.torch_compat import mark_static_address

#: Minimum number of slots.
LEAST = 64

#: Layers with states of rows, and layers that use the keys of other layers. Not all versions of transformers have them.
_STATES = tuple(getattr(cache_utils, name) for name in ("LinearAttentionLayer", "DummyLayer") if hasattr(cache_utils, name))


class JoinedCache:
    """The cache of at most ``most`` answers, with at most ``longest`` positions each.

    Attributes:
        answers: The answer of each row; ``None`` for a free row.
        lengths: The number of positions of each row; 0 for a free row.
        end: The slot of the next tokens.
        cache: The cache object that is passed to the model.
    """

    def __init__(self, alone: Any, most: int, longest: int, sees_all: bool) -> None:
        """Create a cache without rows, for answers whose own caches are like ``alone``.

        ``sees_all`` says whether the model gets all slots in each call, as compiled models need, or only the slots up to ``end``. Raises a
        ``ValueError`` if such caches cannot be joined.
        """
        if type(alone) is not DynamicCache:
            raise ValueError(f"its cache is of type {type(alone).__name__}")
        kind = StaticLayer if sees_all else _UsedSlots
        self.cache = Cache(layers=[_emptied(layer, kind) for layer in alone.layers])
        self._sees_all = sees_all
        self._most, self._longest = most, longest
        self.answers: list[Any] = []
        self.lengths: list[int] = []
        self.end = 0
        found = [holder[name].device for holder, name, has_slots in _tensors(self.cache.layers) if has_slots]
        self._mask = torch.zeros(0, 0, dtype=torch.int64, device=found[0] if found else "cpu")
        self._has_slots = bool(found)

    def add(self, answer: Any, alone: Any, length: int) -> None:
        """Add an answer whose first ``length`` positions are in its own cache ``alone``."""
        rows = len(self.answers)
        if None not in self.answers:
            self._lay(min(max(2 * rows, 1), self._most), length)
        elif length > self.end:
            self._lay(rows, length)
        row = self.answers.index(None)
        for (holder, name, has_slots), (found, _, _) in zip(_tensors(self.cache.layers), _tensors(alone.layers), strict=True):
            target, source = holder[name][row], found[name][0]
            if has_slots:
                target.zero_()  # the mask does not stop a NaN of the previous answer
                target[:, self.end - source.shape[1] : self.end] = source  # layers with a sliding window keep only the last positions
            else:
                target.copy_(source)
        self._mask[row] = 0
        self._mask[row, self.end - length : self.end] = 1
        self.answers[row], self.lengths[row] = answer, length

    @property
    def mask(self) -> torch.Tensor | None:
        """1 where a row has a token, else 0: int64 ``[rows, slots]``. ``None`` if no layer has keys."""
        if not self._has_slots:
            return None
        return self._mask if self._sees_all else self._mask[:, : self.end + 1]

    def remove(self, row: int) -> None:
        """Free a row."""
        self.answers[row], self.lengths[row] = None, 0

    def make_room(self) -> None:
        """Ensure that there is a slot for the next token of each row, and drop rows if most are free. At least one row must be in use."""
        rows, used = len(self.answers), sum(answer is not None for answer in self.answers)
        if 4 * used <= rows:
            self._lay(1 << (used - 1).bit_length(), 0)
        elif self.end == self._mask.shape[1]:
            self._lay(rows, 0)
        self._mask[:, self.end] = 1  # in free rows, too: the softmax of a fully masked row is undefined
        for layer in self.cache.layers if not self._sees_all else ():
            layer.used = self.end + 1

    def advance(self) -> None:
        """Count the slot that the model has filled in a call."""
        self.end += 1
        self.lengths = [length and length + 1 for length in self.lengths]

    def _lay(self, rows: int, length: int) -> None:
        """Lay out the cache again with ``rows`` rows, such that a row of ``length`` positions fits."""
        taken = [row for row, answer in enumerate(self.answers) if answer is not None]
        end, start = max([length, *self.lengths]), self.end
        slots = min(max(1 << end.bit_length(), LEAST), self._longest)
        kept = min(start, end)

        def moved(old: torch.Tensor, dim: int | None) -> torch.Tensor:
            size = list(old.shape)
            size[0], size[dim or 0] = rows, rows if dim is None else slots
            found = (old if dim is None else old.narrow(dim, start - kept, kept))[taken]
            new = old.zero_() if list(old.shape) == size else old.new_zeros(size)  # keeps the address if possible, for CUDA graphs
            (new if dim is None else new.narrow(dim, end - kept, kept))[: len(taken)] = found
            mark_static_address(new)
            return new

        for holder, name, has_slots in _tensors(self.cache.layers):
            holder[name] = moved(holder[name], 2 if has_slots else None)
        self._mask = moved(self._mask, 1)
        for layer in self.cache.layers:
            if isinstance(layer, StaticLayer):
                layer.max_cache_len = slots
                layer.cumulative_length.fill_(end)
        free = rows - len(taken)
        self.answers = [*(self.answers[row] for row in taken), *[None] * free]
        self.lengths, self.end = [*(self.lengths[row] for row in taken), *[0] * free], end


class _UsedSlots(StaticLayer):  # type: ignore[misc]
    """A layer that shows the model only its used slots, because some models take the number of slots for the number of tokens."""

    is_compileable = False
    used = 0

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        return keys[:, :, : self.used], values[:, :, : self.used]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.used, 0


def _emptied(layer: Any, kind: type[StaticLayer]) -> Any:
    """Return a layer without rows for the data of ``layer``, from a prompt's cache. ``kind`` is the class for keys and values."""
    if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):
        made: Any = kind(0)
        if layer.keys is not None:
            made.lazy_initialization(layer.keys[:0], layer.values[:0])
        return made
    if type(layer) not in _STATES:
        raise ValueError(f"its cache has layers of type {type(layer).__name__}")
    made = copy.copy(layer)
    vars(made).update({name: dict(value) for name, value in vars(layer).items() if isinstance(value, dict)})
    for holder, name, _ in _tensors([made]):
        holder[name] = holder[name][:0]
    return made


def _tensors(layers: list[Any]) -> Iterator[tuple[dict[Any, Any], Any, bool]]:
    """Yield dict and key of each tensor of a cache, and whether the tensor has slots: ``[rows, heads, slots, size]``."""
    for layer in layers:
        if isinstance(layer, (DynamicLayer, StaticLayer)):
            yield from ((vars(layer), name, True) for name in ("keys", "values") if vars(layer)[name] is not None)
        else:
            for holder in (vars(layer), *(value for value in vars(layer).values() if isinstance(value, dict))):
                yield from ((holder, name, False) for name, value in list(holder.items()) if isinstance(value, torch.Tensor))
