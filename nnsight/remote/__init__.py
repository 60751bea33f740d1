"""Remote execution: blocks as data.

The client records a block on fake tensors and sends it as one safetensors file. The server validates the file and runs it on its model.
Neither side executes Python code or unpickles objects of the other side.

A server calls ``execute_payload(model, payload, limits) -> bytes``. ``decode`` and ``validate`` are the steps before the run. A client is
a subclass of :class:`ProgramBackend` that sends bytes and returns bytes. ``import nnsight`` imports this package on first use only.
"""

from __future__ import annotations

from ..program.format.errors import ExecutionFailedError, InvalidProgramError, NotExpressibleError
from ..program.format.limits import Limits
from ..program.format.operators import OPERATORS_HASH
from ..program.format.payload import VERSION, Job, decode, encode
from ..program.format.results import decode_results, encode_results
from ..program.program import Program
from ..program.record.binding import Recorded
from ..program.record.recorder import record
from ..program.run.execution import execute_payload
from ..program.run.validation import Checked, validate
from . import counts as counts
from .client.backend import LocalBackend, ProgramBackend
from .protocol import ModelKey

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
