"""Runs of a model on fakes: clients record blocks against them, and servers check programs with them.

As in a scan, a copy of the model with fakes in place of its tensors runs on fakes of its inputs (:mod:`nnsight.runtime.rows.fakes`). A
generation on fakes has no tokens that could end it. It ends when it has made as many tokens as it may, or when no block waits for
anything but its result.

Each thread keeps the copy of a model as long as the model does not change (:mod:`~nnsight.program.run.descriptions`) and no run has
changed the copy. With the copy it keeps the values at its locations (:mod:`~nnsight.program.run.occurrences`).
"""

from __future__ import annotations

import contextlib
import copy
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from ...modeling.generation import Streamer
from ...modeling.scanning import fake_mode
from ...runtime.batched_containers import is_batched_container
from ...runtime.interleaver import Interleaver
from ...runtime.modules.interception import call_alone
from ...runtime.modules.tree import ModuleTree
from ...runtime.rows.fakes import fake_modules
from ..counts import counts
from ..format.errors import NotExpressibleError
from .fake_steps import FakeSteps
from .descriptions import describe, key_of
from .occurrences import FreshFakes, Occurrence, observed, replay, tensors_at

if TYPE_CHECKING:
    from .costs import Costs

#: Locations after the end of the model.
_AT_THE_END = frozenset({"result", "model.generator.output"})


class _Finished(BaseException):
    """Ends a generation; no ``except Exception`` of a model stops it."""


_local = threading.local()

#: Number of kinds of input whose occurrences are kept.
_KEPT = 32


def fake_model_of(tree: ModuleTree) -> FakeModel:
    """Return a copy of a model with fakes for its tensors, in the fake mode of this thread: the kept one, if that is possible."""
    if not hasattr(_local, "models"):
        _local.models = weakref.WeakKeyDictionary()
    like = tree.version, describe(tree.paths)
    known: FakeModel | None = _local.models.get(tree.root)
    if known is not None and known.like == like and not known.busy:
        return known
    made = FakeModel(tree, fake_mode(), like)
    if known is None or not known.busy:
        _local.models[tree.root] = made
    return made


