"""Re-exports :class:`eproperty`, and :class:`IEnvoy`, the protocol of the classes that have such properties."""

from ..runtime.modules.eproperty import IEnvoy, eproperty

__all__ = ["IEnvoy", "eproperty"]
