"""The compiled driver, and its dynamo backend.

``torch.compile`` captures the wrapped model with a tap at each location. The backend returns a *dispatcher*, which looks up the active run
each time the graph is called. Without a run it calls the plain graph. With a run it walks the taps, and calls the variant for the program
of the blocks. So one capture serves every block, and no block touches dynamo's cache or its recompile limit.

Parts of the model may run as Python all the same: dynamo skips a function, or the model breaks the graph. There, intercepted module calls
offer their values as they do for the eager driver. So dynamo may inline an intercepted call, but must not compile it as a frame of its
own: the call stays Python and offers real values, and the functions that it calls are compiled.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import sys
import threading
import types
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from ..runtime.errors import UncompiledWarning
from ..runtime.interleaver import ANYWHERE, Interleaver, active_interleaver
from ..runtime.modules.interception import INTERCEPTED_CODE
from ..runtime.modules.tree import ModuleTree
from ..runtime.report import Break, Capture, Report
from ..runtime.tracer import Driver
from ..tracing.errors import release_frames
from . import progress
from .capturing.captures import MAX_CAPTURES, Captures
from .capturing.dynamo import (
    NotCompiled,
    caller_of_compiled,
    kept_guards,
    new_caller,
    tensors_were_compared,
    watch_captures,
)
from .capturing.graph import CapturedGraph
from .capturing.output_hooks import install_output_hooks
from .lowering.backends import BackendCallable, resolve_backend
from .lowering.region_plan import mark_stretches
from .lowering.regions import KnownRegions
from .recording.deferred_outputs import returned
from .recording.execution import run_plain, suspended
from .recording.journal import journal_of_run
from .recording.overrides import why_overridden
from .recording.recording import Recording
from .replay.playback import Playback
from .replay.replay import Replays
from .show.stages import LIBRARIES, position_of
from .torch_compat import (
    dynamo_config,
    graph_breaks_seen,
    is_outermost,
    is_slow,
    is_whole_call,
    only_returns,
    skip_code,
    stands_aside,
    why_it_ends,
    why_python,
    why_tracing_failed,
)

skip_code(INTERCEPTED_CODE)

#: ``handle`` for intercepted calls that run as Python. It runs blocks, which dynamo must not compile.
_offer_uncompiled = torch.compiler.disable(Interleaver.handle, reason="blocks run beside the compiled model")

#: The report that the dispatchers of the current call write to.
_report: ContextVar[Report | None] = ContextVar("nnsight_fx_report", default=None)

#: The driver to which calls of its model are routed in this context, and the function that calls the model when no run is active.
_routed: ContextVar[tuple[CompiledDriver, Callable[..., Any]] | None] = ContextVar("nnsight_fx_routed", default=None)

#: Filled when dynamo fails to trace a call of the model inside :meth:`CompiledDriver.around` or :meth:`CompiledDriver.call_function`. The
#: later calls run as Python: dynamo would fail again at each, after seconds. ``None`` outside of these methods.
_given_up: ContextVar[list[str] | None] = ContextVar("nnsight_fx_given_up", default=None)

logger = logging.getLogger("nnsight.fx")

#: After this many invalidated entries the model is compiled anew: dynamo checks them in each call that no valid entry fits.
_MANY_FORGOTTEN = 64

#: The attribute of a module that ``Module.__call__`` calls instead of ``_call_impl``, if it is set.
_COMPILED_CALL = "_compiled_call_impl"

#: Options of ``torch.compile``, and our own.
_TORCH_OPTIONS, _STAGES = ("backend", "mode", "options", "dynamic", "fullgraph"), ("background", "regions")


class CompiledDriver:
    """Runs a model with blocks spliced into the graphs that dynamo captures of it.

    ``options`` are keyword arguments of ``torch.compile``, and three more: ``regions`` (:mod:`~nnsight.fx.lowering.regions`), on by default
    for inductor without CUDA graphs; ``background`` (:mod:`~nnsight.fx.lowering.variant`); and ``max_captures``
    (:mod:`~nnsight.fx.capturing.captures`).

    Raises:
        TypeError: If there is an unknown option, or an option of this package has a value of another type.
    """

    def __init__(self, tree: ModuleTree, options: dict[str, Any]) -> None:
        _check_options(options)
        self._limit = options.get("max_captures", MAX_CAPTURES)
        self.tree = tree
        self.options = dict(options)
        self.fullgraph = bool(options.get("fullgraph", False))
        lowering = {name: options[name] for name in _TORCH_OPTIONS if name in options and name != "fullgraph"}
        self._guard_filter: Callable[..., Any] | None = None
        if "guard_filter_fn" in (options.get("options") or {}):  # an option of dynamo, not of a backend
            lowering["options"] = {**options["options"]}
            self._guard_filter = lowering["options"].pop("guard_filter_fn")
        self._lower_with = resolve_backend(**lowering)
        self._regions = KnownRegions() if options.get("regions", is_slow(**lowering)) else None
        self._background = bool(options.get("background", False))
        self._function: Callable[..., Any] | None = None
        self._code = new_caller(tree.root).__code__  # of the function that is compiled
        self._call_compiled: Callable[..., Any] | None = None  # see `caller_of_compiled`
        self._captures = Captures(self._code)
        self._told: set[str] = set()  # reasons for uncompiled calls about which a warning was shown
        self._version = -1  # version of the tree when the function was made
        self._lock = threading.Lock()
        self._routes = 0
        self.replays = Replays()

    def share_regions(self, other: CompiledDriver) -> None:
        """Share lowered regions with ``other``, a driver with the same options. Call it before anything is compiled here."""
        self._regions = other._regions

    def __call__(self, interleaver: Interleaver, args: tuple[Any, ...], kwargs: dict[str, Any], report: Report) -> Any:
        """Call the model once within ``interleaver``; return its output. If nothing uses the output, its tensors may be stand-ins."""
        report.mode = "compiled"
        interleaver.offer = _offer_uncompiled
        interleaver.deferred_outputs = []
        token = _report.set(report)
        try:
            with self._surrounded(interleaver), self._progress():
                output = self.call_plain(args, kwargs)
            return returned(interleaver, output)
        finally:
            _report.reset(token)

    @contextlib.contextmanager
    def _surrounded(self, run: object) -> Iterator[None]:
        """Wrap a call of the model. If blocks wait for values and no captured graph was the whole call, report this as a break."""
        waits = isinstance(run, Interleaver) and run.begin_call()
        self._captures.note_start()
        yield
        report = _report.get()
        if waits and report is not None and not report.breaks and not self._captures.ran_whole:
            report.breaks.append(_not_whole(report))

    def _progress(self) -> contextlib.AbstractContextManager[None]:
        hint = "" if self._background else "`model.compile(regions=False, background=True)` goes on meanwhile"
        return progress.call(type(self.tree.root).__name__, hint)

    def call_plain(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the compiled model outside of any recording that is under way."""
        with suspended(args, kwargs):
            if active_interleaver() is None:
                return self.call_known(args, kwargs)
            return self.call_captured(args, kwargs)

    def call_known(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the compiled model when no block waits. Modules are intercepted only if more than one captured graph may run."""
        captures, call_compiled = self._captures, self._call_compiled
        if call_compiled is None or not captures.suffice or self._version != self.tree.version or not is_outermost():
            return self.call_captured(args, kwargs)
        known = captures.count
        try:
            return call_compiled(self.tree.root, args, kwargs)
        except NotCompiled:
            pass  # go on after the handler, so that a later error does not have this one as its context
        result = self.call_captured(args, kwargs)
        if captures.count == known:
            captures.give_up()  # dynamo has code for this call, but its guards hold only with intercepted modules
        return result

    def call_captured(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the compiled model with its modules intercepted."""
        tree, function = self.tree, self._compiled()
        with tree.instrumentation:
            return self._call(function, args, kwargs)

    def _call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the compiled function; without the wrapper of ``torch.compile`` if one captured graph is all that runs."""
        captures, call_compiled, why = self._captures, self._call_compiled, why_overridden(args, kwargs, self.fullgraph)
        known = captures.suffice and function is self._function and not why
        if call_compiled is not None and known and is_outermost() and not _given_up.get():
            captures.note_start()
            try:
                return call_compiled(self.tree.root, args, kwargs)
            except NotCompiled:  # `suppress` would make another exception group of one that the model raises
                pass
        if install_output_hooks(self.tree, kwargs):
            function = self._compiled()
        why = why or why_python(self.fullgraph)
        if why:
            self._note_uncompiled(why, "Other calls run compiled.")
            return self.tree.root._call_impl(*args, **kwargs)
        with self._watched():
            return self._call_watched(function, args, kwargs)

    def _call_watched(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the compiled function. If the model fails while dynamo traces it, before anything has run, call the model as Python.

        Dynamo also traces a module that a block skips, and it may fail there. An error of the model's own is raised by the call as Python.
        """
        given_up = _given_up.get()
        if given_up:
            return self.tree.root._call_impl(*args, **kwargs)
        handled, captures, breaks = sys.exception(), self._captures, graph_breaks_seen()
        try:
            output = function(self.tree.root, args, kwargs)
            if captures.ran_nothing:
                self._note_uncompiled(*(captures.uncompiled or captures.note_failure(breaks)))
            return output
        except Exception as error:
            reason = why_tracing_failed(error, self._code)
            if reason is None or self.fullgraph or not captures.ran_nothing:
                raise
            release_frames(error, handled)
        output = self.tree.root._call_impl(*args, **kwargs)
        if given_up is not None:
            given_up.append(reason)
        self._note_uncompiled(
            f"torch.compile failed to trace it on fake tensors: {reason}",
            "The usual cause is a skipped module that cannot run here, because an earlier step stored nothing for it. "
            "`trace(..., compile=False)` or `generate(..., compile=False)` runs eagerly from the start.",
        )
        return output

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Wrap a call that may compile: undo its captures if it fails."""
        self._captures.note_start()
        with self._captures.undone_if_it_fails(self.tree.paths), self._captures.watched():
            yield

    def _note_uncompiled(self, reason: str, remedy: str) -> None:
        """Report that a call of the model ran uncompiled, and warn once for each reason."""
        if stands_aside():
            return
        report = _report_now()
        filename, line = position_of(report)
        found = Break("model", f"the model runs uncompiled ({reason})", filename, line)
        if report is not None and found not in report.breaks:  # the model may be called more than once
            report.breaks.append(found)
        if reason not in self._told:
            self._told.add(reason)
            message = f"A call of the compiled model {type(self.tree.root).__name__} runs uncompiled: {reason}. {remedy}"
            warnings.warn_explicit(message, UncompiledWarning, filename, line)

    def call_function(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[..., Any] | None = None
    ) -> Any:
        """Call ``function``, without blocks. In it each call of the model runs compiled, or as ``call(args, kwargs)`` if that is given."""
        routed, given_up = _routed.set((self, call or self.call_plain)), _given_up.set([])
        try:
            with self._route(), self._progress():
                return function(*args, **kwargs)
        finally:
            _given_up.reset(given_up)
            _routed.reset(routed)

    def around(self, function: Callable[..., Any]) -> Driver:
        """Return a driver that calls ``function``. In it each call of the model runs compiled, with blocks."""

        def run(interleaver: Interleaver, args: tuple[Any, ...], kwargs: dict[str, Any], report: Report) -> Any:
            report.mode = "compiled"
            interleaver.offer = _offer_uncompiled
            interleaver.returns = True  # the function uses the outputs
            interleaver.deferred_outputs = []
            token, routed, given_up = _report.set(report), _routed.set((self, self.call_plain)), _given_up.set([])
            try:
                with suspended(args, kwargs), self.tree.instrumentation, self._route(), self._progress():
                    return function(*args, **kwargs)
            finally:
                _given_up.reset(given_up)
                _routed.reset(routed)
                _report.reset(token)

        return run

    @contextlib.contextmanager
    def _route(self) -> Iterator[None]:
        """Route calls of the root module through the compiled function, in this context only."""
        root = self.tree.root

        def routed_call(*args: Any, **kwargs: Any) -> Any:
            routed = _routed.get()
            if routed is None or routed[0] is not self:
                return root._call_impl(*args, **kwargs)
            run = active_interleaver()
            if run is None:
                return routed[1](args, kwargs)
            with self._surrounded(run):
                output = self._call(self._compiled(), args, kwargs)
            return returned(run, output) if isinstance(run, Interleaver) else output

        namespace = root.__dict__
        with self._lock:
            self._routes += 1
            namespace[_COMPILED_CALL] = routed_call
        try:
            yield
        finally:
            with self._lock:
                self._routes -= 1
                if self._routes == 0:
                    namespace.pop(_COMPILED_CALL, None)

    def _compiled(self) -> Callable[..., Any]:
        function, version = self._function, self.tree.version
        if function is not None and version == self._version and self._captures.forgotten < _MANY_FORGOTTEN:
            return function
        with self._lock:
            if self._function is None or version != self._version or self._captures.forgotten >= _MANY_FORGOTTEN:
                function = new_caller(self.tree.root)
                code = function.__code__
                self._code, self._captures, self._call_compiled = code, self._new_captures(code, version), None
                regions = (lambda: None) if self._regions is None else weakref.ref(self._regions)
                how = (self._lower_with, self.fullgraph, regions, self._background, code.co_name, self._captures)
                # The compiled function contains no backward pass of a block, and its guards name functions that no other process has.
                with dynamo_config.patch(compiled_autograd=False, caching_precompile=False):
                    self._function = torch.compile(
                        function,
                        backend=_CaptureBackend(*how),
                        dynamic=self.options.get("dynamic"),
                        fullgraph=self.fullgraph,
                        options={"guard_filter_fn": functools.partial(kept_guards, self._guard_filter)},
                    )
                watch_captures(self._function, self._captures.around)
                self._call_compiled = caller_of_compiled(self._function, code)
                self._version = version
            return self._function

    def _new_captures(self, code: types.CodeType, version: int) -> Captures:
        what = "modules of the model, their hooks, or the operations that `.source` intercepts have changed"
        if version == self._version:
            what = "many calls of the model have failed"
        first = Capture(what, "model") if self._captures.count else self._captures.first
        alike = max(Counter(map(type, self.tree.paths)).values())
        parameters = tuple(inspect.signature(self.tree.root.forward).parameters)
        return Captures(code, first, self._limit, alike, self.fullgraph, parameters)


def _check_options(options: dict[str, Any]) -> None:
    ours = (*_STAGES, "max_captures")
    unknown = options.keys() - {*_TORCH_OPTIONS, *ours}
    if unknown:
        known = f"It takes {sorted(_TORCH_OPTIONS)}, as torch.compile does, and {sorted(ours)}"
        raise TypeError(f"compile() got unknown options {sorted(unknown)}. {known}.")
    limit = options.get("max_captures", MAX_CAPTURES)
    if type(limit) is not int or limit < 1:
        raise TypeError(f"compile(): `max_captures` must be an integer, 1 or more, not {limit!r}.")
    for name in _STAGES:
        if not isinstance(options.get(name, False), bool):
            raise TypeError(f"compile(): `{name}` must be True or False, not {options[name]!r}.")


@dataclass(frozen=True, eq=False)
class _CaptureBackend:
    """The dynamo backend: keeps each captured graph and returns its dispatcher.

    Dynamo keeps every backend for the life of the process, so this one refers to nothing of the model. ``name`` is the compiled function's.
    """

    lower_with: BackendCallable
    fullgraph: bool
    regions: Callable[[], KnownRegions | None]
    background: bool
    name: str
    captures: Captures

    def __call__(self, graph_module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        regions, captures, is_whole = self.regions(), self.captures, is_whole_call(graph_module, self.name)
        only_output = is_whole and only_returns()
        graph = CapturedGraph(graph_module, self.lower_with, regions, self.background, is_whole, only_output)
        graph.compares_tensors = tensors_were_compared()
        captured, report = captures.add(is_whole, bool(graph.symbols)), _report_now()
        if report is not None:
            report.captures.append(captured)
        if regions is not None:
            mark_stretches(graph)
        broken = _break_of(graph_module, graph)
        if broken is not None:
            logger.info("the model breaks the graph: %s", broken)

        def dispatch(*actual: Any) -> list[Any]:
            captures.note_dispatch(is_whole)
            active: Any = active_interleaver()
            if isinstance(active, Playback):
                return active.dispatch(graph, actual)
            run: Interleaver | None = active
            if run is None or run.current is not None:
                return run_plain(graph, actual)
            if is_whole and graph.taps and ANYWHERE in run.waited:  # waiting for the next call must not become part of the program
                run.begin_step(graph.taps[0].location)
            journal = journal_of_run.get()
            if not run.waited and journal is None:
                return run_plain(graph, actual)
            report = _report.get() or Report()
            outputs = Recording(graph, actual, run, report, self.fullgraph, journal).walk()
            if broken is not None and broken not in report.breaks[-1:]:  # dynamo may reach one place more than once
                report.breaks.append(broken)
            return outputs

        return dispatch


def _break_of(graph_module: torch.fx.GraphModule, graph: CapturedGraph) -> Break | None:
    """Return the graph break with which ``graph`` ends; ``None`` if it ends with the model."""
    found = why_it_ends(graph_module)
    if found is None:
        return None
    reason, stack = found
    inside = [frame for frame in stack if not frame.filename.startswith(LIBRARIES)]
    filename, line = (inside[-1].filename, inside[-1].lineno) if inside else ("", 0)
    location = graph.taps[-1].location if graph.taps else "model"
    return Break(location, f"the model breaks the graph ({reason})", filename, line)


def _report_now() -> Report | None:
    """Return the report of the trace or replay in this context."""
    active: Any = active_interleaver()
    return active.report if isinstance(active, Playback) else _report.get()


def _not_whole(report: Report) -> Break:
    """Return a break for a run without a captured graph of the whole model, in which no other break was reported."""
    filename, line = position_of(report)
    reason = f"the model runs uncompiled ({why})" if (why := why_python(False)) else (
        "the model breaks the graph (torch.compile did not capture the call as one graph, and ran the code between graphs as Python; "
        'TORCH_LOGS="graph_breaks,recompiles" says why)'
    )
    found = Break("model", reason, filename, line)
    logger.info("%s", found)
    return found
