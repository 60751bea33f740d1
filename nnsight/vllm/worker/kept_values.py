"""Captures of a compiled engine: values that it copies out of its graph, for blocks that only read them.

For each *captured* module, the graph has an operation, ``nnsight::capture``. It copies the module's output or input into a buffer with a
fixed address. After the model has run, the step hands the buffers to the blocks, in the order in which the model filled them. So the
model never waits for Python. In a CUDA graph, the copy is one of the replayed operations, and the graph is not split for it.

This has two costs. A block cannot edit a captured value, because the model has already run: an edit is an error. And the buffers of all
captured modules need memory at the same time, with as many rows as the longest step has.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from .request_rows import ordinary
from .steps import EngineStep

_library = torch.library.Library("nnsight", "FRAGMENT")

#: The buffers of the engine that currently runs a step with blocks, or records a graph for replay.
_active: ContextVar[KeptValues | None] = ContextVar("nnsight_captures", default=None)


def define(name: str, signature: str, function: Callable[..., None]) -> None:
    """Make ``function``, which returns nothing, the operation ``nnsight::name`` on every device. On fake tensors it does nothing.

    An engine calls these operations at every layer of every step, even if no block waits. ``torch.library.custom_op`` would add code for
    gradients and tensor versions, which takes several times as long as an operation that has nothing to do.
    """
    _library.define(name + signature)
    _library.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"nnsight::{name}", lambda *_: None, lib=_library)


def _capture(leaves: list[torch.Tensor], mark: torch.Tensor, form: str, location: str) -> None:
    """Copy the tensors of the value at ``location``, which has the structure ``form``.

    The signature declares that ``mark`` is written to, so that compilers keep the operation although it has no result.
    """
    captures = _active.get()
    if captures is not None:
        captures.fill(location, form, leaves)


define("capture", "(Tensor[] leaves, Tensor(a!) mark, str form, str location) -> ()", _capture)


class KeptValues:
    """The buffers of the captures of an engine, by location, in the order in which the model fills them."""

    def __init__(self) -> None:
        self._buffers: dict[str, tuple[str, list[torch.Tensor]]] = {}
        self._used: dict[str, tuple[int, list[torch.Tensor]]] = {}  # number of rows, and views of the buffers with these rows

    @contextmanager
    def filling(self) -> Iterator[None]:
        """Let captures fill the buffers inside of this context. Outside of it, only replayed graphs fill them."""
        token = _active.set(self)
        try:
            yield
        finally:
            _active.reset(token)

    def fill(self, location: str, form: str, leaves: list[torch.Tensor]) -> None:
        """Copy ``leaves`` into the buffers of ``location``. An engine begins with its longest step, so the buffers rarely have to grow."""
        rows, used = self._used.get(location, (-1, []))
        if len(leaves) != 1 or leaves[0].shape[0] != rows:
            buffers = self._buffers.get(location, ("", []))[1]
            if not buffers or any(leaf.shape[0] > buffer.shape[0] for leaf, buffer in zip(leaves, buffers, strict=True)):
                buffers = [torch.empty_like(leaf, memory_format=torch.contiguous_format) for leaf in leaves]
                self._buffers[location] = form, buffers
            used = [buffer[: leaf.shape[0]] for leaf, buffer in zip(leaves, buffers, strict=True)]
            self._used[location] = leaves[0].shape[0], used
        for leaf, part in zip(leaves, used, strict=True):
            part.copy_(leaf)

    def hand_out(self, step: EngineStep, rows: int) -> None:
        """Offer the captured values of a step of ``rows`` rows to the blocks that wait for them."""
        for location, (form, buffers) in self._buffers.items():
            waited = location in step.waited
            value = value_of(parsed(form), [buffer[:rows] for buffer in buffers]) if waited or step.keeps else None
            if step.keeps:
                with ordinary():
                    step.keep(location, value)
            if waited:
                step.meet(location, value)
            else:
                step.counts[location] = 1
        for part in step.parts:
            part.run.kept.clear()


#: Parses the literal of a structure, for :func:`value_of`.
parsed = functools.cache(ast.literal_eval)


def value_of(form: Any, leaves: list[torch.Tensor]) -> Any:
    """Return the value with the structure ``form``, in which each integer is the index of a tensor in ``leaves``."""
    if type(form) is int:
        return leaves[form]
    if type(form) in {tuple, list}:
        return type(form)(value_of(item, leaves) for item in form)
    if type(form) is dict:
        return {key: value_of(item, leaves) for key, item in form.items()}
    return form
