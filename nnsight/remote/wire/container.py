"""Safetensors files with JSON in their header, read as if somebody wanted to do harm.

The file is eight bytes with the length of a JSON header, the header, and the bytes of the tensors. Everything the header says is
checked here before a byte of a tensor is looked at: names, types, sizes, and that the tensors fill the rest of the file
exactly. JSON is read strictly: no key twice, no ``NaN``, no number beyond those of torch.
"""

from __future__ import annotations

import json
import math
from typing import Any

import safetensors.torch
import torch

from .errors import InvalidProgramError
from .trees import is_int, is_text

#: What the metadata of a container is called.
KEY = "nnsight"

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}

_MAX_DIMS = 32


def pack(content: Any, tensors: dict[str, torch.Tensor]) -> bytes:
    """Return a container of JSON and tensors."""
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    plain = {name: _plain(tensor) for name, tensor in tensors.items()}
    return safetensors.torch.save(plain, {KEY: text})


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` with memory of its own, in the order of its elements, on the CPU."""
    return tensor.detach().resolve_conj().resolve_neg().to("cpu").clone(memory_format=torch.contiguous_format)


def header_of(data: bytes, max_bytes: int, max_header: int) -> bytes:
    """Return the header of a container, unread.

    Raises:
        InvalidProgramError: If it has none, or is too large.
    """
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise InvalidProgramError(f"A payload is bytes, not {type(data).__name__}.")
    if len(data) > max_bytes:
        raise InvalidProgramError(f"The payload has {len(data)} bytes; the limit is {max_bytes}.")
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > len(data) - 8:
        raise InvalidProgramError("The payload is shorter than its header says.")
    if size > max_header:
        raise InvalidProgramError(f"The header has {size} bytes; the limit is {max_header}.")
    return bytes(data[8 : 8 + size])


def unpack(data: bytes, max_bytes: int, max_header: int) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return the JSON and the tensors of a container.

    Raises:
        InvalidProgramError: If it is malformed or too large.
    """
    text = header_of(data, max_bytes, max_header)
    header = strict_json(text)
    if type(header) is not dict or type(metadata := header.pop("__metadata__", None)) is not dict:
        raise InvalidProgramError("The header is no JSON object with metadata.")
    if set(metadata) != {KEY} or type(metadata[KEY]) is not str:
        raise InvalidProgramError(f"The metadata has to be one text called {KEY!r}.")
    _check_tensors(header, len(data) - 8 - len(text))
    return strict_json(metadata[KEY].encode()), read_tensors(bytes(data))


def read_tensors(data: bytes) -> dict[str, torch.Tensor]:
    """Return the tensors of a container whose header has been checked.

    Raises:
        InvalidProgramError: If it is malformed all the same.
    """
    try:
        tensors = safetensors.torch.load(data)
    except (safetensors.SafetensorError, ValueError, RuntimeError, KeyError) as error:
        raise InvalidProgramError(f"The container is malformed: {error}") from None
    # A byte that is neither 0 nor 1 is no boolean, whatever the header says.
    return {
        name: tensor.view(torch.uint8).ne(0) if tensor.dtype == torch.bool else tensor
        for name, tensor in tensors.items()
    }


def _check_tensors(header: dict[str, Any], size: int) -> None:
    stretches = []
    for name, entry in header.items():
        if not is_text(name) or type(entry) is not dict or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise InvalidProgramError("A tensor of the container is malformed.")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if type(dtype) is not str or dtype not in _DTYPES:
            raise InvalidProgramError(
                f"A tensor of the container is of a type that is not allowed: {str(dtype)[:20]!r}."
            )
        if type(shape) is not list or len(shape) > _MAX_DIMS or not all(is_int(item) and item >= 0 for item in shape):
            raise InvalidProgramError("A tensor of the container has a malformed shape.")
        if type(offsets) is not list or len(offsets) != 2 or not all(is_int(item) and item >= 0 for item in offsets):
            raise InvalidProgramError("A tensor of the container has malformed offsets.")
        if offsets[1] - offsets[0] != math.prod(shape) * _DTYPES[dtype].itemsize:
            raise InvalidProgramError("The size of a tensor of the container contradicts its shape.")
        stretches.append(tuple(offsets))
    end = 0
    for start, stop in sorted(stretches):
        if start != end:
            raise InvalidProgramError("The tensors of the container overlap, or leave holes.")
        end = stop
    if end != size:
        raise InvalidProgramError("The tensors do not fill the container.")


def strict_json(text: bytes) -> Any:
    """Return what JSON says, refusing what two readers could read differently.

    Raises:
        InvalidProgramError: If it is malformed.
    """
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
        raise InvalidProgramError("The JSON nests too deep.") from None
    except ValueError as error:
        raise InvalidProgramError(f"The JSON is malformed: {error}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise InvalidProgramError("The JSON has a key twice.")
    return made


def _refuse(text: str) -> Any:
    raise InvalidProgramError(f"The JSON has {text}, which is no JSON.")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise InvalidProgramError("The JSON has a number out of range.")
    return value


def _integer(text: str) -> int:
    if len(text) > 20:
        raise InvalidProgramError("The JSON has a number out of range.")
    return int(text)
