"""Language models from transformers, traced with text, token ids or chats as input.

A :class:`LanguageModel` keeps the tokenizer next to the model: :mod:`.inputs` makes arguments of prompts, :mod:`.generation` runs
``generate``. By default a model that is named is lazy: its architecture is made from its configuration, without weights, and the
first run loads them; see :mod:`.mixins.meta`.

Attributes of the transformers model, such as ``model.config`` and ``model.device``, are found on the wrapper.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import os
import sys
from importlib import import_module
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from ..demo import NAME as DEMO_NAME
from ..demo import path as demo_path
from ..envoy.envoy import Envoy
from ..runtime.uncompiled import leave_to_python, uncompiled_itself
from ..tracing import Backend
from ..tracing.source import calls_for_with
from .forms import describe
from .generation import Generation
from .inputs import TextInput
from .mixins import MetaMixin, naming

#: Options of ``from_pretrained`` that say where files come from, so they hold for the tokenizer too.
_REPOSITORY_OPTIONS = {"cache_dir", "force_download", "local_files_only", "revision", "token", "trust_remote_code"}

#: Lets models compute numbers while they are made without weights; not in all versions of transformers.
_safe_creation = getattr(import_module("transformers.initialization"), "meta_device_safe_creation_ops", contextlib.nullcontext)


class LanguageModel(TextInput, MetaMixin):
    """A transformers model with its tokenizer, whose internals can be read and edited while it runs.

    Args:
        model: Name of a repository on the model hub, folder written by ``save_pretrained``, or a model that
            is loaded already. ``"nnsight/demo"`` is the small model that comes with this package.
        tokenizer: The tokenizer, or the name or folder to load it from. By default that of ``model`` if
            ``model`` is a name; a model that is loaded already has none and then takes token ids only.
        compile: ``True``, or the keyword arguments of ``torch.compile``, to run traces compiled.
        automodel: The class whose ``from_pretrained`` loads the model, or its name in transformers: ``AutoModelForSeq2SeqLM``
            for T5, ``AutoModelForMaskedLM`` for BERT. One that can make no model of a configuration (``from_config``) loads at once.
        dispatch: Load the weights at once. By default the model begins on the meta device, without weights, and the first
            run, or :meth:`dispatch`, loads them; :meth:`scan` works without.
        tokenizer_kwargs: Options of the tokenizer, such as ``{"truncation_side": "left"}``: for loading it, if it is loaded here,
            and set on it afterwards.
        **from_pretrained_kwargs: Passed to ``automodel.from_pretrained``, for instance ``device_map``,
            ``dtype`` (or ``torch_dtype``), ``attn_implementation``, ``revision`` and ``trust_remote_code``; except
            ``rename`` and ``envoys``, which are those of :class:`NNsight`.

    Attributes:
        tokenizer: The tokenizer, or None. Padding has to fit the model, so its ``padding_side`` is set to
            "left" for decoders and to "right" for others, and a missing pad token becomes the end-of-sequence
            token. A tokenizer that was passed in is changed, too; what is set on it later is respected.
        dispatched: Whether the weights are loaded.

    Raises:
        TypeError: If ``model`` is neither a name nor a module, or is a module with options for loading it.
        LoadingError: If the configuration, or later the weights, cannot be read. It is an ``OSError``.

    Example:
        >>> model = LanguageModel("nnsight/demo")
        >>> with model.trace("The Eiffel Tower is in the city of"):
        ...     hidden = model.transformer.h[2].output.save()
        ...     logits = model.lm_head.output[:, -1].save()
        >>> model.tokenizer.decode(logits.argmax(dim=-1))
        ' Paris'
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | torch.nn.Module,
        tokenizer: PreTrainedTokenizerBase | str | os.PathLike[str] | None = None,
        *,
        compile: bool | str | dict[str, Any] = False,
        automodel: Any = AutoModelForCausalLM,
        dispatch: bool = False,
        tokenizer_kwargs: dict[str, Any] | None = None,
        **from_pretrained_kwargs: Any,
    ) -> None:
        if isinstance(automodel, str):
            if not hasattr(transformers, automodel):
                raise ValueError(f"transformers has no class {automodel!r}, which automodel= names.")
            automodel = getattr(transformers, automodel)
        options = from_pretrained_kwargs
        if "torch_dtype" in options:  # the former name, about which transformers warns
            options["dtype"] = options.pop("torch_dtype")
        tokenizer_options = {name: options[name] for name in _REPOSITORY_OPTIONS & options.keys()}
        if isinstance(model, (str, os.PathLike)):
            if tokenizer is None:
                tokenizer = model
            else:  # another repository has revisions of its own
                tokenizer_options.pop("revision", None)
            makes_from_config = hasattr(automodel, "from_config") or hasattr(automodel, "_from_config")
            options |= {"automodel": automodel, "dispatch": dispatch or not makes_from_config}
        elif not isinstance(model, torch.nn.Module):
            raise TypeError(f"A model is a name, a folder or a torch.nn.Module, not {describe(model)}.")
        super().__init__(model, compile=compile, **options)
        if isinstance(tokenizer, (str, os.PathLike)):
            with naming(tokenizer):
                tokenizer = AutoTokenizer.from_pretrained(
                    _folder_or_name(tokenizer), **tokenizer_options | (tokenizer_kwargs or {})
                )
        if not isinstance(model, torch.nn.Module):
            self.__dict__["_repository"] = (os.fspath(model), options.get("revision") or "main")
        self.tokenizer = tokenizer
        self._adapt_tokenizer()
        if tokenizer_kwargs and tokenizer is None:
            raise TypeError("tokenizer_kwargs= are for a tokenizer, and there is none: pass one by `tokenizer=`.")
        for name, value in (tokenizer_kwargs or {}).items():
            setattr(tokenizer, name, value)

    # -- loading ---------------------------------------------------------------------------------------------

    def _load(self, name: str | os.PathLike[str], *, automodel: Any, **options: Any) -> torch.nn.Module:
        """Return the model with its weights, and with what was set on the configurations of the lazy model."""
        with naming(name):
            loaded: torch.nn.Module = automodel.from_pretrained(_folder_or_name(name), **options)
        for attribute, as_made in self.__dict__.pop("_settings", {}).items():
            for key, value in vars(getattr(self._module, attribute)).items():
                if key not in as_made or as_made[key] != value:
                    setattr(getattr(loaded, attribute), key, value)
        return loaded

    def _load_meta(self, name: str | os.PathLike[str], *, automodel: Any, **options: Any) -> torch.nn.Module:
        """Return the model that its configuration describes, without weights."""
        with naming(name):
            module = _from_configuration(automodel, _folder_or_name(name), options).eval()
        configurations = {key: getattr(module, key, None) for key in ("config", "generation_config")}
        self.__dict__["_settings"] = {
            key: copy.deepcopy(vars(found)) for key, found in configurations.items() if found is not None
        }
        return module

    # -- generation ------------------------------------------------------------------------------------------

    @uncompiled_itself
    def generate(
        self,
        *inputs: Any,
        compile: bool | str | None = None,
        backend: Backend | None = None,
        remote: bool | str = False,
        blocking: bool = True,
        scan: bool = False,
        validate: bool = False,
        program: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Generate text: as a context manager with a block that runs along, as a plain call without.

        In the block every location occurs once for each token; ``tracer.iter`` and ``next()`` choose among the
        occurrences. ``tracer.result``, and ``model.generator.output``, is what ``generate`` of transformers returns.

        Args:
            *inputs: The prompts, in any form that :meth:`trace` takes.
            compile: As in :meth:`trace`.
            backend: Likewise.
            remote: Likewise, for blocks only.
            blocking: Likewise.
            scan: Likewise. On fakes as many tokens are made as there may be.
            validate: Likewise.
            program: Likewise.
            **kwargs: Those of transformers' ``generate``, such as ``max_new_tokens``.

        Returns:
            In a ``with`` header the tracer. Else what ``generate`` of transformers returns: token ids with the prompt,
            int64 ``[batch, sequence]``, unless it was asked for more.
        """
        leave_to_python("model.generate(...)")
        generation = Generation(self)
        backend = self._remote_backend(remote, backend, blocking, kwargs)
        if calls_for_with(sys._getframe(1)):
            if program:
                backend = self._program_backend(generation, backend)
            return self._tracer(generation, inputs, kwargs, compile, backend, scan=scan, validate=validate)
        if scan or validate or program:
            raise ValueError("generate(scan=..., validate=..., program=...) needs a block: `with model.generate(...) as tracer:`.")
        if remote is not False:
            raise ValueError("generate(remote=...) needs a block: `with model.generate(...) as tracer: out = tracer.result.save()`.")
        return self._run_plainly(generation, inputs, kwargs, compile)

    @functools.cached_property
    def generator(self) -> Envoy:
        """What :meth:`generate` produces: ``.output`` is its result, ``.streamer.output`` the ids as they come."""
        module = torch.nn.Module()
        module.streamer = torch.nn.Module()
        return Envoy(module, path="model.generator", tree=self._tree)


def demo_model(**kwargs: Any) -> LanguageModel:
    """Return the small language model that comes with this package, with its weights; ``kwargs`` are those of :class:`LanguageModel`."""
    return LanguageModel(DEMO_NAME, **{"dispatch": True, **kwargs})


def _folder_or_name(name: str | os.PathLike[str]) -> str:
    """Return what ``from_pretrained`` takes for ``name``."""
    name = os.fspath(name)
    return demo_path() if name == DEMO_NAME else name


def _from_configuration(automodel: Any, name: str, options: dict[str, Any]) -> torch.nn.Module:
    """Return the model that ``automodel.from_pretrained(name, **options)`` would return, its weights as they come."""
    options.pop("quantization_config", None)
    chosen: dict[str, Any] = {
        key: options.pop(key) for key in ("attn_implementation", "experts_implementation") if key in options
    }
    dtype, config = options.pop("dtype", "auto"), options.pop("config", None)
    if dtype not in ("auto", None):
        chosen["dtype"] = dtype
    if isinstance(config, PreTrainedConfig):
        config = copy.deepcopy(config)
    else:
        config, options = AutoConfig.from_pretrained(config or name, return_unused_kwargs=True, **options)
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
