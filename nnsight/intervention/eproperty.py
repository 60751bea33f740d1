"""Re-exports :class:`eproperty`."""

from ..runtime.modules.eproperty import IEnvoy, eproperty

__all__ = ["IEnvoy", "eproperty"]
