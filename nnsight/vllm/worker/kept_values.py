"""Values that a compiled engine copies out of its graph, for blocks that only read them.

For each module that is *captured* an operation stands in the graph, ``nnsight::capture``. It copies the module's output, or its
input, into a buffer that stays where it is. When the model has run, the step hands the buffers to the blocks, in the order in which
the model computed them. So nothing inside the model waits for Python. Where graphs are replayed (CUDA graphs), the copy is one
of the replayed operations, and the graph is not split for it.

The price: a block comes too late to edit anything there, which is an error, and the values of all captured modules need memory at the same
time, for the longest step.
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

#: The buffers of the engine that is running a step with blocks, or a graph that will be replayed.
_filled: ContextVar[KeptValues | None] = ContextVar("nnsight_captures", default=None)


def define(name: str, signature: str, function: Callable[..., None]) -> None:
    """Make ``function`` the operation ``nnsight::name`` on every device; it returns nothing, and fakes of it do nothing.

    An engine calls these operations at every layer of every step, also where no block waits. ``torch.library.custom_op`` would add code for
    gradients and for tensor versions that takes several times as long as an operation that has nothing to do.
    """
    _library.define(name + signature)
    _library.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"nnsight::{name}", lambda *_: None, lib=_library)


def _capture(leaves: list[torch.Tensor], mark: torch.Tensor, form: str, location: str) -> None:
    """Copy the tensors of the value at ``location``, which has the structure ``form``.

    The signature says that ``mark`` is written to, so that compilers keep the operation although it has no result.
    """
    captures = _filled.get()
    if captures is not None:
        captures.fill(location, form, leaves)


define("capture", "(Tensor[] leaves, Tensor(a!) mark, str form, str location) -> ()", _capture)


class KeptValues:
    """The buffers of an engine, by location, in the order of the model."""

    def __init__(self) -> None:
        self._buffers: dict[str, tuple[str, list[torch.Tensor]]] = {}
        self._used: dict[str, tuple[int, list[torch.Tensor]]] = {}  # the rows of the last step, and the parts of the buffers for them

    @contextmanager
    def filling(self) -> Iterator[None]:
        """Fill the buffers inside of this; outside, only graphs that are replayed fill them."""
        token = _filled.set(self)
        try:
            yield
        finally:
            _filled.reset(token)

    def fill(self, location: str, form: str, leaves: list[torch.Tensor]) -> None:
        """Copy ``leaves`` into the buffers of ``location``. The first step of an engine is its longest, so they need not grow."""
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
        """Offer what the model has computed in a step of ``rows`` rows to the blocks that wait for it."""
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


#: Returns the structure that a literal describes, for :func:`value_of`.
parsed = functools.cache(ast.literal_eval)


def value_of(form: Any, leaves: list[torch.Tensor]) -> Any:
    """Return a value of the structure ``form``, which has the index of a leaf in place of each tensor."""
    if type(form) is int:
        return leaves[form]
    if type(form) in {tuple, list}:
        return type(form)(value_of(item, leaves) for item in form)
    if type(form) is dict:
        return {key: value_of(item, leaves) for key, item in form.items()}
    return form
