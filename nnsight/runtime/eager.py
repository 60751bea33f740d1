"""The eager driver: it calls the model as plain PyTorch would, and the intercepted module calls offer values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .interleaver import Interleaver
from .modules.interception import Instrumentation
from .report import Report


class EagerDriver:
    """Runs a model with its blocks, module by module.

    Args:
        function: The call to make, usually the root module's.
        instrumentation: Interception of the modules whose locations can be waited for.
    """

    def __init__(self, function: Callable[..., Any], instrumentation: Instrumentation) -> None:
        self.function = function
        self.instrumentation = instrumentation

    def __call__(self, interleaver: Interleaver, args: tuple[Any, ...], kwargs: dict[str, Any], report: Report) -> Any:
        """Call the model once within ``interleaver`` and return its output."""
        report.mode = "eager"
        with self.instrumentation:
            return self.function(*args, **kwargs)
