"""Recording: a block runs with lazy tensors, and its torch calls become a program.

One :class:`Recording` is one run over one captured graph. It walks the taps of the graph in order and offers lazy values to the
interleaver, in the same way as the eager driver offers real ones. A ``TorchFunctionMode`` sees every torch call of the block:

* A call on lazy tensors becomes an event of the program. Its result is computed on fakes, so a mistake in shapes raises at the user's line.
* A call on tensors from outside runs at once. Its result is an *external*, an input of the spliced graph.
* A call on a tensor from outside that the program already uses is recorded, which keeps reads and in-place edits in order.
* A call that needs a concrete value cuts the graph: the part up to the current tap is lowered and run, all lazy tensors become real, and
  the call is made on them. The rest of the graph is the next piece.

Each event is first looked up among the programs known for the graph (:class:`~nnsight.fx.block_events.State`). A run that follows a
known program computes no fakes and makes no nodes.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch

from ...runtime.errors import (
    EarlyStopException,
    MissedProviderError,
    ReplacementShapeError,
    replacement_message,
    structure_message,
    uncaptured_message,
)
from ...runtime.switching.modes import Modes
from ..block_events import External, Input, Skip, ValueNumber, Visit, Write
from ..capturing.graph import Tap
from ..capturing.structures import unflatten
from ..capturing.taps import Opaque, flatten
from ..counters import counters, stage
from .autograd_state import wanting_at
from .deferred_outputs import DeferredOutput, is_of_root
from .execution import PieceRunner
from .functions import instead_of
from .lazy import LazyTensor
from .opaque_functions import made_visible
from .seeding import watched_generator


class Recording(PieceRunner):
    """One run of the active blocks over a captured graph."""

    def walk(self) -> list[Any]:
        """Run the blocks over the taps, and then the graph. Returns the outputs of the graph, or stand-ins if nobody sees them."""
        run = self.run
        self.report.graphs += 1
        before = run.check_replacement, run.check_skip, run.check_location
        run.check_replacement, run.check_skip, run.check_location = self._check_replacement, self._check_skip, self._check_location
        try:
            with stage("record"), made_visible, watched_generator, self.modes.of_a_block(), self:
                index = 0
                while run.waited:  # a block has code left to run
                    tap = self._next_stop(index)
                    if tap is None:
                        break
                    self._stop_at(tap)
                    index = tap.index + 1
                    if run.skips:
                        index = max(index, self._skip(tap))
            self.tap = None
            run.check_replacement, run.check_skip, run.check_location = before
            run.release()
            self.settle()
            outputs = self.finish()
        except EarlyStopException:
            self.settle_end()
            if self.tap is not None:  # compute the values that the blocks have read, and nothing after them
                self._run_piece(self.graph.order[self.tap.node], [])
            raise
        except BaseException as error:
            if error is run.failure:  # a block failed: end the others while their tensors can still be computed
                with made_visible, watched_generator, self.modes.of_a_block(), self:
                    run.end_blocks()
            if isinstance(error, Exception):
                self._compute_live_tensors()
            self._abandon()
            raise
        finally:
            self.close()
        if self.recorded:
            counters.add("recordings")
            self.report.recordings += 1
        return outputs

    def _next_stop(self, start: int) -> Tap | None:
        """Return the first tap from number ``start`` on at which a block waits, or ``None``; count the occurrences before it."""
        run, counts, passed = self.run, self.run.counts, self.graph.passed
        waited, steps = run.waited.keys(), run.awaited_steps
        while True:
            stop = start if steps else next((index for index in range(start, len(passed)) if passed[index] in waited), len(passed))
            if stop > start:
                counts.update(passed[start:stop])
            if stop >= len(passed):
                return None
            location = passed[stop]
            if (location in waited or counts[location] in steps) and run.is_waited(location):
                return self.graph.taps[stop]
            counts[location] += 1
            start = stop + 1

    def _stop_at(self, tap: Tap) -> None:
        self.tap = tap
        self.random = self.random or self.graph.draws_between(self.piece.start, self.graph.order[tap.node])
        if self._next_edit is not None:
            self._watch_edits(self.graph.order[tap.node])
        leaves = self._visit(tap)
        if self._shows_edits(tap):
            self.cut("an array outside of torch has memory that the model may have edited", instead_of("numpy"))
        self._defer(tap, leaves)
        value = leaves[0] if tap.is_single else unflatten(leaves, tap.structure)
        self.report.spliced.append(tap.location)
        if self.journal is not None and not tap.is_single:
            self.journal.structures.append(tap.structure)
        switched = self.graph.switched.get(tap.node)
        if switched is None:
            changed = self.run.handle(tap.location, value)
        else:
            with switched.on_thread():  # in the eager model, the block runs inside the model's autocast and grad mode
                self.modes_at_tap = Modes.now()
                changed = self.run.handle(tap.location, value)
            self.modes_at_tap = None
        if changed is not value or not tap.is_single:  # a block may have assigned items of a container
            self._write(tap, leaves, changed)

    def _watch_edits(self, position: int) -> None:
        """Record all later calls on inputs that the model edits before node number ``position``, because they have to see the edits."""
        while self._next_edit is not None and self._next_edit[0] < position:
            _, inputs = self._next_edit
            self.used += [self.inputs[index] for index in inputs]
            self._next_edit = next(self._edits, None)

    def _skip(self, tap: Tap) -> int:
        """Skip the module whose input is at ``tap``, if a block requests it. Returns the number of the next tap, or 0 without a request."""
        asked = self.run.take_skip(tap.location)
        if not asked:
            return 0
        until, leaves = self._check_return(tap, asked[0])
        new_leaves = flatten(asked[0])[0]
        self._compare(leaves, new_leaves)
        sources = tuple((number, self.refer(new_leaves[number])) for number in until.tensor_leaves)
        self.step(Skip(tap.index, until.index, sources))
        self.substitutes.update({until.leaves[number]: source for number, source in sources})
        return until.index

    def _check_skip(self, path: str, value: Any) -> None:
        """Raise, at the user's line, if ``value`` cannot replace the output of a skipped module."""
        current, tap = self.run.current, self.tap  # values of invokes are checked in `_skip`, after they are joined
        if current is not None and current.batch_group is None and tap is not None and tap.location == f"{path}.input":
            self._check_return(tap, value)

    def _check_return(self, tap: Tap, value: Any) -> tuple[Tap, list[Any]]:
        """Return the output tap of the module whose input is at ``tap``, and its leaves; raise if ``value`` cannot replace the output."""
        path = tap.location.removesuffix(".input")
        until = next((other for other in self.graph.taps[tap.index + 1 :] if other.location == f"{path}.output"), None)
        if until is None:
            raise ValueError(
                f"`{path}` cannot be skipped in this compiled trace: dynamo broke the graph inside it. Use `trace(..., compile=False)`."
            )
        leaves = [
            self.graph.fake(leaf, self.binding) if until.is_tensor(leaf) else self.graph.constant_leaf(until, leaf, self.binding)
            for leaf in until.leaves
        ]
        self._check_leaves(until, leaves, value)
        return until, leaves

    def _visit(self, tap: Tap) -> list[Any]:
        """Return the leaves of ``tap`` as the block sees them."""
        references: list[Any] = []
        fresh: list[int] = []
        nodes: list[torch.fx.Node] = []
        for number, leaf in enumerate(tap.leaves):
            if not tap.is_tensor(leaf):
                references.append(leaf)
                continue
            reference = self.resolve(leaf)
            if isinstance(reference, torch.fx.Node):
                self.fakes.append(self.graph.fake(reference, self.binding))
                self.lazies.append(None)
                fresh.append(number)
                nodes.append(reference)
                self.value_of[reference] = len(self.fakes) - 1
                reference = ValueNumber(len(self.fakes) - 1)
            references.append(reference)
        state = self.step(Visit(tap.index, tuple(fresh)))  # also without new tensors, because the taps of calls are part of the program
        if state.requires_grad is None:
            before = len(self.requires_grad)
            self.requires_grad += [node.meta["example_value"].requires_grad for node in nodes]  # as captured, until it is known
            state.requires_grad = tuple(wanting_at(self, node) for node in nodes)
            del self.requires_grad[before:]
        self.requires_grad += state.requires_grad
        return [
            self._object(reference)
            if isinstance(reference, (ValueNumber, Input, External))
            else self.graph.constant_leaf(tap, reference, self.binding)
            for reference in references
        ]

    def _defer(self, tap: Tap, leaves: list[Any]) -> None:
        """Put deferred outputs into the output of the whole model, in place of objects, unless invokes see only their own rows."""
        run = self.run
        if run.deferred_outputs is None or not is_of_root(tap.location) or not any(isinstance(leaf, Opaque) for leaf in leaves):
            return
        if all(mediator.batch_group is None for mediator in run.mediators):
            output = DeferredOutput(run, tap.location, tap.structure)
            run.deferred_outputs.append(output)
            leaves[:] = [
                output.stand_in(leaf, number) if isinstance(leaf, Opaque) else leaf for number, leaf in enumerate(leaves)
            ]

    def _check_location(self, location: str) -> None:
        """Raise, at the user's line, if the requested operation is not in the captured graph."""
        function, known = location.rpartition(".source.")[0], self.graph.locations
        if not function or location in known:
            return
        module_ran = f"{function.partition('.source.')[0]}.input" in known
        if f"{function}.input" in known or (module_ran and not any(other.startswith(f"{function}.source.") for other in known)):
            raise MissedProviderError(uncaptured_message(location))

    def _check_replacement(self, location: str, old: Any, new: Any) -> None:
        """Raise, at the user's line, if the captured graph cannot continue with a replacement."""
        tap = self.tap
        if tap is None or tap.location != location:
            return
        leaves, structure = flatten(old)
        if structure == tap.structure:  # in an invoke, a list may have fewer items: the value of all invokes is checked later
            self._check_leaves(tap, leaves, new)

    def _check_leaves(self, tap: Tap, old_leaves: list[Any], new: Any) -> None:
        """Raise if ``new`` cannot replace the value of ``tap``, whose leaves have the metadata of ``old_leaves``."""
        location = tap.location
        new_leaves, structure = flatten(new)
        if structure != tap.structure:
            message = structure_message(location, structure, tap.structure)
            raise ReplacementShapeError(f"{message} Replace a tuple by a tuple, a dict by a dict with the same keys.")
        for old_leaf, new_leaf, leaf in zip(old_leaves, new_leaves, tap.leaves, strict=True):
            if old_leaf is new_leaf:
                continue
            if tap.is_tensor(leaf):
                if not isinstance(new_leaf, torch.Tensor):
                    raise TypeError(
                        f"The replacement of `{location}` has a {type(new_leaf).__name__} where the model has a tensor, and the captured "
                        "graph needs a tensor there. Use `trace(..., compile=False)` if the model accepts the replacement."
                    )
                if new_leaf.layout is not torch.strided:
                    raise TypeError(
                        f"The replacement of `{location}` has the layout {new_leaf.layout}, which the captured graph cannot contain. Use "
                        "`.to_dense()`, or `trace(..., compile=False)` if the model accepts the layout."
                    )
                shape, expected = tuple(new_leaf.shape), tuple(old_leaf.shape)
                if shape != expected:
                    raise ReplacementShapeError(
                        f"{replacement_message(location, shape, expected)} The captured graph is for that shape. Use "
                        "`trace(..., compile=False)` if the model accepts another."
                    )
            elif type(old_leaf) is not type(new_leaf) or old_leaf != new_leaf:
                raise ValueError(
                    f"The replacement of `{location}` changes {old_leaf!r} to {new_leaf!r}, which the captured graph has "
                    "as a constant. Use `trace(..., compile=False)` for this edit."
                )
        if self.graph.compares_tensors and location.endswith(".input") and _separates(old_leaves, new_leaves):
            raise ValueError(
                f"The replacement of `{location}` changes one of several arguments that are the same tensor, but the captured graph "
                "is only valid while they are the same (attention, for example, projects them together). Replace all of them, or use "
                "`trace(..., compile=False)` for this edit."
            )

    def _write(self, tap: Tap, leaves: list[Any], changed: Any) -> None:
        """Record which tensors of ``tap`` the blocks replaced."""
        new_leaves = flatten(changed)[0]
        if all(map(operator.is_, leaves, new_leaves)) and len(leaves) == len(new_leaves):
            return
        value = unflatten(leaves, tap.structure)
        self._check_replacement(tap.location, value, changed)  # items assigned inside a dict or a list are not checked before
        self._compare(leaves, new_leaves)
        for number, (old, new) in enumerate(zip(leaves, new_leaves, strict=True)):
            if old is not new and isinstance(new, torch.Tensor):
                reference = self.refer(new)
                self.step(Write(tap.index, number, reference))
                self.writes[tap.index, number] = reference

    def _compare(self, leaves: Sequence[Any], new_leaves: Sequence[Any]) -> None:
        """Note whether a replacement has other metadata than the replaced leaf, and whether it has other strides."""
        pairs = [(old, new) for old, new in zip(leaves, new_leaves, strict=True) if new is not old]
        self.as_captured = self.as_captured and all(_is_like(new, old) for old, new in pairs)
        self.relaid = self.relaid or any(_stride_of(new) != _stride_of(old) for old, new in pairs)


def _separates(old: Sequence[Any], new: Sequence[Any]) -> bool:
    """Whether tensors that are one object in ``old`` are different objects in ``new``."""
    now: dict[int, Any] = {}
    pairs = ((one, other) for one, other in zip(old, new, strict=True) if isinstance(one, torch.Tensor))
    return any(now.setdefault(id(one), other) is not other for one, other in pairs)


def _is_like(new: Any, old: Any) -> bool:
    """Whether two tensors have the same metadata. Other leaves are known to be equal."""
    if not isinstance(old, torch.Tensor):
        return True
    one, other = (leaf._fake if isinstance(leaf, LazyTensor) else leaf for leaf in (new, old))
    described = ((one.dtype, one.device, one.layout, one.shape), (other.dtype, other.device, other.layout, other.shape))
    return described[0] == described[1] and one.layout is torch.strided and one.stride() == other.stride()


def _stride_of(value: Any) -> tuple[int, ...] | None:
    tensor = value._fake if isinstance(value, LazyTensor) else value
    return tensor.stride() if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided else None
