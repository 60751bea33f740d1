"""The tracer of a model: it chooses the driver when the trace runs, and can scan or validate first.

The backend of a trace can send the block to another process. So the driver is chosen and the weights are loaded only if the block runs in
this process, right before its first line.

``scan=True`` first runs the model on fake tensors, to find the sizes. ``validate=True`` first runs block and model on fake tensors, so that
errors are raised before anything is computed or loaded. This run uses copies of the block's variables, and of the lists, dicts and sets in
them. Effects of the block on other objects, and prints, happen twice.

``with model.encode(x) as tracer:`` runs the method ``encode`` of the wrapped module with the block. The trace calls a function that
prepares and joins inputs as the model does; its locations are those of the modules that the method calls. A class of envoys can define
another implementation for traces, as a method ``__nnsight_encode__``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from ..envoy.envoy import Envoy
from ..late_binding import late
from ..runtime.interleaver import Interleaver
from ..runtime.invoker import Joined
from ..runtime.modules.tree import ModuleTree
from ..runtime.report import Report
from ..runtime.tracer import Arguments, Batchable, Driver, InterleavingTracer, Named
from ..tracing import Backend
from ..tracing.block import is_bound
from ..tracing.saving import saves
from .reruns import Rerun, container_copy
from .scanning import ScanningTracer, scan_first

if TYPE_CHECKING:
    from .base import NNsight

#: The default backend of traces in a session that runs remotely.
session_backend: ContextVar[Backend | None] = ContextVar("session_backend", default=None)

#: Attribute of a tracer class that caches the result of :func:`tracer_class`.
_FOR_MODELS = "_nnsight_for_models"


class ModelTracer(InterleavingTracer):
    """Runs a model once, with blocks that read and edit its internals.

    ``choose_driver`` is called right before the block runs; ``scan`` and ``validate`` are those of :meth:`NNsight.trace`.
    """

    def __init__(
        self,
        choose_driver: Callable[[], Driver],
        modules: ModuleTree,
        model: Batchable,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        backend: Backend | None = None,
        named: Named | None = None,
        scan: bool = False,
        validate: bool = False,
    ) -> None:
        super().__init__(_not_chosen, model, args, kwargs, session_backend.get() if backend is None else backend, named)
        self._choose_driver: Callable[[], Driver] | None = choose_driver
        self._modules: ModuleTree | None = modules
        self._scan, self._validate = scan, validate
        self._attempt: Any = None  # the attempt at a replay, if it failed
        self._prepared: Any = None  # the arguments of the model that it prepared
        self._rerun: Rerun | None = None
        self._program: Any = None

    @property
    def program(self) -> Any:
        """The block of the trace as a :class:`~nnsight.Program`.

        A trace with ``program=True`` or ``remote="program"`` has recorded it. For another trace, the first access runs the block once
        more, on fake tensors, and on copies of its variables and of the lists, dicts and sets in them. The block's effects on other
        objects happen twice. If the block needs a value, the model runs again too, and the program has a hole: it can be printed and
        drawn, but not saved or run.

        Raises:
            NotExpressibleError: If the block needs Python that a program cannot express, or a variable of it no longer exists.
            ValueError: If the trace has not run.
        """
        if self._program is None:
            self._program = late("program_of")(self._rerun, self.report.mode in ("eager", "compiled"))
        return self._program

    @program.setter
    def program(self, made: Any) -> None:
        self._program, self._rerun = made, None

    def run(self) -> None:
        """Run the block; see :meth:`Tracer.run`."""
        rerun = Rerun(self)
        try:
            super().run()
        finally:
            if self._program is None:
                self._rerun = rerun

    def replay(self) -> dict[str, Any] | None:
        """Replay the effects of the block without running it, if :mod:`nnsight.fx.replay` can; return the values that the block saves."""
        if self._validate or self._scan or not self.owns_scope or self._model is None or self._model._edits:
            return None
        assert self._call is not None and self._choose_driver is not None
        _, model, args, kwargs = self._call
        if not (args or kwargs):  # the input is in invokes, or is missing
            return None
        driver = self._choose_driver()
        self._choose_driver = lambda: driver
        replays = getattr(driver, "replays", None)
        if replays is None:
            return None
        assert self.info is not None and self.scope is not None and self._modules is not None
        self.output_location = f"{self._modules.path}.output"
        attempt = replays.prepare(self.info, self.scope, self.module_globals, self, self._model._tree)
        if attempt is None:
            self.output_location = None
            return None
        self.note_start()
        prepared = model._prepare_input(*args, **kwargs)[:2]
        self._deferred = False
        replayed = attempt.replay(driver, prepared, self.report)
        if replayed is not None:
            return replayed.saved()
        self._deferred = True
        self._attempt, self._prepared = attempt, prepared
        return None

    def _arguments(self, model: Batchable, invokes: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._prepared is None:
            return super()._arguments(model, invokes, args, kwargs)
        return self._prepared, {}

    def execute(self, function: Callable[[], None]) -> Any:
        """Run the model with ``function`` as its block, or as the function that opens the invokes."""
        assert self._call is not None and self._choose_driver is not None and self._modules is not None
        _, model, args, kwargs = self._call
        if self._validate:
            self._rehearse(self._modules, model, args, kwargs)
        driver = self._choose_driver()
        if self._scan and not self._validate:
            driver = scan_first(self._modules, model, driver)
        self._call = (driver, model, args, kwargs)
        if self._attempt is None:
            return super().execute(function)
        assert self.scope is not None
        with self._attempt.keeping_journal(function) as (journal, listened):
            super().execute(listened)
            self._attempt.learn(journal, self.scope, self.report.spliced)
        return None

    def _rehearse(self, modules: ModuleTree, model: Batchable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run block and model on fake tensors, with copies of the block's variables."""
        assert self.info is not None and self.scope is not None and self._frame is not None
        rehearsal = ScanningTracer(modules, model, args, kwargs, named=self._model)
        copies: dict[int, Any] = {id(self): rehearsal}
        scope = self.scope.copy()
        for cell in scope.cells.values():
            if is_bound(cell):
                cell.cell_contents = container_copy(cell.cell_contents, copies)
        used = {name: self._frame.f_globals[name] for name in self.info.looked_up if name in self._frame.f_globals}
        module_globals = self._frame.f_globals | {name: container_copy(value, copies) for name, value in used.items()}
        rehearsal._entered, rehearsal.info, rehearsal._frame = True, self.info, self._frame
        rehearsal.scope = scope
        token = saves.set({})
        try:
            rehearsal.execute(self.info.bind(rehearsal.scope, rehearsal, module_globals))
        finally:
            saves.reset(token)
            rehearsal._close()

    def _close(self) -> None:
        super()._close()
        self._choose_driver = self._modules = self._attempt = self._prepared = None


