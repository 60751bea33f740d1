"""Backends of ``torch.compile``, by the arguments that a user gives to it.

Inductor lowers backward passes when they first run. With gradients enabled, ahead-of-time autograd makes a graph of the forward pass and
one of the backward pass, which most runs of a notebook never need. If sizes are plain, it lowers the second one on first use. If sizes are
symbolic, it lowers it at once, because the assumptions about sizes would be too late for dynamo's guards. That doubles the time to the
first result of every prompt of a second length.

:func:`_lower` defers it for these, too. If Inductor fails to lower a backward pass early, autograd tries again when the pass runs, so the
early lowering is made to fail. The assumptions of the late one are checked in each run (:class:`_Conditional`); where one fails, the
backward pass runs node by node.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd import graph_compile
from torch._guards import detect_fake_mode
from torch.compiler import config as compiler_config

from ...shared_changes import replaced
from ..torch_compat import LocalSource

#: Compiles ``(graph module, example inputs)`` to a callable, as a backend of ``torch.compile`` does.
BackendCallable = Callable[[torch.fx.GraphModule, list[Any]], Callable[..., Any]]


def resolve_backend(
    backend: Any = "inductor",
    mode: str | None = None,
    options: dict[str, Any] | None = None,
    dynamic: bool | None = None,
) -> BackendCallable:
    """Return the callable that ``torch.compile`` would use for these arguments."""
    if backend == "inductor":
        return _Inductor(mode, options, dynamic)
    return torch._TorchCompileWrapper(backend, mode, options, dynamic)


class _Inductor(torch._TorchCompileInductorWrapper):
    """Inductor with the options of ``torch.compile``; it lowers backward passes when they first run."""

    def __call__(self, model_: torch.fx.GraphModule, inputs_: list[Any], **_: Any) -> Callable[..., Any]:
        return _lower(model_, inputs_, self.config)


def makes_cuda_graphs(backend: BackendCallable) -> bool:
    """Whether code for a GPU that ``backend`` makes is recorded and replayed as a CUDA graph."""
    if not isinstance(backend, _Inductor):
        return False
    from torch._inductor import config

    return bool(backend.config.get("triton.cudagraphs", config.triton.cudagraphs))


def without_fusion(backend: BackendCallable) -> BackendCallable:
    """Return ``backend`` with each operation in a kernel of its own if it is Inductor, for a graph that edits memory its inputs share.

    Such an edit becomes a copy into a part of a buffer. Inductor may fuse it with a read of other parts of that buffer, and then values
    and gradients are wrong (pytorch/pytorch issue 198270).
    """
    if not isinstance(backend, _Inductor):
        return backend
    unfused = copy.copy(backend)
    unfused.config = {**backend.config, "max_fusion_size": 1}
    return unfused


def backend_name(backend: BackendCallable) -> str:
    """Return how a user calls ``backend``."""
    name = getattr(backend, "compiler_name", None) or getattr(backend, "__name__", None)
    return str(name or type(backend).__name__)


logger = logging.getLogger("nnsight.fx")

#: Part of the keys of torch's caches, which know nothing of the changes here: without the tag, another version of this module would find
#: what this one lowered, and this one what torch lowers by itself.
_cache_tag = hashlib.sha256(__name__.encode() + Path(__file__).read_bytes()).hexdigest()[:16]


class _NotYet(Exception):
    """Ends the early lowering of a backward pass."""


def _lower(graph_module: torch.fx.GraphModule, inputs: list[Any], options: dict[str, Any]) -> Callable[..., Any]:
    """Lower a graph with Inductor, as ``torch.compile`` does with fake ``inputs``, and its backward pass when it first runs."""
    from torch._inductor import compile_fx as inductor

    is_forward = not functorch_config.force_non_lazy_backward_lowering

    def compile_inner(graph: torch.fx.GraphModule, example_inputs: Sequence[Any], **settings: Any) -> Any:
        if not settings.get("is_backward"):
            return inductor.compile_fx_inner(graph, example_inputs, **settings)
        if is_forward:
            raise _NotYet
        environment = getattr(detect_fake_mode(example_inputs), "shape_env", None)
        guards = [] if environment is None else environment.guards
        known, as_it_is = len(guards), copy.deepcopy(graph)
        compiled = inductor.compile_fx_inner(graph, example_inputs, **settings)
        assumed = [guard.expr for guard in guards[known:]]
        return _Conditional(compiled, as_it_is, example_inputs, assumed) if assumed else compiled

    _tell_parameters(graph_module)
    try:
        tag = f"{compiler_config.cache_key_tag}nnsight-{_cache_tag}"
        with (
            _silent(),
            _results_kept_apart(),
            replaced(inductor, "select_decomp_table", decompositions),
            cast("Any", compiler_config).patch(cache_key_tag=tag),
        ):
            return cast("Callable[..., Any]", inductor.compile_fx(graph_module, inputs, compile_inner, options))
    finally:
        is_forward = False


def _tell_parameters(graph_module: torch.fx.GraphModule) -> None:
    """Let ahead-of-time autograd see which inputs dynamo found to be parameters of the model.

    They have the same address in each call. Without knowing it, a CUDA graph copies them each time. Dynamo says so at its placeholders, and
    is believed for a graph that looks like one of its own.
    """
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    if any("tensor_dict" in node.meta for node in placeholders) and not [*graph_module.named_parameters(), *graph_module.named_buffers()]:
        graph_module.meta.setdefault("dynamo_compile_id", None)
        graph_module._param_name_to_source = {}  # type: ignore[assignment] # of parameters that the graph holds itself
        for node in placeholders:
            node._dynamo_source = LocalSource(node.name)  # another one for each, or one is taken for a copy of another


@contextlib.contextmanager
def _results_kept_apart() -> Iterator[None]:
    """Keep Inductor from returning one tensor for two results where one is a copy. Only for a holder of the compile lock.

    Inductor drops operations that do nothing, such as a copy or a ``slice_scatter`` of a whole tensor, unless both sides are results. It
    does not notice that a value becomes a result when the operation behind it is dropped. An edit of one result would then show in the
    other, and if one was detached, neither has a gradient. So a copy that shares memory with a result is never dropped.
    """
    from torch._inductor.fx_passes import post_grad
    from torch._inductor.fx_utils import get_node_storage

    remove = post_grad.remove_noop_ops

    def remove_noop_ops(graph: torch.fx.Graph) -> None:
        results = {get_node_storage(node) for node in graph.output_node().all_input_nodes}
        hidden = []
        for node in graph.nodes:
            if node.target in post_grad.noop_registry and get_node_storage(node) in results:
                sources = {get_node_storage(source) for source in node.all_input_nodes}
                if get_node_storage(node) not in sources:
                    hidden.append((node, node.meta.pop("val", None)))  # Inductor drops no node without it
        try:
            remove(graph)
        finally:
            for node, value in hidden:
                node.meta["val"] = value

    with replaced(post_grad, "remove_noop_ops", remove_noop_ops):
        yield


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Return Inductor's decompositions, and one that avoids a wrong lowering of ``x[mask] = value``.

    Inductor's cache writes the name of this function into its keys. With a table in its place nothing would be cached.
    """
    from torch._inductor.decomposition import select_decomp_table

    return {**select_decomp_table(), torch.ops.aten.index_put.default: _masked_fill}


