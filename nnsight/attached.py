"""What is attached to modules and changes what a call of them does: hooks, and the ``forward`` of their classes.

Code that was compiled of a model has hooks in it as they were then, and ``torch.compile`` does not look at them again (nor at the
methods of a class). A model that is traced eagerly and compiled has to do the same in both, so they are looked at here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.nn.modules import module as for_all_modules
from torch.utils.hooks import RemovableHandle

_KINDS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_KINDS_FOR_ALL = tuple(f"_global{kind}" for kind in _KINDS)


class Attached:
    """The hooks of ``modules`` and those for all modules, and the ``forward`` of the classes, as they are when this is made."""

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        modules = list(modules)
        self._owners = [vars(module) for module in modules]
        self._classes = [vars(base) for base in {base for module in modules for base in type(module).__mro__}]
        self._look()

    def changed(self) -> bool:
        """Whether something is different now; what is there now is what the next call compares with."""
        same = True
        for members, forward in self._forwards:
            if members.get("forward") is not forward:
                same = False
        if (
            same and self._handles == RemovableHandle.next_id
        ):  # nothing was registered anywhere, but may have been removed
            for owner, kind, known in self._hooked:
                if list(owner.get(kind) or ()) != known:
                    same = False
            if same:
                return False
        before = self._signature()
        self._look()
        return not same or self._signature() != before

    def _signature(self) -> list[Any]:
        return [(id(owner), kind, known) for owner, kind, known in self._hooked]

    def _look(self) -> None:
        self._handles = RemovableHandle.next_id
        self._forwards = [(members, members.get("forward")) for members in self._classes]
        self._hooked = [
            (owner, kind, list(hooks)) for owner in self._owners for kind in _KINDS if (hooks := owner.get(kind))
        ]
        everywhere = vars(for_all_modules)
        self._hooked += [(everywhere, kind, list(hooks)) for kind in _KINDS_FOR_ALL if (hooks := everywhere[kind])]
