"""Models that a key names on a server."""

from __future__ import annotations

from typing import Any, Self

from ...late_binding import late
from .meta import MetaMixin


class RemoteableMixin(MetaMixin):
    """A root class whose models have a key, ``import.path.Class:{JSON}``, from which the same model can be made."""

    @classmethod
    def from_model_key(cls, key: str, **options: Any) -> Self:
        """Return the model that a key of :meth:`to_model_key` names; ``options`` of the class take precedence over those of the key.

        Raises:
            ValueError: If ``key`` is not such a key.

        Example:
            >>> LanguageModel.from_model_key(LanguageModel("nnsight/demo").to_model_key()).repo_id
            'nnsight/demo'
        """
        named = late("ModelKey").parse(key)
        return cls(named.repo_id, **{**cls._options_of_key(named), **options})

    @classmethod
    def _options_of_key(cls, key: Any) -> dict[str, Any]:
        """Return the options that a key contains; the default revision ``main`` is left out."""
        return {} if key.revision == "main" else {"revision": key.revision}


Remotable = RemoteableMixin
