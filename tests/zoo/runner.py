"""Runs cells: one model, one feature, one mode, in several situations, each compared with the same computation by hand.

All features of a model and a mode share one wrapped model, as the cells of a notebook do, so that a feature meets the graphs captured
for earlier ones. The situations of a feature rotate, so that each model meets all of them in each mode.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from nnsight import LanguageModel, Program, fx
from nnsight.runtime.report import Report, collected_reports

from .features import FEATURES
from .forms import FORMS, Form, formed
from .reference import visits
from .refusals import refusal_of
from .specimen import Specimen
from .subject import Feature, Rows, Situation, Subject
from .values import difference

#: What is passed as ``compile=``, by mode.
MODES: dict[str, Any] = {
    "eager": False,
    "aot_eager": {"backend": "aot_eager"},
    "inductor": True,
    "whole": {"regions": False},
    "program": False,
    "file": False,
    "bound": {"backend": "aot_eager"},
    "baked": False,
}
SITUATIONS = [
    Situation(5, 1), Situation(9, 1), Situation(9, 2), Situation(7, 1, grad=False), Situation(12, 2), Situation(5, 2, grad=False),
]  # fmt: skip
DTYPES = {"bfloat16": torch.bfloat16}


class Failure(Exception):
    """A cell differed from the reference, or did not run as it should."""


@dataclass
class Cell:
    """The outcome of a cell.

    Attributes:
        result: "ok", "refused: <type>: <reason>" or "FAIL".
        detail: Of a failure: the situation and the error.
        trace: Its traceback.
        seconds: How long it took.
        captures: Graphs that dynamo captured for it.
        compiles: Graphs or regions that were lowered for it.
        breaks: Where graphs were cut.
    """

    model: str
    feature: str
    mode: str
    result: str = "ok"
    detail: str = ""
    trace: str = ""
    seconds: float = 0.0
    captures: int = 0
    compiles: int = 0
    breaks: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        cost = f"{self.seconds:.1f} s, {self.captures} captures, {self.compiles} compiles"
        return f"{self.model:16} {self.mode:10} {self.feature:20} {self.result} [{cost}] {self.detail}".rstrip()


class _Fallbacks(logging.Handler):
    """Collects records that say that something was not lowered."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if "node by node" in message or ("lowering" in message and "failed" in message):
            self.messages.append(message)


