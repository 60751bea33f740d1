"""Models of the tests of programs."""

from __future__ import annotations

from ..remote.conftest import demo, model

__all__ = ["demo", "model"]
