"""Names for a base class of models that run remotely, which every model that is loaded by name can."""

from .meta import MetaMixin

Remotable = RemoteableMixin = MetaMixin

__all__ = ["Remotable", "RemoteableMixin"]
