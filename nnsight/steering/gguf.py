"""Control vectors in GGUF, the format of llama.cpp.

A control vector is a GGUF file with ``general.architecture`` set to ``controlvector`` and tensors ``direction.N``, one for the hidden
state after layer ``N``, in plain floats. The package ``gguf`` (https://github.com/ggml-org/llama.cpp/tree/master/gguf-py) reads it.
Its reader trusts the file: it truncates a value that extends past the end, and trusts the length of any list. Files here are not trusted,
so each value is checked against the size of the file before it is read.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

MAGIC = b"GGUF"

_INSTALL = "`pip install gguf`, or `pip install 'nnsight[steering]'`"

#: Codes of the types of tensors that are plain floats.
_FLOATS = {0: torch.float32, 1: torch.float16, 28: torch.float64, 30: torch.bfloat16}

#: Limit on the number of values in a header. A control vector has a few for each layer, and each costs the reader far more than its bytes.
_MOST_VALUES = 100_000


def control_vector(data: bytes, source: str) -> dict[str, torch.Tensor]:
    """Return the directions in the content of a file, by their keys ``direction.N``; raises the errors of :func:`.formats.parse_vector`."""
    try:
        import gguf
        import numpy as np
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{source} is a GGUF file, and reading it needs the package gguf: {_INSTALL}."
        ) from error

    class Reader(gguf.GGUFReader):
        values = 0

        def _get(self, offset: int, dtype: Any, count: int = 1, *order: Any, **named: Any) -> Any:
            self.values += 1
            if self.values > _MOST_VALUES:
                raise ValueError(f"a GGUF file of more than {_MOST_VALUES} values, and a control vector has only a few.")
            if int(offset) + int(count) * np.dtype(dtype).itemsize > len(self.data):
                raise ValueError("the GGUF file ends before its content does; it may be cut off.")
            return super()._get(offset, dtype, count, *order, **named)

        def _build_tensors(self, start_offs: int, fields: list[gguf.ReaderField]) -> None:
            kind = self.get_field("general.architecture")
            architecture = None if kind is None else kind.contents()
            if architecture != "controlvector":
                raise ValueError(f"a GGUF file of the architecture {architecture!r}, not a control vector ('controlvector').")
            for field in fields:
                code, offset = int(field.parts[4][0]), int(field.parts[5][0])
                if code not in _FLOATS:
                    raise ValueError(
                        f"{field.name!r} is quantized (GGML type {code}); a control vector has float32, float16, bfloat16 or float64."
                    )
                self._get(offset, np.uint8, 0)  # checked alone: the sum of `start_offs` and a huge offset could overflow to a small number
            super()._build_tensors(start_offs, fields)

    version = int.from_bytes(data[4:8], "little")
    if version not in {2, 3}:
        raise ValueError(f"{source}: GGUF version {version} is not supported, only the versions 2 and 3 in little-endian order.")
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()
        try:
            tensors = Reader(file).tensors  # type: ignore[arg-type]  # numpy.memmap takes files, too
            return {each.name: torch.from_numpy(each.data.copy()).view(_FLOATS[each.tensor_type]) for each in tensors}
        except Exception as error:
            raise ValueError(f"{source} cannot be read as a control vector: {error}") from error


def write_control_vector(path: Path, directions: Mapping[int, torch.Tensor], model: str) -> None:
    """Write directions, float32 ``[hidden]`` by layer, as a control vector; ``model`` is the hint in the file at the model it is for.

    Raises:
        ImportError: If the package ``gguf`` is not installed.
    """
    try:
        import gguf
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"Writing {path.name} needs the package gguf: {_INSTALL}.") from error
    writer = gguf.GGUFWriter(path, "controlvector")
    writer.add_string("controlvector.model_hint", model)
    writer.add_uint32("controlvector.layer_count", len(directions))
    for layer, direction in directions.items():
        writer.add_tensor(f"direction.{layer}", direction.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
