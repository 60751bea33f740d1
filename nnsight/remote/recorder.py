"""The client's side: a block becomes data.

The block runs, as Python, against a model on fakes: a trace like any other, with a driver that has no values. Two modes watch
what it does while it is the block's turn. A mode for torch *functions* sees calls as the block makes them. It puts fakes in place of
weights and of the block's own tensors, which become constants, and refuses what needs a value. Calls on the block's own tensors
alone are done at once, for real: they need no server. A mode for torch *operators* sees what those calls come down to, and
writes down each as a node.

A value that the block gets at a location is a ``read``. When it is edited in place, the read becomes one of a copy, the operators
edit the copy, and when the block leaves the location a ``write`` puts its values into the memory of the model's tensor. A
replacement becomes a ``write``, too. Rows of invokes are ordinary operators. What nobody needs in the end is left out.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from ..fx.functions import DEMANDS, DRAWN_LIKE, METADATA, RANDOM, READ_AS, edits_in_place, is_numpy_scalar, quiet_fakes
from ..fx.journal import Journal
from ..modeling.tracing import _names
from ..runtime.carriers import is_carrier
from ..runtime.interleaver import Interleaver
from ..runtime.scanning import fake_mode
from ..runtime.tracer import InterleavingTracer
from ..tracing.errors import user_position_now
from ..tracing.saving import saves
from .binding import Binding
from .counts import counts
from .draws import drawn_seed, samples
from .errors import NotExpressibleError
from .fake_runs import FakeModel, fake_model_of, generation_size, places_of, tensors_at
from .gradients import SET_GRAD_MODE, Gradients
from .listening import (
    OBSERVERS,
    TORCH,
    Functions,
    Operators,
    Prepared,
    RecordingInterleaver,
    RecordingMediator,
    position_of_block,
)
from .nodes import Node, why_not, write_argument
from .operators import DRAWING, NAMES, OPERATORS, is_in_place, is_view
from .payload import Job, encode
from .printing import Prints, listening
from .pruning import pruned
from .refusals import here, why_demand
from .sizes import SIZE_METHODS, Shape, plain, takes_sizes
from .taking import called_by, draw, input_tree, snapshot
from .trees import write_tree

_GRADIENTS = frozenset("backward register_hook retain_grad detach_ grad".split())
_PLACED = frozenset({"cpu", "cuda", "to", "type_as"})
_ATTENTION = torch.nn.functional.scaled_dot_product_attention

#: Memory that nobody has written to is zeros.
_INSTEAD = {torch.ops.aten.empty_like.default: torch.ops.aten.zeros_like.default}

#: Index types of scalar tensors that index as the integer in them does.
_INTEGERS = frozenset({torch.int8, torch.int16, torch.int32, torch.int64})


def record(tracer: Any, function: Callable[[], None], for_others: bool = False) -> Recorded:
    """Run the block of a trace on fakes, without weights, and return it as data.

    Args:
        tracer: The tracer of ``model.trace(...)`` or ``model.generate(...)``.
        function: Its block, as ``Backend.__call__`` returns it.
        for_others: Whether it is to run on other inputs than this one, so that sizes have to be compared.

    Raises:
        NotExpressibleError: If the block needs values or Python that cannot be sent.
    """
    recorder = Recorder(for_others=for_others)
    recorder.run_trace(tracer, function)
    return recorder.finished(tracer)


@dataclass
class Recorded:
    """A recorded block.

    Attributes:
        job: What is to be run.
        binding: Where its results go.
    """

    job: Job
    binding: Binding

    def payload(self) -> bytes:
        """Return the job as bytes."""
        return encode(self.job)

    def bind(self, results: bytes) -> dict[str, Any]:
        """Give the user's saved names their values, from a container of results; return them by name.

        Lists and dicts that the user saved are filled in place; other names are bound in the block's scope, which brings them
        home when the tracer ends. May be called after the ``with`` statement has ended (a job that was not waited for):
        then only the containers are filled.
        """
        return self.binding.bind(results)


@dataclass
class _Visit:
    """A stop at a location.

    Attributes:
        site: The location.
        at: Its passage.
        block: The block that has stopped there.
        loop: Whether the block waited for it in a loop.
        structure: How the value is built.
        places: Where its leaves are.
        leaves: Its leaves.
        reads: The node of each tensor among them.
        edited: The reads that were edited in place.
    """

    site: str
    at: int
    block: int
    loop: bool
    structure: Any
    places: list[tuple[int, int | None]]
    leaves: list[Any]
    reads: dict[int, int] = field(default_factory=dict)
    edited: set[int] = field(default_factory=set)

    def place(self, number: int) -> dict[str, Any]:
        """Return what a node says of the place of a leaf."""
        leaf, inside = self.places[number]
        said = {"site": self.site, "at": self.at, "leaf": leaf}
        if inside is not None:
            said["inside"] = inside
        return {**said, "loop": True} if self.loop else said


def _unseen(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of a recorder during which it does not listen to itself."""

    @functools.wraps(method)
    def unseen(self: Recorder, *args: Any, **kwargs: Any) -> Any:
        with self.paused():
            return method(self, *args, **kwargs)

    return unseen


