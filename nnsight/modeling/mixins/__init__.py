"""Base classes of root envoys that load a model by its name, and load its weights only when they are needed.

A lazy model family is a ``class MyModel(MetaMixin)`` that defines ``_load`` and ``_load_meta``; see
:class:`~nnsight.modeling.language.LanguageModel` for one.
"""

from .loadable import LoadableMixin
from .meta import LoadingError, MetaMixin, naming
from .remotable import RemoteableMixin

__all__ = ["LoadableMixin", "LoadingError", "MetaMixin", "RemoteableMixin", "naming"]
