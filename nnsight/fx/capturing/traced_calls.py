"""Calls between taps, as dynamo executes them.

Dynamo executes the Python code of a model symbolically, instruction by instruction, and each call of a module is between two taps. The
functions here make these calls on dynamo's variables, if all values are common ones. The graph is that of the code of the interception and
of :mod:`~nnsight.fx.capturing.taps`, which dynamo would take as long to execute as the model itself, and executes for other values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import torch
from torch.utils import _pytree as pytree

from ...runtime.modules.interception import tapped_locations
from ...runtime.modules.recorded_outputs import module_of
from ...shared_changes import replaced
from ..torch_compat import (
    SymNodeVariable,
    TensorVariable,
    ValueMutationNew,
    VariableBuilder,
    VariableTracker,
    module_variables,
    variables,
)
from . import taps
from .structures import kind_of_record
from .taps import OPAQUE_MARK

#: The argument with the root module, of the function that is compiled.
ROOT_ARGUMENT = "the_model"

#: Makes a call on dynamo's variables.
_Call = Callable[[list[VariableTracker], dict[str, VariableTracker]], Any]


def _constant(value: Any) -> VariableTracker:
    return variables.ConstantVariable.create(value)


def _list_of(items: list[VariableTracker]) -> VariableTracker:
    return variables.ListVariable(items, mutation_type=ValueMutationNew())


def _call(tx: Any, function: Callable[..., Any], *args: VariableTracker) -> VariableTracker:
    """Let dynamo execute a call of ``function``."""
    return VariableTracker.build(tx, function).call_function(tx, list(args), {})


def _leaf(variable: Any) -> VariableTracker | None:
    """Return what stands in a tap for a tensor or a constant, or ``None`` for another value."""
    if type(variable) in (TensorVariable, SymNodeVariable):
        return variable
    if isinstance(variable, variables.ConstantVariable) and type(variable.value) in (bool, int, float, str, type(None)):
        return variable
    return None


def _argument(variable: Any) -> VariableTracker | None:
    """Return what stands in a tap for an argument of a module, or ``None`` for a container."""
    if not isinstance(variable, variables.UserDefinedObjectVariable):
        return _leaf(variable)
    kind = variable.python_type()
    if kind in pytree.SUPPORTED_NODES or kind_of_record(kind) in ("dataclass", "dict"):
        return None
    return _constant(OPAQUE_MARK + taps.full_name(kind))


class _Part(NamedTuple):
    """An argument or an output of a module.

    Attributes:
        values: The value, or the items of a tuple.
        leaves: What stands for them in a tap.
        is_tuple: Whether it is a tuple.
    """

    values: list[VariableTracker]
    leaves: list[VariableTracker]
    is_tuple: bool

    @property
    def structure(self) -> str:
        """Its structure, as :func:`~nnsight.fx.capturing.structures.describe` writes it."""
        items = "None," * len(self.values)
        return taps.structure_of_tuple(items) + "," if self.is_tuple else items

    def with_values(self, values: list[VariableTracker]) -> VariableTracker:
        """Return the argument or output with other ``values``."""
        return variables.TupleVariable(values, mutation_type=ValueMutationNew()) if self.is_tuple else values[0]


def _part(variable: Any, stands_for: Callable[[Any], VariableTracker | None]) -> _Part | None:
    """Return an argument or an output whose leaves ``stands_for`` knows, or a tuple of such; ``None`` for another value."""
    is_tuple = isinstance(variable, variables.TupleVariable) and variable.python_type() is tuple
    values = [item.realize() for item in variable.items] if is_tuple else [variable]
    leaves = [stands_for(value) for value in values]
    return None if None in leaves else _Part(values, leaves, is_tuple)


def _tap(tx: Any, location: str, parts: list[_Part], structure: str) -> list[VariableTracker]:
    """Add a tap to the graph; return the values in ``parts`` with the results of the tap in place of the tensors."""
    leaves = _list_of([leaf for part in parts for leaf in part.leaves])
    found = iter(_call(tx, taps.tap, _constant(location), leaves, _constant(structure)).unpack_var_sequence(tx))
    return [
        part.with_values([next(found) if type(value) is TensorVariable else value for value in part.values]) for part in parts
    ]


def _between_taps(
    tx: Any, path: tuple[str, str], call: _Call, owner: Any, args: list[Any], kwargs: dict[str, Any]
) -> VariableTracker | None:
    """Make ``call`` between two taps at the locations in ``path``. Return ``None``, and do nothing, if an argument is another container.

    ``owner`` is the variable for the module or method that is called.
    """
    found = [_part(value.realize(), _argument) for value in (*args, *kwargs.values())]
    if None in found:
        return None
    parts = cast("list[_Part]", found)
    texts = [part.structure for part in parts]
    structure = taps.structure_of_call("".join(texts[: len(args)]), list(kwargs), "".join(texts[len(args) :]))
    new = _tap(tx, path[0], parts, structure)
    output = call(new[: len(args)], dict(zip(kwargs, new[len(args) :], strict=True))).realize()
    part = None if _is_hooked(owner) and ".source." not in path[1] else _part(output, _leaf)
    if part is not None:
        return _tap(tx, path[1], [part], part.structure[:-1])[0]
    values = [(value, leaf) for part in parts for value, leaf in zip(part.values, part.leaves, strict=True)]
    objects = [value for value, leaf in values if leaf is not value]
    given = variables.TupleVariable([variables.TupleVariable([_list_of(objects), _constant(None), _constant("")])])
    return _call(tx, taps.tapped_output, _constant(path[1]), owner, output, given)


def _is_hooked(owner: Any) -> bool:
    """Whether ``owner``, the variable for a module or its method, is of a module with forward hooks, or may be."""
    while isinstance(owner, variables.UserMethodVariable):
        owner = owner.obj.realize()
    module = module_of(getattr(owner, "value", None))
    return not isinstance(module, torch.nn.Module) or bool(module._forward_hooks)


#: The location of the input of the module whose call dynamo begins, if :func:`_between_taps` makes the call. Not empty until it goes on.
_begun: list[str] = []


class _TappedCall(VariableTracker):
    """:func:`~nnsight.fx.capturing.taps.tapped_call`, as dynamo sees it."""

    def call_function(self, tx: Any, args: list[VariableTracker], kwargs: dict[str, VariableTracker]) -> VariableTracker:
        call: Any = args[2].realize()
        path = args[0].as_python_constant(), args[1].as_python_constant()
        positional = args[3].unpack_var_sequence(tx)
        items: dict[Any, VariableTracker] = args[4].realize().items
        named = {key.vt.as_python_constant(): value for key, value in items.items()}
        if _begun == [path[0]]:
            _begun.clear()
            return call.call_function(tx, positional, named)
        _begun.clear()
        made = _between_taps(tx, path, lambda args, kwargs: call.call_function(tx, args, kwargs), call, positional, named)
        return _call(tx, taps.tapped_call_of_any, *args) if made is None else made


VariableBuilder._id_dispatch()[id(taps.tapped_call)] = lambda builder, value: _TappedCall()

_call_module = variables.UnspecializedNNModuleVariable.call_function
_PLAIN = module_variables.unpatched_nn_module_call_impl


def _call_intercepted(variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    """Call a module, between taps if it is intercepted.

    Dynamo calls the ``forward`` of a module at once if the module has no hooks and its methods are those of torch, and else executes all
    the code around it. Here it takes the intercepted method for that of torch.
    """
    _begun.clear()
    module_variables.unpatched_nn_module_call_impl = _PLAIN
    found = tapped_locations(variable.value) if _is_in_root_graph(variable, tx) else None
    if found is None:
        return _call_module(variable, tx, args, kwargs)

    def call(args: list[VariableTracker], kwargs: dict[str, VariableTracker]) -> Any:
        _begun[:] = [found[0]]
        module_variables.unpatched_nn_module_call_impl = variable.value._call_impl.__func__
        return _call_module(variable, tx, args, kwargs)

    made = _between_taps(tx, found, call, variable, list(args), kwargs)
    return _call_module(variable, tx, args, kwargs) if made is None else made


def _is_in_root_graph(variable: Any, tx: Any) -> bool:
    """Whether dynamo reaches a module from the root module, and not inside a graph within the graph.

    In other frames and graphs, which dynamo may use again, guards on the interceptions distinguish modules of one class.
    """
    source = variable.source
    while hasattr(source, "base"):
        source = source.base
    return getattr(source, "local_name", None) == ROOT_ARGUMENT and tx.output.current_tracer is tx.output.root_tracer


@contextlib.contextmanager
def executing_calls() -> Iterator[None]:
    """Let dynamo execute calls of intercepted modules in a short way, in this context. The caller holds dynamo's lock."""
    kind = variables.UnspecializedNNModuleVariable
    with replaced(module_variables, "unpatched_nn_module_call_impl", _PLAIN), replaced(kind, "call_function", _call_intercepted):
        yield
