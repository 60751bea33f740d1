"""The common base class of modules and operations: calls with a path, whose values a block can read and edit."""

from __future__ import annotations

from typing import Any, Self

import torch

from ..iteration import running_mediator
from .eproperty import eproperty
from .tree import ModuleTree


class Located:
    """A call in a running model: the call of a module, or of an operation inside it.

    Its path is the prefix of its locations, ``<path>.input`` and ``<path>.output``.
    """

    _path: str
    _tree: ModuleTree

    @eproperty(description="what the call returned")
    def output(self) -> Any:
        """The value that the call returned, such as a tensor, a tuple, a dict or a ``ModelOutput``.

        Edit it in place, or assign a replacement of the same structure and shapes.
        """

    @eproperty(key="input", description="first argument of the call")
    def input(self) -> Any:
        """The first argument of the call: the first positional argument, else the first keyword argument.

        If an operation calls a method, the method's object is not an argument.
        """

    @input.preprocess
    def input(self, value: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
        args, kwargs = value
        if not args and not kwargs:
            raise ValueError(f"`{self._path}` was called without arguments, so it has no `.input`.")
        return args[0] if args else next(iter(kwargs.values()))

    @input.postprocess
    def input(self, value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        location = f"{self._path}.input"
        args, kwargs = running_mediator(f"`{location}`").request(location)
        if args or not kwargs:
            return (value, *args[1:]), kwargs
        return args, {**kwargs, next(iter(kwargs)): value}

    @eproperty(key="input", description="all arguments of the call")
    def inputs(self) -> Any:
        """All arguments of the call, as ``(args, kwargs)``: a tuple and a dict.

        A tensor in place of the tuple is a call with this positional argument: ``.inputs = x, {}`` is the same as ``.inputs = (x,), {}``.
        """

    @inputs.postprocess
    def inputs(self, value: Any) -> Any:
        is_short = isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], torch.Tensor) and isinstance(value[1], dict)
        return ((value[0],), value[1]) if is_short else value

    def skip(self, value: Any) -> None:
        """Skip the call and let it return ``value``. Nothing inside the module or function runs.

        Raises:
            OutOfOrderError: If the call has already been made.
            ValueError: Outside a trace, or if other invokes of the batch do not skip the call.
        """
        running_mediator("skip()").skip(f"{self._path}.input", value)

    def next(self, steps: int = 1) -> Self:
        """Let later requests of this block ask for a later occurrence, ``steps`` (0 or more) after the current one; returns this object."""
        running_mediator("next()").advance(steps)
        return self
