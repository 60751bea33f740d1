"""Lets a recording see that a block seeds, reads or restores the generator of random numbers, which is no torch call.

A graph draws its numbers when it runs, after the block has continued. So if numbers are to be drawn before such a call, the graph is cut.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ...shared_changes import SharedChange
from .execution import PieceRunner

_random: Any = torch.random

#: Methods of a generator that read or change its state.
_METHODS = frozenset("manual_seed seed initial_seed get_state set_state".split())


class _Watched:
    """Takes the place of the generator in ``torch.random``, for the functions there: ``manual_seed``, ``fork_rng`` and so on."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._generator, name)
        return functools.partial(_after_draws, name, found) if name in _METHODS else found


def _after_draws(name: str, method: Any, *args: Any) -> Any:
    """Call a method of the generator after the graph has drawn its numbers up to the current location of the running block."""
    if torch._C._len_torch_function_stack():
        for mode in torch.overrides._get_current_function_mode_stack():
            if isinstance(mode, PieceRunner) and mode.random and mode.run.current is not None:
                instead = "a seed before the trace, or a `torch.Generator`"
                mode.cut(f"`{name}` of the generator follows random numbers of the graph", instead)
    return method(*args)


def _replace() -> Any:
    generator = _random.default_generator
    _random.default_generator = _Watched(generator)
    return generator


def _put_back(generator: Any) -> None:
    _random.default_generator = generator


#: The change that makes these calls visible; each recording enters it while it is active.
watched_generator = SharedChange(_replace, _put_back)
