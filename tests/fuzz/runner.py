"""One case: a model and a few blocks, each run by hooks, eagerly and compiled, several times.

The blocks of a case follow each other on one model, so that they share captured graphs and the tree of known programs. Each block
runs with the sizes and the values of several *rounds*. In a round the program that was known from an earlier one must be found:
see :data:`ROUNDS`.
"""

from __future__ import annotations

import contextlib
import io
import linecache
import logging
import re
import traceback
import warnings
from dataclasses import dataclass
from typing import Any

import torch

from nnsight import UncompiledWarning, fx
from nnsight.remote import NotExpressibleError

from ..conftest import Rows, assert_no_instrumentation
from . import reference
from .blocks import BlockPlan
from .nets import Spec, build, chooses, is_broken, make_input
from .source import compiled, text_of, total_of
from .stock import INEXACT, closed, opened
from .world import Outcome, World, differences


@dataclass(frozen=True)
class Round:
    """One run of a block.

    Attributes:
        batches: Rows of each input of the block.
        length: Positions.
        seed: Of the values from outside.
        known: Whether graph and program must be known by now, if the block needs no values.
    """

    batches: tuple[int, int]
    length: int
    seed: int
    known: bool = False


#: Again with other values; with other sizes, which become symbolic; with further sizes and values; and with the first ones.
ROUNDS = (
    Round((3, 2), 5, 0),
    Round((3, 2), 5, 1, known=True),
    Round((2, 5), 7, 0),
    Round((6, 3), 8, 1),
    Round((6, 3), 8, 0, known=True),
)


@dataclass(frozen=True, repr=False)
class Case:
    """A model and blocks for it.

    Attributes:
        spec: The body of the model, or a decoder.
        ids: Whether its input is token ids.
        returns: What the model returns.
        grad: Whether gradients are enabled.
        backend: What compiled graphs are lowered with.
        blocks: The blocks.
        rounds: With which sizes and values they run.
    """

    spec: Spec
    ids: bool
    returns: str
    grad: bool
    backend: str
    blocks: tuple[BlockPlan, ...]
    rounds: tuple[Round, ...] = ROUNDS

    def __repr__(self) -> str:
        return f"<{len(self.blocks)} blocks>"  # a failure prints the program

    def program(self, number: int, round: Round) -> str:
        """Return a program that runs one block in one round."""
        plan = self.blocks[number]
        inputs = ", ".join(
            f"make_input({self.ids}, {round.batches[row]}, {round.length}, {row})" for row in range(plan.rows)
        )
        return "\n".join(
            [
                "import contextlib",
                "import functools",
                "import torch",
                "from tests.fuzz.nets import build, make_input",
                "from tests.conftest import Rows",
                "from tests.fuzz.source import total_of",
                "from tests.fuzz.world import World",
                "",
                text_of(plan),
                f"net = build({self.spec!r}, ids={self.ids}, returns={self.returns!r})",
                f"model = Rows(net, compile={{'backend': {self.backend!r}}})",
                f"inputs = [{inputs}]",
                "for compile in (False, True, True):",
                f"    w = World.make({round.batches[0]}, {round.length}, {round.seed})",
                f"    with torch.set_grad_enabled({self.grad}):",
                "        out, cache, tracer, saved = block(model, w, *(x.clone() for x in inputs), compile=compile)",
                "    print(tracer.report, out, saved, w.kept, w.log, sep='\\n')",
            ]
        )


class Disagreement(AssertionError):
    """A run differed from the reference; the message has a program to paste."""


def run_case(case: Case) -> None:
    """Run all blocks of a case in all ways.

    Raises:
        Disagreement: If one differs.
    """
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # attention in one kernel has other last bits than in parts
    try:
        _run_blocks(case)
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _run_blocks(case: Case) -> None:
    torch._dynamo.reset()
    net = build(case.spec, case.ids, case.returns)
    by_hand = build(case.spec, case.ids, case.returns, by_hand=True)
    pristine = {name: value.clone() for name, value in net.state_dict().items()}
    model = Rows(net, compile={"backend": case.backend})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", UncompiledWarning)  # its reason is in the report
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
        # Models of transformers cache functions that have no effects.
        warnings.filterwarnings("ignore", message="Dynamo detected a call to a `functools.lru_cache`-wrapped function")
        # Inductor uses parts of torch that torch itself has deprecated; an error would keep it from lowering anything.
        for category in (DeprecationWarning, FutureWarning):
            warnings.filterwarnings("ignore", message="`torch.", category=category)
        for number, plan in enumerate(case.blocks):
            function = compiled(text_of(plan))
            for order, round in enumerate(case.rounds):
                expected = _observe(by_hand, pristine, case, plan, round, None)
                for compile in (False, True) if order in (0, 2) else (True,):
                    found = _observe(net, pristine, case, plan, round, (model, function, compile))
                    lines = _complaints(net, case, plan, round, found, expected, compile)
                    _agree(case, number, order, "compiled" if compile else "eager", lines)
                if order == 0 and expected.error is None:
                    found = _observe(net, pristine, case, plan, round, (model, function, None))
                    _agree(case, number, order, "program", _differences_of_program(found, expected))
            with _clean(net, pristine), torch.set_grad_enabled(case.grad):
                x = make_input(case.ids, 3, 5, 9)
                out = torch.utils._pytree.tree_leaves(opened(model(x.clone())))
                net.load_state_dict(pristine)
                wanted = torch.utils._pytree.tree_leaves(opened(net(x.clone())))
                for one, other in zip(out, wanted, strict=True):
                    torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4, equal_nan=True)
            assert_no_instrumentation(net)
            linecache.cache.pop(function.__code__.co_filename, None)


