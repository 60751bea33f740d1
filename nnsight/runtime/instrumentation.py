"""Interception of module calls, for as long as a run is active and not a moment longer.

A module call is intercepted around ``Module._call_impl``, the method through which every call of a module goes. From
there one sees exactly what the caller passes and what the caller receives, forward hooks of the user and of other
libraries included. The interception is an attribute on the instance that shadows the method, so installing and
removing it is a dictionary write, there is nothing to unwind in the right order, and a module outside of a run has
no trace of it.

Calls are *counted* for every module of the tree while a run is active, and *handed over* only where a block waits:
without counts, a request for a module that has already run could not be told from one for a module that
will run again, and the wrong occurrence would be served silently. Counting costs a fraction of a microsecond per call.

Runs of several threads share the interception (the first installs it, the last removes it) and nothing else: the
intercepted call looks up the run of its own context and passes straight through where there is none.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch

from .interleaver import active_interleaver

#: Runs a call while dynamo traces it: ``(input location, output location, call, args, kwargs) -> output``.
TracedCall = Callable[[str, str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]

is_compiling = torch.compiler.is_compiling

_METHOD = "_call_impl"

#: Set on a module by ``Module.compile``; its calls would go past the interception.
_COMPILED = "_compiled_call_impl"


def _intercepted(path: str, call: Callable[..., Any], traced_call: TracedCall | None) -> Callable[..., Any]:
    """Return the replacement of one module's ``_call_impl``."""
    input_location, output_location = f"{path}.input", f"{path}.output"
    call = getattr(call, "original", call)  # of another tree that is installed right now

    def intercepted_call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            if traced_call is None:
                return call(*args, **kwargs)
            return traced_call(input_location, output_location, call, args, kwargs)
        run = active_interleaver()
        if run is None or run.current is not None:  # another thread's run, or a call the block itself makes
            return call(*args, **kwargs)
        counts, waited = run.counts, run.waited
        if input_location in waited:
            args, kwargs = run.offer(run, input_location, (args, kwargs))
            skipped = run.take_skip(input_location) if run.skips else ()
        else:
            counts[input_location] = counts.get(input_location, 0) + 1
            skipped = ()
        output = skipped[0] if skipped else call(*args, **kwargs)
        if output_location in waited:
            return run.offer(run, output_location, output)
        counts[output_location] = counts.get(output_location, 0) + 1
        return output

    intercepted_call.original = call  # type: ignore[attr-defined]
    return intercepted_call


#: Code of every intercepted call, for compilers that must treat it specially.
INTERCEPTED_CODE = next(
    constant for constant in _intercepted.__code__.co_consts if isinstance(constant, types.CodeType)
)


class Instrumentation:
    """Intercepts the calls of a tree of modules while entered.

    Entering nests and may happen in several threads at once.

    Args:
        modules: The modules by path; the path is the prefix of the module's locations.
        traced_call: What an intercepted call does while dynamo traces it; by default it leaves no mark.
    """

    def __init__(self, modules: Mapping[str, torch.nn.Module], traced_call: TracedCall | None = None) -> None:
        self._calls: list[tuple[dict[str, Any], Any]] = []
        for path, module in modules.items():
            call = types.MethodType(_intercepted(path, getattr(module, _METHOD), traced_call), module)
            self._calls.append((module.__dict__, call))
        self._shadowed: list[tuple[dict[str, Any], str, Any]] = []
        self._users = 0
        self._lock = threading.Lock()

    def __enter__(self) -> Instrumentation:
        with self._lock:
            self._users += 1
            if self._users == 1:
                for namespace, call in self._calls:
                    if _METHOD in namespace:
                        self._shadowed.append((namespace, _METHOD, namespace[_METHOD]))
                    if namespace.get(_COMPILED) is not None:
                        self._shadowed.append((namespace, _COMPILED, namespace[_COMPILED]))
                        namespace[_COMPILED] = None
                    namespace[_METHOD] = call
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                for namespace, _ in self._calls:
                    namespace.pop(_METHOD, None)
                for namespace, name, value in self._shadowed:
                    namespace[name] = value
                self._shadowed.clear()
