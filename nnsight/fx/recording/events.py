"""Events of a program: the references in the arguments of a torch call, and the values that its results become."""

from __future__ import annotations

import linecache
import sysconfig
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ...runtime.interleaver import Interleaver
from ...runtime.rows.batch_axes import Rows
from ...runtime.rows.batching import BatchGroup
from ...runtime.rows.fakes import quiet_fakes
from ...runtime.switching.mode_stacks import ModeStacks
from ...runtime.switching.modes import Modes
from ...tracing.errors import user_position_now
from ..block_events import (
    Call,
    Constant,
    Declare,
    Event,
    External,
    Input,
    Nest,
    Outcome,
    Reference,
    State,
    Symbol,
    ValueNumber,
)
from ..capturing.graph import CapturedGraph, Tap
from ..splicing.pieces import Piece, references
from ..torch_compat import static_fake
from .autograd_state import any_of, is_detaching, wants_grad
from .functions import (
    EXPORTING,
    PLAIN,
    TAKES_SCALAR_TENSORS,
    edits_in_place,
    is_numpy_scalar,
    path_step,
)
from .lazy import LazyTensor, make_lazy, real_of
from .numbers import Lifted, floats_as_tensors, lift, same_structure, twin_of

if TYPE_CHECKING:
    from .journal import Journal

#: Most combinations of sizes and integers for which the fake result of a call is kept.
_KEPT_SIZES = 256

#: Types of scalar tensors that are the same index as the integer in them.
_INDEX_TYPES = frozenset({torch.int8, torch.int16, torch.int32, torch.int64})