def _masked_fill(
    tensor: torch.Tensor, indices: Sequence[torch.Tensor | None], values: torch.Tensor, accumulate: bool = False
) -> torch.Tensor:
    """Compute ``x[mask] = value`` for one mask and one number with ``where``.

    Inductor replaces the buffer of ``x``, and a matrix product that has read ``x`` before then reads the new values.
    """
    mask = indices[0]
    one = all(isinstance(size, int) and size == 1 for size in values.shape)
    if accumulate or len(indices) != 1 or mask is None or not one or mask.dtype not in (torch.bool, torch.uint8):
        return NotImplemented
    mask = mask.to(device=tensor.device, dtype=torch.bool)[(..., *(None,) * (tensor.ndim - mask.ndim))]
    return torch.where(mask, values.reshape(()).to(device=tensor.device, dtype=tensor.dtype), tensor)


class _Conditional:
    """A lowered backward pass, which runs ``graph_module`` node by node where an assumption about the sizes in its inputs does not hold."""

    def __init__(self, compiled: Callable[..., Any], graph_module: Any, example_inputs: Sequence[Any], assumed: list[Any]) -> None:
        self._boxed_call = True  # it takes a list and empties it
        self._compiled, self._graph_module, self._assumed = compiled, graph_module, assumed
        self._symbols = {number: size.node.expr for number, size in enumerate(example_inputs) if isinstance(size, torch.SymInt)}

    def __call__(self, arguments: list[Any]) -> Any:
        sizes = {symbol: arguments[number] for number, symbol in self._symbols.items()}
        # An assumption about a size that is not among the arguments stays an expression and fails.
        if all(assumption.xreplace(sizes) == True for assumption in self._assumed):  # noqa: E712 - sympy's truth
            return self._compiled(arguments)
        logger.debug("a backward pass runs node by node: sizes %s, assumed %s", sizes, self._assumed)
        taken = list(arguments)
        arguments.clear()
        return self._graph_module(*taken)


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Keep autograd from warning about a deferred backward pass. Only for a holder of the compile lock."""

    def tells_something(record: logging.LogRecord) -> bool:
        return not (record.exc_info and isinstance(record.exc_info[1], _NotYet))

    graph_compile.log.addFilter(tells_something)
    try:
        yield
    finally:
        graph_compile.log.removeFilter(tells_something)
