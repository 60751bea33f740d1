"""Re-exports :class:`Envoy`, :func:`traceable`, which decorates methods that can be traced, and :class:`eproperty`."""

from ..envoy.envoy import Envoy
from ..envoy.methods import traceable
from ..runtime.modules.eproperty import IEnvoy, eproperty

__all__ = ["Envoy", "IEnvoy", "eproperty", "traceable"]
