"""The decorator ``traceable``, for methods of user-defined envoys that can be traced."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..runtime.interleaver import active_interleaver
from ..runtime.modules.interception import is_compiling
from ..tracing.source import calls_for_with

if TYPE_CHECKING:
    from .envoy import Envoy


def traceable(method: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a method of a class of envoys, so that its call in the header of a ``with`` statement is traced.

    The method runs together with the block, and ``tracer.result`` is its return value. Other calls run the method alone. In both cases, the
    root prepares the input as for its ``trace``, and its edits apply. Inside a block or a run, the undecorated method is called.

    Example:
        >>> class Encoder(NNsight):
        ...     @traceable
        ...     def encode(self, x):
        ...         return self.trunk(x).relu()
        >>> with Encoder(module).encode(x) as tracer:
        ...     hidden = tracer.result.save()
    """

    @functools.wraps(method)
    def call(self: Envoy, *args: Any, **kwargs: Any) -> Any:
        if is_compiling() or active_interleaver() is not None:
            return method(self, *args, **kwargs)
        function = functools.partial(method, self)
        roots: Any = self._tree.roots
        root = self if self in roots else min(roots, key=lambda root: len(root._edits))  # a copy with edits comes last
        run = root._trace_method if calls_for_with(sys._getframe(1)) else root._run_method
        return run(self, function, args, kwargs)

    return call
