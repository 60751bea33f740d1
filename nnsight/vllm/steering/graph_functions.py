"""Functions of users as a part of the compiled graph of an engine.

``edits={"modules": [...], "functions": {"clamp": clamp}}`` puts ``clamp`` into the graph, after the tables of each of these layers. Its
first argument is the hidden state after the layer, ``[tokens, hidden]``. The other arguments are parameters with defaults, numbers or
tensors. A default gives the shape of its parameter, and the value for requests that do not pass one. The function gets each parameter with
a row for every token: a number as ``[tokens, 1]``, a vector as ``[tokens, size]``. A request asks for the function with
``layer.steer(use="clamp", limit=3.0)``.

The function is traced once, with make_fx, when the engine starts. Tensors that it uses (the weights of an autoencoder) become buffers of
the layers. The trace is part of the key of vLLM's compile cache, so another function gets another graph. Three kinds of functions are
refused when the engine starts: functions that mix rows, because they would mix requests; functions that draw random numbers, because a
graph would repeat them; and functions that depend on values or on the number of rows in Python, because they cannot be traced.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch

from ...modeling.forms import describe
from .graph_parts import GraphPart

#: Number of rows with which a function is traced, and numbers of rows for which the trace is compared with the function.
_TRACED, _TRIED = 7, (1, 2, 5)


@dataclass(frozen=True, eq=False)
class EditFunction:
    """A traced function that edits hidden states."""

    name: str  # the name by which requests ask for it
    graph: torch.fx.GraphModule  # (hidden state, parameters with a row per token, constants) -> new hidden state
    constants: list[torch.Tensor]  # tensors that the function uses from outside
    defaults: Mapping[str, torch.Tensor]  # defaults of the parameters; a number has the shape `[1]`
    digest: str  # equal for functions with equal names, graphs, tensors and defaults

    @classmethod
    def of(cls, name: str, function: Callable[..., Any], hidden: int, dtype: torch.dtype) -> EditFunction:
        """Trace ``function`` for a hidden state of ``hidden`` channels.

        Raises:
            TypeError: If its arguments are not a hidden state, and parameters whose defaults are numbers or tensors.
            ValueError: If it cannot be traced, does not return a hidden state, or does not edit each row independently.
        """
        place = f"edits={{'functions': {{{name!r}: ...}}}}, {_place_of(function)}"
        defaults = _defaults_of(name, function, place)

        def edited(state: torch.Tensor, *values: torch.Tensor) -> Any:
            return function(state.clone(), **dict(zip(defaults, values, strict=True)))

        def tried(called: Any, first: int = 0, end: int = _TRACED, constants: Sequence[torch.Tensor] = ()) -> Any:
            state = _sample(hidden)[first:end].to(device, dtype)
            given = [value.to(device, dtype).expand(len(state), *value.shape) for value in defaults.values()]
            with torch.no_grad():
                return called(state, *given, *constants)

        accelerator = torch.accelerator.current_accelerator()
        devices = [torch.device("cpu"), *([] if accelerator is None else [accelerator])]  # its own tensors may be on either device
        for device in devices:
            try:
                result = tried(edited)
                break
            except Exception as error:
                if device is devices[-1]:
                    what = f"{type(error).__name__}: {error}"
                    raise ValueError(f"{place} failed on a hidden state {[_TRACED, hidden]}: {what}") from error
        if not isinstance(result, torch.Tensor) or result.shape != (_TRACED, hidden) or result.dtype != dtype:
            found = f"{list(result.shape)} of {result.dtype}" if isinstance(result, torch.Tensor) else describe(result)
            raise ValueError(f"{place} returns {found} for a hidden state {[_TRACED, hidden]} of {dtype}: both have to be alike.")
        if not torch.equal(result, tried(edited)):
            raise ValueError(f"{place} returns something else each time. A graph cannot have random numbers or state.")
        alone = torch.cat([tried(edited, row, row + 1) for row in range(_TRACED)])
        if not torch.allclose(result.float(), alone.float(), rtol=1e-2, atol=1e-3 * float(result.abs().amax())):
            raise ValueError(
                f"{place} mixes rows: its result for a row changes if there are other rows. The rows of a step belong to different "
                "requests, so it must not use the number of rows, or values of several. To look at several tokens, use taps and a block."
            )
        given = [value.to(device, dtype).expand(_TRACED, *value.shape) for value in defaults.values()]
        graph, constants, _ = traced_on(edited, [_sample(hidden).to(device, dtype), *given], place)
        for count in _TRIED:
            expected, got = tried(edited, 0, count), tried(graph, 0, count, constants)
            if got.shape != expected.shape or not torch.allclose(got, expected, rtol=1e-2, atol=1e-5):
                raise ValueError(f"{place} does something else with {count} rows than with {_TRACED}, so one graph cannot replace it.")
        return cls(name, graph, constants, defaults, _digest(name, graph, constants, defaults))

    def part(self, dtype: torch.dtype) -> GraphPart:
        """Return the function as a part of the graph, for hidden states of ``dtype``."""
        defaults = {name: value.to(dtype) for name, value in self.defaults.items()}
        return GraphPart(self.name, self.graph, [*defaults], defaults, self.constants)

    def parameters(self, given: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Add defaults to the parameters that a request gives. Raise ``ValueError`` if one is unknown or has a wrong shape."""
        return completed(f"steer(use={self.name!r}", self.defaults, given)


#: Functions and programs of the engines of this process, by digest. vLLM's configuration is plain data and has only the digests.
_registry: WeakValueDictionary[str, Any] = WeakValueDictionary()


