"""What a recording takes from this process: the call of the model, its input, and values of the block's own tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ...modeling.generation import Generation
from ..wire.errors import NotExpressibleError
from ..wire.trees import write_tree
from .refusals import here


def called_by(tracer: Any) -> tuple[str, Any]:
    """Return how a trace calls the model, and the model.

    Raises:
        NotExpressibleError: If it calls something else.
    """
    model = tracer._call[1]
    if tracer._scan or tracer._validate:
        raise NotExpressibleError(
            "`scan=` and `validate=` are for traces that run here; a remote one is always checked."
        )
    if isinstance(model, Generation):
        call, root = "generate", model._model
    elif hasattr(model, "_module"):
        call, root = "trace", model
    else:
        raise NotExpressibleError(
            here(
                "Only `model.trace(...)` and `model.generate(...)` can be sent: a function or "
                "another method of the model is Python of yours."
            )
        )
    return call, root


def input_tree(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """Return the tree of the arguments of a run; copies of their tensors go to ``tensors``.

    Raises:
        NotExpressibleError: If there is something in them that cannot be sent.
    """

    def leaf(item: Any) -> Any:
        if not isinstance(item, torch.Tensor):
            raise NotExpressibleError(
                here(
                    f"The input of the trace has a {type(item).__name__}, which cannot be sent: "
                    "tensors, numbers, and lists and dicts of them can."
                )
            )
        name = f"i{len(tensors)}"
        with _disable_current_modes():
            tensors[name] = item.detach().clone()
        return {"tensor": name}

    return write_tree(list(value) if isinstance(value, tuple) else value, leaf)


def snapshot(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values that a tensor of the block's own has now."""
    return tensor.detach().clone()


def draw(function: Any, shape: tuple[int, ...], dtype: torch.dtype, /, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Draw random numbers for a tensor of this shape and type."""
    drawn: torch.Tensor = function(torch.empty(shape, dtype=dtype), *args, **kwargs)
    return drawn
