"""Capture of a ``with`` block: from the user's frame to a function that can be called later.

Four steps, one module each:

* :mod:`~nnsight.tracing.source` finds the source text behind a frame and the ``with`` statement in it, also where the text
  is in no file (:mod:`~nnsight.tracing.unfiled`), and checks that it is the right one (:mod:`~nnsight.tracing.fitting`);
* :mod:`~nnsight.tracing.block` compiles the body of that statement to a function over a shared scope;
* :mod:`~nnsight.tracing.tracer` is the context manager: it skips the body, runs the function, and
  pushes saved values back into the user's frame;
* :mod:`~nnsight.tracing.saving` and :mod:`~nnsight.tracing.errors` hold what ``.save()`` marks and how
  tracebacks are shown.

Nothing in this layer imports torch: it knows Python frames, code objects and names, and nothing of models.
"""

from .block import Block, Scope
from .errors import WithBlockNotFoundError, wrap_exception
from .saving import save
from .tracer import Backend, ExecutionBackend, Tracer
from .unfiled import watch_prompts

__all__ = [
    "Backend",
    "Block",
    "ExecutionBackend",
    "Scope",
    "Tracer",
    "WithBlockNotFoundError",
    "save",
    "wrap_exception",
]

watch_prompts()
