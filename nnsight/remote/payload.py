"""Jobs as bytes: the container of the wire format."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from .limits import Limits

#: Version of the format.
VERSION = 1


@dataclass
class Job:
    """A run of a model with a program: what a client sends.

    Attributes:
        call: How the model is called: ``"trace"`` or ``"generate"``.
        args: Arguments of the call, as a tree (see :mod:`.tree`).
        kwargs: Likewise, by name.
        nodes: The program, see docs/remote.md.
        saves: What comes back: a tree by name.
        tensors: Constants and inputs, by name.
    """

    call: str
    args: Any
    kwargs: Any
    nodes: list[Any] = field(default_factory=list)
    saves: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)


def encode(job: Job) -> bytes:
    """Return ``job`` as a payload: one safetensors file."""
    raise NotImplementedError


def decode(payload: bytes, limits: Limits | None = None) -> Job:
    """Return the job in a payload. Nothing in it is executed, imported or looked up by name.

    Raises:
        InvalidProgramError: If it is malformed or too large.
    """
    raise NotImplementedError