class Keeper:
    """Keeps what the cells of one model share: references, their results, and wrapped models.

    Args:
        specimen: The model.
        device: Where it runs.
        count: How many situations a feature meets in a compiled mode; each one more time with other values.
    """

    def __init__(self, specimen: Specimen, device: str = "cpu", count: int = 2) -> None:
        self.specimen = specimen
        self.device = device
        self.count = count
        self._references: dict[str, tuple[torch.nn.Module, list[tuple[str, str]]]] = {}
        self._expected: dict[tuple[str, Situation, bool], Any] = {}
        self._wrapped: dict[tuple[str, str], Any] = {}
        self._programs: dict[tuple[str, Situation], list[Program]] = {}

    def run(self, feature: Feature, mode: str) -> Cell:
        """Run one cell; ``mode`` is a name in :data:`MODES`."""
        cell = Cell(self.specimen.name, feature.name, mode)
        began, captures, compiles = time.perf_counter(), fx.counters.captures, fx.counters.compiles
        declared = refusal_of(cell.model, cell.feature, mode)
        situation = None
        try:
            for situation in self.situations(feature, mode):
                self._check(feature, mode, situation, cell)
            if declared is not None:
                raise Failure(f"it works, and is declared to be refused: {declared.reason}")
        except Exception as error:
            known = declared if declared is not None and declared.explains(error) else None
            message = str(error) if isinstance(error, Failure) else f"{type(error).__name__}: {_short(error)}"
            cell.result = "FAIL" if known is None else known.outcome
            cell.detail = f"{situation}: {message}"
            cell.trace = "" if isinstance(error, Failure) else "".join(traceback.format_exception(error))
        cell.seconds = time.perf_counter() - began
        cell.captures, cell.compiles = fx.counters.captures - captures, fx.counters.compiles - compiles
        return cell

    def situations(self, feature: Feature, mode: str) -> list[Situation]:
        """Return all situations in eager mode, else some; the last one comes again with other values."""
        possible = [one for one in SITUATIONS if one.grad or not feature.grad]
        if mode == "eager":
            return possible
        start = list(FEATURES).index(feature.name)
        chosen = [possible[(start + k) % len(possible)] for k in range(self.count)]
        last = chosen[-1]
        return [*chosen, Situation(last.length, last.batch, last.grad, seed=1)]

    def close(self, mode: str) -> None:
        """Drop the wrapped models of ``mode``."""
        self._wrapped = {key: model for key, model in self._wrapped.items() if key[1] != mode}
        torch._dynamo.reset()

    # -- one situation ------------------------------------------------------------------------------------------------

    def _check(self, feature: Feature, mode: str, situation: Situation, cell: Cell) -> None:
        expected = self._by_hand(feature, situation, mode in FORMS)
        model, form = self._model(feature.variant, mode)
        captures, compiles = fx.counters.captures, fx.counters.compiles
        found, reports, fallbacks = self._run(feature.traced, feature, situation, model, form)
        _assert_no_instrumentation(model._module)
        if form is not None:
            found, reports = form.result(found), form.reports
            self._check_programs(form.programs, feature, situation)
            if situation.seed and (captures, compiles) != (fx.counters.captures, fx.counters.compiles):
                raise Failure(f"a program that is known was captured or lowered again: {[*map(str, reports)]}")
        cell.breaks += [str(cut) for report in reports for cut in report.breaks]
        wrong = difference(found, expected, DTYPES.get(feature.variant, torch.float32))
        if wrong:
            raise Failure(wrong)
        if fallbacks:
            raise Failure(f"log: {fallbacks[0]}")
        differentiates = form is not None and feature.grad  # which programs do eagerly
        wanted = "compiled" if MODES[mode] and not differentiates else "eager"
        for report in reports:
            if report.notes:
                raise Failure(f"not compiled: {report.notes[0]}")
            if report.mode != wanted or (wanted == "compiled" and not report.graphs):
                raise Failure(f"it did not run {wanted}: {report}")

    def _check_programs(self, programs: list[Program], feature: Feature, situation: Situation) -> None:
        """Compare programs with those that were recorded in other forms: on another model, without weights, or compiled."""
        if not programs:
            raise Failure("nothing was recorded")
        others = self._programs.setdefault((feature.name, situation), programs)
        if programs != others or [*map(hash, programs)] != [*map(hash, others)]:
            raise Failure("another program is recorded in another form")

    def _by_hand(self, feature: Feature, situation: Situation, recorded: bool) -> Any:
        key = feature.name, situation, recorded and feature.grad
        if key not in self._expected:
            self._expected[key] = self._run(feature.hooked, feature, situation, None, recorded=recorded)[0]
        return self._expected[key]

    def _run(
        self,
        function: Callable[[Subject], Any],
        feature: Feature,
        situation: Situation,
        model: Any,
        form: Form | None = None,
        recorded: bool = False,
    ) -> tuple[Any, list[Report], list[str]]:
        """Run ``function`` with a wrapped model, or by hand, and leave gradients and statistics as they were."""
        dtype = DTYPES.get(feature.variant, torch.float32)
        given = self.specimen.arguments(situation.length, situation.batch, situation.seed, self.device, dtype)
        others = self.specimen.arguments(situation.length, 3 - situation.batch, situation.seed + 7, self.device, dtype)
        reference, order = self._reference(feature.variant)
        if model is None:
            self._count_positions(reference, given, others)
        module = reference if model is None else (model if form is None else form.model)._module
        subject = Subject(self.specimen, module, model, given, others, order, recorded or form is not None)
        if form is not None:
            form.begin(feature.name, situation.batch)
        grad = torch.set_grad_enabled(situation.grad)
        # cuDNN has no backward pass of recurrent networks in eval mode.
        cudnn = torch.backends.cudnn.flags(enabled=not feature.grad)
        with _as_before(module), grad, cudnn, collected_reports() as reports, _fallbacks() as messages:
            torch.manual_seed(0)
            found = function(subject)
        return found, reports, messages

    def _count_positions(self, module: torch.nn.Module, *calls: dict[str, Any]) -> None:
        """Add the positions of tokens, which the wrapper of a language model passes."""
        if self.specimen.language and "position_ids" in inspect.signature(module.forward).parameters:
            for call in calls:
                ids = call["input_ids"]
                call["position_ids"] = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)

    # -- models ---------------------------------------------------------------------------------------------------------

    def _build(self, variant: str) -> torch.nn.Module:
        return self.specimen.build(self.device, DTYPES.get(variant, torch.float32), train=variant == "train")

    def _reference(self, variant: str) -> tuple[torch.nn.Module, list[tuple[str, str]]]:
        if variant not in self._references:
            module = self._build(variant)
            given = self.specimen.arguments(5, 2, 0, self.device, DTYPES.get(variant, torch.float32))
            with _as_before(module):
                self._references[variant] = module, visits(module, given, self.specimen.operation)
        return self._references[variant]

    def _model(self, variant: str, mode: str) -> tuple[Any, Form | None]:
        """Return the model whose traces run, and the form of programs that it records."""
        if (variant, mode) not in self._wrapped:
            kind = LanguageModel if self.specimen.language else Rows
            options = MODES[mode]
            if variant in DTYPES and mode in ("inductor", "whole"):
                # Inductor keeps more bits than torch between operations, which sends a token to another expert now and then.
                rounded = {"emulate_precision_casts": True}
                options = {"options": rounded} if options is True else {**options, "options": rounded}
            self._wrapped[variant, mode] = self._wrap(kind, variant, mode, options)
        return self._wrapped[variant, mode]

    def _wrap(self, kind: Any, variant: str, mode: str, options: Any) -> tuple[Any, Form | None]:
        if mode not in FORMS:
            return kind(self._build(variant), compile=options), None
        model = formed(kind)(self._build(variant), compile=options)
        form = FORMS[mode](model)
        if mode == "file":  # recorded on one that has no weights
            with torch.device("meta"):
                model = formed(kind)(self.specimen.build("meta", DTYPES.get(variant, torch.float32), train=variant == "train"))
        model.__dict__["form"] = form
        return model, form


