"""Hooks in vLLM's model runners, which stop there for the blocks of requests.

The class of a runner is replaced by a subclass that stops at three places: before the model runs, when the flat batch is known; before
sampling, with the logits; and after sampling, with the tokens. A step without blocks runs as it would without this package. The two
runners of vLLM have these places in different methods:

========================  ==============================================  ==================================================
place                     V1                                              V2
========================  ==============================================  ==================================================
the batch is known        ``_model_forward``, around the model            ``prepare_inputs``, which is followed by the model
the model has run         the same                                        ``execute_model`` returns
logits are computed       in ``execute_model``                            in ``sample``
logits are sampled from   ``_sample``                                     the sampler that ``sample`` calls
graphs are recorded       ``_dummy_run``                                  ``_dummy_run`` and ``capture_model``
========================  ==============================================  ==================================================

V2 is asynchronous by design: it prepares a step while the previous step may still run on the device. So the hooks use only data of a single
step, and data on the device, in the order of its stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch

from .bookkeeping import Bookkeeping, batch_of_v1, batch_of_v2
from .ranks import SingleRank
from .requests import LOGITS


def install_hooks(runner: Any, v2: bool) -> None:
    """Make vLLM's model runner ``runner``, which has no model yet, stop for blocks. ``v2`` says whether it is a model runner V2."""
    base = type(runner)
    runner.__class__ = type(base.__name__, (_V2 if v2 else _V1, base), {})
    runner.tree = runner.step = runner.tapped = None
    runner.batched = False
    runner.link = SingleRank()
    runner.bookkeeping = Bookkeeping(runner)


_Runner: Any = object  # `install_hooks` puts a class of vLLM after these in the method resolution order


class _Hooks(_Runner):  # type: ignore[misc]
    """Hooks of both runners. While vLLM measures the model or records CUDA graphs, captures copy into their buffers, too."""

    def _dummy_run(self, *args: Any, **kwargs: Any) -> Any:
        with nullcontext() if self.tapped is None else self.tapped.captures.filling():
            return super()._dummy_run(*args, **kwargs)


class _V1(_Hooks):
    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        self.step = None
        self.bookkeeping.follow(scheduler_output)
        if not self.bookkeeping.has_work:
            return super().execute_model(scheduler_output, *args, **kwargs)
        self.scheduled = scheduler_output
        with ExitStack() as self.stack:
            return super().execute_model(scheduler_output, *args, **kwargs)

    def _model_forward(self, input_ids: Any = None, positions: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not self.bookkeeping.has_work:
            return super()._model_forward(input_ids, positions, *args, **kwargs)
        first: Any = kwargs.get("inputs_embeds") if input_ids is None else input_ids
        total: int = first.shape[0]
        self.step = self.bookkeeping.step(total, *batch_of_v1(self, self.scheduled))
        self.stack.enter_context(_offering(self))
        output = super()._model_forward(input_ids, positions, *args, **kwargs)
        _end(self, total)
        return output

    def _sample(self, logits: torch.Tensor | None, spec_decode_metadata: Any) -> Any:
        step, self.step = self.step, None
        if step is not None and logits is not None:
            logits = step.meet(LOGITS, logits)
        sampled = super()._sample(logits, spec_decode_metadata)
        if logits is not None:
            sampled.sampled_token_ids = self.link.sampled(step, sampled.sampled_token_ids)
        return sampled


class _V2(_Hooks):
    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        self.step = None
        self.bookkeeping.follow(scheduler_output)
        with ExitStack() as self.stack:
            output = super().execute_model(scheduler_output, *args, **kwargs)
            if self.step is not None:
                _end(self, self.execute_model_state.input_batch.num_tokens_after_padding)
            return output

    def prepare_inputs(self, *args: Any, **kwargs: Any) -> Any:
        batch = super().prepare_inputs(*args, **kwargs)
        if self.bookkeeping.has_work:
            self.step = self.bookkeeping.step(batch.num_tokens_after_padding, *batch_of_v2(batch))
            self.stack.enter_context(_offering(self))  # the model runs next, because models with encoders are refused
        return batch

    def sample(self, hidden_states: torch.Tensor, input_batch: Any, grammar_output: Any) -> Any:
        with _stopping_sampler(self):
            sampled, *counts = super().sample(hidden_states, input_batch, grammar_output)
        step, self.step = self.step, None
        sampled.sampled_token_ids = self.link.sampled(step, sampled.sampled_token_ids)
        return sampled, *counts

    def capture_model(self, *args: Any, **kwargs: Any) -> Any:
        with nullcontext() if self.tapped is None else self.tapped.captures.filling():
            return super().capture_model(*args, **kwargs)


# -- before and after the model -----------------------------------------------------------------------------------------


@contextmanager
def _offering(runner: Any) -> Iterator[None]:
    """Inside of this context, offer the values of modules to the blocks of the step, if it has any."""
    step = runner.step
    if step is None:
        yield
        return
    with runner.tree.instrumentation if runner.tapped is None else runner.tapped.captures.filling(), step.active():
        yield


def _end(runner: Any, total: int) -> None:
    """After the model has run on ``total`` rows, hand out captured values. From now on, values have one row per request."""
    step = runner.step
    if step is not None:
        if runner.tapped is not None:
            runner.tapped.captures.hand_out(step, total)
        step.rows_are_requests()


@contextmanager
def _stopping_sampler(runner: Any) -> Iterator[None]:
    """Inside of this context, offer the values of a model runner V2 while it computes logits, and the logits before it samples."""
    step, sampler = runner.step, runner.sampler
    if step is None:
        yield
        return
    with ExitStack() as shown:
        shown.enter_context(_offering(runner))

        def sample(logits: torch.Tensor, batch: Any) -> Any:
            shown.close()
            return sampler(step.meet(LOGITS, logits), batch)

        runner.sampler = sample
        try:
            yield
        finally:
            runner.sampler = sampler
