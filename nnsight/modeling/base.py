"""The root of an envoy tree: a wrapped ``torch.nn.Module``, traced eagerly or compiled.

:class:`NNsight` makes the tracers. A tracer asks it for the driver when the trace runs, to prepare the input, and to join the inputs of
several invokes. Subclasses define how models load and which inputs they take.
"""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from ..envoy.attributes import check_root
from ..envoy.envoy import Envoy, EnvoyClasses
from ..envoy.renaming import add_names, with_names
from ..late_binding import late
from ..runtime.eager import EagerDriver
from ..runtime.editing import Edit
from ..runtime.errors import NNsightDeprecationWarning
from ..runtime.gradients import add_tensor_methods
from ..runtime.interleaver import active_interleaver
from ..runtime.invoker import JoinsInputs
from ..runtime.modules.interception import is_compiling
from ..runtime.modules.tree import ModuleTree
from ..runtime.tracer import Driver, InterleavingTracer
from ..runtime.uncompiled import leave_to_python, uncompiled, uncompiled_itself
from ..tracing import Backend, Tracer
from ..tracing.errors import user_position_now
from .editable import Editable
from .root_options import BACKGROUND, check_options, compile_options
from .scanning import ScanningTracer
from .tracing import ModelTracer, session_backend, traced_method, tracer_class

if TYPE_CHECKING:
    from ..fx.driver import CompiledDriver


#: Default of ``envoys=``: the class attribute ``envoys`` applies.
_OF_THE_CLASS: Any = object()


