"""Fake copies of a model and its arguments, with fake tensors.

The model is *copied*, with fake tensors in place of its tensors, so a run of the copy changes no buffer, cache or attribute of the model.
Hooks of libraries that build models with hooks are copied too. Hooks of the user are not copied, and do not run. :func:`isolated` protects
the random number generators, and keeps modes that record calls from seeing the run.

Fake tensors have no values. If a model asks for a value, :class:`Guesses` answers: a number is 1, a truth value is False, a condition that
the model checks (``torch._check_tensor_all``) is True, and a mask that selects entries selects one.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import random
import sys
import threading
import types
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeCopyMode,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ...shared_changes import SharedChange
from ...tracing.parsing import with_cells
from ..batched_containers import on_tensors
from .row_order import SELECTED

#: Guards warning filters and random number generators, which belong to the process.
_lock = threading.RLock()

#: Packages whose hooks are part of a model.
_LIBRARIES = {"torch", "transformers", "accelerate", "diffusers", "peft"}

#: Largest size that is assumed for results of ``bincount`` and ``repeat_interleave`` in programs. The sizes of arguments do not bound it.
MOST_COUNTED = 2**16

_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_NO_COPY = {"_call_impl", "_compiled_call_impl", "_backward_hooks", "_backward_pre_hooks"}


def _is_no_failure(record: logging.LogRecord) -> bool:
    return not record.exc_info


#: The logger to which torch writes a traceback for each operation that fails on fake tensors.
_log = logging.getLogger(FakeTensorMode.__module__)

#: Keeps these tracebacks out of the log, because the error contains the same information.
quiet_fakes = SharedChange(lambda: _log.addFilter(_is_no_failure), lambda _: _log.removeFilter(_is_no_failure))


class Guesses(TorchDispatchMode):
    """Answers a model that asks a fake tensor for a value, see the module docstring."""

    def __init__(self) -> None:
        super().__init__()
        self.made = 0  # number of answers so far

    def explain(self, error: Exception, what: str) -> None:
        """Add to an error of the model that it got guesses before. ``what`` is what the user has asked for, such as "A scan"."""
        if self.made:
            error.add_note(
                f"{what} has sizes but no values. The model read values before this error, and got guesses. If sizes in the model "
                "depend on values of the input, use a trace that runs here, without `program=`, `remote=` and scans."
            )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            if func is torch.ops.aten._grouped_mm.default and args[0].dtype != torch.bfloat16:  # torch's fake kernel refuses it
                return _product_of_groups(*args, **(kwargs or {}))
            made = func(*args, **(kwargs or {}))
            if func is torch.ops.aten._is_all_true.default:
                made._is_checked = True
            return made
        except DataDependentOutputException:
            if func is torch.ops.aten.equal.default:
                self.made += args[0].shape == args[1].shape  # tensors of different shapes are not equal
                return False
            if func is not torch.ops.aten._local_scalar_dense.default:
                raise
            if getattr(args[0], "_is_checked", False):
                return True
            self.made += 1
            dtype = args[0].dtype
            return False if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1
        except DynamicOutputShapeException:
            self.made += 1
            made = result_of_size(func, args, kwargs or {}, lambda most: 1)
            if made is None:
                raise
            for tensor in (made,) if isinstance(made, torch.Tensor) else made:
                setattr(tensor, SELECTED, True)
            return made


def _product_of_groups(
    one: torch.Tensor, other: torch.Tensor, offs: torch.Tensor | None = None, bias: Any = None, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return the fake result of ``aten._grouped_mm``: ``[m, k] x [g, k, n] -> [m, n]`` for experts; groups may be in other dimensions."""
    rows, columns = one.shape[-2], other.shape[-1]
    if one.dim() == other.dim():
        groups = [one.shape[0]] if offs is None else [offs.shape[0]]
        return one.new_empty((*groups, rows, columns), dtype=out_dtype)
    return one.new_empty((rows, columns), dtype=out_dtype)


