"""The compiled driver, and the dynamo backend behind it.

``torch.compile`` captures the wrapped model with all locations tapped. The backend does not lower what it is
given: it returns a *dispatcher*, which looks at the active run each time the graph is called. Without a run it calls the
plain graph; with one it walks the taps, and calls the variant that the blocks amount to. So one capture serves every block, and
no block touches dynamo's cache or its recompile limit.

Where the model runs eagerly after all (dynamo was told to skip a function, or the model broke the graph), the intercepted
module calls offer their values as they do for the eager driver. For that, dynamo may inline an intercepted call but must not
compile one as a frame of its own: the call stays Python and hands over real values, and what it calls is compiled.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import threading
import types
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch

from ..runtime.errors import UncompiledWarning
from ..runtime.interleaver import ANYWHERE, Interleaver, active_interleaver
from ..runtime.modules.interception import INTERCEPTED_CODE, INTERCEPTED_METHOD
from ..runtime.modules.tree import ModuleTree
from ..runtime.report import Break, Capture, Report
from ..runtime.tracer import Driver
from . import progress
from .capturing.captures import MAX_CAPTURES, Captures
from .capturing.compiled_calls import NotCompiled, caller_of_compiled
from .capturing.dynamo import new_caller, tensors_were_compared, watch_captures
from .capturing.graph import CapturedGraph
from .lowering.backends import BackendCallable, resolve_backend
from .lowering.regions import KnownRegions
from .lowering.repeated_modules import mark_stretches
from .recording.deferred_outputs import returned
from .recording.execution import run_plain, suspended
from .recording.journal import journal_of_run
from .recording.recording import Recording
from .replay.playback import Playback
from .replay.replay import Replays
from .show.stages import LIBRARIES, position_of
from .torch_compat import (
    is_outermost,
    is_slow,
    is_whole_call,
    only_returns,
    skip_code,
    stands_aside,
    why_followed_in_vain,
    why_it_ends,
)

skip_code(INTERCEPTED_CODE)

#: ``handle`` for intercepted calls that dynamo runs eagerly: blocks must not be compiled as part of the model.
_offer_uncompiled = torch.compiler.disable(Interleaver.handle, reason="blocks run beside the compiled model")

#: Where the dispatchers of the current call report to.
_report: ContextVar[Report | None] = ContextVar("nnsight_fx_report", default=None)


#: The driver through which calls of its model are routed in this context.
_routed: ContextVar[CompiledDriver | None] = ContextVar("nnsight_fx_routed", default=None)

#: Why the function that runs in this context calls its model as Python from now on: dynamo has failed to follow a call, and would
#: fail again at the next step, after seconds. ``None`` outside of such functions.
_given_up: ContextVar[list[str] | None] = ContextVar("nnsight_fx_given_up", default=None)


logger = logging.getLogger("nnsight.fx")

#: What dynamo has forgotten costs time in each call of a new kind. After so many failed calls the model is captured anew.
_MANY_FORGOTTEN = 64

#: What ``Module.__call__`` calls instead of the method, if it is set.
_COMPILED_CALL = "_compiled_call_impl"


class CompiledDriver:
    """Runs a model with its blocks spliced into the graphs that dynamo captures of it.

    Args:
        tree: The modules of the model.
        options: Keyword arguments of ``torch.compile``, and three of our own:

            * ``regions``: Lower repeated modules once and call them one by one (:mod:`~nnsight.fx.lowering.regions`); by default
              with inductor, where lowering takes long, unless it makes CUDA graphs.
            * ``background``: Lower whole graphs in the background, and run in the meantime what is there
              (:mod:`~nnsight.fx.lowering.variant`).
            * ``max_captures``: How often the model may be captured; calls that no capture fits run uncompiled from then on
              (:mod:`~nnsight.fx.capturing.captures`).
    """

    def __init__(self, tree: ModuleTree, options: dict[str, Any]) -> None:
        known = {"backend", "mode", "options", "dynamic", "fullgraph"}
        stages = {"regions", "background"}
        ours = {*stages, "max_captures"}
        unknown = set(options) - known - ours
        if unknown:
            raise TypeError(
                f"compile() got unknown options {sorted(unknown)}; those of torch.compile are {sorted(known)}, and there "
                f"are {sorted(ours)}."
            )
        self._limit = options.get("max_captures", MAX_CAPTURES)
        if type(self._limit) is not int or self._limit < 1:
            raise TypeError(f"compile(): `max_captures` is a number of captures, 1 or more, not {self._limit!r}.")
        for name in sorted(stages & options.keys()):
            if not isinstance(options[name], bool):
                raise TypeError(f"compile(): `{name}` is True or False, not {options[name]!r}.")
        self.tree = tree
        self.options = dict(options)
        self.fullgraph = bool(options.get("fullgraph", False))
        lowering = {name: options[name] for name in ("backend", "mode", "options", "dynamic") if name in options}
        self._guard_filter: Callable[..., Any] | None = None
        if "guard_filter_fn" in (options.get("options") or {}):  # dynamo's, and no backend's
            lowering["options"] = {**options["options"]}
            self._guard_filter = lowering["options"].pop("guard_filter_fn")
        self._lower_with = resolve_backend(**lowering)
        self._regions = KnownRegions() if options.get("regions", is_slow(**lowering)) else None
        self._background = bool(options.get("background", False))
        self._function: Callable[..., Any] | None = None
        self._code = new_caller(tree.root).__code__  # of what the function was compiled from
        self._call_compiled: Callable[..., Any] | None = None  # the function, if dynamo has compiled code for the arguments
        self._captures = Captures(self._code)
        self._told: set[str] = set()  # reasons for which a call ran uncompiled
        self._version = -1  # of the tree, for which the function is
        self._lock = threading.Lock()
        self._routes = 0
        self.replays = Replays()

    def share_regions(self, other: CompiledDriver) -> None:
        """Lower regions once for both; ``other`` has the same options, and nothing was compiled here yet."""
        self._regions = other._regions

    def __call__(self, interleaver: Interleaver, args: tuple[Any, ...], kwargs: dict[str, Any], report: Report) -> Any:
        """Call the model once within ``interleaver`` and return its output, whose tensors may be stand-ins if nobody sees it."""
        report.mode = "compiled"
        interleaver.offer = _offer_uncompiled
        interleaver.promises = []
        token = _report.set(report)
        try:
            with self._surrounded(interleaver), self._progress():
                output = self.call_plain(args, kwargs)
            return returned(interleaver, output)
        finally:
            _report.reset(token)

    @contextlib.contextmanager
    def _surrounded(self, run: object) -> Iterator[None]:
        """Surround a call of the model, and report it if blocks wait for its values and no graph of a whole call has run."""
        waits = isinstance(run, Interleaver) and bool(run.waited)
        self._captures.note_start()
        yield
        report = _report.get()
        if waits and report is not None and not report.breaks and not self._captures.ran_whole:
            report.breaks.append(_not_whole(report))

    def _progress(self) -> contextlib.AbstractContextManager[None]:
        hint = "" if self._background else "`model.compile(regions=False, background=True)` goes on meanwhile"
        return progress.call(type(self.tree.root).__name__, hint)

    def call_plain(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the compiled model; nothing of that becomes part of a recording that is going on."""
        with suspended(args, kwargs):
            if active_interleaver() is None:
                return self.call_known(args, kwargs)
            return self.call_captured(args, kwargs)

    def call_known(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the compiled model for somebody who waits at no location.

        Then calls of modules need not be intercepted, which takes a while, if nothing but one captured graph is going to run.
        """
        captures, call_compiled = self._captures, self._call_compiled
        if call_compiled is None or not captures.suffice or self._version != self.tree.version or not is_outermost():
            return self.call_captured(args, kwargs)
        known = captures.count
        try:
            return call_compiled(self.tree.root, args, kwargs)
        except NotCompiled:
            pass  # what follows is not its consequence
        result = self.call_captured(args, kwargs)
        if captures.count == known:
            captures.give_up()  # what dynamo checks before the call depends on the interception
        return result

    def call_captured(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the compiled model where nothing is being recorded."""
        tree, function = self.tree, self._compiled()
        with tree.instrumentation, self._watched():
            return self._call(function, args, kwargs)

    def _call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the compiled function; where the model fails while dynamo follows it, before anything has run, call the model as Python.

        Dynamo follows all of the model, also a module that a block skips and that would fail if it ran, because an earlier step has
        skipped it and stored no keys for it. And an error of the model itself is best raised by the model.
        """
        given_up = _given_up.get()
        if given_up:
            return self.tree.root._call_impl(*args, **kwargs)
        try:
            return function(self.tree.root, args, kwargs)
        except Exception as error:
            reason = why_followed_in_vain(error, self._code)
            if reason is None or self.fullgraph or not self._captures.ran_nothing:
                raise
        output = self.tree.root._call_impl(*args, **kwargs)
        if given_up is not None:
            given_up.append(reason)
        self._note_uncompiled(
            f"it failed while torch.compile followed it on fake tensors: {reason}",
            "The usual cause is a skipped module that could not run here, as an earlier step has stored nothing for it. "
            "`trace(..., compile=False)` or `generate(..., compile=False)` runs eagerly from the start.",
        )
        return output

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Surround a call that may compile."""
        captures = self._captures
        captures.note_start()
        with captures.undone_if_it_fails(self.tree.paths), captures.watched():
            yield
        if captures.ran_nothing and captures.uncompiled is not None:
            self._note_uncompiled(*captures.uncompiled)

    def _note_uncompiled(self, reason: str, remedy: str) -> None:
        """Say in the report that a call of the model ran uncompiled and, once for each reason, as a warning."""
        if stands_aside():
            return
        report = _report_now()
        filename, line = position_of(report)
        found = Break("model", f"the model runs uncompiled ({reason})", filename, line)
        if report is not None and found not in report.breaks:  # it may be called more than once
            report.breaks.append(found)
        if reason not in self._told:
            self._told.add(reason)
            name = type(self.tree.root).__name__
            message = f"A call of the compiled model {name} runs uncompiled: {reason}. {remedy}"
            warnings.warn_explicit(message, UncompiledWarning, filename, line)

    def around(self, function: Callable[..., Any]) -> Driver:
        """Return a driver that calls ``function``, in which each call of the model runs compiled."""

        def run(interleaver: Interleaver, args: tuple[Any, ...], kwargs: dict[str, Any], report: Report) -> Any:
            report.mode = "compiled"
            interleaver.offer = _offer_uncompiled
            interleaver.returns = True  # to the function
            interleaver.promises = []
            token, routed, given_up = _report.set(report), _routed.set(self), _given_up.set([])
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
        """Send calls of the root module through the compiled function, in this context only."""
        root, compiled = self.tree.root, self._compiled()

        def routed_call(*args: Any, **kwargs: Any) -> Any:
            if _routed.get() is self:
                with self._surrounded(active_interleaver()), self._watched():
                    output = self._call(compiled, args, kwargs)
                run = active_interleaver()
                return returned(run, output) if isinstance(run, Interleaver) else output
            return root._call_impl(*args, **kwargs)

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
                self._function = torch.compile(
                    function,
                    backend=_CaptureBackend(
                        self._lower_with, self.fullgraph, self._regions, self._background, code.co_name, self._captures
                    ),
                    dynamic=self.options.get("dynamic"),
                    fullgraph=self.fullgraph,
                    options={"guard_filter_fn": functools.partial(_kept_guards, self._guard_filter)},
                )
                watch_captures(self._function, self._captures.around)
                self._call_compiled = caller_of_compiled(self._function, code)
                self._version = version
            return self._function

    def _new_captures(self, code: types.CodeType, version: int) -> Captures:
        if self._function is None:
            first = Capture("the first call")
        elif version == self._version:
            first = Capture("many calls of the model have failed", "model")
        else:
            what = "modules of the model, their hooks, or what is watched in them by `.source`, have changed"
            first = Capture(what, "model")
        alike = max(Counter(map(type, self.tree.paths)).values())
        parameters = tuple(inspect.signature(self.tree.root.forward).parameters)
        return Captures(code, first, self._limit, alike, self.fullgraph, parameters)


def _kept_guards(chosen: Callable[..., Any] | None, guards: Sequence[Any]) -> list[bool]:
    """Say which guards of a capture dynamo is to check before each call.

    Those on the intercepted calls can be left out, and there are many for each module: what is installed
    when a capture is called is the interception of this version of the tree, for which the function was made.
    """
    kept = [True] * len(guards) if chosen is None else list(chosen(guards))
    return [keep and not _is_ours(guard.name) for keep, guard in zip(kept, guards, strict=True)]


def _is_ours(source: str) -> bool:
    """Whether a guard is on a global of this package, or on what interception has installed as seen from the root.

    Behind a break of the graph, modules have frames of their own. There such a guard tells a module from another of its class.
    """
    installed = source.startswith("the_model") and f".{INTERCEPTED_METHOD}." in f"{source}."
    return installed or source.startswith("G['__import_nnsight_dot_")


class _CaptureBackend:
    """The dynamo backend: keeps each captured graph and returns its dispatcher.

    Dynamo holds on to every backend it has seen for the life of the process, so this refers to nothing of the model.
    """

    def __init__(
        self,
        lower_with: BackendCallable,
        fullgraph: bool,
        regions: KnownRegions | None,
        background: bool,
        name: str,
        captures: Captures,
    ) -> None:
        self._captures = captures
        self._name = name  # of the function that dynamo compiles
        self._lower_with = lower_with
        self._fullgraph = fullgraph
        self._regions = None if regions is None else weakref.ref(regions)
        self._background = background

    def __call__(self, graph_module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        regions, fullgraph = None if self._regions is None else self._regions(), self._fullgraph
        captures, is_whole = self._captures, is_whole_call(graph_module, self._name)
        only_output = is_whole and only_returns()
        graph = CapturedGraph(graph_module, self._lower_with, regions, self._background, is_whole, only_output)
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
            if type(active) is Playback:
                return active.dispatch(graph, actual)
            run: Interleaver | None = active
            if run is None or run.current is not None:
                return run_plain(graph, actual)
            if is_whole and graph.taps and ANYWHERE in run.waited:  # so that what waits for a call leaves nothing in the program
                run.begin_step(graph.taps[0].location)
            journal = journal_of_run.get()
            if not run.waited and journal is None:
                return run_plain(graph, actual)
            report = _report.get() or Report()
            outputs = Recording(graph, actual, run, report, fullgraph, journal).walk()
            if broken is not None and broken not in report.breaks[-1:]:  # dynamo may come to one place more than once
                report.breaks.append(broken)
            return outputs

        return dispatch


def _break_of(graph_module: torch.fx.GraphModule, graph: CapturedGraph) -> Break | None:
    """Return where and why dynamo broke the model behind a graph, if it did."""
    found = why_it_ends(graph_module)
    if found is None:
        return None
    reason, stack = found
    inside = [frame for frame in stack if not frame.filename.startswith(LIBRARIES)]
    filename, line = (inside[-1].filename, inside[-1].lineno) if inside else ("", 0)
    location = graph.taps[-1].location if graph.taps else "model"
    return Break(location, f"the model breaks the graph ({reason})", filename, line)


def _report_now() -> Report | None:
    """Return the report of the trace that is running in this context, which may be a replay."""
    active: Any = active_interleaver()
    return active.report if type(active) is Playback else _report.get()


def _not_whole(report: Report) -> Break:
    """Return the break of a run in which no captured graph was the whole model, and no break was met by a waiting block."""
    filename, line = position_of(report)
    reason = (
        "the model breaks the graph (torch.compile did not capture its call as one, and ran what is between graphs as Python; "
        'TORCH_LOGS="graph_breaks,recompiles" says why)'
    )
    found = Break("model", reason, filename, line)
    logger.info("%s", found)
    return found
