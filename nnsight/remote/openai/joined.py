"""The key-value cache of a running batch, which answers join and leave at any step.

All rows end at the same slot, and shorter ones begin later::

    slot    0 1 2 3 4 5 6 7      `end` is 5: the next token of each row goes there
    row 0   a a a a a . . .      5 positions
    row 1   - - - b b . . .      2 positions
    row 2   - - - - - . . .      free

An attention mask hides slots without a token. Two tokens of a row are as far from each other in slots as in positions, so sliding windows
and biases by distance are right; positions are counted for each row. An answer that joins has been computed alone, and its cache of one row
is copied. If it is too long for that, or no slot is left, the rows are laid out anew: they end where the longest of them does. The numbers
of rows and of slots are powers of two, as far as the limits allow, so a compiled model meets few sizes.

Layers that keep a state of each row instead of keys and values (convolutions, linear attention) are copied row by row.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from transformers import cache_utils
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer, StaticLayer

from ...fx.torch_compat import mark_static_address

#: Fewest slots.
LEAST = 64

#: Layers with states of rows, and layers that use the keys of others. Not all versions of transformers have them.
_STATES = tuple(getattr(cache_utils, name) for name in ("LinearAttentionLayer", "DummyLayer") if hasattr(cache_utils, name))


class JoinedCache:
    """The cache of several answers: at most ``most``, with at most ``longest`` positions each.

    Attributes:
        answers: The answer of each row, ``None`` where it is free.
        lengths: How many positions each row has; 0 where it is free.
        end: The slot of the next tokens.
        cache: What the model is called with.
    """

    def __init__(self, alone: Any, most: int, longest: int, sees_all: bool) -> None:
        """Make one without rows for caches like ``alone``; raise ``ValueError`` if such caches cannot be joined.

        ``sees_all`` says whether the model gets all slots in each call, which compiled models need, or those that are used.
        """
        if type(alone) is not DynamicCache:
            raise ValueError(f"its cache is of the kind {type(alone).__name__}")
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
        """Let an answer join, whose first ``length`` positions have been computed into the cache ``alone``."""
        rows = len(self.answers)
        if None not in self.answers:
            self._lay(min(max(2 * rows, 1), self._most), length)
        elif length > self.end:
            self._lay(rows, length)
        row = self.answers.index(None)
        for (holder, name, has_slots), (found, _, _) in zip(_tensors(self.cache.layers), _tensors(alone.layers), strict=True):
            target, source = holder[name][row], found[name][0]
            if has_slots:
                target.zero_()  # a NaN that the answer before left would pass the mask
                target[:, self.end - source.shape[1] : self.end] = source  # with sliding windows there are the last positions only
            else:
                target.copy_(source)
        self._mask[row] = 0
        self._mask[row, self.end - length : self.end] = 1
        self.answers[row], self.lengths[row] = answer, length

    @property
    def mask(self) -> torch.Tensor | None:
        """Where the rows have tokens, int64 ``[rows, slots]``; ``None`` if the model has no keys, and so no use for it."""
        if not self._has_slots:
            return None
        return self._mask if self._sees_all else self._mask[:, : self.end + 1]

    def remove(self, row: int) -> None:
        """Free a row."""
        self.answers[row], self.lengths[row] = None, 0

    def make_room(self) -> None:
        """Have a slot for the next token of each row, of which there is one at least, and no more rows than are worth it."""
        rows, used = len(self.answers), sum(answer is not None for answer in self.answers)
        if 4 * used <= rows:
            self._lay(1 << (used - 1).bit_length(), 0)
        elif self.end == self._mask.shape[1]:
            self._lay(rows, 0)
        self._mask[:, self.end] = 1  # in free rows as well: no row may be masked entirely
        for layer in self.cache.layers if not self._sees_all else ():
            layer.used = self.end + 1

    def advance(self) -> None:
        """Count the tokens that the model has been called with."""
        self.end += 1
        self.lengths = [length and length + 1 for length in self.lengths]

    def _lay(self, rows: int, length: int) -> None:
        """Lay the rows out anew: ``rows`` of them, with room for one of ``length`` positions."""
        taken = [row for row, answer in enumerate(self.answers) if answer is not None]
        end, start = max([length, *self.lengths]), self.end
        slots = min(max(1 << end.bit_length(), LEAST), self._longest)
        kept = min(start, end)

        def moved(old: torch.Tensor, dim: int | None) -> torch.Tensor:
            size = list(old.shape)
            size[0], size[dim or 0] = rows, rows if dim is None else slots
            found = (old if dim is None else old.narrow(dim, start - kept, kept))[taken]
            new = old.zero_() if list(old.shape) == size else old.new_zeros(size)  # the address stays if it can
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
    """A layer of which the model sees what is used: some take the number of slots for the number of tokens."""

    is_compileable = False
    used = 0

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        return keys[:, :, : self.used], values[:, :, : self.used]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.used, 0


def _emptied(layer: Any, kind: type[StaticLayer]) -> Any:
    """Return a layer without rows for what ``layer`` of a prompt's cache has; ``kind`` is that of layers with keys."""
    if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):
        made: Any = kind(0)
        if layer.keys is not None:
            made.lazy_initialization(layer.keys[:0], layer.values[:0])
        return made
    if type(layer) not in _STATES:
        raise ValueError(f"its cache has layers of the kind {type(layer).__name__}")
    made = copy.copy(layer)
    vars(made).update({name: dict(value) for name, value in vars(layer).items() if isinstance(value, dict)})
    for holder, name, _ in _tensors([made]):
        holder[name] = holder[name][:0]
    return made


def _tensors(layers: list[Any]) -> Iterator[tuple[dict[Any, Any], Any, bool]]:
    """Yield where the tensors of a cache are, each as a dict and a key, and whether they have slots: ``[rows, heads, slots, size]``."""
    for layer in layers:
        if isinstance(layer, (DynamicLayer, StaticLayer)):
            yield from ((vars(layer), name, True) for name in ("keys", "values") if vars(layer)[name] is not None)
        else:
            for holder in (vars(layer), *(value for value in vars(layer).values() if isinstance(value, dict))):
                yield from ((holder, name, False) for name, value in list(holder.items()) if isinstance(value, torch.Tensor))
