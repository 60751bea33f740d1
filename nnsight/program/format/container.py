"""Safetensors files with JSON in their header, read as untrusted input.

A file has three parts: the length of a JSON header in eight bytes, the header, and the bytes of the tensors. The header is checked before
any tensor is read: names, dtypes, sizes, and that the tensors fill the rest of the file exactly. The JSON parser is strict: it rejects
repeated keys, ``NaN``, and numbers that are out of the range of torch.
"""

from __future__ import annotations

import json
import math
from typing import Any

import safetensors.torch
import torch

from .errors import InvalidProgramError, require
from .trees import DTYPES, is_int, is_text

#: The only key in the metadata of a container.
KEY = "nnsight"

_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "U8": "uint8", "BOOL": "bool"}
_DTYPES = {name: DTYPES[known] for name, known in {**_NAMES, **{f"I{n}": f"int{n}" for n in (8, 16, 32, 64)}}.items()}

_MAX_DIMS = 32


def pack(content: Any, tensors: dict[str, torch.Tensor]) -> bytes:
    """Return a container with the JSON of ``content`` and the tensors."""
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    plain = {name: _plain(tensor) for name, tensor in tensors.items()}
    return safetensors.torch.save(plain, {KEY: text})


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy of ``tensor`` on the CPU."""
    return tensor.detach().resolve_conj().resolve_neg().to("cpu").clone(memory_format=torch.contiguous_format)


def header_of(data: bytes, max_bytes: int, max_header: int) -> bytes:
    """Return the unparsed header of a container. Raise an :class:`InvalidProgramError` if it is incomplete, or if a size is too large."""
    require(isinstance(data, (bytes, bytearray, memoryview)), f"A payload has to be bytes, not {type(data).__name__}.")
    require(len(data) <= max_bytes, f"The payload has {len(data)} bytes; the limit is {max_bytes}.")
    size = int.from_bytes(data[:8], "little")
    require(len(data) >= 8 and size <= len(data) - 8, "The payload is shorter than its header says.")
    require(size <= max_header, f"The header has {size} bytes; the limit is {max_header}.")
    return bytes(data[8 : 8 + size])


def unpack(data: bytes, max_bytes: int, max_header: int) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return the JSON and the tensors of a container. Raise an :class:`InvalidProgramError` if it is malformed or too large."""
    text = header_of(data, max_bytes, max_header)
    header = strict_json(text)
    metadata = header.pop("__metadata__", None) if type(header) is dict else None
    if type(metadata) is not dict:
        raise InvalidProgramError("The header is not a JSON object with metadata.")
    require(set(metadata) == {KEY} and type(metadata[KEY]) is str, f"The metadata has to be one string with the key {KEY!r}.")
    _check_tensors(header, len(data) - 8 - len(text))
    return strict_json(metadata[KEY].encode()), read_tensors(bytes(data))


def read_tensors(data: bytes) -> dict[str, torch.Tensor]:
    """Return the tensors of a container whose header has been checked. Raise an :class:`InvalidProgramError` if its data is malformed."""
    try:
        tensors = safetensors.torch.load(data)
    except (safetensors.SafetensorError, ValueError, RuntimeError, KeyError) as error:
        raise InvalidProgramError(f"The container is malformed: {error}") from None
    # A boolean tensor of the file may contain bytes other than 0 and 1. This makes them valid booleans.
    return {
        name: tensor.view(torch.uint8).ne(0) if tensor.dtype == torch.bool else tensor
        for name, tensor in tensors.items()
    }


def _check_tensors(header: dict[str, Any], size: int) -> None:
    """Raise an error unless the tensors of a header are well formed and fill ``size`` bytes exactly."""

    def naturals(value: Any, most: int) -> bool:
        return type(value) is list and len(value) <= most and all(is_int(item) and item >= 0 for item in value)

    stretches = []
    for name, entry in header.items():
        known = is_text(name) and type(entry) is dict and set(entry) == {"dtype", "shape", "data_offsets"}
        require(known, "A tensor of the container is malformed.")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        allowed = type(dtype) is str and dtype in _DTYPES
        require(allowed, f"A tensor of the container has a dtype that is not allowed: {str(dtype)[:20]!r}.")
        require(naturals(shape, _MAX_DIMS), "A tensor of the container has a malformed shape.")
        require(naturals(offsets, 2) and len(offsets) == 2, "A tensor of the container has malformed offsets.")
        fits = offsets[1] - offsets[0] == math.prod(shape) * _DTYPES[dtype].itemsize
        require(fits, "The size of a tensor of the container contradicts its shape.")
        stretches.append(tuple(offsets))
    end = 0
    for start, stop in sorted(stretches):
        require(start == end, "The tensors of the container overlap, or leave holes.")
        end = stop
    require(end == size, "The tensors do not fill the container exactly.")


def strict_json(text: bytes) -> Any:
    """Return the content of JSON. Raise an :class:`InvalidProgramError` if it is malformed, or if parsers could disagree about it."""
    try:
        return json.loads(
            text.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_constant=_refuse,
            parse_float=_finite,
            parse_int=_integer,
        )
    except InvalidProgramError:
        raise
    except RecursionError:
        raise InvalidProgramError("The JSON is nested too deeply.") from None
    except ValueError as error:
        raise InvalidProgramError(f"The JSON is malformed: {error}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    require(len(made) == len(pairs), "The JSON has the same key twice.")
    return made


def _refuse(text: str) -> Any:
    raise InvalidProgramError(f"The JSON contains {text}, which is not valid JSON.")


def _finite(text: str) -> float:
    value = float(text)
    require(math.isfinite(value), "The JSON has a number out of range.")
    return value


def _integer(text: str) -> int:
    require(len(text) <= 20, "The JSON has a number out of range.")
    return int(text)
