"""What autograd knows of a tensor, asked for before the graph has run.

Fakes carry no gradients: they are shared by programs that edit them in different ways. Whether a new value requires a gradient is
worked out when its call is recorded, and whether a value of the model does, dynamo has seen. Three things may change that: an edit in
place, which reaches all views of the memory; a replacement at a location, behind which the model goes on with another tensor; and an
edit by the model, because the fakes of a captured graph are as they were at its end.

Behind one of these, the answer is ``None`` for each tensor that required no gradient before: not known before the graph has run. A
block that asks for it cuts the graph.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from ..block_events import Input, Reference, ValueNumber

if TYPE_CHECKING:
    from .events import EventRecorder
    from .recording import Recording

#: How the names of calls end or begin whose results require no gradient, whatever they are given.
_APART = ("detach", "_like", "new_")


def is_apart(name: str) -> bool:
    """Whether the results of a call of this name require no gradient, whatever it is given."""
    return name.endswith(_APART) or name.startswith(_APART)


def some(answers: Iterable[bool | None]) -> bool | None:
    """Whether one of the answers is yes, if that is known."""
    found = list(answers)
    return True if True in found else None if None in found else False


def wants_grad(recorder: EventRecorder, item: Reference | torch.Tensor) -> bool | None:
    """Whether a tensor requires a gradient where the program is; ``None`` if that is not known."""
    wants: bool | None
    with torch._C.DisableTorchFunction():  # the recording is not asked what it is asking
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
    """Whether a value of the model requires a gradient at the tap where the recording stands."""
    graph, example = recording.graph, node.meta["example_value"]
    wants: bool = example.requires_grad
    if not recording.grad_enabled or not _is_differentiable(example):
        return wants
    # At the end it did, if the model edits it; whether it did before is not known.
    is_unsure = (wants and graph.memory.group(node) in graph.edited_groups) or _goes_on_otherwise(recording)
    return None if is_unsure else wants


def _goes_on_otherwise(recording: Recording) -> bool:
    """Whether the model has gone on with a tensor that requires a gradient where dynamo saw none, or the other way round."""
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
