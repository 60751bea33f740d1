"""What a root class can be made of: loading a model by name, and loading its weights late.

``class MyModel(MetaMixin)`` with ``_load`` and ``_load_meta`` is all a model family needs to be lazy; see
:class:`~nnsight.modeling.language.LanguageModel`, which is made this way.
"""

from .loadable import LoadableMixin
from .meta import LoadingError, MetaMixin, naming
from .remotable import RemoteableMixin

__all__ = ["LoadableMixin", "LoadingError", "MetaMixin", "RemoteableMixin", "naming"]
