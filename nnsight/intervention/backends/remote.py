"""Re-exports :class:`RemoteBackend`."""

from ...remote.client.remote_backend import RemoteBackend

__all__ = ["RemoteBackend"]
