"""Lowering: turns a graph module into a callable.

Any ``torch.compile`` backend lowers a spliced graph in the same way as the model's own graph. A backend takes fake inputs. Each lowering
gets new ones, whose symbolic sizes have the sizes of this call as hints, because a backend specializes on hints. The numbers of the program
are symbols, too. The assumptions of the backend about symbols become conditions of the lowering: other sizes or numbers get another one.

If a graph writes to inputs that share memory, their fakes share memory, too, and have plain sizes. Such a lowering is only valid for inputs
that share memory in the same way.

A lowering has two steps. :func:`prepare` makes the fakes and needs the real inputs. :func:`lower_prepared` calls the backend; it may run
later and on another thread.

A backend returns generated code inside several wrappers, which disable dynamo, keep statistics, and prepare inputs and outputs for
autograd. If a graph computes no gradients and returns no view of an input, the only effect of the wrappers is to count writes to inputs.
They take about 90 µs in the middle of a model, for each layer of a model in regions, and they keep inputs alive that are no longer needed.
So :class:`Direct` watches the first call through the wrappers. If the generated code gets exactly the inputs, its results come back
unchanged, and modes and attributes of tensors stay the same, later calls go to the generated code directly, and count the writes. They pass
their inputs in a list, which the code empties, so that memory is free as early as in an uncut graph. Under a profiler all calls go through
the wrappers, because Inductor names its ranges there.
"""

from __future__ import annotations

import operator
import threading
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import increment_version

from ...runtime.switching.mode_stacks import without_function_modes
from ...runtime.switching.modes import thread_state
from .. import progress
from ..counters import counters
from ..effects import Kind, Memory, kind_of
from ..torch_compat import TracingContext, cache_counts, generated_code_in, lowering, static_fake, tracing
from .backends import BackendCallable, makes_cuda_graphs, without_fusion
from .given_results import drop_given_results, edited_tensor, with_given_results
from .symbols import Symbols, copied

#: A function that takes its inputs in a list, and may empty the list.
Boxed = Callable[[list[Any]], Sequence[Any]]


class InOwnMemory:
    """A lowered graph whose results are copied, because a CUDA graph writes its results to the same memory at each call.

    Otherwise torch records another CUDA graph for each call while results of earlier calls are alive: one for each value that a user keeps.
    Results that share memory with an input, or with each other, are not copied.

    Args:
        function: A backend's result, which takes the inputs one by one.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self._positions: list[int] | None = None

    def __call__(self, *inputs: Any) -> list[Any]:
        return self.copied(self.function(*inputs), inputs)

    def copied(self, results: Sequence[Any], inputs: Sequence[Any] = ()) -> list[Any]:
        """Return the results in memory of their own. Only the first call needs the ``inputs``, to find the results that share memory."""
        made = list(results)
        if self._positions is None:
            storages = Counter(_storages(made))
            taken = {*_storages(inputs)}
            self._positions = [
                position
                for position, result in enumerate(made)
                if isinstance(result, torch.Tensor) and (own := _storages([result])[0]) not in taken and storages[own] == 1
            ]
        for position in self._positions:
            result = made[position]
            made[position] = copied(result, result.stride()) if 0 in result.stride() else result.clone()
        return made


_number_of = operator.attrgetter("_cdata")


def _storages(values: Sequence[Any]) -> list[int]:
    """Return an identity of the storage of each tensor. Written for speed: each call of a generation needs those of all its inputs."""
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return list(map(_number_of, map(torch.Tensor.untyped_storage, tensors)))


class Direct:
    """A lowered graph that is called with a list of its inputs, without the wrappers if they have no effect.

    Args:
        function: A backend's result, which takes the inputs one by one.

    Attributes:
        call: Calls the generated code if the wrappers have no effect, else ``function``; ``None`` before the first call of :meth:`first`.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._copies = function if isinstance(function, InOwnMemory) else None
        self._inner = function if self._copies is None else self._copies.function
        self._generated = generated_code_in(self._inner)
        self._lock = threading.Lock()
        self.call: Boxed | None = self.whole if self._generated is None else None

    def whole(self, inputs: list[Any]) -> Sequence[Any]:
        """Call the graph with its wrappers."""
        result: Sequence[Any] = self._function(*inputs)
        return result

    def first(self, inputs: list[Any]) -> Sequence[Any]:
        """Call the graph with its wrappers, and find out whether later calls can do without them."""
        if not self._lock.acquire(blocking=False):  # no waiting, because the code may itself wait for another thread
            return self.whole(inputs)
        try:
            return self._watched(inputs)
        finally:
            self._lock.release()

    def _watched(self, inputs: list[Any]) -> Sequence[Any]:
        holder, calls = self._generated, []
        generated = holder.current_callable

        def watch(handed: list[Any]) -> Sequence[Any]:
            given, state, before = list(handed), thread_state(), _versions(handed)
            made = generated(handed)
            calls.append((given, list(made), state, _changes(before, _versions(given))))
            return made

        given, state, versions = list(inputs), thread_state(), _versions(inputs)
        holder.current_callable = watch
        try:
            results: Sequence[Any] = self._inner(*inputs)
        finally:
            holder.current_callable = generated
        changes = _changes(versions, _versions(given))
        changes_nothing = (
            len(calls) == 1
            and _are_same(calls[0][0], given)
            and _are_same(calls[0][1], results)
            and calls[0][2] == state == thread_state()
            and not any(isinstance(result, torch.Tensor) and vars(result) for result in results)
        )
        copies = self._copies
        counted = [changed - inside for changed, inside in zip(changes, calls[0][3], strict=True)] if changes_nothing else []
        if any(counted):
            changes_nothing = {*counted} == {0, 1}
            generated = _counting(generated, [position for position, count in enumerate(counted) if count])
        if copies is None:
            self.call = generated if changes_nothing else self.whole
            return results
        self.call = (lambda handed: copies.copied(generated(handed))) if changes_nothing else self.whole
        return copies.copied(results, given)


