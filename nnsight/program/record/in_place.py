"""In-place edits of the tensors of a recording.

The value of a ``read`` that the block edits becomes a copy. The operators edit the copy, and a ``write`` copies it into the memory of the
model's tensor when the block leaves the location. Between edit and write, other objects with that memory would show the old numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..format.errors import NotExpressibleError
from ..format.trees import references, with_references
from .memory import stretch
from .refusals import here, refused

if TYPE_CHECKING:
    from .recorded_calls import NodeRecorder


class InPlaceEdits:
    """Knows the memory of the values that blocks got, and what was edited in it.

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
            if root == read or root in {recorder._roots[number] for number, _ in older}:
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
