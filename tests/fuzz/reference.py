"""The reference: the statements of a block, run inside plain torch hooks of a model that the package has never seen."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch

from nnsight.runtime import OutOfOrderError

from .blocks import Actor, BlockPlan, Segment
from .occurrences import watched
from .source import total_of


class Stopped(Exception):
    """Ends a call of the model."""


class Here:
    """The value at an occurrence, as the statements of one actor see it; they read it and assign to it as ``here.at``."""

    def __init__(self, segment: Segment, value: Any, rows: slice | None, total: int) -> None:
        self._is_first = segment.occurrence.key == "input" and not segment.inputs
        self._whole, self._rows, self._total = value, rows, total
        self._given = value if rows is None else torch.utils._pytree.tree_map(self._narrow, value)
        self._value = self._given
        self._leaves = torch.utils._pytree.tree_leaves(self._given)  # the block may fill containers anew
        self.skipped: tuple[Any, ...] = ()

    def _narrow(self, leaf: Any) -> Any:
        return leaf[self._rows] if isinstance(leaf, torch.Tensor) and leaf.shape[:1] == (self._total,) else leaf

    @property
    def at(self) -> Any:
        if not self._is_first:
            return self._value
        args, kwargs = self._value
        return args[0] if args else next(iter(kwargs.values()))

    @at.setter
    def at(self, new: Any) -> None:
        if self._is_first:
            args, kwargs = self._value
            new = ((new, *args[1:]), kwargs) if args else (args, {**kwargs, next(iter(kwargs)): new})
        self._value = new

    def skip(self, value: Any) -> None:
        self.skipped = (value,)

    def whole(self) -> Any:
        """Return the value of the whole batch with which the model goes on."""
        if self._rows is None:
            return self._value
        flat = torch.utils._pytree.tree_flatten
        (whole, structure), (mine, _) = flat(self._whole), flat(self._value)
        merged = []
        for leaf, new, old in zip(whole, mine, self._leaves, strict=True):
            # The model goes on with the block's own view of its rows where gradients may be asked of it.
            followed = isinstance(leaf, torch.Tensor) and leaf.requires_grad and torch.is_grad_enabled()
            if isinstance(leaf, torch.Tensor) and (new is not old or followed):
                before, after = leaf[: self._rows.start], leaf[self._rows.stop :]
                merged.append(torch.cat([before, new, after]) if new.shape[:1] == old.shape[:1] else new)
            else:
                merged.append(leaf)
        return torch.utils._pytree.tree_unflatten(merged, structure)


def _text(segment: Segment) -> str:
    lines = [f"{segment.name} = here.at"]
    for statement in segment.statements:
        text = statement.replace("EARLY", "raise OutOfOrderError()").replace("AT.no_such_name", "raise AttributeError()")
        lines.append(text.replace("SKIP(", "here.skip(").replace("AT", "here.at").replace(".save()", ""))
    return "\n".join(lines)


def run(net: torch.nn.Module, plan: BlockPlan, w: Any, inputs: list[torch.Tensor]) -> tuple[Any, Any, Any]:
    """Run a block; return the model's result, what a cache would hold, and what was saved."""
    joined = inputs[0] if len(inputs) == 1 else torch.cat(inputs)
    names: dict[str, Any] = {
        "torch": torch, "contextlib": contextlib, "functools": functools, "w": w,
        "OutOfOrderError": OutOfOrderError, "__builtins__": __builtins__,
    }  # fmt: skip
    names["model"] = net
    sizes = iter(len(part) for part in inputs)
    start = 0
    rows: dict[int, slice | None] = {}
    for number, actor in enumerate(plan.actors):
        rows[number] = None
        if actor.kind == "invoke":
            size = next(sizes)
            rows[number] = slice(start, start + size)
            start += size
        w.log.append(f"actor {number}")
    if len(inputs) == 1:
        rows = dict.fromkeys(rows)
    at: dict[tuple[str, str, int], list[tuple[int, Actor, Segment]]] = {}
    for number, actor in enumerate(plan.actors):
        for segment in actor.segments:
            occurrence = segment.occurrence
            at.setdefault((occurrence.path, occurrence.key, occurrence.number), []).append((number, actor, segment))
    last = plan.actors[-1].segments[-1] if plan.actors[-1].segments else None
    counts: dict[tuple[str, str], int] = {}
    cache: dict[str, Any] = {}
    asked: dict[str, list[Any]] = {}

    def visit(path: str, key: str, value: Any) -> Any:
        occurrence = counts[path, key] = counts.get((path, key), -1) + 1
        for number, _, segment in at.get((path, key, occurrence), ()):
            here = Here(segment, value, rows[number], len(joined))
            names["here"] = here
            exec(_text(segment), names)
            value = here.whole()
            if here.skipped:
                asked.setdefault(path, []).append(here.skipped[0])
            if plan.stops and segment is last:
                raise Stopped
        if plan.gradients and (path, key) == ("", "output"):
            _backward(plan, names, value)
        if plan.caches and ".source." not in path:
            entry = torch.utils._pytree.tree_map_only(torch.Tensor, lambda leaf: leaf.detach().clone(), value)
            cache.setdefault(f"model.{path}".rstrip("."), {}).setdefault(key, []).append(entry)
        return value

    with watched(net, visit), _skippable(net, plan, asked):
        try:
            out = net(joined)
        except Stopped:
            out = None
    saved = {name: names[name] for name in plan.saved if name in names}
    return out, cache if plan.caches else None, saved


@contextlib.contextmanager
def _skippable(net: torch.nn.Module, plan: BlockPlan, asked: dict[str, list[Any]]) -> Iterator[None]:
    """Let modules that the block skips return what ``asked`` has for their path, if anything, instead of running."""
    changed = []
    for actor in plan.actors:
        for segment in actor.segments:
            if any(statement.startswith("SKIP(") for statement in segment.statements):
                path = segment.occurrence.path
                module = net.get_submodule(path)

                def forward(*args: Any, run: Any = module.forward, path: str = path, **kwargs: Any) -> Any:
                    return asked[path].pop() if asked.get(path) else run(*args, **kwargs)

                module.forward = forward
                changed.append(module)
    try:
        yield
    finally:
        for module in changed:
            del module.forward


def _backward(plan: BlockPlan, names: dict[str, Any], value: Any) -> None:
    """Do what the backward block at the end does: keep, and perhaps change, gradients on their way."""
    seen: dict[str, torch.Tensor] = {}

    def keep(name: str, gradient: torch.Tensor) -> torch.Tensor | None:
        seen[name] = gradient.clone()
        return gradient * 2.0 if plan.scales else None

    loss = total_of(value)
    for name in reversed(plan.gradients):  # two names may be one tensor, whose hooks run in this order
        if not names[name].requires_grad:
            raise ValueError("no gradient")
        names[name].grad_fn  # noqa: B018 - torch crashes on a hook for a view of what was edited, unless this is made anew
        names[name].register_hook(lambda gradient, name=name: keep(name, gradient))
    loss.backward()
    for name in reversed(plan.gradients):
        if name not in seen:
            raise ValueError("no gradient")
        names["w"].kept.append(seen[name])
