"""Bound programs in a function under ``torch.compile``.

The program becomes hooks of modules (:mod:`nnsight.program.baking`). Dynamo traces them, together with the model, into the user's graph.
The hooks are on copies of the hooked modules and of all modules that contain them. A copy shares the parameters and buffers of the
original. Its other attributes are updated from the original at each call.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch

from .baking import check_applied, compiled_saves, compiled_segment, hook, segments
from .format.errors import ExecutionFailedError, InvalidProgramError
from .format.payload import Job

#: Dicts of a module that are copied with it, so that changes of the copy do not affect the original.
_COPIED_DICTS = (
    "_modules", "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
    "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs",
)  # fmt: skip

#: Attributes that a copy shares with the original, or that it does not take from it. All others are updated at each call.
_NOT_FOLLOWED = (vars(torch.nn.Module()).keys() - {"training"}) | {"_call_impl", "forward"}


class _Copy(NamedTuple):
    """A copy of a module, the attributes that are updated from the original, and the children at the time of the copy."""

    path: str
    original: torch.nn.Module
    copied: torch.nn.Module
    attributes: tuple[str, ...]
    children: tuple[tuple[str, torch.nn.Module], ...]


class InlinedProgram:
    """A program of one invoke as a function that dynamo can trace: ``(values of constants, args, kwargs) -> saved values by name``.

    Raises:
        InvalidProgramError: If hooks cannot express the program.
    """

    def __init__(self, module: torch.nn.Module, job: Job) -> None:
        run, blocks = job.runs[0], {node["block"] for node in job.nodes}
        if run["call"] != "trace" or len(blocks) > 1 or run["blocks"] > 2:  # two blocks: that of the trace, and that of its invoke
            raise InvalidProgramError("Hooks cannot express a program of a generation, or of several invokes.")
        check_applied(module, job)
        self._state: dict[str, Any] = {}
        self._copies: list[_Copy] = []
        parts = list(segments(job))
        self._root = self._copied(module, "", {part.site.rpartition(".")[0].partition(".")[2] for part in parts})
        self._sites = []
        for part in parts:
            passed = hook(self._root, self._state, part, compiled_segment(job, part, None))
            self._sites.append((passed, part.site, part.nodes[0][1].get("line", "?")))
        self._saves = compiled_saves(job)

    def __call__(self, values: dict[str, torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        for path, original, copied, attributes, children in self._copies:
            for name in attributes:
                value = getattr(original, name)
                if getattr(copied, name) is not value:
                    setattr(copied, name, value)
            for name, child in children:
                if original._modules[name] is not child:
                    where = f"{path}{name}"
                    raise InvalidProgramError(f"The module at `{where}` was replaced after the program was bound: bind the program again.")
        state = self._state
        state.clear()  # a failed call may have left values
        for name, value in values.items():
            state[f"const {name}"] = value
        self._root(*args, **kwargs)
        for passed, site, line in self._sites:
            if passed not in state:
                raise ExecutionFailedError(f"`{site}`, line {line} of the block, was not reached: the model did not call this module.")
        saved: dict[str, Any] = self._saves(self._root, state)
        state.clear()
        return saved

    def _copied(self, module: torch.nn.Module, path: str, below: set[str]) -> torch.nn.Module:
        """Return a copy of the module at ``path`` for hooks at the modules ``below`` it."""
        own = vars(module)
        if "forward" in own and below != {""}:  # such a `forward` is bound to the original, and would call its children
            raise InvalidProgramError(f"The module `{path}` has an attribute `forward`, which a copy cannot call.")
        try:
            made = copy.copy(module)
        except Exception as error:  # such as that of a module that FSDP has sharded
            raise InvalidProgramError(f"The module `{path}` cannot be copied: {error}") from error
        made.__dict__.pop("_call_impl", None)  # an active run sets it
        for name in _COPIED_DICTS:
            made.__dict__[name] = own[name].copy()
        attributes = tuple(name for name in own if name not in _NOT_FOLLOWED)
        self._copies.append(_Copy(path, module, made, attributes, tuple(module._modules.items())))  # type: ignore[arg-type]
        for child in sorted({inner.partition(".")[0] for inner in below if inner}):
            inside = {inner.partition(".")[2] for inner in below if inner.partition(".")[0] == child}
            made._modules[child] = self._copied(getattr(module, child), f"{path}{child}.", inside)
        return made
