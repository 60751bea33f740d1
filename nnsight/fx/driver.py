"""The compiled driver, and the dynamo backend behind it.

``torch.compile`` captures the wrapped model with all locations tapped. The backend does not lower what it is
given: it returns a *dispatcher*, which looks at the active run each time the graph is called. Without a run it calls the
plain graph; with one it walks the taps, and calls the variant that the blocks amount to. So one capture serves every block, and
no block touches dynamo's cache or its recompile limit.

Where the model runs eagerly after all (dynamo was told to skip a function, or the model broke the graph), the intercepted
module calls offer their values as they do for the eager driver.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from ..runtime.interleaver import Interleaver, active_interleaver
from ..runtime.report import Report
from ..tree import ModuleTree
from .compat import resolve_backend
from .counters import counters
from .graph import CapturedGraph
from .recording import Recording, run_plain


@dataclass(frozen=True, eq=False)
class _Account:
    """Where the dispatchers of one call report to."""

    report: Report
    fullgraph: bool


_account: ContextVar[_Account | None] = ContextVar("nnsight_fx_account", default=None)


class CompiledDriver:
    """Runs a model with its blocks spliced into the graphs that dynamo captures of it.

    Args:
        tree: The modules of the model.
        options: Keyword arguments of ``torch.compile``.
    """

    def __init__(self, tree: ModuleTree, options: dict[str, Any]) -> None:
        known = {"backend", "mode", "options", "dynamic", "fullgraph"}
        unknown = set(options) - known
        if unknown:
            raise TypeError(
                f"compile() got unknown options {sorted(unknown)}; those of torch.compile are {sorted(known)}."
            )
        self.tree = tree
        self.options = dict(options)
        self.fullgraph = bool(options.get("fullgraph", False))
        lowering = {name: options[name] for name in ("backend", "mode", "options", "dynamic") if name in options}
        self._lower_with = resolve_backend(**lowering)
        self._function: Callable[..., Any] | None = None
        self._lock = threading.Lock()

    def __call__(self, interleaver: Interleaver, args: tuple[Any, ...], kwargs: dict[str, Any], report: Report) -> Any:
        """Call the model once within ``interleaver`` and return its output."""
        report.mode = "compiled"
        token = _account.set(_Account(report, self.fullgraph))
        try:
            return self.call_plain(args, kwargs)
        finally:
            _account.reset(token)

    def call_plain(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the compiled model."""
        with self.tree.instrumentation:
            return self._compiled()(self.tree.root, args, kwargs)

    def _compiled(self) -> Callable[..., Any]:
        with self._lock:
            if self._function is None:
                # Dynamo keeps its cache on the code object: each model gets its own.
                code = _call_model.__code__.replace(co_name=f"call_{type(self.tree.root).__name__}")
                self._function = torch.compile(
                    types.FunctionType(code, globals(), code.co_name),
                    backend=self._capture,
                    dynamic=self.options.get("dynamic"),
                    fullgraph=self.fullgraph,
                )
            return self._function

    def _capture(self, graph_module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """Keep a graph that dynamo captured and return its dispatcher."""
        counters.add("captures")
        graph = CapturedGraph(graph_module, self._lower_with)

        def dispatch(*actual: Any) -> list[Any]:
            run = active_interleaver()
            if run is None or run.current is not None or not run.waited:
                return run_plain(graph, actual)
            account = _account.get() or _Account(Report(), self.fullgraph)
            return Recording(graph, actual, run, account.report, account.fullgraph).walk()

        return dispatch


def _call_model(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return module(*args, **kwargs)
