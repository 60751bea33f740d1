"""Diffusion pipelines: models that denoise an image step by step, traced with a prompt as input.

A pipeline of `diffusers` is no module. It calls several (text encoder, denoiser, autoencoder) from Python, the denoiser once for each step.
:class:`Diffuser` is a module around it with the same children, so each component has an envoy. Its ``forward`` is one denoising step:
``trace`` runs that, with the arguments of the denoiser. ``generate`` runs the pipeline, in which every location of the denoiser occurs once
for each step.

While ``generate`` runs, the pipeline's calls of the denoiser are redirected to the :class:`Diffuser`: a step is a call of the model.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch

from ..runtime.interleaver import active_interleaver
from ..runtime.tracer import Arguments
from ..runtime.uncompiled import leave_to_python, uncompiled_itself
from ..tracing import Backend
from ..tracing.source import calls_for_with
from .images import with_rows
from .mixins import MetaMixin, naming

#: What ``Module.__call__`` calls instead of the method, if it is set.
_COMPILED_CALL = "_compiled_call_impl"

#: Names of the component that denoises.
_DENOISERS = ("unet", "transformer")

#: Which prompt each row belongs to; an argument of our own, by which the number of prompts can be varied.
_ROWS = "prompt_rows"

#: The pipeline that runs in this context.
_running: ContextVar[Diffuser | None] = ContextVar("nnsight_running_pipeline", default=None)


class Diffuser(torch.nn.Module):
    """A pipeline as a module; ``denoiser_name`` is the component that is called once for each step, by default the largest."""

    pipeline: Any

    def __init__(self, pipeline: Any) -> None:
        super().__init__()
        modules = {name: part for name, part in pipeline.components.items() if isinstance(part, torch.nn.Module)}
        if not modules:
            raise TypeError(f"The {type(pipeline).__name__} has no component that is a torch.nn.Module.")
        for name, module in modules.items():
            self.add_module(name, module)
        self.pipeline = pipeline
        sizes = {name: sum(weight.numel() for weight in module.parameters()) for name, module in modules.items()}
        self.denoiser_name = next((name for name in _DENOISERS if name in modules), max(sizes, key=sizes.__getitem__))
        self._redirections = 0
        self._lock = threading.Lock()

    @property
    def denoiser(self) -> Any:
        """The component that is called once for each step."""
        return self._modules[self.denoiser_name]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run one denoising step: call the denoiser."""
        return self._modules[self.denoiser_name]._call_impl(*args, **kwargs)  # type: ignore[union-attr]

    def run(self, **kwargs: Any) -> Any:
        """Run the pipeline, its denoising steps as calls of this module."""
        kwargs = {name: value for name, value in kwargs.items() if name not in (_ROWS, "seed")}
        with self._redirected():
            return self.pipeline(**kwargs)

    @contextlib.contextmanager
    def _redirected(self) -> Iterator[None]:
        denoiser = self.denoiser

        def through_whole(*args: Any, **kwargs: Any) -> Any:
            return self(*args, **kwargs) if _running.get() is self else denoiser._call_impl(*args, **kwargs)

        token = _running.set(self)
        with self._lock:
            self._redirections += 1
            denoiser.__dict__[_COMPILED_CALL] = through_whole
        try:
            yield
        finally:
            _running.reset(token)
            with self._lock:
                self._redirections -= 1
                if self._redirections == 0:
                    denoiser.__dict__.pop(_COMPILED_CALL, None)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            pipeline = self.__dict__.get("pipeline")
            if pipeline is None or name.startswith("__"):
                raise
            return getattr(pipeline, name)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        pipeline = self.__dict__.get("pipeline")
        if name in self._modules and pipeline is not None and name in pipeline.components:
            setattr(pipeline, name, value)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "_lock": threading.Lock(), "_redirections": 0})


