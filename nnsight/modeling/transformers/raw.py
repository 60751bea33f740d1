"""Conversion of inputs that are not tensors to the arguments of one forward pass, for models of any task.

The pipeline of the task makes the arguments: it runs with a stand-in for the model that records its first call and ends the run. So
preprocessing, its options and its checks are those of transformers, also for tasks with special inputs (a table and a question, an image
and labels). A task that splits an input calls its model for each part; the parts become the rows of one forward pass.
"""

from __future__ import annotations

import copy
import functools
import inspect
import os
from collections.abc import Mapping
from numbers import Number
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig

from ...runtime.tracer import Arguments
from . import tasks
from .fields import FIELDS, made_rows, stack, unbatchable
from .inputs import _CHAT_OPTIONS, _ROWS, _TEXT_OPTIONS, _TOKENIZER_EXTRAS, _count_positions, _parameters, check_rows
from .media import MediaInput

#: Names of the argument of pipelines that is the input.
_INPUTS = ("inputs", "image", "images", "audio", "video", "videos", "text", "sequences")

#: Groups of arguments that are the parts of one input. If the first two of a group are given, the group becomes one dict.
_PARTS = (("table", "query"), ("image", "question", "word_boxes"))


class _ModelCalled(BaseException):
    """Ends the preparation of an input at the call of the model; not an ``Exception``, so that no handler in a pipeline catches it."""

    def __init__(self, kwargs: dict[str, Any]) -> None:
        self.kwargs = kwargs


class StandIn:
    """A proxy: attributes are those of the original object, unless a subclass defines them."""

    def __init__(self, original: Any) -> None:
        self._original = original

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._original)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def __len__(self) -> int:
        return len(self._original)

    def __bool__(self) -> bool:
        return True


