"""The registry of vectors, from which requests choose by name; :mod:`nnsight.steering.formats` defines vectors."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from .formats import Directions, directions_of, parse_vector

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")


def named_file(option: str, given: str) -> tuple[str, str]:
    """Split the value ``NAME=FILE`` of a command-line ``option`` into name and file; raise ``ValueError`` if it has no file."""
    name, _, path = given.partition("=")
    if not path:
        raise ValueError(f"{option} {given}: give a name and a file, as in `{option} happy={given}`.")
    return name, path


class Vectors(Mapping[str, Directions]):
    """A registry of vectors by name; ``hidden`` is the number of channels of the model's hidden state, ``None`` if not known yet."""

    def __init__(self, hidden: int | None = None) -> None:
        self.hidden = hidden
        self._vectors: dict[str, Directions] = {}

    def load(self, path: str | os.PathLike[str], name: str | None = None) -> str:
        """Register the vector in a file and return its name.

        Args:
            path: A safetensors file or a control vector in GGUF.
            name: Name of the vector, which also chooses one of several in the file; by default the name of the file without its suffix.

        Raises:
            ImportError: If the file is in GGUF, and the package ``gguf`` is not installed.
            OSError: If the file cannot be read.
            ValueError: If the name is taken or not valid, or the content of the file is not valid.
        """
        return self.add_parsed(Path(path).stem if name is None else name, Path(path).read_bytes(), str(path))

    def load_named(self, given: str) -> str:
        """Register the vector of a command-line option ``--vectors NAME=FILE``, and return its name; raises the errors of :meth:`load`."""
        name, path = named_file("--vectors", given)
        return self.load(path, name)

    def add(self, name: str, value: torch.Tensor | Mapping[int, torch.Tensor]) -> str:
        """Register a direction ``[hidden]`` for any layer, or a mapping from layers to directions, and return the name.

        Raises:
            TypeError: If ``value`` is neither.
            ValueError: If the name is taken or not valid, or a direction has a wrong size or dtype, or values that are not finite.
        """
        what = f"vector {name!r}"
        return self._add(name, directions_of(value if isinstance(value, Mapping) else {None: value}, what), what)

    def add_parsed(self, name: str, data: bytes, source: str) -> str:
        """Register the vector in the content of a file, which messages call ``source``; see :func:`.parse_vector`."""
        return self._add(name, parse_vector(data, source, name), source)

    def _add(self, name: str, vector: Directions, source: str) -> str:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no name for a vector: names consist of letters, digits, '_', '-' and '.'.")
        if name in self._vectors:
            raise ValueError(f"There is a vector {name!r} already: remove it first, or choose another name.")
        size = len(next(iter(vector.values())))
        if self.hidden is not None and size != self.hidden:
            raise ValueError(_SIZE.format(what=source, size=size, hidden=self.hidden))
        self._vectors[name] = vector
        return name

    def fit(self, hidden: int) -> None:
        """Set the number of channels of the hidden state; raise ``ValueError`` if a registered vector has another size."""
        self.hidden = hidden
        for name, vector in self._vectors.items():
            self.direction(name, next(iter(vector)) or 0, hidden)

    def remove(self, name: str) -> None:
        """Remove a vector. Running requests keep its directions. An unknown name raises ``KeyError``."""
        self[name]  # raises if there is none
        del self._vectors[name]

    def __getitem__(self, name: str) -> Directions:
        if name not in self._vectors:
            raise KeyError(f"There is no vector {name!r}. Registered: {', '.join(self._vectors) or 'none'}.")
        return self._vectors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._vectors)

    def __len__(self) -> int:
        return len(self._vectors)

    def __repr__(self) -> str:
        return "\n".join(f"{name}: {_layers_of(vector)}" for name, vector in self._vectors.items()) or "no vectors"

    def layers(self, name: str) -> list[int] | None:
        """Return the layers of a vector; ``None`` if its direction is for any layer. An unknown name raises ``ValueError``."""
        vector = self._found(name)
        return None if None in vector else [layer for layer in vector if layer is not None]

    def direction(self, name: str, layer: int, hidden: int) -> torch.Tensor:
        """Return the direction of a vector for a layer, float32 ``[hidden]``; raise ``ValueError`` if there is none of this size."""
        vector = self._found(name)
        direction = vector.get(layer, vector.get(None))
        if direction is None:
            raise ValueError(f"The vector {name!r} has no direction for layer {layer}, only for {_layers_of(vector)}.")
        if len(direction) != hidden:
            raise ValueError(_SIZE.format(what=f"The vector {name!r}", size=len(direction), hidden=hidden))
        return direction

    def _found(self, name: str) -> Directions:
        try:
            return self[name]
        except KeyError as error:
            raise ValueError(error.args[0]) from None


_SIZE = "{what}: a direction has {size} channels, and the model's hidden state has {hidden}."


def _layers_of(vector: Directions) -> str:
    return "any layer" if None in vector else "layers " + ", ".join(str(layer) for layer in vector)
