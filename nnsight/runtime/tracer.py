"""A trace: one captured block, one run of a model, taken in turns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from ..eproperty import eproperty
from ..tracing import Backend, Tracer
from .errors import ReplacementShapeError
from .interleaver import Interleaver
from .mediator import Mediator
from .report import Report


class Driver(Protocol):
    """Walks a model once, calling ``handle`` of the active run at its locations."""

    def __call__(
        self, interleaver: Interleaver, args: tuple[Any, ...], kwargs: dict[str, Any], report: Report
    ) -> Any: ...


#: Turns what the user passed to ``trace`` into the arguments of the model.
PrepareInput = Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]


class InterleavingTracer(Tracer):
    """Runs a model once, with the block reading and editing its internals.

    Args:
        driver: Runs the model.
        prepare_input: Turns ``args`` and ``kwargs`` into the arguments of the model.
        args: What the user passed as input.
        kwargs: Likewise, by name.
        backend: Where the block runs; in this process by default.

    Attributes:
        report: What the run did.
    """

    path = ""

    def __init__(
        self,
        driver: Driver,
        prepare_input: PrepareInput,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        backend: Backend | None = None,
    ) -> None:
        super().__init__(backend)
        self.report = Report()
        self._call: tuple[Driver, PrepareInput, tuple[Any, ...], dict[str, Any]] | None
        self._call = (driver, prepare_input, args, kwargs)

    @eproperty(description="what the traced function returned")
    def result(self) -> Any:
        """The value the traced call returns; available once the model has finished."""

    def execute(self, function: Callable[[], None]) -> Any:
        """Run the model with ``function`` as its block."""
        assert self._call is not None
        driver, prepare_input, args, kwargs = self._call
        if not args and not kwargs:
            raise ValueError("The model did not execute: trace() was given no input. Pass one, as in `model.trace(x)`.")
        args, kwargs = prepare_input(*args, **kwargs)
        interleaver = Interleaver([Mediator(function)], self._drop_unsaved)
        with interleaver:
            try:
                output = driver(interleaver, args, kwargs, self.report)
            except Exception as error:
                if interleaver.reshaped and error is not interleaver.failure:
                    raise ReplacementShapeError("\n".join(interleaver.reshaped)) from error
                raise
            if interleaver.failure is not None:  # the model caught what a block raised
                raise interleaver.failure
            interleaver.handle("result", output)
            interleaver.finish()

    def _drop_unsaved(self) -> None:
        if self.scope is not None:
            self.scope.drop_unsaved()

    def _close(self) -> None:
        super()._close()
        self._call = None
