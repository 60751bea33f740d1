"""What is attached to modules and changes what a call of them does: hooks, and the ``forward`` of their classes.

Code that was compiled of a model has hooks in it as they were then, and ``torch.compile`` does not look at them again (nor at the
methods of a class). A model that is traced eagerly and compiled has to do the same in both, so they are looked at here.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.nn.modules import module as for_all_modules
from torch.utils.hooks import RemovableHandle

_KINDS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_KINDS_FOR_ALL = tuple(f"_global{kind}" for kind in _KINDS)


class Attached:
    """The hooks of ``modules`` and those for all modules, and the ``forward`` of the classes, as they are when this is made."""

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        modules = list(modules)
        self._owners = [*map(vars, modules), vars(for_all_modules)]
        self._classes = [vars(base) for base in {base for module in modules for base in type(module).__mro__}]
        self._look()

    def changed(self) -> bool:
        """Whether something is different now; what is there now is what the next call compares with."""
        registered = self._handles != RemovableHandle.next_id  # somewhere, or nothing was; it may have been removed
        if not registered and self._forwards_are_known() and self._hooks_are_known():
            return False
        before = self._forwards, self._hooks
        self._look()
        return before != (self._forwards, self._hooks)

    def _forwards_are_known(self) -> bool:
        return all(members.get("forward") is known for members, known in zip(self._classes, self._forwards, strict=True))

    def _hooks_are_known(self) -> bool:
        return all(list(self._owners[number].get(kind) or ()) == known for number, kind, known in self._hooks)

    def _look(self) -> None:
        self._handles = RemovableHandle.next_id
        self._forwards = [members.get("forward") for members in self._classes]
        #: Number of the owner, kind, and the numbers of the handles, which are those of no other hook.
        self._hooks = [
            (number, kind, list(hooks))
            for number, owner in enumerate(self._owners)
            for kind in (_KINDS_FOR_ALL if owner is vars(for_all_modules) else _KINDS)
            if (hooks := owner.get(kind))
        ]
