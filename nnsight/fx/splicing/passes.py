"""Passes: rewrites of a spliced graph before it is lowered.

Splicing writes a block as it is, with values that are read but not used. :data:`PASSES` is the list of passes, in order. Each changes a
graph module in place, and ends with ``graph.lint()`` and ``recompile()``. The backend removes repeated calls and needless copies.

No pass changes a result, bit for bit (see :mod:`~nnsight.fx.effects`):

* A call is removed only if it is known to do nothing but return a value. In-place edits, draws of random numbers, assertions,
  switches of the grad mode and operators of other libraries stay, and so does every input, used or not.
* A call that may fail because of values, such as an index out of range, also stays: the error is a result, too.

Splicing copies no taps, so no pass has to remove them. ``TORCH_LOGS="+nnsight"`` shows each pass with the number of nodes before and after,
and the graph where it changed.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..effects import Kind, edited, kind_of, may_fail

logger = logging.getLogger("nnsight.fx.splicing.passes")

Pass = Callable[[torch.fx.GraphModule], torch.fx.GraphModule]


def drop_unused_calls(graph_module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Remove the calls that have no effect and cannot fail, and whose value is not used.

    A block may read a value without using it. The model may compute arguments of a skipped module, or values after the last one that a
    stopped run needs. ``Graph.eliminate_dead_code`` assumes that all methods are pure, so it would also remove in-place ones.
    """
    removed = 0
    for node in reversed(graph_module.graph.nodes):
        if not node.users and kind_of(node) in (Kind.READ, Kind.VIEW, Kind.NEW) and not may_fail(node):
            graph_module.graph.erase_node(node)
            removed += 1
    return _finished(graph_module, removed)


#: All passes, in order.
PASSES: tuple[Pass, ...] = (drop_unused_calls,)


class PassRun(NamedTuple):
    """The name of a pass, and the number of nodes before and after it."""

    name: str
    before: int
    after: int


