"""Recording: a block runs against lazy tensors and leaves a program behind.

One :class:`Recording` is one run over one captured graph. It walks the graph's taps in order and offers lazy values to the
interleaver, exactly as the eager driver offers real ones. While the block holds lazy tensors, a
``TorchFunctionMode`` sees every torch call it makes:

* a call on lazy tensors becomes an event of the program; its result is computed on fakes, so a mistake in shapes raises
  at the user's line before the model has run;
* a call on tensors from outside runs at once, and its result is an *external*, an input of the spliced graph, as any other
  tensor from outside is;
* a call on a tensor from outside that the program already uses is recorded too, so that reads and in-place edits of it keep
  their order;
* a call that needs a concrete value cuts the graph: the part up to here is lowered and run, all lazy tensors
  become real, and the call is made on them. The rest of the graph is the next piece.

Each event is first looked up among the programs known for the graph (:class:`~nnsight.fx.program.State`). A run that follows a
known program computes no fakes and makes no nodes.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ..runtime.errors import ReplacementShapeError, replacement_message
from ..runtime.interleaver import Interleaver
from ..runtime.mediator import EarlyStopException
from ..runtime.report import Break, Report
from ..tracing.errors import user_position_now
from ..tracing.saving import saves
from .counters import counters
from .graph import CapturedGraph, Tap
from .lazy import LazyTensor, become, make_lazy
from .program import (
    Call,
    Constant,
    Cut,
    Declare,
    Event,
    External,
    Input,
    Nest,
    Outcome,
    Skip,
    State,
    Symbol,
    Value,
    Visit,
    Write,
)
from .splice import Piece, references
from .variant import Variant

logger = logging.getLogger("nnsight.fx")


#: Sizes of a graph's symbols for which a call's fake result is kept.
_KEPT_SIZES = 64


class _QuietFakes(logging.Filter):
    """Keeps torch from logging a failed fake call: the error goes to the user as an exception."""

    def __init__(self) -> None:
        super().__init__()
        self._state = threading.local()
        logging.getLogger("torch._subclasses.fake_tensor").addFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        return not getattr(self._state, "quiet", False)

    def __enter__(self) -> None:
        self._state.quiet = True

    def __exit__(self, *_: object) -> None:
        self._state.quiet = False


_quiet_fakes = _QuietFakes()


class GraphBreakError(RuntimeError):
    """A block needed a concrete value in a trace that must be one graph (``fullgraph=True``)."""


class _NotLowerable(Exception):
    """A call has an argument that no graph can hold."""


#: Getters that the fake answers.
_METADATA = frozenset(
    getattr(torch.Tensor, name).__get__
    for name in (
        "shape dtype device ndim layout is_cuda is_meta is_quantized is_sparse itemsize "
        "nbytes names is_cpu is_nested is_xpu is_mps"
    ).split()
    if hasattr(getattr(torch.Tensor, name, None), "__get__")
)

#: Getters about gradients. Fakes carry none: they are shared by programs that edit them in different ways.
_ABOUT_GRADIENTS = {getattr(torch.Tensor, name).__get__: name for name in ("requires_grad", "is_leaf", "grad_fn")}

#: Methods and functions whose result is a concrete value, or which change a tensor in a way no graph expresses.
_DEMANDS = frozenset(
    "__bool__ __int__ __float__ __complex__ __index__ __contains__ __repr__ __str__ __format__ __array__ __deepcopy__ "
    "__reduce_ex__ item tolist numpy data_ptr storage untyped_storage equal allclose is_nonzero "
    "requires_grad_ detach_ retain_grad backward register_hook unsqueeze_ squeeze_ transpose_ t_ swapaxes_ "
    "swapdims_ resize_ resize_as_ set_ as_strided_ share_memory_ __dlpack__ to_dlpack __set__ is_set_to".split()
)

#: Getters that a graph knows under another name: ``.data`` as such would hide edits from functionalization.
_READ_AS = {torch.Tensor.__dict__.get("data", torch._C.TensorBase.data).__get__: torch.Tensor.detach}

#: Random functions of a tensor's metadata alone.
_DRAWN_LIKE = frozenset({torch.randn_like, torch.rand_like, torch.randint_like})

#: Functions that :meth:`Recording.call` treats specially.
_SPECIAL = frozenset({*_METADATA, *_ABOUT_GRADIENTS, *_READ_AS, *_DRAWN_LIKE, torch.Tensor.__iter__})

#: Random functions. The first one that is recorded makes all later ones be recorded, to keep their order.
_RANDOM = frozenset(
    "rand randn randint randperm normal normal_ bernoulli bernoulli_ multinomial poisson uniform_ exponential_ geometric_ "
    "cauchy_ log_normal_ random_ dropout dropout_ dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout "
    "feature_dropout rrelu gumbel_softmax scaled_dot_product_attention randn_like rand_like randint_like".split()
)

#: Arithmetic in which a Python float may become an input of the graph, so that another value is the same program.
_SCALAR_ARITHMETIC = frozenset(
    "add add_ sub sub_ subtract mul mul_ multiply div div_ divide true_divide __add__ __radd__ __iadd__ __sub__ "
    "__rsub__ __isub__ __mul__ __rmul__ __imul__ __truediv__ __rtruediv__ __itruediv__ __div__ rsub".split()
)

_TORCH_DIRECTORY = torch.__file__.rsplit("/", 1)[0]

_PLAIN = (str, type(None), torch.dtype, torch.device, torch.memory_format, torch.layout, type(...))

_UNANSWERABLE = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedFakeTensorException,
    fake_tensor.UnsupportedOperatorException,
)


def _edits_in_place(function: Any) -> bool:
    name = getattr(function, "__name__", "")
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in ("__invert__", "__index__", "__int__"))
    return name.endswith("_")


class Recording(TorchFunctionMode):
    """One run of the active blocks over ``graph``.

    Args:
        graph: The captured graph.
        inputs: Its inputs.
        run: The active run.
        report: What to tell the user.
        fullgraph: Whether a needed value is an error rather than a cut.
    """

    def __init__(
        self, graph: CapturedGraph, inputs: tuple[Any, ...], run: Interleaver, report: Report, fullgraph: bool
    ) -> None:
        super().__init__()
        self.graph = graph
        self.run = run
        self.report = report
        self.fullgraph = fullgraph
        self.binding = graph.binding(inputs)
        self.symbol_of_size = {
            size: Symbol(position) for position, size in reversed(list(enumerate(self.binding))) if size > 1
        }
        self.grad_enabled = torch.is_grad_enabled()
        self.autocast = torch._C._is_any_autocast_enabled()
        self.state = graph.start
        self.tap: Tap | None = None
        self.recorded = False
        self.random = False
        self.closed = False
        if graph.whole is None:
            graph.whole = Piece.of(graph, 0)
        self._begin(graph.whole, list(inputs))

    def _begin(self, piece: Piece, inputs: list[Any]) -> None:
        """Start a piece of the graph with nothing recorded in it."""
        self.piece = piece
        self.inputs = inputs
        self.fakes: list[torch.Tensor] = []
        self.requires_grad: list[bool] = []
        self.lazies: list[weakref.ref[LazyTensor] | None] = []
        self.value_of: dict[torch.fx.Node, int] = {}
        self.externals: list[torch.Tensor] = []
        self.external_index: dict[int, int] = {}
        self.writes: dict[tuple[int, int], Value | Input | External] = {}
        self.substitutes: dict[torch.fx.Node, Value | Input | External] = {}
        self.used_storages: set[int] = set()
        self._input_storages: set[int] | None = None

    # -- walking the taps ------------------------------------------------------------------------------------------

    def walk(self) -> list[Any]:
        """Run the blocks over the graph and then the graph; return the graph's outputs."""
        run = self.run
        self.report.graphs += 1
        run.check_replacement = self._check_replacement
        try:
            with self:
                waited, counts = run.waited, run.counts
                behind = 0
                for tap in self.graph.taps:
                    location = tap.location
                    if tap.index < behind:  # inside a module that is skipped
                        continue
                    if location in waited and run.is_waited(location):
                        self._stop_at(tap)
                        if run.skips:
                            behind = self._skip(tap)
                    else:
                        counts[location] = counts.get(location, 0) + 1
                    if not waited:  # no block has code left to run
                        break
            self.tap = None
            run.check_replacement = None
            run.release()
            outputs = self.finish()
        except EarlyStopException:
            if self.tap is not None:  # compute what the blocks have seen, and nothing behind it
                self._run_piece(self.graph.order[self.tap.node], [])
            raise
        except BaseException:
            self._abandon()
            raise
        finally:
            self.closed = True
        if self.recorded:
            counters.add("recordings")
            self.report.recordings += 1
        return outputs

    def _stop_at(self, tap: Tap) -> None:
        self.tap = tap
        leaves = self._visit(tap)
        value = leaves[0] if tap.is_single else pytree.tree_unflatten(leaves, tap.structure)
        self.report.spliced.append(tap.location)
        changed = self.run.handle(tap.location, value)
        if changed is not value or not tap.is_single:  # a container may have been filled anew
            self._write(tap, leaves, changed)

    def _skip(self, tap: Tap) -> int:
        """Leave out the module whose input ``tap`` marks, if a block wants so; return the number of the next tap."""
        asked = self.run.take_skip(tap.location)
        if not asked:
            return 0
        output = f"{tap.location.removesuffix('.input')}.output"
        until = next((other for other in self.graph.taps[tap.index + 1 :] if other.location == output), None)
        if until is None:
            raise ValueError(
                f"`{tap.location.removesuffix('.input')}` cannot be skipped in this compiled trace: dynamo broke the graph "
                "inside it. Use `trace(..., compile=False)`."
            )
        leaves = [
            self.graph.fake(leaf, self.binding) if until.is_tensor(leaf) else self.graph.constant_leaf(until, leaf, ())
            for leaf in until.leaves
        ]
        self._check_leaves(until, leaves, asked[0])
        new_leaves = pytree.tree_leaves(asked[0])
        sources = tuple((number, self._refer(new_leaves[number])) for number in until.tensor_leaves)
        self._step(Skip(tap.index, until.index, sources))
        self.substitutes.update({until.leaves[number]: source for number, source in sources})
        return until.index

    def _visit(self, tap: Tap) -> list[Any]:
        """Return the leaves of ``tap`` as the block sees them."""
        references: list[Any] = []
        fresh: list[int] = []
        for number, leaf in enumerate(tap.leaves):
            if not tap.is_tensor(leaf):
                references.append(leaf)
                continue
            reference = self._resolve(leaf)
            if isinstance(reference, torch.fx.Node):
                self.fakes.append(self.graph.fake(reference, self.binding))
                self.requires_grad.append(reference.meta["example_value"].requires_grad)
                self.lazies.append(None)
                fresh.append(number)
                self.value_of[reference] = len(self.fakes) - 1
                reference = Value(len(self.fakes) - 1)
            references.append(reference)
        if fresh:
            self._step(Visit(tap.index, tuple(fresh)))
        return [
            self._object(reference)
            if isinstance(reference, (Value, Input, External))
            else self.graph.constant_leaf(tap, reference, self.binding)
            for reference in references
        ]

    def _resolve(self, node: torch.fx.Node) -> Value | Input | External | torch.fx.Node:
        """Return what stands for a captured node now: a reference, or the node itself if nobody has seen it."""
        while True:
            index = self.piece.input_index.get(node)
            if index is not None:
                return Input(index)
            known = self.value_of.get(node)
            if known is not None:
                return Value(known)
            substitute = self.substitutes.get(node)
            if substitute is not None:
                return substitute
            tapped = self.graph.tapped.get(node)
            if tapped is None:
                return node
            written = self.writes.get(tapped)
            if written is not None:
                return written
            node = self.graph.taps[tapped[0]].leaves[tapped[1]]

    def _object(self, reference: Value | Input | External) -> torch.Tensor:
        """Return the tensor the block gets for ``reference``."""
        if isinstance(reference, Value):
            return self._lazy(reference.index)
        tensor = (self.inputs if isinstance(reference, Input) else self.externals)[reference.index]
        self.used_storages.add(_storage(tensor))
        return tensor

    def _lazy(self, index: int) -> LazyTensor:
        reference = self.lazies[index]
        lazy = None if reference is None else reference()
        if lazy is None:
            lazy = make_lazy(index, self.fakes[index], self)
            self.lazies[index] = weakref.ref(lazy)
        return lazy

    def _check_replacement(self, location: str, old: Any, new: Any) -> None:
        """Refuse, at the user's line, a replacement that the captured graph cannot continue with."""
        tap = self.tap
        if tap is None or tap.location != location:
            return
        self._check_leaves(tap, pytree.tree_leaves(old), new)

    def _check_leaves(self, tap: Tap, old_leaves: list[Any], new: Any) -> None:
        """Raise if ``new`` cannot stand for the value of ``tap``, whose leaves are (or are like) ``old_leaves``."""
        location = tap.location
        new_leaves, structure = pytree.tree_flatten(new)
        if structure != tap.structure:
            raise ReplacementShapeError(
                f"The replacement of `{location}` has another structure than the model's value there: {structure} "
                f"instead of {tap.structure}. Replace a tuple by a tuple, a dict by a dict with the same keys."
            )
        for old_leaf, new_leaf, leaf in zip(old_leaves, new_leaves, tap.leaves, strict=True):
            if old_leaf is new_leaf:
                continue
            if tap.is_tensor(leaf):
                if not isinstance(new_leaf, torch.Tensor):
                    raise TypeError(
                        f"The replacement of `{location}` has a {type(new_leaf).__name__} where the model has a tensor."
                    )
                shape, expected = tuple(new_leaf.shape), tuple(old_leaf.shape)
                if shape != expected:
                    raise ReplacementShapeError(replacement_message(location, shape, expected))
            elif type(old_leaf) is not type(new_leaf) or old_leaf != new_leaf:
                raise ValueError(
                    f"The replacement of `{location}` changes {old_leaf!r} to {new_leaf!r}, which the captured graph has "
                    "as a constant. Use `trace(..., compile=False)` for this edit."
                )

    def _write(self, tap: Tap, leaves: list[Any], changed: Any) -> None:
        """Record which tensors of ``tap`` the blocks replaced."""
        new_leaves = pytree.tree_leaves(changed)
        if all(map(operator.is_, leaves, new_leaves)) and len(leaves) == len(new_leaves):
            return
        value = pytree.tree_unflatten(leaves, tap.structure)
        self._check_replacement(tap.location, value, changed)  # also what was assigned inside a dict or a list
        for number, (old, new) in enumerate(zip(leaves, new_leaves, strict=True)):
            if old is not new and isinstance(new, torch.Tensor):
                reference = self._refer(new)
                self._step(Write(tap.index, number, reference))
                self.writes[tap.index, number] = reference

    # -- torch calls of the block ----------------------------------------------------------------------------------

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if LazyTensor in types or (self.random and getattr(function, "__name__", "") in _RANDOM):
            return self.call(function, args, kwargs)
        edits = _edits_in_place(function)
        if (edits or self.used_storages) and function not in _METADATA and self._touches_graph(args, kwargs, edits):
            return self.call(function, args, kwargs)
        return function(*args, **kwargs)

    def _touches_graph(self, args: tuple[Any, ...], kwargs: dict[str, Any], edits: bool) -> bool:
        """Whether a call on tensors from outside must keep its order with the graph's own use of them."""
        storages = {
            _storage(leaf)
            for leaf in pytree.tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, fake_tensor.FakeTensor)
        }
        if not storages.isdisjoint(self.used_storages):
            return True
        if edits and storages:
            if self._input_storages is None:
                self._input_storages = {_storage(item) for item in self.inputs if isinstance(item, torch.Tensor)}
            return not storages.isdisjoint(self._input_storages)
        return False

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a call, answer it from metadata, or cut the graph for it."""
        if self.closed:
            raise RuntimeError(
                "This tensor was never computed, because its trace failed before the model ran. Fix the error of the "
                "trace and run it again."
            )
        if function in _SPECIAL:
            handled, result = self._answer(function, args, kwargs)
            if handled:
                return result
            function = _READ_AS.get(function, function)
        if getattr(function, "__name__", "") in _DEMANDS:
            return self._demand(function, args, kwargs)
        if torch._C._is_any_autocast_enabled() != self.autocast:
            return self._demand(function, args, kwargs, "`torch.autocast` differs between block and model")
        try:
            event = self._event(function, args, kwargs)
        except _NotLowerable as reason:
            return self._demand(function, args, kwargs, str(reason))
        known = self.state.edges.get(event)
        outcome = None if known is None else known.outcomes.get(self.binding)
        if outcome is None:
            try:
                result = self._on_fakes(event)
            except _UNANSWERABLE:
                return self._demand(function, args, kwargs)
            except Exception as error:  # the user's mistake: its traceback ends at the user's line
                raise error.with_traceback(None) from None
            if not _has_tensor(result) and not (result is None or _edits_in_place(function)):
                return result
            outcome = self._outcome(event, result)
        self.fakes += outcome.fakes
        self.lazies += [None] * len(outcome.fakes)
        self.requires_grad += outcome.requires_grad
        if outcome.gains_grad is not None:
            self.requires_grad[outcome.gains_grad] = True
        self.random = self.random or getattr(function, "__name__", "") in _RANDOM
        outcomes = self._step(event).outcomes
        if len(outcomes) >= _KEPT_SIZES and self.binding not in outcomes:
            outcomes.clear()
        outcomes.setdefault(self.binding, outcome)
        leaves = [self._lazy(leaf) if isinstance(leaf, int) else leaf[0] for leaf in outcome.leaves]
        return pytree.tree_unflatten(leaves, outcome.structure)

    def _answer(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Any]:
        """Answer a call that needs no event; return whether it was answered, and the answer."""
        if function in _METADATA:
            (tensor,) = args
            with self.graph.fake_lock, torch._C.DisableTorchFunction():
                return True, function(_fake_or_self(tensor))
        if function in _ABOUT_GRADIENTS and isinstance(args[0], LazyTensor):
            requires_grad, name = self.requires_grad[args[0]._index], _ABOUT_GRADIENTS[function]
            if name == "grad_fn":
                if requires_grad:
                    return True, self._demand(function, args, kwargs, "`grad_fn` exists once the graph has run")
                return True, None
            return True, requires_grad if name == "requires_grad" else not requires_grad
        if function in _DRAWN_LIKE and not self.random:
            return True, self._draw_like(function, args, kwargs)
        if function == torch.Tensor.__iter__:
            return True, iter(self.call(torch.Tensor.unbind, args, kwargs))
        return False, None

    def _draw_like(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Draw random numbers like a lazy tensor at once, so that a seed gives the numbers it gives eagerly."""
        like, *others = args
        fake = _fake_or_self(like)
        with self.graph.fake_lock, torch._C.DisableTorchFunction():
            size, stride, dtype, device = fake.size(), fake.stride(), fake.dtype, fake.device
        return function(torch.empty_strided(size, stride, dtype=dtype, device=device), *others, **kwargs)

    def _event(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        name = getattr(function, "__name__", "")
        if name in _SCALAR_ARITHMETIC or name == "__setitem__":
            args = tuple(argument.item() if _is_numpy_scalar(argument) else argument for argument in args)
            args = self._lift_floats(name, args)
        grad = torch.is_grad_enabled()
        return Call(
            function,
            tuple(self._argument(argument) for argument in args),
            tuple((key, self._argument(value)) for key, value in kwargs.items()),
            None if grad == self.grad_enabled else grad,
        )

    def _lift_floats(self, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Turn Python floats into scalar tensors where torch gives both the same result."""
        if not any(isinstance(argument, float) for argument in args):
            return args
        tensors = [argument for argument in args if isinstance(argument, torch.Tensor)]
        dtypes = {_fake_or_self(tensor).dtype for tensor in tensors}
        if len(dtypes) != 1 or not next(iter(dtypes)).is_floating_point:
            return args
        if name == "__setitem__":
            if not isinstance(args[2], float):
                return args
            return (args[0], args[1], torch.tensor(args[2], dtype=next(iter(dtypes))))
        if all(_fake_or_self(tensor).dim() == 0 for tensor in tensors):
            return args  # a zero-dimensional tensor would take part in type promotion
        return tuple(
            torch.tensor(argument, dtype=torch.float64) if isinstance(argument, float) else argument
            for argument in args
        )

    def _argument(self, argument: Any) -> Any:
        """Return ``argument`` as it appears in an event."""
        if isinstance(argument, torch.Tensor):
            return self._refer(argument)
        if isinstance(argument, (bool, int, float, complex)):
            return Constant(type(argument), argument)
        if isinstance(argument, (tuple, list)):
            kind = "list" if isinstance(argument, list) else "tuple"
            return Nest(kind, tuple(self._argument(item) for item in argument))
        if isinstance(argument, slice):
            parts = (argument.start, argument.stop, argument.step)
            return Nest("slice", tuple(self._argument(item) for item in parts))
        if isinstance(argument, _PLAIN):
            return argument
        if _is_numpy_scalar(argument):
            return self._argument(argument.item())
        raise _NotLowerable(f"an argument of type {type(argument).__name__}")

    def _refer(self, tensor: torch.Tensor) -> Value | Input | External:
        """Return the reference to a tensor, declaring it as an external when it is new."""
        if isinstance(tensor, LazyTensor):
            if tensor._recording is not self:
                raise RuntimeError("A lazy tensor of another run is used here; save it and use it after its trace.")
            return Value(tensor._index)
        index = self.external_index.get(id(tensor))
        if index is not None:
            return External(index)
        self.used_storages.add(_storage(tensor))
        for position, item in enumerate(self.inputs):
            if item is tensor:
                return Input(position)
        if tensor.layout is not torch.strided:
            raise _NotLowerable(f"a tensor with layout {tensor.layout}")
        shape: tuple[int | Symbol, ...] = tuple(tensor.shape)
        stride = None if tensor.is_contiguous() else tensor.stride()
        if stride is None and self.symbol_of_size:
            shape = tuple(self.symbol_of_size.get(size, size) for size in tensor.shape)
        self._step(Declare(shape, stride, tensor.dtype, tensor.device, tensor.requires_grad, type(tensor)))
        self.externals.append(tensor)
        self.external_index[id(tensor)] = len(self.externals) - 1
        return External(len(self.externals) - 1)

    def _on_fakes(self, call: Call) -> Any:
        with (
            self.graph.fake_lock,
            torch._C.DisableTorchFunction(),
            self.graph.fake_mode,
            _quiet_fakes,
            torch.no_grad(),
        ):
            args = tuple(self._fake_argument(argument) for argument in call.args)
            kwargs = {key: self._fake_argument(value) for key, value in call.kwargs}
            return call.function(*args, **kwargs)

    def _fake_argument(self, argument: Any) -> Any:
        if isinstance(argument, Value):
            return self.fakes[argument.index]
        if isinstance(argument, (Input, External)):
            real = (self.inputs if isinstance(argument, Input) else self.externals)[argument.index]
            return self.graph.fake_mode.from_tensor(real, static_shapes=True)
        if isinstance(argument, Constant):
            return argument.value
        if isinstance(argument, Nest):
            return argument.build([self._fake_argument(item) for item in argument.items])
        return argument

    def _outcome(self, call: Call, result: Any) -> Outcome:
        """Number the tensors of a result; a tensor that was there before keeps its number."""
        flat, structure = pytree.tree_flatten_with_path(result)
        differentiated = self._is_differentiated(call)
        leaves: list[Any] = []
        fresh: list[torch.Tensor] = []
        for _, leaf in flat:
            if not isinstance(leaf, torch.Tensor):
                leaves.append((leaf,))
                continue
            known = next((index for index, fake in enumerate((*self.fakes, *fresh)) if fake is leaf), None)
            if known is None:
                known = len(self.fakes) + len(fresh)
                fresh.append(leaf)
            leaves.append(known)
        edited = call.args[0] if call.args and _edits_in_place(call.function) else None
        return Outcome(
            structure,
            tuple(leaves),
            tuple(tuple(_key(step) for step in path) for path, _ in flat),
            tuple(fresh),
            tuple(differentiated and (fake.is_floating_point() or fake.is_complex()) for fake in fresh),
            edited.index if differentiated and isinstance(edited, Value) else None,
        )

    def _is_differentiated(self, call: Call) -> bool:
        """Whether autograd would follow this call."""
        if not (self.grad_enabled if call.grad is None else call.grad) or call.function is torch.Tensor.detach:
            return False
        sources = {Value: self.requires_grad, Input: self.inputs, External: self.externals}
        found = (sources[type(reference)][reference.index] for reference in references(call))
        return any(item if isinstance(item, bool) else item.requires_grad for item in found)

    def _step(self, event: Event) -> State:
        """Go on to the state after ``event``, which is new if no earlier run did the same."""
        found = self.state.edges.get(event)
        if found is None:
            self.recorded = True
            position = -1 if self.tap is None else self.tap.index
            made = State(self.state, event, position, stack_trace=_user_line())
            found = self.state.edges.setdefault(event, made)
        self.state = found
        return found

    # -- running what was recorded -----------------------------------------------------------------------------------

    def _demand(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], reason: str = "") -> Any:
        """Make values concrete and then call ``function`` on them."""
        assert self.tap is not None
        pending = any(isinstance(leaf, LazyTensor) for leaf in pytree.tree_leaves((args, kwargs)))
        at_start = self.graph.order[self.tap.node] == self.piece.start
        if pending or not at_start or (self.state.event is not None and not isinstance(self.state.event, Cut)):
            name = getattr(function, "__name__", str(function))
            self._cut(reason or f"`{name}` needs a concrete value")
        return function(*args, **kwargs)

    def make_real(self, reason: str) -> None:
        """Run the graph up to here, so that every lazy tensor becomes real."""
        self._cut(reason)

    def _cut(self, reason: str) -> None:
        """Run the graph up to the current tap; every lazy tensor becomes real."""
        assert self.tap is not None
        filename, line = _user_position()
        location = self.tap.location
        if self.fullgraph:
            raise GraphBreakError(
                f"{filename}:{line}: {reason} at `{location}`, and this trace was compiled with fullgraph=True. Use tensor "
                "operations such as `torch.where`, or compile without fullgraph to let the graph be cut here."
            )
        cut = Break(location, reason, filename, line)
        self.report.breaks.append(cut)
        counters.add("breaks")
        logger.info("graph cut: %s", cut)
        stop = self.graph.order[self.tap.node]
        behind = Piece.of(self.graph, stop)
        wanted: list[Any] = list(behind.inputs[len(self.graph.placeholders) :])
        alive, carried = self._run_piece(stop, wanted)
        self.state = self._step(Cut(self.tap.index, alive))
        self._begin(behind, [*self.inputs[: len(self.graph.placeholders)], *carried])

    def finish(self) -> list[Any]:
        """Run the rest of the graph and return what the captured graph returns."""
        _, outputs = self._run_piece(len(self.graph.nodes) - 1, list(self.graph.outputs))
        return outputs

    def _run_piece(self, stop: int, wanted: list[Any]) -> tuple[tuple[int, ...], list[Any]]:
        """Run the graph from the piece's start to node number ``stop``.

        Args:
            stop: The first node that does not run.
            wanted: Captured nodes (or constants) whose values are needed.

        Returns:
            The numbers of the values that became real tensors, and the value of each of ``wanted``.
        """
        alive = tuple(index for index, lazy in enumerate(self.lazies) if lazy is not None and lazy() is not None)
        variant = self.state.variants.get((stop, alive))
        if variant is None:
            with self.graph.lock:
                variant = self.state.variants.get((stop, alive))
                if variant is None:
                    resolved = [self._resolve(item) if isinstance(item, torch.fx.Node) else item for item in wanted]
                    program = self.state.program()
                    variant = Variant(self.graph, self.piece, program, stop, alive, resolved)
                    self.state.variants[stop, alive] = variant
        self.report._code.append(variant.spliced.code)
        arguments = [*(self.inputs[index] for index in variant.spliced.inputs), *self.externals]
        lowered = variant.find(self.binding)
        if lowered is None:
            lowered, made = variant.lower(self.binding, arguments)
            self.report.compiles += made
        with torch._C.DisableTorchFunction():
            computed = list(lowered.function(*arguments))
        del arguments
        self._fill(alive, computed, variant.positions)
        return alive, variant.deliver(computed, self.inputs, self.externals)

    def _fill(self, alive: tuple[int, ...], computed: list[Any], positions: dict[int, int]) -> None:
        """Turn the lazy tensors into what was computed for them."""
        if not alive:
            return
        # Objects that somebody else holds too: the graph's inputs, and a tensor it returns in several places.
        held = {id(tensor) for tensor in (*self.inputs, *self.externals)}
        places: dict[int, list[int]] = {}
        for position, real in enumerate(computed):
            places.setdefault(id(real), []).append(position)
        for index in alive:
            reference, self.lazies[index] = self.lazies[index], None
            lazy = None if reference is None else reference()
            del reference
            if lazy is None:
                continue
            real = computed[positions[index]]
            if id(real) in held:
                real = real.view_as(real)
                computed[positions[index]] = lazy
            else:
                for position in places[id(real)]:
                    computed[position] = lazy
            become(lazy, real)
            held.add(id(lazy))

    def _abandon(self) -> None:
        """Forget what was not computed: no name may come home bound to a tensor without a value."""
        marked = saves.get()
        for reference in self.lazies:
            lazy = None if reference is None else reference()
            if lazy is not None and marked is not None:
                marked.pop(id(lazy), None)


@contextlib.contextmanager
def suspended(*values: Any) -> Iterator[None]:
    """Leave the recording that is going on for a call that must not be recorded, such as a run of another model.

    Args:
        *values: What the call uses; lazy tensors among it are made real first.
    """
    mode = torch.overrides._get_current_function_mode()
    if not isinstance(mode, Recording):
        yield
        return
    if any(isinstance(leaf, LazyTensor) for leaf in pytree.tree_leaves(values)):
        mode.make_real("a compiled model was called")
    with torch.overrides._pop_mode_temporarily():
        yield


def run_plain(graph: CapturedGraph, inputs: tuple[Any, ...]) -> list[Any]:
    """Run a captured graph without any program in it; a few dictionary look-ups over calling it."""
    variant = graph.start.variants.get((len(graph.nodes) - 1, ()))
    lowered = None if variant is None else variant.find(graph.binding(inputs))
    if variant is None or lowered is None:
        return Recording(graph, inputs, Interleaver([]), Report(), False).finish()
    return variant.deliver(lowered.function(*inputs), inputs, ())


def _storage(tensor: torch.Tensor) -> int:
    with torch._C.DisableTorchFunction():
        return tensor.untyped_storage()._cdata


def _fake_or_self(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._fake if isinstance(tensor, LazyTensor) else tensor


def _is_numpy_scalar(value: Any) -> bool:
    return type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0 and not hasattr(value, "__len__")


def _has_tensor(result: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(result))


def _key(step: Any) -> Any:
    """Return one step of a path as an index or an attribute name."""
    for name in ("idx", "key", "name"):
        if hasattr(step, name):
            return getattr(step, name)
    raise TypeError(f"a result with an unknown container: {step!r}")


def _user_position() -> tuple[str, int]:
    """Return file and line of the user's code that is running."""
    return user_position_now(skip=_TORCH_DIRECTORY)


def _user_line() -> str:
    filename, line = _user_position()
    return f'  File "{filename}", line {line}, in block\n'
