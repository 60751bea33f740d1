"""What a user can put around torch functions and a compiled graph would lose: function modes, tensor subclasses and tangents.

Dynamo traces function modes and subclasses with ``__torch_function__`` into the graph of the model. But they would not see the calls of a
block: these are recorded on lazy tensors, and run as part of a graph. Compiled code has no tangents of forward-mode AD. So the model runs
uncompiled then.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._C import _get_function_stack_at, _len_torch_function_stack
from torch.autograd import forward_ad
from torch.overrides import BaseTorchFunctionMode
from torch.utils._device import DeviceContext

from ...runtime.interleaver import Interleaver, active_interleaver
from .execution import GraphBreakError

#: Function modes that a recording allows for, and torch's mode that does nothing.
_NEUTRAL = (DeviceContext, BaseTorchFunctionMode)


def why_overridden(args: tuple[Any, ...], kwargs: dict[str, Any], fullgraph: bool) -> str:
    """Return the reason why a call of the model with these arguments must run uncompiled, or an empty string.

    Raises:
        GraphBreakError: There is a reason, and the model is compiled with ``fullgraph=True``.
    """
    why = _why_overridden((*args, *kwargs.values()))
    if why and fullgraph:
        raise GraphBreakError(
            f"The model was compiled with fullgraph=True, and this call must run uncompiled: {why}. Use `trace(..., compile=False)`, "
            "or compile the model without fullgraph=True."
        )
    return why


def _why_overridden(values: tuple[Any, ...]) -> str:
    if forward_ad._current_level >= 0:
        return "compiled code has no tangents of forward-mode AD, whose `dual_level` is entered"
    run = active_interleaver()
    if not isinstance(run, Interleaver) or not run.mediators:
        return ""
    for index in range(_len_torch_function_stack()):
        kind = type(_get_function_stack_at(index))
        if kind not in _NEUTRAL and not kind.__module__.startswith("nnsight."):
            return f"the function mode `{kind.__name__}` would not see the calls of the block"
    for value in values:
        kind = type(value)
        if isinstance(value, torch.Tensor) and kind not in (torch.Tensor, torch.nn.Parameter):
            override = kind.__torch_function__
            if getattr(override, "__func__", None) not in (None, torch.Tensor.__torch_function__.__func__):  # type: ignore[attr-defined]
                return f"the tensor subclass `{kind.__name__}` would not see the calls of the block"
    return ""