def _agree(case: Case, number: int, order: int, way: str, lines: list[str]) -> None:
    if lines:
        head = [f"block {number} of {len(case.blocks)}, round {order}, {way}:", *lines]
        raise Disagreement("\n".join(["", *head, "", case.program(number, case.rounds[order])]))


@contextlib.contextmanager
def _clean(net: torch.nn.Module, pristine: dict[str, torch.Tensor]) -> Any:
    """Give the model its first weights and buffers, without gradients."""
    net.load_state_dict(pristine)
    net.zero_grad()
    yield
    net.zero_grad()


class _Notes(io.TextIOBase):
    """Notes what is printed among the other side effects, in their order."""

    def __init__(self, log: list[Any], model_too: bool) -> None:
        self.log, self.model_too, self.line = log, model_too, ""

    def write(self, text: str) -> int:
        *lines, self.line = (self.line + text).split("\n")
        self.log += [f"printed {line}" for line in lines if self.model_too or not line.startswith("model: ")]
        return len(text)


#: Why a block may be cut that needs no value, as docs/compile.md says: it asks for `requires_grad` behind an edit by the model, or for
#: strides, or a view, behind a replacement of other strides.
_ALLOWED_CUTS = re.compile(
    "depends on edits of tensors that share memory|depends on the strides of a replacement|`view` needs a concrete value|"
    "may fail because of values, inside a "
)

#: Why backends that trace autograd ahead of time rightly lower no graph: autograd refuses it, and has to speak for itself.
_REFUSED = re.compile(
    "one of the variables needed for gradient computation has been modified|is a view and is being modified inplace|"
    "is a view and its base or another view of its base has been modified inplace|"
    "leaf Variable that requires grad|derivative for .* is not implemented"
)