def fake_argument(leaf: Any, dim: int | None, total: int, rows: int, mode: FakeTensorMode) -> Any:
    """Return a fake copy of an argument with ``rows`` rows in its dimension ``dim``, in place of ``total`` rows."""
    if not isinstance(leaf, torch.Tensor):
        with FakeCopyMode(mode), contextlib.suppress(Exception):  # an object that cannot be copied is shared
            leaf = copy.deepcopy(leaf)
        return on_tensors(
            leaf,
            lambda _, tensor: fake_argument(tensor, 0 if tensor.shape[:1] == (total,) else None, total, rows, mode),
        )
    shape = list(leaf.shape)
    if dim is not None:
        shape[dim] = shape[dim] // total * rows
    made = torch.empty(shape, dtype=leaf.dtype, device=leaf.device)
    return made.requires_grad_() if leaf.requires_grad else made


def result_of_size(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], size: Callable[[int], Any]) -> Any:
    """Return the fake result of an operator whose result size depends on values, or ``None`` for an unknown operator.

    Args:
        func: The operator.
        args: Its positional arguments, with fake tensors.
        kwargs: Its arguments by name.
        size: Chooses the size of a dimension, given the largest possible size.
    """
    given: dict[str, Any] = {argument.name: argument.default_value for argument in func._schema.arguments}
    given |= dict(zip(given, args, strict=False)) | kwargs
    first = args[0]

    def integers(*shape: Any) -> torch.Tensor:
        return first.new_empty(shape, dtype=torch.int64)

    match func._schema.name.removeprefix("aten::"):
        case "nonzero":
            return integers(size(first.numel()), first.dim())
        case "masked_select":
            return first.new_empty((size(torch.broadcast_tensors(first, given["mask"])[0].numel()),))
        case "index":
            return func(first, [place for index in given["indices"] for place in places(index, size)])
        case "bincount":
            most = size(max(given["minlength"], MOST_COUNTED))
            return integers(most) if given["weights"] is None else first.new_empty((most,), dtype=torch.float64)
        case "repeat_interleave":
            return integers(size(MOST_COUNTED))
        case "_unique2" | "unique_dim" | "unique_consecutive":
            dim = given.get("dim")
            most = first.numel() if dim is None else first.shape[dim]
            count = size(most)
            shape = (count,) if dim is None else (*first.shape[:dim], count, *first.shape[dim:][1:])
            inverse = (first.shape if dim is None else (most,)) if given["return_inverse"] else (0,)
            return first.new_empty(shape), integers(*inverse), integers(count if given["return_counts"] else 0)
    return None


def places(index: torch.Tensor | None, size: Callable[[int], Any]) -> list[torch.Tensor | None]:
    """Return the integer indices for ``index``: a mask becomes one index for each dimension, with ``size(largest)`` entries each."""
    if index is None or index.dtype not in (torch.bool, torch.uint8):
        return [index]
    count = size(index.numel())
    return [index.new_empty((count,), dtype=torch.int64) for _ in range(index.dim())]


def fake_modules(
    root: torch.nn.Module, mode: FakeTensorMode, device: torch.device | str = "cpu"
) -> dict[torch.nn.Module, torch.nn.Module]:
    """Return a copy of each module of ``root``, with fake tensors and deep copies of all other attributes.

    Weights on the meta device, such as those of a model that is not loaded yet, become fake tensors on ``device``. Weights that FSDP has
    sharded become fake tensors of the full size.
    """
    copies = {module: object.__new__(type(module)) for module in root.modules()}
    memo: dict[int, Any] = {id(module): made for module, made in copies.items()}
    sharded = _sharded(copies)
    for tensor in (tensor for module in copies for tensor in (*module._parameters.values(), *module._buffers.values())):
        if tensor is not None and (tensor.device.type == "meta" or id(tensor) in sharded) and id(tensor) not in memo:
            place = device if tensor.device.type == "meta" else tensor.device
            with mode:
                placed = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=place)
            is_weight = isinstance(tensor, torch.nn.Parameter)
            memo[id(tensor)] = torch.nn.Parameter(placed, tensor.requires_grad) if is_weight else placed
    with FakeCopyMode(mode):
        for module, made in copies.items():
            for name, value in list(module.__dict__.items()):
                if name in _NO_COPY:
                    continue
                if isinstance(value, torch.ScriptObject):  # quantised weights: the cache would compare them, which torch refuses
                    mode.cache_enabled = False
                kept = value
                if name in _HOOKS:
                    kept = OrderedDict((key, hook) for key, hook in value.items() if _belongs(hook))
                with contextlib.suppress(Exception):  # an object that cannot be copied, such as a lock, is shared
                    kept = copy.deepcopy(kept, memo)
                if isinstance(kept, types.FunctionType):
                    kept = _about_copies(kept, memo)
                made.__dict__[name] = kept
            made.__dict__.update(_backward_hooks=OrderedDict(), _backward_pre_hooks=OrderedDict())
            made.__dict__["_apply"] = types.MethodType(_apply, made)
    return copies