class NNsight(Editable, JoinsInputs):
    """A model whose internals can be read and edited while it runs.

    Args:
        module: The model. A module that was compiled with ``torch.compile`` or ``Module.compile`` is recognised:
            traces then run compiled too, with the same options.
        path: The prefix of the locations of the model, for example in caches and in error messages.
        interleaver: None, as for :class:`Envoy`.
        rename: Further names for modules, by path or class: ``{"transformer.h": "layers"}`` lets ``model.layers`` stand for
            ``model.transformer.h``, ``{"mlp": "feedforward"}`` names every ``mlp``; see :mod:`nnsight.envoy.renaming`.
        envoys: The class of the envoys below, see :class:`Envoy`; by default the class attribute ``envoys``.
        parent: None, as for :class:`Envoy`.
        compile: ``True``, or the keyword arguments of ``torch.compile``, to run traces compiled; see
            :meth:`compile`. ``"background"`` is short for ``{"background": True}``.

    Raises:
        TypeError: If ``module`` is not a module.
        ValueError: If a new name in ``rename`` exists already, or a key in it matches several modules.

    Example:
        >>> model = NNsight(torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU()))
        >>> with model.trace(torch.ones(1, 2)):
        ...     hidden = model[0].output.save()
    """

    #: The class of the envoys below, for all instances; see :class:`Envoy`.
    envoys: EnvoyClasses = None

    def __init__(
        self,
        module: torch.nn.Module,
        path: str = "model",
        interleaver: None = None,
        rename: Mapping[Any, str | Sequence[str]] | None = None,
        envoys: EnvoyClasses = _OF_THE_CLASS,
        parent: None = None,
        *,
        compile: bool | str | dict[str, Any] = False,
        **options: Any,
    ) -> None:
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"NNsight wraps a torch.nn.Module, not {type(module).__name__}.")
        check_root(module, path, interleaver, parent)
        envoys = type(self).envoys if envoys is _OF_THE_CLASS else envoys
        check_options(compile, rename, envoys)
        if options:
            raise TypeError(f"{type(self).__name__}() got unknown options {sorted(options)}.")
        chosen = compile_options(compile)
        # Compared by name, because the import of dynamo takes a second. Without this import, there are no such modules.
        if type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None:
            from ..fx.torch_compat import options_of_compiled

            wrapper = module
            module, found = options_of_compiled(module)
            if module is not wrapper:
                self.__dict__["_unwrapped"] = True
            chosen = found if chosen is None else chosen
        self.__dict__.update(_compiled=None, _compile_by_default=chosen is not None, _edits=[], _compiled_edits=None)
        self.__dict__.update(_rename=dict(rename or {}), _root_path=path)
        self._mount(module, envoys, chosen)

    def _mount(self, module: torch.nn.Module, envoys: EnvoyClasses, compile_options: dict[str, Any] | None) -> None:
        """Make the envoys of ``module``, and a compiled driver if there are ``compile_options``."""
        add_tensor_methods()
        tree = self.__dict__["_own_tree"] = ModuleTree.of(module, _traced_call, self._root_path)
        Envoy.__init__(self, module, self._root_path, tree=tree, envoys=with_names(envoys, self._rename, tree))
        self._tree.roots.add(self)
        add_names(self, self._rename)
        if compile_options is not None:
            self._make_driver(compile_options)

    def compile(self, **options: Any) -> None:
        """Run later traces, and plain calls of this object, compiled. Like ``nn.Module.compile``, this works in place.

        The first call of this object records its edits as one program. Calls then run a lowered graph with this program spliced in, and
        no Python code of the edits. :attr:`params` holds the tensors and floats that the edits take from outside; all other values are
        fixed at the first call. After edits are added or removed, all edits run as Python until ``compile`` is called again.

        Args:
            **options: Those of ``torch.compile``: ``backend``, ``mode``, ``options``, ``dynamic``, ``fullgraph``; also
                ``regions`` and ``background``, which make the first result available sooner, and ``max_captures``, the
                number of times that the model may be captured, 256 by default (docs/compile.md).
        """
        if self._compiled is None or not self._edits or (options and options != self._compiled.options):
            self._make_driver(options)
        self.__dict__["_compile_by_default"] = True
        if self._edits:
            compiled = late("CompiledEdits")(self)
            self.__dict__.update(_compiled_edits=compiled, params=compiled.params)

    @overload
    def trace(self, *args: Any, trace: Literal[False], **kwargs: Any) -> Any: ...

    @overload
    def trace(
        self,
        *args: Any,
        compile: bool | str | None = None,
        backend: Backend | None = None,
        remote: bool | str = False,
        blocking: bool = True,
        scan: bool = False,
        validate: bool = False,
        program: bool = False,
        fn: Callable[..., Any] | str | None = None,
        tracer_cls: type[InterleavingTracer] | None = None,
        trace: Literal[True] = True,
        **kwargs: Any,
    ) -> InterleavingTracer: ...

    @uncompiled
    def trace(
        self,
        *args: Any,
        compile: bool | str | None = None,
        backend: Backend | None = None,
        remote: bool | str = False,
        blocking: bool = True,
        scan: bool = False,
        validate: bool = False,
        program: bool = False,
        fn: Callable[..., Any] | str | None = None,
        tracer_cls: type[InterleavingTracer] | None = None,
        trace: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Run the model once; the block of the ``with`` statement reads and edits its internals.

        Args:
            *args: The model's input.
            compile: Whether this trace runs compiled; by default as chosen with :meth:`compile`. ``"background"`` runs the code
                that is ready, while the whole graph is lowered in the background.
            backend: Where the block runs; in this process by default.
            remote: Send the block as data to a server (docs/remote.md): ``True`` for that of ``CONFIG.API.HOST``, or the address of
                another. ``"local"`` records, checks and runs the block in this process, as a server does. ``"program"`` only records
                it, for ``tracer.program``.
            blocking: Wait for the results of a remote trace; see :class:`~nnsight.remote.client.remote_backend.RemoteBackend`, also for
                ``job_id=`` and ``verbose=`` of a remote trace.
            scan: Run the model on fake tensors first; ``_fake_output`` and ``_fake_inputs`` of the envoys then have the sizes.
            validate: Run the block on fake tensors first, as in :meth:`scan`, so that its errors are raised before the model
                runs or is loaded. This run works on copies of the variables, and of the lists, dicts and sets in them. Effects
                of the block on other objects, and prints, happen twice.
            program: Record the block as a program (docs/programs.md), and run the program. It is then ``tracer.program``.
            fn: A function to call instead of the model, or the name of a method of the wrapped module. The function can call the model,
                or modules of it, any number of times.
            tracer_cls: Class of the tracer: a subclass of :class:`InterleavingTracer`.
            trace: ``False`` calls the model on the prepared input, without a block: ``logits = model.trace(prompt, trace=False).logits``.
            **kwargs: The model's input, by name.

        Returns:
            The tracer; ``tracer.report`` tells how the trace ran. With ``trace=False``, the output of the model.
        """
        if not trace:
            if any((compile is not None, backend, remote, not blocking, scan, validate, program, fn, tracer_cls)):
                raise ValueError("trace(trace=False) is a plain call of the model: pass its input alone, no options of traces.")
            self._driver(None)  # loads a lazy model, to whose device the input is moved
            args, kwargs = self._prepare_input(*args, **kwargs)[:2]
            return self(*args, **kwargs)
        if fn is not None and (scan or validate):
            raise ValueError(
                "trace(fn=...) takes no scan= or validate=. They run a copy of the model on fake tensors; the function calls the original."
            )
        if isinstance(fn, str) and not callable(getattr(self._module, fn, None)):
            raise AttributeError(f"trace(fn={fn!r}): {type(self._module).__name__} has no method of this name.")
        traced = self if fn is None else traced_method(self, self, fn)
        if remote is not False or not blocking:
            backend = self._remote_backend(remote, backend, blocking, kwargs)
        if program:
            backend = self._program_backend(traced, backend)
        return self._tracer(traced, args, kwargs, compile, backend, tracer_cls, scan=scan, validate=validate)

    def _remote_backend(
        self, remote: bool | str, backend: Backend | None, blocking: bool, kwargs: dict[str, Any] | None = None
    ) -> Backend | None:
        """Return the backend for these arguments of a trace. ``job_id`` and ``verbose`` of a remote trace are removed from ``kwargs``."""
        if remote is False:
            if not blocking:
                raise ValueError("blocking=False is for traces that run on a server: add remote=True.")
            return backend
        if session_backend.get() is not None:
            raise ValueError("The session around this trace runs remotely, and this trace with it: leave out remote= here.")
        options = {name: kwargs.pop(name) for name in ("job_id", "verbose") if kwargs and name in kwargs}
        made: Backend = late("backend_for")(self, remote, backend, blocking, **options)
        return made

    @staticmethod
    def _program_backend(traced: Any, backend: Backend | None) -> Backend:
        """Return the backend of a trace with ``program=True`` that calls ``traced``."""
        if backend is not None:
            raise ValueError("program=True runs in this process: leave out remote= and backend=, or program=True.")
        made: Backend = late("program_trace")(traced)
        return made

    def _trace_method(self, envoy: Envoy, name: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> InterleavingTracer:
        """Return a tracer that calls a method of the module of ``envoy``; options of a trace are taken from ``kwargs``."""
        root = envoy if isinstance(envoy, NNsight) else self
        compile, backend = kwargs.pop("compile", None), kwargs.pop("backend", None)
        backend = root._remote_backend(kwargs.pop("remote", False), backend, kwargs.pop("blocking", True), kwargs)
        return root._tracer(traced_method(root, envoy, name), args, kwargs, compile, backend)

    def _run_method(self, envoy: Envoy, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call ``function``, a method of this object or of ``envoy`` below it, with the edits of this object."""
        self._driver(None)  # loads a lazy model
        if envoy is self:
            args, kwargs = self._prepare_input(*args, **kwargs)[:2]
        return self._call_edited(function, args, kwargs, must_run=False) if self._edits_apply() else function(*args, **kwargs)

    def _tracer(
        self,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        compile: bool | str | None,
        backend: Backend | None,
        tracer_cls: type[InterleavingTracer] | None = None,
        **options: bool,
    ) -> ModelTracer:
        """Return the tracer of a run that calls ``function``: this object, or another callable that prepares and batches inputs."""
        leave_to_python("model.trace(...)")
        if "invoker_args" in kwargs:  # early releases
            message = "`invoker_args=` is deprecated: pass what it contains to the trace itself, as in `model.trace(x, truncation=True)`."
            warnings.warn_explicit(message, NNsightDeprecationWarning, *user_position_now())
            given = kwargs.pop("invoker_args")
            kwargs = {**kwargs, **(given or {})}
        choose = functools.partial(self._driver, compile, None if function is self else function)
        kind = ModelTracer if tracer_cls is None else tracer_class(tracer_cls)
        return kind(choose, self._scanned, function, args, kwargs, backend, self, **options)

    @property
    def _scanned(self) -> ModuleTree:
        """The modules that a scan runs."""
        return self._tree

    def to_model_key(self) -> str:
        """Return the key that names this model on a server.

        Raises:
            ValueError: If the model was not loaded by name.
        """
        return str(late("model_key_of")(self))

    @uncompiled
    def scan(self, *args: Any, backend: Backend | None = None, **kwargs: Any) -> InterleavingTracer:
        """Run the block and the model on fake tensors, which have sizes and dtypes but no values. Nothing is computed.

        Nothing changes: weights, buffers, caches given as input and random number generators stay as they are. Weights are
        not needed, so a lazy model is not loaded. Errors in shapes and indices are raised at the line of the block.

        Until the next scan, ``_fake_output`` and ``_fake_inputs`` of every envoy are the output and the inputs of its module,
        as fake tensors. Outside of traces, ``.output``, ``.input`` and ``.inputs`` show the same values.

        Raises:
            RuntimeError: If the block, or the model, needs the value of a tensor (``DataDependentOutputException`` of torch).

        Example:
            >>> model = NNsight(torch.nn.Linear(2, 3))
            >>> with model.scan(torch.ones(5, 2)):
            ...     shape = model.output.shape.save()
            >>> model._fake_output.shape
            torch.Size([5, 3])
        """
        leave_to_python("model.scan(...)")
        self._sync()
        return ScanningTracer(self._scanned, self, args, kwargs, backend, self)

    @uncompiled
    def session(
        self,
        backend: Backend | None = None,
        *,
        remote: bool | str = False,
        blocking: bool = True,
        tracer_cls: type[Tracer] = Tracer,
    ) -> Tracer:
        """Group traces: each trace in the block can use variables of earlier ones without saving them.

        The arguments are those of :meth:`trace`, and apply to all traces in the block. A remote session runs as one job on the server.
        """
        leave_to_python("model.session()")
        return tracer_cls(self._remote_backend(remote, backend, blocking))

    def _driver(self, compile: bool | str | None, function: Callable[..., Any] | None = None) -> Driver:
        """Return the eager or the compiled driver of the model, or of a ``function`` that calls it."""
        if compile is not None and not isinstance(compile, bool) and compile != BACKGROUND:
            raise TypeError(
                f"trace(compile=...) is True, False or {BACKGROUND!r}, not {compile!r}. Options go to `model.compile(...)`."
            )
        self._sync()
        if compile == BACKGROUND and not (self._compiled or self._make_driver({"background": True})).options.get("background"):
            raise ValueError(
                "trace(compile='background'): this model was compiled before, with other options. Call "
                "`model.compile(background=True, ...)` once instead."
            )
        if self._compile_by_default if compile is None else compile:
            driver = self._compiled_driver()
            return driver if function is None else driver.around(function)
        return EagerDriver(function or self._module, self._tree.instrumentation)

    @uncompiled_itself
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model with its edits, compiled if :meth:`compile` was called.

        Inside a block on this model, the module is applied to the block's values, without edits, and no location occurs.
        Inside a function under ``torch.compile``, model and edits become part of the graph of that function.
        """
        if is_compiling():
            from ..fx.inlining import call_edited  # first: the import tells dynamo what the active run is

            return call_edited(self, args, kwargs) if self._edits_apply() else super().__call__(*args, **kwargs)
        if self._edits_apply():
            compiled = self._compiled_edits
            if compiled is None or compiled.edits != self._edits or not self._compile_by_default:
                return self._call_edited(None, args, kwargs)
            return compiled.call(self, args, kwargs)
        if self._compile_by_default and active_interleaver() is None:
            self._sync()
            return self._compiled_driver().call_plain(args, kwargs)
        return super().__call__(*args, **kwargs)

    def _edits_apply(self) -> bool:
        """Whether a call of the model runs its edits now, which is the case outside of runs and in blocks of other models."""
        if not self._edits:
            return False
        run = active_interleaver()
        return run is None or (run.current is not None and run.tree is not self._tree)

    @uncompiled
    def _call_edited(
        self,
        function: Callable[..., Any] | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        must_run: bool = True,
        compile: bool | str | None = None,
    ) -> Any:
        """Call ``function``, or by default the model, with the edits of this object; ``must_run`` as for :meth:`.call_edited`."""
        driver = self._driver(compile, function)
        return InterleavingTracer(driver, self, args, kwargs, named=self).call_edited(must_run)

    def _call_method(self, name: str, method: types.MethodType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method of the module with the edits of this object; methods of ``torch.nn.Module``, such as ``to``, without them."""
        if not self._edits or (hasattr(torch.nn.Module, name) and name != "forward"):
            return method(*args, **kwargs)
        leave_to_python(f"`{name}` of a model with edits")
        if not self._edits_apply():
            return method(*args, **kwargs)

        def call(*args: Any, **kwargs: Any) -> Any:
            return getattr(self._module, name)(*args, **kwargs)  # looked up late: the model may be loaded by then

        return self._call_edited(call, args, kwargs, must_run=False)

    def _compiled_driver(self) -> CompiledDriver:
        return self._compiled or self._make_driver({})

    def _make_driver(self, options: dict[str, Any]) -> CompiledDriver:
        from ..fx.driver import CompiledDriver

        driver = self.__dict__["_compiled"] = CompiledDriver(self._tree, options)
        return driver

    def _alias_paths(self) -> dict[str, str]:
        """Map the path of each name that ``rename`` added to the path of its module."""
        envoys = Envoy.modules(self)
        return {f"{envoy._path}.{name}": envoy.__dict__[name]._path for envoy in envoys for name in envoy._aliases}

    def _mirror(self, known: dict[torch.nn.Module, Envoy], version: int) -> None:
        super()._mirror(known, version)
        add_names(self, self._rename, warn=False)

    _compiled: CompiledDriver | None
    _compiled_edits: Any
    _edits: list[Edit]
    _rename: dict[Any, str | Sequence[str]]
    _compile_by_default: bool


def root_class(kind: type[Envoy]) -> type[NNsight]:
    """Return a class for roots that are envoys of ``kind``: a cached subclass of both, unless ``kind`` is a class of roots itself."""
    if issubclass(kind, NNsight):
        return kind
    if kind is Envoy:
        return NNsight
    known: type[NNsight] | None = vars(kind).get("_of_roots")
    if known is None:
        known = type(kind.__name__, (kind, NNsight), {"__module__": kind.__module__, "__doc__": kind.__doc__, "_moved": None})
        kind._of_roots = known  # type: ignore[attr-defined]
    return known


def _traced_call(*call: Any) -> Any:
    """Call a module while dynamo traces it; see :func:`nnsight.fx.capturing.taps.tapped_call`."""
    from ..fx.capturing.taps import tapped_call

    return tapped_call(*call)