#: Prefixes of the files that a user has not written: torch, the standard library, installed packages.
_LIBRARIES = (
    torch.__file__.rsplit("/", 1)[0],
    *{f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib", "platlib")},
    "<frozen ",
)


#: The types :data:`.PLAIN`, for a quick test.
_UNCHANGED = frozenset(PLAIN)


class NegativeZero(float):
    """The type of the constant ``-0.0``, which is equal to ``0.0`` and gives other results."""


class NotLowerableError(Exception):
    """A call has an argument that no graph can contain."""


class EventRecorder(TorchFunctionMode):
    """Turns calls into events, and keeps the program so far with its tensors and numbers.

    Attributes:
        binding: The sizes that the graph's symbols have for these inputs.
        modes: Grad mode, inference mode and autocast of the model, in which the graph runs.
        stacks: The other modes of the model.
        random: Whether the graph draws random numbers before the next call of the block.
        relaid: Whether a replacement has other strides than the captured value.
        lifted: Scalar tensors that were made from Python floats.
        filled: Lazy tensors that are computed but could not become the real tensor.
        gained_grad: Whether an edit in place may have made other tensors require a gradient.
    """

    run: Interleaver
    piece: Piece
    demand: Callable[..., Any]
    compute_for_nested: Callable[[], None]
    _object: Callable[[Any], torch.Tensor]
    _differentiates: bool
    call: Callable[..., Any]

    def __init__(self, graph: CapturedGraph, inputs: tuple[Any, ...], journal: Journal | None = None) -> None:
        super().__init__()
        self.graph = graph
        self.journal = journal
        self.binding = graph.binding(inputs)
        self.symbol_of_size = {
            size: Symbol(position) for position, size in reversed(list(enumerate(self.binding))) if size > 1
        }
        self.modes = Modes.now()
        self.stacks = ModeStacks.now()
        self.grad_enabled = self.modes.grad
        self.state = graph.start
        self.tap: Tap | None = None
        self.modes_at_tap: Modes | None = None  # if the model has switched autocast on the way
        self.recorded = False
        self.random = False
        self.relaid = False
        self.closed = False
        self.filled: list[LazyTensor] = []
        self._exported: list[Callable[[], Any]] = []
        self.start_tables(list(inputs))

    def start_tables(self, inputs: list[Any]) -> None:
        """Begin a piece of the graph, with ``inputs`` and no values."""
        self.inputs = inputs
        self.fakes: list[torch.Tensor] = []
        self.requires_grad: list[bool | None] = []
        self.gained_grad = False
        self.lazies: list[weakref.ref[LazyTensor] | None] = []
        self.externals: list[torch.Tensor] = []
        self.external_index: dict[int, int] = {}
        self.view_index: dict[int, tuple[torch.Tensor, int]] = {}  # by identity: views of inputs, and the number of their value
        self.lifted: list[torch.Tensor] = []
        self.rows: dict[int, tuple[int | torch.Tensor, BatchGroup, Rows]] = {}  # of invokes: their whole tensors, for gradients
        self.numbers: tuple[int | float, ...] = ()
        self.sizes = self.binding  # followed by the integers among the numbers
        self.used: list[torch.Tensor] = []  # tensors whose storages are not yet in `used_storages`
        self.used_storages: set[int] = set()
        self._input_storages: set[int] | None = None

    def note_rows(self, tensor: LazyTensor, whole: torch.Tensor, group: BatchGroup, rows: Rows) -> None:
        """Note that an invoke gets ``tensor``, its rows of ``whole``, which has their gradient."""
        self.rows[tensor._index] = whole._index if isinstance(whole, LazyTensor) else whole, group, rows

    def storages_in_use(self) -> set[int]:
        """Return the storages of the tensors that the graph reads or edits before the next call of the block."""
        if self.used:
            self.used_storages |= storages_of(self.used)
            self.used = []
        return self.used_storages

    def note_exported(self, function: Any, result: Any) -> None:
        """Note a call on a real tensor if the result, such as a NumPy array, shares its memory with code outside of torch."""
        if getattr(function, "__name__", "") in EXPORTING:
            try:
                self._exported.append(weakref.ref(result))
            except TypeError:  # a DLPack capsule: an array may take its memory and outlive it
                self._exported.append(lambda: result)

    @property
    def is_memory_exported(self) -> bool:
        """Whether code outside of torch may see the memory of a tensor. It would see recorded edits too late, so edits cut the graph."""
        return any(result() is not None for result in self._exported)

    def _take(self, outcome: Outcome, lifted: Lifted, sizes: tuple[int, ...]) -> Any:
        """Advance to the state after a call, and return the result for the block: ``outcome`` with lazy tensors."""
        self.fakes += outcome.fakes
        self.lazies += [None] * len(outcome.fakes)
        self.requires_grad += outcome.requires_grad
        if outcome.gains_grad is not False and not self.gained_grad:
            edited = lifted.event.args[0]  # type: ignore[union-attr]
            self.gained_grad = isinstance(edited, Nest) or not wants_grad(self, edited)
        outcomes = self.step_lifted(lifted).outcomes
        if len(outcomes) >= _KEPT_SIZES and sizes not in outcomes:
            outcomes.clear()
        outcomes.setdefault(sizes, outcome)
        if not outcome.structure.is_leaf():
            self.step(outcome.results)
        leaves = [
            self.lazy(leaf)
            if isinstance(leaf, int)
            else self._object(leaf)
            if isinstance(leaf, (Input, External))
            else leaf[0]
            for leaf in outcome.leaves
        ]
        return leaves[0] if outcome.structure.is_leaf() else pytree.tree_unflatten(leaves, outcome.structure)

    def fake_of(self, reference: Reference) -> torch.Tensor:
        """Return the fake of a tensor."""
        with self.graph.fake_lock, torch._C.DisableTorchFunction(), self.graph.fake_mode:
            return self._fake(reference)

    def _event(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        name = getattr(function, "__name__", "")
        if name in TAKES_SCALAR_TENSORS or name == "__setitem__":
            args = tuple(argument.item() if is_numpy_scalar(argument) else argument for argument in args)
            args, kwargs = floats_as_tensors(name, args, kwargs, self._scalar_tensor, fake_or_self)
        if name in ("__getitem__", "__setitem__"):
            args = (args[0], self._index(args[1]), *args[2:])
        grad = torch.is_grad_enabled()
        return Call(
            function,
            tuple([self._argument(argument) for argument in args]),
            tuple([(key, self._argument(value)) for key, value in kwargs.items()]) if kwargs else (),
            None if grad == self.grad_enabled else grad,
        )

    def _index(self, index: Any) -> Any:
        """Return an index with its NumPy arrays as tensors, its scalar tensors as integers, and its ranges as lists."""
        if isinstance(index, tuple):
            return tuple(self._index(item) for item in index)
        if isinstance(index, range):
            return list(index)
        if type(index).__module__ == "numpy" and hasattr(index, "__len__"):
            return torch.tensor(index, device="cpu")
        if (
            isinstance(index, torch.Tensor)
            and not isinstance(index, LazyTensor)
            and index.dim() == 0
            and index.device.type == "cpu"
            and index.dtype in _INDEX_TYPES
            and storage_of(index) not in self.storages_in_use()  # otherwise a recorded edit of it may still be pending
        ):
            if self.journal is not None:
                self.journal.spoil("the value of a tensor from outside is an index")
            return int(index)
        return index

    def _scalar_tensor(self, argument: float, dtype: torch.dtype) -> torch.Tensor:
        self.lifted.append(torch.tensor(argument, dtype=dtype, device="cpu"))
        return self.lifted[-1]

    def _argument(self, argument: Any) -> Any:
        """Return the form of ``argument`` in an event; raise a :class:`NotLowerableError` if it has none."""
        kind = type(argument)
        if kind in _UNCHANGED:
            return argument
        if kind is LazyTensor and argument._recording is self and argument._real is None:
            return ValueNumber(argument._index)
        if isinstance(argument, torch.Tensor):
            return self.refer(argument)
        if isinstance(argument, (bool, int, float, complex)):
            return Constant(NegativeZero if kind is float and not argument and repr(argument) == "-0.0" else kind, argument)
        if isinstance(argument, (tuple, list)):
            return Nest("list" if isinstance(argument, list) else "tuple", tuple([self._argument(item) for item in argument]))
        if kind is slice:
            parts = (argument.start, argument.stop, argument.step)
            return Nest("slice", tuple([self._argument(item) for item in parts]))
        if isinstance(argument, PLAIN):
            return argument
        if is_numpy_scalar(argument):
            return self._argument(argument.item())
        raise NotLowerableError(f"no graph can contain an argument of type {type(argument).__name__}")

    def refer(self, tensor: torch.Tensor) -> ValueNumber | Input | External:
        """Return the reference to a tensor, declaring it as an external when it is new."""
        tensor = real_of(tensor)
        if isinstance(tensor, LazyTensor):
            if tensor._recording is self:
                return ValueNumber(tensor._index)
            tensor._recording.compute_for_nested()  # now it is a real tensor, which comes from outside
        index = self.external_index.get(id(tensor))
        if index is not None:
            return External(index)
        self.used.append(tensor)
        inputs = list(map(id, self.inputs))
        if id(tensor) in inputs:
            return Input(inputs.index(id(tensor)))
        if tensor.layout is not torch.strided:
            raise NotLowerableError(f"no graph can contain a tensor with layout {tensor.layout}")
        source = None if self._differentiates else self._input_behind(tensor)
        if source is not None:
            return source
        with torch._C.DisableTorchFunction():  # the block does not make these calls
            stride = None if tensor.is_contiguous() else tensor.stride()
            declared = Declare(tuple(tensor.shape), stride, tensor.dtype, tensor.device, tensor.requires_grad, type(tensor))
        if stride is None and self.symbol_of_size and declared not in self.state.edges:
            shape = tuple(self.symbol_of_size.get(size, size) for size in tensor.shape)
            declared = declared._replace(shape=shape)
        self.step_lifted(lift(self.state, declared, len(self.numbers)))
        self.externals.append(tensor)
        self.external_index[id(tensor)] = len(self.externals) - 1
        return External(len(self.externals) - 1)

    def _input_behind(self, tensor: torch.Tensor) -> ValueNumber | None:
        """Record ``tensor`` as a view of an input, if it is one that requires a gradient; return the value, or ``None``.

        The view cannot be an external: AOTAutograd cannot lower a graph that edits an input and a view of it, if both are inputs. But in a
        block with a backward pass it must be one: the gradient of the block's tensor has no part from a view that is made again.
        """
        known = self.view_index.get(id(tensor))
        if known is not None:
            return ValueNumber(known[1])
        with torch._C.DisableTorchFunction():
            base = tensor._base if tensor.requires_grad else None
            if base is None:
                return None
            given = ((number, item) for number, item in enumerate(self.inputs) if isinstance(item, torch.Tensor))
            found = next((number for number, item in given if item is base or item._base is base), None)
            placed = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
        if found is None:
            return None
        view = self.call(torch.as_strided, (self.inputs[found], *placed), {})
        self.view_index[id(tensor)] = tensor, view._index
        return ValueNumber(view._index)

    def _on_fakes(self, call: Call) -> Any:
        with (
            self.graph.fake_lock,
            torch._C.DisableTorchFunction(),
            self.graph.fake_mode,
            quiet_fakes,
            torch.no_grad(),
        ):
            args, kwargs = call.arguments(self._fake)
            return call.function(*args, **kwargs)

    def _fake(self, reference: Reference) -> torch.Tensor:
        if isinstance(reference, ValueNumber):
            return self.fakes[reference.index]
        real = (self.inputs if isinstance(reference, Input) else self.externals)[reference.index]
        if real.requires_grad:  # `from_tensor` may return a cached fake, made before the tensor or its base required a gradient
            return torch.empty_strided(real.size(), real.stride(), dtype=real.dtype, device=real.device)
        return static_fake(self.graph.fake_mode, real)

    def _outcome(self, call: Call, result: Any) -> Outcome:
        """Number the tensors of a result. A tensor that is a known value keeps its number."""
        flat, structure = pytree.tree_flatten_with_path(result)
        follows = self._follows(call)
        leaves: list[Any] = []
        fresh: list[torch.Tensor] = []
        edited = call.args[0] if call.args and edits_in_place(call.function) else None
        # The result may be a tensor from outside itself, as that of `x.float()` and of edits. But an edit that may add a gradient makes a
        # new value: only values have a flag before the graph has run.
        given = references(call) if edited is None else [edited] if follows is False else []
        own = {id(self.fake_of(reference)): reference for reference in given if isinstance(reference, (Input, External))}
        for _, leaf in flat:
            if not isinstance(leaf, torch.Tensor):
                leaves.append((leaf,))
                continue
            if id(leaf) in own:
                leaves.append(own[id(leaf)])
                continue
            known = next((index for index, fake in enumerate((*self.fakes, *fresh)) if fake is leaf), None)
            if known is None:
                known = len(self.fakes) + len(fresh)
                fresh.append(leaf)
            leaves.append(known)
        return Outcome(
            structure,
            tuple(leaves),
            tuple(tuple(path_step(step) for step in path) for path, _ in flat),
            tuple(fresh),
            tuple(follows if fake.is_floating_point() or fake.is_complex() else False for fake in fresh),
            follows if edited is not None else False,
        )

    def _follows(self, call: Call) -> bool | None:
        """Whether autograd would track this call; ``None`` if that is not known."""
        if not (self.grad_enabled if call.grad is None else call.grad):
            return False
        if is_detaching(getattr(call.function, "__name__", "")):
            return ("requires_grad", Constant(bool, True)) in call.kwargs
        return any_of(wants_grad(self, reference) for reference in references(call))

    def _is_like(self, outcome: Outcome, known: State | None, lifted: Lifted) -> bool:
        """Whether the result of a lifted call has the same structure as with other numbers, so that one program serves both."""
        earlier = known or twin_of(self.state, lifted.event, lifted.like)
        other = None if earlier is None else next(iter(earlier.outcomes.values()), None)
        return other is None or same_structure(outcome, other)

    def step_lifted(self, lifted: Lifted) -> State:
        """Advance to the state after a lifted event, and append its numbers."""
        found = self.step(lifted.event, lifted.like)
        if lifted.values:
            self.numbers += lifted.values
            self.sizes += integers(lifted.values)
        return found

    def step(self, event: Event, like: Event | None = None) -> State:
        """Advance to the state after ``event``, which is new if no run has reached it; ``like`` is the event with its first constants."""
        found = self.state.edges.get(event)
        if found is None:
            self.recorded = True
            position = -1 if self.tap is None else self.tap.index
            twin = twin_of(self.state, event, event if like is None else like)
            made = State(self.state, event, position, stack_trace=_user_line(), twin=twin)
            found = self.state.edges.setdefault(event, made)
        self.state = found
        return found

    def held(self, index: int) -> LazyTensor | None:
        """Return the lazy tensor of a value, if something still refers to it."""
        reference = self.lazies[index]
        return None if reference is None else reference()

    def lazy(self, index: int) -> LazyTensor:
        """Return the lazy tensor of a value, and make it if there is none."""
        lazy = self.held(index)
        if lazy is None:
            lazy = make_lazy(index, self.fakes[index], self)
            self.lazies[index] = weakref.ref(lazy)
        return lazy


def integers(numbers: tuple[int | float, ...]) -> tuple[int, ...]:
    return tuple(number for number in numbers if isinstance(number, int))


def storage_of(tensor: torch.Tensor) -> int:
    with torch._C.DisableTorchFunction():
        return tensor.untyped_storage()._cdata


def storages_of(values: Iterable[Any]) -> set[int]:
    """Return the storages of the tensors among ``values``."""
    with torch._C.DisableTorchFunction():
        return {value.untyped_storage()._cdata for value in values if isinstance(value, torch.Tensor)}


def fake_or_self(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._fake if isinstance(tensor, LazyTensor) else tensor


def user_position() -> tuple[str, int]:
    """Return the file and line of the innermost running frame of user code, below any libraries that it has called."""
    return user_position_now(skip=_LIBRARIES)


def _user_line() -> str:
    filename, line = user_position()
    code = linecache.getline(filename, line).strip() or "..."  # torch ignores a position without code
    return f'  File "{filename}", line {line}, in block\n    {code}\n'
