"""The memory of the tensors of a recording: which of them share memory, and which of them the block has made itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from ..format.nodes import write_argument
from ..format.operators import NAMES
from .refusals import refused, why_demand

if TYPE_CHECKING:
    from .recorded_calls import NodeRecorder


class OwnTensors:
    """Runs calls on a block's own tensors, and knows which of these tensors the block has made, with memory of their own.

    Calls on the block's own tensors run at once, on real values. If the block edits such a tensor in place with values of the model, as in
    ``total += hidden.sum()``, the tensor is *adopted*: the object itself becomes a fake tensor, which starts as a copy of its real value.
    So all variables and lists that hold the object have the value of the program.
    """

    def __init__(self, recorder: NodeRecorder) -> None:
        self._recorder = recorder
        self._made: set[int] = set()  # by `id`; only another tensor of the block can get the `id` of a freed one

    def forget(self) -> None:
        """Forget the tensors of the latest run. In the next run they come from outside."""
        self._made.clear()

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether the block has made ``tensor``, or its base if it is a view."""
        return id(tensor if tensor._base is None else tensor._base) in self._made

    def call(self, name: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function on the block's own tensors."""
        try:
            with _disable_current_modes():
                result = function(*args, **kwargs)
                given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if type(leaf) is torch.Tensor]
                with torch._C.DisableTorchFunction():
                    if type(result) is torch.Tensor and not torch._C._are_functorch_transforms_active():  # their tensors have no storage
                        is_new = not any(share_memory(leaf, result) for leaf in given)
                        (self._made.add if is_new else self._made.discard)(id(result))
                return result
        except DataDependentOutputException as error:  # a transform of `torch.func` hides fake tensors
            raise refused(why_demand(name)) from error

    def adopt(self, tensor: Any) -> None:
        """Turn ``tensor`` into a fake tensor if the block has made it and nothing else uses its memory."""
        if id(tensor) not in self._made:
            return
        recorder = self._recorder
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            memory = tensor.untyped_storage()  # this object counts as a use
            if tensor.requires_grad or not memory.resizable() or torch._C._storage_Use_Count(memory._cdata) > 2:
                return
            start = tensor.detach().clone()
            fake = FakeTensor(recorder.mode, torch.empty_like(start, device="meta"), recorder.model.device)
            recorder._constants.pop(tensor, None)
            try:
                torch.utils.swap_tensors(tensor, fake)
            except RuntimeError:  # there is a weak reference to the object
                return
        self._made.remove(id(tensor))
        with recorder.paused():
            copied = write_argument(recorder.substitute(start), recorder.reference)
            recorder._refs[tensor] = (recorder.emit("op", name=NAMES[torch.ops.aten.clone.default], args=[copied]), 0)


def share_memory(tensor: torch.Tensor, result: Any) -> bool:
    """Whether the result of an operator shares memory with ``tensor``."""
    first = result if isinstance(result, torch.Tensor) else next(iter(result), tensor)
    return first.untyped_storage()._cdata == tensor.untyped_storage()._cdata


def stretch(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the offsets of the first byte of a tensor in its storage, and of the byte after its last byte."""
    with torch._C.DisableTorchFunction():
        start = int(tensor.storage_offset())
        length = int(sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))) + 1
        return start * tensor.element_size(), (start + max(length, 0)) * tensor.element_size()
