"""Models of the Hugging Face hub: made lazily from their configuration, and loaded with ``from_pretrained``."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import inspect
import os
from importlib import import_module
from typing import Any

import torch
import transformers
from transformers import AutoConfig, PreTrainedConfig

from ..demo import NAME as DEMO_NAME
from ..demo import path as demo_path
from .mixins import naming
from .mixins.remotable import RemoteableMixin

#: Options of ``from_pretrained`` about the source of files. They apply to preprocessors, too.
REPOSITORY_OPTIONS = {"cache_dir", "force_download", "local_files_only", "revision", "token", "trust_remote_code"}

#: For each quantised ``dtype=``: the options of bitsandbytes.
_QUANTISED: dict[str, dict[str, Any]] = {
    "int8": {"load_in_8bit": True},
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
}

#: A context in which constructors of models can compute with values on the meta device; not in all versions of transformers.
_safe_creation = getattr(import_module("transformers.initialization"), "meta_device_safe_creation_ops", contextlib.nullcontext)


class HuggingFaceModel(RemoteableMixin):
    """A root class for models of the hub. The loading methods take a name or folder, ``automodel`` and options of ``from_pretrained``."""

    @property
    def repo_id(self) -> str | None:
        """Name of the repository, or the folder, that the model was loaded from; None if it is not known."""
        named = self.__dict__.get("_repository")
        return named[0] if named else getattr(self._module, "name_or_path", None) or None

    @property
    def revision(self) -> str:
        """Branch, tag or commit of the repository; ``"main"`` by default."""
        named = self.__dict__.get("_repository")
        return named[1] if named else "main"

    def _load(self, name: str | os.PathLike[str], *, automodel: Any, **options: Any) -> torch.nn.Module:
        """Return the model with its weights; attributes set on the configurations of the lazy model are copied to it."""
        with naming(name):
            loaded: torch.nn.Module = automodel.from_pretrained(folder_or_name(name), **options)
        for attribute, as_made in self.__dict__.pop("_settings", {}).items():
            for key, value in vars(getattr(self._module, attribute)).items():
                if key not in as_made or as_made[key] != value:
                    setattr(getattr(loaded, attribute), key, value)
        return loaded

    def _load_meta(self, name: str | os.PathLike[str], *, automodel: Any, **options: Any) -> torch.nn.Module:
        """Return the model that its configuration describes, without weights."""
        with naming(name):
            module = _from_configuration(automodel, folder_or_name(name), options).eval()
        configurations = {key: getattr(module, key, None) for key in ("config", "generation_config")}
        self.__dict__["_settings"] = {
            key: copy.deepcopy(vars(found)) for key, found in configurations.items() if found is not None
        }
        return module


def folder_or_name(name: str | os.PathLike[str]) -> str:
    """Return the name or folder to pass to ``from_pretrained``: the folder of the demo model for its name, else ``name``."""
    name = os.fspath(name)
    return demo_path() if name == DEMO_NAME else name


def class_by_name(automodel: Any) -> Any:
    """Return ``automodel``, looked up in transformers if it is the name of a class; raise ``ValueError`` if there is none."""
    if isinstance(automodel, str):
        if not hasattr(transformers, automodel):
            raise ValueError(f"automodel={automodel!r}: transformers has no class of this name.")
        return getattr(transformers, automodel)
    return automodel


def loading_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return options of ``from_pretrained``, with ``device``, ``torch_dtype`` and quantised dtypes converted to its own options.

    Raises:
        ValueError: If ``device`` and ``device_map`` are both given.
        ImportError: If a quantised dtype is requested, and bitsandbytes is not installed.
    """
    made = dict(options)
    if "torch_dtype" in made:  # the former name; transformers warns about it
        made["dtype"] = made.pop("torch_dtype")
    device = made.pop("device", None)
    if device is not None:
        if made.get("device_map") is not None:
            raise ValueError("`device` and `device_map` contradict each other: give one of them.")
        made["device_map"] = {"": device_of(device)}
    dtype = made.get("dtype")
    if isinstance(dtype, str) and dtype in _QUANTISED:
        if importlib.util.find_spec("bitsandbytes") is None:
            raise ImportError(f"dtype={dtype!r} needs the package bitsandbytes: `pip install bitsandbytes`.")
        made["quantization_config"] = transformers.BitsAndBytesConfig(**_QUANTISED[made.pop("dtype")])
    return made


def device_of(device: Any) -> torch.device:
    """Return a device; numbers are those of transformers, where -1 is the CPU."""
    return torch.device("cpu") if device == -1 else torch.device(device)


def read_configuration(name: str, options: dict[str, Any]) -> tuple[PreTrainedConfig, dict[str, Any]]:
    """Return the configuration of a model, updated from ``options``, and the options that are not part of it."""
    config, others = options.get("config"), {key: value for key, value in options.items() if key != "config"}
    if isinstance(config, PreTrainedConfig):
        return copy.deepcopy(config), others
    found: tuple[PreTrainedConfig, dict[str, Any]] = AutoConfig.from_pretrained(config or name, return_unused_kwargs=True, **others)
    return found


def _from_configuration(automodel: Any, name: str, options: dict[str, Any]) -> torch.nn.Module:
    """Return the model that ``automodel.from_pretrained(name, **options)`` would return, without loading its weights."""
    options.pop("quantization_config", None)
    chosen: dict[str, Any] = {
        key: options.pop(key) for key in ("attn_implementation", "experts_implementation") if key in options
    }
    dtype = options.pop("dtype", "auto")
    if dtype not in ("auto", None):
        chosen["dtype"] = dtype
    config, options = read_configuration(name, options)
    if hasattr(automodel, "from_config"):
        make = automodel.from_config
        if "trust_remote_code" in options:
            chosen["trust_remote_code"] = options["trust_remote_code"]
    else:
        make = automodel._from_config
    with _safe_creation():
        made: torch.nn.Module = make(config, **chosen)
        further = options.keys() & inspect.signature(type(made).__init__).parameters.keys() - {"self", "config"}
        return make(config, **chosen, **{key: options[key] for key in further}) if further else made
