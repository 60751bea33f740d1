"""A block as the text of a program: what a user would write, and what a failing case prints."""

from __future__ import annotations

import contextlib
import functools
import linecache
import re
from collections.abc import Callable
from typing import Any

import torch

from .blocks import Actor, BlockPlan, Segment
from .occurrences import Occurrence


def envoy(occurrence: Occurrence, model: str = "model") -> str:
    """Return the expression of the envoy of an occurrence."""
    text = model
    for part in occurrence.path.split(".") if occurrence.path else ():
        text += f"[{part}]" if part.isdecimal() else f".{part}"
    return text


def _segment(segment: Segment, model: str) -> list[str]:
    here = envoy(segment.occurrence, model)
    location = f"{here}.{'inputs' if segment.inputs else segment.occurrence.key}"
    lines = [f"{segment.name} = {location}"]
    for statement in segment.statements:
        line = statement.replace("SKIP(", f"{here}.skip(").replace("AT.no_such_name", f"{here}.no_such_name")
        if segment.early is not None:
            line = line.replace("EARLY", f"{envoy(segment.early, model)}.{segment.early.key}")
        lines += line.replace("AT", location).split("\n")
    if segment.occurrence.number:
        return [f"for _ in tracer.iter[{segment.occurrence.number}]:", *(f"    {line}" for line in lines)]
    return lines


def _actor(actor: Actor, model: str, number: int, notes: bool = True) -> list[str]:
    lines = [f"w.log.append('actor {number}')"] if notes else []
    for segment in actor.segments:
        lines += _segment(segment, model)
    return lines


#: What of the world a block that can be replayed has in variables.
OUTSIDE = ("vector", "matrix", "scalar", "noise", "total")


def _plain(line: str) -> str:
    return re.sub(rf"\bw\.({'|'.join(OUTSIDE)})\b", r"\1", line)


def text_of(plan: BlockPlan) -> str:
    """Return the source of ``block(model, w, *inputs, **options)``, which returns result, cache, tracer and what was saved."""
    body: list[str] = ["out = cache = None"]
    model = "model"
    actors = list(enumerate(plan.actors))
    if actors[0][1].kind == "edit":
        number, actor = actors.pop(0)
        body += ["with model.edit() as edited:", *(f"    {line}" for line in _actor(actor, "edited", number))]
        model = "edited"
    if actors[0][1].kind == "trace":
        number, actor = actors[0]
        if plan.plain:
            body.append(f"{', '.join(OUTSIDE)} = {', '.join(f'w.{name}' for name in OUTSIDE)}")
            body.append(f"w.log.append('actor {number}')")
        body.append(f"with {model}.trace(inputs[0], **options) as tracer:")
        if plan.caches:
            body.append("    cache = tracer.cache(include_inputs=True)")
        lines = _actor(actor, model, number, notes=not plan.plain)
        body += [f"    {_plain(line) if plan.plain else line}" for line in lines]
        if plan.gradients:
            body += [f"    loss = total_of({model}.output)", "    with loss.backward():"]
            for name in reversed(plan.gradients):
                body.append(f"        w.kept.append({name}.grad.clone())")
                if plan.scales:
                    body.append(f"        {name}.grad = {name}.grad * 2.0")
        result = f"{model}.output" if plan.plain else "tracer.result"  # which is none of a block that can be replayed
        body.append("    tracer.stop()" if plan.stops else f"    out = {result}.save()")
    else:
        body.append(f"with {model}.trace(**options) as tracer:")
        row = 0
        for number, actor in actors:
            if actor.kind == "invoke":
                body.append(f"    with tracer.invoke(inputs[{row}]):")
                row += 1
            else:
                body.append("    with tracer.invoke():")
            body += [f"        {line}" for line in _actor(actor, model, number)]
        body += ["    with tracer.invoke():", "        out = tracer.result.save()"]
    saved = ", ".join(f"{name!r}: {name}" for name in plan.saved)
    body.append(f"return out, cache, tracer, {{{saved}}}")
    return "\n".join(["def block(model, w, *inputs, **options):", *(f"    {line}" for line in body), ""])


def total_of(value: Any) -> torch.Tensor:
    """Return a loss of all tensors in a value, but for those in objects: a compiled block cannot look into a cache."""
    leaves = torch.utils._pytree.tree_leaves(value)
    return sum(leaf.pow(2).mean() for leaf in leaves if isinstance(leaf, torch.Tensor))  # type: ignore[return-value]


_numbers = iter(range(10**9))


def compiled(text: str) -> Callable[..., Any]:
    """Return the function that a text defines, with a source that can be found."""
    filename = f"<block {next(_numbers)}>"
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    namespace: dict[str, Any] = {"torch": torch, "contextlib": contextlib, "functools": functools, "total_of": total_of, "__name__": "fuzz"}
    exec(compile(text, filename, "exec"), namespace)
    return namespace["block"]
