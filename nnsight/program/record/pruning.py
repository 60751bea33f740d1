"""Dead code elimination for programs: removes nodes that have no effect and that no saved value needs."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import torch

from ..format.nodes import Node
from ..format.operators import is_in_place
from ..format.payload import Job
from ..format.trees import references, tensor_names, with_references

#: Kinds of nodes that are needed for their effect.
_EFFECTS = frozenset({"write", "skip", "barrier", "stop", "log", "size"})


def pruned(
    runs: list[dict[str, Any]],
    nodes: list[Node],
    roots: list[int],
    trees: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    forced: Set[int] = frozenset(),
    printed: Set[int] = frozenset(),
) -> tuple[Job, dict[int, int]]:
    """Return a job with the needed nodes, and the new number of each of them.

    A node is needed if it has an effect on the run, if a needed node or a saved value uses it, or if it edits memory that a needed node
    uses. A backward pass is needed if a gradient that is read in it is needed. Then its end and all nodes that change gradients are needed.
    A size that the rows of an invoke depend on is needed if its tensor is. ``forced`` nodes are needed, and ``log`` nodes in ``printed``
    are not. ``roots`` has the node that made the memory of each result.
    """
    passes, waits = _passes(nodes, roots), _waits(nodes, roots)
    edits: dict[int, list[int]] = {}
    for number, node in enumerate(nodes):
        if node["do"] == "op" and is_in_place(node["name"]):
            edits.setdefault(roots[number], []).append(number)
    needed: set[int] = set()
    of_rows = [number for number, node in enumerate(nodes) if "rows" in node]
    pending = [number for number, node in enumerate(nodes) if node["do"] in _EFFECTS and "rows" not in node and number not in printed]
    pending += forced
    pending += [number for number, _ in references(trees)]
    while pending:
        number = pending.pop()
        if number in needed:
            continue
        needed.add(number)
        pending += [used for used, _ in references(nodes[number])]
        pending += edits.get(roots[number], [])
        pending += waits.get(number, [])
        pending += passes.get(number, [])
    needed |= {number for number in of_rows if needed.issuperset(used for used, _ in references(nodes[number]))}
    numbers = {old: new for new, old in enumerate(sorted(needed))}
    kept = [{key: value for key, value in nodes[old].items() if key not in ("shares", "rows")} for old in sorted(needed)]
    kept, saves = with_references([kept, trees], lambda node, output: {"ref": [numbers[node], output]})
    used = {node["tensor"] for node in kept if node["do"] == "const"}
    used |= {name for run in runs for part in (run["args"], run["kwargs"]) for name in tensor_names(part)}
    constants = {name: tensor for name, tensor in tensors.items() if name in used}
    return Job(runs, kept, saves, constants), numbers


def _waits(nodes: list[Node], roots: list[int]) -> dict[int, list[int]]:
    """Return, for each node whose time in the run matters, the latest ``read`` before it. The block must wait there before the node runs.

    Such nodes are ``stop``, ``barrier``, in-place edits of memory that the block gave to the model, and uses of values of other blocks or
    of earlier locations. The model, or another block, may have edited these values in place since.
    """
    given: set[int] = set()
    latest: dict[tuple[int, int], int] = {}
    found: dict[int, list[int]] = {}
    for number, node in enumerate(nodes):
        block = node["run"], node["block"]
        if node["do"] in ("skip", "write") and not node.get("in_place"):
            given |= {roots[used] for used, _ in references(node["value"])}
        elif node["do"] == "read":
            latest[block] = number
        elif block in latest:
            edits = node["do"] == "op" and roots[number] in given and is_in_place(node["name"])
            used = [nodes[roots[other]] for other, _ in references(node)] if node["do"] != "size" else []
            if edits or node["do"] in ("stop", "barrier") or any(_may_change(root, nodes[latest[block]]) for root in used):
                found[number] = [latest[block]]
    return found


def _may_change(root: Node, last: Node) -> bool:
    """Whether memory may change before its block gets to ``last``, its latest ``read``. ``root`` is the node that made the memory."""
    if (root["run"], root["block"]) != (last["run"], last["block"]):
        return True
    return root["do"] == "read" and (root["site"], root["at"]) != (last["site"], last["at"])


def _passes(nodes: list[Node], roots: list[int]) -> dict[int, list[int]]:
    """Return further nodes that a node needs: a node in a backward pass needs the pass, and a pass the nodes that change gradients."""
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