@contextlib.contextmanager
def _as_before(module: torch.nn.Module) -> Iterator[None]:
    """Restore buffers, and drop gradients."""
    before = {name: value.clone() for name, value in module.named_buffers()}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, value in module.named_buffers():
                if name in before and before[name].shape == value.shape:
                    value.copy_(before[name])
        module.zero_grad(set_to_none=True)


@contextlib.contextmanager
def _fallbacks() -> Iterator[list[str]]:
    handler = _Fallbacks()
    logger = logging.getLogger("nnsight.fx")
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield handler.messages
    finally:
        logger.removeHandler(handler)


def _assert_no_instrumentation(module: torch.nn.Module) -> None:
    for path, child in module.named_modules():
        hooks = [*child._forward_hooks.values(), *child._forward_pre_hooks.values()]
        ours = [hook for hook in hooks if str(getattr(hook, "__module__", "")).startswith("nnsight")]
        if ours or "_call_impl" in child.__dict__:
            raise Failure(f"something is left on {path or 'the model'}")


def _short(error: BaseException) -> str:
    """Return what an error says, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " | ".join(lines)[:300]


def fits(feature: Feature, specimen: Specimen, mode: str) -> bool:
    """Say whether a cell is about something: the model has it, and the form of programs can be asked for it."""
    return feature.fits(specimen) and (mode not in FORMS or feature.name in (FORMS[mode].features or (feature.name,)))
