"""Effects and aliases: which nodes of a graph do more than return a value, and which may share memory.

Dynamo's graphs contain calls of torch functions as people write them: ``x.relu_()``, ``torch.nn.functional.dropout``, ``x[0] = y``. A pass
that moves, merges or removes calls has to know which of them edit memory, draw random numbers, switch a mode or print. The schema of the
ATen operator of the same name, or a short table, gives the answer. An unknown call is assumed to have effects, so it stays where it is.

Alias analysis (:class:`Memory`) is equally conservative. Two nodes are in one group if they *may* share memory: all inputs of a graph may
share theirs, and a result may share the memory of its arguments unless its operator is known to return new memory.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

import torch


class Kind(Enum):
    """The effect of a torch function, as far as it is known; lower numbers promise less."""

    EFFECT = 0  #: Perhaps more than returning a value.
    RANDOM = 1  #: It draws from a random number generator.
    READ = 2  #: It returns a value, which may share memory with its arguments.
    VIEW = 3  #: It returns a view of its first argument.
    NEW = 4  #: It returns new memory.


_ARITHMETIC = "add sub mul truediv floordiv mod pow neg abs matmul invert and_ or_ xor lshift rshift eq ne lt le gt ge".split()

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
_METHODS = frozenset("float double half bfloat16 int long short bool cpu cuda size dim numel stride type".split())

#: Composite operators that return new memory. Their schema does not say so.
_NEW = frozenset(
    "linear matmul outer layer_norm rms_norm group_norm softmax log_softmax where max min square absolute negative clip multiply subtract "
    "divide true_divide greater greater_equal less less_equal not_equal concat concatenate hstack vstack dstack conv1d conv2d conv3d "
    "conv_transpose1d conv_transpose2d conv_transpose3d tensordot inner kron bilinear cosine_similarity pairwise_distance cdist cross "
    "std var repeat_interleave tile take_along_dim lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell prelu selu relu6 log_sigmoid pad "
    "avg_pool1d adaptive_avg_pool1d _weight_norm".split()
)

#: Operators that edit their statistics without saying so in their schema.
_EDITING = frozenset(
    "batch_norm native_batch_norm cudnn_batch_norm miopen_batch_norm _batch_norm_impl_index _native_batch_norm_legit "
    "instance_norm sync_batch_norm".split()
)

#: Operators that share memory with their arguments without saying so in their schema.
_SHARING = frozenset("_unsafe_view unsafe_split unsafe_split_with_sizes unsafe_chunk lift _reshape_alias".split())

#: Composite operators that return a view of their first argument in any case. Others may copy, as ``reshape`` does.
_VIEWS = frozenset("expand_as moveaxis movedim mT narrow swapaxes swapdims unflatten view_as".split())

#: Operators that may fail because of values, or that check their arguments more strictly on real tensors than on fakes.
FAILING = frozenset(
    "assert_async bernoulli binary_cross_entropy bincount binomial cholesky cholesky_inverse cholesky_solve cross_entropy embedding "
    "embedding_bag embedding_renorm gather histc histogram histogramdd index index_add index_copy index_fill index_put index_reduce "
    "index_select inverse log_softmax logdet lu_solve lu_unpack masked_scatter masked_select matrix_power max_unpool1d max_unpool2d "
    "max_unpool3d multi_margin_loss multilabel_margin_loss multinomial nanquantile nll_loss normal one_hot pca_lowrank pinverse poisson "
    "put quantile repeat_interleave scatter scatter_add scatter_reduce searchsorted segment_reduce select_scatter slogdet softmax svd "
    "svd_lowrank take take_along_dim".split()
)

#: Divisions that raise an error on the CPU where they divide an integer by zero. ``div`` does so only with a rounding mode.
_DIVISIONS = frozenset("floor_divide floordiv ifloordiv rfloordiv remainder mod imod rmod fmod div divide".split())

#: Modules whose functions are operators under the same name.
_MODULES: dict[str, Any] = {
    "torch": torch,
    "torch.functional": torch.functional,
    **{f"torch._C.{name}": getattr(torch._C, name) for name in ("_nn", "_linalg", "_fft", "_special")},
}

#: Python functions of ``torch.nn.functional`` that, up to their switches, behave like the operator of the same name.
_FUNCTIONAL = frozenset(
    "celu cosine_similarity dropout elu embedding group_norm hardsigmoid hardswish hardtanh layer_norm leaky_relu log_softmax mish "
    "mse_loss pad relu relu6 rms_norm scaled_dot_product_attention selu sigmoid silu softmax tanh".split()
)

#: Arguments that can give a function further effects, and the values with which they do not.
_SWITCHES: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("out", "max_norm", "generator", "running_mean", "running_var"), (None,)),
    "inplace": (False,),
}

#: Names of random functions. Once one is recorded, or the model has drawn numbers, all later ones are recorded, so that they draw in order.
RANDOM = frozenset(
    "rand randn randint randperm normal normal_ bernoulli bernoulli_ multinomial poisson uniform_ exponential_ geometric_ "
    "cauchy_ log_normal_ random_ dropout dropout_ dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout "
    "feature_dropout rrelu gumbel_softmax scaled_dot_product_attention randn_like rand_like randint_like binomial _standard_gamma "
    "_sample_dirichlet rrelu_ alpha_dropout_ feature_alpha_dropout_ kaiming_uniform_ kaiming_normal_ multi_head_attention_forward "
    "fractional_max_pool2d fractional_max_pool3d svd_lowrank pca_lowrank".split()
)

#: Random functions that draw nothing if one argument has a certain value: the argument's position, name and default, and that value.
_NOT_RANDOM: dict[str, tuple[int, str, Any, Any]] = {
    "dropout": (2, "training", True, False),
    "scaled_dot_product_attention": (4, "dropout_p", 0.0, 0.0),
}


def name_of(node: torch.fx.Node) -> str:
    """Return the name of the function or method that ``node`` calls."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def kind_of(node: torch.fx.Node) -> Kind:
    """Return the kind of the call at ``node``, with its arguments."""
    if node.op == "get_attr":
        return Kind.READ
    if node.op not in ("call_function", "call_method"):
        return Kind.EFFECT
    kind = _kind_of_target(node.target)
    if kind is Kind.RANDOM and _draws_nothing(node):
        kind = Kind.READ
    if node.target is operator.getitem and _is_view(*node.args):
        kind = Kind.VIEW
    elif node.target is torch.einsum and len(node.all_input_nodes) > 1:
        kind = Kind.NEW  # a product; of one operand it may be a view
    return kind if _switched_off(node) else Kind.EFFECT


