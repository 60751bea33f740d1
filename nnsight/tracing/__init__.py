"""Capture of a ``with`` block: from the user's frame to a function that can be called later.

* :mod:`~nnsight.tracing.source` finds the ``with`` statement that a frame is entering. The text may be in no file
  (:mod:`~nnsight.tracing.unfiled`), and it must match the compiled code (:mod:`~nnsight.tracing.fitting`).
* :mod:`~nnsight.tracing.block` compiles the body of that statement to a function over a shared scope.
* :mod:`~nnsight.tracing.tracer` is the context manager: it skips the body, runs the function, and binds saved names in the user's frame.
* :mod:`~nnsight.tracing.saving` marks the objects that ``.save()`` keeps, and :mod:`~nnsight.tracing.errors` shortens tracebacks.

Nothing in this layer imports torch.
"""

from .backend import Backend, ExecutionBackend
from .block import Block, Scope
from .errors import WithBlockNotFoundError, wrap_exception
from .saving import save
from .tracer import Tracer
from .unfiled import watch_prompts

__all__ = ["Backend", "Block", "ExecutionBackend", "Scope", "Tracer", "WithBlockNotFoundError", "save", "wrap_exception"]

watch_prompts()
