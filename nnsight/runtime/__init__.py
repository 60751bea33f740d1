"""One run of a model, in which the model and the blocks written against it take turns.

* :mod:`~nnsight.runtime.interleaver` is one run; its one primitive is ``handle(location, value) -> value``;
* :mod:`~nnsight.runtime.mediator` runs one block as a greenlet that waits at locations;
* :mod:`~nnsight.runtime.modules.interception` intercepts module calls while a run is active;
* :mod:`~nnsight.runtime.eager` is the eager driver: it calls the model, whose intercepted calls offer values;
* :mod:`~nnsight.runtime.tracer` connects captured blocks, their mediators and a driver.
"""

from .eager import EagerDriver
from .errors import MissedProviderError, OutOfOrderError
from .interleaver import Interleaver, active_interleaver
from .mediator import Mediator
from .modules.interception import Instrumentation
from .report import Report

__all__ = [
    "EagerDriver",
    "Instrumentation",
    "Interleaver",
    "Mediator",
    "MissedProviderError",
    "OutOfOrderError",
    "Report",
    "active_interleaver",
]
