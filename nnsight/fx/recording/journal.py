"""The journal of a run: everything that a replay of the block needs besides the program.

The program contains the calls on lazy tensors. A :class:`Journal` adds the calls on tensors from outside, in their order, and the values
that are still referred to when the graph runs. It also notes why a run cannot be replayed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ...runtime.interleaver import active_interleaver
from ..lowering.variant import Variant
from .functions import ABOUT_GRADIENTS, METADATA

if TYPE_CHECKING:
    from .execution import PieceRunner

#: Methods that return metadata. Guards compare the metadata, so a replay need not repeat these calls.
_DESCRIBING = frozenset("__len__ dim size numel nelement stride ndimension is_floating_point is_complex is_contiguous".split())

#: Getters of other properties that guards compare.
_COMPARED = frozenset(getter for getter, name in ABOUT_GRADIENTS.items() if name != "grad_fn")


class Journal:
    """The effects of one run of a block that a replay has to repeat; ``filled`` are the lists from outside to which the block appends."""

    def __init__(self, filled: Sequence[list[Any]] = ()) -> None:
        self._filled = [(filling, len(filling)) for filling in filled]
        self.reason = ""  # why the run cannot be replayed; empty if it can
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []  # function, args, kwargs and result
        self.recording: PieceRunner | None = None
        self.variant: Variant | None = None
        self.alive: tuple[int, ...] = ()  # numbers of the values that become real tensors
        self.stop = 0  # number of the node at which the graph ends
        self.numbers: dict[int, int] = {}  # the number of each of these values, by the identity of its tensor
        self.externals: list[Any] = []
        self.inputs: list[Any] = []
        self.structures: list[pytree.TreeSpec] = []  # of the containers that the block was given
        self._kept: list[Any] = []

    @property
    def appended(self) -> list[tuple[int, Any]]:
        """The items that the block has appended, each with the number of its list."""
        numbered = [(number, *filled) for number, filled in enumerate(self._filled)]
        distinct = {id(filling): (number, filling, length) for number, filling, length in numbered}
        return [(number, item) for number, filling, length in distinct.values() for item in filling[length:]]

    def spoil(self, reason: str) -> None:
        """Note why this run cannot be replayed; the first reason is kept."""
        self.reason = self.reason or reason

    def outside(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Note a call on tensors from outside that the block has just made."""
        if function in METADATA or function in _COMPARED or getattr(function, "__name__", "") in _DESCRIBING:
            return
        if any(not isinstance(leaf, (torch.Tensor, type(None))) for leaf in pytree.tree_leaves(result)):
            self.spoil(f"the block reads values of a tensor from outside, with `{getattr(function, '__name__', function)}`")
        self.calls.append((function, args, kwargs, result))

    def runs(self, recording: PieceRunner, variant: Variant, alive: tuple[int, ...], stop: int) -> None:
        """Note the variant that is about to run."""
        if self.recording is not None or not recording.graph.is_whole:
            self.spoil("the graph was cut, or the model has several graphs")
        if any(mediator.alive for mediator in recording.run.mediators):
            self.spoil("the block continues after the graph")
        self.recording, self.variant, self.alive, self.stop = recording, variant, alive, stop
        self.externals, self.inputs = list(recording.externals), list(recording.inputs)
        for index in alive:
            lazy = recording.held(index)
            if lazy is not None:
                self._kept.append(lazy)
                self.numbers[id(lazy)] = index  # the identity stays the same when it becomes the real tensor

    def close(self) -> None:
        """Drop all references to the recording, which refers to this journal: in a cycle, unsaved values would outlive the trace."""
        self.recording = self.variant = None
        self.externals, self.inputs, self.calls, self.structures, self._kept = [], [], [], [], []


class EarlyCalls(TorchFunctionMode):
    """Notes the calls that a block makes before its first request; after that, the recording notes them."""

    def __init__(self, journal: Journal) -> None:
        super().__init__()
        self._journal, self._is_on = journal, False

    def run(self, function: Callable[[], None]) -> None:
        """Run a block, and note its calls until its first switch to the model."""
        run = active_interleaver()
        assert run is not None and run.current is not None
        run.current._publish = self.stop
        self._is_on = True
        self.__enter__()
        try:
            function()
        finally:
            self.stop()

    def stop(self) -> None:
        """Leave this mode, if it is still active."""
        if self._is_on:
            self._is_on = False
            self.__exit__(None, None, None)

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        self._journal.outside(function, args, kwargs or {}, result)
        return result


#: The journal of the run in this context; ``None`` if no journal is kept.
journal_of_run: ContextVar[Journal | None] = ContextVar("nnsight_fx_journal", default=None)


@contextlib.contextmanager
def kept_journal(filled: Sequence[list[Any]] = ()) -> Iterator[Journal]:
    """Keep a journal of the run in this context, and close it at the end."""
    journal = Journal(filled)
    token = journal_of_run.set(journal)
    try:
        yield journal
    finally:
        journal_of_run.reset(token)
        journal.close()
