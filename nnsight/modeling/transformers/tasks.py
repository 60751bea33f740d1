"""Tasks of ``transformers.pipeline``: their model classes, preprocessors and inputs.

Model classes, preprocessors and the preparation of inputs come from the table of tasks of transformers. :data:`_RULES` adds how an input
becomes the arguments of one forward pass. The pipelines of transformers are imported when the first task needs them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from ..huggingface import folder_or_name
from ..mixins import naming

#: Values of ``prepared_by``: the tokenizer (:mod:`.inputs`), the processor (:mod:`.media`) or the pipeline (:mod:`.raw`).
TOKENIZER, PROCESSOR, PIPELINE = "tokenizer", "processor", "pipeline"

_AUTO_CLASSES = {
    "tokenizer": "AutoTokenizer",
    "processor": "AutoProcessor",
    "image_processor": "AutoImageProcessor",
    "feature_extractor": "AutoFeatureExtractor",
    "video_processor": "AutoVideoProcessor",
}

#: Tasks by the end of the class name, for modules without ``generate``.
_TASKS_OF_CLASSES = {
    "ForMaskedLM": "fill-mask",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForImageClassification": "image-classification",
    "ForImageTextToText": "image-text-to-text",
}


@dataclass(frozen=True)
class Rules:
    """The rules for the inputs of a task."""

    prepared_by: str = PIPELINE  # the component that converts an input to arguments
    #: Preprocessors by attribute: True if required, None if optional. Empty: as the class of the pipeline declares.
    preprocessors: dict[str, bool | None] = field(default_factory=dict)
    #: The reason why an input cannot be batched with others.
    unbatchable: str | None = None
    #: The reason why an input cannot be processed in one forward pass.
    refusal: str | None = None


_LABELS = "labels that are compared with one input"
_RULES = {
    "text-generation": Rules(TOKENIZER, {"tokenizer": True}),
    "image-text-to-text": Rules(PROCESSOR, {"processor": True}),
    "any-to-any": Rules(PROCESSOR, {"processor": True}),
    "zero-shot-image-classification": Rules(unbatchable=_LABELS),
    "zero-shot-audio-classification": Rules(unbatchable=_LABELS),
    "mask-generation": Rules(refusal="its pipeline runs parts of the model to prepare an input"),
    "decision": Rules(refusal="its pipeline calls the model once for each question"),
    "keypoint-matching": Rules(refusal="its input is pairs of images"),
}


def rules_of(task: str) -> Rules:
    """Return the rules of a task; ``task`` is not an alias."""
    return _RULES.get(task, Rules())


def resolved(task: str) -> str:
    """Return the name of a task that may be an alias.

    Raises:
        ValueError: If transformers has no such task.
    """
    if task in _RULES:
        return task
    from transformers.pipelines import check_task

    try:
        return str(check_task(task)[0])
    except KeyError as error:
        raise ValueError(f"task={task!r}: {error.args[0]}") from None


def pipeline_class(task: str) -> Any:
    """Return the class of the pipeline of a task."""
    from transformers import pipelines

    found = pipelines.check_task(task)[1]["impl"]
    return getattr(pipelines, found.rpartition(".")[2]) if isinstance(found, str) else found


def model_class(task: str, config: PreTrainedConfig) -> Any:
    """Return the first class of a task that takes this configuration, or else a class that the configuration names.

    Raises:
        ValueError: If there is no such class.
    """
    from transformers.pipelines import check_task

    classes = check_task(task)[1]["pt"]
    for automodel in classes:
        mapping = getattr(automodel, "_model_mapping", {})
        if type(config) in mapping or automodel.__name__ in (getattr(config, "auto_map", None) or {}):
            return automodel
    for name in config.architectures or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    names = ", ".join(automodel.__name__ for automodel in classes)
    raise ValueError(
        f"No model of the task {task!r} ({names}) takes a {type(config).__name__}. Pass another `task=`, or the class as `automodel=`."
    )


def task_of_module(module: torch.nn.Module, processor: Any = None) -> str:
    """Return the task of a loaded module, from its class and whether there is a processor.

    Raises:
        ValueError: If the class does not determine the task.
    """
    return _task_of_class(type(module), processor is not None)


def _task_of_class(kind: Any, sees: bool) -> str:
    name = kind.__name__
    if sees and name in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values():
        return "image-text-to-text"
    if hasattr(kind, "can_generate") and kind.can_generate():
        return "text-generation"
    if name in MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES.values():  # their names end like those of models of text
        return "audio-classification"
    for end, task in _TASKS_OF_CLASSES.items():
        if name.endswith(end):
            return task
    raise ValueError(f"The task of a model of the class {name} is not known: pass it, as in `task='feature-extraction'`.")


def task_of_repository(name: str, config: PreTrainedConfig, token: Any = None) -> str:
    """Return the task of a repository from the hub's metadata, or that of a folder from the class that its configuration names.

    Raises:
        ValueError: If neither determines the task.
    """
    problem: Exception | None = None
    if not os.path.isdir(name):
        from transformers.pipelines import get_task

        try:
            return resolved(get_task(name, token))
        except (RuntimeError, OSError, ValueError, KeyError) as error:
            problem = error
    for architecture in config.architectures or ():
        if hasattr(transformers, architecture):
            try:
                return _task_of_class(getattr(transformers, architecture), sees=True)
            except ValueError as error:
                problem = problem or error
    raise ValueError(f"The task of {name!r} is not known: pass it, as in `task='text-generation'`. ({problem})") from problem


def preprocessors_of(task: str) -> dict[str, bool | None]:
    """Return the preprocessors of a task, by attribute: True if required, None if optional."""
    fixed = rules_of(task).preprocessors
    if fixed:
        return fixed
    kind = pipeline_class(task)
    flags = {name: getattr(kind, f"_load_{name}", False) for name in _AUTO_CLASSES}
    if "_load_video_processor" not in vars(kind):  # the base class of all pipelines declares it as optional
        flags["video_processor"] = False
    return {name: flag for name, flag in flags.items() if flag is not False}


def load_preprocessor(attribute: str, name: str | os.PathLike[str], options: dict[str, Any]) -> Any:
    """Load the preprocessor of an ``attribute`` from a repository or folder.

    Raises:
        LoadingError: If it cannot be loaded.
    """
    with naming(name):
        return getattr(transformers, _AUTO_CLASSES[attribute]).from_pretrained(folder_or_name(name), **options)
