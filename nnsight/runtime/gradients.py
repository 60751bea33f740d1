"""Gradients: a block that runs together with a backward pass.

``with loss.backward():`` defers its body like a trace. In the body ``tensor.grad`` is a location. Reading it waits until the backward pass
has computed the gradient of the loss with respect to that tensor, and assigning to it replaces the gradient. Tensor hooks offer the
locations; they are removed after the pass. Blocks are compiled with a call of :func:`gradient_of` in place of ``tensor.grad``. For the
functions that a block calls, the attribute of tensors is replaced during the pass (:data:`gradients_in_functions`). Functions of torch,
such as the step of an optimizer, and all other code read the ordinary attribute. ``loss.backward()`` without ``with`` is torch's own
method.

Backward blocks, and helper functions that call ``hidden.save()``, can be outside of runs. So tensors get both methods when the first model
is wrapped (:func:`add_tensor_methods`).
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import get_gradient_edge

from ..shared_changes import SharedChange
from ..tracing import Tracer
from ..tracing.block import gradient_of as _gradient_of
from ..tracing.saving import save
from ..tracing.source import calls_for_with
from .errors import ReplacementShapeError
from .interleaver import Interleaver, active_interleaver
from .mediator import Mediator
from .rows.gradient_sources import Source, Uses, check_rows, explaining, source_of, uses_behind

_lock = threading.Lock()

#: The original ``torch.Tensor.backward``.
_plain_backward: Callable[..., Any] = torch.Tensor.backward


class Gradient:
    """Stands for ``tensor`` in the expression ``tensor.grad`` of a backward block."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    @property
    def grad(self) -> Any:
        """The gradient of the loss with respect to the tensor, with the tensor's shape and dtype."""
        location, source = self._offer()
        return source.part(self._mediator().request_once(location))

    @grad.setter
    def grad(self, value: Any) -> None:
        mediator = self._mediator()
        check_gradient(self._tensor, value)
        location, source = self._offer()
        mediator.swap_here(source.put(mediator.request_once(location), value))

    @staticmethod
    def _mediator() -> Mediator:
        run = active_interleaver()
        if run is None or run.current is None:
            raise ValueError("`.grad` of a backward block was read after the block had ended.")
        return run.current

    def _offer(self) -> tuple[str, Source]:
        """Register a hook that offers the gradient during the backward pass; return the gradient's location and source."""
        run, source = active_interleaver(), source_of(self._tensor)
        tensor = source.tensor
        assert isinstance(run, _BackwardInterleaver)
        check_rows(self._tensor, run.uses)
        known = run.locations.get(id(tensor))
        # `locations` also holds the tensor, so that its id is not reused.
        location = known[1] if known else f"<tensor {len(run.locations)} of shape {tuple(tensor.shape)}>.grad"
        if known is None:
            if not tensor.requires_grad:
                raise ValueError(
                    "The `.grad` of a tensor that does not require gradients was read. Call `.requires_grad_()` on the tensor in "
                    "the trace, before the model uses it, and do not trace under `torch.no_grad()`."
                )
            run.check_flows_through(tensor)
            run.locations[id(tensor)] = tensor, location
            run.hooks.append(tensor.register_hook(lambda gradient: run.offer_gradient(location, gradient)))
        return location, source


def gradient_of(value: Any) -> Any:
    """Return the object on which a block looks up ``value.grad``: ``value``, except in backward blocks and blocks that are recorded."""
    run = active_interleaver()
    if run is not None and run.recorder is not None:
        return run.recorder.gradients.location_of(value)
    if isinstance(run, _BackwardInterleaver) and run.current is not None and isinstance(value, torch.Tensor):
        return Gradient(value)
    return value


_plain_grad: Any = torch.Tensor.grad
_LIBRARY = os.path.dirname(torch.__file__) + os.sep


def _owner(tensor: torch.Tensor) -> Any:
    """Return the object on which the function that reads or writes ``tensor.grad`` looks it up; ``tensor`` for functions of torch."""
    return tensor if sys._getframe(2).f_code.co_filename.startswith(_LIBRARY) else gradient_of(tensor)


def _get_grad(tensor: torch.Tensor) -> Any:
    owner = _owner(tensor)
    return _plain_grad.__get__(tensor) if owner is tensor else owner.grad


