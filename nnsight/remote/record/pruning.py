"""What of a recorded block has to be sent: the nodes that have an effect, or that a saved value needs."""

from __future__ import annotations

from typing import Any

import torch

from ..run.interpreter import references_of
from ..wire.nodes import Node
from ..wire.operators import is_in_place
from ..wire.payload import Job
from ..wire.trees import references

#: Kinds of nodes that are needed for what they do.
_EFFECTS = frozenset({"write", "skip", "barrier", "stop", "log", "size"})


def pruned(
    runs: list[dict[str, Any]],
    nodes: list[Node],
    roots: list[int],
    trees: dict[str, Any],
    tensors: dict[str, torch.Tensor],
) -> tuple[Job, dict[int, int]]:
    """Return a job without the nodes that nobody needs, and the new number of each node that is left.

    A node is needed if it has an effect on the run, if a needed one uses it, or if it edits memory that a needed one uses. A backward
    pass has no effect but what is read in it; one that is needed needs its end, and whatever changes gradients on their way.
    """
    passes = _passes(nodes, roots)
    edits: dict[int, list[int]] = {}
    for number, node in enumerate(nodes):
        if node["do"] == "op" and is_in_place(node["name"]):
            edits.setdefault(roots[number], []).append(number)
    needed: set[int] = set()
    pending = [number for number, node in enumerate(nodes) if node["do"] in _EFFECTS]
    pending += [number for tree in trees.values() for number, _ in references(tree)]
    while pending:
        number = pending.pop()
        if number in needed:
            continue
        needed.add(number)
        pending += references_of(nodes[number])
        pending += edits.get(roots[number], [])
        pending += passes.get(number, [])
    numbers = {old: new for new, old in enumerate(sorted(needed))}
    kept = [
        _renumbered({key: value for key, value in nodes[old].items() if key != "shares"}, numbers)
        for old in sorted(needed)
    ]
    used = {node["tensor"] for node in kept if node["do"] == "const"}
    job = Job(runs, kept, {name: _renumbered(tree, numbers) for name, tree in trees.items()}, {})
    job.tensors = {name: tensor for name, tensor in tensors.items() if name.startswith("i") or name in used}
    return job, numbers


def _passes(nodes: list[Node], roots: list[int]) -> dict[int, list[int]]:
    """Return what each node needs because of backward passes: those in one the pass, and it all that changes gradients."""
    found: dict[int, list[int]] = {}
    requiring: list[int] = []
    begun: dict[tuple[int, int], int] = {}
    for number, node in enumerate(nodes):
        block = node["run"], node["block"]
        if node["do"] == "requires_grad":
            requiring.append(number)
        elif node["do"] == "backward":
            begun[block] = number
            found[number] = list(requiring)
        elif block in begun:
            first = begun[block]
            found[number] = [first]
            edits = node["do"] == "op" and is_in_place(node["name"]) and nodes[roots[number]]["do"] == "grad"
            if edits or node["do"] in ("set_grad", "end"):
                found[first].append(number)
            if node["do"] == "end":
                del begun[block]
    return found


def _renumbered(value: Any, numbers: dict[int, int]) -> Any:
    if type(value) is list:
        return [_renumbered(item, numbers) for item in value]
    if type(value) is not dict:
        return value
    if type(ref := value.get("ref")) is list and len(value) == 1:
        return {"ref": [numbers[ref[0]], ref[1]]}
    return {key: _renumbered(item, numbers) for key, item in value.items()}
