"""The memory of the tensors of a recording: which of them share it, which ones the block has made itself, and edits in place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from ..format.errors import NotExpressibleError
from ..format.nodes import write_argument
from ..format.operators import NAMES, is_in_place, is_view
from ..format.trees import references, with_references
from .inputs import edits_allowed
from .refusals import here, refused, why_demand

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
                with edits_allowed(function, args, kwargs):
                    result = function(*args, **kwargs)
                given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if type(leaf) is torch.Tensor]
                with torch._C.DisableTorchFunction():
                    is_given = any(leaf is result for leaf in given)  # such as the result of an edit in place
                    transforms = torch._C._are_functorch_transforms_active()  # their tensors have no storage
                    if type(result) is torch.Tensor and not is_given and not transforms:
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


class InPlaceEdits:
    """Knows the memory of the values that blocks got, and what was edited in it.

    The value of a ``read`` that the block edits becomes a copy. The operators edit the copy, and a ``write`` copies it into the memory of
    the model's tensor when the block leaves the location. In between, other objects with that memory would show the old numbers.

    Attributes:
        copies: For the node of each copy, the tensor that it would be a view of for other sizes.
    """

    def __init__(self, recorder: NodeRecorder) -> None:
        self._recorder = recorder
        self._read: dict[int, torch.Tensor] = {}  # the model's tensor of each `read`
        self._reads_of: dict[int, list[int]] = {}  # the `read` nodes of each storage
        self._stale: dict[int, list[tuple[int, int, str]]] = {}  # root -> bytes that were edited through another copy, and an error
        self.copies: dict[int, torch.Tensor] = {}

    def note_read(self, number: int, tensor: torch.Tensor) -> None:
        """Note that node ``number`` is a ``read`` of the model's ``tensor``."""
        self._read[number] = tensor
        self._reads_of.setdefault(tensor.untyped_storage()._cdata, []).append(number)

    def end_visit(self) -> None:
        """Note that the edits of a visit have been written to the model's tensors."""
        nodes = self._recorder.nodes
        self._stale = {number: edits for number, edits in self._stale.items() if nodes[number].get("copy")}

    def check_fresh(self, tensor: torch.Tensor) -> None:
        """Raise an error if the memory of ``tensor`` was edited through the copy of another ``read``."""
        edits = self._stale.get(self._root(tensor), ())
        low, high = stretch(tensor) if edits else (0, 0)
        for start, end, message in edits:
            if start < high and low < end:
                raise NotExpressibleError(message)

    def edit(self, tensor: torch.Tensor) -> None:
        """Note that a tensor is edited in place, or refuse the edit."""
        recorder = self._recorder
        recorder.reference(tensor)
        self._join_reads(self._root(tensor))
        root = self._root(tensor)
        node = recorder.nodes[root]
        if node["do"] in ("const", "weight"):
            what = "a weight" if node["do"] == "weight" else "a tensor that is from outside, or that has views,"
            raise refused(
                f"The block edits {what} in place with values of the model. `.clone()` it first, or write `t[0] = t[0] + x` instead of "
                "`t[0] += x`."
            )
        if root in self.copies:  # for other sizes it is a view, and the edit would reach its base
            node["copy"] = True
            recorder._look_all(self.copies[root])
        if node["do"] == "apply":
            if node.get("shares"):
                raise refused(f"`{node['module']}` returns a tensor that shares memory with its arguments or weights. `.clone()` it first.")
            node["copy"] = True
        if node["do"] != "read":
            return
        visit = next((visit for visit in reversed(recorder._visits) if root in visit.reads.values()), None)
        if visit is None:
            raise refused(
                f"The value of `{node['site']}` is edited in place after the model has gone on from there. Edit it where it is read, or "
                "`.clone()` it first."
            )
        if not recorder.gradients.enabled:  # the model would compute with the copy, to which no gradient flows
            recorder.gradients.lose(f"the value of `{node['site']}` is edited in place under `torch.no_grad()`")
        if root not in visit.edited:
            node["copy"] = True
            visit.edited.add(root)
        for other in self._reads_of[self._read[root].untyped_storage()._cdata]:
            if other != root:
                message = here(
                    f"The block edits the value of `{node['site']}` in place, and uses another value that shares memory with it before the "
                    "model goes on. `.clone()` it first."
                )
                self._stale.setdefault(other, []).append((*stretch(tensor), message))

    def is_patched(self, whole: torch.Tensor) -> bool:
        """Whether a later invoke edits ``whole``, a value of the model, and an operator has used this invoke's rows before.

        The gradient of the rows is that of ``whole`` after the edit, so it would lack the way through this operator.
        """
        nodes, read = self._recorder.nodes, self._recorder._refs[whole][0]
        tensor = self._read.get(read)
        if tensor is None:
            return False
        with torch._C.DisableTorchFunction():  # this look at the tensor is not one of the block
            reads, block = self._reads_of[tensor.untyped_storage()._cdata], nodes[read]["block"]
        writes = [number for number, node in enumerate(nodes) if node["do"] == "write" and node.get("in_place") and node["block"] != block]
        last = max((number for number in writes if nodes[number]["value"]["ref"][0] in reads), default=read)
        views = {read}
        for number, node in enumerate(nodes[read + 1 : last], read + 1):
            name, used = node.get("name", ""), [used for used, _ in references([node.get("args"), node.get("kwargs")])]
            if views.isdisjoint(used) or name == NAMES[torch.ops.aten.detach.default]:
                continue
            if not (used[0] in views and (is_view(name) or is_in_place(name))):
                return True
            views.add(number)
        return False

    def _root(self, tensor: torch.Tensor) -> int:
        """Return the number of the node that made the memory of ``tensor``."""
        return self._recorder._roots[self._recorder._refs[tensor][0]]

    def _join_reads(self, root: int) -> None:
        """If the memory of node ``root`` is that of a tensor which the block knew before the present visit, join its objects."""
        recorder = self._recorder
        visit = next((visit for visit in reversed(recorder._visits) if visit.block == recorder.block), None)
        for read, tensor in () if visit is None else visit.reads_of_known():
            found = recorder._refs.own.items()
            alike = [(fake, ref) for fake, ref in found if fake is tensor or self._read.get(ref[0]) is tensor]
            older = {ref for _, ref in alike if ref[0] != read}
            if older and (root == read or root in {recorder._roots[number] for number, _ in older}):
                self._join(read, older)
                for fake, _ in alike:
                    recorder._refs[fake] = read, 0

    def _join(self, read: int, older: set[tuple[int, int]]) -> None:
        """Let the nodes since node ``read`` use it in place of ``older`` references, which are the same tensor."""
        nodes, roots = self._recorder.nodes, self._recorder._roots
        older_roots = {roots[number] for number, _ in older}
        for number in range(read + 1, len(nodes)):
            if (nodes[number]["run"], nodes[number]["block"]) != (nodes[read]["run"], nodes[read]["block"]):
                continue
            nodes[number] = with_references(nodes[number], lambda *ref: {"ref": [read, 0] if ref in older else list(ref)})
            used = next(references(nodes[number].get("args", [])), None)
            if used is not None and roots[number] in older_roots and roots[used[0]] == read:
                roots[number] = read


def version_of(tensor: torch.Tensor) -> int:
    """Return the number of edits of a tensor in place; -1 for an inference tensor, which does not count them."""
    return -1 if tensor.is_inference() else tensor._version


def is_unedited(tensor: torch.Tensor, version: int, copied: torch.Tensor) -> bool:
    """Whether a tensor is as it was at ``version``, when it was copied. The values of inference tensors are compared."""
    if not tensor.is_inference():
        return tensor._version == version
    with _disable_current_modes():
        return torch.equal(tensor, copied)


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
