"""Diffusion pipelines: models that denoise an image step by step, traced with a prompt or with tensors for the denoiser.

``trace`` and ``generate`` run the pipeline. Every location of the denoiser occurs once for each step, and those of the model itself occur
once. In compiled traces, only the denoiser is captured, and its graph serves every step. The other components run as Python.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import torch

from ...runtime.interleaver import active_interleaver
from ...runtime.modules.interception import is_compiling
from ...runtime.tracer import Arguments, Driver
from ...runtime.uncompiled import leave_to_python, uncompiled_itself
from ...tracing import Backend
from ...tracing.source import calls_for_with
from ..component import Subtree
from ..mixins import MetaMixin, naming
from ..tracing import ModelTracer
from .building import build, loader_of
from .module import ROWS, Diffuser
from .run import NOT_RECORDED, DiffusionRun

if TYPE_CHECKING:
    from ...fx.driver import CompiledDriver


class DiffusionModel(MetaMixin):
    """A pipeline of `diffusers` whose components can be read and edited while it makes images.

    It needs the package `diffusers`: ``pip install "nnsight[diffusion]"``. Components are children (``model.unet``, ``model.vae``).
    Other attributes of the pipeline, such as ``scheduler`` and ``tokenizer``, are available on this object, and the pipeline itself as
    ``pipeline``.

    ``trace`` and ``generate`` run the whole pipeline with a block. They take a prompt, or inputs of the pipeline by name, such as
    ``prompt_embeds=``, ``image=``, ``mask_image=`` and ``strength=``. ``trace`` makes one step unless ``num_inference_steps=`` is given.
    ``output`` is the result of the pipeline. With tensors, ``trace`` runs the denoiser once, with the tensors as its arguments.

    Args:
        model: Name of a repository on the model hub, folder written by ``save_pretrained``, or a pipeline that is loaded already.
        automodel: The class whose ``from_pretrained`` loads the pipeline, or its name in `diffusers`, such as
            ``"AutoPipelineForInpainting"``; ``DiffusionPipeline`` by default.
        dispatch: Load the weights at once. By default the components begin on the meta device, without weights, and the first run,
            or :meth:`dispatch`, loads them.
        **options: ``compile``, ``rename`` and ``envoys`` of :class:`NNsight`; all others are passed to ``from_pretrained``.

    Raises:
        ImportError: If `diffusers` is not installed.
        LoadingError: If the pipeline cannot be read, or lacks a component that ``automodel`` needs. It is an ``OSError``.
        TypeError: If ``model`` is neither a name nor a pipeline.
        ValueError: If `diffusers` has no class with the name ``automodel``.

    Example:
        >>> model = DiffusionModel("stabilityai/stable-diffusion-2-1")
        >>> with model.generate("A cat on a mat", num_inference_steps=50, seed=0) as tracer:
        ...     for step in tracer.iter[:50]:
        ...         if step < 10:
        ...             model.unet.mid_block.output *= 1.1
        ...     images = tracer.result.images.save()
    """

    _module: Diffuser
    #: Arguments of a trace that also apply to its invokes: they determine the number of seeds.
    _options_of_invokes = {"num_images_per_prompt", "num_videos_per_prompt", "num_waveforms_per_prompt"}  # noqa: RUF012

    def __init__(self, model: Any, *, automodel: Any = None, dispatch: bool = False, **options: Any) -> None:
        if isinstance(model, (str, os.PathLike)):
            options |= {"automodel": loader_of(automodel), "dispatch": dispatch}
        elif not isinstance(model, torch.nn.Module):
            if not (hasattr(model, "components") and callable(model)):
                raise TypeError(f"A diffusion model is a name, a folder or a pipeline, not {type(model).__name__}.")
            model = Diffuser(model)
        elif not isinstance(model, Diffuser):
            raise TypeError(
                f"A diffusion model is a whole pipeline, not one module ({type(model).__name__}). Wrap a module as `NNsight(module)`."
            )
        if automodel is not None:
            options["automodel"] = options.get("automodel", automodel)  # an error later, if the pipeline is loaded already
        super().__init__(model, **options)

    # -- loading -------------------------------------------------------------------------------------------------

    def _load(self, name: str | os.PathLike[str], *, automodel: Any, **options: Any) -> torch.nn.Module:
        """Return the pipeline with its weights."""
        with naming(name):
            return Diffuser(automodel.from_pretrained(os.fspath(name), **options))

    def _load_meta(self, name: str | os.PathLike[str], *, automodel: Any, **options: Any) -> torch.nn.Module:
        """Return the pipeline that its configuration describes, without weights."""
        with naming(name):
            return Diffuser(build(os.fspath(name), automodel, options))

    # -- running -------------------------------------------------------------------------------------------------

    @uncompiled_itself
    def generate(
        self,
        *inputs: Any,
        compile: bool | str | None = None,
        backend: Backend | None = None,
        scan: bool = False,
        validate: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Make images, with a block if this is called in a ``with`` header, else as a plain call.

        In the block, every location of the denoiser occurs once for each step. ``tracer.result`` is the result of the pipeline.
        With classifier-free guidance, the denoiser gets the rows of the empty prompt and of the prompts in one call. An invoke sees
        the rows of its prompts in both halves, ``num_images_per_prompt`` for each prompt.

        Args:
            *inputs: At most one: the prompt, or a list of prompts.
            compile: Whether the denoising steps run compiled; by default as chosen with :meth:`compile`.
            backend: Where the block runs; in this process by default.
            scan: As in :meth:`trace`, for blocks only. The images of a scan are black.
            validate: Likewise.
            **kwargs: Those of the pipeline, such as ``num_inference_steps``, ``guidance_scale``, ``negative_prompt``, ``image``,
                ``generator`` and ``output_type``; also ``seed``: unless there is a ``generator``, image ``i`` of the call gets one with
                the seed ``seed + i``, counted over all prompts and the images of each.

        Returns:
            In a ``with`` header, the tracer. Else the result of the pipeline, with ``images``.
        """
        leave_to_python("model.generate(...)")
        if kwargs.pop("remote", False) or kwargs.pop("program", False):
            raise ValueError(NOT_RECORDED)
        generation = DiffusionRun(self)
        if calls_for_with(sys._getframe(1)):
            return self._tracer(generation, inputs, kwargs, compile, backend, scan=scan, validate=validate)
        if scan or validate:
            raise ValueError("generate(scan=..., validate=...) needs a block: `with model.generate(...) as tracer:`.")
        return self._run_plainly(generation, inputs, kwargs, compile)

    @uncompiled_itself
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the pipeline on a prompt, or the denoiser on tensors, with the edits of this model, and compiled if the model is."""
        if is_compiling() or active_interleaver() is not None:
            return super().__call__(*args, **kwargs)
        return self._run_plainly(DiffusionRun(self, "trace" if ROWS in kwargs else "call"), args, kwargs, None)

    def _run_plainly(self, generation: Any, inputs: tuple[Any, ...], kwargs: dict[str, Any], compile: bool | str | None) -> Any:
        driver = self._driver(compile, generation)
        args, kwargs = generation._prepare_input(*inputs, **kwargs)
        if self._edits_apply():
            return self._call_edited(generation, args, kwargs, compile=compile)
        if active_interleaver() is not None or getattr(driver, "function", None) is generation:  # eager
            return generation(*args, **kwargs)
        return self._compiled_driver().call_function(generation, args, kwargs)

    def compile(self, **options: Any) -> None:
        """Run later traces, and plain calls of this object, with the denoiser compiled; see :meth:`NNsight.compile`.

        Edits of this model are not compiled: they run as Python.
        """
        if self._compiled is None or (options and options != self._compiled.options):
            self._make_driver(options)
        self.__dict__["_compile_by_default"] = True

    def _make_driver(self, options: dict[str, Any]) -> CompiledDriver:
        from ...fx.driver import CompiledDriver

        tree: Any = Subtree(self._tree, f"{self._tree.path}.{self._module._denoiser_name}")
        driver = self.__dict__["_compiled"] = CompiledDriver(tree, options)
        return driver

    def _driver(self, compile: bool | str | None, function: Any = None) -> Driver:
        return super()._driver(compile, function or DiffusionRun(self, "trace"))

    def _tracer(self, function: Any, args: Any, kwargs: Any, *others: Any, **options: Any) -> ModelTracer:
        if not args and not kwargs and "prompt" not in self._module._arguments:
            kwargs = {"return_dict": True}  # such a pipeline needs no input, but a trace without arguments waits for invokes
        made = super()._tracer(function, args, kwargs, *others, **options)
        made.pace = f"{self._tree.path}.{self._module._denoiser_name}.output"
        return made

    # -- input ---------------------------------------------------------------------------------------------------

    def _prepare_input(self, *inputs: Any, **kwargs: Any) -> Arguments:
        return DiffusionRun(self, "trace")._prepare_input(*inputs, **kwargs)

    def _batch(self, batched: Arguments | None, *args: Any, **kwargs: Any) -> tuple[Arguments, int]:
        return DiffusionRun(self, "trace")._batch(batched, *args, **kwargs)

    def _call_on(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return DiffusionRun(self, "trace")._call_on(module, args, kwargs)

    def _scan_on(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return DiffusionRun(self, "trace")._scan_on(module, args, kwargs)
