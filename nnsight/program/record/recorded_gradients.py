"""Backward passes of a block that is recorded.

``with loss.backward():`` becomes nodes: the beginning of the pass, the nodes of its block, and its end. The recorder differentiates
nothing. It needs only the shape and dtype of a gradient, which are those of its tensor. The server checks on fake tensors in which order
gradients arrive, and whether they flow through a tensor.

The rows of an invoke are a view that the model does not compute with, so no gradient flows to them. Their gradient is taken from the same
rows of the gradient of the whole tensor.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.weak import WeakIdKeyDictionary

from ...runtime.gradients import check_gradient, gradients_in_functions
from ...runtime.rows.batching import BatchGroup, View
from ...runtime.rows.gradient_sources import PATCHED
from ...tracing import Tracer
from ..format.nodes import IN_PASS
from .refusals import here, refused

if TYPE_CHECKING:
    from .recorded_calls import NodeRecorder


class Gradients:
    """Records the gradients of a block. ``running`` says whether the block of a backward pass is being recorded."""

    def __init__(self, recorder: NodeRecorder) -> None:
        self._recorder = recorder
        self._rows: Any = WeakIdKeyDictionary()  # rows of an invoke -> (whole tensor, group, where the rows are)
        self._off = ""  # the reason why gradients may be missing
        self._before = 0, ""  # gradients may be missing for the results of nodes before this number, and why
        self._used: Any = WeakIdKeyDictionary()  # the block's own tensors that were used before that node
        self._counted: set[int | None] = set()  # blocks for which the number of all rows is recorded
        self._modes: dict[int | None, bool] = {}  # whether each block has gradients enabled
        self._requiring: Any = WeakIdKeyDictionary()  # the tensors that the block has called `requires_grad_` on
        self.running = False
        self.followed = True  # whether gradients are enabled where the user opens the trace
        self._latest: Any = (None, None)  # the tensor whose gradient was read or written last, and the gradient

    def begin_run(self) -> None:
        """Note the grad mode in which the user traces."""
        self._modes.clear()
        self._counted.clear()
        self.followed = torch.is_grad_enabled()
        if not self.followed:
            self._off = "the trace is under `torch.no_grad()`"

    def set_mode(self, enabled: bool) -> None:
        """Enable or disable gradients for the block."""
        with torch._C.DisableTorchFunction():
            torch._C._set_grad_enabled(enabled)
        if self.followed:
            self._modes[self._recorder.block] = enabled

    @property
    def enabled(self) -> bool:
        """Whether gradients are enabled for the current block. They are, unless the block has disabled them."""
        return self._modes.get(self._recorder.block, True)

    def lose(self, why: str) -> None:
        """Note that gradients may be missing from here on, because of ``why``. Later backward passes are refused."""
        self._off = self._off or here(why)

    def lose_before(self, why: str) -> None:
        """Note that gradients may be missing for the values so far, because of ``why``. Those of later values are complete."""
        self._before = len(self._recorder.nodes), here(why)
        self._used.update(dict.fromkeys(self._recorder._constants))

    def require(self, tensor: torch.Tensor, requires: bool = True) -> torch.Tensor:
        """Record that gradients flow to ``tensor`` from here on, and return it."""
        if not requires:
            raise refused("`requires_grad_(False)` cannot be sent: use `.detach()` where no gradient should flow.")
        reference = self._recorder.reference(self._whole(tensor))
        if self._recorder.nodes[reference["ref"][0]]["do"] == "weight":
            raise refused("A weight of the model cannot be made to require gradients, because other users share it. Use its `.detach()`.")
        self._recorder.emit("requires_grad", value=reference)
        self._requiring[tensor] = None
        return tensor

    def answer(self, name: str, tensor: torch.Tensor) -> Any:
        """Return ``requires_grad``, ``is_leaf`` or ``grad_fn`` of a value, or refuse: the fakes of a recording have no gradients."""
        if name == "requires_grad" and tensor in self._requiring:
            return True
        weights = self._recorder.model.weights
        possible = self._requiring or any(fake.requires_grad for _, fake in weights.values())
        with torch._C.DisableTorchFunction():
            if possible and self.followed and not self.running and isinstance(tensor, FakeTensor) and tensor.is_floating_point():
                raise refused(
                    f"`{name}` depends on the gradients of the run, which are not known here. `.requires_grad_()` and `.detach()` can be "
                    "called without asking."
                )
            return getattr(tensor, name)

    def following(self, group: BatchGroup) -> BatchGroup:
        """Return a group with the same rows, which reports its views to :meth:`note_rows`."""
        return _Group(group.start, group.size, group.total, group.dims, gradients=self)

    def note_rows(self, group: BatchGroup, view: View) -> None:
        """Note the rows that an invoke gets. In a program for other inputs, also record the size of the batch, once for each invoke."""
        recorder = self._recorder
        for whole, rows, given in zip(view._leaves, view._rows, view._given, strict=True):
            if rows is None:
                continue
            self._rows[given] = whole, group, rows
            if recorder.runs_again and recorder.block not in self._counted:
                self._counted.add(recorder.block)
                recorder._look(whole, rows.dim)

    def _whole(self, tensor: torch.Tensor) -> torch.Tensor:
        whole: torch.Tensor = self._rows.get(tensor, (tensor,))[0]
        return whole

    # -- a pass ------------------------------------------------------------------------------------------------------

    def begin(self, loss: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], has_block: bool) -> Tracer:
        """Return the tracer of ``with loss.backward(...)``."""
        if not has_block:
            raise refused(
                "A bare `.backward()` cannot be sent: it would leave gradients in weights that other users share. Write "
                "`with loss.backward():` and read the `.grad` of tensors in its block."
            )
        if self.running:
            raise refused("A backward pass cannot begin in the block of another backward pass.")
        if self._off:
            raise refused(f"A backward pass cannot be sent here: {self._off}. Use `.detach()` where no gradient should flow.")
        return RecordedPass(self, loss, *args, **kwargs)

    def check_node(self, do: str) -> None:
        """Raise an error if a node of kind ``do`` is not possible in the block of a backward pass, and the block is in one."""
        if self.running and do not in IN_PASS:
            raise ValueError(
                here(
                    f"`{do}` is not possible in the block of a backward pass, because the model runs before the pass. Read the value "
                    "before `with ...backward():`, and its `.grad` inside."
                )
            )

    def location_of(self, value: Any) -> Any:
        """Return the object on which ``value.grad`` is looked up."""
        return RecordedGradient(self, value) if self.running and isinstance(value, torch.Tensor) else value

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the gradient with respect to ``tensor``, as a fake tensor."""
        rows = self._rows.get(tensor)
        if rows is not None:
            whole, group, place = rows
            if place.scattered:  # such rows are a copy, so an edit of their gradient would be lost
                raise refused("The rows of this invoke are not contiguous in this tensor, so their gradient cannot be sent.")
            if self._recorder.edits.is_patched(self._known(whole)):
                raise ValueError(here(PATCHED))
            taken: torch.Tensor = group.take(self.read(whole), place)
            return taken
        recorder = self._recorder
        fake = self._known(tensor)
        if self._latest[0] is not fake:
            with recorder.paused(), recorder.mode:
                gradient = torch.empty(fake.shape, dtype=fake.dtype, device=fake.device)
            recorder._refs[gradient] = recorder.emit("grad", wrt=recorder.reference(fake)), 0
            self._latest = fake, gradient
        return self._latest[1]

    def write(self, tensor: torch.Tensor, value: Any) -> None:
        """Record that ``value`` replaces the gradient with respect to ``tensor``."""
        recorder = self._recorder
        new = recorder.substitute(value) if isinstance(value, torch.Tensor) else value
        check_gradient(self._known(tensor), new)
        if tensor in self._rows:
            self.read(tensor).copy_(new)
            return
        fake = self._known(tensor)
        if self._latest[0] is fake and self._latest[1] is new:  # an in-place edit, such as `tensor.grad *= 2`
            return
        recorder.emit("set_grad", wrt=recorder.reference(fake), value=recorder.reference(new))
        self._latest = fake, new

    def _known(self, tensor: torch.Tensor) -> torch.Tensor:
        recorder = self._recorder
        if not (isinstance(tensor, FakeTensor) or id(tensor) in recorder.model.weights or tensor in recorder._constants):
            raise refused(
                "The gradient with respect to a tensor of your own can be sent only if the block uses the tensor itself together with "
                "values of the model. Here it uses only a tensor that was computed from it, and the server gets only that tensor."
            )
        fake = recorder.substitute(tensor)
        number, why = self._before
        if why and (recorder.reference(fake)["ref"][0] < number or id(tensor) in recorder.model.weights or tensor in self._used):
            raise refused(f"The gradient with respect to this value cannot be sent: {why}. Use `.detach()` where no gradient should flow.")
        return fake


