"""Whether a tensor requires a gradient, before the graph has run.

Fake tensors do not carry this flag here, because programs that edit a value in different ways share its fake. The flag of a new value
follows from its call, when the call is recorded. The flag of a value of the model is the one that dynamo saw. Three things may change a
flag later: an edit in place, which affects all views of the memory; a replacement at a location, because the model continues with
another tensor; and an edit by the model, because the fakes of a captured graph have the state at the end of the graph.

After such a change, the answer for a tensor without the flag is ``None``: it is not known before the graph has run. A block that asks
for it cuts the graph.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from ..block_events import Input, Reference, ValueNumber

if TYPE_CHECKING:
    from .events import EventRecorder
    from .recording import Recording

#: Prefixes and suffixes of the names of calls whose results never require a gradient.
_DETACHING = ("detach", "_like", "new_")


def is_detaching(name: str) -> bool:
    """Whether the results of a call of this name require no gradient, whatever its arguments are."""
    return name.endswith(_DETACHING) or name.startswith(_DETACHING)


def any_of(answers: Iterable[bool | None]) -> bool | None:
    """Return the three-valued ``any``: ``True`` if one answer is ``True``, else ``None`` if one is unknown, else ``False``."""
    found = list(answers)
    return True if True in found else None if None in found else False


def wants_grad(recorder: EventRecorder, item: Reference | torch.Tensor) -> bool | None:
    """Whether a tensor requires a gradient at the present event of the program; ``None`` if that is not known."""
    wants: bool | None
    with torch._C.DisableTorchFunction():  # the recording must not intercept its own reads
        if isinstance(item, ValueNumber):
            tensor, wants, is_unsure = recorder.fakes[item.index], recorder.requires_grad[item.index], recorder.gained_grad
        else:
            inputs = recorder.inputs if isinstance(item, Input) else recorder.externals
            tensor = item if isinstance(item, torch.Tensor) else inputs[item.index]
            wants, is_unsure = tensor.requires_grad, recorder.gained_grad or bool(recorder.graph.edited_groups)
        is_unsure = is_unsure and recorder.grad_enabled and _is_differentiable(tensor)
    return wants if wants or not is_unsure else None


def _is_differentiable(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def wanting_at(recording: Recording, node: torch.fx.Node) -> bool | None:
    """Whether a value of the model requires a gradient at the current tap; ``None`` if that is not known."""
    graph, example = recording.graph, node.meta["example_value"]
    wants: bool = example.requires_grad
    if not recording.grad_enabled or not _is_differentiable(example):
        return wants
    # The fake of a value that the model edits shows whether it requires a gradient at the end of the graph, not at this tap.
    is_unsure = (wants and graph.memory.group(node) in graph.edited_groups) or _differs_from_capture(recording)
    return None if is_unsure else wants


def _differs_from_capture(recording: Recording) -> bool:
    """Whether the model continues with a tensor whose ``requires_grad`` differs from the one that dynamo saw."""
    taps = recording.graph.taps
    replaced: list[tuple[torch.fx.Node, Any]] = [
        *((taps[number].leaves[leaf], source) for (number, leaf), source in recording.writes.items()),
        *recording.substitutes.items(),
        *((node, ValueNumber(index)) for node, index in recording.value_of.items()),
        *((node, Input(index)) for node, index in recording.piece.input_index.items()),
    ]
    return any(
        isinstance(example := node.meta.get("example_value"), torch.Tensor)
        and wants_grad(recording, source) is not example.requires_grad
        for node, source in replaced
    )