class TracedFunction:
    """A callable for traces: ``function``, which calls modules of ``root``. ``prepares``: whether ``root`` prepares its input."""

    def __init__(self, root: NNsight, function: Callable[..., Any], prepares: bool = True) -> None:
        self._root, self._function, self._prepares = root, function, prepares

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def _prepare_input(self, *args: Any, **kwargs: Any) -> Arguments:
        return self._root._prepare_input(*args, **kwargs)[:2] if self._prepares else (args, kwargs)

    def _batch(self, batched: Arguments | None, *args: Any, **kwargs: Any) -> tuple[Arguments, int]:
        return self._root._batch(batched, *args, **kwargs)

    def _join_at_once(self, inputs: list[Arguments]) -> Joined | None:
        return self._root._join_at_once(inputs, self._function)


def traced_method(root: NNsight, envoy: Envoy, name: str | Callable[..., Any]) -> TracedFunction:
    """Return a callable for traces that calls ``name``: a function, or a method of the module, which is looked up once it is loaded."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if not isinstance(name, str):
            return name(*args, **kwargs)
        own = getattr(envoy, f"__nnsight_{name}__", None)
        return (own or getattr(envoy._module, name))(*args, **kwargs)

    return TracedFunction(root, call, prepares=envoy is root)


def tracer_class(kind: type[InterleavingTracer]) -> type[ModelTracer]:
    """Return a cached subclass of ``kind`` that is a :class:`ModelTracer`, or ``kind`` if it is one itself.

    Raises:
        TypeError: If ``kind`` is no subclass of :class:`InterleavingTracer`.
    """
    if not (isinstance(kind, type) and issubclass(kind, InterleavingTracer)):
        raise TypeError(f"tracer_cls= is a subclass of InterleavingTracer, not {kind!r}.")
    if issubclass(kind, ModelTracer):
        return kind
    known: type[ModelTracer] | None = vars(kind).get(_FOR_MODELS)
    if known is not None:
        return known
    own = {"execute", "replay"} & {name for base in kind.__mro__[: kind.__mro__.index(InterleavingTracer)] for name in vars(base)}
    members: dict[str, Any] = {"__module__": kind.__module__, "__doc__": kind.__doc__}
    if "execute" in own and "replay" not in own:  # a replay would skip its `execute`
        members["replay"] = lambda self: None
    made = type(kind.__name__, (kind, ModelTracer), members)
    setattr(kind, _FOR_MODELS, made)
    return made


def _not_chosen(interleaver: Interleaver, args: tuple[Any, ...], kwargs: dict[str, Any], report: Report) -> Any:
    raise AssertionError("the driver is chosen when the block runs")