class RecordedPass(Tracer):
    """The value of ``loss.backward(...)`` in the header of a ``with`` statement of a recorded block."""

    is_part = True

    def __init__(
        self,
        gradients: Gradients,
        loss: torch.Tensor,
        gradient: torch.Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        if inputs is not None:
            raise refused("`inputs=` of a backward pass cannot be sent: read the `.grad` of those tensors.")
        super().__init__()
        self._gradients, self._loss, self._gradient = gradients, loss, gradient
        self._options = {"retain_graph": retain_graph, "create_graph": create_graph}

    def execute(self, function: Any) -> None:
        """Record the block, between the nodes where the pass begins and ends."""
        gradients, recorder = self._gradients, self._gradients._recorder
        content = {name: True for name, value in self._options.items() if value}
        if self._gradient is not None:
            content["gradient"] = recorder.reference(recorder.substitute(self._gradient))
        recorder.emit("backward", value=recorder.reference(recorder.substitute(self._loss)), **content)
        gradients.running = True
        try:
            with gradients_in_functions:
                function()
        finally:
            gradients.running, gradients._latest = False, (None, None)
            recorder.emit("end")


class RecordedGradient:
    """The value of ``tensor`` in ``tensor.grad`` inside the block of a recorded pass."""

    def __init__(self, gradients: Gradients, tensor: torch.Tensor) -> None:
        self._gradients, self._tensor = gradients, tensor

    @property
    def grad(self) -> torch.Tensor:
        """The gradient with respect to the tensor, as a fake tensor."""
        return self._gradients.read(self._tensor)

    @grad.setter
    def grad(self, value: Any) -> None:
        self._gradients.write(self._tensor, value)


@dataclass(frozen=True)
class _Group(BatchGroup):
    """The rows of an invoke that is recorded. It reports its views to ``gradients``."""

    gradients: Gradients = field(compare=False, kw_only=True)

    def view(self, location: str, occurrence: int, whole: Any) -> View:
        """Return ``whole`` as the invoke sees it."""
        with self.gradients._recorder.finding_rows():
            view = super().view(location, occurrence, whole)
        self.gradients.note_rows(self, view)
        return view
