"""What a node of a graph does besides returning a value, as far as that is known.

Dynamo's graphs hold calls of torch functions as people write them, not of operators: ``x.relu_()``, ``torch.nn.functional.dropout``,
``x[0] = y``. A pass that moves, merges or removes calls has to know which of them edit memory, draw random numbers, switch a
mode or print. Most answers are in the schema of the ATen operator with the same name. A call is taken
to have effects unless the schema, or a short table, says that it has none: what is unknown stays where it is.

Memory is followed in the same spirit. :class:`Memory` puts two nodes in one group if they *may* share memory: a call's result
may share the memory of its arguments, unless its operator is known to return new memory; all inputs of a graph may share theirs.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

import torch

#: What splicing leaves in ``node.meta`` of a call of the block: whether autograd follows it.
REQUIRES_GRAD = "requires_grad"


class Kind(Enum):
    """What a torch function is known to do.

    Attributes:
        EFFECT: Perhaps more than returning a value.
        RANDOM: It returns a value that a random number generator decides, and moves the generator on.
        READ: It returns a value, which may share memory with its arguments.
        VIEW: It returns a view of its first argument.
        NEW: It returns new memory.
    """

    EFFECT = 0
    RANDOM = 1
    READ = 2
    VIEW = 3
    NEW = 4


_ARITHMETIC = (
    "add sub mul truediv floordiv mod pow neg abs matmul invert and_ or_ xor lshift rshift eq ne lt le gt ge"
).split()

_NUMBERS = (bool, int, float, torch.SymBool, torch.SymInt, torch.SymFloat, torch.Size)

#: Functions without a schema.
_KINDS: dict[Any, Kind] = {
    **{getattr(operator, name): Kind.NEW for name in _ARITHMETIC},
    operator.getitem: Kind.READ,
    getattr: Kind.READ,
    torch.tensor: Kind.NEW,
    torch.Size: Kind.NEW,
}

#: Methods without a schema of their own.
_METHODS = dict.fromkeys(
    "float double half bfloat16 int long short bool cpu cuda size dim numel stride type".split(), Kind.READ
)

#: Operators that are made of others, so that their schema does not say that they return new memory.
_NEW = frozenset(
    "linear matmul outer layer_norm rms_norm group_norm softmax log_softmax where max min square absolute negative clip multiply subtract "
    "divide true_divide greater greater_equal less less_equal not_equal concat concatenate hstack vstack dstack".split()
)

#: Operators that edit their statistics without saying so in their schema.
_EDITING = frozenset(
    "batch_norm native_batch_norm cudnn_batch_norm miopen_batch_norm _batch_norm_impl_index _native_batch_norm_legit "
    "instance_norm sync_batch_norm".split()
)

#: Operators that share memory with their arguments without saying so in their schema.
_SHARING = frozenset("_unsafe_view unsafe_split unsafe_split_with_sizes unsafe_chunk lift _reshape_alias".split())

#: Operators that may fail because of values, or whose fakes check their arguments less than they do themselves.
FAILING = frozenset(
    "bernoulli bincount binomial cholesky cholesky_inverse cholesky_solve cross_entropy embedding embedding_bag gather histc index "
    "index_add index_copy index_fill index_put index_reduce index_select inverse log_softmax logdet lu_solve masked_scatter "
    "masked_select multi_margin_loss multilabel_margin_loss multinomial nll_loss one_hot pinverse poisson put repeat_interleave scatter "
    "scatter_add scatter_reduce searchsorted select_scatter slogdet softmax svd take take_along_dim".split()
)

#: Modules whose functions are operators under the same name.
_MODULES: dict[str, Any] = {
    "torch": torch,
    "torch.functional": torch.functional,
    **{f"torch._C.{name}": getattr(torch._C, name) for name in ("_nn", "_linalg", "_fft", "_special")},
}

#: Functions of ``torch.nn.functional`` in Python that do what the operator of their name does, save for switches.
_FUNCTIONAL = frozenset(
    "celu cosine_similarity dropout elu embedding group_norm hardsigmoid hardswish hardtanh layer_norm "
    "leaky_relu log_softmax mish mse_loss pad relu relu6 rms_norm scaled_dot_product_attention selu sigmoid silu softmax "
    "tanh".split()
)

#: Arguments by which a function does more than its name says, and the values with which it does not.
_SWITCHES: dict[str, tuple[Any, ...]] = {
    "out": (None,),
    "inplace": (False,),
    "max_norm": (None,),
    "generator": (None,),
    "running_mean": (None,),
    "running_var": (None,),
}

#: Random functions that are not with this value of this argument, by position or name.
_NOT_RANDOM: dict[str, tuple[int, str, tuple[Any, ...]]] = {
    "dropout": (2, "training", (False,)),
    "scaled_dot_product_attention": (4, "dropout_p", (0.0,)),
}


def kind_of(node: torch.fx.Node) -> Kind:
    """Return what the call at ``node`` is known to do."""
    if node.op == "get_attr":
        return Kind.READ
    if node.op not in ("call_function", "call_method"):
        return Kind.EFFECT
    target: Any = node.target
    kind = _kind_of_method(target) if node.op == "call_method" else _kind_of_function(target)
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    if kind is Kind.RANDOM and name in _NOT_RANDOM:
        kind = _without_randomness(node, name)
    if target is operator.getitem and _is_view(*node.args):
        kind = Kind.VIEW
    if kind is not Kind.EFFECT and not _switched_off(node):
        return Kind.EFFECT
    return kind


def may_fail(node: torch.fx.Node) -> bool:
    """Whether the call at ``node`` may raise an error although it was made on fakes without one."""
    if node.target is operator.getitem:
        return not is_basic_index(node.args[1])
    target: Any = node.target
    name = target if isinstance(target, str) else getattr(target, "__name__", "").partition(".")[0]
    return is_failing(name)


def is_failing(name: str) -> bool:
    """Whether a function of this name may raise an error although it was called on fakes without one."""
    return name in FAILING or "linalg" in name


def _without_randomness(node: torch.fx.Node, name: str) -> Kind:
    position, argument, values = _NOT_RANDOM[name]
    default = 0.0 if name == "scaled_dot_product_attention" else True
    given = node.args[position] if len(node.args) > position else node.kwargs.get(argument, default)
    if not any(given is value or (type(given) is type(value) and given == value) for value in values):
        return Kind.RANDOM
    return Kind.READ


@functools.cache
def _kind_of_method(name: str) -> Kind:
    if name in _METHODS:
        return _METHODS[name]
    if name.startswith("__") or not hasattr(torch.Tensor, name):
        return Kind.EFFECT
    return _kind_of_operator(name)


@functools.cache
def _kind_of_function(function: Callable[..., Any]) -> Kind:
    if function in _KINDS:
        return _KINDS[function]
    if isinstance(function, torch._ops.OpOverload):
        return _kind_of_overloads([function], function.namespace)
    if isinstance(function, torch._ops.OpOverloadPacket):
        namespace = function._qualified_op_name.split("::")[0]
        return _kind_of_overloads([getattr(function, name) for name in function.overloads()], namespace)
    name, module = getattr(function, "__name__", ""), _MODULES.get(getattr(function, "__module__", None) or "")
    if name in _FUNCTIONAL and getattr(torch.nn.functional, name, None) is function:
        return _kind_of_operator(name)
    if module is None or getattr(module, name, None) is not function:
        return Kind.EFFECT
    return _kind_of_operator(name)


def _kind_of_operator(name: str) -> Kind:
    packet = getattr(torch.ops.aten, name, None)
    if packet is None:
        return Kind.EFFECT
    return _kind_of_overloads([getattr(packet, overload) for overload in packet.overloads()], "aten")


def _kind_of_overloads(overloads: list[Any], namespace: str) -> Kind:
    """Return the kind of an operator that may be any of ``overloads``; those that write to ``out=`` are left aside."""
    if namespace not in ("aten", "prims"):  # a schema says nothing about printing, or talking to other processes
        return Kind.EFFECT
    kinds = {kind for overload in overloads if (kind := _kind_of_overload(overload)) is not None}
    return min(kinds, key=lambda kind: kind.value) if kinds else Kind.EFFECT


def _kind_of_overload(overload: Any) -> Kind | None:
    schema, name = overload._schema, overload._schema.name.removeprefix("aten::")
    if any(argument.is_out for argument in schema.arguments):
        return None
    try:
        composite = torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), "CompositeImplicitAutograd")
    except RuntimeError:  # an overload of TorchScript alone
        return None
    if not schema.returns or not all("Tensor" in str(returned.type) for returned in schema.returns):
        return Kind.EFFECT
    if schema.is_mutable or name in _EDITING:
        return Kind.EFFECT
    if torch.Tag.nondeterministic_seeded in overload.tags:
        return Kind.RANDOM
    if name in _NEW:
        return Kind.NEW
    if composite or name in _SHARING:
        return Kind.READ
    shares = any(returned.alias_info is not None for returned in schema.returns)
    if not shares:
        return Kind.NEW
    return Kind.VIEW if len(schema.returns) == 1 and "[]" not in str(schema.returns[0].type) else Kind.READ


def _switched_off(node: torch.fx.Node) -> bool:
    """Whether no argument makes the call do more than its name says."""
    if any(name in _SWITCHES and value not in _SWITCHES[name] for name, value in node.kwargs.items()):
        return False
    positions = _switch_positions(node.target) if node.op == "call_function" else ()
    return not any(
        position < len(node.args) and node.args[position] not in _SWITCHES[name] for position, name in positions
    )


@functools.cache
def _switch_positions(function: Callable[..., Any]) -> tuple[tuple[int, str], ...]:
    """Return positions and names of the arguments of a Python function that are switches."""
    if not inspect.isfunction(function):
        return ()
    names = enumerate(inspect.signature(function).parameters)
    return tuple((position, name) for position, name in names if name in _SWITCHES)


def is_basic_index(index: Any) -> bool:
    """Whether indexing a tensor with ``index`` gives a view, whatever the tensor: no tensors, lists or masks in it."""
    items = index if isinstance(index, tuple) else (index,)
    return all(
        item is None
        or item is Ellipsis
        or type(item) is int
        or (isinstance(item, slice) and {type(item.start), type(item.stop), type(item.step)} <= {int, type(None)})
        for item in items
    )


def _is_view(node: Any, index: Any) -> bool:
    """Whether ``node[index]`` is known to be a view of a tensor; with one number, ``node`` may as well be a tuple."""
    is_tensor = isinstance(node, torch.fx.Node) and isinstance(node.meta.get("example_value"), torch.Tensor)
    return is_basic_index(index) and (is_tensor or type(index) is not int)


def is_differentiated(graph: torch.fx.Graph) -> bool:
    """Whether autograd may follow calls of ``graph``."""
    for node in graph.nodes:
        example, declaration = node.meta.get("example_value"), node.meta.get("declaration")
        if node.op == "placeholder":
            if declaration is not None and declaration.requires_grad:
                return True
            if torch.is_grad_enabled() and _wants_grad(example):
                return True
        elif node.meta.get(REQUIRES_GRAD) or _wants_grad(example):
            return True
    return False


def _wants_grad(example: Any) -> bool:
    leaves = example if isinstance(example, (tuple, list)) else (example,)
    return any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves)


class Memory:
    """Groups of nodes that may share memory.

    Args:
        graph: Not changed.

    Attributes:
        order: Number of each node.
    """

    def __init__(self, graph: torch.fx.Graph) -> None:
        self._parent: dict[Any, Any] = {}
        self._members: dict[Any, list[torch.fx.Node]] | None = None
        for node in graph.nodes:
            if _is_number(node):
                continue
            if node.op in ("placeholder", "get_attr"):
                self._join(node, "inputs")
            elif node.op != "output" and kind_of(node) is not Kind.NEW:
                for argument in written(node):
                    if not _is_number(argument):  # a view is not of its sizes
                        self._join(node, argument)
        self.order = {node: number for number, node in enumerate(graph.nodes)}

    def _find(self, item: Any) -> Any:
        while (parent := self._parent.get(item, item)) is not item:
            self._parent[item] = self._parent.get(parent, parent)
            item = parent
        return item

    def _join(self, one: Any, other: Any) -> None:
        self._parent[self._find(one)] = self._find(other)

    def group(self, node: torch.fx.Node) -> Any:
        """Return what names the group of ``node``."""
        return self._find(node)

    def of_inputs(self) -> Any:
        """Return what names the group of the graph's inputs."""
        return self._find("inputs")

    def sharing(self, node: torch.fx.Node) -> list[torch.fx.Node]:
        """Return the nodes that may share memory with ``node``, itself among them."""
        if self._members is None:
            self._members = {}
            for item in self.order:
                self._members.setdefault(self._find(item), []).append(item)
        return self._members[self._find(node)]


