"""Re-exports the tracers that run a model.

:class:`InterleavingTracer` runs it with blocks, :class:`ScanningTracer` does so on fakes. A mode of one's own is a subclass whose
``execute`` gets the block as a function and runs it, by ``super().execute(function)`` if the model is to run.
"""

from ...modeling.scanning import ScanningTracer
from ...runtime.tracer import InterleavingTracer

__all__ = ["InterleavingTracer", "ScanningTracer"]