def may_fail(node: torch.fx.Node) -> bool:
    """Whether the call at ``node`` may raise an error on real tensors, although it raised none on fakes."""
    if node.target in (operator.getitem, operator.setitem):
        return not is_basic_index(node.args[1])
    name = name_of(node).partition(".")[0]
    return is_failing(name) or divides_by_zero(name, node.args, node.kwargs)


def is_failing(name: str) -> bool:
    """Whether a function of this name may raise an error on real tensors, although it raised none on fakes; also if it works in place."""
    return name.strip("_") in FAILING or "linalg" in name


def divides_by_zero(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call may divide an integer by a zero of a tensor on the CPU. Nodes without an example value may be such tensors."""
    name = name.strip("_")
    if name not in _DIVISIONS or (name in ("div", "divide") and not kwargs.get("rounding_mode")):
        return False
    given = [*args[:2], *(kwargs[key] for key in ("input", "other") if key in kwargs)]
    divisor = given[0 if name in ("rfloordiv", "rmod") else -1]
    is_tensor = isinstance(divisor, torch.Tensor) or (isinstance(divisor, torch.fx.Node) and not _is_number(divisor))
    return is_tensor and not any(map(_is_no_integer, given))


def _is_no_integer(value: Any) -> bool:
    """Whether ``value`` is known to be a float, or a tensor of floats, or not on the CPU."""
    value = value.meta.get("example_value") if isinstance(value, torch.fx.Node) else value
    if isinstance(value, torch.Tensor):
        return value.is_floating_point() or value.is_complex() or value.device.type != "cpu"
    return isinstance(value, (float, complex, torch.SymFloat))


def may_draw(node: torch.fx.Node) -> bool:
    """Whether the call at ``node`` may draw random numbers."""
    return (kind_of(node) is Kind.RANDOM or name_of(node) in RANDOM) and not _draws_nothing(node)


def _draws_nothing(node: torch.fx.Node) -> bool:
    if name_of(node) not in _NOT_RANDOM:
        return False
    position, argument, default, value = _NOT_RANDOM[name_of(node)]
    given = node.args[position] if len(node.args) > position else node.kwargs.get(argument, default)
    return type(given) is type(value) and given == value


@functools.cache
def _kind_of_target(target: Any) -> Kind:
    """Return the kind of a function, or of a method given by its name, with all switches off."""
    if isinstance(target, str):
        if target in _METHODS:
            return Kind.READ
        is_method = not target.startswith("__") and hasattr(torch.Tensor, target)
        return _kind_of_overloads(getattr(torch.ops.aten, target, None)) if is_method else Kind.EFFECT
    if target in _KINDS:
        return _KINDS[target]
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return _kind_of_overloads(target)
    name, module = getattr(target, "__name__", ""), _MODULES.get(getattr(target, "__module__", None) or "")
    if name in _FUNCTIONAL and getattr(torch.nn.functional, name, None) is target:
        module = torch.nn.functional
    is_operator = module is not None and getattr(module, name, None) is target
    return _kind_of_overloads(getattr(torch.ops.aten, name, None)) if is_operator else Kind.EFFECT


def overloads_of(operator: Any) -> list[torch._ops.OpOverload]:
    """Return the overloads of an operator, or an overload as a list; empty for anything else."""
    if isinstance(operator, torch._ops.OpOverloadPacket):
        return [getattr(operator, name) for name in operator.overloads()]
    return [operator] if isinstance(operator, torch._ops.OpOverload) else []


def _kind_of_overloads(operator: Any) -> Kind:
    """Return the lowest kind among the overloads of an operator, apart from those that write to ``out=``."""
    overloads = overloads_of(operator)
    if any(overload.namespace not in ("aten", "prims") for overload in overloads):
        return Kind.EFFECT  # a schema does not mention printing, or communication with other processes
    kinds = {kind for overload in overloads if (kind := _kind_of_overload(overload)) is not None}
    return min(kinds, key=lambda kind: kind.value, default=Kind.EFFECT)


def _kind_of_overload(overload: Any) -> Kind | None:
    schema, name = overload._schema, overload._schema.name.removeprefix("aten::")
    if any(argument.is_out for argument in schema.arguments):
        return None
    try:
        composite = torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), "CompositeImplicitAutograd")
    except RuntimeError:  # an overload that only TorchScript has
        return None
    if not schema.returns or not all("Tensor" in str(returned.type) for returned in schema.returns):
        return Kind.EFFECT
    if schema.is_mutable or name in _EDITING:
        return Kind.EFFECT
    if torch.Tag.nondeterministic_seeded in overload.tags:
        return Kind.RANDOM
    if name in _NEW:
        return Kind.NEW
    if name in _VIEWS:
        return Kind.VIEW
    if composite or name in _SHARING:
        return Kind.READ
    shares = any(returned.alias_info is not None for returned in schema.returns)
    if not shares:
        return Kind.NEW
    return Kind.VIEW if len(schema.returns) == 1 and "[]" not in str(schema.returns[0].type) else Kind.READ


def _switched_off(node: torch.fx.Node) -> bool:
    """Whether no argument gives the call further effects, see ``_SWITCHES``."""
    if any(name in _SWITCHES and value not in _SWITCHES[name] for name, value in node.kwargs.items()):
        return False
    positions = _switch_positions(node.target) if node.op == "call_function" else ()
    return not any(
        position < len(node.args) and node.args[position] not in _SWITCHES[name] for position, name in positions
    )


@functools.cache
def _switch_positions(function: Any) -> tuple[tuple[int, str], ...]:
    """Return the positions and names of those arguments of a Python function that are switches."""
    if not inspect.isfunction(function):
        return ()
    names = enumerate(inspect.signature(function).parameters)
    return tuple((position, name) for position, name in names if name in _SWITCHES)


def is_basic_index(index: Any) -> bool:
    """Whether any tensor indexed with ``index`` gives a view: the index contains no tensors, lists or masks."""
    items = index if isinstance(index, tuple) else (index,)
    return all(
        item is None
        or item is Ellipsis
        or type(item) is int
        or (isinstance(item, slice) and {type(item.start), type(item.stop), type(item.step)} <= {int, type(None)})
        for item in items
    )


def _is_view(node: Any, index: Any) -> bool:
    """Whether ``node[index]`` is known to be a view of a tensor. With a single integer as index, ``node`` might be a tuple."""
    is_tensor = isinstance(node, torch.fx.Node) and isinstance(node.meta.get("example_value"), torch.Tensor)
    return is_basic_index(index) and (is_tensor or type(index) is not int)


def requires_grad(value: Any) -> bool:
    """Whether ``value`` is a tensor that requires a gradient."""
    return isinstance(value, torch.Tensor) and value.requires_grad


class Memory:
    """Alias analysis: groups the nodes of ``graph`` that may share memory. ``order`` has the position of each node."""

    def __init__(self, graph: torch.fx.Graph) -> None:
        self._parent: dict[Any, Any] = {}
        for node in graph.nodes:
            if _is_number(node):
                continue
            if node.op in ("placeholder", "get_attr"):
                self._join(node, "inputs")
            elif node.op != "output" and kind_of(node) is not Kind.NEW:
                for argument in written(node):
                    if not _is_number(argument):  # a view shares nothing with its sizes
                        self._join(node, argument)
        self.order = {node: number for number, node in enumerate(graph.nodes)}

    def group(self, item: Any) -> Any:
        """Return the representative of the group of a node."""
        while (parent := self._parent.get(item, item)) is not item:
            self._parent[item] = self._parent.get(parent, parent)
            item = parent
        return item

    def _join(self, one: Any, other: Any) -> None:
        self._parent[self.group(one)] = self.group(other)

    def is_input(self, node: torch.fx.Node) -> bool:
        """Whether ``node`` may share memory with an input of the graph."""
        return self.group(node) is self.group("inputs")


def _is_number(node: torch.fx.Node) -> bool:
    """Whether the value of a node is known to have no memory."""
    return isinstance(node.meta.get("example_value"), _NUMBERS) or "number" in node.meta


def edits(graph: torch.fx.Graph) -> list[tuple[torch.fx.Node, torch.fx.Node]]:
    """Return the calls that may write to an argument, each with that argument."""
    return [(node, source) for node in effects(graph) if node.op != "output" for source in written(node)]


def writes_to_inputs(graph: torch.fx.Graph) -> bool:
    """Whether a graph may write to the memory of its inputs."""
    memory = Memory(graph)
    return any(memory.is_input(source) for _, source in edits(graph))


def edits_of_inputs(
    graph: torch.fx.Graph,
    source_of: Callable[[torch.fx.Node], torch.fx.Node | None] = lambda _: None,
    inputs: Mapping[torch.fx.Node, int] | None = None,
    nodes: Sequence[torch.fx.Node] | None = None,
) -> Iterator[tuple[torch.fx.Node, frozenset[int], bool]]:
    """Yield each call that may edit inputs in place, the positions of these inputs, and whether autograd follows the call.

    A call is assumed to edit nothing if neither its name nor its arguments show an edit. ``source_of(node)`` returns the argument that a
    node passes on, if it does nothing else. By default ``inputs`` are the placeholders, and ``nodes`` are all nodes of the graph.
    """
    if inputs is None:
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        inputs = {node: position for position, node in enumerate(placeholders)}
    given = {node: frozenset({position}) for node, position in inputs.items() if not _is_number(node)}
    follows, nothing, detached = True, frozenset[int](), set[torch.fx.Node]()
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
                yield node, found, follows and not (_scales_weight(node) or detached.issuperset(sources))
            if kind_of(node) in (Kind.READ, Kind.VIEW):
                sources = node.all_input_nodes
            given[node] = nothing.union(*(given.get(source, nothing) for source in sources))
            if name_of(node) == "detach" or (sources and detached.issuperset(sources)):
                detached.add(node)


def all_edited(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Return the arguments that a call edits or may edit, as far as its name and arguments show it."""
    known = edited(node)
    if known is not None:
        return [known]
    if node.op != "call_function":
        return []
    target: Any = node.target
    name = getattr(target, "__name__", "").partition(".")[0]
    if name in _EDITING:
        given = _named_arguments(node, name)
        found = [given.get("running_mean"), given.get("running_var")]
    elif _scales_weight(node):
        found = [_named_arguments(node, name).get("weight")]
    elif isinstance(target, torch._ops.OpOverload):
        given = _named_arguments(node, name)
        found = [given.get(argument.name) for argument in target._schema.arguments if argument.is_write]
    else:
        in_place = node.kwargs.get("inplace") or (name.endswith("_") and not name.endswith("__") and target not in _KINDS)
        in_place = in_place or (kind_of(node) is Kind.EFFECT and _kind_of_target(target) is not Kind.EFFECT)
        found = [node.args[0] if in_place and node.args else None, node.kwargs.get("out")]
    return [item for item in found if isinstance(item, torch.fx.Node)]


def _scales_weight(node: torch.fx.Node) -> bool:
    """Whether ``node`` is an embedding with ``max_norm``, which scales rows of its weight in place, without gradients."""
    return node.target in (torch.nn.functional.embedding, torch.nn.functional.embedding_bag) and not _switched_off(node)


def _named_arguments(node: torch.fx.Node, name: str) -> dict[str, Any]:
    """Return the arguments of a call of a Python function or an operator, by name."""
    names: Any = inspect.signature(node.target).parameters if inspect.isfunction(node.target) else ()
    for overload in (overloads_of(node.target) or overloads_of(getattr(torch.ops.aten, name, None)))[:1]:
        names = names or [argument.name for argument in overload._schema.arguments]
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


#: Operators that write to their first argument. Their result shares memory with no other argument.
_WRITING = frozenset(
    getattr(operator, name)
    for name in "setitem iadd isub imul itruediv ifloordiv imod ipow imatmul iand ior ixor ilshift irshift".split()
)


def edited(node: torch.fx.Node) -> torch.fx.Node | None:
    """Return the argument that ``node`` edits in place and returns; ``None`` if there is none, or if that is not known."""
    if isinstance(node.meta.get("example_value"), _NUMBERS):
        return None  # ``+=`` creates a new number
    if not (node.target in _WRITING or _is_in_place(node)):
        return None
    source = node.args[0] if node.args else node.kwargs.get("input")
    return source if isinstance(source, torch.fx.Node) else None


def _is_in_place(node: torch.fx.Node) -> bool:
    """Whether ``node`` is an in-place call, such as ``relu_(x)`` or ``relu(x, inplace=True)``."""
    target, name = node.target, name_of(node)
    if isinstance(target, torch._ops.OpOverload) and target.namespace == "aten":
        writes = [argument.is_write for argument in target._schema.arguments]
        return writes[:1] == [True] and not any(writes[1:]) and target._schema.name != "aten::set_"
    has_name = name.endswith("_") and not name.endswith("__")
    if node.op == "call_method":
        return has_name and name != "set_"
    if node.op != "call_function" or (getattr(target, "__module__", None) or "").partition(".")[0] != "torch":
        return False
    if has_name or node.kwargs.get("inplace"):
        return True
    return any(switch == "inplace" and node.args[at] for at, switch in _switch_positions(target) if at < len(node.args))


def written(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Return the arguments that a call may write to, if it has effects. Its result may share their memory."""
    known = edited(node)
    return node.all_input_nodes if known is None else [known]


def effects(graph: torch.fx.Graph) -> Iterator[torch.fx.Node]:
    """Yield the nodes that may do more than return a value, including the output node."""
    for node in graph.nodes:
        if node.op != "placeholder" and kind_of(node) is Kind.EFFECT:
            yield node
