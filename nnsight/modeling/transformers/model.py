"""Transformers models of any task, traced with the inputs of that task.

A :class:`TransformersModel` keeps the preprocessors of its task next to the model. :mod:`.tasks` chooses the class and the preprocessors;
:mod:`.inputs`, :mod:`.media` and :mod:`.raw` convert inputs to arguments; :mod:`~nnsight.modeling.generation` runs ``generate``, and
:mod:`.pipes` the pipeline. By default, a model that is given by name is lazy: its modules are made from the configuration, without
weights, and the first run loads the weights; see :mod:`nnsight.modeling.mixins.meta`.

Attributes of the transformers model, such as ``model.config`` and ``model.device``, are available on the wrapper.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from typing import Any

import torch

from ...envoy.envoy import Envoy
from ...runtime.uncompiled import leave_to_python, uncompiled_itself
from ...tracing import Backend
from ...tracing.source import calls_for_with
from ..forms import describe
from ..generation import Generation
from ..huggingface import (
    REPOSITORY_OPTIONS,
    HuggingFaceModel,
    class_by_name,
    device_of,
    folder_or_name,
    loading_options,
    read_configuration,
)
from ..mixins import LoadingError, naming
from . import tasks
from .adapters import attach, detach
from .pipes import PipelineRun
from .raw import TaskInput

logger = logging.getLogger("nnsight.modeling")


class TransformersModel(TaskInput, HuggingFaceModel):
    """A transformers model with the preprocessors of its task, whose internals can be read and edited while it runs.

    Args:
        model: Name of a repository on the model hub, folder written by ``save_pretrained``, or a model that is loaded already.
            ``"nnsight/demo"`` is the small model that comes with this package.
        task: A task of ``transformers.pipeline``, such as ``"text-generation"`` or ``"image-classification"``. It determines the class
            of the model, the preprocessors and the form of inputs. By default, it is read from the repository's metadata on the hub,
            and derived from the class for a folder or a loaded model.
        tokenizer: A preprocessor, or the name or folder to load it from. By default, the preprocessors that the task needs are loaded
            from ``model``, or from the source of a loaded model.
        processor: Likewise.
        image_processor: Likewise.
        feature_extractor: Likewise.
        peft: Repository or folder of an adapter of the package ``peft``; see :meth:`load_adapter`.
        device: The device of the whole model: ``"cpu"``, ``"cuda:1"``, or a number, as for ``transformers.pipeline``.
        compile: ``True``, or the keyword arguments of ``torch.compile``, to run traces compiled.
        automodel: The class whose ``from_pretrained`` loads the model, or its name in transformers. By default the first class of the
            task that takes the configuration. With a class that lacks ``from_config``, the weights load at once.
        dispatch: Load the weights at once. By default the model begins on the meta device, without weights, and the first
            run, or :meth:`dispatch`, loads them. :meth:`scan` does not need them.
        tokenizer_kwargs: Options of the tokenizer, such as ``{"truncation_side": "left"}``. They are passed to its
            ``from_pretrained``, if that is called here, and then set as attributes of the tokenizer.
        **options: Passed to ``from_pretrained``, for instance ``device_map``, ``dtype`` (or ``torch_dtype``; ``"nf4"``, ``"fp4"`` and
            ``"int8"`` quantise with bitsandbytes), ``config``, ``attn_implementation``, ``revision`` and ``trust_remote_code``; except
            ``rename`` and ``envoys``, which are those of :class:`NNsight`.

    Attributes:
        tokenizer: The tokenizer, or None; likewise ``processor``, ``image_processor``, ``feature_extractor`` and ``video_processor``.
            Padding must fit the model, so ``padding_side`` of the tokenizer is set to "left" for decoders and to "right" for
            encoder-decoders, and a missing pad token is set to the end-of-sequence token. This changes a tokenizer that was
            passed in, too. Attributes that are set on it later are respected.
        dispatched: Whether the weights are loaded.

    Raises:
        TypeError: If ``model`` is neither a name nor a module, or is a module with options for loading it.
        ValueError: If the task is unknown, or has no class for this model.
        LoadingError: If the configuration cannot be read, or later the weights. It is an ``OSError``.

    Example:
        >>> model = TransformersModel("nnsight/demo", task="text-generation")
        >>> with model.trace("The Eiffel Tower is in the city of"):
        ...     hidden = model.transformer.h[2].output.save()
        ...     logits = model.lm_head.output[:, -1].save()
        >>> model.tokenizer.decode(logits.argmax(dim=-1))
        ' Paris'
    """

    #: The default task of a subclass.
    _own_task: str | None = None
    _adapter: str | os.PathLike[str] | None

    def __init__(
        self,
        model: str | os.PathLike[str] | torch.nn.Module,
        *,
        task: str | None = None,
        tokenizer: Any = None,
        processor: Any = None,
        image_processor: Any = None,
        feature_extractor: Any = None,
        peft: str | os.PathLike[str] | None = None,
        device: Any = None,
        compile: bool | str | dict[str, Any] = False,
        automodel: Any = None,
        dispatch: bool = False,
        tokenizer_kwargs: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        task = self._own_task if task is None else tasks.resolved(task)
        if options.get("revision", "") is None:
            del options["revision"]
        where: Any = model
        if isinstance(model, (str, os.PathLike)):
            options = loading_options({**options, "device": device})
            task, automodel = self._chosen(model, task, class_by_name(automodel), options)
            makes_from_config = hasattr(automodel, "from_config") or hasattr(automodel, "_from_config")
            options |= {"automodel": automodel, "dispatch": dispatch or not makes_from_config}
        elif isinstance(model, torch.nn.Module):
            task = task or tasks.task_of_module(model, processor)
            where = getattr(model, "name_or_path", None) or None
            if device is not None:
                model.to(device_of(device))
        else:
            raise TypeError(f"A model is a name, a folder or a torch.nn.Module, not {describe(model)}.")
        self.__dict__.update(_task=task, _adapter=None if isinstance(model, torch.nn.Module) else peft)
        super().__init__(model, compile=compile, **options)
        if not isinstance(model, torch.nn.Module):
            self.__dict__["_repository"] = (os.fspath(model), options.get("revision") or "main")
            self.__dict__["_trust_remote_code"] = options.get("trust_remote_code")
        given = {"tokenizer": tokenizer, "processor": processor, "image_processor": image_processor, "feature_extractor": feature_extractor}
        repository = {name: options[name] for name in REPOSITORY_OPTIONS & options.keys()}
        self._load_preprocessors(given, where, repository, tokenizer_kwargs or {})
        if peft is not None and isinstance(model, torch.nn.Module):
            self.load_adapter(peft)

    def _chosen(self, model: str | os.PathLike[str], task: str | None, automodel: Any, options: dict[str, Any]) -> tuple[str, Any]:
        """Return the task and the class of a model that is given by name; arguments that are not ``None`` are kept."""
        if task is None or automodel is None:
            name = folder_or_name(model)
            with naming(model):
                config, _ = read_configuration(name, dict(options))
            task = task or tasks.task_of_repository(name, config, options.get("token"))
            automodel = automodel or tasks.model_class(task, config)
        return task, automodel

    def _load_preprocessors(self, given: dict[str, Any], where: Any, repository: dict[str, Any], of_tokenizer: dict[str, Any]) -> None:
        """Set the attributes of preprocessors: those ``given``, by name or as objects, and others that the task needs, from ``where``."""
        wanted = tasks.preprocessors_of(self.task)
        named = "_repository" in self.__dict__
        for attribute in ("processor", "tokenizer", "image_processor", "feature_extractor", "video_processor"):
            found = given.get(attribute)
            options = dict(repository)
            if attribute == "tokenizer":
                options |= of_tokenizer
                if found is None and self.processor is not None:
                    found = getattr(self.processor, "tokenizer", None)
            if isinstance(found, (str, os.PathLike)):
                if where is not found:
                    options.pop("revision", None)  # the revision is that of the model's repository
                found = tasks.load_preprocessor(attribute, found, options)
            elif found is None and attribute in wanted and where is not None:
                try:
                    found = tasks.load_preprocessor(attribute, where, options)
                except (LoadingError, ImportError) as error:
                    if named and wanted[attribute]:
                        raise
                    logger.info("no %s was found in %r: %s", attribute, where, error)
            self.__dict__[attribute] = found
        self._adapt_tokenizer()
        if of_tokenizer and self.tokenizer is None:
            raise TypeError("tokenizer_kwargs= has no effect, as the model has no tokenizer: pass one as `tokenizer=`.")
        for name, value in of_tokenizer.items():
            setattr(self.tokenizer, name, value)

    def _load(self, *args: Any, **options: Any) -> torch.nn.Module:
        return self._adapted(super()._load(*args, **options))

    def _load_meta(self, *args: Any, **options: Any) -> torch.nn.Module:
        return self._adapted(super()._load_meta(*args, **options))

    def _adapted(self, module: torch.nn.Module) -> torch.nn.Module:
        """Return ``module``, after attaching the adapter to it if there is one."""
        if self._adapter is not None:
            attach(module, self._adapter)
        return module

    def load_adapter(self, adapter: str | os.PathLike[str] | None) -> None:
        """Attach an adapter of the package ``peft``, and remove the present one. Weights need not be loaded.

        Paths of modules do not change. An adapted module has the original as ``base_layer``.

        Args:
            adapter: Repository or folder with the files of peft's ``save_pretrained``; None only removes the present adapter.

        Raises:
            ValueError: If the adapter changes prompts instead of modules, or its weights do not fit.
            ImportError: If ``peft`` is not installed.
        """

        def change() -> None:
            if self._adapter is not None:
                detach(self._module)
            self.__dict__["_adapter"] = None
            if adapter is not None:
                attach(self._module, adapter)
            self.__dict__["_adapter"] = adapter

        self._change_modules(change)

    @property
    def task(self) -> str:  # type: ignore[override]
        """The task: a name of ``transformers.pipeline``, with aliases resolved."""
        return str(self.__dict__["_task"])

    @property
    def attn_implementation(self) -> str | None:
        """Name of the attention implementation, such as ``"sdpa"``; None if it is not known."""
        return getattr(self._module.config, "_attn_implementation", None)

    @property
    def pipeline(self) -> Any:
        """The transformers pipeline of the task, with this model and its preprocessors. Its calls run without blocks and edits."""
        names = ("tokenizer", "image_processor", "feature_extractor", "video_processor", "processor")
        parts = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        made, known = self.__dict__.get("_pipeline", (None, {}))
        device = getattr(self._module, "device", torch.device("cpu"))
        if parts.keys() != known.keys() or any(parts[name] is not known[name] for name in parts):  # one was replaced
            made = None
        if made is None:
            side = getattr(self.tokenizer, "padding_side", None)
            where = {} if hasattr(self._module, "hf_device_map") else {"device": device}
            try:
                made = tasks.pipeline_class(self.task)(model=self._module, task=self.task, **parts, **where)
            except AttributeError as error:  # as it stands, Python would go on to look for `pipeline` in the module
                raise RuntimeError(f"The pipeline of the task {self.task!r} could not be made: {error}") from error
            if self.tokenizer is not None:
                self.tokenizer.padding_side = side  # some pipelines change it
            self.__dict__["_pipeline"] = made, parts
        made.model, made.device = self._module, device
        return made

    @property
    def _class_in_keys(self) -> type:
        return TransformersModel

    @classmethod
    def _options_of_key(cls, key: Any) -> dict[str, Any]:
        options = super()._options_of_key(key)
        further = {"task": key.task if cls._own_task is None else None, "trust_remote_code": key.trust_remote_code}
        return options | {name: value for name, value in further.items() if value is not None}

    # -- generations and pipelines -----------------------------------------------------------------------------

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
        """Generate text, with a block if this is called in a ``with`` header, else as a plain call.

        In the block, every location occurs once for each token; ``tracer.iter`` and ``next()`` choose among the
        occurrences. ``tracer.result`` and ``model.generator.output`` are the result of transformers' ``generate``.

        Args:
            *inputs: The prompts, in any form that :meth:`trace` takes.
            compile: As in :meth:`trace`.
            backend: Likewise.
            remote: Likewise, for blocks only.
            blocking: Likewise.
            scan: Likewise. A scan makes the maximal number of tokens.
            validate: Likewise.
            program: Likewise.
            **kwargs: Those of transformers' ``generate``, such as ``max_new_tokens``.

        Returns:
            In a ``with`` header, the tracer. Else the result of transformers' ``generate``: by default token ids with the
            prompt, int64 ``[batch, sequence]``.
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

    @uncompiled_itself
    def pipe(self, *inputs: Any, compile: bool | str | None = None, backend: Backend | None = None, **kwargs: Any) -> Any:
        """Run the whole pipeline of the task, with a block if this is called in a ``with`` header, else as a plain call.

        In the block, every location occurs once for each forward pass of the pipeline. ``tracer.result`` is the result of the
        pipeline. Several invokes with texts are one batch.

        Args:
            *inputs: At most one input of the pipeline. A list of texts runs as one batch, unless ``batch_size`` is given.
            compile: As in :meth:`trace`.
            backend: Likewise.
            **kwargs: Those of the pipeline, such as ``top_k``, ``candidate_labels`` and ``max_new_tokens``.

        Returns:
            In a ``with`` header, the tracer. Else the result of the pipeline: records such as ``[{"generated_text": ...}]``.

        Raises:
            NotImplementedError: If there are several invokes, and an input is not text or is split by the task.

        Example:
            >>> with model.pipe("The Eiffel Tower is in the city of", max_new_tokens=1, do_sample=False) as tracer:
            ...     hidden = model.transformer.h[2].output.save()
            ...     records = tracer.result.save()
        """
        leave_to_python("model.pipe(...)")
        for name in ("remote", "scan", "validate", "program"):
            if kwargs.pop(name, None):
                raise ValueError(f"pipe takes no {name}=: a pipeline is Python code, and runs only in this process, on real tensors.")
        run = PipelineRun(self)
        if calls_for_with(sys._getframe(1)):
            return self._tracer(run, inputs, kwargs, compile, backend)
        return self._run_plainly(run, inputs, kwargs, compile)

    @functools.cached_property
    def generator(self) -> Envoy:
        """Locations of :meth:`generate`: ``.output`` is its result, ``.streamer.output`` the token ids of each step."""
        module = torch.nn.Module()
        module.streamer = torch.nn.Module()
        return Envoy(module, path="model.generator", tree=self._tree)


#: The public import path of the class, for scripts and servers.
TransformersModel.__module__ = "nnsight.modeling.transformers"
