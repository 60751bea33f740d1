"""Re-exports the run of a model with its blocks, for authors of tracers, backends and properties.

The docstrings of :mod:`nnsight.compat` define the documented members for a run in which model and blocks take turns.
"""

from typing import TypeVar

from greenlet import GreenletExit as Cancelation

from ..compat.events import Events, Value
from ..compat.interleaver import Interleaver
from ..compat.mediator import Mediator
from ..runtime.errors import EarlyStopException, MissedProviderError, OutOfOrderError, SkipException
from ..runtime.modules.eproperty import IEnvoy, eproperty

T = TypeVar("T")

#: Prefix of the names that this package puts into the code of a block, such as ``__nnsight_block__``.
NNSIGHT_PREFIX = "__nnsight"

__all__ = [
    "NNSIGHT_PREFIX",
    "Cancelation",
    "EarlyStopException",
    "Events",
    "IEnvoy",
    "Interleaver",
    "Mediator",
    "MissedProviderError",
    "OutOfOrderError",
    "SkipException",
    "T",
    "Value",
    "eproperty",
]