def _is_number(node: torch.fx.Node) -> bool:
    """Whether the value of a node is known to have no memory."""
    return isinstance(node.meta.get("example_value"), _NUMBERS) or "number" in node.meta


def writes_to_inputs(graph: torch.fx.Graph) -> bool:
    """Whether a graph may write to memory that it is given."""
    memory = Memory(graph)
    given = memory.of_inputs()
    sources = (source for node in effects(graph) if node.op != "output" for source in written(node))
    return any(memory.group(source) is given for source in sources)


def edits_of_inputs(
    graph: torch.fx.Graph,
    source_of: Callable[[torch.fx.Node], torch.fx.Node | None] = lambda _: None,
    inputs: Mapping[torch.fx.Node, int] | None = None,
    nodes: Sequence[torch.fx.Node] | None = None,
) -> Iterator[tuple[torch.fx.Node, frozenset[int], bool]]:
    """Yield calls that may edit inputs in place, with the positions of these inputs, and whether autograd follows the call.

    A call is taken at its word if it does not say that it edits something.

    Args:
        graph: Not changed.
        source_of: Tells what a node passes on, if it does nothing else.
        inputs: The nodes that are inputs, with their positions; by default the placeholders.
        nodes: The calls to look at; by default all.
    """
    if inputs is None:
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        inputs = {node: position for position, node in enumerate(placeholders) if not _is_number(node)}
    given = {node: frozenset({position}) for node, position in inputs.items()}
    follows, nothing = True, frozenset[int]()
    for node in graph.nodes if nodes is None else nodes:
        passed_on = source_of(node)
        if node in given:
            continue
        if passed_on is not None:
            given[node] = given.get(passed_on, nothing)
        elif node.target is torch._C._set_grad_enabled:
            follows = bool(node.args[0])
        else:
            sources = all_edited(node)
            found = nothing.union(*(given.get(source, nothing) for source in sources))
            if found:
                yield node, found, follows
            if kind_of(node) in (Kind.READ, Kind.VIEW):
                sources = node.all_input_nodes
            given[node] = nothing.union(*(given.get(source, nothing) for source in sources))


