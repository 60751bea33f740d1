"""The operations that a block mentions.

A compiled model must be captured with taps for operations before the block requests them. So the code of a block, and of the functions it
calls, is searched for names after ``.source``. An operation whose name is computed at run time is found too late for that run.
"""

from __future__ import annotations

import dis
import re
import types
from collections.abc import Callable
from typing import Any

#: The operation names of a block, one tuple for each chain of attributes: ``x.source.a_0.source.b_0`` gives ``("a_0", "b_0")``.
Chains = frozenset[tuple[str, ...]]

_OPERATION_NAME = re.compile(r"_\d+$")


def mentioned_chains(code: types.CodeType, functions: Callable[[str], Any]) -> Chains:
    """Return the operations that the ``code`` of a block and the functions it calls mention; ``functions`` finds functions by name."""
    found: set[tuple[str, ...]] = set()
    seen: set[types.CodeType] = set()
    pending = [(code, functions)]
    while pending and len(seen) < 100:
        current, names = pending.pop()
        if current in seen:
            continue
        seen.add(current)
        found |= _chains_in(current)
        for name in current.co_names + current.co_freevars:
            called = names(name)
            if isinstance(called, types.FunctionType):
                pending.append((called.__code__, called.__globals__.get))
        pending += [(item, names) for item in current.co_consts if isinstance(item, types.CodeType)]
    return frozenset(found)


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
