"""Re-exports :class:`Tracer`, the base class of all tracers.

When a tracer is entered, it captures the block (:mod:`nnsight.tracing`): ``capture`` finds the block by the instruction that enters it, and
compiles it once for each place in the code. ``tracer.info``, a ``Tracer.Info``, then has its file, line, source lines, variables and code.
``compile`` returns the block as a function without arguments; override it to wrap the block. ``execute`` gets this function and runs it.
``parse`` finds the lines of a block in a text; the capture does not need it.
"""

from ...tracing import Tracer, WithBlockNotFoundError

__all__ = ["Tracer", "WithBlockNotFoundError"]
