"""Re-exports the tracers that run a model, and the objects that their methods make.

:class:`InterleavingTracer` runs the model with blocks; :class:`ScanningTracer` runs both on fake tensors. To define another kind of trace,
make a subclass. Its ``execute`` gets the block as a function, and ``super().execute(function)`` runs the model with it.
"""

from ...modeling.scanning import ScanningTracer
from ...runtime.cache import Cache
from ...runtime.invoker import Barrier, Invoker
from ...runtime.tracer import InterleavingTracer

__all__ = ["Barrier", "Cache", "InterleavingTracer", "Invoker", "ScanningTracer"]
