"""Where the tensors of a recording lie in memory."""

from __future__ import annotations

from typing import Any

import torch


def share_memory(tensor: torch.Tensor, result: Any) -> bool:
    """Whether the result of an operator that gives views of ``tensor``, or copies, is a view."""
    first = result if isinstance(result, torch.Tensor) else next(iter(result), tensor)
    return first.untyped_storage()._cdata == tensor.untyped_storage()._cdata


def stretch(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first byte of the memory of a tensor, and the byte after the last."""
    with torch._C.DisableTorchFunction():
        start = int(tensor.storage_offset())
        length = int(sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))) + 1
        return start * tensor.element_size(), (start + max(length, 0)) * tensor.element_size()
