"""Runs of a model on fake tensors. Clients use them to record blocks, and servers use them to check programs.

As in a scan, a copy of the model with fake tensors runs on fake inputs (:mod:`nnsight.runtime.rows.fakes`). The tokens of a generation on
fake tensors have no values, so none of them can end it. It ends when it has made the maximum number of tokens, or when no block waits for
any location except the result.

Each thread caches the copy of a model. The copy is dropped if the model changes (:mod:`~nnsight.program.run.descriptions`), or if a run
has changed the copy. The values at its locations are cached, too (:mod:`~nnsight.program.run.occurrences`).
"""

from __future__ import annotations

import contextlib
import copy
import functools
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
from .descriptions import describe, key_of
from .fake_steps import FakeSteps
from .occurrences import FreshFakes, Occurrence, observed, replay, tensors_at

if TYPE_CHECKING:
    from .costs import Costs

#: Locations after the last call of the model in a generation.
_AT_THE_END = frozenset({"result", "model.generator.output"})


class _Finished(BaseException):
    """Ends a generation. ``except Exception`` in the code of a model does not catch it."""


_local = threading.local()

#: Maximum number of kinds of input whose occurrences are cached.
_KEPT = 32


def fake_model_of(tree: ModuleTree) -> FakeModel:
    """Return a copy of a model with fake tensors, in the fake mode of this thread. Return the cached copy if it is valid and not busy."""
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
    """A copy of a model with fake tensors.

    Attributes:
        like: Description of the model, or ``None`` if a run has changed the copy, so that it is not used again.
        root: The copy.
        by_path: The copies of all modules, by path.
        by_name: The fake tensor of each parameter and buffer, by name.
        device: Device of the fake tensors.
        is_lazy: Whether the weights are not loaded, so that ``model.device`` is the meta device.
        weights: Name and fake tensor of each parameter and buffer, by ``id`` of the original.
        busy: Whether the copy is running.
    """

    def __init__(self, tree: ModuleTree, mode: FakeTensorMode, like: Any) -> None:
        counts["fake_models"] += 1
        device = device_of(tree.root)
        self.is_lazy = device.type == "meta"
        self.device = torch.device("cpu") if self.is_lazy else device
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
        #: For each kind of input, the occurrences (``None`` if they cannot be offered) and the operations of the model; ``None`` if blocks
        #: have replaced values in the first run, so that a run without blocks would be needed to know the occurrences.
        self._known: OrderedDict[Any, tuple[list[Occurrence] | None, int] | None] = OrderedDict()
        self.kept = frozenset(self.storages())
        self._pristine = describe(self.by_path.values())

    def storages(self) -> set[int]:
        """Return the identities of the storages that the model keeps from run to run."""
        holders = (held for module in self.by_path.values() for held in (module._parameters, module._buffers, vars(module)))
        kept = (leaf for held in holders for leaf in pytree.tree_leaves(list(held.values()), is_leaf=is_batched_container))
        return {leaf.untyped_storage()._cdata for leaf in kept if isinstance(leaf, torch.Tensor)}

    def versions(self) -> int:
        """Return a number that changes when a weight is edited in place."""
        return sum(tensor._version for tensor in self.by_name.values())

    def apply(self, path: str, args: Any, kwargs: Any) -> tuple[Any, bool]:
        """Apply the copy of the module at ``path``. Return its result, and whether it wrote to its arguments or to weights."""
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        before = self.versions() + sum(tensor._version for tensor in given)
        self._called = True
        result = call_alone(self.by_path[path], args, kwargs)
        return result, self.versions() + sum(tensor._version for tensor in given) != before

    def run(
        self, tree: ModuleTree, interleaver: Interleaver, call: str, args: Any, kwargs: Any, costs: Costs | None = None
    ) -> Any:
        """Call the model on fake arguments within ``interleaver``, and return its fake output.

        ``costs`` counts the operations of the model. With it, a generation makes at least two tokens, even if no block waits for them.
        """
        self.busy = True
        run = self._run_once if call == "trace" else self._generate
        try:
            return run(tree, interleaver, args, kwargs, costs)
        finally:
            self.busy = False
            called, self._called = self._called, False
            if called and self.like is not None and describe(self.by_path.values()) != self._pristine:
                self.like = None

    def _run_once(self, tree: ModuleTree, interleaver: Interleaver, args: Any, kwargs: Any, costs: Costs | None) -> Any:
        """Call the model, or offer the occurrences of an earlier call."""
        key: Any = None
        if self.like is not None and not torch.is_grad_enabled():  # cached fakes have no autograd graph
            with contextlib.suppress(TypeError):
                key = tree.opened, costs is None, key_of((args, kwargs))
        fresh = FreshFakes(self.kept)

        def call(seen: list[Callable[[Any], Any]], run: Interleaver | None = interleaver) -> Any:
            counts["fake_runs"] += 1
            self._called = True
            start = 0 if costs is None else costs.of_model
            given, named = (self.faked(value) for value in (args, kwargs))
            with tree.intercept(self.by_path):
                made = observed(lambda: self.root(*given, **named), run, seen, fresh)
            if key is not None and made.occurrences is not None:
                kept = FreshFakes(self.kept)  # blocks hold the tensors of this call, and these may become other tensors
                self._known[key] = [found.with_tensors(kept) for found in made.occurrences], 0 if costs is None else costs.of_model - start
            elif key is not None and made.alike:
                self._known.setdefault(key, None)
            while len(self._known) > _KEPT:
                self._known.popitem(last=False)
            return made.output

        if key not in self._known:
            return call([])
        if self._known[key] is None:
            self._known[key] = None, 0
            with contextlib.nullcontext() if costs is None else costs.apart():
                call([], None)
        occurrences, flops = self._known[key] or (None, 0)
        if occurrences is None:
            return call([])
        whole, output = replay(occurrences, interleaver, fresh, call)
        if whole:
            counts["replays"] += 1
            if costs is not None:
                costs.add(flops, of_model=True)
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
        """End a generation when it has made ``steps`` tokens, or when no block waits for a location before its end."""
        forward, calls, least = self.root.forward, 0, 1 if costs is None else 2
        step = FakeSteps(forward, interleaver, self.kept, costs)

        @functools.wraps(forward)  # `generate` reads the signature: for instance, whether `forward` takes `logits_to_keep`
        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            if calls >= steps or (calls >= least and interleaver.waited.keys() <= _AT_THE_END):
                raise _Finished
            calls += 1
            if costs is not None:
                costs.begin_step()
            return step(*args, **kwargs)

        # On fake tensors, `generate` would guess that no sequence is unfinished, and beam search would end after the first step.
        changed = {"forward": counted, "_has_unfinished_sequences": lambda *args, **kwargs: True}
        self.root.__dict__.update(changed)
        try:
            yield
            if not calls and steps:
                raise NotExpressibleError(
                    f"`generate` of {type(self.root).__name__} needs values before it calls the model, so it cannot be recorded or checked "
                    "on fake tensors. Run it without `remote=` and `program=`."
                )
        finally:
            for name in changed:
                del self.root.__dict__[name]

    def faked(self, value: Any) -> Any:
        """Return ``value`` with new fake tensors in place of its tensors. Its caches are copied, because the run fills them."""

        def fake(tensor: torch.Tensor) -> torch.Tensor:
            return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=self.device)

        def leaf(item: Any) -> Any:
            if isinstance(item, torch.Tensor):
                return fake(item)
            return copy.deepcopy(item, {id(held): fake(held) for held in tensors_at(item)}) if is_batched_container(item) else item

        return pytree.tree_map(leaf, value, is_leaf=is_batched_container)


def _weights_of(root: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and tensor of each parameter and buffer. A shared tensor has several names."""
    yield from root.named_parameters(remove_duplicate=False)
    yield from root.named_buffers(remove_duplicate=False)


def input_key(args: Any, kwargs: Any) -> Any:
    """Return :func:`key_of` the arguments of a model, or ``None`` if they contain objects other than tensors and plain data."""
    try:
        return key_of((args, kwargs))
    except TypeError:
        return None


def device_of(module: torch.nn.Module) -> torch.device:
    """Return the device of the first parameter of a model, which is where its input belongs; the CPU if it has none."""
    tensor = next(iter(module.parameters()), None)
    return torch.device("cpu") if tensor is None else tensor.device


def generation_size(root: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[int, tuple[int, int]]:
    """Return the maximum number of new tokens of a generation, and its number of sequences and the length of its prompt as a pair."""
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
