"""Saved values of bound programs: what a call can return, in memory that later calls do not use."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .format.errors import NotExpressibleError
from .format.nodes import Node
from .format.operators import is_view
from .format.payload import Job
from .format.trees import NONE, leaves, references, with_references


def check_saves(job: Job) -> None:
    """Raise a :class:`NotExpressibleError` if a saved list, tuple or dict contains an object that a program does not have."""
    for name, tree in job.saves.items():
        for kind, content in leaves(tree) if not isinstance(tree, dict) or "absent" not in tree else ():
            if kind == "absent" and content != NONE:
                raise NotExpressibleError(
                    f"`{name}` contains a {content}, which a program cannot contain, so a call would return `{name}` without it. Save "
                    "tensors, numbers and short texts, and add other objects afterwards."
                )


def with_own_results(job: Job) -> Job:
    """Return ``job`` with copies of saved constants, and of saved views of constants: an edit of a result must not change them."""
    lent: list[bool] = []  # whether the result of each node is in the memory of a constant
    for node in job.nodes:
        views = node["do"] == "op" and is_view(node["name"]) and not node.get("copy")
        viewed = next(references(node["args"][:1]), None) if views else None
        lent.append(node["do"] == "const" or (viewed is not None and lent[viewed[0]]))
    shared = sorted({reference for reference in references(job.saves) if lent[reference[0]]})
    if not shared:
        return job
    nodes: list[Node] = []
    moved: dict[int, int] = {}
    copies: dict[tuple[int, int], Any] = {}
    for number, node in enumerate(job.nodes):
        moved[number] = len(nodes)
        nodes.append(with_references(node, lambda used, output: {"ref": [moved[used], output]}))
        for reference in [reference for reference in shared if reference[0] == number]:
            copies[reference] = {"ref": [len(nodes), 0]}
            place: Node = {key: node[key] for key in ("run", "block", "line") if key in node}
            nodes.append({"do": "op", **place, "name": "aten.clone.default", "args": [{"ref": [moved[number], reference[1]]}]})
    saves = with_references(job.saves, lambda used, output: copies.get((used, output), {"ref": [moved[used], output]}))
    return replace(job, nodes=nodes, saves=saves)
