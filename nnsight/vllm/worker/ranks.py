"""One step of an engine on several devices: the leader runs the blocks, and followers stop at the same locations.

With tensor parallelism each device has a process of its own, and all processes run the same modules in the same order. Blocks run only in
the *leader*, which is the user's process. So user code runs once, in the same process as with one device. The other processes *follow*:

* Before the model runs, the leader sends the locations at which blocks wait. All processes stop there, and nowhere else.
* At such a location the leader tells whether a block wants this occurrence. If so, the leader gathers the parts of spread values
  (:mod:`~nnsight.vllm.worker.spread`), the blocks work on whole values, and the leader scatters changes and sends the next locations.
* If a step has only a part of a prompt, captured values are gathered at every location: which of them its block will ask for is not known.
* If a block calls a module whose weights are spread, the followers make the same call, with the arguments of the block.
* Followers use the sampled tokens of the leader: user code may draw random numbers in the leader that followers do not draw.

Followers decide nothing, so the ranks cannot diverge. Messages go through a connection, tensors through vLLM's group of devices. If an
exception that is no error of a request (Ctrl-C) ends a step in the leader, the leader tells the followers, and all abandon the step.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from operator import is_
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from .calls import SPREAD, apply
from .request_rows import ordinary
from .requests import LOGITS, SAMPLES
from .spread import Spread, Spreads
from .steps import EngineStep, Part

#: The leader's messages at a location: no block wants this occurrence; blocks work on it; the step is abandoned.
PASS, WORK, ABANDON = "pass", "work", "abandon"

#: Locations at which only the leader stops, because followers get the sampled tokens from it.
_LEADER_ONLY = frozenset((LOGITS, SAMPLES))

_PARTS = (
    "The value at `{location}` is not the same on all {devices} devices of this engine, and it is not known how it is spread. These values "
    "can be read as a whole: outputs of column-parallel layers (`qkv_proj`, `gate_up_proj`), inputs of row-parallel layers "
    "(`o_proj`, `down_proj`), and outputs of attention, MLPs and whole layers."
)


def send(message: Any, connections: Iterable[Any]) -> None:
    """Send ``message``, with tensors by value: ``Connection.send`` would share their memory, and both sides would have to keep it."""
    data = pickle.dumps(message)
    for connection in connections:
        connection.send_bytes(data)


class ModuleCall(NamedTuple):
    """A message: a block calls the module at ``path``. A :class:`Form` stands for each tensor, and the tensors follow through the group."""

    path: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class Form:
    """The size and dtype of a tensor that is sent separately."""

    size: torch.Size
    dtype: torch.dtype


class Abandoned(Exception):
    """Raised in a follower when the leader has abandoned the step."""


class SingleRank:
    """The only rank of an engine."""

    attended = False

    def step(self, runner: Any, parts: Sequence[Part], last: EngineStep | None = None) -> EngineStep | None:
        """Return the step that the model is about to make, or ``None`` if no request has to stop in it.

        ``parts`` are the parts of the requests with blocks. ``last`` is the previous step if it has the same parts and can be reused.
        """
        if last is not None:
            return last.again()
        return EngineStep(parts) if parts else None

    def sampled(self, step: EngineStep | None, ids: torch.Tensor) -> torch.Tensor:
        """Offer the sampled tokens ``ids``, ``[requests, 1]``, to the blocks, and return the tokens as blocks leave them."""
        return ids if step is None else step.meet(SAMPLES, ids)


class Group:
    """Exchanges tensors between the devices of vLLM's tensor-parallel ``group``."""

    #: The methods of vLLM's group that modules call.
    _COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "gather", "broadcast")

    def __init__(self, group: Any) -> None:
        self._group = group
        self.devices: int = group.world_size
        self.rank: int = group.rank_in_group

    def alike(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether all devices have the same ``tensors``. Every rank gets the answer."""
        if not tensors:
            return True
        mine = torch.stack([_digest(tensor) for tensor in tensors])
        found = [torch.empty_like(mine) for _ in range(self.devices)]
        torch.distributed.all_gather(found, mine, group=self._group.device_group)
        return all(torch.equal(found[0], other) for other in found[1:])

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of all ranks at rank 0, and an empty list at other ranks."""
        found = [torch.empty_like(tensor).contiguous() for _ in range(self.devices)] if self.rank == 0 else None
        into = None if found is None else [_bytes(part) for part in found]
        torch.distributed.gather(_bytes(tensor), into, dst=self._group.ranks[0], group=self._group.device_group)
        return found or []

    def scatter(self, parts: Sequence[torch.Tensor] | None, like: torch.Tensor) -> torch.Tensor:
        """Return this rank's item of ``parts``, which rank 0 has. The item has the shape and dtype of ``like``."""
        mine = torch.empty_like(like).contiguous()
        given = None if parts is None else [_bytes(part) for part in parts]
        torch.distributed.scatter(_bytes(mine), given, src=self._group.ranks[0], group=self._group.device_group)
        return mine

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the ``tensor`` of rank 0. Other ranks pass a tensor of the same shape and dtype, whose data may be overwritten."""
        data = _bytes(tensor)
        torch.distributed.broadcast(data, src=self._group.ranks[0], group=self._group.device_group)
        return data.view(tensor.dtype).view(tensor.shape)

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Refuse collective operations of modules inside of this context, where the other ranks would not take part."""

        def refused(*_: Any, **__: Any) -> Any:
            raise NotImplementedError(SPREAD.format(devices=self.devices))

        for name in self._COLLECTIVES:
            setattr(self._group, name, refused)
        try:
            yield
        finally:
            self._open()

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Allow collective operations inside of this context, where the other ranks take part."""
        held = {name: vars(self._group)[name] for name in self._COLLECTIVES if name in vars(self._group)}
        self._open()
        try:
            yield
        finally:
            vars(self._group).update(held)

    def _open(self) -> None:
        for name in self._COLLECTIVES:
            vars(self._group).pop(name, None)


class Leader(SingleRank):
    """The rank whose process runs the blocks. ``attended`` says whether the engine has requests with blocks; followers know it, too."""

    def __init__(self, connections: Sequence[Any], group: Group, spreads: Spreads) -> None:
        self.tell = functools.partial(send, connections=connections)
        self.group, self.spreads = group, spreads

    def step(self, runner: Any, parts: Sequence[Part], last: EngineStep | None = None) -> EngineStep | None:
        if isinstance(last, _LeaderStep):
            step: _LeaderStep | None = last.again()
        else:
            step = _LeaderStep(parts, self, runner.tree) if parts else None
        if self.attended:
            self.tell(None if step is None else (step.keeps, *step.announcement()))
        return step

    def sampled(self, step: EngineStep | None, ids: torch.Tensor) -> torch.Tensor:
        ids = super().sampled(step, ids)
        self.tell(ids.tolist())
        return ids

    def call(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the module at ``path`` on values of a block, together with the followers, and return its whole output."""
        args, kwargs = pytree.tree_map_only(torch.Tensor, torch.Tensor.contiguous, (args, kwargs))
        forms = pytree.tree_map_only(torch.Tensor, lambda tensor: Form(tensor.shape, tensor.dtype), (args, kwargs))
        self.tell(ModuleCall(path, *forms))
        with self.group.opened():
            for leaf in pytree.tree_leaves((args, kwargs)):
                if isinstance(leaf, torch.Tensor):
                    self.group.broadcast(leaf)
            return _call_on_all_ranks(self, path, args, kwargs)

    @contextmanager
    def serving(self, parts: Iterable[Part]) -> Iterator[None]:
        """Inside of this context, let the blocks of ``parts`` call modules. Modules with spread weights are called through :meth:`call`."""
        runs = [part.run for part in parts]
        for run in runs:
            run.call_together = self.call
        try:
            with self.group.closed():
                yield
        finally:
            for run in runs:
                run.call_together = None


class _LeaderStep(EngineStep):
    """A step of the leader, which gathers each value that blocks want, and scatters their changes."""

    def __init__(self, parts: Sequence[Part], leader: Leader, tree: Any) -> None:
        super().__init__(parts)
        self._leader, self._tree = leader, tree
        self.waited: set[str] = set()  # updated in place: a call that has begun reads the same set at its end

    def announcement(self) -> tuple[set[str], frozenset[str]]:
        """Return the locations at which all ranks stop next, and the paths of the functions whose operations can be among them."""
        self.waited.clear()
        for part in self.parts:
            self.waited.update(part.run.waited, part.run.stops)
        return self.waited, self._tree.sources

    def meet(self, location: str, value: Any) -> Any:
        leader = self._leader
        try:
            if location in _LEADER_ONLY:
                with leader.serving(self.parts):
                    return super().meet(location, value)
            wanting = [part.run for part in self.parts if part.run.wants(location)]
            leader.tell(WORK if wanting else PASS)
            if not wanting:
                return super().meet(location, value)
            return self._meet_whole(location, value, wanting)
        except BaseException:
            leader.tell(ABANDON)
            raise

    def keep(self, location: str, value: Any) -> None:
        leaves, structure = pytree.tree_flatten(value)
        _, alike, whole = _gathered(self._leader, location, leaves)
        super().keep(location, pytree.tree_unflatten(whole, structure) if alike else None)

    def _meet_whole(self, location: str, value: Any, wanting: list[Any]) -> Any:
        leader, group = self._leader, self._leader.group
        leaves, structure = pytree.tree_flatten(value)
        with ordinary():
            spreads, alike, whole = _gathered(leader, location, leaves)
            made = [leaf._version if isinstance(leaf, torch.Tensor) else 0 for leaf in whole]
            with leader.serving(self.parts):
                for run in wanting:
                    if not alike or any(earlier is None for earlier in run.kept.get(location, ())):
                        run.fail(ValueError(_PARTS.format(location=location, devices=group.devices)))
                left = pytree.tree_leaves(super().meet(location, pytree.tree_unflatten(whole, structure)))
            changes = [
                (index, in_place)
                for index, (before, after) in enumerate(zip(whole, left, strict=True))
                if isinstance(before, torch.Tensor)
                for in_place in (True, False)
                if (before._version > made[index] if in_place else after is not before)
            ]
            leader.tell((changes, *self.announcement()))
            new = {}
            for index, in_place in changes:
                changed, spread = (whole if in_place else left)[index], spreads[index]
                parts = [changed if spread is None else spread.part(changed, rank, group.devices) for rank in range(group.devices)]
                new[index, in_place] = group.scatter(parts, leaves[index])
        return _with_changes(value, leaves, structure, new)


class Follower(SingleRank):
    """A rank that stops where the leader stops. Its ``tree`` of modules equals that of the leader."""

    def __init__(self, connection: Any, group: Group, spreads: Spreads, tree: Any) -> None:
        self._connection = connection
        self.group, self.spreads, self.tree = group, spreads, tree

    def hear(self) -> Any:
        """Make the calls of modules that the leader asks for, and return its next other message.

        Raises:
            Abandoned: If the leader has abandoned the step.
        """
        while isinstance(message := self._connection.recv(), ModuleCall):
            with ordinary(), suppress(Exception):  # the leader raises the same error
                device = next(self.spreads.module(message.path).parameters()).device

                def received(form: Form, device: torch.device = device) -> torch.Tensor:
                    return self.group.broadcast(torch.empty(form.size, dtype=form.dtype, device=device))

                args, kwargs = pytree.tree_map_only(Form, received, (message.args, message.kwargs))
                _call_on_all_ranks(self, message.path, args, kwargs)
        if isinstance(message, str) and message == ABANDON:
            raise Abandoned
        return message

    def step(self, runner: Any, parts: Sequence[Part], last: EngineStep | None = None) -> EngineStep | None:
        message = self.hear() if self.attended else None
        return None if message is None else _FollowerStep(self, message)

    def sampled(self, step: EngineStep | None, ids: torch.Tensor) -> torch.Tensor:
        return ids.copy_(torch.tensor(self.hear(), dtype=ids.dtype))


class _FollowerStep(EngineStep):
    """A step of a follower: it has no blocks, and stops where the leader stops."""

    def __init__(self, follower: Follower, announcement: Any) -> None:
        super().__init__([])
        self._follower = follower
        self.waited: set[str] = set()
        self.keeps, *rest = announcement
        self._take(*rest)

    def keep(self, location: str, value: Any) -> None:
        _gathered(self._follower, location, pytree.tree_leaves(value))

    def _take(self, waited: set[str], sources: frozenset[str]) -> None:
        self.waited.clear()
        self.waited.update(waited)
        for path in sorted(sources - self._follower.tree.sources):
            self._follower.tree.open_source(path)

    def meet(self, location: str, value: Any) -> Any:
        follower = self._follower
        if location in _LEADER_ONLY or follower.hear() == PASS:
            return value
        leaves, structure = pytree.tree_flatten(value)
        with ordinary():
            _gathered(follower, location, leaves)
            changes, *announcement = follower.hear()
            self._take(*announcement)
            new = {change: follower.group.scatter(None, leaves[change[0]]) for change in changes}
        return _with_changes(value, leaves, structure, new)


def _gathered(rank: Leader | Follower, location: str, leaves: Sequence[Any]) -> tuple[list[Spread | None], bool, list[Any]]:
    """Return the spreads of ``leaves``, whether the leaves without a spread are the same on all devices, and the whole leaves.

    Only the leader gets whole leaves, as new tensors; followers get ``leaves``.
    """
    spreads = rank.spreads.of(location, leaves)
    rest = [leaf for leaf, spread in zip(leaves, spreads, strict=True) if spread is None and isinstance(leaf, torch.Tensor)]
    alike, whole = rank.group.alike(rest), list(leaves)
    for index, (leaf, spread) in enumerate(zip(leaves, spreads, strict=True)):
        if spread is not None:
            parts = rank.group.gather(leaf)
            whole[index] = spread.join(parts) if parts else leaf
        elif isinstance(leaf, torch.Tensor) and rank.group.rank == 0:
            whole[index] = leaf.clone()  # a clone has its own version, which shows edits
    return spreads, alike, whole


def _call_on_all_ranks(rank: Leader | Follower, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call this rank's part of the module at ``path`` on whole values, which all ranks have. The leader returns the whole output."""
    leaves, structure = pytree.tree_flatten((args, kwargs))
    group = rank.group
    given = rank.spreads.parts_of(f"{path}.input", leaves, group.rank, group.devices)
    args, kwargs = pytree.tree_unflatten(given, structure)
    made, structure = pytree.tree_flatten(apply(rank.spreads.module(path), args, kwargs))
    for index, spread in enumerate(rank.spreads.of(f"{path}.output", made)):
        if spread is not None:
            parts = group.gather(made[index])
            made[index] = spread.join(parts) if parts else made[index]
    return pytree.tree_unflatten(made, structure)


def _with_changes(value: Any, leaves: list[Any], structure: Any, new: dict[tuple[int, bool], torch.Tensor]) -> Any:
    """Return ``value`` with the changes ``new``. Their keys are the index of a leaf, and whether the change edits the leaf in place."""
    changed = list(leaves)
    for (index, in_place), tensor in new.items():
        if in_place:
            leaves[index].copy_(tensor)
        else:
            changed[index] = tensor
    return value if all(map(is_, changed, leaves)) else pytree.tree_unflatten(changed, structure)


def _digest(tensor: torch.Tensor) -> torch.Tensor:
    """Return an int64 checksum of ``tensor``, which is equal for equal bits."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.contiguous().view(integer).sum(dtype=torch.int64)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` as bytes, which every group of devices can send. A contiguous tensor is not copied."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)
