"""Scans: runs of block and model on fake tensors, which have sizes and dtypes but no values.

A scan computes nothing and needs no weights. It runs a copy of the model in which all tensors are fake
(:mod:`~nnsight.runtime.rows.fakes`), on copies of the inputs. So the model, its buffers and a cache among the inputs do not change.

The blocks of a scan run under the fake mode from their first line, so the tensors that they make are fake, too. The fake tensors at all
locations are kept until the next scan.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ..runtime.interleaver import Interleaver, active_interleaver
from ..runtime.invoker import Joined
from ..runtime.mediator import Mediator
from ..runtime.modules.tree import ModuleTree
from ..runtime.report import Report
from ..runtime.rows.fakes import Guesses, fake_modules, same_generators
from ..runtime.tracer import Arguments, Batchable, Driver, InterleavingTracer, Named
from ..tracing import Backend

_local = threading.local()


def fake_mode() -> FakeTensorMode:
    """Return the fake mode of this thread. All its scans share this mode, so that a scan can use fake tensors of an earlier one."""
    mode: FakeTensorMode | None = getattr(_local, "mode", None)
    if mode is None:
        mode = _local.mode = FakeTensorMode(allow_non_fake_inputs=True)
    return mode


class ScanningTracer(InterleavingTracer):
    """A trace on fake tensors. ``modules`` is the tree of the model; the other arguments are those of :class:`InterleavingTracer`."""

    def __init__(
        self,
        modules: ModuleTree,
        model: Batchable,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        backend: Backend | None = None,
        named: Named | None = None,
    ) -> None:
        super().__init__(ScanningDriver(modules, model), _OutsideFakeMode(model), args, kwargs, backend, named)

    def execute(self, function: Callable[[], None]) -> Any:
        """Run blocks and model under the fake mode."""
        with _scanning():
            return super().execute(function)


class ScanningDriver:
    """Runs fake copies of the ``modules`` of a model on fake inputs. ``model._scan_on``, if it is defined, calls the root module."""

    def __init__(self, modules: ModuleTree, model: Batchable) -> None:
        self._modules = modules
        self._call: Callable[..., Any] = getattr(model, "_scan_on", lambda root, args, kwargs: root(*args, **kwargs))

    def __call__(self, interleaver: Interleaver, args: tuple[Any, ...], kwargs: dict[str, Any], report: Report) -> Any:
        """Call the model once within ``interleaver`` and return its fake output."""
        report.mode = "scan"
        modules, mode, seen = self._modules, fake_mode(), dict[str, Any]()
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        device = next((tensor.device for tensor in tensors if not tensor.is_meta), torch.device("cpu"))
        with mode:
            copies = fake_modules(modules.root, mode, device)
            by_path = {path: copies[module] for module, path in modules.paths.items() if module in copies}
            with _FakeCopies(mode, device):
                args, kwargs = pytree.tree_map(_copied, (args, kwargs))
            _observe(interleaver, by_path, seen)
            guesses = GuessesOfModel()
            try:
                with guesses, modules.intercept(by_path):
                    return self._call(copies[modules.root], args, kwargs)
            except Exception as error:
                if error is not interleaver.failure:
                    guesses.explain(error, "A scan")
                raise
            finally:
                modules.fakes = seen


def scan_first(modules: ModuleTree, model: Batchable, driver: Driver) -> Driver:
    """Return a driver that scans the model without blocks, and then calls ``driver``."""

    def run(interleaver: Interleaver, args: tuple[Any, ...], kwargs: dict[str, Any], report: Report) -> Any:
        with _scanning(), Interleaver([]) as alone:
            ScanningDriver(modules, model)(alone, args, kwargs, Report())
        return driver(interleaver, args, kwargs, report)

    return run


class _OutsideFakeMode:
    """Prepares the inputs of a scan outside of the fake mode, because tokenizers make real tensors."""

    def __init__(self, model: Batchable) -> None:
        self._model = model

    def _prepare_input(self, *args: Any, **kwargs: Any) -> Arguments:
        with unset_fake_temporarily():
            return self._model._prepare_input(*args, **kwargs)

    def _batch(self, batched: Arguments | None, *args: Any, **kwargs: Any) -> tuple[Arguments, int]:
        with unset_fake_temporarily():
            return self._model._batch(batched, *args, **kwargs)

    def _join_at_once(self, inputs: list[Arguments]) -> Joined | None:
        at_once = getattr(self._model, "_join_at_once", None)
        with unset_fake_temporarily():
            return None if at_once is None else at_once(inputs)


def _observe(interleaver: Interleaver, paths: Mapping[str, Any], seen: dict[str, Any]) -> None:
    """Keep in ``seen`` the value that leaves each location, for the whole batch."""

    def keep(location: str, value: Any) -> None:
        seen[location] = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, value)

    onlooker = Mediator(lambda: None, name="scan")
    outer, interleaver.current = interleaver.current, onlooker
    for path in paths:
        for location in (f"{path}.input", f"{path}.output"):
            interleaver.observe(location, functools.partial(keep, location))
    interleaver.current = outer


class GuessesOfModel(Guesses):
    """Guesses the values of fake tensors that the model reads; a block that reads one gets an error."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
            # The kernel for mixtures of experts supports other dtypes, too, but its rule for fake tensors refuses them.
            halves = (operand.to(torch.bfloat16) for operand in args[:2])
            return func(*halves, *args[2:], **kwargs).to(args[0].dtype)
        run = active_interleaver()
        if run is not None and run.current is not None:
            return func(*args, **kwargs)
        return super().__torch_dispatch__(func, types, args, kwargs)


@contextlib.contextmanager
def _scanning() -> Iterator[None]:
    """Enter the fake mode, and restore random number generators afterwards.

    Errors of torch for values that a fake tensor lacks get a clearer message, and keep their type and traceback.
    """
    try:
        with same_generators(), fake_mode():
            yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        error.args = (
            f"A scan has sizes and no values, and `{error.func}` needs the values of a tensor. Code that depends on values needs a trace: "
            "`.item()`, `bool(...)`, selecting by a mask.",
        )
        raise


class _FakeCopies(TorchFunctionMode):
    """Makes ``copy.deepcopy`` copy tensors as fake tensors; copies of meta tensors are on ``device``."""

    def __init__(self, mode: FakeTensorMode, device: torch.device) -> None:
        super().__init__()
        self._mode, self._device = mode, device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        if id(tensor) not in memo:
            memo[id(tensor)] = self._fake(tensor)
        return memo[id(tensor)]

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, FakeTensor) and tensor.fake_mode is self._mode:
            return tensor
        if tensor.layout != torch.strided or (not isinstance(tensor, FakeTensor) and type(tensor) is not torch.Tensor):
            return self._mode.from_tensor(tensor, static_shapes=True)
        device = self._device if tensor.is_meta else tensor.device
        made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
        made.requires_grad_(tensor.requires_grad)
        if tensor.is_leaf:
            return made
        with torch.enable_grad():  # a clone is no leaf, so it can be edited in place although it requires gradients
            return made.clone()


def _copied(leaf: Any) -> Any:
    """Return a deep copy of a part of the arguments, or the part itself if it cannot be copied."""
    try:
        return copy.deepcopy(leaf)
    except Exception:  # a lock, a generator, a handle of a library
        return leaf
