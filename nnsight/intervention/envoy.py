"""Re-exports :class:`Envoy` and :class:`eproperty`."""

from ..envoy.envoy import Envoy
from ..runtime.modules.eproperty import IEnvoy, eproperty

__all__ = ["Envoy", "IEnvoy", "eproperty"]
