"""Adapter for the documented names of earlier interleavers over :mod:`nnsight.runtime`.

In earlier versions, each block ran in a thread and sent events through queues. Now a request is a method call, and model and block are
greenlets that take turns. :mod:`.mediator` adds the older names to a mediator, :mod:`.interleaver` to a run and its rows;
:mod:`.events` has events and queues. User code imports them from :mod:`nnsight.intervention`. The import of this package makes traces use
these classes; the runtime does not import it.
"""

from ..runtime.tracer import InterleavingTracer
from .interleaver import Interleaver
from .mediator import Mediator

InterleavingTracer.make_interleaver = Interleaver
InterleavingTracer.make_mediator = Mediator

__all__ = ["Interleaver", "Mediator"]
