"""Decorators for the stubs of eproperties, re-exported."""

from ..runtime.modules.eproperty import (
    requires_input,
    requires_operation_input,
    requires_operation_output,
    requires_output,
)

__all__ = ["requires_input", "requires_operation_input", "requires_operation_output", "requires_output"]
