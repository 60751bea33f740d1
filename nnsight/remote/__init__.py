"""Remote execution: blocks as data.

A block is recorded on the client against fake tensors, shipped as one safetensors file, validated, and run where the
model is. Nobody's Python and nobody's pickle is executed, on either side.

For servers: ``execute_payload(model, payload, limits) -> bytes``, or in steps ``decode``, ``validate``. For clients: a subclass of
:class:`ProgramBackend` that sends bytes and returns bytes. Imported on first use only.
"""

from __future__ import annotations

from .backend import LocalBackend, ProgramBackend
from .errors import ExecutionFailedError, InvalidProgramError, NotExpressibleError
from .execution import execute_payload
from .limits import Limits
from .operators import OPERATORS_HASH
from .payload import VERSION, Job, decode, encode
from .program import Program
from .recorder import Recorded, record
from .results import decode_results, encode_results
from .validation import Checked, validate

__all__ = [
    "OPERATORS_HASH",
    "VERSION",
    "Checked",
    "ExecutionFailedError",
    "InvalidProgramError",
    "Job",
    "Limits",
    "LocalBackend",
    "NotExpressibleError",
    "Program",
    "ProgramBackend",
    "Recorded",
    "decode",
    "decode_results",
    "encode",
    "encode_results",
    "execute_payload",
    "record",
    "validate",
]