def copy_edited_values(graph_module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Apply each in-place edit of a computed value to a copy, which later calls use. Calls before the last edit take other copies.

    The backward passes of attention and ReLU need the unedited results, and that of a matrix product its unedited arguments. Ahead-of-time
    autograd traces the backward pass even if it will not run, and fails on a graph that edits such a value. Only such graphs get this pass.
    """
    graph = graph_module.graph
    position = {node: index for index, node in enumerate(graph.nodes)}
    last: dict[torch.fx.Node, int] = {}  # position of the last edit of each edited value
    for node, index in position.items():
        source = edited(node)
        if source is not None and (base := base_of(source)).op not in ("placeholder", "get_attr"):
            last[base] = index
    for node, index in position.items():
        read = [given for given in node.all_input_nodes if index < last.get(base_of(given), -1)] if _is_new(node) else []
        for given in read:
            with graph.inserting_before(node):
                node.replace_input_with(given, _cloned(graph, given))
    for base in last:
        with graph.inserting_after(base):
            copied = _cloned(graph, base)
        base.replace_all_uses_with(copied)
        copied.args = (base,)
    return _finished(graph_module, len(last))


def base_of(node: torch.fx.Node) -> torch.fx.Node:
    """Return the node that computed the tensor of which ``node`` is an edit or a view, or ``node`` itself."""
    source: torch.fx.Node | None = node
    while source is not None:
        node, source = source, edited(source) or _viewed(source)
    return node


def _cloned(graph: torch.fx.Graph, node: torch.fx.Node, at: torch.fx.Node | None = None) -> torch.fx.Node:
    """Return a new node that clones the value of ``node``. It belongs to the place of ``at``, by default that of ``node``."""
    copied = graph.call_method("clone", (node,))
    copied.meta = {**(at or node).meta, **{key: node.meta.get(key) for key in ("example_value", _FAKE)}}
    return copied


_library = torch.library.Library("nnsight", "FRAGMENT")
_library.define("kept_for_backward(Tensor tensor) -> Tensor")
_library.impl("kept_for_backward", torch.Tensor.clone, "CompositeExplicitAutograd")
torch.library.register_fake("nnsight::kept_for_backward", torch.empty_like, lib=_library)
torch.library.register_autograd("nnsight::kept_for_backward", lambda _, gradient: gradient, lib=_library)


def copy_for_backward(graph_module: torch.fx.GraphModule, places: Sequence[tuple[torch.fx.Node, torch.fx.Node]]) -> torch.fx.GraphModule:
    """Replace an argument by a copy in some calls; ``places`` are pairs ``(call, argument)``. An edit of the copy is written back.

    Ahead-of-time autograd may keep an input for the backward pass and compute a value from it again. It assumes that the input was not
    edited, even if the graph edits it. But it keeps the result of an operator that it does not know, such as this copy.
    """
    graph = graph_module.graph
    for node, source in places:
        with graph.inserting_before(node):
            copied = graph.call_function(torch.ops.nnsight.kept_for_backward.default, (source,))
        copied.meta = {**node.meta, "example_value": source.meta.get("example_value")}
        if edited(node) is source:
            with graph.inserting_after(node):
                written = graph.call_method("copy_", (source, copied))
            written.meta = dict(node.meta)
            node.replace_all_uses_with(written)
            written.args = (source, copied)
        node.replace_input_with(source, copied)
    return _finished(graph_module, len(places))


#: The key in ``node.meta`` of the value of a node in a run of the whole graph on fakes. Captured nodes and those of blocks have their
#: ``example_value`` from different runs, if they have one, so its memory does not show whether they share memory.
_FAKE = "nnsight_fake"

#: For each in-place call, a call that computes the same value as a new tensor.
_OUT_OF_PLACE: dict[Any, Any] = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
    "add_": "add",
    "sub_": "sub",
    "mul_": "mul",
    "div_": "div",
}


def edit_copies(graph_module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Apply in-place edits to copies, which all later calls use, if a result of the graph is computed before the edit.

    A graph cannot be cut between a tensor and an edit of it. This pass is for graphs that are cut for gradients. An edit stays if an alias
    that is used later cannot be computed again from the copy.
    """
    graph, copied = graph_module.graph, 0
    unfollowed = _without_gradients(graph)
    for node in [node for node in graph.nodes if node not in unfollowed and edited(node) is not None]:
        source = edited(node)
        assert source is not None
        order = {other: number for number, other in enumerate(graph.nodes)}
        base, number = base_of(source), order[node]
        made_before = any(order[base] <= order[result] < number for result in graph.output_node().all_input_nodes)
        if base.op in ("placeholder", "get_attr") or not made_before:
            continue
        used = [other for other, place in order.items() if place < number and any(order[user] >= number for user in other.users)]
        aliases = [other for other in used if base_of(other) is base]
        if any(_share(_example(other), _example(base)) for other in used if other not in aliases):
            continue
        with graph.inserting_before(node):
            again: dict[torch.fx.Node, torch.fx.Node] = {base: _cloned(graph, base, node)}
            for alias in aliases:
                new = _again(graph, alias, again)
                for user in [user for user in alias.users if order.get(user, -1) >= number]:
                    user.replace_input_with(alias, new)
        copied += 1
    return _finished(graph_module, copied)


def _again(graph: torch.fx.Graph, alias: torch.fx.Node, again: dict[torch.fx.Node, torch.fx.Node]) -> torch.fx.Node:
    """Return ``alias`` computed again from the copy of its base; ``again`` has the nodes for which that is done."""
    if alias not in again:
        source = edited(alias)  # an edit returns the tensor itself
        viewed = source or _viewed(alias)
        assert viewed is not None
        new = _again(graph, viewed, again)
        again[alias] = new if source is not None else graph.node_copy(alias, lambda given: new if given is viewed else given)
    return again[alias]


def _without_gradients(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """Return the nodes of ``graph`` under ``torch.no_grad()``. An edit there keeps the tensor's gradient; a copy would have none."""
    found, enabled = set[torch.fx.Node](), True
    for node in graph.nodes:
        if node.target is torch._C._set_grad_enabled:
            enabled = bool(node.args[0])
        elif not enabled:
            found.add(node)
    return found


def _example(node: torch.fx.Node) -> Any:
    """Return a fake of the value of ``node``, ``None`` if none is known."""
    found = node.meta.get(_FAKE)
    return node.meta.get("example_value") if found is None else found


def replace_unseen_edits(graph_module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Replace in-place edits of values that nothing else uses by out-of-place calls, as the edit in ``x = f(x); x += g(y)``.

    A graph cannot be cut between a tensor and an edit of it. This pass is for graphs that are cut for gradients.
    """
    replaced, unfollowed = 0, _without_gradients(graph_module.graph)
    for node in graph_module.graph.nodes:
        new = _OUT_OF_PLACE.get(node.target) if node.op in ("call_function", "call_method") and node not in unfollowed else None
        source = None if new is None else edited(node)
        if source is None or set(source.users) != {node} or not _is_new(source):
            continue
        operands: list[Any] = [one.meta.get("example_value") if isinstance(one, torch.fx.Node) else one for one in node.args]
        is_plain = len(operands) == 2 and isinstance(operands[0], torch.Tensor) and not node.kwargs
        if is_plain and isinstance(operands[1], (torch.Tensor, int, float)) and torch.result_type(*operands) == operands[0].dtype:
            node.target = new
            replaced += 1
    return _finished(graph_module, replaced)


def make_cuttable(graph_module: torch.fx.GraphModule, fakes: Mapping[str, Any]) -> torch.fx.GraphModule:
    """Rewrite the in-place edits of a graph that is cut for gradients, so that a border can stand before them.

    ``fakes`` has the value of each node, by name, in one run of the graph on fakes. Their memory shows what is a view: ``hidden[:, 0]`` is
    computed again from a copy of ``hidden``, but a result with memory of its own, such as ``hidden[:, index]``, is not.
    """
    replace_unseen_edits(graph_module)
    for node in graph_module.graph.nodes:
        node.meta[_FAKE] = fakes.get(node.name)
    edit_copies(graph_module)
    for node in graph_module.graph.nodes:
        node.meta.pop(_FAKE, None)
    return graph_module


def run_passes(graph_module: torch.fx.GraphModule) -> tuple[torch.fx.GraphModule, tuple[PassRun, ...]]:
    """Run all passes on ``graph_module``. Returns the result, and a record of each pass."""
    runs = []
    for function in PASSES:
        before = len(graph_module.graph.nodes)
        graph_module = function(graph_module)
        after = len(graph_module.graph.nodes)
        runs.append(PassRun(function.__name__, before, after))
        if logger.isEnabledFor(logging.DEBUG):
            code = f"\n{graph_module.code.strip()}" if after != before else ""
            logger.debug("pass %s: %d nodes before, %d after%s", function.__name__, before, after, code)
    return graph_module, tuple(runs)


def _finished(graph_module: torch.fx.GraphModule, changes: int) -> torch.fx.GraphModule:
    if changes:
        graph_module.graph.lint()
        graph_module.recompile()
    return graph_module


def _viewed(node: torch.fx.Node) -> torch.fx.Node | None:
    """Return the argument of which ``node`` is, or may be, a view; ``None`` if there is none."""
    if kind_of(node) not in (Kind.VIEW, Kind.READ) or not node.all_input_nodes:
        return None
    source = node.all_input_nodes[0]
    one, other = _example(node), _example(source)
    if isinstance(other, (tuple, list)):  # an item of several results: items of `chunk` are views, those of `topk` are not
        return next((given for given in source.all_input_nodes if _share(one, _example(given))), None)
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return source if _share(one, other) else None
    return source


def _is_new(node: torch.fx.Node) -> bool:
    """Whether the result of ``node`` is new memory. Its operator shows it, or, for a function of torch, the fakes."""
    if kind_of(node) is Kind.NEW:
        return True
    found, *given = (one.meta.get("example_value") for one in (node, *node.all_input_nodes))
    of_torch = (getattr(node.target, "__module__", None) or "").partition(".")[0] == "torch"
    if edited(node) is not None or not of_torch or not isinstance(found, torch.Tensor):
        return False
    return all(isinstance(one, torch.Tensor) and not _share(found, one) for one in given)


def _share(one: Any, other: Any) -> bool:
    """Whether both are tensors with the same storage."""
    if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
        return False
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata
