"""Results as bytes: safetensors for the tensors, a JSON tree for how they nest."""

from __future__ import annotations

from typing import Any


def encode_results(values: dict[str, Any]) -> bytes:
    """Return saved values by name as a container."""
    raise NotImplementedError


def decode_results(results: bytes) -> dict[str, Any]:
    """Return saved values by name: nested lists, tuples and dicts of tensors and plain data. Nothing is unpickled.

    Raises:
        InvalidProgramError: If the container is malformed.
    """
    raise NotImplementedError
