"""Control vectors in GGUF, the format of llama.cpp.

A GGUF file is a header with typed key-value pairs, then a list of tensors with their offsets, then the data
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). A control vector is such a file with ``general.architecture`` set to
``controlvector`` and tensors ``direction.N``, one for the hidden state after layer ``N``. Their numbers are plain floats, so
no quantized type has to be known here, and a reader of the header is all that is needed. A file comes from outside: every length in it is
checked against the bytes that are there.
"""

from __future__ import annotations

import math
import struct
from typing import Any

import torch

MAGIC = b"GGUF"

#: Codes of the types of values, with their format.
_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9

#: Codes of the types of tensors that are plain floats.
_FLOATS = {0: torch.float32, 1: torch.float16, 28: torch.float64, 30: torch.bfloat16}


def control_vector(data: bytes, source: str) -> dict[str, torch.Tensor]:
    """Return the directions in a file by their keys, ``direction.N``.

    Args:
        data: Content of the file.
        source: What messages call it.

    Raises:
        ValueError: If the file is cut off, of an unknown version, or no control vector.
    """
    reader = _Reader(data, source)
    reader.take(len(MAGIC))
    version = reader.scalar("I")
    if version not in {2, 3}:
        raise ValueError(f"{source}: GGUF of version {version}; versions 2 and 3 in little-endian order are read.")
    tensors, pairs = reader.scalar("Q"), reader.scalar("Q")
    metadata = {}
    for _ in range(pairs):
        key = reader.string()
        metadata[key] = reader.value(reader.scalar("I"))
    architecture = metadata.get("general.architecture")
    if architecture != "controlvector":
        raise ValueError(
            f"{source}: a GGUF file of the architecture {architecture!r}, not a control vector ('controlvector')."
        )
    places = []
    for _ in range(tensors):
        key = reader.string()
        shape = [reader.scalar("Q") for _ in range(reader.scalar("I"))]
        places.append((key, shape, reader.scalar("I"), reader.scalar("Q")))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"{source}: 'general.alignment' is {alignment!r}.")
    start = -(-reader.position // alignment) * alignment
    found = {}
    for key, shape, code, offset in places:
        if code not in _FLOATS:
            raise ValueError(
                f"{source}: {key!r} is quantized (GGML type {code}); a control vector has float32, float16, bfloat16 or float64."
            )
        dtype, count = _FLOATS[code], math.prod(shape)
        reader.position = start + offset
        content = bytearray(reader.take(count * dtype.itemsize))
        found[key] = torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)
        found[key] = found[key].reshape(shape[::-1])  # the fastest dimension comes first there
    return found


class _Reader:
    """Takes values from the bytes of a file, one after the other."""

    def __init__(self, data: bytes, source: str) -> None:
        self._data, self._source = data, source
        self.position = 0

    def take(self, count: int) -> bytes:
        """Return the next ``count`` bytes."""
        end = self.position + count
        if end > len(self._data):
            raise ValueError(f"{self._source}: the GGUF file ends before its content does; it may be cut off.")
        taken = self._data[self.position : end]
        self.position = end
        return taken

    def scalar(self, form: str) -> Any:
        """Return the next number."""
        return struct.unpack("<" + form, self.take(struct.calcsize("<" + form)))[0]

    def string(self) -> str:
        """Return the next text."""
        return self.take(self.scalar("Q")).decode("utf-8", "replace")

    def value(self, code: int) -> Any:
        """Return the next value of a type."""
        if code in _SCALARS:
            return self.scalar(_SCALARS[code])
        if code == _STRING:
            return self.string()
        if code == _ARRAY:
            inner, count = self.scalar("I"), self.scalar("Q")
            if inner == _ARRAY:
                raise ValueError(f"{self._source}: a list of lists in the GGUF header.")
            return [self.value(inner) for _ in range(count)]
        raise ValueError(f"{self._source}: a value of the unknown type {code} in the GGUF header.")
