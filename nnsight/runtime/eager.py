"""The eager driver: it calls the model like plain PyTorch, and the intercepted module calls offer their values to the blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .interleaver import Interleaver
from .modules.interception import Instrumentation
from .report import Report


class EagerDriver:
    """Calls ``function``, usually the root module, while ``instrumentation`` intercepts the calls of its modules."""

    def __init__(self, function: Callable[..., Any], instrumentation: Instrumentation) -> None:
        self.function = function
        self.instrumentation = instrumentation

    def __call__(self, interleaver: Interleaver, args: tuple[Any, ...], kwargs: dict[str, Any], report: Report) -> Any:
        """Call the model once in the run ``interleaver`` and return its output."""
        report.mode = "eager"
        with self.instrumentation:
            return self.function(*args, **kwargs)
