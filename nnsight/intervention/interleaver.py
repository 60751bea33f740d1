"""Re-exports the interleaver, the mediator and their errors."""

from ..eproperty import IEnvoy, eproperty
from ..runtime.errors import MissedProviderError, OutOfOrderError
from ..runtime.interleaver import Interleaver
from ..runtime.mediator import EarlyStopException, Mediator

__all__ = [
    "EarlyStopException",
    "IEnvoy",
    "Interleaver",
    "Mediator",
    "MissedProviderError",
    "OutOfOrderError",
    "eproperty",
]