class _ModelToCall(StandIn):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise _ModelCalled(kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        raise _ModelCalled(kwargs)


class _TokenizerWith(StandIn):
    """A tokenizer with ``options`` that take precedence over those of the pipeline."""

    def __init__(self, original: Any, options: dict[str, Any]) -> None:
        super().__init__(original)
        self._options = options

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._original(*args, **{**kwargs, **self._options})


class TaskInput(MediaInput):
    """Converts inputs of any task to the arguments of a model; a base class of root envoys that have a pipeline."""

    task: str
    pipeline: Any

    @property
    def _reads_media(self) -> bool:  # type: ignore[override]
        return tasks.rules_of(self.task).prepared_by == tasks.PROCESSOR

    @property
    def _is_decoder(self) -> bool:
        if tasks.rules_of(self.task).prepared_by != tasks.PIPELINE:
            return super()._is_decoder
        return super()._is_decoder and getattr(getattr(self._module, "config", None), "model_type", None) in _causal_families()

    @property
    def _options_of_invokes(self) -> set[str]:
        """Names of those arguments of a trace that also apply to the inputs of its invokes."""
        return _TEXT_OPTIONS | _CHAT_OPTIONS | self._options_of_task

    @property
    def _options_of_task(self) -> set[str]:
        """Names of options of the pipeline that affect its input, without those of ``generate``."""
        if tasks.rules_of(self.task).prepared_by != tasks.PIPELINE:
            return set()
        module: Any = self._module
        names = _options_of_pipeline(tasks.pipeline_class(self.task))
        generates = hasattr(module, "can_generate") and module.can_generate()
        return set(names - _generation_options() if generates else names)

    def _prepare_input(self, *inputs: Any, **kwargs: Any) -> Arguments:
        """Convert an input of the task, or its tensors, to the arguments of the model.

        Args:
            *inputs: At most one: an input of the task's pipeline (a text, an image, a path, a dict of the task), or a list of these; or
                ids, encodings and chats as in :meth:`TextInput._prepare_input`; or tensors by the names of the model's arguments.
            **kwargs: Options of the task's preprocessing and of the tokenizer; all others are arguments of the model.

        Raises:
            NotImplementedError: If the task does not process an input in a single forward pass.
        """
        rules = tasks.rules_of(self.task)
        if rules.prepared_by == tasks.PIPELINE:
            inputs, kwargs = _by_position(inputs, kwargs, _parameters(self._module)[0])
            if len(inputs) == 1 and _is_raw(inputs[0]):
                if rules.refusal is not None:
                    raise NotImplementedError(
                        f"An input of the task {self.task!r} cannot be traced: {rules.refusal}. Run `with model.pipe(input):`, or trace "
                        "with the tensors that the preprocessor makes."
                    )
                return self._pipeline_arguments(inputs[0], kwargs, rules.unbatchable)
        given = self._given_tensors(inputs, kwargs)
        return super()._prepare_input(*inputs, **kwargs) if given is None else given

    def _batch(self, batched: Arguments | None, *args: Any, **kwargs: Any) -> tuple[Arguments, int]:
        """Join the input of one more invoke to those before it."""
        joined, rows = super()._batch(batched, *args, **kwargs)
        if batched is not None:
            for name, value in joined[1].items():
                if name not in FIELDS and isinstance(value, torch.Tensor) and kwargs.get(name) in made_rows:
                    made_rows[value] = True
        return joined, rows

    def _pipeline_arguments(self, raw: Any, kwargs: dict[str, Any], reason: str | None) -> Arguments:
        """Return the arguments with which the pipeline calls the model for ``raw``; the parts of an input become rows."""
        self._require_preprocessors()
        accepted, _ = _parameters(self._module)
        raw = raw.tolist() if isinstance(raw, np.ndarray) and raw.dtype.kind == "U" else raw
        raw = list(raw) if isinstance(raw, tuple) else raw
        options = {name: kwargs.pop(name) for name in (self._options_of_task - accepted) & kwargs.keys()}
        of_tokenizer = {name: kwargs.pop(name) for name in (_TEXT_OPTIONS - accepted - options.keys()) & kwargs.keys()}
        of_tokenizer |= of_tokenizer.pop("tokenizer_kwargs", None) or {}
        if "candidate_labels" in self._options_of_task - options.keys() and not isinstance(raw, Mapping):
            raise ValueError(f"The task {self.task!r} needs labels: pass `candidate_labels=[...]`.")
        is_one = not isinstance(raw, list) or bool(options.get("is_split_into_words") and isinstance(raw[0], str))
        calls = [self._calls_for(item, options, of_tokenizer) for item in ([raw] if is_one else raw)]
        if any(len(parts) > 1 for parts in calls):
            reason = f"an input that the task {self.task!r} splits into several rows"
            if len(calls) > 1:
                raise NotImplementedError(f"The list contains {reason}: it cannot be batched with other inputs. Trace it alone.")
        if reason is not None and len(calls) > 1:
            raise NotImplementedError(f"With {reason}, there can be only one input at a time; this is a list of {len(calls)}.")
        prepared = self._rows_of([part for parts in calls for part in parts])
        for value in prepared.values():
            if isinstance(value, torch.Tensor):
                made_rows[value] = True
                if reason is not None:
                    unbatchable[value] = reason
        count, width = (len(prepared["input_ids"]), prepared["input_ids"].shape[-1]) if "input_ids" in prepared else (len(calls), 0)
        for name, value in kwargs.items():
            is_rows = name in _ROWS and value is not None
            prepared[name] = self._tensor(name, value, count, width) if is_rows else value
        check_rows(prepared, len(calls) if reason is None else None)
        return (), self._completed(prepared)

    def _require_preprocessors(self) -> None:
        """Raise an :class:`AttributeError` if the model lacks a preprocessor that the task needs."""
        for name, needed in tasks.preprocessors_of(self.task).items():
            if needed and getattr(self, name) is None:
                found = name.replace("_", " ").capitalize()
                raise AttributeError(
                    f"{found} not found: the task {self.task!r} needs it for its input, and this model was wrapped without one. "
                    f"Pass `{name}=`, or trace with tensors."
                )

    def _calls_for(self, item: Any, options: dict[str, Any], of_tokenizer: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the arguments of each call that the pipeline makes of the model for one input: one for each part of the input."""
        calls: list[dict[str, Any]] = []
        pipe = copy.copy(self.pipeline)
        pipe.model, pipe.device = _ModelToCall(pipe.model), torch.device("cpu")
        if of_tokenizer and pipe.tokenizer is not None:
            pipe.tokenizer = _TokenizerWith(pipe.tokenizer, of_tokenizer)

        def forward(made: Any, **parameters: Any) -> None:
            try:
                pipe._forward(made, **parameters)
            except _ModelCalled as call:
                calls.append(call.kwargs)

        pipe.forward, pipe.postprocess = forward, lambda *_, **__: None
        if isinstance(item, os.PathLike):
            item = os.fspath(item)
        pipe.get_iterator = lambda items, _, __, *parameters: (pipe.run_single(item, *parameters) for item in items)
        try:
            pipe(copy.copy(item) if isinstance(item, dict) else item, **options)
        finally:
            vars(pipe).clear()  # its functions hold it, and it holds the model
        if not calls:
            raise NotImplementedError(f"The pipeline of the task {self.task!r} does not call the model with this input.")
        accepted, any_name = _parameters(self._module)
        optional = _TOKENIZER_EXTRAS if any_name else _TOKENIZER_EXTRAS | {"attention_mask"}

        def is_input(name: str, value: Any) -> bool:
            """Whether a value is for this model, and not an option of a generation or an extra value of the tokenizer."""
            if value is None or name in accepted:
                return value is not None
            return isinstance(value, torch.Tensor) and name not in optional and name not in _generation_options()

        return [{name: value for name, value in call.items() if is_input(name, value)} for call in calls]

    def _rows_of(self, parts: list[dict[str, Any]]) -> dict[str, Any]:
        """Join the arguments of several parts to those of one call.

        Raises:
            NotImplementedError: If sounds have different lengths, and the model takes no mask for them.
        """
        joined = dict(parts[0])
        for part in parts[1:]:
            for name, value in part.items():
                above = joined[name]
                if not isinstance(value, torch.Tensor):
                    continue
                if name == "input_values" and above.shape != value.shape and "attention_mask" not in part:
                    raise NotImplementedError(
                        "Sounds of different lengths cannot be batched: the model takes no mask to hide the padding. Trace them one by one."
                    )
                side = self._padding_side if name in FIELDS or _follows_ids(value, part) else "right"
                joined[name] = stack(above, value, self._filler(name, {above.shape[1:], value.shape[1:]}), side)
        return joined

    def _completed(self, prepared: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments on the model's device, with derived positions or the decoder's start token."""
        accepted, _ = _parameters(self._module)
        if self._is_encoder_decoder and "decoder_input_ids" in accepted:
            self._start_decoder(prepared)
        elif "position_ids" in accepted and self._is_padded_left:
            _count_positions(prepared)
        device = self._input_device()
        for name, value in prepared.items():
            if device is not None and isinstance(value, torch.Tensor) and value.device != device:
                moved = prepared[name] = value.to(device)
                for known in (made_rows, unbatchable):
                    if value in known:
                        known[moved] = known[value]
        return prepared

    def _given_tensors(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        """Return an input of tensors that go to the model as they are. None if it has ids or text, or no other tensors."""
        given, main = dict(kwargs), getattr(self._module, "main_input_name", "input_ids")
        if tasks.rules_of(self.task).prepared_by != tasks.PIPELINE and main == "input_ids":
            return None
        if len(inputs) == 1 and isinstance(inputs[0], Mapping):
            given = {**inputs[0], **kwargs}
        elif len(inputs) == 1 and main != "input_ids" and isinstance(inputs[0], (torch.Tensor, np.ndarray)):
            given = {main: torch.as_tensor(inputs[0]), **kwargs}
        elif inputs:
            return None
        if any(given.get(name) is not None for name in ("input_ids", "inputs_embeds", "encoder_outputs", "text")):
            return None
        if inputs and hasattr(inputs[0], "convert_to_tensors"):
            lists = {name: value for name, value in given.items() if isinstance(value, (list, np.ndarray))}
            given |= {name: torch.as_tensor(np.asarray(value)) for name, value in lists.items()}
        if not any(isinstance(value, torch.Tensor) and name not in FIELDS for name, value in given.items()):
            return None
        return (), self._completed(given)


def _follows_ids(value: torch.Tensor, part: Mapping[str, Any]) -> bool:
    """Whether a tensor has an entry for each token of ``part``."""
    return "input_ids" in part and value.shape[:2] == part["input_ids"].shape[:2]


def _by_position(inputs: tuple[Any, ...], kwargs: dict[str, Any], accepted: set[str]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments, with an input that is given by name as the positional one."""
    for names in _PARTS:
        if not inputs and set(names[:2]) <= kwargs.keys() and not accepted & set(names):
            parts = {name: kwargs[name] for name in names if name in kwargs}
            return (parts,), {name: value for name, value in kwargs.items() if name not in parts}
    for name in _INPUTS:
        if name in kwargs and name not in accepted and kwargs[name] is not None:
            if inputs:
                raise ValueError(f"There are two inputs, a positional one and `{name}=`: pass one of them.")
            return (kwargs[name],), {other: value for other, value in kwargs.items() if other != name}
    return inputs, kwargs


def _is_raw(given: Any) -> bool:
    """Whether the pipeline must prepare an input, because it is no tensor, token ids, encoding or chat."""
    if isinstance(given, Mapping):
        is_encoding = "input_ids" in given or hasattr(given, "convert_to_tensors")
        return not (is_encoding or any(isinstance(value, torch.Tensor) for value in given.values()))
    if isinstance(given, np.ndarray):
        return given.dtype.kind not in "iu"
    if isinstance(given, (list, tuple)):
        chat = given[0] if given and isinstance(given[0], (list, tuple)) else given
        is_chat = bool(chat) and all(isinstance(message, Mapping) and "role" in message for message in chat)
        return bool(given) and not is_chat and all(map(_is_raw, given))
    return not isinstance(given, (torch.Tensor, Number, type(None)))


@functools.cache
def _options_of_pipeline(kind: Any) -> frozenset[str]:
    """Return the names of all options of a pipeline: of its call, its preprocessing and its later steps."""
    names: set[str] = set()
    for function in (kind._sanitize_parameters, kind.preprocess, kind.__call__):
        parameters = list(inspect.signature(function).parameters.values())[1:]
        if function is not kind._sanitize_parameters:
            parameters = parameters[1:]  # the input
        names |= {item.name for item in parameters if item.kind in (item.POSITIONAL_OR_KEYWORD, item.KEYWORD_ONLY)}
    return frozenset(names)


@functools.cache
def _generation_options() -> frozenset[str]:
    return frozenset(name for name in vars(GenerationConfig()) if not name.startswith("_")) | {"generation_config", "generate_kwargs"}


@functools.cache
def _causal_families() -> frozenset[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return frozenset(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
