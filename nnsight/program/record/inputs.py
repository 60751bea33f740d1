"""Inputs of a program: tensors and floats that its block takes from outside, under the names that the block uses.

A program for other runs takes other values for its inputs later. So a call on such tensors alone, as in ``alpha * vector``, is recorded. It
also runs at once, on the real values, so Python can get the value of its result. Then the names that the value was computed from become
*fixed*: they are not inputs, because the program contains results that Python computed from them.

A tensor is an input wherever it is used. Computations of Python with floats cannot be recorded. So a float is an input only if each mention
of its name in the block is an operand of a call of torch, as in ``alpha * hidden``. It becomes a tensor without dimensions.
"""

from __future__ import annotations

import ast
import contextlib
import itertools
import sys
import types
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from ...fx.recording.functions import TAKES_SCALAR_TENSORS, edits_in_place
from ...fx.recording.numbers import floats_as_tensors
from ...runtime.editing import Edit
from ...tracing import Block
from ...tracing.errors import is_internal, user_position_now
from ..format.trees import write_tree
from ..run.program_block import ProgramBlock
from .refusals import LIBRARIES, refused

_Position = tuple[int | None, ...]


class NamedInputs:
    """The named values of one block while it is recorded. A variable whose name is already ``taken`` gets a number: ``alpha_2``.

    If a variable of the block is the program of an earlier recording (a :class:`.ProgramBlock`), its inputs are named values, too. A block
    that ``is_edit`` runs at each call of a model, so in-place changes of these values are refused: a program has only their result.

    Attributes:
        labels: The name of each variable that may be an input: a tensor or a float.
        fixed: Reasons why names cannot be inputs, by name.
    """

    def __init__(self, block: Block, variables: dict[str, Any], taken: Collection[str] = (), is_edit: bool = False) -> None:
        used = block.looked_up | set(block.shared)
        self._block, self._is_edit = block, is_edit
        self._tensors: dict[int, tuple[str, torch.Tensor]] = {}
        self._floats: dict[str, float] = {}
        self._made: dict[str, torch.Tensor] = {}  # the tensor of each float
        self._operands: dict[_Position, list[ast.Name]] | None = None
        self._lifted: set[ast.Name] = set()  # mentions of floats that became tensors
        self._known: dict[int, tuple[torch.Tensor, torch.Tensor, frozenset[str]]] = {}  # fake, value, names it was computed from
        self.labels: dict[str, str] = {}
        self.fixed: dict[str, str] = {}
        for value in list(variables.values()):
            if isinstance(value, ProgramBlock):
                variables, used = {**variables, **value.inputs}, used | value.inputs.keys()
        for name, value in variables.items():
            if name not in used or not name.isidentifier():
                continue
            labels = itertools.chain([name], (f"{name}_{number}" for number in itertools.count(2)))
            label = next(found for found in labels if found not in taken and (found == name or found not in variables))
            if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor):
                known, _ = self._tensors.setdefault(id(value), (label, value))
                if known != label:
                    self.fixed[label] = f"it is the same tensor as `{known}`"
            elif type(value) is float:
                self._floats[name] = value
            else:
                continue
            self.labels[name] = label

    @property
    def names(self) -> set[str]:
        """The names of all tensors and floats."""
        return {name for name, _ in self._tensors.values()} | {self.labels[name] for name in self._floats}

    def name_of(self, tensor: torch.Tensor) -> str | None:
        """Return the name of one of the block's own tensors, or ``None`` if it has no name or cannot be an input."""
        name, _ = self._tensors.get(id(tensor), (None, None))
        return None if name in self.fixed else name

    # -- calls on named values alone -------------------------------------------------------------------------------

    def are_all(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether ``tensors`` are named, or were computed from named tensors only."""
        return bool(tensors) and all(id(tensor) in self._known or self.name_of(tensor) for tensor in tensors)

    def _look_up(self, tensor: torch.Tensor) -> tuple[Any, torch.Tensor, Collection[str | None]]:
        return self._known.get(id(tensor), (None, tensor, {self.name_of(tensor)}))

    def value_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the value of a tensor that is named, or was computed from named tensors only."""
        return self._look_up(tensor)[1]

    def call(self, function: Any, args: Any, kwargs: Any, record: Callable[[], Any]) -> Any:
        """Run a call on named values at once, and return the result for the block.

        The call is also recorded, by ``record``, if it returns tensors, or edits a tensor that was recorded this way.
        """
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        names = {name for tensor in tensors for name in self._look_up(tensor)[2] if name is not None}
        given, named = pytree.tree_map_only(torch.Tensor, self.value_of, (args, kwargs))
        edits = edits_in_place(function)
        if edits and self._is_edit and id(edited_by(args, kwargs)) not in self._known:
            raise refused(
                f"The edit changes `{self.name_of(edited_by(args, kwargs))}` in place, which a program does not do again at the next call. "
                "Make a new tensor, as in `t = t * 2`."
            )
        with _disable_current_modes(), edits_allowed(function, given, named):
            found = function(*given, **named)
        values = [leaf for leaf in pytree.tree_leaves(found) if isinstance(leaf, torch.Tensor)]
        if edits and id(edited_by(args, kwargs)) in self._known:
            return record()
        if not values or edits:
            self._fix(names, "Python uses its value")
            return found
        made = [leaf for leaf in pytree.tree_leaves(record()) if isinstance(leaf, torch.Tensor)]
        result = iter(made)
        for fake, value in zip(made, values, strict=True):
            self._known[id(fake)] = fake, value, frozenset(names)
        return pytree.tree_map_only(torch.Tensor, lambda _: next(result), found)

    def forget(self, edited: Any) -> None:
        """Forget the values of computed tensors that share memory with ``edited``, which is edited with values of the model."""
        if id(edited) in self._known:
            memory = self._known[id(edited)][1].untyped_storage()._cdata
            self._known = {key: known for key, known in self._known.items() if known[1].untyped_storage()._cdata != memory}

    def _fix(self, names: Iterable[str], why: str) -> None:
        line = user_position_now(skip=LIBRARIES)[1]
        for name in names:
            self.fixed.setdefault(name, f"{why} in line {line}")

    # -- floats ----------------------------------------------------------------------------------------------------

    def with_floats(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Return the arguments of the torch function ``name``, with tensors in place of the block's named floats."""
        if not (self._floats and name in TAKES_SCALAR_TENSORS and any(type(item) is float for item in (*args, *kwargs.values()))):
            return args, kwargs
        operands = [item for item in self._operands_here() if item.id in self._floats]

        def as_tensor(value: Any, dtype: torch.dtype) -> Any:
            operand = next((item for item in operands if self._floats[item.id] is value), None)
            if operand is None or dtype != torch.float64:
                return value
            self._lifted.add(operand)
            if operand.id not in self._made:
                with _disable_current_modes(), torch._C.DisableTorchFunction():
                    made = self._made[operand.id] = torch.tensor(value, dtype=dtype, device="cpu")
                self._tensors[id(made)] = self.labels[operand.id], made
            return self._made[operand.id]

        return floats_as_tensors(name, args, kwargs, as_tensor) if operands else (args, kwargs)

    def _operands_here(self) -> list[ast.Name]:
        """Return the names among the operands of the torch call that is active in the block's own code."""
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None and (is_internal(frame.f_code) or frame.f_code.co_filename.startswith(LIBRARIES)):
            frame = frame.f_back
        code = self._block.code  # the code of invokes and backward passes inside has the same name, and other positions
        if frame is None or (frame.f_code.co_name, frame.f_code.co_filename) != (code.co_name, code.co_filename):
            return []
        if self._operands is None:
            self._operands = dict(_operands_of(self._block))
        position = tuple(list(frame.f_code.co_positions())[frame.f_lasti // 2])
        return self._operands.get(position, [])

    def finish(self) -> None:
        """Make floats fixed if one of their mentions did not become a tensor."""
        mentions = [item for part in self._block.body for item in ast.walk(part) if isinstance(item, ast.Name)]
        for item in mentions:
            if item.id in self._floats and item not in self._lifted:
                where = f"in line {item.lineno}: use a tensor, as in torch.tensor(4.0)"
                why = f"Python computes with the float, passes it where torch needs a number, or does not reach it, {where}"
                self.fixed.setdefault(self.labels[item.id], why)


def inputs_of_edits(edits: Iterable[Edit]) -> list[NamedInputs]:
    """Return the named inputs of each edit. A name belongs to one edit: equal names of later edits get numbers."""
    found: list[NamedInputs] = []
    for edit in edits:
        taken = {name for inputs in found for name in inputs.names}
        found.append(NamedInputs(edit.block, edit.variables, taken, is_edit=True))
    return found


def _operands_of(block: Block) -> Iterable[tuple[_Position, list[ast.Name]]]:
    """Yield the position of each operation or call in a block, with the names among its operands."""
    for part in block.body:
        for item in ast.walk(part):
            given: list[ast.expr]
            if isinstance(item, ast.BinOp):
                given = [item.left, item.right]
            elif isinstance(item, ast.AugAssign):
                given = [item.value]
            elif isinstance(item, ast.Call):
                given = [*item.args, *(keyword.value for keyword in item.keywords)]
            else:
                continue
            names = [operand for operand in given if isinstance(operand, ast.Name)]
            if names:
                yield (item.lineno, item.end_lineno, item.col_offset, item.end_col_offset), names


def edited_by(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the object that a call of an in-place function edits."""
    return kwargs.get("out", args[0] if args else None)


def edits_allowed(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> contextlib.AbstractContextManager[Any]:
    """Return a context for a call of ``function`` on real tensors. Inference tensors can only be edited in place in inference mode."""
    edited = edited_by(args, kwargs) if edits_in_place(function) else None
    return torch.inference_mode() if isinstance(edited, torch.Tensor) and edited.is_inference() else contextlib.nullcontext()


def input_tree(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """Return the tree of the arguments of a run. Copies of their tensors are added to ``tensors``."""

    def leaf(item: Any) -> Any:
        if not isinstance(item, torch.Tensor):
            raise refused(
                f"The input of the trace contains a {type(item).__name__}, which cannot be sent. "
                "Use tensors and numbers, in lists and dicts."
            )
        name = f"@{len(tensors)}"
        with _disable_current_modes():
            tensors[name] = item.detach().clone()
        return {"tensor": name}

    return write_tree(list(value) if isinstance(value, tuple) else value, leaf)
