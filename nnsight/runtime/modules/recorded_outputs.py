"""Outputs that transformers records: hidden states, attentions and router logits, for ``output_hidden_states=True`` and the like.

Transformers records them in a forward hook of the module. The hook runs inside the call of the module, so before a block gets the
output, and not at all if the module is skipped. So a value that replaces the output is put in the place of the recorded one, and a skipped
module records the value that it is skipped with.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree


def record_skipped(call: Any, args: tuple[Any, ...], output: Any) -> None:
    """Record ``output``, the value that a module is skipped with; ``call`` is the method of the module, and ``args`` are its arguments."""
    for hook in _hooks(call):
        hook(module_of(call), args, output)


def record_replaced(call: Any, before: Any, output: Any) -> Any:
    """Record ``output`` in place of ``before``, the output of the module with the method ``call``, and return it."""
    if not _hooks(call):
        return output
    from transformers.utils import output_capturing

    recorded = output_capturing._active_collector.get()
    if not recorded:
        return output
    if isinstance(before, torch.Tensor) and isinstance(output, torch.Tensor):
        old, new = [before], [output]
    else:
        old, new = pytree.tree_leaves(before), pytree.tree_leaves(output)
    for values in recorded.values():
        if not isinstance(values, list) or not values:
            continue
        for one, other in zip(old, new):  # noqa: B905 - dynamo traces this
            if values[-1] is one:
                values[-1] = other
                break
    return output


def module_of(call: Any) -> Any:
    """Return the object that ``call``, a method of it, perhaps with other methods around, is bound to."""
    while isinstance(call, types.MethodType):
        call = call.__self__
    return call


def _hooks(call: Any) -> list[Callable[..., Any]]:
    """Return the hooks of transformers that record the output of the module with the method ``call``."""
    module = module_of(call)
    if not isinstance(module, torch.nn.Module):
        return []
    # Dynamo traces this. It would make a variable of each module in `sys.modules`, so this does not ask whether transformers is loaded.
    return [hook for hook in module._forward_hooks.values() if getattr(hook, "__module__", "") == "transformers.utils.output_capturing"]
