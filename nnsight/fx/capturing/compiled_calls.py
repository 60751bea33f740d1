"""Calls of a compiled function, with compiled code or not at all.

What ``torch.compile`` returns is a wrapper around the function. Half of what it does is there for compiling, and it compiles where nothing
that is compiled fits the arguments. :func:`caller_of_compiled` calls the function past its wrapper: if dynamo would have to compile, or
would run the function as Python, :class:`NotCompiled` is raised and nothing has run.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch

from ..torch_compat import ConvertFrameReturn, eval_frame, frame_evaluation, variables_of_wrapper


class NotCompiled(Exception):
    """There is no compiled code for these arguments; nothing has run."""


def caller_of_compiled(function: Callable[..., Any], code: types.CodeType) -> Callable[..., Any] | None:
    """Return what calls a function with what dynamo has compiled for the arguments, or raises :class:`NotCompiled`.

    It is to be called where :func:`~nnsight.fx.torch_compat.is_outermost` holds.

    Args:
        function: What ``torch.compile`` returned.
        code: Of the function that it was given.

    Returns:
        ``None`` if the wrapper of the function is not of the known kind, as with some settings of torch.
    """
    variables = variables_of_wrapper(function)
    if not {"self", "callback", "fn"} <= variables.keys():
        return None
    context, callback, plain = (variables[name].cell_contents for name in ("self", "callback", "fn"))
    if not isinstance(context, eval_frame.OptimizeContext) or getattr(plain, "__code__", None) is not code:
        return None

    def refuse(frame: Any, *_: Any, **__: Any) -> Any:
        """Compile nothing, least of all the function; other functions run as Python."""
        if frame.f_code is code:
            raise NotCompiled
        return ConvertFrameReturn()

    refuse._torchdynamo_orig_backend = eval_frame.innermost_backend(callback)  # type: ignore[attr-defined] # its code may run
    enter_all, layers, set_callback = tuple(context.enter_exit_hooks), torch._C._functorch, frame_evaluation.set_eval_frame
    included, excluded = torch._C._dispatch_tls_local_include_set, torch._C._dispatch_tls_local_exclude_set

    def call(*args: Any) -> Any:
        leave_all = [enter() for enter in enter_all]
        depth = layers.get_dynamic_layer_stack_depth()
        set_callback(refuse)
        try:
            with torch._C._ForceDispatchKeyGuard(included(), excluded()):  # compiled code may fail between two nodes that change them
                return plain(*args)
        finally:
            set_callback(None)
            layers.pop_dynamic_layer_stack_and_undo_to_depth(depth)
            for leave in leave_all:
                leave()

    return call
