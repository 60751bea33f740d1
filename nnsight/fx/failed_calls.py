"""What dynamo keeps of a call of the model that failed, and takes back here.

A call that fails while dynamo looks at it (a string instead of a tensor, a hook that raises) is a break of the graph to dynamo: it
compiles the function around the model to "call the model as Python", for want of anything read before the break without a condition on
the arguments. All later calls would go that way, with right results and without a captured graph. Or it gives up on a function, and
marks its code, which all modules of a class share, to be run as it is from then on. Neither says anything of calls that succeed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import CodeType

import torch

from ..tree import ModuleTree
from .captures import Captures
from .torch_compat import allow_code, compiled_entries, forget_entries, frames_seen


@contextlib.contextmanager
def undone_if_it_fails(code: CodeType, tree: ModuleTree, captures: Captures) -> Iterator[None]:
    """If the call within raises an error and dynamo has compiled something for it, let later calls be as if it had not been.

    Captures of the whole call stay: then dynamo was done with the model, and it was something else that failed.

    Args:
        code: Of the function around the model.
        tree: The modules of the model.
        captures: Those of that function.
    """
    seen, whole = frames_seen(), captures.whole
    known = compiled_entries(code) if captures.count else ()
    try:
        yield
    except BaseException:
        if frames_seen() != seen and captures.whole == whole:
            captures.forgotten += forget_entries(code, known)
            for forward in {_code_of(module) for module in tree.paths}:
                if forward is not None:
                    allow_code(forward)
        raise


def _code_of(module: torch.nn.Module) -> CodeType | None:
    code = getattr(module.forward, "__code__", None)
    return code if isinstance(code, CodeType) else None
