"""Invokes: several blocks in one run, each with its own input or over the whole batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from ..config import CONFIG
from ..tracing import Block, Tracer
from ..tracing.errors import user_position_now
from .interleaver import Interleaver, active_interleaver

if TYPE_CHECKING:
    from .tracer import Arguments, Batchable, InterleavingTracer


@dataclass(eq=False)
class Invoke:
    """A block with its input, before its run."""

    function: Callable[[], None]  # the block, ready to run
    block: Block  # the captured block
    args: tuple[Any, ...]  # its input; without input the block sees the whole batch
    kwargs: dict[str, Any]  # its input, by name
    publish: Callable[[], None] | None = None  # makes the variables of the block visible to the other invokes
    note: Callable[[Any], None] = lambda prepared: None  # called with the arguments that the model prepares from the input
    explain: Callable[[BaseException], None] | None = None  # adds to an error of the block how other invokes may have caused it

    @property
    def has_input(self) -> bool:
        """Whether the invoke adds rows to the batch."""
        return bool(self.args or self.kwargs)


class Joined(NamedTuple):
    """The inputs of several invokes as one batch: its arguments, the ``parts`` of the invokes, and their numbers of rows."""

    batched: Arguments
    parts: list[Arguments]
    sizes: list[int]


def join_inputs(model: Batchable, inputs: list[Arguments]) -> Joined:
    """Prepare the inputs of several invokes, and join them to one batch."""
    at_once: Callable[[list[Arguments]], Joined | None] | None = getattr(model, "_join_at_once", None)
    joined = None if at_once is None else at_once(inputs)
    if joined is not None:
        return joined
    batched: Arguments | None = None
    parts: list[Arguments] = []
    sizes: list[int] = []
    for given, named in inputs:
        args, kwargs = model._prepare_input(*given, **named)[:2]
        batched, size = model._batch(batched, *args, **kwargs)
        parts.append((args, kwargs))
        sizes.append(size)
    assert batched is not None
    return Joined(batched, parts, sizes)


class JoinsInputs:
    """How a root class prepares the input of the user, and joins the inputs of several invokes; subclasses override the methods."""

    _module: Any

    def _prepare_input(self, *args: Any, **kwargs: Any) -> Arguments:
        """Convert the arguments of :meth:`trace` to those of the module; subclasses override this."""
        joined = self._join_at_once([(args, kwargs)])
        return (args, kwargs) if joined is None else joined.batched

    def _join_at_once(self, inputs: list[Arguments], function: Any = None) -> Joined | None:
        """Join the inputs of all invokes by the methods of a class that has ``_batch_size``; return ``None`` for other classes.

        ``_batch_size(*args, **kwargs)`` returns the number of rows of an input. ``_batch(invokes, function)`` of such a class gets the
        ``(args, kwargs)`` of each invoke, of one or several, and the called function. It returns the joined ``(args, kwargs)``.
        """
        rows = getattr(type(self), "_batch_size", None)
        if rows is None:
            return None
        if len(inputs) > 1 and hasattr(type(self), "_batcher_class"):
            message = f"`{type(self).__name__}._batcher_class` has no effect: nnsight finds the rows of each invoke in each value."
            warnings.warn_explicit(message, UserWarning, *user_position_now())
        sizes = [rows(self, *args, **kwargs) for args, kwargs in inputs]
        if len(inputs) > 1 and 0 in sizes:
            raise ValueError(
                f"`{type(self).__name__}._batch_size` found no rows in the input of invoke {sizes.index(0)}. Pass options of the run to "
                "the trace, and an input to each invoke. An invoke without arguments, `tracer.invoke()`, sees the whole batch."
            )
        joined: Any = self._batch
        return Joined(joined(inputs, function or self._module), inputs, sizes)

    def _batch(self, batched: Arguments | None, *args: Any, **kwargs: Any) -> tuple[Arguments, int]:
        """Join the arguments of one more invoke to those of earlier ones; subclasses that support batching override this.

        That of a subclass with ``_batch_size`` joins all invokes at once, see :meth:`_join_at_once`.

        Args:
            batched: The arguments joined so far, ``None`` for the first invoke.
            *args: Arguments of this invoke, as :meth:`_prepare_input` returned them.
            **kwargs: Likewise, by name.

        Returns:
            The joined arguments ``(args, kwargs)`` and the number of rows of this invoke.
        """
        raise NotImplementedError(
            f"{type(self).__name__} does not support batching: it cannot join the inputs of several invokes. Use one invoke with "
            "input (any number of invokes without input can follow it), or define `_prepare_input` and `_batch` in a subclass."
        )


class Invoker(Tracer):
    """The context manager of ``tracer.invoke(...)``. It adds its block to the trace, which runs it later.

    Attributes:
        args: The positional input.
        kwargs: The input by name.
        inputs: During the run, the arguments that the model prepared from both, ``(args, kwargs)``; None for an invoke without input.
    """

    def __init__(self, trace: InterleavingTracer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self._trace = trace
        self.args, self.kwargs = args, kwargs
        self.inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None

    def run(self) -> None:
        """Add the block to the trace."""
        assert self.scope is not None and self.info is not None and self._trace.info is not None
        shared = self.scope
        for name, value in self.info.bindings(self).items():
            shared.cells[name].cell_contents = value
        publish: Callable[[], None] | None = None
        if CONFIG.APP.CROSS_INVOKER:
            self.scope = branch = shared.branch(self.info, self._trace.info)
            publish = branch.publish
        else:
            self.scope = own = shared.copy()
            self._trace.on_end(lambda: shared.take_saved(own))
        explain = partial(explain_unbound, self.info, self._trace.invoked)
        self._trace.add_invoke(Invoke(self.compile(), self.info, self.args, self.kwargs, publish, self._note, explain))
        self._trace.on_end(lambda: self._note(None))

    def _note(self, prepared: Any) -> None:
        self.inputs = prepared


def explain_unbound(block: Block | None, invoked: list[Block], error: BaseException) -> None:
    """If ``error`` of ``block`` is a NameError, name the ``invoked`` blocks that assign the missing variable in its message.

    The block is an invoke, or that of the trace.
    """
    if not isinstance(error, NameError):
        return
    name = error.name
    others = [f"{other.filename}:{other.line}" for other in invoked if other is not block and name in other.stored]
    if not others:
        return
    if block is None or block not in invoked:
        remedy = (
            "The body of the trace runs before its invokes. Put this line into that invoke, or behind it into an invoke of its own, "
            "`with tracer.invoke():`; or save the values, and compute this after the trace."
        )
    elif name in block.stored:
        remedy = (
            "This invoke assigns it as well, so it has a variable of that name of its own: give the two different names."
        )
    elif not CONFIG.APP.CROSS_INVOKER:
        remedy = "Invokes have variables of their own here, because nnsight.CONFIG.APP.CROSS_INVOKER is off."
    else:
        remedy = (
            "Invokes run side by side, and this one reached its line first: at each location they take turns in the order in which they "
            "were opened, and each runs up to its next request. Make it wait: write `barrier = tracer.barrier(2)` before the "
            f"invokes, and call `barrier()` in both, after the line that assigns `{name}` and before the line that reads it."
        )
    error.args = (f"{error}. `{name}` is assigned in the invoke at {', '.join(others)}. {remedy}",)


class Barrier:
    """Lets ``participants`` invokes wait for each other. Each of them calls it."""

    def __init__(self, trace: InterleavingTracer, participants: int) -> None:
        if not isinstance(participants, int) or isinstance(participants, bool):
            raise TypeError(
                f"tracer.barrier takes the number of its participants, not a {type(participants).__name__}."
            )
        if participants < 1:
            raise ValueError(f"A barrier needs at least one participant, not {participants}.")
        self.participants = participants
        self._trace = trace
        self._arrived: list[Any] = []

    def __call__(self) -> None:
        """Wait until all participants have called the barrier."""
        run = active_interleaver()
        if run is None or run.current is None or self._trace.opens_invokes:
            raise ValueError(
                "A barrier can be called inside an invoke only: create it before the invokes and call it in each of them."
            )
        self._wait(run)

    def _wait(self, run: Interleaver) -> None:
        mediator = run.current
        assert mediator is not None
        self._arrived = [other for other in self._arrived if other.alive]  # a request can end while its block waits
        waits = len(self._arrived) + 1 < self.participants
        if run.recorder is not None:
            run.recorder.barrier(self, self.participants, waits)
        if waits:
            self._arrived.append(mediator)
            mediator.pause(f"barrier({self.participants})")
            return
        run.ready.extend(self._arrived)
        self._arrived.clear()