def register(function: Any) -> str:
    """Let workers of this process find a function or program by its digest, as long as it has references. Return the digest."""
    _registry[function.digest] = function
    digest: str = function.digest
    return digest


#: Returns the function or program with a digest.
registered = _registry.__getitem__


def _sample(hidden: int) -> torch.Tensor:
    return torch.randn(_TRACED, hidden, generator=torch.Generator().manual_seed(0), device="cpu")


def _defaults_of(name: str, function: Any, place: str) -> dict[str, torch.Tensor]:
    if not callable(function) or not name.isidentifier():
        raise TypeError(f"edits={{'functions': ...}} is a dict of functions by name, not {{{name!r}: {describe(function)}}}.")
    called = function.forward if isinstance(function, torch.nn.Module) else function
    try:
        parameters = list(inspect.signature(called).parameters.values())
    except ValueError:  # a builtin has no signature
        return {}
    by_name = {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}
    if not parameters or parameters[0].kind not in {inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD}:
        raise TypeError(f"{place} does not take a hidden state as its first argument.")
    defaults = {}
    for parameter in parameters[1:]:
        if parameter.kind not in by_name or parameter.default is inspect.Parameter.empty or parameter.name in RESERVED:
            raise TypeError(
                f"{place}: requests cannot give the parameter `{parameter}`. Each parameter needs a default, which gives its shape, and a "
                f"name that is none of {', '.join(sorted(RESERVED))}."
            )
        defaults[parameter.name] = torch.atleast_1d(finite(f"The parameter {parameter.name!r} of {name!r}", parameter.default))
    return defaults


#: Names that functions cannot use for parameters, because they are parameters of :meth:`LayerEnvoy.steer`.
RESERVED = frozenset({"self", "add", "scale", "remove", "start", "use"})


def finite(what: str, value: Any) -> torch.Tensor:
    """Return a user's number or tensor as float32 on the CPU. Raise ``TypeError`` for other types, ``ValueError`` for inf and NaN."""
    if isinstance(value, bool) or not isinstance(value, (int, float, torch.Tensor)):
        raise TypeError(f"{what} is a number or a tensor, not {describe(value)}.")
    with torch.inference_mode(False):
        tensor = torch.as_tensor(value).detach().to("cpu", torch.float32, copy=True)
    if not torch.isfinite(tensor).all():
        raise ValueError(f"{what} has values that are not finite.")
    return tensor


def fitted(what: str, value: Any, shape: Sequence[int]) -> torch.Tensor:
    """Return :func:`finite` of a value, expanded to ``shape`` if it is a number. Raise ``ValueError`` if it has another shape."""
    tensor = finite(what, value)
    if tensor.dim() == 0:
        return tensor.expand(tuple(shape)).clone()
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"{what} has shape {tuple(tensor.shape)}; it is a number or {list(shape)}.")
    return tensor


def completed(call: str, defaults: Mapping[str, torch.Tensor], given: Mapping[str, Any], why: str = "") -> dict[str, torch.Tensor]:
    """Add ``defaults`` to the parameters of ``call``. Raise ``ValueError`` for a wrong shape or, with the reason ``why``, a wrong name."""
    for name in given:
        if name not in defaults:
            raise ValueError(f"{call}) has no parameter {name!r}{why}. Its parameters: {', '.join(defaults) or 'none'}.")
    return {**defaults, **{name: fitted(f"{call}, {name}=...)", value, defaults[name].shape) for name, value in given.items()}}


def traced_on(called: Any, given: Sequence[Any], place: str) -> tuple[torch.fx.GraphModule, list[torch.Tensor], Any]:
    """Return the graph of ``called`` for any number of rows, the tensors that it uses from outside, and its results for ``given``.
    The tensors from outside become the last arguments of the graph."""
    from torch.fx.experimental.proxy_tensor import make_fx

    try:
        with torch.no_grad():
            found: torch.fx.GraphModule = make_fx(called, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*given)
            results = called(*given)
    except Exception as error:
        raise ValueError(
            f"{place} cannot be traced: {type(error).__name__}: {error}. Control flow must not depend on values: write `torch.where` "
            "instead of `if`."
        ) from error
    constants: dict[str, torch.fx.Node] = {}
    last = found.graph.find_nodes(op="placeholder")[-1]
    for node in found.graph.find_nodes(op="get_attr"):
        name = str(node.target)
        if name not in constants:
            with found.graph.inserting_after(last):
                last = constants[name] = found.graph.placeholder(f"constant_{len(constants)}")
        node.replace_all_uses_with(constants[name])
        found.graph.erase_node(node)
    values = [getattr(found, name).detach().clone() for name in constants]
    return torch.fx.GraphModule(torch.nn.Module(), found.graph), values, results


def _digest(name: str, graph: torch.fx.GraphModule, constants: list[torch.Tensor], defaults: Mapping[str, torch.Tensor]) -> str:
    parts = [name, graph.code]
    for kept, value in (*(("constant", value) for value in constants), *defaults.items()):
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        parts += [kept, str(value.dtype), str(tuple(value.shape)), hashlib.sha256(data).hexdigest()]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _place_of(function: Any) -> str:
    if isinstance(function, torch.nn.Module):
        return f"a module `{type(function).__name__}`"
    code = getattr(function, "__code__", None)
    return f"`{function!r}`" if code is None else f"`{function.__name__}` at {code.co_filename}:{code.co_firstlineno}"