def _are_same(ones: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(ones) == len(others) and all(one is other for one, other in zip(ones, others, strict=True))


def _versions(inputs: Sequence[Any]) -> list[int]:
    """Return the version of each tensor, which counts writes; 0 for tensors of inference mode, which have none."""
    return [tensor._version if isinstance(tensor, torch.Tensor) and not tensor.is_inference() else 0 for tensor in inputs]


def _changes(before: Sequence[int], after: Sequence[int]) -> list[int]:
    return [new - old for old, new in zip(before, after, strict=True)]


def _counting(generated: Boxed, written: Sequence[int]) -> Boxed:
    """Return a function that calls ``generated`` and counts a write to each input at the positions ``written``, as the wrappers do."""

    def call(inputs: list[Any]) -> Sequence[Any]:
        edited = [inputs[position] for position in written]
        made = generated(inputs)
        increment_version(edited)
        return made

    return call


class Placement(NamedTuple):
    """The properties of the inputs' memory on which a lowering depends.

    Attributes:
        sharing: Which inputs share memory, see :func:`sharing_of`; empty if the graph writes to no input.
        layouts: The layouts of the inputs that earlier pieces have computed, see :mod:`~nnsight.fx.lowering.symbols`.
    """

    sharing: tuple[int, ...] = ()
    layouts: tuple[Any, ...] = ()


#: For a graph that writes to none of its inputs, and has no inputs from earlier pieces.
NO_PLACEMENT = Placement()


@dataclass(frozen=True, eq=False)
class Lowered:
    """A callable graph.

    Attributes:
        function: Takes the graph's inputs, returns its outputs as a sequence.
        conditions: The guards of the lowering, as expressions over ``symbols``.
        symbols: The symbols, in the order of the sizes passed to :meth:`accepts`.
        compiles: Number of graphs that a backend compiled for it.
        placement: The placement of the inputs for which it is valid.
        partial: Places of the tensors with incomplete gradients, see :func:`~nnsight.fx.lowering.gradient_borders.partial_results`.
        node_by_node: Whether its nodes run one by one, so that autograd sees edits of an input through another one.
        regions: Number of graphs that it calls one after the other.
        uncompiled: If its nodes run one by one and the user has to know: the reason, and the remedy.
    """

    function: Callable[..., Any]
    conditions: tuple[Any, ...]
    symbols: tuple[Any, ...]
    compiles: int = 1
    placement: Placement = NO_PLACEMENT
    partial: frozenset[int] = frozenset()
    node_by_node: bool = False
    regions: int = 1
    uncompiled: str = ""

    @cached_property
    def direct(self) -> Direct:
        """The function in a form that takes a list of inputs and may empty it."""
        return Direct(self.function)

    def accepts(self, binding: tuple[int | float, ...]) -> bool:
        """Whether the graph is valid for these values of the symbols."""
        values = dict(zip(self.symbols, binding, strict=True))
        return all(bool(condition.xreplace(values)) for condition in self.conditions)

    def restricted(self) -> set[int]:
        """Return the positions of the symbols on which :meth:`accepts` depends."""
        mentioned = {symbol for condition in self.conditions for symbol in condition.free_symbols}
        return {position for position, symbol in enumerate(self.symbols) if symbol in mentioned}


def sharing_of(inputs: Sequence[Any]) -> tuple[int, ...]:
    """Return, for each input, the position of the first input that it shares memory with; empty if no two inputs share memory."""
    storages = _storages(inputs)
    if len({*storages}) == len(storages):
        return ()
    first: dict[int, int] = {}
    numbers = [item.untyped_storage()._cdata if isinstance(item, torch.Tensor) else -1 - n for n, item in enumerate(inputs)]
    return tuple(first.setdefault(number, position) for position, number in enumerate(numbers))


@dataclass(frozen=True, eq=False)
class Prepared:
    """A graph about to be lowered. Its placeholders have ``fakes`` as ``example_value``, with sizes in terms of ``symbols``."""

    graph_module: torch.fx.GraphModule
    fakes: list[Any]
    symbols: Symbols
    placement: Placement = NO_PLACEMENT


def prepare(
    graph_module: torch.fx.GraphModule,
    inputs: Sequence[Any],
    symbols: Sequence[Any],
    binding: tuple[int | float, ...],
    fixed: Collection[type] = (),
    placement: Placement = NO_PLACEMENT,
    static: bool = False,
) -> Prepared:
    """Make the fake inputs with which ``graph_module`` is to be lowered.

    Args:
        graph_module: A module that returns a tuple. Its first placeholders, of captured nodes, have an ``example_value``. Then come those
            of externals and, last, of numbers.
        inputs: The values with which it is about to be called, in order.
        symbols: Symbols of the captured graph.
        binding: The size of each symbol in ``inputs``, then the program's numbers.
        fixed: Types of numbers to write into the graph as constants. The result is then valid for these numbers only.
        placement: The placement of ``inputs``.
        static: Whether sizes are constants, too.
    """
    sharing = placement.sharing
    made = Symbols(symbols, binding, fixed=fixed)
    if static:
        for size in made.fresh.values():
            int(size)  # adds the guard that the symbol has this value, and makes the environment use the value from here on
    if sharing:
        made.assumed += made.as_now()
    fakes = []
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    for position, (node, actual) in enumerate(zip(placeholders, inputs, strict=True)):
        if sharing and sharing.count(sharing[position]) > 1:
            fake = static_fake(made.mode, actual)
        else:
            fake = made.fake_of_placeholder(node, actual)
        node.meta["example_value"] = fake
        fakes.append(fake)
    _inline_numbers(graph_module, made.numbers, fixed)
    return Prepared(graph_module, fakes, made, placement)


def lower_prepared(prepared: Prepared, backend: BackendCallable) -> Lowered:
    """Lower a graph with ``backend``."""
    symbols, graph_module = prepared.symbols, prepared.graph_module
    given = drop_given_results(graph_module)
    if prepared.placement.sharing:
        backend = run_as_is if _may_mix_up_results(graph_module.graph) else without_fusion(backend)
    # The operations of the graph are those that the function modes of the user have already seen and changed.
    with progress.step(progress.LOWERING), lowering(), tracing(TracingContext(symbols.mode)), without_function_modes():
        hits, misses = cache_counts()
        lowered = backend(graph_module, prepared.fakes)
        hits, misses = (after - before for after, before in zip(cache_counts(), (hits, misses), strict=True))
    compiles = 0 if hits and not misses else 1
    counters.add("compiles" if compiles else "loads")
    node_by_node = isinstance(getattr(lowered, "__self__", lowered), torch.fx.GraphModule)
    function = InOwnMemory(lowered) if makes_cuda_graphs(backend) else lowered
    function = with_given_results(function, given) if given else function
    return Lowered(function, symbols.conditions(), symbols.symbols, compiles, prepared.placement, node_by_node=node_by_node)


def _may_mix_up_results(graph: torch.fx.Graph) -> bool:
    """Whether ahead-of-time autograd may return wrong tensors for a graph that edits memory which several inputs share.

    It merges these inputs into one, and then looks in the wrong place for the base of some results: of results that share memory with an
    input and, if gradients are enabled, of views of computed tensors.
    """
    memory = Memory(graph)
    returned = graph.output_node().all_input_nodes
    if any(map(memory.is_input, returned)):
        return True
    sources = map(edited_tensor, returned)
    return torch.is_grad_enabled() and any(node.op != "placeholder" and kind_of(node) is not Kind.NEW for node in sources)


def run_as_is(graph_module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """A backend that compiles nothing: the nodes run one by one."""
    return graph_module.forward


def _inline_numbers(graph_module: torch.fx.GraphModule, numbers: Sequence[Any], fixed: Collection[type]) -> None:
    """Write numbers of the types ``fixed`` into the graph as constants. Their placeholders stay, without users."""
    graph = graph_module.graph
    constants: dict[torch.fx.Node, Any] = {}
    for node in graph.find_nodes(op="placeholder"):
        number = node.meta.get("number")
        if number is not None and number.kind in fixed:
            sources = node.users if number.kind is float else (node,)  # the placeholder of a float is a tensor, and its user is `item`
            constants.update(dict.fromkeys(sources, numbers[number.index]))
    if not constants:
        return
    for node in graph.nodes:
        node.args, node.kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda used: constants.get(used, used))
    for node in constants:
        if node.op != "placeholder":
            graph.erase_node(node)
    graph.lint()
    graph_module.recompile()