class DiffusionModel(MetaMixin):
    """A pipeline of `diffusers`, whose components can be read and edited while it makes images.

    The package `diffusers` is needed: ``pip install "nnsight[diffusion]"``. Attributes of the pipeline, such as ``scheduler`` and
    ``tokenizer``, are found on this object, and the pipeline itself as ``pipeline``.

    Args:
        model: Name of a repository on the model hub, folder written by ``save_pretrained``, or a pipeline that is loaded already.
        automodel: The class whose ``from_pretrained`` loads the pipeline; ``DiffusionPipeline`` by default.
        dispatch: Load the weights at once. By default the components begin on the meta device, without weights, and the first run,
            or :meth:`dispatch`, loads them.
        **options: ``compile``, ``rename`` and ``envoys`` of :class:`NNsight`; all others are those of ``from_pretrained``.

    Raises:
        ImportError: If `diffusers` is not installed.
        LoadingError: If the pipeline cannot be read. It is an ``OSError``.

    Example:
        >>> model = DiffusionModel("stabilityai/stable-diffusion-2-1")
        >>> with model.generate("A cat on a mat", num_inference_steps=50, seed=0) as tracer:
        ...     for step in tracer.iter[:50]:
        ...         if step < 10:
        ...             model.unet.mid_block.output *= 1.1
        ...     images = tracer.result.images.save()
    """

    _module: Diffuser

    def __init__(self, model: Any, *, automodel: Any = None, dispatch: bool = False, **options: Any) -> None:
        if isinstance(model, (str, os.PathLike)):
            options |= {"automodel": automodel, "dispatch": dispatch}
        elif not isinstance(model, torch.nn.Module):
            if not (hasattr(model, "components") and callable(model)):
                raise TypeError(f"A diffusion model is a name, a folder or a pipeline, not {type(model).__name__}.")
            model = Diffuser(model)
        elif not isinstance(model, Diffuser):
            raise TypeError(
                f"A diffusion model is a whole pipeline, not one module ({type(model).__name__}). Wrap a module as `NNsight(module)`."
            )
        super().__init__(model, **options)

    # -- loading -------------------------------------------------------------------------------------------------

    def _load(self, name: str | os.PathLike[str], *, automodel: Any, **options: Any) -> torch.nn.Module:
        """Return the pipeline with its weights."""
        loader = automodel or _diffusers().DiffusionPipeline
        with naming(name):
            return Diffuser(loader.from_pretrained(os.fspath(name), **options))

    def _load_meta(self, name: str | os.PathLike[str], *, automodel: Any, **options: Any) -> torch.nn.Module:
        """Return the pipeline that its configuration describes, without weights."""
        with naming(name):
            return Diffuser(_from_configuration(os.fspath(name), automodel, options))

    # -- a single step -------------------------------------------------------------------------------------------

    def _prepare_input(self, *inputs: Any, **kwargs: Any) -> Arguments:
        """Check the arguments of the denoiser."""
        if inputs and (isinstance(inputs[0], str) or _is_texts(inputs[0])):
            raise TypeError(
                f"`trace` runs one step of `{self._module.denoiser_name}`, with its tensors as input. To make images of a prompt, "
                "use `model.generate(prompt, num_inference_steps=...)`."
            )
        return inputs, kwargs

    def _batch(self, batched: Arguments | None, *args: Any, **kwargs: Any) -> tuple[Arguments, int]:
        """Join the arguments of the denoiser of one more invoke to those before it, along their first dimensions."""
        names = list(inspect.signature(type(self._module.denoiser).forward).parameters)[1:]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        rows = next((value.shape[0] for value in given.values() if isinstance(value, torch.Tensor) and value.ndim), 1)
        return ((), given if batched is None else _joined(batched[1], given)), rows

    # -- generation ----------------------------------------------------------------------------------------------

    @uncompiled_itself
    def generate(self, *inputs: Any, compile: bool | str | None = None, backend: Backend | None = None, **kwargs: Any) -> Any:
        """Make images: as a context manager with a block that runs along, as a plain call without.

        In the block every location of the denoiser occurs once for each step. ``tracer.result`` is what the pipeline returns.
        Where it guides with an empty prompt, the denoiser is given both at once, and an invoke sees the two rows of each of its prompts.

        Args:
            *inputs: At most one: the prompt, or a list of prompts.
            compile: Whether the denoising steps run compiled; by default as chosen with :meth:`compile`.
            backend: Where the block runs; in this process by default.
            **kwargs: Those of the pipeline, such as ``num_inference_steps``, ``guidance_scale``, ``negative_prompt``, ``generator``
                and ``output_type``; and ``seed``, which gives each prompt a generator of its own with this seed.

        Returns:
            In a ``with`` header the tracer. Else what the pipeline returns, with ``images``.
        """
        leave_to_python("model.generate(...)")
        generation = PipelineRun(self)
        if calls_for_with(sys._getframe(1)):
            return self._tracer(generation, inputs, kwargs, compile, backend)
        return self._run_plainly(generation, inputs, kwargs, compile)


