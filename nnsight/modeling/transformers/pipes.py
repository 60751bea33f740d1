"""Traces of a whole transformers pipeline: its preprocessing, all of its forward passes, and its records."""

from __future__ import annotations

import copy
import os
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ...runtime.interleaver import active_interleaver
from ...runtime.rows.batching import RowList
from ...runtime.tracer import Arguments
from ..generation import Generation
from . import tasks
from .raw import StandIn

if TYPE_CHECKING:
    from .model import TransformersModel

#: Name of an extra argument: a tensor with an entry for each text, from which a probe sees the batch size.
_ROWS = "_rows"
#: Name of an extra argument of several invokes: the indices of texts that were passed as a string, not as a list.
_SINGLE = "_single"


class _RunningModel(StandIn):
    """A proxy for the model of a pipeline in a trace, whose ``generate`` offers token ids to the run."""

    def __init__(self, original: Any, generation: Generation) -> None:
        super().__init__(original)
        self._generation = generation

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._original(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return self._generation._generate(self._original, args, kwargs)


class Records(RowList):
    """The records of several inputs. An invoke whose input is a single text, not a list, gets the record of that text alone."""

    single: frozenset[int] = frozenset()

    def part(self, items: slice) -> Any:
        of_one = items.stop is not None and items.stop - items.start == 1 and items.start in self.single
        return Records(self[items.start] if of_one and isinstance(self[items.start], list) else self[items])


class PipelineRun:
    """Runs the pipeline of a model in a trace, and joins the inputs of its invokes."""

    def __init__(self, model: TransformersModel) -> None:
        self._model = model

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        self._model._require_preprocessors()
        rows, single = kwargs.pop(_ROWS, None), kwargs.pop(_SINGLE, None)
        if single is not None and kwargs.get("batch_size", len(rows)) < len(rows):
            raise ValueError(f"The {len(rows)} texts of the invokes run as one batch: leave out `batch_size={kwargs['batch_size']}`.")
        pipe = copy.copy(self._model.pipeline)
        pipe.model = _RunningModel(pipe.model, Generation(self._model))
        if rows is not None and len(rows) > 1:
            kwargs.setdefault("batch_size", len(rows))
        result = pipe(*inputs, **kwargs)
        if rows is None or active_interleaver() is None or not isinstance(result, list) or not isinstance(inputs[0], list):
            return result
        records = Records(result)
        records.single = single or frozenset()
        return records

    def _prepare_input(self, *inputs: Any, **kwargs: Any) -> Arguments:
        """Return the arguments of the pipeline; for texts, with the extra argument ``_ROWS``."""
        if len(inputs) > 1:
            raise TypeError(f"A pipeline takes one input, not {len(inputs)}. Pass several as a list.")
        if inputs and (isinstance(inputs[0], str) or _is_texts(inputs[0])):
            return inputs, {**kwargs, _ROWS: torch.arange(1 if isinstance(inputs[0], str) else len(inputs[0]))}
        return tuple(os.fspath(item) if isinstance(item, os.PathLike) else item for item in inputs), kwargs

    def _batch(self, batched: Arguments | None, *args: Any, **kwargs: Any) -> tuple[Arguments, int]:
        """Join the texts of one more invoke to those before it.

        Raises:
            NotImplementedError: If an input is not text, or the task splits it into several rows.
            ValueError: If the options of the pipeline differ between invokes.
        """
        if _ROWS not in kwargs:
            raise NotImplementedError(
                "An input of a pipeline that is not text does not support batching: its invoke has to be the only one with input."
            )
        texts, rows = [args[0]] if isinstance(args[0], str) else list(args[0]), len(kwargs.pop(_ROWS))
        self._check_parts(texts, kwargs)
        single = frozenset({0} if isinstance(args[0], str) else ())
        if batched is None:
            return ((texts,), {**kwargs, _ROWS: torch.arange(rows), _SINGLE: single}), rows
        before = dict(batched[1])
        count, earlier = len(before.pop(_ROWS)), before.pop(_SINGLE)
        if before != kwargs:
            raise ValueError(f"Options of the pipeline differ between invokes: {before!r} and {kwargs!r}. They run as one batch.")
        joined = {**kwargs, _ROWS: torch.arange(count + rows), _SINGLE: earlier | {start + count for start in single}}
        return (([*batched[0][0], *texts],), joined), rows

    def _check_parts(self, texts: list[str], options: dict[str, Any]) -> None:
        """Raise ``NotImplementedError`` if the task splits one of the texts."""
        from transformers.pipelines.base import ChunkPipeline

        if not issubclass(tasks.pipeline_class(self._model.task), ChunkPipeline):
            return
        known = {name: value for name, value in options.items() if name in self._model._options_of_task}
        if any(len(self._model._calls_for(text, dict(known), {})) > 1 for text in texts):
            raise NotImplementedError(
                f"The task {self._model.task!r} splits the input of an invoke into several rows: it has to be the only invoke with input."
            )

    def _call_on(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call ``module``, a fake copy of the model, once with as many texts as there are rows, for the probe."""
        text = args[0] if isinstance(args[0], str) else args[0][0]
        model = self._model
        options = {name: value for name, value in kwargs.items() if name in model._options_of_invokes}
        with _disable_current_modes():  # the checks of a task read values, which fake tensors lack
            _, prepared = model._prepare_input([text] * len(kwargs[_ROWS]), **options)
        return module(**prepared)


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, str) for item in value)
