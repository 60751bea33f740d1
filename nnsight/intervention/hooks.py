"""Re-exports the decorators for the stubs of :class:`eproperty`."""

from ..runtime.modules.eproperty import (
    requires_input,
    requires_operation_input,
    requires_operation_output,
    requires_output,
)

__all__ = ["requires_input", "requires_operation_input", "requires_operation_output", "requires_output"]
