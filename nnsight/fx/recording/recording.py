"""Recording: a block runs against lazy tensors and leaves a program behind.

One :class:`Recording` is one run over one captured graph. It walks the graph's taps in order and offers lazy values to the
interleaver, exactly as the eager driver offers real ones. A ``TorchFunctionMode`` sees every torch call of the block:

* A call on lazy tensors becomes an event of the program. Its result is computed on fakes, so a mistake in shapes raises at the user's line.
* A call on tensors from outside runs at once. Its result is an *external*, an input of the spliced graph.
* A call on a tensor from outside that the program already uses is recorded, which keeps reads and in-place edits in order.
* A call that needs a concrete value cuts the graph: the part up to here is lowered and run, all lazy tensors become real, and the call
  is made on them. The rest of the graph is the next piece.

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
from .opaque_functions import shown


class Recording(PieceRunner):
    """One run of the active blocks over a captured graph."""

    def walk(self) -> list[Any]:
        """Run the blocks over the graph and then the graph; return the graph's outputs, or stand-ins if nobody sees them."""
        run = self.run
        self.report.graphs += 1
        before = run.check_replacement, run.check_skip, run.check_location
        run.check_replacement, run.check_skip, run.check_location = self._check_replacement, self._check_skip, self._check_location
        try:
            with stage("record"), shown, self.modes.of_a_block(), self:
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
            if self.tap is not None:  # compute what the blocks have seen, and nothing behind it
                self._run_piece(self.graph.order[self.tap.node], [])
            raise
        except BaseException as error:
            if error is run.failure:  # one of a block: the others end while what they hold can still be computed
                with shown, self.modes.of_a_block(), self:
                    run.end_blocks()
            if isinstance(error, Exception):
                self._compute_what_is_held()
            self._abandon()
            raise
        finally:
            self.close()
        if self.recorded:
            counters.add("recordings")
            self.report.recordings += 1
        return outputs

    def _next_stop(self, start: int) -> Tap | None:
        """Return the first tap from number ``start`` on where a block waits, and count those before it; ``None`` if there is none."""
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
        if self._next_edit is not None:
            self._watch_edits(self.graph.order[tap.node])
        leaves = self._visit(tap)
        if self._shows_edits(tap):
            self.cut("an array outside of torch has memory that the model may have edited", instead_of("numpy"))
        self._defer(tap, leaves)
        value = leaves[0] if tap.is_single else unflatten(leaves, tap.structure)
        self.report.spliced.append(tap.location)
        switched = self.graph.switched.get(tap.node)
        if switched is None or not switched.entered:
            changed = self.run.handle(tap.location, value)
        else:
            with switched.autocast():  # the block is called from inside, as it is in the eager model
                self.modes_at_tap = Modes.now()
                changed = self.run.handle(tap.location, value)
            self.modes_at_tap = None
        if changed is not value or not tap.is_single:  # a container may have been filled anew
            self._write(tap, leaves, changed)

    def _watch_edits(self, position: int) -> None:
        """Record calls on those inputs of the piece that the model edits before node number ``position``: they have to see the edits."""
        while self._next_edit is not None and self._next_edit[0] < position:
            _, inputs = self._next_edit
            self.used += [self.inputs[index] for index in inputs]
            self._next_edit = next(self._edits, None)

    def _skip(self, tap: Tap) -> int:
        """Leave out the module whose input ``tap`` marks, if a block wants so; return the number of the next tap."""
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
        """Refuse, at the user's line, what cannot stand for the output of a skipped module; values of invokes are joined first."""
        current, tap = self.run.current, self.tap
        if current is not None and current.batch_group is None and tap is not None and tap.location == f"{path}.input":
            self._check_return(tap, value)

    def _check_return(self, tap: Tap, value: Any) -> tuple[Tap, list[Any]]:
        """Return the output of the module whose input ``tap`` marks, and its leaves; raise if ``value`` cannot stand for it."""
        path = tap.location.removesuffix(".input")
        until = next((other for other in self.graph.taps[tap.index + 1 :] if other.location == f"{path}.output"), None)
        if until is None:
            raise ValueError(
                f"`{path}` cannot be skipped in this compiled trace: dynamo broke the graph inside it. Use `trace(..., compile=False)`."
            )
        leaves = [
            self.graph.fake(leaf, self.binding) if until.is_tensor(leaf) else self.graph.constant_leaf(until, leaf, ())
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
        state = self.step(Visit(tap.index, tuple(fresh)))  # also without new tensors: where a call stands is part of the program
        if state.wanting is None:
            before = len(self.requires_grad)
            self.requires_grad += [node.meta["example_value"].requires_grad for node in nodes]  # as captured, until it is known
            state.wanting = tuple(wanting_at(self, node) for node in nodes)
            del self.requires_grad[before:]
        self.requires_grad += state.wanting
        return [
            self._object(reference)
            if isinstance(reference, (ValueNumber, Input, External))
            else self.graph.constant_leaf(tap, reference, self.binding)
            for reference in references
        ]

    def _defer(self, tap: Tap, leaves: list[Any]) -> None:
        """Put stand-ins for objects into the output of the whole model, unless invokes see rows of their own of it."""
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
        """Refuse, at the user's line, a request for an operation that the graph was captured without."""
        function, known = location.rpartition(".source.")[0], self.graph.locations
        if not function or location in known:
            return
        module_ran = f"{function.partition('.source.')[0]}.input" in known
        if f"{function}.input" in known or (module_ran and not any(other.startswith(f"{function}.source.") for other in known)):
            raise MissedProviderError(uncaptured_message(location))

    def _check_replacement(self, location: str, old: Any, new: Any) -> None:
        """Refuse, at the user's line, a replacement that the captured graph cannot continue with."""
        tap = self.tap
        if tap is None or tap.location != location:
            return
        self._check_leaves(tap, flatten(old)[0], new)

    def _check_leaves(self, tap: Tap, old_leaves: list[Any], new: Any) -> None:
        """Raise if ``new`` cannot stand for the value of ``tap``, whose leaves are (or are like) ``old_leaves``."""
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
                        "graph goes on with one. Use `trace(..., compile=False)` if the model takes it."
                    )
                shape, expected = tuple(new_leaf.shape), tuple(old_leaf.shape)
                if shape != expected:
                    raise ReplacementShapeError(
                        f"{replacement_message(location, shape, expected)} The captured graph is for that shape. Use "
                        "`trace(..., compile=False)` if the model takes another."
                    )
            elif type(old_leaf) is not type(new_leaf) or old_leaf != new_leaf:
                raise ValueError(
                    f"The replacement of `{location}` changes {old_leaf!r} to {new_leaf!r}, which the captured graph has "
                    "as a constant. Use `trace(..., compile=False)` for this edit."
                )
        if self.graph.compares_tensors and location.endswith(".input") and _separates(old_leaves, new_leaves):
            raise ValueError(
                f"The replacement of `{location}` changes one of several arguments that are the same tensor, and the captured graph "
                "is what the model does if they are (attention, for example, projects them together). Replace all of them, or use "
                "`trace(..., compile=False)` for this edit."
            )

    def _write(self, tap: Tap, leaves: list[Any], changed: Any) -> None:
        """Record which tensors of ``tap`` the blocks replaced."""
        new_leaves = flatten(changed)[0]
        if all(map(operator.is_, leaves, new_leaves)) and len(leaves) == len(new_leaves):
            return
        value = unflatten(leaves, tap.structure)
        self._check_replacement(tap.location, value, changed)  # also what was assigned inside a dict or a list
        self._compare(leaves, new_leaves)
        for number, (old, new) in enumerate(zip(leaves, new_leaves, strict=True)):
            if old is not new and isinstance(new, torch.Tensor):
                reference = self.refer(new)
                self.step(Write(tap.index, number, reference))
                self.writes[tap.index, number] = reference

    def _compare(self, leaves: Sequence[Any], new_leaves: Sequence[Any]) -> None:
        """Note whether replacements differ from what they replace in their values only."""
        pairs = [(old, new) for old, new in zip(leaves, new_leaves, strict=True) if new is not old]
        self.as_captured = self.as_captured and all(_is_like(new, old) for old, new in pairs)
        self.relaid = self.relaid or any(_stride_of(new) != _stride_of(old) for old, new in pairs)


def _separates(old: Sequence[Any], new: Sequence[Any]) -> bool:
    """Whether tensors among ``old`` that are one object have different objects in their places in ``new``."""
    now: dict[int, Any] = {}
    pairs = ((one, other) for one, other in zip(old, new, strict=True) if isinstance(one, torch.Tensor))
    return any(now.setdefault(id(one), other) is not other for one, other in pairs)


def _is_like(new: Any, old: Any) -> bool:
    """Whether two tensors differ in their values at most; other leaves are known to be equal."""
    if not isinstance(old, torch.Tensor):
        return True
    one, other = (leaf._fake if isinstance(leaf, LazyTensor) else leaf for leaf in (new, old))
    described = ((one.dtype, one.device, one.layout, one.shape), (other.dtype, other.device, other.layout, other.shape))
    return described[0] == described[1] and one.layout is torch.strided and one.stride() == other.stride()


def _stride_of(value: Any) -> tuple[int, ...] | None:
    tensor = value._fake if isinstance(value, LazyTensor) else value
    return tensor.stride() if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided else None


