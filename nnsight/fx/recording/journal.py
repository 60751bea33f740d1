"""What one run of a block did, written down for a replay.

The program has the calls on lazy tensors. A :class:`Journal` adds the calls on tensors from outside, in their order, and the values that
the block still held at its end. It also notes why a run cannot be replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

#: Methods that return metadata, which is compared.
_DESCRIBING = frozenset("__len__ dim size numel nelement stride ndimension is_floating_point is_complex is_contiguous".split())

#: Getters of what is compared beyond that.
_COMPARED = frozenset(getter for getter, name in ABOUT_GRADIENTS.items() if name != "grad_fn")


class Journal:
    """What one run of a block did, as far as a replay has to do it again; ``filled`` are lists from outside that it appends to."""

    def __init__(self, filled: Sequence[list[Any]] = ()) -> None:
        self._filled = [(filling, len(filling)) for filling in filled]
        self.reason = ""  # why the run cannot be replayed
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []
        self.recording: PieceRunner | None = None
        self.variant: Variant | None = None
        self.alive: tuple[int, ...] = ()
        self.stop = 0
        self.numbers: dict[int, int] = {}
        self.externals: list[Any] = []
        self.inputs: list[Any] = []
        self._kept: list[Any] = []

    @property
    def appended(self) -> list[tuple[int, Any]]:
        """What the block has appended, with the number of the list."""
        numbered = [(number, *filled) for number, filled in enumerate(self._filled)]
        distinct = {id(filling): (number, filling, length) for number, filling, length in numbered}
        return [(number, item) for number, filling, length in distinct.values() for item in filling[length:]]

    def spoil(self, reason: str) -> None:
        """Note that this run cannot be replayed."""
        self.reason = self.reason or reason

    def outside(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Note a call on tensors from outside, which the block has just made."""
        if function in METADATA or function in _COMPARED or getattr(function, "__name__", "") in _DESCRIBING:
            return
        if any(not isinstance(leaf, (torch.Tensor, type(None))) for leaf in pytree.tree_leaves(result)):
            self.spoil(f"the block looks at a value from outside, with `{getattr(function, '__name__', function)}`")
        self.calls.append((function, args, kwargs, result))

    def ran(self, recording: PieceRunner, variant: Variant, alive: tuple[int, ...], stop: int) -> None:
        """Note that a piece of a graph is about to run."""
        if self.recording is not None or not recording.graph.is_whole:
            self.spoil("the graph was cut, or the model has several")
        if any(mediator.alive for mediator in recording.run.mediators):
            self.spoil("the block goes on behind the graph")
        self.recording, self.variant, self.alive, self.stop = recording, variant, alive, stop
        self.externals, self.inputs = list(recording.externals), list(recording.inputs)
        for index in alive:
            lazy = recording.held(index)
            if lazy is not None:
                self._kept.append(lazy)
                self.numbers[id(lazy)] = index  # stays its identity when it becomes the real tensor

    def close(self) -> None:
        """Drop the recording, which refers to this journal: in a cycle, values that nobody saved would outlive the trace."""
        self.recording = self.variant = None
        self.externals, self.inputs, self.calls, self._kept = [], [], [], []


class Listening(TorchFunctionMode):
    """Notes the calls that a block makes before it first asks for a value; behind that the recording does."""

    def __init__(self, journal: Journal) -> None:
        super().__init__()
        self._journal, self._is_on = journal, False

    def run(self, function: Callable[[], None]) -> None:
        """Run a block, and listen until it gives up its turn."""
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
        """Do not listen any more."""
        if self._is_on:
            self._is_on = False
            self.__exit__(None, None, None)

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        self._journal.outside(function, args, kwargs or {}, result)
        return result


#: The journal of the run of this context, if it is written down.
journal_of_run: ContextVar[Journal | None] = ContextVar("nnsight_fx_journal", default=None)
