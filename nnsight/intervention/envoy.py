"""Re-exports :class:`Envoy`, the decorator of its methods that are traces, and :class:`eproperty`."""

from ..envoy.envoy import Envoy
from ..envoy.methods import traceable
from ..runtime.modules.eproperty import IEnvoy, eproperty

__all__ = ["Envoy", "IEnvoy", "eproperty", "traceable"]
