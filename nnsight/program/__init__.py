"""Programs: the effects of a block on a model as data, which can be printed, stored, checked and run."""

from __future__ import annotations

from ..lazy import submodules

__getattr__, __dir__ = submodules(__name__, __path__)
