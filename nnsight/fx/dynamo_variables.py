"""Helpers for dynamo's symbolic execution: constants and containers as its variables, guards, and errors."""

from __future__ import annotations

import types
from typing import Any

from ..tracing.block import is_bound
from .torch_compat import AttrSource, GetItemSource, ValueMutationNew, VariableTracker, exc, variables


def guard_closures(tx: Any, layers: list[types.FunctionType], source: Any) -> None:
    """Tell dynamo the sources of the values in the closures of a function and its decorators.

    The rewritten function shares these cells. Dynamo does not know the source of that function, and so would not guard what it reads.

    Args:
        tx: Dynamo's frame that makes the call.
        layers: The decorators' functions, outermost first, and the function that they decorate.
        source: Dynamo's source of the first.
    """
    for layer, decorated in zip(layers, [*layers[1:], object()], strict=True):
        within = None
        for number, cell in enumerate(layer.__closure__ or ()):
            cell_source: Any = GetItemSource(AttrSource(source, "__closure__"), number)
            content_source = AttrSource(cell_source, "cell_contents")
            if not is_bound(cell):
                continue
            if cell.cell_contents is decorated:
                within = content_source
            elif cell not in tx.output.side_effects:
                content = VariableTracker.build(tx, cell.cell_contents, content_source)
                tx.output.side_effects.track_cell_existing(cell_source, cell, content)
        source = within


def constant(value: Any) -> VariableTracker:
    return variables.ConstantVariable.create(value)


def tuple_of(items: list[VariableTracker]) -> VariableTracker:
    return variables.TupleVariable(items, mutation_type=ValueMutationNew())


def as_dict(mapping: VariableTracker) -> dict[str, VariableTracker]:
    found: Any = mapping.realize()
    return {key.vt.as_python_constant(): value for key, value in found.items.items()}


def unsupported(message: str) -> Exception:
    return exc.Unsupported(message)
