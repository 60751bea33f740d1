"""Copies of what a block works on, for a run of the block that must leave no trace."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

_CONTAINERS = {list, dict, set, bytearray, deque, defaultdict, OrderedDict, Counter}


def container_copy(value: Any, copies: dict[int, Any]) -> Any:
    """Return ``value`` with built-in containers copied, at every depth and each once; other objects are shared."""
    if id(value) in copies:
        return copies[id(value)]
    if type(value) is tuple:
        return tuple(container_copy(item, copies) for item in value)
    if type(value) not in _CONTAINERS:
        return value
    made = copies[id(value)] = copy.copy(value)
    if isinstance(made, dict):
        made.update({key: container_copy(item, copies) for key, item in made.items()})
    elif not isinstance(made, (set, bytearray)):
        for index, item in enumerate(made):
            made[index] = container_copy(item, copies)
    return made
