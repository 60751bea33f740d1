"""Re-exports the classes of ``.source``.

``SourceNotAvailable`` is another name of :class:`SourceError`, and ``SourceEnvoy`` is another name of :class:`OperationEnvoy`.
"""

from ..envoy.source import OperationEnvoy, Source
from ..runtime.modules.listing import SourceError

SourceEnvoy = OperationEnvoy
SourceNotAvailable = SourceError

__all__ = ["OperationEnvoy", "Source", "SourceEnvoy", "SourceError", "SourceNotAvailable"]
