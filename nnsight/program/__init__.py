"""Programs: what a block does to a model, as data that can be printed, stored, checked and run."""

from __future__ import annotations

from ..lazy import submodules

__getattr__, __dir__ = submodules(__name__, __path__)
