"""Re-exports :class:`Tracer`, the base of all tracers.

A tracer captures when it is entered, see :mod:`nnsight.tracing`: ``capture`` finds the block by the instruction that enters it and
compiles it, once for each place in the code. ``tracer.info``, a ``Tracer.Info``, then tells its file, line, lines, variables and code.
``compile`` returns the block as a function without arguments: override it to put something around the block. ``execute`` gets that
function and runs it. ``parse`` finds the lines of a block in a text; capturing does not need it.
"""

from ...tracing import Tracer, WithBlockNotFoundError

__all__ = ["Tracer", "WithBlockNotFoundError"]
