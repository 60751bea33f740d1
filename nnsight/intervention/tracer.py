"""Re-exports the tracers that run a model, and the tracer of a single invoke."""

from ..modeling.scanning import ScanningTracer
from ..runtime.invoker import Invoker
from ..runtime.tracer import InterleavingTracer

__all__ = ["InterleavingTracer", "Invoker", "ScanningTracer"]
