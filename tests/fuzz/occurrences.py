"""Occurrences of locations: where a block can do something in a model, found by one run of the model."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from .nets import OpsByHand, Spec, build, make_input
from .sizes import WIDTH


@dataclass(frozen=True)
class Place:
    """A tensor in the value at an occurrence.

    Attributes:
        access: Expression of the tensor; ``H`` is the value.
        rebuild: Expression of the value with ``E`` in place of the tensor.
        floating: Whether it is hidden states, and not ids.
    """

    access: str
    rebuild: str
    floating: bool = True


@dataclass(frozen=True)
class Occurrence:
    """One occurrence of a location.

    Attributes:
        path: Of the module, or of an operation (``body.0.source.torch_tanh_0``).
        key: ``input`` or ``output``.
        number: How often the model had passed the location before.
        places: Tensors in the value: the result, or the pair of arguments.
        first: Tensors in the first argument, if it is an input.
        whole: Expression of a result of this structure, with ``E`` for each tensor; empty if no expression has such a result.
    """

    path: str
    key: str
    number: int
    places: tuple[Place, ...]
    first: tuple[Place, ...]
    whole: str


#: Rows and positions of the input with which occurrences are found. No other size is the same.
ROWS, POSITIONS = 2, 3


def places_in(value: Any, access: str = "H", rebuild: str = "E", seen: tuple[int, ...] = ()) -> list[Place]:
    """Return where the tensors of ``value`` are that statements can use: hidden states and ids.

    Others, such as the states of a recurrent cell, rotary embeddings and masks, have shapes that statements do not fit. A tensor
    that is there more than once is left out, too: attention asks whether queries, keys and values are the same object, and a
    captured graph has the answer of its capture.

    Args:
        value: At an occurrence.
        access, rebuild: As in :class:`Place`.
        seen: Tensors of the whole value, by identity.
    """
    if not seen:
        leaves = torch.utils._pytree.tree_leaves(value)
        seen = tuple(id(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor))
    if isinstance(value, torch.Tensor):
        floating = value.is_floating_point()
        fits = value.shape == ((ROWS, POSITIONS, WIDTH) if floating else (ROWS, POSITIONS))
        return [Place(access, rebuild, floating)] if fits and seen.count(id(value)) == 1 else []
    found = []
    if isinstance(value, (tuple, list)):
        opening, closing = "()" if isinstance(value, tuple) else "[]"
        for index, item in enumerate(value):
            around = f"{opening}*{access}[:{index}], E, *{access}[{index + 1}:]{closing}"
            found += places_in(item, f"{access}[{index}]", put(rebuild, around), seen)
    if isinstance(value, dict):
        for key, item in value.items():
            around = f"{{**{access}, {key!r}: E}}"
            if type(value) is not dict:  # a result of transformers
                around = f"type({access})(**{around})"
            found += places_in(item, f"{access}[{key!r}]", put(rebuild, around), seen)
    return found


def put(template: str, expression: str) -> str:
    return re.sub(r"\bE\b", lambda _: expression, template)


def whole_of(value: Any) -> str:
    """Return an expression of a value of this structure, with ``E`` for each tensor."""
    if isinstance(value, torch.Tensor):
        return "E"
    if isinstance(value, tuple):
        return "(" + "".join(whole_of(item) + ", " for item in value) + ")"
    if isinstance(value, list):
        return "[" + ", ".join(whole_of(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {whole_of(item)}" for key, item in value.items()) + "}"
    return repr(value)


def is_plain(value: Any) -> bool:
    """Whether an expression can have such a value: tensors, numbers and strings in tuples, lists and dicts."""
    if type(value) in (tuple, list):
        return all(is_plain(item) for item in value)
    if type(value) is dict:
        return all(is_plain(item) for item in value.values())
    return value is None or isinstance(value, (torch.Tensor, int, float, str))


@lru_cache(maxsize=256)
def occurrences_of(spec: Spec, ids: bool, returns: str) -> tuple[Occurrence, ...]:
    """Return the occurrences of a model in the order in which a call meets them."""
    net = build(spec, ids, returns, by_hand=True)
    found: list[Occurrence] = []
    counts: dict[tuple[str, str], int] = {}

    def visit(path: str, key: str, value: Any) -> Any:
        occurrence = counts[path, key] = counts.get((path, key), -1) + 1
        first = ()
        if key == "input":
            args, kwargs = value
            seen = tuple(id(leaf) for leaf in torch.utils._pytree.tree_leaves(value))
            first = tuple(places_in(args[0] if args else next(iter(kwargs.values())), seen=seen))
        whole = whole_of(value) if is_plain(value) else ""
        found.append(Occurrence(path, key, occurrence, tuple(places_in(value)), first, whole))
        return value

    with watched(net, visit), torch.no_grad():
        net(make_input(ids, ROWS, POSITIONS, 0))
    return tuple(found)


class watched:  # noqa: N801 - reads as a word
    """Calls ``visit(path, key, value)`` at each input and output of the modules and operations of a model, and uses what it returns.

    Plain torch hooks; operations are those of :class:`~tests.fuzz.nets.OpsByHand`.
    """

    def __init__(self, net: torch.nn.Module, visit: Callable[[str, str, Any], Any]) -> None:
        self.net, self.visit = net, visit

    def __enter__(self) -> None:
        self.handles: list[Any] = []
        for path, module in self.net.named_modules():

            def before(_: Any, args: Any, kwargs: Any, path: str = path) -> Any:
                return self.visit(path, "input", (args, kwargs))

            def after(_: Any, args: Any, out: Any, path: str = path) -> Any:
                return self.visit(path, "output", out)

            self.handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            self.handles.append(module.register_forward_hook(after))
            if isinstance(module, OpsByHand):
                module.watch = lambda name, key, value, path=path: self.visit(f"{path}.source.{name}", key, value)

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()
        for module in self.net.modules():
            if isinstance(module, OpsByHand):
                module.watch = None