def _apply(self: torch.nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> torch.nn.Module:
    """Convert the fake tensors of a copy, as in ``module.to(dtype)``. Torch would refuse them, because weak references to them exist."""
    for module in self.children() if recurse else ():
        module._apply(fn)
    for parameter in self.parameters(recurse=False):
        parameter.data = converted = fn(parameter.detach())
        if isinstance(parameter, FakeTensor) and isinstance(converted, FakeTensor):
            parameter.fake_device = converted.fake_device
    for name, buffer in [*self.named_buffers(recurse=False, remove_duplicate=False)]:
        self._buffers[name] = fn(buffer)
    return self


def _sharded(modules: Iterable[torch.nn.Module]) -> set[int]:
    """Return the ids of the parameters that FSDP (``fully_shard``) gathers before a call, so that modules see their full size."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return set()
    sharding = [module for module in modules if isinstance(module, fsdp.FSDPModule)]
    return {id(parameter) for module in sharding for parameter in module.parameters() if hasattr(parameter, "_local_tensor")}


def _about_copies(function: types.FunctionType, memo: dict[int, Any]) -> types.FunctionType:
    """Return a copy of a function that is set on a module, such as a wrapped ``forward``. Its closure refers to the copied modules."""
    bound = (torch.nn.Module, types.MethodType, functools.partial)
    cells = list(function.__closure__ or ())
    for index, cell in enumerate(cells):
        with contextlib.suppress(ValueError):  # the variable is not bound yet
            content = cell.cell_contents
            if isinstance(content, types.FunctionType):
                cells[index] = types.CellType(_about_copies(content, memo))
            elif isinstance(content, bound):
                cells[index] = types.CellType(copy.deepcopy(content, memo))
    if all(one is other for one, other in zip(cells, function.__closure__ or (), strict=True)):
        return function
    copied: types.FunctionType = with_cells(function, cells)
    return copied


def _belongs(hook: Any) -> bool:
    """Whether a hook is part of the model. FSDP's hooks gather parameters, and copies have the full parameters already."""
    function = getattr(hook, "func", hook)
    defined_in = getattr(function, "__module__", None) or type(function).__module__
    return defined_in.partition(".")[0] in _LIBRARIES and not defined_in.startswith("torch.distributed.fsdp")


@contextlib.contextmanager
def same_generators() -> Iterator[None]:
    """Restore the states of the random number generators of torch, Python and numpy at the end of this context."""
    python, numpy = random.getstate(), sys.modules.get("numpy")
    state = None if numpy is None else numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(state)


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """Run without function and dispatch modes and without warnings, and restore the random number generators. Default devices stay on."""
    with _lock, contextlib.ExitStack() as stack:
        device = torch.get_default_device()
        while torch._C._len_torch_function_stack():
            stack.enter_context(torch.overrides._pop_mode_temporarily())
        stack.enter_context(_disable_current_modes())
        if device.type != "cpu":
            stack.enter_context(device)
        stack.enter_context(same_generators())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        yield
