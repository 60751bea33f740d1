"""A block of a program as a function, which runs in a block of a model: :meth:`nnsight.Program.apply` makes edits of such functions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ...modeling.base import NNsight
from ...runtime.interleaver import active_interleaver
from ..format.limits import Limits
from ..format.nodes import Node
from ..format.payload import Job, decode, encode, inputs_of
from .interpreter import Interpreter


class _InBlock(Interpreter):
    """Runs nodes in a block of a model. If a node waits in a loop, the block does, and is complete when the model ends."""

    def _do(self, number: int, node: Node, along: list[tuple[int, Node]]) -> None:
        mediator: Any = active_interleaver().current  # type: ignore[union-attr]
        mediator.loops += "loop" in node
        mediator.ends_in_loop = "loop" in node
        try:
            super()._do(number, node, along)
        finally:
            mediator.loops -= "loop" in node


class ProgramBlock:
    """The nodes of one block of a program. A call runs them in a block of a model.

    Attributes:
        inputs: The named inputs of these nodes.
    """

    def __init__(self, job: Job, block: int) -> None:
        self._job, self._block = job, block
        self._nodes = [(number, node) for number, node in enumerate(job.nodes) if node["block"] == block]
        self.inputs = inputs_of(replace(job, nodes=[node for _, node in self._nodes]))

    def with_input(self, name: str, value: torch.Tensor) -> ProgramBlock:
        """Return the same block with ``value`` as its input ``name``."""
        return ProgramBlock(replace(self._job, tensors={**self._job.tensors, name: value}), self._block)

    def as_tensor(self) -> torch.Tensor:
        """Return the program and the number of the block as a tensor of bytes, for files."""
        return torch.frombuffer(bytearray(self._block.to_bytes(4) + encode(self._job)), dtype=torch.uint8)

    @classmethod
    def from_tensor(cls, content: torch.Tensor) -> ProgramBlock:
        """Return the block in the result of :meth:`as_tensor`, or raise an :class:`InvalidProgramError`. Nothing in it is run."""
        data = bytes(content.tolist())
        return cls(decode(data[4:]), int.from_bytes(data[:4]))

    def __call__(self, model: NNsight) -> None:
        interpreter = _InBlock(model, self._job, Limits(seconds=float("inf")))
        interpreter.on_log = print
        interpreter.place_constants()
        interpreter.run_nodes(self._nodes)