def all_edited(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Return the arguments that a call says it edits, or may edit."""
    known = edited(node)
    if known is not None:
        return [known]
    if node.op != "call_function":
        return []
    target: Any = node.target
    name = getattr(target, "__name__", "").partition(".")[0]
    if name in _EDITING:
        return [item for item in node.all_input_nodes if item is not node.args[0]]
    if isinstance(target, torch._ops.OpOverload):
        names = [argument.name for argument in target._schema.arguments]
        given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
        writes = [argument.name for argument in target._schema.arguments if argument.is_write]
        found = [given.get(argument) for argument in writes]
    else:
        in_place = node.kwargs.get("inplace") or (name.endswith("_") and not name.endswith("__"))
        in_place = in_place or (kind_of(node) is Kind.EFFECT and _kind_of_function(target) is not Kind.EFFECT)
        found = [node.args[0] if in_place and node.args else None, node.kwargs.get("out")]
    return [item for item in found if isinstance(item, torch.fx.Node)]


#: Operators that write to their first argument, and what they return shares memory with nothing else.
_WRITING = frozenset(
    getattr(operator, name)
    for name in "setitem iadd isub imul itruediv ifloordiv imod ipow imatmul iand ior ixor ilshift irshift".split()
)


def edited(node: torch.fx.Node) -> torch.fx.Node | None:
    """Return the argument that ``node`` is known to edit in place; ``None`` if it edits none, or nothing is known of it."""
    name = node.target if isinstance(node.target, str) else ""
    method = node.op == "call_method" and name.endswith("_") and not name.endswith("__") and name != "set_"
    if not (method or node.target in _WRITING or _is_in_place(node)):
        return None
    source = node.args[0] if node.args else node.kwargs.get("input")
    return source if isinstance(source, torch.fx.Node) else None


def _is_in_place(node: torch.fx.Node) -> bool:
    """Whether ``node`` calls a function of torch that edits its first argument: ``relu_``, or ``relu`` with ``inplace=True``."""
    target: Any = node.target
    name, module = getattr(target, "__name__", ""), getattr(target, "__module__", None) or ""
    if node.op != "call_function" or module.partition(".")[0] != "torch":
        return False
    if (name.endswith("_") and not name.endswith("__")) or node.kwargs.get("inplace"):
        return True
    return any(switch == "inplace" and node.args[at] for at, switch in _switch_positions(target) if at < len(node.args))


def written(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Return the arguments that a call with effects may write to, and whose memory its result may share."""
    known = edited(node)
    return node.all_input_nodes if known is None else [known]


def effects(graph: torch.fx.Graph) -> Iterator[torch.fx.Node]:
    """Yield the nodes that may do more than return a value, the output among them."""
    for node in graph.nodes:
        if node.op != "placeholder" and kind_of(node) is Kind.EFFECT:
            yield node
