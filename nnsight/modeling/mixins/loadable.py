"""Root envoys that load their own model from a name or a path."""

from __future__ import annotations

from typing import Any

import torch

from ..base import NNsight


class LoadableMixin(NNsight):
    """A root class that takes a module, or the arguments from which its :meth:`_load` makes one.

    Args:
        *args: A module, or the arguments of :meth:`_load`, such as a name.
        **kwargs: ``compile``, ``rename`` and ``envoys`` of :class:`~nnsight.modeling.base.NNsight`; all others are those of :meth:`_load`.

    Raises:
        TypeError: If a module is given together with arguments for loading one.

    Example:
        >>> class Net(LoadableMixin):
        ...     def _load(self, width):
        ...         return torch.nn.Linear(width, 2)
        >>> model = Net(3)
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        options = {name: kwargs.pop(name) for name in ("compile", "rename", "envoys") if name in kwargs}
        if args and isinstance(args[0], torch.nn.Module):
            module, surplus = args[0], [*map(repr, args[1:]), *sorted(kwargs)]
            if surplus:
                raise TypeError(
                    f"{', '.join(surplus)}: options for loading a model, but this {type(module).__name__} is loaded "
                    "already. Pass them to the function that loads it."
                )
        else:
            module = self._first_module(*args, **kwargs)
        super().__init__(module, **options)

    def _first_module(self, *args: Any, **kwargs: Any) -> torch.nn.Module:
        """Return the module to wrap; a lazy class returns one without weights."""
        return self._load(*args, **kwargs)

    def _load(self, *args: Any, **kwargs: Any) -> torch.nn.Module:
        """Return the model that the arguments of the constructor describe, with its weights; subclasses define this method."""
        raise NotImplementedError(
            f"{type(self).__name__} does not know how to load a model. Define `_load(self, *args, **kwargs)` in it, which "
            "returns the module, or pass a torch.nn.Module."
        )


Loadable = LoadableMixin
