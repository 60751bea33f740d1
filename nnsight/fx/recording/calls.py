"""Records the torch calls of a block as events of a program.

:class:`CallRecorder` is a ``TorchFunctionMode``: while it is active it sees every torch call. It looks up a call on lazy tensors
among the events known at this state of the program. If the call is new, it computes the result on fake tensors. For a call that needs
values, :class:`~nnsight.fx.recording.execution.PieceRunner` cuts the graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.utils import _pytree as pytree

from ...runtime.rows.gradient_sources import call as call_torch
from ...runtime.switching.mode_stacks import ModeStacks
from ...tracing.saving import keep_mark
from ..block_events import Call, ValueNumber
from ..splicing.pieces import references
from .autograd_state import wants_grad
from .events import EventRecorder, NotLowerableError, fake_or_self, integers, storage_of, storages_of, user_position
from .failing_calls import error_on_values, handler, is_possible, may_fail_by_values
from .functions import (
    ABOUT_GRADIENTS,
    ABOUT_STRIDES,
    CARRIED,
    DEMANDS,
    DRAWN_LIKE,
    METADATA,
    READ_AS,
    SCRIPTED,
    SPECIAL,
    UNANSWERABLE,
    ControlOperator,
    as_python,
    draws,
    edits_in_place,
    has_tensor,
    is_custom,
    name_of,
    on_default_device,
)
from .lazy import LazyTensor, become, is_filled, real_of
from .numbers import Lifted, keep_constant, lift

#: Message about a lazy tensor that outlived its trace.
NEVER_COMPUTED = (
    "This tensor was never computed, because its trace was interrupted, or failed while the graph ran. Fix the error of the trace "
    "and run it again."
)


class CallRecorder(EventRecorder):
    """Turns torch calls into events of a program for ``graph``, see :class:`~.events.EventRecorder`."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch._C._are_functorch_transforms_active():  # the transform turns the call into operators, see `call_operator`
            return self.transformed(function, args, kwargs)
        if self.random and draws(function, kwargs):
            return self.call(function, args, on_default_device(function, kwargs))
        if LazyTensor in types or (getattr(function, "__name__", "") == "__set__" and isinstance(args[-1], LazyTensor)):  # `x.data = lazy`
            return self.call(function, args, kwargs)
        edits = edits_in_place(function)
        if (edits or self.used or self.used_storages) and function not in METADATA and self._touches_graph(args, kwargs, edits):
            return self.call(function, args, kwargs)
        result = call_torch(function, args, kwargs)
        self.note_exported(function, result)
        if self.journal is not None and self.run.current is not None:  # a block calls it, not the interleaver
            self.journal.outside(function, args, kwargs, result)
        return result

    def settle(self) -> None:
        """Replace computed lazy tensors by their real tensors, once nothing else refers to their lazy form."""
        filled, self.filled = self.filled, []
        with self.stacks.entered():  # torch may be tracing the block, and must not trace the replacement
            while filled:
                lazy = filled.pop()
                assert lazy._real is not None
                if not become(lazy, lazy._real):
                    self.filled.append(lazy)

    def _with_values(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments, with real tensors in place of computed lazy tensors."""
        if self.closed:  # `close` has emptied the list `filled`
            found = {id(leaf): leaf for leaf in pytree.tree_leaves((args, kwargs)) if is_filled(leaf)}
            self.filled = list(found.values())
        self.settle()
        if self.closed:
            self.close()
        known: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map(real_of, (args, kwargs))
        return known

    def close(self) -> None:
        """Stop recording, and drop the references to lazy tensors: they refer to this recording, so they would form a cycle."""
        self.closed, self.filled = True, []

    def transformed(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call inside ``torch.func`` or ``torch.vmap``, which decompose it into operators (:meth:`call_operator`)."""
        if self.journal is not None:
            self.journal.spoil("it uses a transform of torch.func")
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)

    def call_operator(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record an operator that a transform has made from a call in C++, where neither autograd nor torch modes are active."""
        if self.journal is not None:
            self.journal.spoil("it uses a transform of torch.func")
        if self.stacks.why_not_lowerable is not None:
            self._check_tracing()
        with self.modes.keys():
            return self.call(function, args, kwargs)

    def apply(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Any]:
        """Apply a ``torch.autograd.Function`` to real values if one of its arguments may require a gradient.

        Autograd must see the function as one operation with its own ``backward``, which no graph can express.

        Returns:
            Whether the function was applied, and its result. If not, the caller runs ``forward``, whose calls are recorded.
        """
        wanting = any(
            wants_grad(self, ValueNumber(item._index) if isinstance(item, LazyTensor) and item._real is None else item) is not False
            for item in args
            if isinstance(item, torch.Tensor)
        )
        if not (wanting and torch.is_grad_enabled()):
            return False, None
        name = function.__self__.__name__
        return True, self.demand(function, args, kwargs, f"`{name}` is an autograd.Function, whose gradient is its own")

    def _touches_graph(self, args: tuple[Any, ...], kwargs: dict[str, Any], edits: bool) -> bool:
        """Whether the graph uses the memory of these tensors from outside, so that the call has to keep its order in the graph."""
        leaves = pytree.tree_leaves((args, kwargs))
        storages = storages_of([leaf for leaf in leaves if not isinstance(leaf, fake_tensor.FakeTensor)])
        if not storages.isdisjoint(self.storages_in_use()):
            return True
        if edits and storages:
            if self._input_storages is None:
                self._input_storages = storages_of(self.inputs)
            return not storages.isdisjoint(self._input_storages)
        return False

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a call, answer it from metadata, or cut the graph and make it on real values."""
        if self.filled or self.closed:
            args, kwargs = self._with_values(args, kwargs)
            if not any(isinstance(leaf, LazyTensor) for leaf in pytree.tree_leaves((args, kwargs))):
                with torch._C.DisableTorchFunctionSubclass():
                    return call_torch(function, args, kwargs)
        if self.closed:
            raise RuntimeError(NEVER_COMPUTED)
        if function in SPECIAL:
            handled, result = self._answer(function, args, kwargs)
            if handled:
                return result
            function = READ_AS.get(function, function)
        if isinstance(function, ControlOperator):
            return self.demand(as_python(function), args, kwargs, f"`torch.{function.name()}` runs Python that depends on a value")
        reason = self._needs_values(function)
        if reason is None and edits_in_place(function) and self.is_memory_exported:
            reason = "an array outside of torch may have the memory that is edited"
        if reason is None and kwargs.get("requires_grad") and draws(function, kwargs):
            reason = f"`{name_of(function)}` makes a leaf of autograd"
        if reason is None and may_fail_by_values(function, args, kwargs):
            caught_by = handler()
            if caught_by is not None:
                reason = f"`{name_of(function)}` may fail because of values, inside {caught_by}"
        event = None
        if reason is None:
            try:
                event = self._event(function, args, kwargs)
            except NotLowerableError as error:
                reason = str(error)
        if event is None:  # outside of the `except` clause, so that a later error does not show `NotLowerableError` as its context
            return self.demand(function, args, kwargs, reason or "")
        known, lifted, sizes = self.state.edges.get(event), Lifted(event, (), event), self.sizes
        if known is None:
            lifted = lift(self.state, event, len(self.numbers))
            if lifted.values:
                known, sizes = self.state.edges.get(lifted.event), sizes + integers(lifted.values)
        outcome = None if known is None else known.outcomes.get(sizes)
        if outcome is None:
            answered, result = self._try_on_fakes(event)
            if not answered:
                return self.demand(function, args, kwargs)
            if not has_tensor(result) and not (result is None or edits_in_place(function)):
                if any(isinstance(reference, ValueNumber) for reference in references(event)):
                    return result
                return self._outside(function, args, kwargs)
            outcome = self._outcome(event, result)
            if lifted.values and not self._is_like(outcome, known, lifted):
                keep_constant(self.state, event)
                lifted, sizes = Lifted(event, (), event), self.sizes
        self.random = self.random or draws(function, kwargs)
        result = self._take(outcome, lifted, sizes)
        if isinstance(result, LazyTensor) and args and result is not args[0] and edits_in_place(function):
            keep_mark(args[0], result)  # after `h += 1` the name refers to a new object, unlike in an eager run
        return result

    def _needs_values(self, function: Any) -> str | None:
        """Return why a call of ``function`` needs values, or ``None`` if it needs none; empty if the name alone is the reason."""
        if getattr(function, "__name__", "") in DEMANDS:
            return ""
        if isinstance(function, SCRIPTED):
            return f"`{name_of(function)}` is TorchScript"
        if self.relaid and function in ABOUT_STRIDES:
            return f"`{name_of(function)}` depends on the strides of a replacement"
        modes = self.modes if self.modes_at_tap is None else self.modes_at_tap
        if not modes.autocast_holds:
            return "`torch.autocast` differs between block and model"
        if torch.is_inference_mode_enabled() != modes.inference:
            return "`torch.inference_mode` differs between block and model"
        reason = self.stacks.why_not_lowerable
        if reason is not None:
            self._check_tracing()
        return reason

    def _check_tracing(self) -> None:
        """Raise if the block traces a lazy tensor with ``make_fx``, which would see none of the recorded calls that compute it."""
        own, _ = ModeStacks.now().apart_from(self.stacks)
        if any(isinstance(mode, (fake_tensor.FakeTensorMode, ProxyTorchDispatchMode)) for mode in own.dispatch):
            filename, line = user_position()
            raise NotImplementedError(
                f"{filename}:{line}: a value of a compiled trace is used in a function that torch traces (`make_fx`, as in "
                "`torch.func.linearize`), before it is computed. Use `torch.func.jvp` or `torch.func.vjp`, which stay in the "
                "graph; or `trace(..., compile=False)`."
            )

    def _try_on_fakes(self, event: Call) -> tuple[bool, Any]:
        """Return whether the result of a call follows from metadata alone, and the result on fake tensors.

        Raises:
            Exception: The error that the call raises for any values: a mistake of the user, such as a wrong shape.
        """
        failure: Exception | None = None
        result: Any = None
        try:
            result = self._on_fakes(event)
        except UNANSWERABLE:
            return False, None
        except Exception as error:
            # On real values two kinds of calls may succeed: custom operators, and calls with a one-element tensor as a number.
            scalar = any(isinstance(item, ValueNumber) and self.fakes[item.index].numel() == 1 for item in references(event))
            if is_custom(event.function) or isinstance(error, NotImplementedError) or (scalar and isinstance(error, TypeError)):
                return False, None
            if self.relaid:  # `view` may fail on the captured strides and succeed on the real ones
                return False, None
            failure = error.with_traceback(None)
        used = references(event)
        fakes = [self.fake_of(reference) for reference in used]
        if failure is None:
            leaves = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            can_be_lazy = all(leaf.layout is torch.strided for leaf in leaves)
            return can_be_lazy and is_possible(event, used, fakes, result), result
        tried, failed = error_on_values(event, used, fakes, failure)
        if tried and failed is None:  # it fails on fakes only
            return False, None
        failure = failed or failure
        try:
            raise failure.with_traceback(None) from None  # so that the traceback ends at the user's line
        finally:
            del failure, failed  # the traceback refers to this frame, which would be a cycle

    def _answer(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Any]:
        """Answer a call that needs no event. Returns whether it was answered, and the answer."""
        if function in METADATA:
            (tensor,) = args
            with self.graph.fake_lock, torch._C.DisableTorchFunction():
                return True, function(fake_or_self(tensor))
        if function in ABOUT_GRADIENTS:
            return True, self._about_gradients(function, args, kwargs)
        if function in CARRIED:
            return True, self._carried(function, args, kwargs)
        if function in DRAWN_LIKE and not self.random:
            return True, self._draw_like(function, args, kwargs)
        if function == torch.Tensor.__iter__:
            return True, iter(self.call(torch.Tensor.unbind, args, kwargs))
        return False, None

    def _about_gradients(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a read of ``requires_grad``, ``is_leaf`` or ``grad_fn``, as it would be after the recorded calls."""
        name, tensor = ABOUT_GRADIENTS[function], args[0]
        is_lazy = isinstance(tensor, LazyTensor)
        wants = wants_grad(tensor._recording, ValueNumber(tensor._index)) if is_lazy else wants_grad(self, tensor)
        if wants is None:
            return self.demand(function, args, kwargs, f"`{name}` depends on edits of tensors that share memory")
        if name == "requires_grad":
            return wants
        if not wants:
            return name == "is_leaf" or None
        if is_lazy and name == "is_leaf":
            return False
        if is_lazy or storage_of(tensor) in self.storages_in_use():  # a recorded edit, not yet made, may change it
            return self.demand(function, args, kwargs, f"`{name}` is known once the graph has run")
        return self._outside(function, args, kwargs)

    def _carried(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a read of an attribute of a tensor object that its fake does not have, such as ``.grad``."""
        name, tensor = CARRIED[function], args[0]
        if isinstance(tensor, LazyTensor):
            if name in ("grad", "_grad", "retains_grad"):  # the result of a call is no leaf, so it has no gradient yet
                return False if name == "retains_grad" else None
            return self.demand(function, args, kwargs, f"`{name}` exists once the graph has run")
        if name not in ("grad", "_grad", "retains_grad", "_base") and self.state.event is not None:
            return self.demand(function, args, kwargs, f"an edit that waits for the graph may change `{name}`")
        return self._outside(function, args, kwargs)

    def _outside(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call on tensors from outside at once: no recorded call changes its result."""
        with torch._C.DisableTorchFunction():
            result = function(*args, **kwargs)
        if self.journal is not None:
            self.journal.outside(function, args, kwargs, result)
        return result

    def _draw_like(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Draw random numbers with the metadata of a lazy tensor at once, so that a seed gives the same numbers as in an eager run."""
        like, *others = args
        fake = fake_or_self(like)
        with self.graph.fake_lock, torch._C.DisableTorchFunction():
            size, stride, dtype, device = fake.size(), fake.stride(), fake.dtype, fake.device
        call = (_drawn, (function, tuple(size), tuple(stride), dtype, device, *others), kwargs)
        result = _drawn(*call[1], **kwargs)
        if self.journal is not None:
            self.journal.outside(*call, result)
        return result


def _drawn(function: Any, size: Any, stride: Any, dtype: Any, device: Any, /, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Call a function such as ``torch.randn_like`` for a tensor with this metadata."""
    drawn: torch.Tensor = function(torch.empty_strided(size, stride, dtype=dtype, device=device), *args, **kwargs)
    return drawn
