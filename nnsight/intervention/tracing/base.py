"""Re-exports :class:`Tracer`, the base of all tracers.

A tracer captures when it is entered, see :mod:`nnsight.tracing`; there is no text to extract and nothing to parse, so ``capture`` and
``parse`` have no counterpart. Afterwards ``tracer.info`` tells file, line, variables and code of the block. ``compile`` returns the block
as a function without arguments: override it to put something around the block. ``execute`` gets that function and runs it.
"""

from ...tracing import Tracer, WithBlockNotFoundError

__all__ = ["Tracer", "WithBlockNotFoundError"]
