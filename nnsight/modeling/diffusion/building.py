"""Lazy pipelines: the class that loads a pipeline by name, and the pipeline with modules without weights."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Sequence
from typing import Any

import torch

#: Options of ``from_pretrained`` about the source of files.
_REPOSITORY_OPTIONS = {"cache_dir", "force_download", "local_files_only", "revision", "token"}

#: For each ``AutoPipeline...``: the table of `diffusers` from which it chooses a class, by the class that the repository declares.
_TABLES = {
    "AutoPipelineForText2Image": "AUTO_TEXT2IMAGE_PIPELINES_MAPPING",
    "AutoPipelineForImage2Image": "AUTO_IMAGE2IMAGE_PIPELINES_MAPPING",
    "AutoPipelineForInpainting": "AUTO_INPAINT_PIPELINES_MAPPING",
    "AutoPipelineForText2Audio": "AUTO_TEXT2AUDIO_PIPELINES_MAPPING",
}


def diffusers_package() -> Any:
    """Return the package `diffusers`.

    Raises:
        ImportError: If the package is not installed.
    """
    try:
        import diffusers
    except ImportError as error:
        raise ImportError('DiffusionModel needs the package diffusers: `pip install "nnsight[diffusion]"`.') from error
    return diffusers


def loader_of(automodel: Any) -> Any:
    """Return the class that loads a pipeline; ``automodel`` is a class, its name, or ``None``.

    Raises:
        ValueError: If `diffusers` has no class of this name.
        TypeError: If ``automodel`` is not a class that loads pipelines.
    """
    diffusers = diffusers_package()
    if automodel is None:
        return diffusers.DiffusionPipeline
    loader = getattr(diffusers, automodel, None) if isinstance(automodel, str) else automodel
    if loader is None:
        alike = difflib.get_close_matches(automodel, [name for name in dir(diffusers) if "Pipeline" in name])
        hint = f" Did you mean {' or '.join(map(repr, alike))}?" if alike else ""
        raise ValueError(f"automodel={automodel!r}: diffusers {diffusers.__version__} has no class of this name.{hint}")
    if not hasattr(loader, "from_pretrained") or (isinstance(loader, type) and issubclass(loader, torch.nn.Module)):
        raise TypeError(f"automodel= is a class of pipelines, such as `StableDiffusionPipeline`, or its name; not {automodel!r}.")
    return loader


def build(name: str, loader: Any, options: dict[str, Any]) -> Any:
    """Return the pipeline that ``loader.from_pretrained(name, **options)`` would return, but with modules without weights.

    Raises:
        ValueError: If the repository lacks a component that the class needs, or a class in it is not available.
    """
    where = {key: options[key] for key in _REPOSITORY_OPTIONS & options.keys()}
    config = (loader if hasattr(loader, "load_config") else diffusers_package().DiffusionPipeline).load_config(name, **where)
    kind = _concrete(loader, config["_class_name"], options)
    parts: dict[str, Any] = {}
    with torch.device("cpu"):  # components such as schedulers compute values
        for part, described in config.items():
            if part in options:
                parts[part] = options[part]
            elif isinstance(described, (list, tuple)) and len(described) == 2:
                parts[part] = None if described[1] is None else _component(name, part, described, where, _dtype(part, options))
            elif not part.startswith("_"):
                parts[part] = described
        accepted = dict(list(inspect.signature(kind.__init__).parameters.items())[1:])
        parts = {part: options.get(part, parts.get(part)) for part in accepted if part in parts or part in options}
        needed = [part for part, argument in accepted.items() if argument.default is argument.empty and part not in parts]
        lacking = [part for part in needed if part not in kind._optional_components]
        if lacking:
            raise ValueError(
                f"{kind.__name__} needs {_listed(lacking)}, which the repository lacks. It declares {config['_class_name']}: "
                "leave out `automodel=`, or pass what is missing by name."
            )
        return kind(**parts, **dict.fromkeys(needed))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _concrete(loader: Any, declared: str, options: dict[str, Any]) -> Any:
    """Return the class of the pipeline: ``loader`` itself, its choice, or the class that the repository declares."""
    diffusers = diffusers_package()
    table = _TABLES.get(getattr(loader, "__name__", ""))
    if table is not None and not {"controlnet", "enable_pag"} & options.keys():
        from diffusers.pipelines import auto_pipeline

        return auto_pipeline._get_task_class(getattr(auto_pipeline, table), declared)
    base = diffusers.DiffusionPipeline
    if isinstance(loader, type) and issubclass(loader, base) and loader is not base:
        return loader
    if not hasattr(diffusers, declared):
        raise ValueError(
            f"The repository declares {declared}, which diffusers {diffusers.__version__} lacks. Load it at once with `dispatch=True`."
        )
    return getattr(diffusers, declared)


def _dtype(part: str, options: dict[str, Any]) -> torch.dtype | None:
    """Return the dtype for a component in the options of ``from_pretrained``; ``None`` if they have none."""
    given = options.get("dtype", options.get("torch_dtype"))
    given = given.get(part, given.get("default")) if isinstance(given, dict) else given
    return given if isinstance(given, torch.dtype) else None


def _component(name: str, part: str, described: Sequence[str], where: dict[str, Any], dtype: torch.dtype | None) -> Any:
    """Return one component; without weights, if it is a module."""
    import transformers

    diffusers = diffusers_package()
    library, class_name = described
    home = {"diffusers": diffusers, "transformers": transformers}.get(library) or getattr(diffusers.pipelines, library, None)
    if not hasattr(home, class_name):
        raise ValueError(f"`{part}` has the class {class_name} of {library}, which was not found. Load it at once with `dispatch=True`.")
    kind = getattr(home, class_name)
    if not issubclass(kind, torch.nn.Module):
        return kind.from_pretrained(name, subfolder=part, **where)
    if hasattr(kind, "load_config"):
        config = kind.load_config(name, subfolder=part, **where)
        with torch.device("meta"):
            made = kind.from_config(config).eval()
    else:
        config = kind.config_class.from_pretrained(name, subfolder=part, **where)
        with torch.device("meta"):
            made = kind._from_config(config).eval()
    return made if dtype is None else made.to(dtype)
