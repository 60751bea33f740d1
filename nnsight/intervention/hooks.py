"""Decorators for the stubs of eproperties, re-exported."""

from ..eproperty import requires_input, requires_output

__all__ = ["requires_input", "requires_output"]
