"""Re-exports :class:`Envoy` and :class:`eproperty`."""

from ..envoy import Envoy
from ..eproperty import IEnvoy, eproperty

__all__ = ["Envoy", "IEnvoy", "eproperty"]
