"""Rehearsals: runs of jobs on fake tensors, which count operations and memory, and refuse writes to weights."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from ...modeling.base import NNsight
from ...runtime.interleaver import active_interleaver
from ...runtime.rows.fakes import Guesses, places, result_of_size
from ..format.errors import require
from ..format.limits import Limits
from ..format.nodes import Node
from ..format.operators import is_in_place
from ..format.payload import Job
from .fake_runs import FakeModel
from .interpreter import Interpreter


class Costs(Guesses):
    """Counts the operations of a run on fake tensors, and guesses values that the model asks for.

    If the size of a result of the program depends on values, the result has the largest possible size. ``flops`` are the operations of
    model and program, and ``of_model`` those of the model alone.
    """

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.flops, self.of_model, self._limit = 0, 0, limit
        self.selects = False  # whether a size in the program depends on values
        self.begun: list[int] = []  # the operations before each token of a generation
        self.on_made: Callable[[torch.Tensor], None] | None = None  # called with each tensor that an operator of a program makes
        self.on_step: Callable[[], None] = lambda: None  # called before each token of a generation

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        run, kwargs = active_interleaver(), kwargs or {}
        of_block = run is not None and run.current is not None
        in_pass = torch._C._current_graph_task_id() >= 0 and not self.made  # a backward pass, whose sizes contain no guesses
        guesses = super().__torch_dispatch__
        try:
            result = func(*args, **kwargs) if of_block or in_pass else guesses(func, types, args, kwargs)
        except DynamicOutputShapeException:
            with self:
                largest = result_of_size(func, args, kwargs, lambda most: most) if of_block or in_pass else None
            if largest is None:
                raise
            self.selects = self.selects or of_block
            return largest
        except DataDependentOutputException:
            if of_block:
                raise
            result = guesses(func, types, args, kwargs)
        self._count(func, args, kwargs, result, of_model=not of_block)
        return result

    def _count(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any, of_model: bool) -> None:
        made = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        flops = sum(leaf.numel() for leaf in made)
        if self.on_made is not None:  # includes intermediate results of composite operators
            for leaf in made:
                self.on_made(leaf)
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            with contextlib.suppress(Exception):  # the counters of torch fail for unusual arguments
                flops += int(count(*args, **kwargs, out_val=result))
        self.add(flops, of_model)

    def begin_step(self) -> None:
        """Note that the next token of a generation begins."""
        self.on_step()
        self.begun.append(self.flops)

    def add(self, flops: int, of_model: bool = False) -> None:
        """Count operations. Raise an :class:`InvalidProgramError` if there are too many."""
        self.flops += flops
        if of_model:
            self.of_model += flops
        limit = self._limit
        require(self.flops <= limit, f"The job takes more floating point operations than the limit, {limit}.")

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """On exit, forget the operations in this context. They are not limited."""
        before = self.flops, self.of_model, self._limit
        self._limit = sys.maxsize
        try:
            yield
        finally:
            self.flops, self.of_model, self._limit = before


class Rehearsal(Interpreter):
    """Interprets a job on fake tensors. It counts the bytes of all tensors in ``made``, and refuses writes to memory of the model."""

    def __init__(self, model: NNsight, job: Job, limits: Limits, fakes: FakeModel, costs: Costs) -> None:
        super().__init__(model, job, limits)
        self.fakes, self.device, self._costs = fakes, fakes.device, costs
        self.constants = {name: fakes.faked(tensor) for name, tensor in job.tensors.items()}
        self.check_write = self._check_write
        self._kept = fakes.storages() | {tensor.untyped_storage()._cdata for tensor in self.constants.values()}
        self._saved: dict[int, torch.UntypedStorage] = {}
        self.made = 0

    def weight(self, name: str) -> torch.Tensor:
        """Return the fake tensor of a parameter or buffer."""
        return self.fakes.by_name[name]

    def done(self, node: Node, arguments: Any, result: Any) -> None:
        """Count the results of a module, and check where an operator wrote."""
        if node["do"] == "op":
            if is_in_place(node["name"]):
                self._check_write(arguments[0][0])
            if node["name"].startswith("aten.index_put"):
                args, kwargs = arguments
                for index in args[1] if len(args) > 1 else kwargs["indices"]:
                    places(index, lambda most: most)  # makes the indices that replace a mask, so that they are counted
            return
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._measure(node["do"], leaf)

    def _operate(self, number: int, node: Node) -> None:
        self._costs.on_made = functools.partial(self._measure, node["name"])
        try:
            super()._operate(number, node)
        finally:
            self._costs.on_made = None

    def _measure(self, name: str, tensor: torch.Tensor) -> None:
        """Count a tensor that an operator or a module makes. Refuse it if it is too large."""
        self.check_time()
        size, most = tensor.numel() * tensor.element_size(), self.limits.tensor_bytes
        require(size <= most, f"`{name}` makes a tensor of {size} bytes; the limit is {most}.")
        self._count(size)

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count a tensor that autograd keeps for a backward pass."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._kept and storage._cdata not in self._saved:
            self._saved[storage._cdata] = storage  # a reference, so that no other storage gets the same identity
            self._count(storage.nbytes())
        return tensor

    def apply(self, path: str, args: Any, kwargs: Any) -> Any:
        """Apply a module, and refuse it if it writes to its arguments or to weights."""
        result, wrote = self.fakes.apply(path, args, kwargs)
        require(not wrote, f"`{path}` writes to its arguments or to its weights.")
        return result

    def _count(self, size: int) -> None:
        self.made += size
        most = self.limits.total_bytes
        require(self.made <= most, f"The program makes more bytes than the limit, {most}.")

    def _check_write(self, tensor: torch.Tensor) -> None:
        kept = tensor.untyped_storage()._cdata in self._kept
        require(not kept, "The program would write to memory of the model that outlives the run.")