class PipelineRun:
    """Runs the pipeline of a model in a trace of a generation, and prepares its input."""

    def __init__(self, model: DiffusionModel) -> None:
        self._model = model

    def __call__(self, **kwargs: Any) -> Any:
        rows, seed = kwargs.get(_ROWS), kwargs.get("seed")
        module = self._model._module
        if seed is not None:
            device = module.pipeline._execution_device
            generators = [torch.Generator(device).manual_seed(seed) for _ in range(1 if rows is None else len(rows))]
            kwargs["generator"] = generators[0] if rows is None else generators
        output = module.run(**kwargs)
        return output if active_interleaver() is None else with_rows(output)

    def _call_on(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the pipeline of ``module`` with as many prompts as there are rows, to see which sizes follow from their number."""
        count = len(kwargs[_ROWS])
        repeated = {name: [value[0]] * count for name, value in kwargs.items() if _is_texts(value)}
        return module.run(**{**kwargs, **repeated, "seed": None, "generator": None})

    def _prepare_input(self, *inputs: Any, **kwargs: Any) -> Arguments:
        """Return the arguments of the pipeline, all by name; texts as lists."""
        if len(inputs) > 1:
            raise TypeError(f"A generation takes one input, not {len(inputs)}. Pass several prompts as a list.")
        if inputs:
            if not (isinstance(inputs[0], str) or _is_texts(inputs[0])):
                raise TypeError(
                    f"A prompt is a string or a list of strings, not {type(inputs[0]).__name__}. Pass other inputs of the pipeline "
                    "by name, such as `prompt_embeds=`."
                )
            if "prompt" in kwargs:
                raise TypeError("`prompt` is given twice: as the input and by name.")
            kwargs = {"prompt": inputs[0], **kwargs}
        if kwargs.get("seed") is not None and kwargs.get("generator") is not None:
            raise ValueError("`seed` and `generator` contradict each other: give one of them.")
        prompts = kwargs.get("prompt")
        count = 1 if isinstance(prompts, str) else len(prompts) if prompts is not None else None
        if count is None and kwargs.get("prompt_embeds") is not None:
            count = len(kwargs["prompt_embeds"])
        if count == 0:
            raise ValueError("The list of prompts is empty. Pass at least one prompt.")
        if count is None:  # a pipeline without prompts
            return (), kwargs
        texts = {name for name in kwargs if "prompt" in name and isinstance(kwargs[name], str)}
        prepared = {name: [value] * count if name in texts else value for name, value in kwargs.items()}
        return (), {**prepared, _ROWS: torch.arange(count)}

    def _batch(self, batched: Arguments | None, *args: Any, **kwargs: Any) -> tuple[Arguments, int]:
        """Join the prompts of one more invoke to those before it."""
        if _ROWS not in kwargs:
            raise ValueError("Several invokes need prompts, or `prompt_embeds`, so that the images can be told apart.")
        rows = len(kwargs[_ROWS])
        if isinstance(kwargs.get("generator"), torch.Generator):
            kwargs["generator"] = [kwargs["generator"]] * rows
        return ((), kwargs if batched is None else _joined(batched[1], kwargs)), rows


def _is_texts(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(item, str) for item in value)


def _joined(before: Mapping[str, Any], added: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of several invokes as those of one call.

    Raises:
        ValueError: If only some of them have an argument with rows, or others differ.
    """
    made: dict[str, Any] = {}
    for name in {**before, **added}:
        above, below = before.get(name), added.get(name)
        have_rows = [isinstance(value, (list, tuple)) or getattr(value, "ndim", 0) > 0 for value in (above, below)]
        if isinstance(above, torch.Tensor) and isinstance(below, torch.Tensor) and all(have_rows):
            made[name] = torch.cat([above, below])
        elif above is not None and below is not None and all(have_rows):
            made[name] = [*above, *below]
        elif any(have_rows):
            raise ValueError(f"Only some of the invokes have `{name}`: they run as one batch, so all need it.")
        elif isinstance(above, dict) and isinstance(below, dict):
            made[name] = _joined(above, below)
        elif above is below or bool(above == below):
            made[name] = above
        else:
            raise ValueError(f"`{name}` differs between invokes: {above!r} and {below!r}. They run as one batch.")
    return made


def _diffusers() -> Any:
    try:
        import diffusers
    except ImportError as error:
        raise ImportError('DiffusionModel needs the package diffusers: `pip install "nnsight[diffusion]"`.') from error
    return diffusers


def _from_configuration(name: str, automodel: Any, options: dict[str, Any]) -> Any:
    """Return the pipeline that ``from_pretrained(name, **options)`` would return, its modules without weights."""
    diffusers = _diffusers()
    loader = automodel or diffusers.DiffusionPipeline
    where = {key: options[key] for key in _REPOSITORY_OPTIONS & options.keys()}
    config = loader.load_config(name, **where)
    kind = loader if loader is not diffusers.DiffusionPipeline else getattr(diffusers, config["_class_name"])
    parts: dict[str, Any] = {}
    for part, described in config.items():
        if part in options:
            parts[part] = options[part]
        elif isinstance(described, (list, tuple)) and len(described) == 2:
            parts[part] = None if described[1] is None else _component(name, part, described, where)
        elif not part.startswith("_"):
            parts[part] = described
    accepted = inspect.signature(kind.__init__).parameters
    return kind(**{part: value for part, value in parts.items() if part in accepted})


#: Options of ``from_pretrained`` that say where files come from.
_REPOSITORY_OPTIONS = {"cache_dir", "force_download", "local_files_only", "revision", "token"}


def _component(name: str, part: str, described: Sequence[str], where: dict[str, Any]) -> Any:
    """Return one component; without weights, if it is a module."""
    import transformers

    diffusers = _diffusers()
    library, class_name = described
    home = {"diffusers": diffusers, "transformers": transformers}.get(library) or getattr(diffusers.pipelines, library)
    kind = getattr(home, class_name)
    if not issubclass(kind, torch.nn.Module):
        return kind.from_pretrained(name, subfolder=part, **where)
    if hasattr(kind, "load_config"):
        config = kind.load_config(name, subfolder=part, **where)
        with torch.device("meta"):
            return kind.from_config(config).eval()
    config = kind.config_class.from_pretrained(name, subfolder=part, **where)
    with torch.device("meta"):
        return kind._from_config(config).eval()
