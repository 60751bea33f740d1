"""Functions of users as a part of the compiled graph of an engine.

``edits={"modules": [...], "functions": {"clamp": clamp}}`` puts ``clamp`` into the graph, behind the tables of each of these layers. Its
first argument is the hidden state after the layer, ``[tokens, hidden]``; the others are parameters, each with a default, a number or a
tensor, that says what shape it has and what it is for requests that do not say. The function gets each with a row for every token: a number
as ``[tokens, 1]``, a vector as ``[tokens, size]``. A request asks for it with ``layer.steer(use="clamp", limit=3.0)``. Which function a row
of the batch goes through, with what parameters, is data in tables, as for other edits (:mod:`~nnsight.vllm.steering.tables`): another
request or another value compiles nothing.

The function is traced once, with make_fx, when the engine starts. Tensors that it uses (the weights of an autoencoder) become buffers of
the layers. What is traced is part of the key of vLLM's compile cache, so that another function is another graph. A function that mixes
rows would mix requests, one that draws random numbers would do so for all rows alike, and one that looks at values or at the number of rows
cannot be traced: all are found out and refused.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakValueDictionary

import torch

from ...modeling.forms import describe

#: Rows with which a function is traced, and with which it has to do the same as its trace.
_TRACED, _TRIED = 7, (1, 2, 5)


@dataclass(frozen=True, eq=False)
class EditFunction:
    """A function that edits hidden states, traced.

    Attributes:
        name: What requests call it.
        graph: Takes the hidden state, ``[tokens, hidden]``, each parameter with a row for each token, and the constants; returns the new
            hidden state.
        constants: Tensors that the function uses.
        defaults: The parameters of requests that do not give them, by name: of a number ``[1]``, else of the shape of the default.
        digest: Equal for functions whose graphs, tensors and defaults are equal.
    """

    name: str
    graph: torch.fx.GraphModule
    constants: list[torch.Tensor]
    defaults: Mapping[str, torch.Tensor]
    digest: str

    @classmethod
    def of(cls, name: str, function: Callable[..., Any], hidden: int, dtype: torch.dtype) -> EditFunction:
        """Trace ``function``.

        Args:
            name: What requests call it.
            function: Takes the hidden state, and parameters with defaults.
            hidden: Channels of the hidden state.
            dtype: Of the hidden state.

        Raises:
            TypeError: If it is no function of a hidden state and parameters with defaults that are numbers or tensors.
            ValueError: If it cannot be traced, returns something else than a hidden state, or does not edit each row by itself.
        """
        defaults = _defaults_of(name, function)
        place = f"edits={{'functions': {{{name!r}: ...}}}}, {_place_of(function)}"

        def edited(state: torch.Tensor, *values: torch.Tensor) -> Any:
            return function(state.clone(), **dict(zip(defaults, values, strict=True)))

        def tried(called: Any, rows: slice, *constants: torch.Tensor) -> Any:
            state = _random(_TRACED, hidden, dtype)[rows].to(device)
            given = [value.to(device, dtype).expand(len(state), *value.shape) for value in defaults.values()]
            with torch.no_grad():
                return called(state, *given, *constants)

        whole = slice(0, _TRACED)
        devices = _devices()  # where its own tensors are is not known
        while True:
            device = devices.pop(0)
            try:
                result = tried(edited, whole)
                break
            except Exception as error:
                if not devices:
                    what = f"{type(error).__name__}: {error}"
                    raise ValueError(f"{place} failed on a hidden state {[_TRACED, hidden]}: {what}") from error
        if not isinstance(result, torch.Tensor) or result.shape != (_TRACED, hidden) or result.dtype != dtype:
            raise ValueError(
                f"{place} returns {_form_of(result)} for a hidden state {[_TRACED, hidden]} of {dtype}: it has to return one like it."
            )
        if not torch.equal(result, tried(edited, whole)):
            raise ValueError(f"{place} returns something else each time. What it draws, or remembers, cannot be in a graph.")
        alone = torch.cat([tried(edited, slice(row, row + 1)) for row in range(_TRACED)])
        if not torch.allclose(result.float(), alone.float(), rtol=1e-2, atol=1e-3 * float(result.abs().amax())):
            raise ValueError(
                f"{place} mixes rows, or looks at their number or at values of all: what it returns for a row is not what it returns for "
                "this row alone. The rows of a step belong to different requests. For what looks at several tokens use taps, and a block."
            )
        graph, constants = _traced(place, edited, tried)
        for count in _TRIED:
            expected, found = tried(edited, slice(0, count)), tried(graph, slice(0, count), *constants)
            if found.shape != expected.shape or not torch.allclose(found, expected, rtol=1e-2, atol=1e-5):
                raise ValueError(f"{place} does something else for {count} rows than for {_TRACED}: its graph cannot.")
        return cls(name, graph, constants, defaults, _digest(name, graph, constants, defaults))

    def to(self, device: torch.device) -> EditFunction:
        """Return the same with its constants on ``device``."""
        return replace(self, constants=[constant.to(device) for constant in self.constants])

    def parameters(self, given: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return all parameters of a request that gives some of them.

        Raises:
            ValueError: For an unknown one, another shape, or values that are not finite.
            TypeError: For what is no number or tensor.
        """
        unknown = [name for name in given if name not in self.defaults]
        if unknown:
            names = ", ".join(self.defaults) or "none"
            raise ValueError(f"steer(use={self.name!r}) has no parameter {unknown[0]!r}. Its parameters: {names}.")
        asked = {name: _value(self.name, name, value, self.defaults[name]) for name, value in given.items()}
        return {name: asked.get(name, default) for name, default in self.defaults.items()}

    def __call__(self, hidden: torch.Tensor, parameters: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the new hidden state for the ``parameters`` of one request, which all rows of ``hidden`` belong to."""
        values = [parameters[name].to(hidden).expand(len(hidden), *parameters[name].shape) for name in self.defaults]
        found: torch.Tensor = self.graph(hidden, *values, *(constant.to(hidden.device) for constant in self.constants))
        return found


#: Functions that engines of this process have been made with, by digest: vLLM's configuration, which is plain data, has the digests.
_known: WeakValueDictionary[str, EditFunction] = WeakValueDictionary()


def register(function: EditFunction) -> str:
    """Let workers of this process find ``function`` by its digest, which is returned."""
    _known[function.digest] = function
    return function.digest


def registered(digest: str) -> EditFunction:
    """Return the function with this digest."""
    return _known[digest]


def _defaults_of(name: str, function: Any) -> dict[str, torch.Tensor]:
    if not callable(function) or not name.isidentifier():
        raise TypeError(f"edits={{'functions': ...}} is a dict of functions by name, not {{{name!r}: {describe(function)}}}.")
    called = function.forward if isinstance(function, torch.nn.Module) else function
    place = f"edits={{'functions': {{{name!r}: ...}}}}, {_place_of(function)}"
    try:
        parameters = list(inspect.signature(called).parameters.values())
    except ValueError:  # a builtin, which says nothing
        return {}
    by_name = {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}
    if not parameters or parameters[0].kind not in {inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD}:
        raise TypeError(f"{place} takes no hidden state as its first argument.")
    defaults = {}
    for parameter in parameters[1:]:
        if parameter.kind not in by_name or parameter.default is inspect.Parameter.empty or parameter.name in _TAKEN:
            raise TypeError(
                f"{place}: the parameter `{parameter}` cannot be given by requests. Each has a default, which says its shape, and a name "
                f"of its own, none of {', '.join(sorted(_TAKEN))}."
            )
        defaults[parameter.name] = torch.atleast_1d(_tensor(name, parameter.name, parameter.default))
    return defaults


#: What :meth:`LayerEnvoy.steer` has parameters of its own for.
_TAKEN = frozenset({"self", "add", "scale", "remove", "start", "use"})


def _tensor(function: str, name: str, value: Any) -> torch.Tensor:
    if isinstance(value, bool) or not isinstance(value, (int, float, torch.Tensor)):
        raise TypeError(f"The parameter {name!r} of {function!r} is a number or a tensor, not {describe(value)}.")
    with torch.inference_mode(False):
        tensor = torch.as_tensor(value).detach().to("cpu", torch.float32, copy=True)
    if not torch.isfinite(tensor).all():
        raise ValueError(f"The parameter {name!r} of {function!r} has values that are not finite.")
    return tensor


def _value(function: str, name: str, value: Any, default: torch.Tensor) -> torch.Tensor:
    tensor = _tensor(function, name, value)
    if tensor.dim() == 0:
        return tensor.expand(default.shape).clone()
    if tensor.shape != default.shape:
        raise ValueError(f"steer(use={function!r}, {name}=...) has shape {tuple(tensor.shape)}; it is a number or {list(default.shape)}.")
    return tensor


def _devices() -> list[torch.device]:
    """Return where functions are tried: on the processor, and then on an accelerator if there is one."""
    accelerator = torch.accelerator.current_accelerator()
    return [torch.device("cpu")] + ([] if accelerator is None else [accelerator])


def _random(rows: int, hidden: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(rows, hidden, generator=torch.Generator().manual_seed(0)).to(dtype)


def _traced(place: str, edited: Any, tried: Any) -> tuple[torch.fx.GraphModule, list[torch.Tensor]]:
    """Return the graph of a function, and the tensors that it uses, which are its last arguments."""
    from torch.fx.experimental.proxy_tensor import make_fx

    try:
        with torch.no_grad():
            found: torch.fx.GraphModule = tried(
                make_fx(edited, tracing_mode="symbolic", _allow_non_fake_inputs=True), slice(0, _TRACED)
            )
    except Exception as error:
        raise ValueError(
            f"{place} cannot be traced: {type(error).__name__}: {error}. In a graph nothing may depend on values: write `torch.where` in "
            "place of `if`."
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
    return torch.fx.GraphModule(torch.nn.Module(), found.graph), values


def _digest(name: str, graph: torch.fx.GraphModule, constants: list[torch.Tensor], defaults: Mapping[str, torch.Tensor]) -> str:
    parts = [name, graph.code]
    for kept, value in (*(("constant", value) for value in constants), *defaults.items()):
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        parts += [kept, str(value.dtype), str(tuple(value.shape)), hashlib.sha256(data).hexdigest()]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _form_of(result: Any) -> str:
    return f"{list(result.shape)} of {result.dtype}" if isinstance(result, torch.Tensor) else describe(result)


def _place_of(function: Any) -> str:
    if isinstance(function, torch.nn.Module):
        return f"a module `{type(function).__name__}`"
    code = getattr(function, "__code__", None)
    if code is None:
        return f"`{function!r}`"
    return f"`{function.__name__}` at {code.co_filename}:{code.co_firstlineno}"
