"""The eager driver: it calls the model as plain PyTorch would, and the intercepted module calls offer values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .interleaver import Interleaver
from .modules.interception import Instrumentation
from .report import Report


class EagerDriver:
    """Calls ``function``, usually the root module, with its modules intercepted by ``instrumentation``."""

    def __init__(self, function: Callable[..., Any], instrumentation: Instrumentation) -> None:
        self.function = function
        self.instrumentation = instrumentation

    def __call__(self, interleaver: Interleaver, args: tuple[Any, ...], kwargs: dict[str, Any], report: Report) -> Any:
        """Call the model once within ``interleaver`` and return its output."""
        report.mode = "eager"
        with self.instrumentation:
            return self.function(*args, **kwargs)
