"""The run of a model with its blocks, for those who write tracers, backends and properties of their own.

The docstrings of :mod:`nnsight.compat` say what the documented members mean in a run whose model and blocks take turns.
"""

from typing import TypeVar

from greenlet import GreenletExit as Cancelation

from ..compat.events import Events, Value
from ..compat.interleaver import Interleaver
from ..compat.mediator import Mediator
from ..runtime.errors import EarlyStopException, MissedProviderError, OutOfOrderError, SkipException
from ..runtime.modules.eproperty import IEnvoy, eproperty

T = TypeVar("T")

#: Begins the names that this package puts into the code of a block, such as ``__nnsight_block__``.
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