class FakeModel:
    """A copy of a model with fakes for its tensors; ``like`` describes the model, or is ``None`` for a copy that is not kept.

    Attributes:
        root: The copy.
        by_path: The copies of all modules.
        device: Device of the fakes.
        weights: Name and fake of each parameter and buffer, by the identity of the original.
        busy: Whether it runs.
    """

    def __init__(self, tree: ModuleTree, mode: FakeTensorMode, like: Any = None) -> None:
        counts["fake_models"] += 1
        device = device_of(tree.root)
        self.device = torch.device("cpu") if device.type == "meta" else device
        copies = fake_modules(tree.root, mode, self.device)
        self.mode, self.like, self.busy, self._called = mode, like, False, False
        self.root = copies[tree.root]
        self.by_path = {path: copies[module] for module, path in tree.paths.items() if module in copies}
        self.weights: dict[int, tuple[str, torch.Tensor]] = {}
        self.by_name: dict[str, torch.Tensor] = {}
        for (name, original), (_, fake) in zip(_weights_of(tree.root), _weights_of(self.root), strict=True):
            if isinstance(fake, FakeTensor):
                self.weights.setdefault(id(original), (name, fake))
                self.by_name[name] = fake
        self._known: OrderedDict[Any, tuple[list[Occurrence], int]] = OrderedDict()
        self._storages = frozenset(self.storages())
        self._pristine = describe(self.by_path.values())

    def storages(self) -> set[int]:
        """Return the identities of the memory that the model keeps from run to run."""
        holders = (held for module in self.by_path.values() for held in (module._parameters, module._buffers, vars(module)))
        kept = (leaf for held in holders for leaf in pytree.tree_leaves(list(held.values()), is_leaf=is_batched_container))
        return {leaf.untyped_storage()._cdata for leaf in kept if isinstance(leaf, torch.Tensor)}

    def versions(self) -> int:
        """Return a number that changes when a weight is written to."""
        return sum(tensor._version for tensor in self.by_name.values())

    def apply(self, path: str, args: Any, kwargs: Any) -> tuple[Any, bool]:
        """Apply a module; return its result, and whether it wrote to its arguments or to weights."""
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        before = self.versions() + sum(tensor._version for tensor in given)
        self._called = True
        result = call_alone(self.by_path[path], args, kwargs)
        return result, self.versions() + sum(tensor._version for tensor in given) != before

    def run(
        self, tree: ModuleTree, interleaver: Interleaver, call: str, args: Any, kwargs: Any, costs: Costs | None = None
    ) -> Any:
        """Call the model on fakes of its arguments within ``interleaver``; return its fake output.

        ``costs`` counts the operations of the model in a rehearsal, where a generation makes two tokens even if no block waits for any.
        """
        self.busy = True
        run = self._run_once if call == "trace" else self._generate
        try:
            return run(tree, interleaver, args, kwargs, costs)
        finally:
            self.busy = False
            called, self._called = self._called, False
            if called and self.like is not None and describe(self.by_path.values()) != self._pristine:
                self.like = None  # the run changed the copy, so it is not used again

    def _run_once(self, tree: ModuleTree, interleaver: Interleaver, args: Any, kwargs: Any, costs: Costs | None) -> Any:
        """Call the model, or offer the occurrences of an earlier call."""
        key: Any = None
        if self.like is not None and not torch.is_grad_enabled():  # autograd would not know where kept fakes come from
            with contextlib.suppress(TypeError):
                key = tree.opened, costs is None, key_of((args, kwargs))
        fresh = FreshFakes(self._storages)

        def call(seen: list[Callable[[Any], Any]]) -> Any:
            counts["fake_runs"] += 1
            self._called = True
            start = 0 if costs is None else costs.of_model
            given, named = (self.faked(value) for value in (args, kwargs))
            with tree.intercept(self.by_path):
                output, occurrences = observed(interleaver, seen, lambda: self.root(*given, **named))
            if occurrences is not None and key is not None:
                self._known[key] = occurrences, 0 if costs is None else costs.of_model - start
                while len(self._known) > _KEPT:
                    self._known.popitem(last=False)
            return output

        known = self._known.get(key)
        if known is None:
            return call([])
        whole, output = replay(known[0], interleaver, fresh, call)
        if whole:
            counts["replays"] += 1
            if costs is not None:
                costs.add(known[1], of_model=True)
        return output

    def _generate(self, tree: ModuleTree, interleaver: Interleaver, args: Any, kwargs: Any, costs: Costs | None) -> Any:
        counts["fake_runs"] += 1
        self._called = True
        steps, (rows, length) = generation_size(self.root, args, kwargs)
        args, kwargs = (self.faked(value) for value in (args, kwargs))
        with contextlib.suppress(_Finished), self._ending(interleaver, steps, costs), tree.intercept(self.by_path):
            if kwargs.get("num_beams", 1) == 1:
                kwargs = {**kwargs, "streamer": Streamer()}
            self.root.generate(*args, **kwargs)  # type: ignore[operator]
        ids = torch.empty((rows, length + steps), dtype=torch.int64, device=self.device)
        return interleaver.handle("model.generator.output", ids)

    @contextlib.contextmanager
    def _ending(self, interleaver: Interleaver, steps: int, costs: Costs | None) -> Iterator[None]:
        """End a generation in time."""
        forward, calls, least = self.root.forward, 0, 1 if costs is None else 2
        step = FakeSteps(forward, interleaver, self._storages, costs)

        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            if calls >= steps or (calls >= least and interleaver.waited.keys() <= _AT_THE_END):
                raise _Finished
            calls += 1
            if costs is not None:
                costs.begin_step()
            return step(*args, **kwargs)

        # Of fakes, `generate` cannot tell that all sequences have ended: beam search would end with the first step.
        changed = {"forward": counted, "_has_unfinished_sequences": lambda *args, **kwargs: True}
        self.root.__dict__.update(changed)
        try:
            yield
            if not calls and steps:
                raise NotExpressibleError(
                    f"`generate` of {type(self.root).__name__} looks at values before it calls the model, so it cannot be recorded or "
                    "checked on fakes: run it without `remote=` and `program=`."
                )
        finally:
            for name in changed:
                del self.root.__dict__[name]

    def faked(self, value: Any) -> Any:
        """Return ``value`` with new fakes in place of its tensors, and copies of its caches, which the run fills."""

        def fake(tensor: torch.Tensor) -> torch.Tensor:
            return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=self.device)

        def leaf(item: Any) -> Any:
            if isinstance(item, torch.Tensor):
                return fake(item)
            return copy.deepcopy(item, {id(held): fake(held) for held in tensors_at(item)}) if is_batched_container(item) else item

        return pytree.tree_map(leaf, value, is_leaf=is_batched_container)


def _weights_of(root: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters and buffers, each with all its names."""
    yield from root.named_parameters(remove_duplicate=False)
    yield from root.named_buffers(remove_duplicate=False)


def input_key(args: Any, kwargs: Any) -> Any:
    """Return what distinguishes arguments of a model by their sizes; ``None`` if they have other values than tensors and plain data."""
    try:
        return key_of((args, kwargs))
    except TypeError:
        return None


def device_of(module: torch.nn.Module) -> torch.device:
    """Return the device of the input of a model."""
    tensor = next(iter(module.parameters()), None)
    return torch.device("cpu") if tensor is None else tensor.device


def generation_size(root: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[int, tuple[int, int]]:
    """Return the most tokens of a generation, and the number of its sequences with the length of its prompt."""
    ids = args[0] if args else kwargs.get("input_ids", kwargs.get("inputs"))
    rows, length = (ids.shape[0], ids.shape[1]) if isinstance(ids, torch.Tensor) and ids.dim() == 2 else (1, 0)
    config: Any = getattr(root, "generation_config", None)
    new = kwargs.get("max_new_tokens")
    if new is None and "max_length" in kwargs:
        new = kwargs["max_length"] - length
    if new is None:
        new = getattr(config, "max_new_tokens", None)
    if new is None:
        new = 20 if getattr(config, "max_length", None) in (None, 20) else config.max_length - length
    return max(int(new), 1), (rows * int(kwargs.get("num_return_sequences") or 1), length)
