"""Records the calls of a block as nodes, one node for each operator; see :mod:`~nnsight.program.record.recorder`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from ...fx.effects import RANDOM
from ...fx.recording.failing_calls import handler, may_fail_by_values
from ...fx.recording.functions import (
    ABOUT_GRADIENTS,
    DEMANDS,
    DRAWN_LIKE,
    METADATA,
    READ_AS,
    edits_in_place,
    is_numpy_scalar,
)
from ...modeling.scanning import fake_mode
from ...runtime.rows.fakes import result_of_size
from ..format.nodes import Node, why_not, write_argument
from ..format.operators import NAMES, is_in_place, is_view
from ..format.sizes import SIZE_METHODS, Shape, plain
from ..run.fake_runs import FakeModel
from .demands import NEEDS_VALUES, VALUES, Cuts, NoOperatorError
from .indexing import with_bounds
from .inputs import edited_by
from .memory import InPlaceEdits, OwnTensors, is_unedited, share_memory, version_of
from .printing import Prints
from .recorded_gradients import Gradients
from .refusals import WITHOUT_SIZE, position, refused, why_demand
from .size_reads import SizeReads, unseen
from .visits import References, Visit

_GRADIENTS = frozenset("backward register_hook retain_grad detach_ grad".split())
_ATTENTION = torch.nn.functional.scaled_dot_product_attention

#: Operators that give uninitialised memory are recorded as operators that give zeros.
_REPLACED_BY = {torch.ops.aten.empty_like.default: torch.ops.aten.zeros_like.default}

#: Dtypes of scalar tensors that index like integers.
_INTEGERS = frozenset({torch.int8, torch.int16, torch.int32, torch.int64})


#: The device of a model whose weights are not loaded.
_META = torch.device("meta")


class NodeRecorder(SizeReads):
    """Records the calls of blocks. It is the torch function mode of a recording.

    Args:
        for_other_inputs: Whether to record which sizes blocks read, see :mod:`~nnsight.program.format.sizes`.

    Attributes:
        nodes: The nodes so far.
        runs: The runs of the model, see :class:`~nnsight.program.format.payload.Job`.
        tensors: Inputs of the model, and the blocks' own tensors that became constants, by name.
        block: Number of the block whose turn it is, or ``None``.
        model: The model with fake tensors, from the first run on.
        gradients, prints, edits: Record backward passes, prints and in-place edits.
        cuts: Gets the values that blocks need.
        moves: Number of times that a visit began or ended. In between, the model may change values.
    """

    model: FakeModel
    cuts: Cuts

    def __init__(self, for_other_inputs: bool = False) -> None:
        super().__init__()
        self.nodes: list[Node] = []
        self.runs: list[dict[str, Any]] = []
        self.tensors: dict[str, torch.Tensor] = {}
        self.handed_over: dict[int, torch.Tensor] = {}  # the block's own tensors that it gave to the model, by their memory
        self.originals: dict[str, tuple[torch.Tensor, int]] = {}  # the original of each constant, and its version at the time of the copy
        self.mode = fake_mode()
        self.block: int | None = None
        self.gradients = Gradients(self)
        self.prints = Prints(self)
        self.own = OwnTensors(self)
        self.edits = InPlaceEdits(self)
        self._for_other_inputs = for_other_inputs
        self.runs_again = for_other_inputs  # whether the program may run several times; `_for_other_inputs` is set for each generation, too
        self._looked: dict[tuple[int, int, int], int] = {}  # the `size` nodes, by node, output and dimension
        self._called: tuple[str, list[Any]] = "", []  # name of the function that the block calls, and the leaves of its arguments
        self._paused = False
        self._refs = References(self)
        self._roots: list[int] = []  # for each node, the node that made the memory of its result
        self._constants: Any = WeakIdKeyDictionary()  # the block's own tensor -> (version, copy, fake)
        self._visits: list[Visit] = []  # visits that have not ended
        self.moves = 0
        self._unknown: Any = None  # the `ShapeEnv` of sizes that depend on values

    # -- nodes -----------------------------------------------------------------------------------------------------

    def emit(self, do: str, root: int | None = None, **content: Any) -> int:
        """Append a node to the block whose turn it is, and return its number."""
        self.gradients.check_node(do)
        if do == "stop":
            self.prints.end()
        line = position()[1]
        number = len(self.nodes)
        if do in ("op", "apply") and not self.gradients.enabled:
            content["no_grad"] = True
        self.nodes.append(
            {"do": do, "run": len(self.runs) - 1, "block": self.block, **content, **({"line": line} if line else {})}
        )
        self._roots.append(number if root is None else root)
        return number

    def reference(self, tensor: torch.Tensor) -> Any:
        """Return the reference to a tensor. Record the tensor first if it is a weight, or one of the block's own."""
        tensor = self.substitute(tensor)
        if tensor not in self._refs:
            raise refused(
                "The block uses a tensor that it neither got at a location of the model nor made itself, such as the content of a cache. "
                "Read the module that produces it."
            )
        self.edits.check_fresh(tensor)
        return {"ref": list(self._refs.for_block(tensor))}

    @unseen
    def substitute(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the fake tensor for a weight, or for one of the block's own tensors. A fake tensor is returned as it is."""
        if isinstance(tensor, FakeTensor):
            return tensor
        known = self.model.weights.get(id(tensor))
        if known is not None:
            name, fake = known
            if fake not in self._refs:
                self._refs[fake] = (self.emit("weight", name=name), 0)
            return fake
        kept = self._constants.get(tensor)
        if kept is not None and is_unedited(tensor, *kept[:2]):
            return kept[2]
        if tensor.is_meta:
            raise refused(
                "A tensor on the meta device has no values, so it cannot be sent. Make it on the CPU. Outside of blocks, `model.device` is "
                "the meta device while the weights are not loaded."
            )
        if tensor.layout != torch.strided or tensor.dtype.is_complex:
            raise refused("A sparse tensor or a complex tensor cannot be sent.")
        with _disable_current_modes():
            copied = tensor.detach().clone()
            like = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
        fake = FakeTensor(self.mode, like, self.model.device)
        name = (self.inputs and self.inputs.name_of(tensor)) or ""
        if not name or name in self.tensors:
            name = f"#{len(self.tensors)}"
        self.tensors[name] = copied
        if not self.own.has(tensor):
            self.originals[name] = tensor, version_of(tensor)
        self._constants[tensor] = (version_of(tensor), copied, fake)
        self._refs[fake] = (self.emit("const", tensor=name), 0)
        if tensor.requires_grad and not self.gradients.running:
            self.gradients.require(fake)
        return fake

    def checked_functions(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which each call of an ``autograd.Function`` is checked, if the program may run again."""
        if not self.runs_again:
            return contextlib.nullcontext()
        from ...fx.recording.opaque_functions import made_visible

        return made_visible

    def check_autograd_function(self, kind: type) -> None:
        """Refuse a ``torch.autograd.Function`` in a program that may run again, because its custom gradient would be lost."""
        if self.listens and self.runs_again and self.gradients.followed and self.gradients.enabled:
            raise refused(
                f"`{kind.__name__}` is an autograd.Function, and a program cannot contain its custom gradient. Write it with operators, "
                "as in `x + (f(x) - x).detach()`, or record the block under `torch.no_grad()`."
            )

    # -- calls of the block ----------------------------------------------------------------------------------------

    @property
    def listens(self) -> bool:
        """Whether it is the turn of a block, and the recorder is not paused."""
        return self.block is not None and not self._paused

    @contextlib.contextmanager
    def turn_of(self, block: int | None) -> Iterator[None]:
        """Set the block whose turn it is."""
        before, self.block = self.block, block
        try:
            yield
        finally:
            self.block = before

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Do not record calls."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a torch function. Record it if a block calls it."""
        kwargs = kwargs or {}
        if not self.listens:
            return function(*args, **kwargs)
        if self._for_other_inputs or self._unknown is not None:
            args, kwargs = (pytree.tree_map(plain, part) for part in (args, kwargs))
        name = getattr(function, "__name__", "")
        if self.inputs is not None:
            args, kwargs = self.inputs.with_floats(name, args, kwargs)
        if function in METADATA or name in SIZE_METHODS:
            return self._metadata(function, args, kwargs)
        if function is torch._C._set_grad_enabled:  # `torch.no_grad()` and similar contexts call it on entry and on exit
            return self.gradients.set_mode(*args)
        edited = edited_by(args, kwargs) if edits_in_place(function) else None
        if self.handed_over and edited is not None:
            self._check_not_handed_over(name, edited)
        if name in ("__getitem__", "__setitem__"):
            args = (args[0], self._bounds(args[1]), *args[2:])
        leaves = pytree.tree_leaves((args, kwargs))
        if self.model.is_lazy and any(leaf == _META for leaf in leaves if isinstance(leaf, torch.device)):
            args, kwargs = pytree.tree_map_only(torch.device, self._argument, (args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if self.inputs is not None and self.inputs.are_all(tensors):
            return self.inputs.call(function, args, kwargs, lambda: self._record(function, name, args, kwargs, leaves))
        if self.inputs is not None and edited is not None:
            self.inputs.forget(edited)
        if not any(isinstance(tensor, FakeTensor) or id(tensor) in self.model.weights for tensor in tensors):
            if self.runs_again and name in RANDOM:
                raise refused(
                    f"`{name}` draws its numbers while the block is recorded, so each run of the program would have the same numbers. Use "
                    "`torch.randn_like(value)` with a value of the model, which draws anew in each run, or draw before the block."
                )
            return self.own.call(name, function, args, kwargs)
        return self._record(function, name, args, kwargs, leaves)

    def _check_not_handed_over(self, name: str, edited: Any) -> None:
        """Refuse an in-place edit of a tensor that the block gave to the model: it is a constant, which the edit would not reach."""
        own = isinstance(edited, torch.Tensor) and not isinstance(edited, FakeTensor)
        if own and edited.untyped_storage()._cdata in self.handed_over:
            raise refused(
                f"`{name}` edits a tensor in place that the block has already given to the model. Edit it first, or give the model a "
                "`.clone()` of it."
            )

    def _record(self, function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Any]) -> Any:
        """Record a call on values of the model or of the program. Return its result on fake tensors."""
        self._called = name, leaves
        if function in ABOUT_GRADIENTS:
            return self.gradients.answer(ABOUT_GRADIENTS[function], args[0])
        if name == "requires_grad_":
            return self.gradients.require(self.substitute(args[0]), *args[1:], **kwargs)
        if name in _GRADIENTS:
            raise refused(f"`{name}` cannot be sent. Write `with loss.backward():` and read the `.grad` of tensors in its block.")
        if name in ("__repr__", "__format__"):
            return self.prints.mark(self.substitute(args[0]), args[1] if name == "__format__" else None)
        if name in VALUES:
            return self.cuts.call(name, function, args, kwargs, why_demand(name))
        if name in DEMANDS:
            raise refused(why_demand(name))
        if function in DRAWN_LIKE:
            return self._draw_like(function, name, args, kwargs)
        if function is _ATTENTION and (kwargs.get("dropout_p") or any(args[4:5])):
            raise refused("Attention with dropout cannot be sent: use `torch.nn.functional.dropout` on its result.")
        if name in RANDOM and kwargs.get("generator") is not None:
            raise refused(f"A generator of your own cannot be sent: call `{name}` without it, or draw before the trace.")
        if may_fail_by_values(function, args, kwargs) and (caught_by := handler(only_try=True)) is not None:
            why = (
                f"`{name}` may fail because of values, inside {caught_by}. A program has no handlers: check the values first, as in "
                "`index.clamp(max=h.shape[0] - 1)`, or move the line out of it."
            )
            if edits_in_place(function):
                raise refused(why)
            return self.cuts.call(name, function, args, kwargs, why)
        if edits_in_place(function):
            self.own.adopt(edited_by(args, kwargs))
        function = READ_AS.get(function, function)
        if name in ("__getitem__", "__setitem__"):
            args = (args[0], self._index(args[1]), *args[2:])
        args = tuple([self._arguments(item) for item in args])
        kwargs = {key: self._arguments(item) for key, item in kwargs.items()}
        if name in ("cpu", "cuda"):
            return args[0]
        if name in ("to", "type_as"):
            args = tuple(self.model.device if isinstance(item, str) else item for item in args)
        if "device" in kwargs:
            kwargs["device"] = self.model.device
        if edits_in_place(function) and kwargs.get("out") is not None:
            raise refused("`out=` cannot be sent: use the result.")
        try:
            with torch._C._AutoDispatchBelowAutograd():  # the autograd layer would decompose composite operators
                if name in ("__getitem__", "__setitem__") and self._for_other_inputs:
                    args = (*with_bounds(*args[:2]), *args[2:])
                return function(*args, **kwargs)
        except NEEDS_VALUES as error:
            return self.cuts.recover(name, function, args, kwargs, error)
        except RuntimeError as error:
            refusal = self.why_size(error, name)
            if not refusal:
                raise
            return self.cuts.recover(name, function, args, kwargs, error, refusal)

    def _draw_like(self, function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a call such as ``torch.randn_like``. If the program may run again, each run draws its own numbers."""
        like = args[0]
        if not self.runs_again:
            sizes = Shape(like.shape, functools.partial(self._look, like)).all()
            with _disable_current_modes():  # draw now: the numbers become a constant
                drawn = torch.empty(sizes, dtype=like.dtype, device="cpu")
                return function(drawn, *args[1:], **{"dtype": like.dtype, **kwargs, "device": "cpu"})
        made = torch.zeros_like(like, **kwargs)
        if name != "randint_like":
            return made.normal_() if name == "randn_like" else made.uniform_()
        low, high = (0, *args[1:])[-2:]
        return made.random_(high - low).add_(low)

    def why_size(self, error: RuntimeError, name: str) -> str:
        """Return a refusal of ``name`` if ``error`` means that it needs a size that depends on values; else an empty string."""
        if isinstance(error, DataDependentOutputException):
            return why_demand(name)
        unknown = self._unknown is not None and ("data-dependent" in str(error) or "SymInt" in str(error))
        return f"`{name.strip('_')}` needs a size that depends on values. {WITHOUT_SIZE}" if unknown else ""

    def _argument(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.substitute(value)
        if is_numpy_scalar(value):
            return value.item()
        if isinstance(value, torch.device):
            return self.model.device
        return value

    def _arguments(self, value: Any) -> Any:
        return pytree.tree_map(self._argument, value) if isinstance(value, (list, tuple, dict)) else self._argument(value)

    def _bounds(self, index: Any) -> Any:
        """Return an index with numbers in place of the tensors in slices."""
        if isinstance(index, tuple):
            return tuple([self._bounds(item) for item in index])
        if not isinstance(index, slice):
            return index
        bounds = (index.start, index.stop, index.step)
        return slice(*[self._number(bound) if isinstance(bound, FakeTensor) else bound for bound in bounds])

    def _number(self, tensor: torch.Tensor, name: str = "__index__") -> Any:
        """Return the value of a tensor as a number, which function ``name`` needs."""
        value = self.cuts.values_of([self.substitute(tensor)], name, why_demand(name))[0]
        with _disable_current_modes():
            return value.item()

    def _index(self, index: Any) -> Any:
        """Return an index with tensors in place of arrays and lists, and integers in place of the block's own scalar tensors."""
        if isinstance(index, tuple):
            return tuple(self._index(item) for item in index)
        if isinstance(index, list) or (type(index).__module__ == "numpy" and hasattr(index, "__len__")):
            if any(isinstance(item, torch.Tensor) for item in index):
                return index
            with _disable_current_modes():
                index = torch.tensor(index, device="cpu")
        own = isinstance(index, torch.Tensor) and not isinstance(index, FakeTensor)
        if own and index.dim() == 0 and index.dtype in _INTEGERS:
            with _disable_current_modes():
                return int(index)
        return index

    def _substituted(self, argument: Any) -> Any:
        if isinstance(argument, torch.Tensor):
            return self.substitute(argument)
        return [self._substituted(item) for item in argument] if isinstance(argument, (list, tuple)) else argument

    def operator(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record an operator as a node, and return its result on fake tensors."""
        if operator is torch.ops.aten._local_scalar_dense.default:
            return self._number(args[0], "item")
        if operator is torch.ops.aten.lift_fresh.default:
            return self.substitute(args[0])
        if not _returns_tensors(operator):
            return operator(*args, **kwargs)  # it returns sizes or dtypes, or raises an error on fake tensors
        args = tuple([self._substituted(item) for item in args])
        kwargs = {key: self._substituted(item) for key, item in kwargs.items()}
        operator = _REPLACED_BY.get(operator, operator)
        name = NAMES.get(operator)
        if name is not None and is_in_place(name):
            self.edits.edit(args[0])
        if name is None:
            why = why_not("aten." + str(operator).removeprefix("aten."))
            message = f"{why[0].upper()}{why[1:]}."
            raise refused(message) if "is denied" in why else NoOperatorError(message, operator)
        try:
            written = [write_argument(argument, self.reference) for argument in args]
            given = {key: argument for key, argument in kwargs.items() if argument is not None}
            named = {key: write_argument(argument, self.reference) for key, argument in given.items()}
        except TypeError as error:
            if any(isinstance(leaf, torch.SymInt) for leaf in pytree.tree_leaves((args, kwargs))):
                raise refused(f"`{self._called[0]}` computes with a size that depends on values. {WITHOUT_SIZE}") from error
            raise refused(f"`{name}` has an argument that cannot be sent: {error}.") from error
        if self._for_other_inputs:
            self._look_for_torch(name, args)
        result = self._on_fakes(operator, args, kwargs, is_view(name))
        root = self._roots[self._refs[args[0]][0]] if is_view(name) or is_in_place(name) else None
        lent = root is not None and self.nodes[root]["do"] != "op"  # the program does not own the memory
        copied = lent and is_view(name) and not share_memory(args[0], result)
        number = self.emit("op", None if copied else root, name=name, args=written, **({"kwargs": named} if named else {}))
        if copied:
            self.edits.copies[number] = args[0]
        if not is_in_place(name):
            for output, tensor in enumerate(result if isinstance(result, (list, tuple)) else [result]):
                if isinstance(tensor, torch.Tensor):
                    self._refs[tensor] = (number, output)
        return result

    @unseen
    def _on_fakes(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], may_be_view: bool) -> Any:
        try:
            result = operator(*args, **kwargs)
        except DynamicOutputShapeException:
            result = result_of_size(operator, args, kwargs, self._unknown_size)
        if result is args[0] and may_be_view:  # a new object: the node stands for another value, which may be a copy for other sizes
            return torch.ops.aten.alias.default(result)
        return result


@functools.cache
def _returns_tensors(operator: Any) -> bool:
    return any("Tensor" in str(returned.type) for returned in operator._schema.returns)
