"""Where autograd has the gradient of a tensor that a block holds, if it is not that tensor.

* An invoke holds rows of a tensor with which the model continues. Gradients flow to the whole tensor, and the rows have their part of it.
* A result of a compiled graph may be a view of the tensor that autograd knows; or autograd may lack a part of its gradient.

``tensor.grad`` in backward blocks follows these sources. Other code may ask torch for the gradient of such a tensor, also after the trace.
So ``torch.autograd.grad``, ``inputs=`` of backward passes, ``register_hook`` and ``retain_grad`` follow them as well, once the first rows
or views are handed out.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary

if TYPE_CHECKING:
    from .batch_axes import Rows
    from .batching import BatchGroup


class Source(NamedTuple):
    """The tensor in the autograd graph that has the gradient of another tensor, and the rows of that one if it has not all of them."""

    tensor: torch.Tensor
    group: BatchGroup | None = None
    rows: Rows | None = None

    def part(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the other tensor's part of ``gradient``, the gradient of :attr:`tensor`: a view."""
        return gradient if self.group is None or self.rows is None else self.group.take(gradient, self.rows)

    def put(self, gradient: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """Return ``gradient`` with ``new`` in place of :meth:`part`."""
        if self.group is None or self.rows is None:
            return new
        return self.group.put("grad", gradient, self.rows, self.part(gradient), new)


#: The source of a tensor; or a version of the tensor, for which autograd lacks a part of the gradient.
_sources = WeakIdKeyDictionary()

_lock = threading.Lock()


def share_gradient(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Let the gradient of ``tensor`` be that of ``other``. The user holds ``tensor``, which is a view of ``other``."""
    _note(tensor, Source(other))


def share_rows(tensor: torch.Tensor, whole: torch.Tensor, group: BatchGroup, rows: Rows) -> None:
    """Let the gradient of ``tensor`` be its part of the gradient of ``whole``. The user holds ``tensor``, the rows of ``group``."""
    if torch.overrides.has_torch_function((tensor, whole)):  # a recording notes it until both are computed
        torch.overrides.handle_torch_function(share_rows, (tensor, whole), tensor, whole, group, rows)
    else:
        _note(tensor, Source(whole, group, rows))


def refuse_gradient(tensor: torch.Tensor) -> None:
    """Make ``tensor.grad`` an error until ``tensor`` is edited in place, because autograd would compute only a part of the gradient."""
    _sources[tensor] = tensor._version


def source_of(tensor: torch.Tensor) -> Source:
    """Return the source of the gradient of ``tensor``, which often is ``tensor`` itself.

    Raises:
        ValueError: If a compiled graph hides a part of the gradient from autograd.
    """
    found = _sources.get(tensor)
    if isinstance(found, Source) and found.tensor.requires_grad:
        return found._replace(tensor=source_of(found.tensor).tensor)
    if isinstance(found, int) and found == tensor._version:  # after an edit in place, no result of the graph depends on the present version
        raise ValueError(
            "The gradient of this tensor cannot be computed: a compiled graph has returned it together with results that depend on "
            "it, and autograd does not know of this dependence. Call `.requires_grad_()` on the tensor in the trace, where you read "
            "it, or use `trace(..., compile=False)`."
        )
    return Source(tensor)


# -- torch's functions -----------------------------------------------------------------------------------------------


_plain_register_hook: Any = torch.Tensor.register_hook
_plain_retain_grad: Any = torch.Tensor.retain_grad
_plain_run_backward: Any = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

#: The tensors whose gradients are kept for `retain_grad`.
_retaining = WeakIdKeyDictionary()


def _note(tensor: torch.Tensor, source: Source) -> None:
    _sources[tensor] = source
    with _lock:
        if torch.Tensor.register_hook is not _register_hook:
            torch.Tensor.register_hook = _register_hook  # type: ignore[method-assign]
            torch.Tensor.retain_grad = _retain_grad  # type: ignore[method-assign, assignment]
            torch.autograd._engine_run_backward = _run_backward  # type: ignore[attr-defined, assignment]


def _source_for_torch(value: Any) -> Source:
    """Return the source of what torch is asked the gradient of. Outside of runs, torch itself reports the gradients that it lacks."""
    with contextlib.suppress(ValueError):
        if isinstance(value, torch.Tensor):
            return source_of(value)
    return Source(value)


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
    return following(*args, **kwargs)


@functools.wraps(_plain_register_hook)
def _register_hook(self: torch.Tensor, hook: Callable[[torch.Tensor], Any]) -> Any:
    if torch.overrides.has_torch_function_unary(self):
        return torch.overrides.handle_torch_function(torch.Tensor.register_hook, (self,), self, hook)
    source = _source_for_torch(self)
    if source.tensor is self:
        return _plain_register_hook(self, hook)

    def call_with_part(gradient: torch.Tensor) -> torch.Tensor | None:
        new = hook(source.part(gradient))
        return None if new is None else source.put(gradient, new)

    return _plain_register_hook(source.tensor, call_with_part)


@functools.wraps(_plain_retain_grad)
def _retain_grad(self: torch.Tensor) -> None:
    if torch.overrides.has_torch_function_unary(self):
        torch.overrides.handle_torch_function(torch.Tensor.retain_grad, (self,), self)
        return
    source = _source_for_torch(self)
    if source.tensor is self:
        _plain_retain_grad(self)
    elif self not in _retaining:
        _retaining[self] = _keep_gradient(self, source)


def _keep_gradient(tensor: torch.Tensor, source: Source) -> Any:
    """Register a hook that adds the gradient of ``tensor``, which has another ``source``, to ``tensor.grad``."""
    reference = weakref.ref(tensor)

    def keep(gradient: torch.Tensor) -> None:
        tensor, part = reference(), source.part(gradient)
        if tensor is not None:
            tensor.grad = part.clone() if tensor.grad is None else tensor.grad + part

    return _plain_register_hook(source.tensor, keep)


def _run_backward(outputs: Any, *args: Any, **kwargs: Any) -> Any:
    """Run autograd, as torch's function of this name. The fourth argument after ``outputs`` has the tensors to differentiate by."""
    inputs: Sequence[Any] = args[3]
    sources = list(map(_source_for_torch, inputs))
    if all(source.tensor is given for source, given in zip(sources, inputs, strict=True)):
        return _plain_run_backward(outputs, *args, **kwargs)
    known = *args[:3], tuple(source.tensor for source in sources), *args[4:]
    if not kwargs.get("accumulate_grad"):
        found = _plain_run_backward(outputs, *known, **kwargs)
        return tuple(gradient if gradient is None else source.part(gradient) for source, gradient in zip(sources, found, strict=True))
    hooks = [_keep_gradient(given, source) for given, source in zip(inputs, sources, strict=True) if source.tensor is not given]
    try:
        return _plain_run_backward(outputs, *known, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()


#: Functions that torch shows to modes, and that are about the gradient of a tensor: what is called instead. Torch may show the plain ones.
_FOLLOWING: dict[Any, Any] = {
    torch.autograd.grad: torch.autograd.grad,
    **dict.fromkeys((_plain_register_hook, _register_hook), _register_hook),
    **dict.fromkeys((_plain_retain_grad, _retain_grad), _retain_grad),
}
