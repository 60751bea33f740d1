"""Re-exports :class:`RemoteBackend`."""

from ...remote.remote_backend import RemoteBackend

__all__ = ["RemoteBackend"]