class _Fallbacks(logging.Handler):
    """Notes graphs that were not lowered, because then the fuzzer compares what it does not mean to."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.logger, self.found = logging.getLogger("nnsight.fx"), list[str]()

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if message.startswith("lowering") and not _REFUSED.search(message):
            self.found.append(message)

    def __enter__(self) -> list[str]:
        self.outer = self.logger.manager.disable, self.logger.propagate, self.logger.level
        self.logger.addHandler(self)
        self.logger.propagate, self.logger.manager.disable = False, 0
        self.logger.setLevel(logging.WARNING)
        return self.found

    def __exit__(self, *_: object) -> None:
        self.logger.removeHandler(self)
        self.logger.manager.disable, self.logger.propagate, level = self.outer
        self.logger.setLevel(level)


_report: Any = None
_fallbacks: list[str] = []

#: How many compiled runs were replays, for the test that some are.
replays = 0


def _observe(
    net: torch.nn.Module, pristine: dict[str, torch.Tensor], case: Case, plan: BlockPlan, round: Round, way: Any
) -> Outcome:
    """Run a block once: by the reference without ``way``, else with ``(model, function, compile)``; as a program if that is ``None``."""
    global _report, _fallbacks, replays
    _report, _fallbacks = None, []
    torch.manual_seed(7)
    w = World.make(round.batches[0], round.length, round.seed)
    inputs = [make_input(case.ids, round.batches[row], round.length, row) for row in range(plan.rows)]
    # To find the rows of several inputs the package runs the model on fakes, which then prints, too.
    notes = _Notes(w.log, model_too=not any(actor.kind == "invoke" for actor in plan.actors))
    out = cache = error = saved = None
    gradients: Any = {}
    with _clean(net, pristine):
        fx.counters.reset()
        try:
            with torch.set_grad_enabled(case.grad), contextlib.redirect_stdout(notes):
                if way is None:
                    out, cache, saved = reference.run(net, plan, w, inputs)
                else:
                    model, function, compile = way
                    with _Fallbacks() as _fallbacks:
                        options = {"program": True, "compile": False} if compile is None else {"compile": compile}
                        out, cache, tracer, saved = function(model, w, *inputs, **options)
                    _report = tracer.report
                    replays += _report.replayed
                    cache = None if cache is None else _read(cache)
        except Exception as raised:
            error = raised
        if error is None and case.grad and not plan.stops and not plan.gradients:
            try:
                loss = total_of(opened(out))  # what is in a cache has gradients, too
                if loss.requires_grad:
                    loss.backward()
                gradients = {name: value.grad for name, value in net.named_parameters()}
            except RuntimeError as raised:  # a tensor was edited that the backward pass needs
                gradients = raised
        elif error is None and plan.gradients:
            gradients = {name: value.grad for name, value in net.named_parameters()}
        values = {
            "result": out,
            "inputs": inputs,
            "externals": [w.vector, w.matrix, w.scalar, w.noise, w.total, w.counts],
            "saved": saved,
            "kept": w.kept,
            "table": w.table,
            "box": vars(w.box),
            "buffers": {name: value.clone() for name, value in net.named_buffers()},
            "gradients": gradients,
            "cache": closed(None if cache is None else dict(sorted(cache.items()))),
            "random": torch.rand(1),
        }
        return Outcome(error, w.log, opened(values))


def _read(cache: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path, entry in cache._entries.items():
        kept = {key: list(values) for key, values in entry._values.items() if values}
        if kept:
            found[path] = kept
    return found


def _keeps_inputs(gradients: Any) -> bool:
    """Whether a backward pass was refused because one graph keeps an input that was edited behind a break."""
    refused = isinstance(gradients, RuntimeError) and "modified by an inplace operation" in str(gradients)
    return refused and _report is not None and bool(_report.breaks)


#: What a program has of what one can see after a run; it finds lists that are attributes of an object no more than a server does.
_OF_PROGRAM = ("result", "inputs", "externals", "saved", "buffers", "cache")


def _differences_of_program(found: Outcome, expected: Outcome) -> list[str]:
    """Return what differs in a run of the recorded program; nothing if the block is none."""
    if isinstance(found.error, NotExpressibleError):
        return []
    if found.error is not None:
        return traceback.format_exception(found.error)[-12:]
    for outcome in (found, expected):  # a cache of keys and values stays where the model is
        kept = torch.utils._pytree.tree_leaves(outcome.values["cache"])
        outcome.values["cache"] = [leaf for leaf in kept if isinstance(leaf, torch.Tensor)]
    ours, theirs = (Outcome(None, [], {name: outcome.values[name] for name in _OF_PROGRAM}) for outcome in (found, expected))
    return differences(ours, theirs, exact=False, sharing=False, partial=False, flags=False)


def _complaints(
    net: torch.nn.Module, case: Case, plan: BlockPlan, round: Round, found: Outcome, expected: Outcome, compile: bool
) -> list[str]:
    refused = isinstance(expected.error, RuntimeError) and "modified by an inplace operation" in str(expected.error)
    if refused and compile and case.backend != "eager" and found.error is None:
        return []  # a backend may make a backward pass of the block that torch refuses
    if isinstance(expected.values["gradients"], Exception):  # torch itself refuses; a backend may not
        expected.values["gradients"] = found.values["gradients"]
    if compile and case.backend != "eager" and _keeps_inputs(found.values["gradients"]):
        expected.values["gradients"] = found.values["gradients"]
    exact = not compile or (case.backend == "eager" and case.spec[0] not in INEXACT)
    if not exact and all(isinstance(outcome.values["gradients"], dict) for outcome in (found, expected)):
        # Ahead-of-time autograd gives zeros where autograd gives nothing.
        for outcome in (found, expected):
            gradients = outcome.values["gradients"]
            outcome.values["gradients"] = {
                name: torch.zeros_like(parameter) if gradients.get(name) is None else gradients[name]
                for name, parameter in net.named_parameters()
            }
    # Two names of a tensor from outside become two tensors in a compiled trace: what is called on one is not seen at the other.
    flags = not (compile and plan.gradients)
    lines = differences(found, expected, exact, sharing=exact, partial=compile, flags=flags)
    if lines and found.error is not None and expected.error is None:
        lines += traceback.format_exception(found.error)[-6:]
    if lines or not compile or _report is None:
        return lines
    lines += _fallbacks
    lines += [note for note in _report.notes if "cannot lower" in note and not _REFUSED.search(note)]
    broken = is_broken(case.spec)
    if _report.mode != "compiled" or (_report.graphs != 1 and not broken):
        lines.append(f"the report says {_report}")
    cuts = [found for found in _report.breaks if not found.reason.startswith("the model breaks the graph")]
    needless = [found for found in cuts if not _ALLOWED_CUTS.search(found.reason)]
    if (needless and not plan.cuts) or (len(cuts) < len(_report.breaks) and not broken):
        lines.append(f"the graph was cut: {_report.breaks}")
    work = {name: getattr(fx.counters, name) for name in ("captures", "recordings", "compiles")}
    if round.known and not plan.cuts and not cuts and any(work.values()) and not chooses(case.spec):
        lines.append(f"the block was known, but there were {work}")
    return lines
