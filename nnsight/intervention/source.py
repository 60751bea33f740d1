"""Re-exports what is behind ``.source``; ``SourceNotAvailable`` is another name of :class:`SourceError`."""

from ..envoy.source import OperationEnvoy, Source
from ..runtime.modules.listing import SourceError

SourceNotAvailable = SourceError

__all__ = ["OperationEnvoy", "Source", "SourceError", "SourceNotAvailable"]
