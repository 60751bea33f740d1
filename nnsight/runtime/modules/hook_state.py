"""Detection of changed hooks and ``forward`` methods.

``torch.compile`` captures the hooks of modules and the ``forward`` of their classes, and has no guards for them. Changes are detected here,
so that the model is captured again.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.nn.modules import module as for_all_modules
from torch.utils.hooks import RemovableHandle

_KINDS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_KINDS_FOR_ALL = tuple(f"_global{kind}" for kind in _KINDS)


class HookState:
    """The hooks of ``modules``, torch's global module hooks, and the ``forward`` of the modules' classes, as of the latest check."""

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        modules = list(modules)
        self._owners = [*map(vars, modules), vars(for_all_modules)]
        self._classes = [vars(base) for base in {base for module in modules for base in type(module).__mro__}]
        self._look()

    def changed(self) -> bool:
        """Return whether a hook or a ``forward`` has changed since the last call."""
        before = self._forwards, self._hooks
        is_known = (
            self._handles == RemovableHandle.next_id  # no hook was registered, though some may have been removed
            and all(members.get("forward") is known for members, known in zip(self._classes, self._forwards, strict=True))
            and all(list(self._owners[number].get(kind) or ()) == known for number, kind, known in self._hooks)
        )
        if not is_known:
            self._look()
        return before != (self._forwards, self._hooks)

    def _look(self) -> None:
        self._handles = RemovableHandle.next_id
        self._forwards = [members.get("forward") for members in self._classes]
        #: For each owner with hooks: its index, the kind of hook, and the ids of the hooks' handles, which torch never reuses.
        self._hooks = [
            (number, kind, list(hooks))
            for number, owner in enumerate(self._owners)
            for kind in (_KINDS_FOR_ALL if owner is vars(for_all_modules) else _KINDS)
            if (hooks := owner.get(kind))
        ]
