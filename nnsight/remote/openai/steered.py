"""The served model with its edits, and with separate steering for each row of a batch.

Directions are parameters of an edit, ``[rows, layers, hidden]``: each row of a batch has its own. The edit is the same in each call, so a
compiled model does not run its Python, and new directions compile nothing. A layer that was steered once stays in the edit, with zeros for
the rows that do not steer it. So there are few variants of the model, whatever the requests ask for.

An edit of the served model that is not a loop over the steps of a generation applies only to the first call, which computes the prompt.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

import torch

from ...modeling.language import LanguageModel
from ...runtime.editing import Edit
from ...steering.layers import hidden_of, read, with_hidden, write
from .completions import Completion


class SteeredModel:
    """A copy of ``model`` that adds a vector to ``rows`` rows at ``layers``, and removes up to ``rank`` directions. All are zero at first.

    ``at`` is the path of the layers.
    """

    def __init__(self, model: LanguageModel, at: str, layers: Sequence[int], rows: int, rank: int) -> None:
        config: Any = model._module.config
        hidden = config.get_text_config().hidden_size
        like = next(iter(model._module.parameters()))
        self.layers = layers
        self._set_for: list[Completion | None] = []
        self.add = add = torch.zeros(rows, len(layers), hidden, dtype=like.dtype, device=like.device)
        self.remove = remove = torch.zeros(rows, len(layers), rank, hidden, dtype=like.dtype, device=like.device)
        self.first = first = torch.zeros(rows, 1, 1, dtype=torch.int64, device=like.device)  # first position in a call that is steered
        paths = [f"{at}.{layer}" for layer in layers]
        with model.edit() as edited:
            for number, path in enumerate(paths):
                layer = edited.get(path)
                output = read(layer)
                state = hidden_of(output)
                if not number:
                    is_steered = torch.ones_like(state[..., :1], dtype=torch.int64).cumsum(-2) > first
                changed = state
                if rank:
                    basis = remove[:, number]
                    changed = state - (state @ basis.transpose(1, 2)) @ basis
                write(layer, with_hidden(output, torch.where(is_steered, changed + add[:, number, None], state)))
        if model._compile_by_default:
            edited.compile()
        self.model = edited

    def set(self, answers: Sequence[Completion | None], positions: Sequence[int]) -> None:
        """Set the steering of each row to that of its answer, for a call in which the rows' first tokens are at ``positions``."""
        starts = [max(answer.start - position, 0) if answer else 0 for answer, position in zip(answers, positions, strict=True)]
        self.first.copy_(torch.tensor(starts)[:, None, None])
        if self._set_for == answers:
            return
        self._set_for = list(answers)
        self.add.zero_()
        self.remove.zero_()
        for row, answer in enumerate(answers):
            for layer, addition in answer.additions.items() if answer else ():
                place = self.layers.index(layer)
                if addition.add is not None:
                    self.add[row, place] = addition.add.to(self.add)
                if addition.remove is not None:
                    self.remove[row, place, : len(addition.remove)] = addition.remove.to(self.remove)


class ServedModel:
    """Chooses the copy of a model for each call. ``at`` is the path of the layers.

    Raises:
        ValueError: If an edit of the model does different things at different steps of a generation.
    """

    def __init__(self, model: LanguageModel, at: str) -> None:
        for edit in model._edits:
            if not edit.block.is_same_at_each_step and _mentions_steps(edit):
                raise ValueError(
                    f"The edit at {edit.block.filename}:{edit.block.line} distinguishes the steps of a generation, but answers at "
                    "different steps share a call: put the whole edit into `for _ in tracer.iter[:]:`, the same at each step."
                )
        self._first, self._at = model, at
        self._later = model  # for the steps after the prompt
        if not all(edit.block.is_same_at_each_step for edit in model._edits):
            self._later = model._edited_copy()
            self._later._edits[:] = [edit for edit in self._later._edits if edit.block.is_same_at_each_step]
            if model._compile_by_default and self._later._edits:
                self._later.compile()
        self._steered: dict[tuple[bool, int], SteeredModel] = {}  # by whether it has edits of prompts, and the number of rows
        self._layers: set[int] = set()  # layers that were steered so far
        self._rank = 0  # maximum number of removed directions so far

    def of(self, answers: Sequence[Completion | None], positions: Sequence[int], is_prompt: bool) -> Any:
        """Return the model for a call with the rows ``answers``, ``None`` for free rows, whose first tokens are at ``positions``."""
        model = self._first if is_prompt else self._later
        asked = {layer for answer in answers if answer for layer in answer.additions}
        if not asked:
            return model
        found = [addition for answer in answers if answer for addition in answer.additions.values()]
        rank = max(0 if addition.remove is None else len(addition.remove) for addition in found)
        if not asked <= self._layers or rank > self._rank:
            self._layers, self._rank = self._layers | asked, max(self._rank, rank)
            self._steered.clear()
        key = (model is not self._later, len(answers))
        steered = self._steered.get(key)
        if steered is None:
            steered = self._steered[key] = SteeredModel(model, self._at, sorted(self._layers), len(answers), self._rank)
        steered.set(answers, positions)
        return steered.model


def _mentions_steps(edit: Edit) -> bool:
    """Whether the block of an edit chooses steps of a generation."""
    nodes = [node for statement in edit.block.body for node in ast.walk(statement)]
    looped = [getattr(node, "context_expr", None) or getattr(node, "iter", None) for node in nodes]
    over_all = any(isinstance(loop, ast.Call) and isinstance(loop.func, ast.Attribute) and loop.func.attr == "all" for loop in looped)
    return over_all or any(isinstance(node, ast.Attribute) and node.attr in ("iter", "next") for node in nodes)
