"""The scanning driver: a run on fake tensors, which have sizes and types and no values.

A scan needs no weights and computes nothing. It answers what shape a value has, and shows mistakes in indices and shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from .eager import EagerDriver
from .instrumentation import Instrumentation
from .interleaver import Interleaver
from .report import Report


class ScanningDriver:
    """Runs a model on fakes of its inputs.

    Args:
        function: The call to make.
        instrumentation: Interception of the modules whose locations can be waited for.
    """

    def __init__(self, function: Callable[..., Any], instrumentation: Instrumentation) -> None:
        self._eager = EagerDriver(function, instrumentation)

    def __call__(self, interleaver: Interleaver, args: tuple[Any, ...], kwargs: dict[str, Any], report: Report) -> Any:
        """Call the model once within ``interleaver`` and return its fake output."""
        mode = FakeTensorMode(allow_non_fake_inputs=True)

        def fake(leaf: Any) -> Any:
            return mode.from_tensor(leaf) if isinstance(leaf, torch.Tensor) else leaf

        args, kwargs = pytree.tree_map(fake, (args, kwargs))
        with mode:
            output = self._eager(interleaver, args, kwargs, report)
            interleaver.handle("result", output)
            interleaver.finish()
        report.mode = "scan"
        return output
