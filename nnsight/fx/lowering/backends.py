"""Backends of ``torch.compile``, and backward passes that Inductor lowers on first use.

With gradients enabled, ahead-of-time autograd makes two graphs: one of the forward pass, and one of the backward pass, which most runs of
a notebook never need. If sizes are plain, it lowers the backward graph on first use. If sizes are symbolic, it lowers the graph at once,
because assumptions about sizes would come too late for dynamo's guards. That would double the time to the first result for every prompt of
a second length.

:func:`_lower` defers the backward graph in this case, too. If Inductor fails to lower a backward graph early, autograd lowers it when it
first runs. So the early lowering is made to fail. The assumptions of the late lowering are checked in each run (:class:`_GuardedBackward`).
If one does not hold, the backward pass runs node by node.
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
    """Inductor with the options of ``torch.compile``. It lowers backward passes when they first run."""

    def __call__(self, model_: torch.fx.GraphModule, inputs_: list[Any], **_: Any) -> Callable[..., Any]:
        return _lower(model_, inputs_, self.config)


def makes_cuda_graphs(backend: BackendCallable) -> bool:
    """Whether the GPU code of ``backend`` is recorded and replayed as a CUDA graph."""
    if not isinstance(backend, _Inductor):
        return False
    from torch._inductor import config

    return bool(backend.config.get("triton.cudagraphs", config.triton.cudagraphs))


def without_fusion(backend: BackendCallable) -> BackendCallable:
    """Return ``backend`` for a graph that edits memory which its inputs share: Inductor then puts each operation into its own kernel.

    Such an edit becomes a copy into a part of a buffer. Inductor may fuse it with a read of other parts of that buffer, and then values
    and gradients are wrong (pytorch/pytorch issue 198270).
    """
    if not isinstance(backend, _Inductor):
        return backend
    unfused = copy.copy(backend)
    unfused.config = {**backend.config, "max_fusion_size": 1}
    return unfused


def backend_name(backend: BackendCallable) -> str:
    """Return the name of ``backend``, for users."""
    name = getattr(backend, "compiler_name", None) or getattr(backend, "__name__", None)
    return str(name or type(backend).__name__)


logger = logging.getLogger("nnsight.fx")

#: Part of the keys of torch's caches on disk. The changes of this module are not part of these keys, so without the tag this module would
#: load code that torch, or another version of this module, has lowered.
_cache_tag = hashlib.sha256(__name__.encode() + Path(__file__).read_bytes()).hexdigest()[:16]


class _BackwardDeferred(Exception):
    """Ends the early lowering of a backward pass."""


def _lower(graph_module: torch.fx.GraphModule, inputs: list[Any], options: dict[str, Any]) -> Callable[..., Any]:
    """Lower a graph with Inductor, as ``torch.compile`` does with fake ``inputs``. Its backward pass is lowered when it first runs."""
    from torch._inductor import compile_fx as inductor

    is_forward = not functorch_config.force_non_lazy_backward_lowering

    def compile_inner(graph: torch.fx.GraphModule, example_inputs: Sequence[Any], **settings: Any) -> Any:
        if not settings.get("is_backward"):
            return inductor.compile_fx_inner(graph, example_inputs, **settings)
        if is_forward:
            raise _BackwardDeferred
        environment = getattr(detect_fake_mode(example_inputs), "shape_env", None)
        guards = [] if environment is None else environment.guards
        known, unlowered = len(guards), copy.deepcopy(graph)
        compiled = inductor.compile_fx_inner(graph, example_inputs, **settings)
        assumed = [guard.expr for guard in guards[known:]]
        return _GuardedBackward(compiled, unlowered, example_inputs, assumed) if assumed else compiled

    _mark_parameters(graph_module)
    try:
        tag = f"{compiler_config.cache_key_tag}nnsight-{_cache_tag}"
        with (
            _without_deferral_warnings(),
            _without_aliased_results(),
            replaced(inductor, "select_decomp_table", decompositions),
            cast("Any", compiler_config).patch(cache_key_tag=tag),
        ):
            return cast("Callable[..., Any]", inductor.compile_fx(graph_module, inputs, compile_inner, options))
    finally:
        is_forward = False


def _mark_parameters(graph_module: torch.fx.GraphModule) -> None:
    """Tell ahead-of-time autograd which inputs are parameters of the model.

    Parameters have the same address in each call. A CUDA graph copies inputs in each call, unless it knows that. Dynamo marks parameters
    at its placeholders, but autograd reads these marks only from a graph module that has the attributes of one of dynamo's own.
    """
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    if any("tensor_dict" in node.meta for node in placeholders) and not [*graph_module.named_parameters(), *graph_module.named_buffers()]:
        graph_module.meta.setdefault("dynamo_compile_id", None)
        graph_module._param_name_to_source = {}  # type: ignore[assignment] # for parameters that are attributes of the module
        for node in placeholders:
            node._dynamo_source = LocalSource(node.name)  # equal sources would make autograd take two inputs for one


@contextlib.contextmanager
def _without_aliased_results() -> Iterator[None]:
    """Keep Inductor from returning one tensor for a result and its copy. The caller must hold the compile lock.

    Inductor drops operations that do nothing, such as a copy or a ``slice_scatter`` of a whole tensor, unless both sides are results. It
    does not notice that the input of a dropped operation becomes a result. An edit of one result would then show in the other, and if one
    was detached, neither would have a gradient. So a copy that shares memory with a result is never dropped.
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
    """Return Inductor's decompositions, with one more that avoids a wrong lowering of ``x[mask] = value``.

    Inductor needs a function here, not a table: its cache uses the name of the function in its keys, and caches nothing for a table.
    """
    from torch._inductor.decomposition import select_decomp_table

    return {**select_decomp_table(), torch.ops.aten.index_put.default: _masked_fill}


