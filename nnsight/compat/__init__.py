"""The documented names of earlier interleavers, as one adapter over :mod:`nnsight.runtime`.

Earlier versions ran each block in a thread that sent events through queues. Here a request is a method call, and model and block
take turns between greenlets. :mod:`.mediator` adds the older names to a block, :mod:`.interleaver` to a run and its rows;
:mod:`.events` has events and queues. Programs import them from :mod:`nnsight.intervention`. Importing this package makes traces use these
classes; the runtime does not import it.
"""

from ..runtime.tracer import InterleavingTracer
from .interleaver import Interleaver
from .mediator import Mediator

InterleavingTracer.make_interleaver = Interleaver
InterleavingTracer.make_mediator = Mediator

__all__ = ["Interleaver", "Mediator"]
