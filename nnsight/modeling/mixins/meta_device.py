"""A context that makes modules without memory for their tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

#: Methods that move a tensor.
_MOVES = {torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.cuda, torch.Tensor.xpu}


class MetaDevice(TorchFunctionMode):
    """Makes every new tensor on the meta device, whatever device is requested, and keeps tensors on that device.

    Example:
        >>> with MetaDevice():
        ...     module = torch.nn.Linear(2, 2, device="cpu").to("cuda")
        >>> module.weight.device.type
        'meta'
    """

    def __torch_function__(
        self, function: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, (torch.Tensor, torch.dtype))]
        if function in _MOVES and args[0].is_meta:  # the target is a device, a dtype, both, or another tensor
            last = given[-1]
            return args[0].to(last if isinstance(last, torch.dtype) else last.dtype)
        made = function(*args, **kwargs)
        is_new = isinstance(made, torch.Tensor) and not any(isinstance(value, torch.Tensor) for value in given)
        return made.to("meta") if is_new else made