def _set_grad(tensor: torch.Tensor, value: Any) -> None:
    owner = _owner(tensor)
    if owner is tensor:
        _plain_grad.__set__(tensor, value)
    else:
        owner.grad = value


#: While active, ``tensor.grad`` is a location in functions that a backward block calls.
gradients_in_functions = SharedChange(
    lambda: setattr(torch.Tensor, "grad", property(_get_grad, _set_grad, _plain_grad.__delete__)),
    lambda _: delattr(torch.Tensor, "grad"),
)


class _BackwardInterleaver(Interleaver):
    """The run of one backward pass; its only locations are gradients."""

    def __init__(self, mediators: list[Mediator], loss: torch.Tensor) -> None:
        super().__init__(mediators)
        self.grad = torch.is_grad_enabled()  # autograd disables gradients in hooks
        self.hooks: list[Any] = []
        self.locations: dict[int, tuple[torch.Tensor, str]] = {}
        self._loss = loss
        self._uses: Uses | None = None

    def offer_gradient(self, location: str, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Offer a gradient to the block; the hook returns nothing if there is none, or the pass of another run has reached the tensor."""
        if gradient is None or active_interleaver() is not self:
            return None
        # The block edits a copy, because autograd passes expanded buffers, and one buffer to several tensors.
        return self.handle(location, gradient.clone(memory_format=torch.contiguous_format))

    def uses(self) -> Uses:
        """Return the edges of the autograd graph through which the gradient of the loss flows."""
        if self._uses is None:
            self._uses = uses_behind([self._loss])
        return self._uses

    def check_flows_through(self, tensor: torch.Tensor) -> None:
        """Raise if the gradient of the loss does not flow through ``tensor``: its hook would get zeros, or would not run."""
        if get_gradient_edge(tensor)[:2] not in self.uses():
            raise ValueError(
                "The gradient of the loss does not flow through this tensor. The loss does not depend on it, or depends on it only "
                "through an operation without gradients, such as `.detach()`."
            )

    def check_request(self, location: str) -> None:
        if not location.endswith(".grad"):
            raise ValueError(
                f"Cannot request `{location}` in a backwards tracer: the model has run before the backward pass. Read the "
                "value before `with ...backward():`, and its `.grad` inside."
            )


def check_gradient(tensor: torch.Tensor, value: Any) -> None:
    """Raise unless ``value`` has the shape, dtype and device that a gradient of ``tensor`` must have."""
    wanted = f"a tensor of shape {tuple(tensor.shape)}, {tensor.dtype} on {tensor.device}"
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"A gradient was replaced by a {type(value).__name__}; it has to be {wanted}: `torch.zeros_like(x)`.")
    if value.shape != tensor.shape:
        raise ReplacementShapeError(f"A gradient was replaced by one of shape {tuple(value.shape)}; it has to be {wanted}.")
    if (value.dtype, value.device) != (tensor.dtype, tensor.device):
        raise TypeError(f"A gradient was replaced by {value.dtype} on {value.device}; it has to be {wanted}: use `.to(x)`.")


class BackwardsTracer(Tracer):
    """The context manager that ``loss.backward(...)`` returns in the header of a ``with`` statement."""

    is_part = True

    def __init__(self, loss: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self._call: tuple[torch.Tensor, tuple[Any, ...], dict[str, Any]] | None = (loss, args, kwargs)

    def execute(self, function: Callable[[], None]) -> Any:
        """Run the backward pass with ``function`` as its block.

        Raises:
            NotImplementedError: If the loss does not require gradients. The block is not started.
        """
        assert self._call is not None
        loss, args, kwargs = self._call
        computed(loss)
        if not loss.requires_grad:
            raise NotImplementedError(
                "The loss of `with ...backward():` does not require grad: no tensor that it depends on does, or it was computed under "
                "`torch.no_grad()`. Call `.requires_grad_()` on a tensor in the trace, before the model uses it."
            )
        with explaining_errors():
            _run_along(loss, function, self.info, lambda: _plain_backward(loss, *args, **kwargs))

    def _close(self) -> None:
        super()._close()
        self._call = None


def _run_along(loss: torch.Tensor, block: Callable[[], None], info: Any, flow: Callable[[], Any]) -> None:
    """Run ``block`` together with a backward pass from ``loss``; ``flow()`` runs the pass."""
    if not isinstance(loss, FakeTensor):
        computed(loss)
    run = _BackwardInterleaver([Mediator(block, info, "backward")], loss)
    try:
        # Hooks must run on this thread, because they switch to the block's greenlet.
        with gradients_in_functions, run, torch.autograd.set_multithreading_enabled(False):
            flow()
            run.finish()
    finally:
        for hook in run.hooks:
            hook.remove()
        run.locations.clear()


def differentiate(
    loss: torch.Tensor, tensors: Sequence[torch.Tensor], block: Callable[[], None], gradient: torch.Tensor | None, **how: Any
) -> None:
    """Run ``block`` together with a backward pass from ``loss`` to ``tensors``. It adds nothing to the ``.grad`` of any tensor.

    ``gradient`` is the ``grad_outputs`` of :func:`torch.autograd.grad`, and ``how`` its further arguments.
    """

    def flow() -> None:
        inputs = [known for tensor in tensors if (known := source_of(tensor).tensor).requires_grad]
        if inputs:
            torch.autograd.grad(loss, inputs, gradient, allow_unused=True, **how)

    _run_along(loss, block, None, flow)


def computed(loss: torch.Tensor) -> torch.Tensor:
    """Return ``loss`` with its value. In a compiled trace this runs the graph up to here, so that autograd has the graph of ``loss``."""
    if torch.overrides.has_torch_function_unary(loss):
        return torch.overrides.handle_torch_function(computed, (loss,), loss)
    return loss


def backward(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Compute gradients. In the header of a ``with`` statement, return the context manager that runs the block with the backward pass.

    The arguments are those of :meth:`torch.Tensor.backward`.
    """
    run = active_interleaver()
    if run is not None and run.recorder is not None and run.current is not None:
        return run.recorder.gradients.begin(self, args, kwargs, calls_for_with(sys._getframe(1)))
    if calls_for_with(sys._getframe(1)):
        return BackwardsTracer(self, args, kwargs)
    with explaining_errors():
        return _plain_backward(self, *args, **kwargs)


@contextlib.contextmanager
def explaining_errors() -> Iterator[None]:
    """Add to errors of autograd what they have to do with the other invokes of a trace, or with its compiled graph."""
    run = active_interleaver()
    try:
        yield
    except RuntimeError as error:
        invokes = [] if run is None else [mediator for mediator in run.mediators if mediator.batch_group is not None]
        known = {**(_SHARED if len(invokes) > 1 else {}), **_COMPILED}
        found = next((why for text, why in known.items() if text in str(error)), None)
        if found is not None and found not in str(error):  # a compiled trace calls `backward` twice
            error.args = (f"{found} Original error from torch.autograd: {error}",)
        raise


#: What errors of autograd mean in a trace of several invokes, by a part of their message.
_SHARED = {
    "backward through the graph a second time": (
        "All invokes of a trace share one autograd graph, since they run as a single batched forward pass, and an earlier `backward` has "
        "freed it. Pass `retain_graph=True` to each `backward` but the last: the earlier one did not have it."
    ),
    "modified by an inplace operation": (
        "All invokes of a trace share the tensors of one batched forward pass. An edit in place, perhaps in another invoke, has changed a "
        "tensor that the backward pass needs. Assign an edited copy to the location instead: `layer.output = layer.output * 2`."
    ),
}

#: What they mean after a compiled graph has run.
_COMPILED = {
    "does not currently support double backward": (
        "A compiled graph cannot be differentiated twice. Use `trace(..., compile=False)`, or write `create_graph=True` in the block of "
        "the trace itself: then the graph runs operation by operation."
    ),
}

explaining[0] = explaining_errors


def add_tensor_methods() -> None:
    """Give tensors the method ``save``, and let ``with loss.backward():`` begin a block. Later calls do nothing."""
    global _plain_backward
    with _lock:
        if not hasattr(torch.Tensor, "save"):
            _plain_backward, torch.Tensor.backward = torch.Tensor.backward, backward  # type: ignore[method-assign]
            torch.Tensor.save = save  # type: ignore[attr-defined]


backward.__doc__ = _plain_backward.__doc__
_gradient_of[0] = gradient_of
