"""Repeated modules: where a captured graph may be cut into regions that are lowered once for all equal ones.

Modules are repeated if siblings (children of one module, or several calls of one) have the same sequence of operations in the graph; taps
mark where each begins and ends. Every node gets the number of its stretch: before the first repeated module, in it, between two, and so on.
Copies of a node keep the number (``meta``), so a spliced graph has its stretches, too.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

import torch

from ..capturing.graph import CapturedGraph

#: The key in ``node.meta`` of the number of its stretch.
STRETCH = "nnsight_stretch"

#: Modules of fewer operations are not worth a call of their own.
_FEWEST_OPERATIONS = 4


class _Call(NamedTuple):
    """A module's call: its parent's path, and the numbers of the first node and of the one behind the last."""

    parent: str
    start: int
    stop: int


def mark_stretches(graph: CapturedGraph) -> None:
    """Number the stretches of ``graph`` between the borders of repeated modules; without those, nothing is marked."""
    borders = sorted({border for call in _repeated(graph) for border in (call.start, call.stop)})
    if not borders:
        return
    stretch = 0
    for number, node in enumerate(graph.nodes):
        while stretch < len(borders) and borders[stretch] <= number:
            stretch += 1
        node.meta[STRETCH] = stretch


def copy_stretches(source: torch.fx.Graph, target: torch.fx.Graph) -> None:
    """Number the stretches of ``target`` as those of ``source``, which has the same nodes."""
    for old, new in zip(source.nodes, target.nodes, strict=True):
        if STRETCH in old.meta:
            new.meta[STRETCH] = old.meta[STRETCH]


def _repeated(graph: CapturedGraph) -> list[_Call]:
    """Return calls of repeated modules that do not overlap, those that save most first."""
    groups: dict[Any, list[_Call]] = defaultdict(list)
    operations = [_operation(graph, node) for node in graph.nodes]
    for call in _calls(graph):
        signature = tuple(operation for operation in operations[call.start : call.stop] if operation is not None)
        if len(signature) >= _FEWEST_OPERATIONS:
            groups[call.parent, signature].append(call)
    chosen: list[_Call] = []
    saved = {key: len(key[1]) * (len(calls) - 1) for key, calls in groups.items()}
    for key in sorted(groups, key=lambda key: -saved[key]):
        apart = (call.stop <= other.start or other.stop <= call.start for call in groups[key] for other in chosen)
        if saved[key] and all(apart):
            chosen += groups[key]
    return chosen


def _operation(graph: CapturedGraph, node: torch.fx.Node) -> Any:
    """Return what a node does, for comparison; ``None`` if it does nothing."""
    passive = node in graph.tap_number or node in graph.tapped or node in graph.identities
    return None if passive or node.op in ("placeholder", "output") else (node.op, node.target)


def _calls(graph: CapturedGraph) -> list[_Call]:
    """Return the calls of modules whose input and output taps are both in the graph."""
    calls: list[_Call] = []
    pending: list[tuple[str, int]] = []
    for tap in graph.taps:
        path, _, kind = tap.location.rpartition(".")
        if ".source." in tap.location:
            continue
        if kind == "input":
            pending.append((path, graph.order[tap.node]))
        elif kind == "output" and any(path == other for other, _ in pending):
            while pending[-1][0] != path:
                pending.pop()
            calls.append(_Call(path.rpartition(".")[0], pending.pop()[1], graph.order[tap.node]))
    return calls
