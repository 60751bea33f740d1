"""Remote execution: blocks as data.

The client records a block against fake tensors and sends it as one safetensors file. The server validates it and runs it on its model.
Neither side executes Python or pickles of the other.

For servers: ``execute_payload(model, payload, limits) -> bytes``, or in steps ``decode``, ``validate``. For clients: a subclass of
:class:`ProgramBackend` that sends bytes and returns bytes. Imported on first use only.
"""

from __future__ import annotations

from .client.backend import LocalBackend, ProgramBackend
from .client.program_files import Program
from .protocol import ModelKey
from .record.binding import Recorded
from .record.recorder import record
from .run.execution import execute_payload
from .run.validation import Checked, validate
from .wire.errors import ExecutionFailedError, InvalidProgramError, NotExpressibleError
from .wire.limits import Limits
from .wire.operators import OPERATORS_HASH
from .wire.payload import VERSION, Job, decode, encode
from .wire.results import decode_results, encode_results

__all__ = [
    "OPERATORS_HASH",
    "VERSION",
    "Checked",
    "ExecutionFailedError",
    "InvalidProgramError",
    "Job",
    "Limits",
    "LocalBackend",
    "ModelKey",
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
