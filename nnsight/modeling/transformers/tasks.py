"""Tasks of ``transformers.pipeline``: which model class, which preprocessors, and which inputs they have.

Model classes, preprocessors and the preparation of inputs are those of transformers' own table of tasks. :data:`_RULES` adds what it
does not say: how an input becomes the arguments of one forward pass. transformers' pipelines are imported when the first task needs them.
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

#: Who makes arguments of an input: the tokenizer (:mod:`.inputs`), the processor (:mod:`.media`), or the pipeline (:mod:`.raw`).
TOKENIZER, PROCESSOR, PIPELINE = "tokenizer", "processor", "pipeline"

_AUTO_CLASSES = {
    "tokenizer": "AutoTokenizer",
    "processor": "AutoProcessor",
    "image_processor": "AutoImageProcessor",
    "feature_extractor": "AutoFeatureExtractor",
    "video_processor": "AutoVideoProcessor",
}

#: Ends of class names, for modules that generate nothing.
_TASKS_OF_CLASSES = {
    "ForMaskedLM": "fill-mask",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForImageClassification": "image-classification",
    "ForImageTextToText": "image-text-to-text",
}


@dataclass(frozen=True)
class Rules:
    """What is particular about the inputs of a task."""

    prepared_by: str = PIPELINE
    #: Preprocessors, by attribute: True if there has to be one, None if there may be. Empty: what the class of the pipeline says.
    preprocessors: dict[str, bool | None] = field(default_factory=dict)
    #: Why an input shares no batch.
    alone: str | None = None
    #: Why an input cannot be made arguments of one forward pass.
    refusal: str | None = None


_LABELS = "labels that are compared with one input"
_RULES = {
    "text-generation": Rules(TOKENIZER, {"tokenizer": True}),
    "image-text-to-text": Rules(PROCESSOR, {"processor": True}),
    "any-to-any": Rules(PROCESSOR, {"processor": True}),
    "zero-shot-image-classification": Rules(alone=_LABELS),
    "zero-shot-audio-classification": Rules(alone=_LABELS),
    "mask-generation": Rules(refusal="its pipeline runs parts of the model to prepare an input"),
    "decision": Rules(refusal="its pipeline calls the model once for each question"),
    "keypoint-matching": Rules(refusal="its input is pairs of images"),
}


def rules_of(task: str) -> Rules:
    """Return the rules of a task, which has no alias."""
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
    """Return the first class of a task that takes this configuration; else the one that the checkpoint names.

    Raises:
        ValueError: If there is none.
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
    """Return the task of a loaded module, by what it can do and how its class is called.

    Raises:
        ValueError: If that does not say.
    """
    return _task_of_class(type(module), processor is not None)


def _task_of_class(kind: Any, sees: bool) -> str:
    name = kind.__name__
    if sees and name in _vision_language_classes():
        return "image-text-to-text"
    if hasattr(kind, "can_generate") and kind.can_generate():
        return "text-generation"
    if name in MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES.values():  # these are called as models of text are
        return "audio-classification"
    for end, task in _TASKS_OF_CLASSES.items():
        if name.endswith(end):
            return task
    raise ValueError(f"The class {name} does not say what its task is. Pass it, as in `task='feature-extraction'`.")


def _vision_language_classes() -> set[str]:
    return set(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values())


def task_of_repository(name: str, config: PreTrainedConfig, token: Any = None) -> str:
    """Return the task of a repository by the hub's metadata; of a folder, by the class that its configuration names.

    Raises:
        ValueError: If neither says.
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
    """Return which preprocessors a task loads, by attribute: True if there has to be one, None if there may be."""
    fixed = rules_of(task).preprocessors
    if fixed:
        return fixed
    kind = pipeline_class(task)
    flags = {name: getattr(kind, f"_load_{name}", False) for name in _AUTO_CLASSES}
    if "_load_video_processor" not in vars(kind):  # the class of all pipelines says "maybe"
        flags["video_processor"] = False
    return {name: flag for name, flag in flags.items() if flag is not False}


def load_preprocessor(attribute: str, name: str | os.PathLike[str], options: dict[str, Any]) -> Any:
    """Load the preprocessor of an ``attribute`` from a repository or folder.

    Raises:
        LoadingError: If it cannot be loaded.
    """
    with naming(name):
        return getattr(transformers, _AUTO_CLASSES[attribute]).from_pretrained(folder_or_name(name), **options)
