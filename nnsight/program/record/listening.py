"""The parts of a run that notify the recorder: the block whose turn it is, its present line, and the operators that it calls."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ... import compat
from ...modeling.scanning import _OutsideFakeMode
from ...runtime.mediator import Mediator
from ...runtime.rows.fakes import Guesses
from ...tracing.errors import user_position_now, user_position_of
from ..format.operators import NAMES, is_composite
from .indexing import Assignments
from .refusals import LIBRARIES, position_of_block

if TYPE_CHECKING:
    from .recorder import Recorder

#: Number of the block of observers, such as caches, during the recording of a run. It becomes the last block.
OBSERVERS = 10**9

class PreparedRun(_OutsideFakeMode):
    """Wraps a model: its inputs are prepared outside of the modes of the recording, and its `_call_on` is kept."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        if hasattr(type(model), "_call_on"):
            self._call_on = model._call_on


class RecordingInterleaver(compat.Interleaver):
    """A run whose blocks are recorded."""

    __slots__ = ()

    def __init__(self, recorder: Recorder, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.recorder = recorder

    def check_request(self, location: str) -> None:
        self.recorder.gradients.check_node(f"read `{location}`")
        super().check_request(location)

    def observe(self, location: str, observer: Callable[[Any], None], mediator: Mediator | None = None) -> None:
        recorder, group = self.recorder, (mediator or self.current).batch_group  # type: ignore[union-attr]

        def seen(value: Any) -> None:
            assert self.at is not None
            site, at = self.at
            with recorder.turn_of(OBSERVERS):
                visit = recorder.begin_visit(None, site, at, value)
                with recorder.finding_rows():
                    rows = visit.given if group is None else group.narrow(visit.given, site, at)
                observer(rows)
                recorder.end_visit(visit, visit.given)

        whole: Any = types.SimpleNamespace(batch_group=None)
        super().observe(location, seen, whole)


class RecordingMediator(compat.Mediator):
    """A block that is recorded."""

    __slots__ = ("_position", "_recorder")

    def __init__(self, recorder: Recorder, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._recorder = recorder
        self._mode_contexts.grad = recorder.gradients.followed  # the model runs without gradients
        if self.batch_group is not None:
            self.batch_group = recorder.gradients.following(self.batch_group)

    def visit(self, location: str, occurrence: int, value: Any) -> Any:
        assert self._greenlet is not None
        recorder = self._recorder
        self._position = user_position_of(self._greenlet.gr_frame, skip=LIBRARIES)
        token = position_of_block.set(self._position)
        try:
            with recorder.turn_of(recorder.number_of(self)):
                visit = recorder.begin_visit(self, location, occurrence, value)
                left = super().visit(location, occurrence, visit.given)
                position_of_block.set(self._position)
                left = recorder.end_visit(visit, left)
                if self.stopped:
                    recorder.stop()
                return left
        finally:
            position_of_block.reset(token)

    @property
    def whole_value(self) -> Any:
        with self._recorder.finding_rows():
            return super().whole_value

    def swap(self, location: str, value: Any) -> None:
        self._recorder.refuse_unknown_sizes(location, value)
        super().swap(location, value)
        self._position = user_position_now(skip=LIBRARIES)

    def skip(self, location: str, value: Any) -> None:
        self._recorder.refuse_unknown_sizes(location, value)
        super().skip(location, value)
        assert self._location is not None
        self._recorder.skip(self._location, self._occurrence, value, bool(self.loops))

    def _replace(self, value: Any) -> None:
        with self._recorder.paused():  # the mediator compares sizes, which are not sizes that the block reads
            super()._replace(value)

    def _leave_out(self, value: Any) -> None:
        with self._recorder.paused():
            super()._leave_out(value)

    def _turn(self, switch: Callable[..., Any], *arguments: Any) -> None:
        recorder = self._recorder
        with recorder.turn_of(recorder.number_of(self)):
            super()._turn(switch, *arguments)
            if self.stopped and self._location is None:  # in a visit, :meth:`visit` records the stop after the end of the visit
                recorder.stop()


class OperatorMode(Guesses):
    """Passes the torch operators of blocks to the recorder, and guesses where the model asks for values."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder
        self._assignments = Assignments(recorder)

    def forget(self) -> None:
        """Let go of the tensors of the latest call."""
        self._assignments = Assignments(self._recorder)

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._recorder.listens:
            return super().__torch_dispatch__(operator, types, args, kwargs)
        if operator is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # a fast path: torch asks for the device several times in each call
        may_be_view = operator is torch.ops.aten.einsum.default and len(args[1]) == 1  # the table lists `einsum` as not a view
        if (operator not in NAMES or may_be_view) and is_composite(operator):
            with self:
                return operator._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **(kwargs or {}))
        if self._recorder._called[0] == "__setitem__":
            return self._assignments.operator(operator, args, kwargs or {})
        return self._recorder.operator(operator, args, kwargs or {})
