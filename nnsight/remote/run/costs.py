"""What a rehearsal of a job on fakes counts: memory, work, and writes to weights."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from ...runtime.interleaver import active_interleaver
from ...runtime.rows.fakes import Guesses
from ..wire.errors import InvalidProgramError
from ..wire.limits import Limits
from ..wire.nodes import Node
from .fake_runs import FakeModel


class Costs(Guesses):
    """Counts the work of a run on fakes, and answers where the model asks for values."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.flops, self.of_model, self._limit = 0, 0, limit

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        run = active_interleaver()
        of_block = run is not None and run.current is not None
        result = func(*args, **(kwargs or {})) if of_block else super().__torch_dispatch__(func, types, args, kwargs)
        flops = sum(leaf.numel() for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor))
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            with contextlib.suppress(Exception):  # counters of torch know the usual arguments only
                flops += int(count(*args, **(kwargs or {}), out_val=result))
        if of_block:
            self.add(flops)
        else:
            self.add_of_model(flops)
        return result

    def add_of_model(self, flops: int) -> None:
        """Count operations of the model; raises as :meth:`add`."""
        self.of_model += flops
        self.add(flops)

    def add(self, flops: int) -> None:
        """Count operations.

        Raises:
            InvalidProgramError: If there are too many.
        """
        self.flops += flops
        if self.flops > self._limit:
            raise InvalidProgramError(f"The job takes more floating point operations than the limit, {self._limit}.")


class WrittenMemory:
    """What a program does to memory, seen on fakes.

    Attributes:
        made: Bytes of all tensors that the program made.
    """

    def __init__(self, fakes: FakeModel, constants: dict[str, torch.Tensor], limits: Limits) -> None:
        self._fakes, self._limits = fakes, limits
        self._kept = fakes.storages() | {tensor.untyped_storage()._cdata for tensor in constants.values()}
        self._saved: dict[int, torch.UntypedStorage] = {}
        self.made = 0

    def done(self, node: Node, arguments: Any, result: Any) -> None:
        """Count what a node made, and refuse what is too large."""
        for leaf in pytree.tree_leaves(result):
            if not isinstance(leaf, torch.Tensor):
                continue
            size = leaf.numel() * leaf.element_size()
            if size > self._limits.tensor_bytes:
                raise InvalidProgramError(
                    f"`{node.get('name', node['do'])}` makes a tensor of {size} bytes; the limit is {self._limits.tensor_bytes}."
                )
            self.count(size)
        if node["do"] == "op" and node["name"].split(".")[1].endswith("_"):
            self.check_write(arguments[0][0])

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count a tensor that autograd keeps for a backward pass."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._kept and storage._cdata not in self._saved:
            self._saved[storage._cdata] = storage  # kept, so that its identity stays its own
            self.count(storage.nbytes())
        return tensor

    def count(self, size: int) -> None:
        """Count bytes.

        Raises:
            InvalidProgramError: If there are too many.
        """
        self.made += size
        if self.made > self._limits.total_bytes:
            raise InvalidProgramError(f"The program makes more bytes than the limit, {self._limits.total_bytes}.")

    def check_write(self, tensor: torch.Tensor) -> None:
        """Raise if a tensor shares memory with what the model keeps."""
        if tensor.untyped_storage()._cdata in self._kept:
            raise InvalidProgramError("The program would write to memory of the model that outlives the run.")

    def apply(self, path: str, args: Any, kwargs: Any) -> Any:
        """Apply a module, and refuse it if it writes to what it is given, or to weights."""
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        before = self._fakes.versions() + sum(tensor._version for tensor in given)
        result = self._fakes.by_path[path].forward(*args, **kwargs)
        if self._fakes.versions() + sum(tensor._version for tensor in given) != before:
            raise InvalidProgramError(f"`{path}` writes to what it is applied to, or to its weights.")
        return result
