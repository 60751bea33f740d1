"""Runs of a program on a compiled model, replayed without looking at the program.

A program has no Python: on one captured graph, with tensors of the same metadata, it always does the same. So the first run is written
down, and later ones call the variant that it found, with the tensors of now.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ...runtime.interleaver import active_run
from ...runtime.report import Report
from ..counters import counters
from ..recording.journal import Journal, Listening, journal_of_run
from .names import Undetermined
from .playback import Effects, NotAsBefore, Playback, effects_of

if TYPE_CHECKING:
    from ..driver import CompiledDriver

logger = logging.getLogger("nnsight.fx")

#: For how many kinds of tensors the effects of a program are kept.
_KEPT = 64


class KnownRuns:
    """The effects of one program on one model, by the metadata of the tensors that it takes."""

    def __init__(self) -> None:
        self._effects: dict[Any, dict[Any, Effects]] = {}

    def replay(
        self, driver: CompiledDriver, tensors: list[torch.Tensor], arguments: tuple[Any, dict[str, Any]], report: Report
    ) -> tuple[Any, dict[str, Any]] | None:
        """Call the model with the effects of the program, if they are known; return its output and the saved values."""
        known = self._effects.get((driver.tree.version, *_metadata(tensors)))
        if known is None or torch._C._len_torch_function_stack():
            return None
        playback = Playback(known, tensors, [], report)
        outer = active_run.set(playback)  # type: ignore[arg-type]
        try:
            output = driver.call_known(*arguments)
        except NotAsBefore:
            return None
        finally:
            active_run.reset(outer)
        counters.add("replays")
        return output, playback.saved()

    @contextlib.contextmanager
    def written_down(self) -> Iterator[Journal]:
        """Write down the run that is made in this context; its blocks run by :func:`listening`."""
        journal = Journal()
        token = journal_of_run.set(journal)
        try:
            yield journal
        finally:
            journal_of_run.reset(token)
            journal.close()

    def learn(
        self, driver: CompiledDriver, journal: Journal, kept: dict[str, Any], tensors: list[torch.Tensor], report: Report
    ) -> None:
        """Remember what the run did, if it can be replayed."""
        try:
            graph, binding, effects = effects_of(journal, list(kept.items()), tensors, report.spliced)
        except Undetermined as reason:
            logger.debug("a program is interpreted in each call: %s", reason)
            return
        if len(self._effects) >= _KEPT:
            self._effects.clear()
        self._effects.setdefault((driver.tree.version, *_metadata(tensors)), {})[graph, binding] = effects


def listening(journal: Journal, function: Callable[[], None]) -> Callable[[], None]:
    """Return ``function`` of a block, with its calls before it first waits written down."""
    return functools.partial(Listening(journal).run, function)


def _metadata(tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """Return what the effects of a program depend on besides the captured graph."""
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch._C._is_any_autocast_enabled()
    described = [(tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad) for tensor in tensors]
    return (*modes, torch.get_default_dtype(), *described)
