"""Bound programs in a function under ``torch.compile``: the program as hooks that dynamo traces with the model into the user's graph.

The hooks are those of :mod:`nnsight.program.baking`. They are on copies of the hooked modules and of the modules around these. A copy
shares the parameters and buffers of the original, and has the attributes of the original at each call.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch

from .baking import check_applied, compiled_saves, compiled_segment, hook, segments
from .format.errors import ExecutionFailedError, InvalidProgramError
from .format.payload import Job

#: Dicts of a module that its copy has for itself.
_OWN = (
    "_modules", "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
    "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs",
)  # fmt: skip


#: What the copy of a module shares with the original, or has for itself; it follows all other attributes.
_NOT_FOLLOWED = (vars(torch.nn.Module()).keys() - {"training"}) | {"_call_impl", "forward"}


class _Copy(NamedTuple):
    """A copy of a module: which attributes follow those of the original, and the children that it had when it was copied."""

    path: str
    original: torch.nn.Module
    copied: torch.nn.Module
    attributes: tuple[str, ...]
    children: tuple[tuple[str, torch.nn.Module], ...]


class InlinedProgram:
    """A program of one invoke as a function that dynamo can trace: ``(values of constants, args, kwargs) -> saved values by name``.

    Raises:
        InvalidProgramError: If the program cannot be hooks.
    """

    def __init__(self, module: torch.nn.Module, job: Job) -> None:
        run, blocks = job.runs[0], {node["block"] for node in job.nodes}
        if run["call"] != "trace" or len(blocks) > 1 or run["blocks"] > 2:  # the block of the trace, and that of an invoke in it
            raise InvalidProgramError("Programs of generations and of several invokes cannot be hooks.")
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
                    raise InvalidProgramError(f"The model has another module at `{where}` than when the program was bound: bind it again.")
        state = self._state
        state.clear()  # of a call that failed
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
        if "forward" in own and below != {""}:  # it belongs to the original, and calls the modules in that
            raise InvalidProgramError(f"The module `{path}` has a forward of its own.")
        try:
            made = copy.copy(module)
        except Exception as error:  # one that FSDP has sharded, say
            raise InvalidProgramError(f"The module `{path}` cannot be copied: {error}") from error
        made.__dict__.pop("_call_impl", None)  # of a run that is under way
        for name in _OWN:
            made.__dict__[name] = own[name].copy()
        attributes = tuple(name for name in own if name not in _NOT_FOLLOWED)
        self._copies.append(_Copy(path, module, made, attributes, tuple(module._modules.items())))  # type: ignore[arg-type]
        for child in sorted({inner.partition(".")[0] for inner in below if inner}):
            inside = {inner.partition(".")[2] for inner in below if inner.partition(".")[0] == child}
            made._modules[child] = self._copied(getattr(module, child), f"{path}{child}.", inside)
        return made
