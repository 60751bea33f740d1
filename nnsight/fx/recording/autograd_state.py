"""What autograd knows of a tensor, asked for before the graph has run.

Fakes carry no gradients: they are shared by programs that edit them in different ways. Whether a new value requires a gradient is
worked out when its call is recorded. Three things may change that later, or make it differ from what dynamo saw of the model:

* An edit in place, for more tensors than the one that is named: for the tensor of which it is a view, and for all other views of
  it, but not for what was detached. A tensor from outside still has what it had before such an edit, which has not been made yet.
  So the edits of a program are followed (:class:`Followed`).
* A replacement at a location: the model goes on with a tensor that requires a gradient where it had none, or the other way round.
* An edit by the model: the fakes of a captured graph are as they were at its end.

Behind the last two, a walk through the captured graph tells (:func:`wanting_at`). Where it cannot, the answer is ``None``: not
known before the graph has run up to there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ..effects import Kind, all_edited, kind_of, written
from ..program import Call, Cut, External, Input, Outcome, Reference, Results, State, Value
from ..splicing.nodes import references
from .functions import edits_in_place

if TYPE_CHECKING:
    from ..capturing.graph import CapturedGraph
    from .events import EventRecorder
    from .recording import Recording

#: How the names of calls end or begin whose results require no gradient, whatever they are given.
_APART = ("detach", "_like", "new_")


def is_apart(name: str) -> bool:
    """Whether the results of a call of this name require no gradient, whatever it is given."""
    return name.endswith(_APART) or name.startswith(_APART)


@dataclass
class Followed:
    """What is known of the views in a piece of a program, up to ``state``.

    Attributes:
        state: The latest state that was looked at.
        roots: For values that are views, what they are views of; see :func:`_root`.
        gained: Roots that autograd has another function for because of an edit, and whether they require gradients now.
    """

    state: State | None = None
    roots: dict[int, Any] = field(default_factory=dict)
    gained: dict[Any, bool | None] = field(default_factory=dict)


def wants_grad(recorder: EventRecorder, item: Reference | torch.Tensor) -> bool | None:
    """Whether a tensor requires a gradient where the program is; ``None`` if that is not known."""
    wants: bool | None
    if isinstance(item, Value):
        wants = recorder.requires_grad[item.index]
    else:
        with torch._C.DisableTorchFunction():  # the recording is not asked what it is asking
            wants = _real(recorder, item).requires_grad
    if wants or not recorder.grad_enabled:
        return wants
    if recorder.graph.edited_groups and not isinstance(item, Value) and _may_gain_from_model(recorder, item):
        return None
    gained = _follow(recorder).gained
    return some([wants, gained.get(_root(recorder, item), False)]) if gained else wants


def _may_gain_from_model(recorder: EventRecorder, item: Input | External | torch.Tensor) -> bool:
    """Whether the model may edit the memory of an input since the piece began, so that a tensor there requires a gradient."""
    graph = recorder.graph
    with torch._C.DisableTorchFunction():
        memory = _memory(_real(recorder, item))
        nodes = [node for node, index in recorder.piece.input_index.items() if _memory(recorder.inputs[index]) == memory]
    # Whether dynamo saw a gradient there does not matter: the block may have made trainable what the model edits it with.
    return any(graph.memory.group(node) in graph.edited_groups for node in nodes)


def _memory(item: Any) -> int | None:
    return item.untyped_storage()._cdata if isinstance(item, torch.Tensor) else None


def some(answers: Iterable[bool | None]) -> bool | None:
    """Whether one of the answers is yes, if that is known."""
    found = list(answers)
    return True if True in found else None if None in found else False


def is_edited(recorder: EventRecorder, tensor: torch.Tensor) -> bool:
    """Whether autograd has another function for a tensor from outside than it had when the piece began."""
    return _root(recorder, tensor) in _follow(recorder).gained


def _real(recorder: EventRecorder, item: Input | External | torch.Tensor) -> torch.Tensor:
    if isinstance(item, torch.Tensor):
        return item
    found: torch.Tensor = (recorder.inputs if isinstance(item, Input) else recorder.externals)[item.index]
    return found


def _root(recorder: EventRecorder, item: Reference | torch.Tensor) -> Any:
    """Return what is equal for tensors that autograd knows as views of one."""
    if isinstance(item, Value):
        return _follow(recorder).roots.get(item.index, item.index)
    with torch._C.DisableTorchFunction():
        tensor = _real(recorder, item)
        base = tensor._base
    return "outside", id(tensor if base is None else base)


def _follow(recorder: EventRecorder) -> Followed:
    """Bring up to date what is known of the views; return it."""
    followed = recorder.followed
    if followed.state is recorder.state:
        return followed
    pending: list[tuple[Call, Outcome]] = []
    state: State | None = recorder.state
    results: Results | None = None
    while state is not None and state is not followed.state and state.event is not None and not isinstance(state.event, Cut):
        if isinstance(state.event, Call):
            outcome = next(found for found in state.outcomes.values() if results in (None, found.results))
            pending.append((state.event, outcome))
        results = state.event if isinstance(state.event, Results) else None
        state = state.parent
    if state is not followed.state:  # a piece began, or the recorder went back
        followed.roots, followed.gained = {}, {}
    followed.state = recorder.state
    with torch._C.DisableTorchFunction():
        for event, outcome in reversed(pending):
            _take(recorder, followed, event, outcome)
    return followed


def _take(recorder: EventRecorder, followed: Followed, event: Call, outcome: Outcome) -> None:
    used = references(event)
    if not used:
        return
    first = event.args[0] if event.args and event.args[0] in used else used[-1]
    root, edits = _root(recorder, first), edits_in_place(event.function)
    for leaf in outcome.leaves:
        if isinstance(leaf, int) and leaf != root and (edits or recorder.fakes[leaf]._is_view()):
            followed.roots.setdefault(leaf, root)
    if edits and outcome.gains_grad is not False:
        followed.gained[root] = some([outcome.gains_grad, followed.gained.get(root, False)])


def wanting_at(recording: Recording, node: torch.fx.Node) -> bool | None:
    """Whether a value of the model requires a gradient at the tap where the recording stands."""
    graph = recording.graph
    example: bool = node.meta["example_value"].requires_grad
    if not recording.grad_enabled:
        return example
    changed = _changed(recording)
    if not changed and graph.memory.group(node) not in graph.edited_groups:
        return example
    affected, is_sure = _affected(graph, changed), True
    seen: set[Any] = set()
    pending = [node]
    while pending:
        item: Any = pending.pop()
        item = item if item is node else recording.resolve(item)
        if item in seen:
            continue
        seen.add(item)
        if not isinstance(item, torch.fx.Node):
            if isinstance(item, Input) and not isinstance(recording.inputs[item.index], torch.Tensor):
                continue  # a symbolic size
            wants = wants_grad(recording, item)
            if wants:
                return True
            is_sure = is_sure and wants is False
            continue
        value = item.meta.get("example_value")
        is_edited = graph.memory.group(item) in graph.edited_groups
        if isinstance(value, torch.Tensor):
            if not (value.is_floating_point() or value.is_complex()):
                continue
            if item not in affected and (not is_edited or not value.requires_grad):
                if value.requires_grad:
                    return True
                continue
        elif item.op == "placeholder" or isinstance(value, (int, float, torch.SymInt, torch.SymFloat)):
            continue
        is_unknown = kind_of(item) is Kind.EFFECT
        is_sure = is_sure and not (is_edited or is_unknown or graph.switches_grad)
        name = item.target if isinstance(item.target, str) else getattr(item.target, "__name__", "")
        if not (is_apart(name) or graph.switches_grad or (is_unknown and not all_edited(item))):
            pending += item.all_input_nodes
    return False if is_sure else None


def _changed(recording: Recording) -> list[torch.fx.Node]:
    """Return nodes of the model that require gradients where dynamo saw that they do not, or the other way round, by the block."""
    found: list[torch.fx.Node] = []
    for (number, leaf), source in recording.writes.items():
        tap = recording.graph.taps[number]
        if wants_grad(recording, source) is not tap.leaves[leaf].meta["example_value"].requires_grad:
            found += tap.outputs.get(leaf, ())
    for node, source in recording.substitutes.items():
        if wants_grad(recording, source) is not node.meta["example_value"].requires_grad:
            found.append(node)
    for node, index in recording.value_of.items():
        if wants_grad(recording, Value(index)) is not node.meta["example_value"].requires_grad:
            found.append(node)
    for node, index in recording.piece.input_index.items():
        example = node.meta.get("example_value")
        if isinstance(example, torch.Tensor) and wants_grad(recording, Input(index)) is not example.requires_grad:
            found.append(node)
    return found


def _affected(graph: CapturedGraph, changed: list[torch.fx.Node]) -> set[torch.fx.Node]:
    """Return the nodes whose values may depend on those of ``changed``."""
    affected: set[torch.fx.Node] = set()
    pending = list(changed)
    while pending:
        node = pending.pop()
        if node in affected:
            continue
        affected.add(node)
        pending += node.users
        if kind_of(node) is Kind.EFFECT and node.op not in ("placeholder", "output") and node not in graph.tap_number:
            for source in written(node):
                pending += graph.memory.sharing(source)
    return affected