def _masked_fill(
    tensor: torch.Tensor, indices: Sequence[torch.Tensor | None], values: torch.Tensor, accumulate: bool = False
) -> torch.Tensor:
    """Compute ``x[mask] = value`` with ``where``, for one mask and one number.

    Inductor's own lowering replaces the buffer of ``x``, so that a matrix product before the edit reads the new values.
    """
    mask = indices[0]
    one = all(isinstance(size, int) and size == 1 for size in values.shape)
    if accumulate or len(indices) != 1 or mask is None or not one or mask.dtype not in (torch.bool, torch.uint8):
        return NotImplemented
    mask = mask.to(device=tensor.device, dtype=torch.bool)[(..., *(None,) * (tensor.ndim - mask.ndim))]
    return torch.where(mask, values.reshape(()).to(device=tensor.device, dtype=tensor.dtype), tensor)


class _GuardedBackward:
    """A lowered backward pass with guards on sizes. If an assumption in ``assumed`` fails, ``graph_module`` runs node by node.

    A tensor may then have other strides than in the lowering, where Inductor chose them. So a ``view`` of one may have to be a copy.
    """

    def __init__(self, compiled: Callable[..., Any], graph_module: Any, example_inputs: Sequence[Any], assumed: list[Any]) -> None:
        self._boxed_call = True  # tells autograd that the arguments come as a list, which the call empties
        self._compiled, self._graph_module, self._assumed = compiled, graph_module, assumed
        self._symbols = {number: size.node.expr for number, size in enumerate(example_inputs) if isinstance(size, torch.SymInt)}
        for node in graph_module.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
            node.target = torch.ops.aten.reshape.default
        graph_module.recompile()

    def __call__(self, arguments: list[Any]) -> Any:
        sizes = {symbol: arguments[number] for number, symbol in self._symbols.items()}
        # An assumption about a size that is not among the arguments stays symbolic, so it counts as failed.
        if all(assumption.xreplace(sizes) == True for assumption in self._assumed):  # noqa: E712 - sympy's truth
            return self._compiled(arguments)
        logger.debug("a backward pass runs node by node: sizes %s, assumed %s", sizes, self._assumed)
        taken = list(arguments)
        arguments.clear()
        return self._graph_module(*taken)


@contextlib.contextmanager
def _without_deferral_warnings() -> Iterator[None]:
    """Keep autograd from warning about a deferred backward pass. The caller must hold the compile lock."""

    def is_other(record: logging.LogRecord) -> bool:
        return not (record.exc_info and isinstance(record.exc_info[1], _BackwardDeferred))

    graph_compile.log.addFilter(is_other)
    try:
        yield
    finally:
        graph_compile.log.removeFilter(is_other)
