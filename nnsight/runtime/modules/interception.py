"""Interception of module calls, only while a run is active.

Every call of a module goes through ``Module._call_impl``. The interception wraps this method, so it sees the arguments and the result of
the caller, with the effects of all forward hooks. It is an attribute of the instance that shadows the method of the class. So it is
installed and removed by a dictionary write, in any order, and a module outside of a run is unchanged.

While a run is active, all calls of modules of the tree are *counted*, and *offered* only where a block waits. Without counts, a request for
a module that has already run would be served with a later occurrence. Counting costs a fraction of a microsecond per call.

Runs of several threads share the interception (the first run installs it, the last one removes it) and nothing else: an intercepted call
looks up the run of its own context, and is an ordinary call if there is none. Trees that have modules in common, such as those of a model
and of a part of it, can run at the same time: their interceptions of a module call each other, and each serves its own runs only.
"""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ...shared_changes import SharedChange
from ..interleaver import active_interleaver
from .recorded_outputs import record_replaced, record_skipped

#: Makes a call while dynamo traces it: ``(input location, output location, call, args, kwargs) -> output``.
TracedCall = Callable[[str, str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]

#: Whether dynamo is tracing this call. Outside of dynamo it is much cheaper than `torch.compiler.is_compiling`.
is_compiling = torch.compiler.is_dynamo_compiling

INTERCEPTED_METHOD = "_call_impl"

_ABSENT = object()

#: Set on a module by ``Module.compile``. Calls of the module would then bypass the interception.
_COMPILED = "_compiled_call_impl"

#: The module inside the module that ``torch.compile(module)`` returns. That module calls it compiled, so runs replace its ``forward``.
_ORIGINAL = "_orig_mod"


def intercepted(path: str, traced_call: TracedCall | None, owner: object = None) -> Callable[..., Any]:
    """Return a function that makes a call at ``path``: ``(callable, *args, **kwargs) -> result``.

    While dynamo traces it, it calls ``traced_call``, which puts taps into the graph; ``None`` makes the call without taps.
    The call passes no location in a run of other interceptions than its ``owner``.
    """
    input_location, output_location = f"{path}.input", f"{path}.output"

    def intercepted_call(call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            if traced_call is None:
                return call(*args, **kwargs)
            return traced_call(input_location, output_location, call, args, kwargs)
        run = active_interleaver()
        if run is None or run.current is not None:  # no run in this context, or a call that a block makes
            return call(*args, **kwargs)
        if owner is not None and run.interceptions and owner not in run.interceptions:
            return call(*args, **kwargs)
        counts, waited = run.counts, run.waited
        if not counts:  # the outermost call
            run.begin_call()
        if input_location in waited:
            args, kwargs = run.offer(run, input_location, (args, kwargs))
            skipped = run.take_skip(input_location) if run.skips else ()
        else:
            counts[input_location] = counts.get(input_location, 0) + 1
            skipped = ()
        if skipped:
            output = skipped[0]
            record_skipped(call, args, output)
        else:
            output = call(*args, **kwargs)
        if output_location in waited:
            left = run.offer(run, output_location, output)
            return left if left is output else record_replaced(call, output, left)
        counts[output_location] = counts.get(output_location, 0) + 1
        return output

    return intercepted_call


def _within(path: str, traced_call: TracedCall) -> TracedCall:
    """Return ``traced_call`` for a module inside a compiled one at ``path``: dynamo calls it directly, and passes over the compiled one."""
    input_location, output_location = f"{path}.input", f"{path}.output"

    def call_both(inner_input: str, inner_output: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def inner(*args: Any, **kwargs: Any) -> Any:
            return traced_call(inner_input, inner_output, call, args, kwargs)

        return traced_call(input_location, output_location, inner, args, kwargs)

    return call_both


def call_alone(module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
    """Call a module with its hooks and without interception: the run does not pass the module's own locations."""
    return torch.nn.Module._call_impl(module, *args, **kwargs)


#: The code object that all intercepted calls share, for compilers that must treat it specially.
INTERCEPTED_CODE = next(constant for constant in intercepted.__code__.co_consts if isinstance(constant, types.CodeType))


def _switch_fast_path_off() -> bool:
    """Keep torch from computing a ``TransformerEncoderLayer`` in one kernel without calling its modules; return the former setting.

    Torch uses this kernel without gradients, unless a module has hooks. So results are the same as those of a model with hooks.
    """
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    return before


_module_by_module = SharedChange(_switch_fast_path_off, torch.backends.mha.set_fastpath_enabled)


#: Held while the interceptions of modules are installed or removed, which several trees may have in common.
_chains = threading.Lock()


def _is_intercepted(call: Any) -> bool:
    return getattr(getattr(call, "__func__", None), "__code__", None) is INTERCEPTED_CODE


def tapped_locations(module: torch.nn.Module) -> tuple[str, str] | None:
    """Return the locations between which dynamo traces a call of ``module``, if its method is that of torch, intercepted for one tree."""
    call: Any = vars(module).get(INTERCEPTED_METHOD)
    if not _is_intercepted(call) or getattr(call.__self__, "__func__", None) is not torch.nn.Module._call_impl:
        return None
    found: tuple[str, str] | None = vars(call.__func__).get("tapped_locations")
    return found


def _unlink(namespace: dict[str, Any], function: Any) -> None:
    """Remove the interception by ``function`` from those of a module; the interceptions that other trees installed over it stay."""
    call: Any = namespace.get(INTERCEPTED_METHOD)
    above: list[Callable[..., Any]] = []
    while _is_intercepted(call) and call.__func__ is not function:
        above.append(call.__func__)
        call = call.__self__
    if not _is_intercepted(call):
        return
    call = call.__self__
    for other in reversed(above):
        call = types.MethodType(other, call)
    if _is_intercepted(call):
        namespace[INTERCEPTED_METHOD] = call
    else:
        del namespace[INTERCEPTED_METHOD]


#: Attributes that active instrumentations replace: namespace, the value before (`_ABSENT` for none), and the replacements by owner.
_replaced: dict[tuple[int, str], tuple[dict[str, Any], Any, dict[object, Any]]] = {}


def _put(namespace: dict[str, Any], name: str, value: Any, owner: object) -> None:
    """Replace an attribute for ``owner``, over the replacements of others. The caller holds :data:`_chains`."""
    _, _, values = _replaced.setdefault((id(namespace), name), (namespace, namespace.get(name, _ABSENT), {}))
    values[owner] = value
    namespace[name] = _of_each_run(values)


def _take_away(key: tuple[int, str], owner: object) -> None:
    """Remove the replacement of ``owner``, which need not be the latest. The attribute is as before when no replacement is left."""
    namespace, before, values = _replaced[key]
    del values[owner]
    if values:
        namespace[key[1]] = _of_each_run(values)
        return
    del _replaced[key]
    if before is _ABSENT:
        namespace.pop(key[1], None)
    else:
        namespace[key[1]] = before


def _of_each_run(values: dict[object, Any]) -> Any:
    """Return the latest of the replacements ``values``, or a function that calls the one of the active run if they differ."""
    latest = next(reversed(values.values()))
    if all(value == latest for value in values.values()):
        return latest

    def call(*args: Any, **kwargs: Any) -> Any:
        run = None if is_compiling() else active_interleaver()
        owner = None if run is None else next((known for known in reversed(run.interceptions) if known in values), None)
        return (latest if owner is None else values[owner])(*args, **kwargs)

    return functools.update_wrapper(call, latest, ("__self__",))  # with its object, so that another run can replace it in turn


class Instrumentation:
    """A context manager that intercepts the calls of ``modules``, given by path, the prefix of their locations.

    It can be entered several times at once, nested or in several threads.
    """

    def __init__(self, modules: Mapping[str, torch.nn.Module], traced_call: TracedCall | None = None) -> None:
        self._traced_call = traced_call
        self._identity = object()  # not this object: the calls refer to it, and would keep each other alive
        self._calls = self._intercepted(modules)
        self._has_fast_path = any(isinstance(module, torch.nn.TransformerEncoderLayer) for module in modules.values())
        self._functions: dict[str, Callable[[], tuple[dict[str, Any], str, Any]]] = {}
        self._installed: set[tuple[int, str]] = set()  # the keys of its replacements in `_replaced`
        self._users = 0
        self._lock = threading.RLock()

    def _intercepted(self, modules: Mapping[str, torch.nn.Module]) -> list[tuple[dict[str, Any], Any]]:
        """Return the namespace of each module, and its intercepted call."""
        calls: list[tuple[dict[str, Any], Any]] = []
        for path, module in modules.items():
            call = getattr(module, INTERCEPTED_METHOD)
            while _is_intercepted(call):
                call = call.__self__  # the interception of another tree, installed right now, is bound to the original call
            traced, (outer, _, name) = self._traced_call, path.rpartition(".")
            if traced is not None and name == _ORIGINAL and outer in modules:
                traced = _within(outer, traced)
            function = intercepted(path, traced, self._identity)
            if traced is self._traced_call is not None:
                function.tapped_locations = f"{path}.input", f"{path}.output"  # type: ignore[attr-defined]
            calls.append((module.__dict__, types.MethodType(function, call)))  # the original call becomes the first argument
        return calls

    def include(self, modules: Mapping[str, torch.nn.Module]) -> None:
        """Intercept the calls of these modules, too. Active runs pass their locations from now on."""
        with self._lock:
            calls = self._intercepted(modules)
            self._calls += calls
            if self._users:
                with _chains:
                    self._install_calls(calls)

    def _install_calls(self, calls: list[tuple[dict[str, Any], Any]]) -> None:
        for namespace, call in calls:
            present = namespace.setdefault(INTERCEPTED_METHOD, call)
            if _is_intercepted(present) and present is not call:  # by another tree, whose runs go on
                namespace[INTERCEPTED_METHOD] = types.MethodType(call.__func__, present)
            elif present is not call:
                self._install(namespace, INTERCEPTED_METHOD, call)
            if _COMPILED in namespace:
                self._install(namespace, _COMPILED, None)
            if _ORIGINAL in namespace.get("_modules", ()) and "dynamo_ctx" in namespace:
                self._install(namespace, "forward", namespace["_modules"][_ORIGINAL].__call__)

    def replace(self, path: str, replacement: Callable[[], tuple[dict[str, Any], str, Any]]) -> None:
        """During runs, also replace an attribute of the instance at ``path``. This includes runs that are already active.

        ``replacement`` is called when a run begins. It returns the namespace of the instance, the attribute, and its value for the run.
        """
        with self._lock:
            self._functions[path] = replacement
            if self._users:
                with _chains:
                    self._install(*replacement())

    def __enter__(self) -> Instrumentation:
        run = active_interleaver()
        if run is not None:
            run.interceptions.append(self._identity)
        with self._lock:
            if self._users == 0:
                with _chains:
                    replacements = [replacement() for replacement in self._functions.values()]
                    self._install_calls(self._calls)
                    for replacement in replacements:
                        self._install(*replacement)
                if self._has_fast_path:
                    _module_by_module.__enter__()
            self._users += 1
        return self

    def _install(self, namespace: dict[str, Any], name: str, value: Any) -> None:
        self._installed.add((id(namespace), name))
        _put(namespace, name, value, self._identity)

    def __exit__(self, *_: object) -> None:
        run = active_interleaver()
        if run is not None and run.interceptions:
            run.interceptions.pop()
        with self._lock:
            self._users -= 1
            if self._users == 0:
                with _chains:
                    for namespace, call in self._calls:
                        if namespace.get(INTERCEPTED_METHOD) is call:
                            del namespace[INTERCEPTED_METHOD]
                        else:
                            _unlink(namespace, call.__func__)
                    for key in self._installed:
                        _take_away(key, self._identity)
                self._installed.clear()
                if self._has_fast_path:
                    _module_by_module.__exit__()
