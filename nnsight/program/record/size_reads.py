"""Records the sizes that a block reads, and gets sizes that depend on values; see :mod:`~nnsight.program.format.sizes`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ..format.nodes import Node
from ..format.sizes import SIZE_METHODS, Shape, division, has_unknown_size, known_dims, takes_sizes
from .refusals import WITHOUT_SIZE
from .visits import References

if TYPE_CHECKING:
    from .demands import Cuts
    from .inputs import NamedInputs

_UNKNOWN_SIZE = f"Python reads a size that depends on values, and the values are where the model runs. {WITHOUT_SIZE}"


def unseen(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of a recorder that does not record its own calls."""

    @functools.wraps(method)
    def without_listening(self: SizeReads, *args: Any, **kwargs: Any) -> Any:
        before, self._paused = self._paused, True  # the context manager `paused` would take as long as many of these methods
        try:
            return method(self, *args, **kwargs)
        finally:
            self._paused = before

    return without_listening


class SizeReads(TorchFunctionMode):
    """The part of a recorder that answers reads of sizes. It records the sizes that a program for other inputs depends on."""

    cuts: Cuts
    substitute: Callable[[torch.Tensor], torch.Tensor]
    emit: Callable[..., int]
    paused: Callable[[], Any]
    _called: tuple[str, list[Any]]
    _paused = False
    _for_other_inputs = False  # the value for a size that the user reads after the recording, which nothing depends on
    _looked: dict[tuple[int, int, int], int]
    runs_again: bool
    nodes: list[Node]
    _of_rows = False  # whether sizes are read to find the rows of an invoke
    _refs: References
    _unknown: Any

    @property
    def inputs(self) -> NamedInputs | None:
        """The named inputs of the block whose turn it is, if the program is for other inputs."""
        return None

    def _metadata(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return metadata of a tensor, and record the sizes that the result reveals."""
        tensor, *rest = (*args, *kwargs.values())
        looked = tensor
        if self.inputs is not None and isinstance(tensor, torch.Tensor) and self.inputs.name_of(tensor):
            looked = self.substitute(tensor)
        if not isinstance(looked, FakeTensor) or not (self._for_other_inputs or has_unknown_size(looked)):
            return function(*args, **kwargs)
        name, look = getattr(function, "__name__", ""), functools.partial(self._look, looked)
        if name == "size" and rest:
            size = look(range(looked.dim())[rest[0]])
            if size is not None:
                return size
        elif name in SIZE_METHODS and name != "size" and has_unknown_size(looked):
            return self.cuts.call(name, function, args, kwargs, _UNKNOWN_SIZE)
        elif name == "__len__" and looked.dim():
            look(0)
        elif (name in SIZE_METHODS and name != "size") or function == torch.Tensor.nbytes.__get__:  # type: ignore[attr-defined]
            Shape(looked.size(), look).all()
        found = function(*args, **kwargs)
        return Shape(found, look) if isinstance(found, torch.Size) else found

    @unseen
    def _look(self, tensor: torch.Tensor, dim: int) -> int | None:
        """Record that a size of a value is read. Return the size if it depends on values, else ``None``."""
        if isinstance(tensor.shape[dim], torch.SymInt):
            return self.cuts.values_of([tensor], "size", _UNKNOWN_SIZE)[0].shape[dim]
        if self._for_other_inputs and (self.runs_again or not self._of_rows):  # one job has the same rows in all steps
            node, output = self._refs.get(tensor, (None, 0))
            known = None if node is None else self._looked.get((node, output, dim))
            if known is not None and not self._of_rows:
                self.nodes[known].pop("rows", None)
            elif node is not None and known is None:
                of_rows = {"rows": True} if self._of_rows else {}
                read = {"ref": [node, output]}
                self._looked[node, output, dim] = self.emit("size", value=read, dim=dim, size=int(tensor.shape[dim]), **of_rows)
        return None

    @contextlib.contextmanager
    def finding_rows(self) -> Iterator[None]:
        """Sizes that are read in this context matter only if the program uses the tensor."""
        before, self._of_rows = self._of_rows, True
        try:
            yield
        finally:
            self._of_rows = before

    def _look_all(self, tensor: torch.Tensor, dims: Iterable[int] | None = None) -> None:
        for dim in range(tensor.dim()) if dims is None else dims:
            self._look(tensor, dim)

    def _unknown_size(self, most: int) -> Any:
        """Return a new symbol for the size of a dimension that depends on values."""
        from torch.fx.experimental.symbolic_shapes import ShapeEnv  # slow to import

        self._unknown = self._unknown or ShapeEnv()
        size = self._unknown.create_unbacked_symint()
        torch._check(size >= 0)
        return size

    def _look_for_torch(self, name: str, args: tuple[Any, ...]) -> None:
        """Record the sizes that decide to which operators torch lowers a call of the block."""
        function, given = self._called
        divided = division(name, args, {})
        if divided is not None:  # the number of results is part of the program
            self._look(args[0], range(args[0].dim())[divided[0]])
        if name.startswith("aten.squeeze."):  # the number of dimensions is part of the program
            named = pytree.tree_leaves(args[1:]) or known_dims(args[0])
            self._look_all(args[0], {dim % args[0].dim() for dim in named if args[0].dim()}.intersection(known_dims(args[0])))
        if takes_sizes(function, name, args, given):
            for tensor in (*args, *given):
                if isinstance(tensor, FakeTensor):
                    self._look_all(tensor, known_dims(tensor))
