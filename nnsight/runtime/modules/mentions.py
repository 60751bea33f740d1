"""The operations that a block mentions.

A compiled model must be captured with taps for operations before the block requests them. So the code of a block, and of the functions and
the methods of objects that it uses, is searched for names after ``.source``. An operation whose name is computed at run time is found too
late for that run.
"""

from __future__ import annotations

import dis
import functools
import re
import types
from collections import ChainMap
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ...tracing.block import is_bound

#: The operation names of a block, one tuple for each chain of attributes: ``x.source.a_0.source.b_0`` gives ``("a_0", "b_0")``.
Chains = frozenset[tuple[str, ...]]

_OPERATION_NAME = re.compile(r"_\d+$")

#: Maximum number of functions that are searched for one block.
_MOST = 300

#: Packages whose classes mention no operations of a user's model.
_OTHERS = frozenset({"builtins", "collections", "functools", "nnsight", "numpy", "torch", "transformers", "types", "typing"})


def mentioned_chains(code: types.CodeType, functions: Callable[[str], Any]) -> Chains:
    """Return the operations that a block mentions.

    Args:
        code: The code of the block.
        functions: Finds the objects that the code uses by name. Functions are searched, and methods and attributes of other objects.
    """
    found: set[tuple[str, ...]] = set()
    codes: set[types.CodeType] = set()
    objects: dict[int, Any] = {}
    pending = [(code, functions)]
    while pending and len(codes) < _MOST:
        current, named = pending.pop()
        if current in codes:
            continue
        codes.add(current)
        found |= _chains_in(current)
        for name in current.co_names + current.co_freevars:
            pending += [(function.__code__, _names_of(function)) for function in _functions_of(named(name), objects)]
        pending += [(item, named) for item in current.co_consts if isinstance(item, types.CodeType)]
    return frozenset(found)


def _names_of(function: types.FunctionType) -> Callable[[str], Any]:
    """Return what finds the objects that ``function`` uses by name."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return ChainMap({name: cell.cell_contents for name, cell in cells if is_bound(cell)}, function.__globals__).get


def _functions_of(value: Any, seen: dict[int, Any]) -> Iterator[types.FunctionType]:
    """Yield the functions that uses of ``value`` may call. ``seen`` has the objects that were searched, by ``id``."""
    if isinstance(value, types.FunctionType):
        yield value
        return
    if id(value) in seen or isinstance(value, (types.ModuleType, torch.nn.Module, torch.Tensor)):
        return
    seen[id(value)] = value
    if isinstance(value, property):
        parts = [value.fget, value.fset]
    elif isinstance(value, functools.partial):
        parts = [value.func]
    elif hasattr(type(value), "__func__"):  # methods, and static and class methods
        parts = [value.__func__, getattr(value, "__self__", None)]
    else:
        classes = value.__mro__ if isinstance(value, type) else type(value).__mro__
        parts = [item for kind in classes if kind.__module__.partition(".")[0] not in _OTHERS for item in vars(kind).values()]
        if not isinstance(value, type) and (parts or _is_envoy(value)):
            parts += [item for item in getattr(value, "__dict__", {}).values() if not _is_envoy(item)]
    for part in parts:
        yield from _functions_of(part, seen)


def _is_envoy(value: Any) -> bool:
    return hasattr(type(value), "source")


def _chains_in(code: types.CodeType) -> set[tuple[str, ...]]:
    if "source" not in code.co_names:
        return set()
    found: set[tuple[str, ...]] = set()
    chain: list[str] | None = None
    expect_name = False
    for instruction in dis.get_instructions(code):
        name = instruction.argval if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") else None
        if name == "source":
            chain, expect_name = chain or [], True
        elif name is not None and _OPERATION_NAME.search(name):
            # The name need not directly follow `.source`, because the source may be in a variable.
            chain = [*chain, name] if chain is not None and expect_name else [name]
            expect_name = False
            found.add(tuple(chain))
        elif instruction.opname not in ("CACHE", "EXTENDED_ARG"):
            chain, expect_name = None, False
    return found