class Recorder:
    """Writes down what blocks do.

    Args:
        journal: Where it notes what of that is not in the nodes.
        for_others: Whether to write down which sizes they look at, see :mod:`.sizes`.

    Attributes:
        nodes: What they did so far.
        block: The block whose turn it is, or ``None``.
        running: Whether a trace is being recorded.
        gradients: Writes down what they do with gradients.
        prints: Writes down what they print.
    """

    def __init__(self, journal: Journal | None = None, for_others: bool = False) -> None:
        self.nodes: list[Node] = []
        self._for_others = for_others
        self._looked: set[tuple[int, int, int]] = set()  # node, output and dimension of sizes that are written down
        self._called: tuple[str, list[Any]] = "", []  # the function that the block calls, and the leaves of its arguments
        self.gradients = Gradients(self)
        self.prints = Prints(self)
        self.journal = Journal() if journal is None else journal
        self.runs: list[dict[str, Any]] = []
        self.tensors: dict[str, torch.Tensor] = {}
        self.mode = fake_mode()
        self.block: int | None = None
        self.running = False
        self.model: FakeModel | None = None
        self._paused = False
        self._refs: Any = WeakIdKeyDictionary()  # fake -> (node, output)
        self._roots: list[int] = []
        self._constants: Any = WeakIdKeyDictionary()  # the block's own tensor -> (version, fake)
        self._weights: dict[str, torch.Tensor] = {}
        self._blocks: dict[int, int] = {}
        self._visits: list[_Visit] = []
        self._storages: dict[int, StorageWeakRef] = {}
        self._stale: dict[int, list[tuple[int, int, str]]] = {}
        self._barriers: dict[int, int] = {}
        self._samples = False
        self._keep: list[Any] = []
        self._outer: dict[str, Any] = {}

    # -- runs ------------------------------------------------------------------------------------------------------

    def run_trace(self, tracer: Any, function: Callable[[], None], prepared: Any = None) -> None:
        """Run the block of ``tracer`` on fakes; ``prepared`` are the arguments of the model, if they are known already."""
        call, root = called_by(tracer)
        modules, (_, model, args, kwargs) = tracer._modules, tracer._call
        counts["recordings"] += 1
        self._for_others = self._for_others or call == "generate"  # which may end earlier than it does on fakes
        root._sync()
        self._blocks = {}
        self._visits = []

        def drive(interleaver: Interleaver, args: tuple[Any, ...], kwargs: dict[str, Any], report: Any) -> Any:
            report.mode = "remote"
            run = {
                "call": call,
                "args": input_tree(args, self.tensors),
                "kwargs": input_tree(kwargs, self.tensors),
                "blocks": 0,
            }
            self.runs[-1].update(run)
            self._samples = self._samples or samples(root._module, call, kwargs)
            steps, prompt = generation_size(root._module, args, kwargs) if call == "generate" else (1, (0, 0))
            assert self.model is not None
            return self.model.run(modules, interleaver, call, args, kwargs, steps, prompt)

        self.gradients.begin_run()
        self.runs.append({})
        self._outer.update(self._outer_containers(tracer))
        numbers = self._blocks
        with quiet_fakes:
            self.model = fake_model_of(modules)
        with torch.no_grad(), quiet_fakes, self.mode:
            self._weights.update(self.model.by_name)
            tracer._call = (drive, Prepared(model, prepared), args, kwargs)
            tracer.make_mediator = lambda *given, **named: RecordingMediator(self, *given, **named)
            tracer.make_interleaver = lambda *given, **named: RecordingInterleaver(self, *given, **named)
            self.running = True
            try:
                with Operators(self), Functions(self), listening(self.prints):
                    InterleavingTracer.execute(tracer, function)
            finally:
                del tracer.make_mediator, tracer.make_interleaver
                self.block, self.running = None, False
                self._visits.clear()
        last = len(numbers)
        run = len(self.runs) - 1
        for node in self.nodes:
            if node["run"] == run and node["block"] == OBSERVERS:
                node["block"] = last
        self.runs[-1]["blocks"] = last + 1

    def number_of(self, mediator: Any) -> int:
        """Return the number of a block in its run."""
        return self._blocks.setdefault(id(mediator), len(self._blocks))

    def finished(self, tracer: Any) -> Recorded:
        """Return the job, with what the block of ``tracer`` saved."""
        marked = saves.get() or {}
        values = {name: value for name, value in tracer.scope.items() if id(value) in marked}
        for name, value in self._outer.items():  # as in any trace, what the block puts there stays there
            leaves = pytree.tree_leaves(value)
            if name not in values and any(isinstance(leaf, FakeTensor) and leaf in self._refs for leaf in leaves):
                values[name] = value
        return self.job(values, tracer.scope)

    def _outer_containers(self, tracer: Any) -> dict[str, Any]:
        """Return the lists and dicts that the block of ``tracer`` finds outside, by name."""
        used = tracer._frame.f_globals if tracer._frame is not None else {}
        names = {name: used[name] for name in _names(tracer.info.code) if name in used}
        return {
            name: value
            for name, value in {**names, **dict(tracer.scope.items())}.items()
            if type(value) in (list, dict)
        }

    def job(self, values: dict[str, Any], scope: Any = None) -> Recorded:
        """Return the job that gives ``values`` back."""
        self.prints.check()
        trees = {name: write_tree(value, functools.partial(self._saved, name)) for name, value in values.items()}
        job, numbers = pruned(self.runs, self.nodes, self._roots, trees, self.tensors)
        if self._samples or any(node.get("name") in DRAWING for node in job.nodes):
            job.seed = drawn_seed()
        references = {
            id(fake): (numbers[node], output) for fake, (node, output) in self._refs.items() if node in numbers
        }
        binding = Binding(
            values, {id(fake): fake for fake in self._refs if id(fake) in references}, references, job.saves, scope
        )
        return Recorded(job, binding)

    def _saved(self, name: str, value: Any, in_cache: bool = False) -> Any:
        """Return the tree of a saved value that has none of its own."""
        if isinstance(value, torch.Tensor):
            known = self.model is not None and self.model.weights.get(id(value))
            if known:
                fake = self.substitute(value)
                self._refs[value] = self._refs[fake]
                return {"ref": list(self._refs[fake])}
            if not isinstance(value, FakeTensor):
                return {"absent": "Tensor"}  # the client has it
            ref = self._refs.get(value)
            if ref is None:
                raise NotExpressibleError(
                    f"`{name}` holds a tensor that the block did not get at a location of the model. Save what was read at one, "
                    "and what was computed of it."
                )
            self._check_fresh(value)
            return {"ref": list(ref)}
        if hasattr(value, "_entries") and hasattr(value, "observe"):  # a cache of activations
            entries = [
                [path, {kind: found for kind, found in entry._values.items() if found}]
                for path, entry in value._entries.items()
            ]
            kept = {path: kinds for path, kinds in entries if kinds}
            return write_tree(kept, lambda leaf: self._saved(name, leaf, in_cache=True))
        if is_carrier(value):
            if in_cache:  # a key-value cache belongs to the run
                return {"absent": type(value).__name__[:100]}
            return {"list": [write_tree(item, lambda leaf: self._saved(name, leaf)) for item in tensors_at(value)]}
        inside = (
            vars(value).values()
            if hasattr(value, "__dict__") and not isinstance(value, (type, types.ModuleType))
            else ()
        )
        held = value if isinstance(value, (set, frozenset)) else inside
        if any(isinstance(item, FakeTensor) for item in pytree.tree_leaves(list(held))):
            raise NotExpressibleError(
                f"`{name}` holds a {type(value).__name__} with tensors in it, which cannot be sent. "
                "Save the tensors, in lists, tuples or dicts."
            )
        return {"absent": type(value).__name__[:100]}

    # -- nodes -----------------------------------------------------------------------------------------------------

    def emit(self, do: str, root: int | None = None, **content: Any) -> int:
        """Append a node to the block whose turn it is; return its number."""
        self.gradients.check_node(do)
        if do == "stop":
            self.prints.end()
        line = (position_of_block.get() or user_position_now(skip=TORCH))[1]
        number = len(self.nodes)
        self.nodes.append(
            {"do": do, "run": len(self.runs) - 1, "block": self.block, **content, **({"line": line} if line else {})}
        )
        self._roots.append(number if root is None else root)
        return number

    def made_by(self, node: int, tensor: torch.Tensor) -> None:
        """Note that ``tensor`` stands for what a node makes."""
        self._refs[tensor] = (node, 0)

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is a value of the model, or one of the block's own that has met one."""
        assert self.model is not None
        return isinstance(tensor, FakeTensor) or id(tensor) in self.model.weights or tensor in self._constants

    def reference(self, tensor: torch.Tensor) -> Any:
        """Return the reference to a tensor."""
        known = self._refs.get(tensor)
        if known is None and not isinstance(tensor, FakeTensor):
            known = self._refs[self.substitute(tensor)]
        if known is None:
            raise NotExpressibleError(
                here(
                    "A tensor is used that the block did not get at a location of the model, nor made itself, such as the content of a "
                    "cache. Read the module that produces it."
                )
            )
        self._check_fresh(tensor)
        return {"ref": list(known)}

    def _check_fresh(self, tensor: torch.Tensor) -> None:
        """Raise if the memory of ``tensor`` was edited through a copy of it."""
        edits = self._stale.get(self._roots[self._refs[tensor][0]], ())
        low, high = _stretch(tensor) if edits else (0, 0)
        for start, end, message in edits:
            if start < high and low < end:
                raise NotExpressibleError(message)

    @_unseen
    def substitute(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the fake that stands for a weight, or for a tensor of the block's own."""
        assert self.model is not None
        if isinstance(tensor, FakeTensor):
            return tensor
        known = self.model.weights.get(id(tensor))
        if known is not None:
            name, fake = known
            if fake not in self._refs:
                self._refs[fake] = (self.emit("weight", name=name), 0)
            return fake
        kept = self._constants.get(tensor)
        if kept is not None and kept[0] == tensor._version:
            return kept[1]
        if tensor.layout != torch.strided or tensor.is_meta or tensor.dtype.is_complex:
            raise NotExpressibleError(here("A tensor without values, a sparse or a complex one cannot be sent."))
        with _disable_current_modes():
            copied = snapshot(tensor)
        self.journal.calls.append((snapshot, (tensor,), {}, copied))
        with self.mode:
            fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=self.model.device)
        name = f"c{len(self.tensors)}"
        self.tensors[name] = copied
        self._constants[tensor] = (tensor._version, fake)
        self._refs[fake] = (self.emit("const", tensor=name), 0)
        if tensor.requires_grad and not self.gradients.running:
            self.gradients.require(fake)
        return fake

    # -- calls of the block ----------------------------------------------------------------------------------------

    @property
    def listens(self) -> bool:
        """Whether it is the turn of a block."""
        return self.block is not None and not self._paused

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Let calls pass unseen."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def function(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do what a call of a torch function in a block means."""
        assert self.model is not None
        if self._for_others:
            args, kwargs = (pytree.tree_map(plain, part) for part in (args, kwargs))
        if function in METADATA:
            return self._metadata(function, args, kwargs)
        if function is SET_GRAD_MODE:
            return self.gradients.set_mode(*args)
        name = getattr(function, "__name__", "")
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if not any(isinstance(tensor, FakeTensor) or id(tensor) in self.model.weights for tensor in tensors):
            with _disable_current_modes():
                result = function(*args, **kwargs)
                self.journal.outside(function, args, kwargs, result)
                return result
        if self._for_others:
            if name in SIZE_METHODS:
                return self._metadata(function, args, kwargs)
            self._called = name, pytree.tree_leaves((args, kwargs))
        if name == "requires_grad_":
            return self.gradients.require(self.substitute(args[0]), *args[1:], **kwargs)
        if name in _GRADIENTS:
            raise NotExpressibleError(
                here(
                    f"`{name}` cannot be sent. Write `with loss.backward():` and read the `.grad` of tensors in its block."
                )
            )
        if name in ("__repr__", "__format__"):
            return self.prints.mark(self.substitute(args[0]), args[1] if name == "__format__" else None)
        if name in DEMANDS:
            raise NotExpressibleError(here(why_demand(name)))
        if function in DRAWN_LIKE:
            return self._draw_like(function, args, kwargs)
        if function is _ATTENTION and (kwargs.get("dropout_p") or any(args[4:5])):
            raise NotExpressibleError(here("Attention with dropout cannot be sent: use `torch.nn.functional.dropout` on what it returns."))
        if name in RANDOM and kwargs.get("generator") is not None:
            raise NotExpressibleError(
                here(f"A generator of your own cannot be sent, as to `{name}`: leave it out, or draw before the trace.")
            )
        function = READ_AS.get(function, function)
        if name in ("__getitem__", "__setitem__"):
            args = (args[0], self._index(args[1]), *args[2:])
        args, kwargs = (pytree.tree_map(self._argument, part) for part in (args, kwargs))
        if name in _PLACED:
            if name in ("cpu", "cuda"):
                return args[0]
            args = tuple(self.model.device if isinstance(item, str) else item for item in args)
        if "device" in kwargs:
            kwargs["device"] = self.model.device
        if edits_in_place(function) and kwargs.get("out") is not None:
            raise NotExpressibleError(here("`out=` cannot be sent: use the result."))
        try:
            if function is _ATTENTION:
                return self.operator(torch.ops.aten.scaled_dot_product_attention.default, args, kwargs)
            return function(*args, **kwargs)
        except DataDependentOutputException as error:
            raise NotExpressibleError(here(why_demand(name))) from error
        except DynamicOutputShapeException as error:
            raise NotExpressibleError(
                here(
                    f"The size of what `{name}` returns depends on values, as where a mask selects. "
                    "Use `torch.where`, or multiply by the mask."
                )
            ) from error

    def _metadata(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what a tensor says of itself, and write down which sizes that was."""
        found, name = function(*args, **kwargs), getattr(function, "__name__", "")
        tensor, *rest = (*args, *kwargs.values())
        if not self._for_others or not isinstance(tensor, FakeTensor):
            return found
        if isinstance(found, torch.Size):
            return Shape(found, functools.partial(self._look, tensor))
        if name == "__len__":
            self._look(tensor, 0)
        elif name == "size":
            self._look(tensor, range(tensor.dim())[rest[0]])
        elif name in SIZE_METHODS or function == torch.Tensor.nbytes.__get__:  # type: ignore[attr-defined]
            Shape(tensor.size(), functools.partial(self._look, tensor)).all()
        return found

    @_unseen
    def _look(self, tensor: torch.Tensor, dim: int) -> None:
        """Write down that a size of a value is looked at."""
        node, output = self._refs.get(tensor, (None, 0))
        if node is None or (node, output, dim) in self._looked:
            return
        self._looked.add((node, output, dim))
        self.emit("size", value={"ref": [node, output]}, dim=dim, size=int(tensor.shape[dim]))

    def _argument(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.substitute(value)
        if is_numpy_scalar(value):
            self.journal.spoil("a value of numpy is read")
            return value.item()
        if isinstance(value, torch.device):
            assert self.model is not None
            return self.model.device
        return value

    def _draw_like(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Draw random numbers like a tensor of the model, here and now."""
        like = args[0]
        kwargs = {"dtype": like.dtype, **kwargs, "device": "cpu"}
        drawn = (function, tuple(like.shape), like.dtype, *args[1:])
        with _disable_current_modes():
            result = draw(*drawn, **kwargs)
        self.journal.calls.append((draw, drawn, kwargs, result))
        return result

    def _index(self, index: Any) -> Any:
        """Return an index with tensors in place of arrays and lists, and integers in place of scalar tensors."""
        if isinstance(index, tuple):
            return tuple(self._index(item) for item in index)
        if isinstance(index, list) or (type(index).__module__ == "numpy" and hasattr(index, "__len__")):
            if any(isinstance(item, torch.Tensor) for item in index):
                return index
            with _disable_current_modes():
                made = torch.tensor(index)
            self.journal.calls.append((torch.tensor, (index,), {}, made))
            return made
        if (
            isinstance(index, torch.Tensor)
            and not isinstance(index, FakeTensor)
            and index.dim() == 0
            and index.dtype in _INTEGERS
        ):
            self.journal.spoil("the value of an index is read")
            with _disable_current_modes():
                return int(index)
        return index

    def operator(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Write down what an operator does, and return what it makes on fakes."""
        if operator is torch.ops.aten._local_scalar_dense.default:
            raise NotExpressibleError(here(why_demand("item")))
        if operator is torch.ops.aten.lift_fresh.default:
            return self.substitute(args[0])
        if not any("Tensor" in str(returned.type) for returned in operator._schema.returns):
            return operator(*args, **kwargs)  # about sizes and types, or an error of fakes
        args, kwargs = (pytree.tree_map_only(torch.Tensor, self.substitute, part) for part in (args, kwargs))
        operator = _INSTEAD.get(operator, operator)
        name = NAMES.get(operator)
        if name is None:
            refused = why_not("aten." + str(operator).removeprefix("aten."))
            raise NotExpressibleError(here(f"{refused[0].upper()}{refused[1:]}."))
        root = None
        try:
            written = [write_argument(argument, self.reference) for argument in args]
            named = {
                key: write_argument(argument, self.reference)
                for key, argument in kwargs.items()
                if argument is not None
            }
        except TypeError as error:
            raise NotExpressibleError(here(f"`{name}` has an argument that cannot be sent: {error}.")) from error
        if self._for_others:
            self._look_for_torch(name, args)
        if is_in_place(name):
            self._edit(args[0])
        with self.paused():
            result = operator(*args, **kwargs)
        if is_view(name) or is_in_place(name):
            root = self._roots[self._refs[args[0]][0]]
        number = self.emit("op", root, name=name, args=written, **({"kwargs": named} if named else {}))
        if not is_in_place(name):
            for output, tensor in enumerate(result if isinstance(result, (list, tuple)) else [result]):
                if isinstance(tensor, torch.Tensor):
                    self._refs[tensor] = (number, output)
        return result

    def _look_for_torch(self, name: str, args: tuple[Any, ...]) -> None:
        """Write down the sizes that decide what torch makes of a call of the block."""
        function, given = self._called
        several = str(OPERATORS[name]._schema.returns[0].type).startswith("List")  # as many as there are rows
        if several or takes_sizes(function, name, args, given):
            for tensor in (*args, *given):
                if isinstance(tensor, FakeTensor):
                    for dim in range(tensor.dim()):
                        self._look(tensor, dim)

    def _edit(self, tensor: torch.Tensor) -> None:
        """Note that a tensor is edited in place, or refuse it."""
        self.reference(tensor)
        root = self._roots[self._refs[tensor][0]]
        node = self.nodes[root]
        if node["do"] in ("const", "weight"):
            what = "a weight" if node["do"] == "weight" else "a tensor of your own"
            raise NotExpressibleError(
                here(f"The block edits {what} in place with values of the model; `.clone()` it first.")
            )
        if node["do"] == "apply":
            if node.get("shares"):
                raise NotExpressibleError(
                    here(f"`{node['module']}` returns memory that it was given; `.clone()` before you edit it.")
                )
            node["copy"] = True
        if node["do"] != "read":
            return
        visit = next((visit for visit in reversed(self._visits) if root in visit.reads.values()), None)
        if visit is None:
            raise NotExpressibleError(
                here(
                    f"The value of `{node['site']}` is edited in place after the model has gone on from there. Edit it where it is read, "
                    "or `.clone()` it first."
                )
            )
        if root not in visit.edited:
            node["copy"] = True
            visit.edited.add(root)
        mine = self._storages[root]
        for other, storage in self._storages.items():
            if other != root and storage.cdata == mine.cdata and not storage.expired():
                message = here(
                    f"A value that shares memory with `{node['site']}` was edited in place there, and is used before the model goes on. "
                    "`.clone()` it first."
                )
                self._stale.setdefault(other, []).append((*_stretch(tensor), message))

    # -- what a run asks -------------------------------------------------------------------------------------------

    @_unseen
    def begin_visit(self, mediator: Any, site: str, at: int, value: Any) -> _Visit:
        """Write down that a block reads what there is at a location."""
        assert self.block is not None
        structure = pytree.tree_structure(value, is_leaf=is_carrier)
        places = places_of(value)
        loop = bool(getattr(mediator, "loops", 0))
        visit = _Visit(
            site, at, self.block, loop, structure, [place for place, _ in places], [leaf for _, leaf in places]
        )
        for place, leaf in enumerate(visit.leaves):
            if not isinstance(leaf, FakeTensor) or any(leaf is other for other in visit.leaves[:place]):
                continue
            known = self._refs.get(leaf)
            if known is not None and self.nodes[self._roots[known[0]]]["do"] == "op":
                continue  # what a block has put there
            number = visit.reads[place] = self.emit("read", **visit.place(place))
            self._refs[leaf] = (number, 0)
            self._storages[number] = StorageWeakRef(leaf.untyped_storage())
        self._visits.append(visit)
        return visit

    @_unseen
    def end_visit(self, visit: _Visit, left: Any) -> None:
        """Write down what a block leaves at a location."""
        self._visits.remove(visit)
        leaves = tensors_at(left)
        if len(leaves) != len(visit.leaves) or pytree.tree_structure(left, is_leaf=is_carrier) != visit.structure:
            raise NotExpressibleError(
                here(
                    f"The replacement of `{visit.site}` has another structure than the model's value there. Replace a tuple by a tuple, "
                    "a dict by a dict with its keys."
                )
            )
        for leaf, number in visit.reads.items():
            if number in visit.edited:
                self.emit("write", **visit.place(leaf), value={"ref": [number, 0]}, in_place=True)
        for number, (old, new) in enumerate(zip(visit.leaves, leaves, strict=True)):
            if new is old:
                continue
            if not (isinstance(new, torch.Tensor) and isinstance(old, torch.Tensor)):
                if type(new) is type(old) and new == old:
                    continue
                raise NotExpressibleError(
                    here(f"The replacement of `{visit.site}` changes something that is no tensor, or is none.")
                )
            value = self.reference(self.substitute(new))
            if visit.places[number][1] is not None:
                raise NotExpressibleError(
                    here(f"A tensor in a cache at `{visit.site}` is replaced: edit it in place instead.")
                )
            self.emit("write", **visit.place(number), value=value)
        for number in [number for number in self._stale if not self.nodes[number].get("copy")]:
            del self._stale[number]

    @_unseen
    def skip(self, site: str, at: int, value: Any, loop: bool) -> None:
        """Write down that a module is skipped."""

        def leaf(item: Any) -> Any:
            if isinstance(item, torch.Tensor):
                return self.reference(self.substitute(item))
            raise NotExpressibleError(
                here(f"A module cannot be skipped with a {type(item).__name__}: use tensors, in tuples or dicts.")
            )

        self.emit("skip", site=site, at=at, value=write_tree(value, leaf), **({"loop": True} if loop else {}))

    def barrier(self, barrier: Any, participants: int) -> None:
        """Write down that a block waits for others."""
        self._keep.append(barrier)
        self.emit("barrier", id=self._barriers.setdefault(id(barrier), len(self._barriers)), of=participants)

    @_unseen
    def apply(self, path: str, module: torch.nn.Module, args: Any, kwargs: Any, hook: bool) -> Any:
        """Apply a module of the model to values of the block."""
        assert self.model is not None
        copy = self.model.by_path.get(path)
        if copy is None or hook:
            raise NotExpressibleError(
                here(
                    f"`{path}` is called with `hook=True`, or is no module that the model came with: neither can be sent."
                )
            )
        args, kwargs = (pytree.tree_map(self._argument, part) for part in (args, kwargs))

        def leaf(item: Any) -> Any:
            if isinstance(item, torch.Tensor):
                return self.reference(item)
            raise NotExpressibleError(here(f"`{path}` is given a {type(item).__name__}, which cannot be sent."))

        trees = {"args": write_tree(list(args), leaf), "kwargs": write_tree(dict(kwargs), leaf)}
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        before = self.model.versions() + sum(tensor._version for tensor in tensors)
        result = copy.forward(*args, **kwargs)
        if self.model.versions() + sum(tensor._version for tensor in tensors) != before:
            raise NotExpressibleError(
                here(
                    f"`{path}` writes to what it is given, or to its buffers, so it cannot be applied. Use a function that does not, "
                    "such as `torch.relu`."
                )
            )
        number = self.emit("apply", module=path, **trees)
        given = {tensor.untyped_storage()._cdata for tensor in tensors}
        given |= self.model.storages()
        for output, tensor in enumerate(tensors_at(result)):
            if isinstance(tensor, FakeTensor):
                if tensor not in self._refs:
                    self._refs[tensor] = (number, output)
                if tensor.untyped_storage()._cdata in given:
                    self.nodes[number]["shares"] = True
        return result


def _stretch(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first byte of the memory that a tensor reaches, and the one behind the last."""
    with torch._C.DisableTorchFunction():
        start = int(tensor.storage_offset())
        length = int(sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))) + 1
        return start * tensor.element_size(), (start + max(length, 0)) * tensor.element_size()
