"""Where autograd has the gradient of a tensor that a block holds, if it is not that tensor.

* An invoke holds rows of a tensor with which the model continues. Gradients flow to the whole tensor, and the rows have their part of it.
* A result of a compiled graph may be a view of the tensor that autograd knows; or autograd may lack a part of its gradient.

``tensor.grad`` in backward blocks follows these sources. Other code may ask torch for the gradient of such a tensor, also after the trace.
So ``torch.autograd.grad``, ``inputs=`` of backward passes, ``register_hook`` and ``retain_grad`` follow them as well, once the first source
is known, and refuse to give a part of a gradient.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch._compile import _disable_dynamo
from torch.autograd.graph import get_gradient_edge
from torch.utils.weak import WeakIdKeyDictionary

if TYPE_CHECKING:
    from .batch_axes import Rows
    from .batching import BatchGroup


class RowsOf(NamedTuple):
    """A step from the gradient of a tensor to that of the rows of ``group`` in it."""

    group: BatchGroup
    rows: Rows

    def take(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the part of ``gradient``: a view."""
        return self.group.take(gradient, self.rows)

    def put(self, gradient: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """Return ``gradient`` with ``new`` in place of its part."""
        return self.group.put("grad", gradient, self.rows, self.take(gradient), new)


class Region(NamedTuple):
    """A step from the gradient of a contiguous tensor to that of a view of its memory."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def take(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the part of ``gradient``: a view, if ``gradient`` is contiguous."""
        return gradient.contiguous().as_strided(*self)

    def put(self, gradient: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """Return ``gradient`` with ``new`` in place of its part."""
        return torch.as_strided_scatter(gradient.contiguous(), new, *self)


class Source(NamedTuple):
    """The tensor in the autograd graph that has the gradient of another tensor, and the steps from its gradient to that of the other."""

    tensor: torch.Tensor
    steps: tuple[RowsOf | Region, ...] = ()

    def part(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the other tensor's part of ``gradient``, the gradient of :attr:`tensor`: a view."""
        return part_of(gradient, self.steps)

    def put(self, gradient: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """Return ``gradient`` with ``new`` in place of :meth:`part`."""
        return _put(gradient, self.steps, new)


def part_of(gradient: torch.Tensor, steps: Sequence[RowsOf | Region]) -> torch.Tensor:
    """Return the part of ``gradient`` to which ``steps`` lead."""
    for step in steps:
        gradient = step.take(gradient)
    return gradient


def _put(gradient: torch.Tensor, steps: Sequence[RowsOf | Region], new: torch.Tensor) -> torch.Tensor:
    if not steps:
        return new
    return steps[0].put(gradient, _put(steps[0].take(gradient), steps[1:], new))


#: The source of a tensor; or a version of the tensor, for which autograd lacks a part of the gradient.
_sources = WeakIdKeyDictionary()

#: The version of each whole tensor of which rows were handed out, at the first time.
_versions = WeakIdKeyDictionary()

#: The version of the whole tensor of rows, and the rows' edge in the autograd graph, when their invoke had last left a location with them.
_left = WeakIdKeyDictionary()


def share_gradient(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Let the gradient of ``tensor`` be that of ``other``. The user holds ``tensor``, which is a view of ``other``."""
    _note(tensor, Source(other))


def share_rows(tensor: torch.Tensor, whole: torch.Tensor, group: BatchGroup, rows: Rows) -> None:
    """Let the gradient of ``tensor`` be its part of the gradient of ``whole``. The user holds ``tensor``, the rows of ``group``."""
    recording = getattr(tensor, "_recording", None)  # of a lazy tensor: it notes the rows until both are computed
    (note_rows if recording is None else recording.note_rows)(tensor, whole, group, rows)


def note_rows(tensor: torch.Tensor, whole: torch.Tensor, group: BatchGroup, rows: Rows) -> None:
    """Note the source of ``tensor``, the rows of ``group`` in ``whole``. Both are computed."""
    with torch._C.DisableTorchFunction():  # a recording must not take these looks at the tensor for some of the block
        if whole.is_inference() or not (whole.is_floating_point() or whole.is_complex()):
            return
        _versions.setdefault(whole, whole._version)
    _note(tensor, Source(whole, (RowsOf(group, rows),)))


def note_turn(tensor: torch.Tensor, whole: torch.Tensor) -> None:
    """Note that an invoke has left a location with ``tensor``, its rows of ``whole``: from now on, other invokes may edit ``whole``."""
    found = _sources.get(tensor)
    if isinstance(found, Source) and found.tensor is whole:
        with torch._C.DisableTorchFunction():  # as in `note_rows`
            _left[tensor] = whole._version, (tensor.grad_fn, tensor.output_nr)


def check_rows(tensor: torch.Tensor, uses: Callable[[], Uses]) -> None:
    """Raise an error if ``tensor``, rows of an invoke, lacks a part of its gradient because another invoke has edited the whole tensor.

    For autograd, an edit in place makes a new version of the whole tensor, and a new edge for the rows. What was computed from the rows
    before the edit hangs on the former edge. ``uses`` returns the :func:`uses_behind` the outputs of the pass, if they are needed.

    Raises:
        ValueError: If the outputs depend on such a result.
    """
    version, edge = _left.get(tensor, (0, None))
    found = _sources.get(tensor)
    if edge is None or not isinstance(found, Source) or found.tensor._version == version or tensor.grad_fn is edge[0]:
        return
    if edge in uses():
        raise ValueError(PATCHED)


#: Why the gradient of rows is not known: the way through what was computed from them before the edit is no part of it.
PATCHED = (
    "The gradient of these rows cannot be computed: another invoke has edited their tensor in place, and the loss may also depend on what "
    "was computed from the rows before. Assign an edited copy in that invoke: `edited = layer.output.clone(); edited[:, -1] = value; "
    "layer.output = edited`."
)


#: Edges of the autograd graph, each a node and the number of its result, with the nodes that use it; ``None`` stands for an output.
Uses = dict[tuple[Any, int], set[Any]]


def uses_behind(outputs: Sequence[Any]) -> Uses:
    """Return the edges through which gradients of ``outputs``, tensors or edges, flow, and the nodes that use them."""
    uses: Uses = {}
    pending: list[tuple[Any, Any, int]] = []
    for output in outputs:
        if not isinstance(output, torch.Tensor):
            pending.append((None, output.node, output.output_nr))
        elif output.requires_grad:  # of another one, autograd complains
            pending.append((None, *get_gradient_edge(output)[:2]))
    seen = set()
    while pending:
        user, node, number = pending.pop()
        if node is None:
            continue
        uses.setdefault((node, number), set()).add(user)
        if node not in seen:
            seen.add(node)
            pending += [(node, *edge) for edge in node.next_functions]
    return uses


_PARTIAL = (
    "The gradient of this tensor cannot be computed: a compiled graph has returned it together with results that depend on it, and "
    "autograd does not know of this dependence. Call `.requires_grad_()` on the tensor in the trace, where you read it, or use "
    "`trace(..., compile=False)`."
)


class _Partial(NamedTuple):
    """The version of a tensor for which autograd lacks a part of the gradient, and the error."""

    version: int
    message: str


def refuse_gradient(tensor: torch.Tensor, message: str = _PARTIAL) -> None:
    """Make ``tensor.grad`` an error until ``tensor`` is edited in place, because autograd would compute only a part of the gradient.

    Torch may still be asked for gradients of losses that depend on no other result of the same graph: those are complete.
    """
    _sources[tensor] = _Partial(tensor._version, message)
    _follow_in_torch()


def source_of(tensor: torch.Tensor) -> Source:
    """Return the source of the gradient of ``tensor``, which often is ``tensor`` itself.

    Raises:
        ValueError: If a compiled graph hides a part of the gradient from autograd.
    """
    found = _sources.get(tensor)
    if isinstance(found, Source) and found.tensor.requires_grad:
        inner = source_of(found.tensor)
        if found.steps and inner.tensor is found.tensor and not _hangs_on(tensor, found.tensor):
            return _source_in_memory(tensor, found.tensor)
        return Source(inner.tensor, inner.steps + found.steps)
    partial = _partial(tensor)
    if partial is not None:
        raise ValueError(partial.message)
    return Source(tensor)


def _partial(tensor: torch.Tensor) -> _Partial | None:
    """Return why the gradient is partial, if a graph hides a part of it. No result of the graph depends on the tensor after an edit."""
    found = _sources.get(tensor)
    return found if isinstance(found, _Partial) and found.version == tensor._version else None


def _hangs_on(tensor: torch.Tensor, whole: torch.Tensor) -> bool:
    """Whether all gradients of ``tensor``, rows of ``whole``, flow through ``whole``.

    They do not if ``whole`` is a view itself and was edited in place: autograd then derives all views from the tensor that owns the memory.
    """
    if whole._base is None and tensor._base is whole:
        return True
    edge, node = (whole.grad_fn, whole.output_nr), tensor.grad_fn
    if whole._version != _versions.get(whole):
        return False
    for _ in range(_MOST_STEPS):
        if node is None or not node.next_functions:
            return False
        if node.next_functions[0] == edge:
            return True
        node = node.next_functions[0][0]
    return False


def _source_in_memory(tensor: torch.Tensor, whole: torch.Tensor) -> Source:
    """Return the tensor that owns the memory of ``tensor``, rows of ``whole``, as its source: it has the parts of all views."""
    base = whole if whole._base is None else whole._base
    if tensor._base is not base or not base.is_contiguous() or base.dtype != tensor.dtype or not base.requires_grad:
        raise ValueError(
            "The gradient of these rows cannot be computed: their tensor was edited in place, and does not share its memory with the rows "
            "in a way that autograd knows. Edit a copy of the value, and assign it to the location."
        )
    offset = tensor.storage_offset() - base.storage_offset()
    return Source(base, (Region(tuple(tensor.shape), tensor.stride(), int(offset)),))


#: Most calls that lead from a tensor to the rows of an invoke: three views, and the two of an alias.
_MOST_STEPS = 6


# -- torch's functions -----------------------------------------------------------------------------------------------


_plain_register_hook: Any = torch.Tensor.register_hook
_plain_retain_grad: Any = torch.Tensor.retain_grad
_plain_grad: Any = torch._C.TensorBase.grad
_plain_run_backward: Any = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

#: The tensors whose gradients are kept for `retain_grad`. Each pass has its own hooks, since an edit in place changes a tensor's node.
_retaining = WeakIdKeyDictionary()

#: The tensors with hooks, or with `retain_grad`, whose gradient may be partial.
_observed = WeakIdKeyDictionary()

_passes = threading.local()  # whether the thread is in a backward pass

#: Makes a context that explains errors of autograd, set by :mod:`nnsight.runtime.gradients`.
explaining: list[Callable[[], contextlib.AbstractContextManager[None]]] = [contextlib.nullcontext]


def _note(tensor: torch.Tensor, source: Source) -> None:
    _sources[tensor] = source
    _follow_in_torch()


def _follow_in_torch() -> None:
    """Let torch's functions about gradients follow sources from now on."""
    if torch.Tensor.register_hook is not _register_hook:
        torch.Tensor.register_hook = _register_hook  # type: ignore[method-assign]
        torch.Tensor.retain_grad = _retain_grad  # type: ignore[method-assign, assignment]
        torch.autograd._engine_run_backward = _run_backward  # type: ignore[attr-defined, assignment]


def _source_for_torch(value: Any) -> Source:
    """Return the source of what torch is asked the gradient of. A tensor whose gradient may be partial is its own."""
    if not isinstance(value, torch.Tensor) or isinstance(_sources.get(value), _Partial):
        return Source(value)
    return source_of(value)


def _check_complete(tensors: Sequence[Any], uses: Callable[[], Uses]) -> None:
    """Raise an error if one of ``tensors`` would get a part of its gradient: the outputs of the pass depend on other results of its graph.

    Raises:
        ValueError: If a compiled graph hides a part of the gradient from autograd.
    """
    for tensor in tensors:
        partial = _partial(tensor) if isinstance(tensor, torch.Tensor) else None
        if partial is not None and tensor.grad_fn is not None:
            view = tensor.grad_fn  # the tensor is a view of a result, or a copy of it, so its node follows that of the graph
            graphs = [graph for graph, _ in view.next_functions if graph is not None]
            if any(node in graphs and users != {view} for (node, _), users in uses().items()):
                raise ValueError(partial.message)


def call(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a torch function in a run. If it is about the gradient of a tensor, follow the tensor's source.

    Raises:
        ValueError: If a compiled graph hides a part of the gradient from autograd.
    """
    following = _FOLLOWING.get(function)
    if following is None:
        return function(*args, **kwargs)
    for value in args[1] if function is torch.autograd.grad else args[:1]:
        source_of(value)
    if following is _register_hook:
        args = (args[0], *(_skipping_none(hook) for hook in args[1:]))
        kwargs = {name: _skipping_none(hook) for name, hook in kwargs.items()}
    return following(*args, **kwargs)


def _skipping_none(hook: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor | None], Any]:
    """Return ``hook``, but not called with None, which autograd passes if only other results of a compiled graph have a gradient."""
    return lambda gradient: None if gradient is None else hook(gradient)


@functools.wraps(_plain_register_hook)
def _register_hook(self: torch.Tensor, hook: Callable[[torch.Tensor], Any]) -> Any:
    if torch.overrides.has_torch_function_unary(self):
        return torch.overrides.handle_torch_function(torch.Tensor.register_hook, (self,), self, hook)
    source = _source_for_torch(self)
    if source.tensor is self:
        if _partial(self) is not None:
            _observed[self] = None
        return _plain_register_hook(self, hook)
    steps = source.steps  # a hook of a tensor that refers to the tensor would keep it alive

    def call_with_part(gradient: torch.Tensor) -> torch.Tensor | None:
        new = hook(part_of(gradient, steps))
        return None if new is None else _put(gradient, steps, new)

    return _register(source.tensor, call_with_part)


def _register(tensor: torch.Tensor, hook: Callable[[torch.Tensor], Any]) -> Any:
    tensor.grad_fn  # noqa: B018 - torch crashes if it finds only in `register_hook` that the base of a view was edited
    return _plain_register_hook(tensor, _skipping_none(hook))


@_disable_dynamo  # in a function that a user compiles, the call breaks the graph, as that of torch's own method does
@functools.wraps(_plain_retain_grad)
def _retain_grad(self: torch.Tensor) -> None:
    if torch.overrides.has_torch_function_unary(self):
        torch.overrides.handle_torch_function(torch.Tensor.retain_grad, (self,), self)
        return
    if _source_for_torch(self).tensor is self:
        if _partial(self) is not None:
            _observed[self] = None
        _plain_retain_grad(self)
    else:
        _retaining[self] = None


def _keep_gradient(tensor: torch.Tensor, source: Source) -> Any:
    """Register a hook that adds the gradient of ``tensor``, which has another ``source``, to ``tensor.grad``."""
    reference, steps = weakref.ref(tensor), source.steps

    def keep(gradient: torch.Tensor) -> None:
        tensor, part = reference(), part_of(gradient, steps)
        if tensor is not None:
            with warnings.catch_warnings(action="ignore"):  # about the `.grad` of a tensor that is not a leaf
                known = _plain_grad.__get__(tensor)
            _plain_grad.__set__(tensor, part.clone() if known is None else known + part)

    return _register(source.tensor, keep)


def _run_backward(outputs: Any, *args: Any, **kwargs: Any) -> Any:
    """Run autograd, as torch's function of this name. The fourth argument after ``outputs`` has the tensors to differentiate by."""
    inputs: Sequence[Any] = args[3]
    uses = functools.cache(lambda: uses_behind(outputs))
    _check_complete([*inputs, *(tensor for tensor in list(_observed) if tensor.retains_grad or tensor._backward_hooks)], uses)
    sources = list(map(_source_for_torch, inputs))
    kept = []
    if kwargs.get("accumulate_grad"):
        kept = [(given, source) for given, source in zip(inputs, sources, strict=True) if source.tensor is not given]
    if _retaining and not getattr(_passes, "running", False):  # the hooks of an outer pass see the gradients of a pass in it
        others = [tensor for tensor in list(_retaining) if not any(tensor is given for given, _ in kept) and tensor.requires_grad]
        kept += [(tensor, _source_for_torch(tensor)) for tensor in others]
    for tensor in [*inputs, *(tensor for tensor, _ in kept)]:
        if isinstance(tensor, torch.Tensor):
            check_rows(tensor, uses)
    hooks = [_keep_gradient(tensor, source) for tensor, source in kept if source.tensor.requires_grad]
    before, _passes.running = getattr(_passes, "running", False), True
    try:
        with explaining[0]():
            found = _plain_run_backward(outputs, *args[:3], tuple(source.tensor for source in sources), *args[4:], **kwargs)
    finally:
        _passes.running = before
        for hook in hooks:
            hook.remove()
    if kwargs.get("accumulate_grad"):
        return found
    return tuple(gradient if gradient is None else source.part(gradient) for source, gradient in zip(sources, found, strict=True))


#: Functions that torch shows to modes, and that are about the gradient of a tensor: what is called instead. Torch may show the plain ones.
_FOLLOWING: dict[Any, Any] = {
    torch.autograd.grad: torch.autograd.grad,
    **dict.fromkeys((_plain_register_hook, _register_hook), _register_hook),
    **dict.fromkeys((_plain_retain_grad, _retain_grad), _retain_grad),
}
