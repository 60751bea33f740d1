"""The main proof: models and blocks, run by plain torch hooks, by the eager driver and compiled.

Values, side effects, exceptions and what is shared between tensors must agree: bit by bit with the eager lowering, closely with
others. A block that ran before must be known. :mod:`tests.fuzz` has the machinery, docs/fuzzing.md the instructions.

By default each kind of statement and each kind of model runs once. The slow tests run random blocks: ``NNSIGHT_FUZZ_CASES`` sets their
number, ``NNSIGHT_FUZZ_SEED`` the seed.
"""

from __future__ import annotations

import os
import re
import runpy
from pathlib import Path

import pytest

from . import runner, statements
from .__main__ import run_seed
from .blocks import Actor, BlockPlan, Segment, surrounded
from .cases import BACKENDS
from .nets import BREAKING, LEAVES, WRAPPERS, Spec
from .occurrences import Occurrence, occurrences_of
from .runner import ROUNDS, Case, Disagreement, run_case
from .stock import BREAKING_STOCK, DECODERS, STOCK

CASES = int(os.environ.get("NNSIGHT_FUZZ_CASES", "60"))
SEED = int(os.environ.get("NNSIGHT_FUZZ_SEED", "0"))

#: Parts of the slow run, so that workers can share it.
PARTS = 4


# -- each kind once ---------------------------------------------------------------------------------------------------


def _filled(templates: list[str], kept: bool = False) -> list[str]:
    """Return statements made of templates, about ``h``, ``w.noise`` and a part of ``h``; ``kept`` ones are expressions."""
    found = []
    for number, template in enumerate(templates):
        names = {"T": "h", "V": "w.noise", "P": "p", "N": f"n{number}", "BODY": "h.mul_(0.5)"}
        text = re.sub(r"(?<!\.)\b(?:[TVPN]|BODY)\b", lambda match: names[match[0]], template)  # noqa: B023
        found.append(f"w.kept.append({text})" if kept else text)
    return found


_CAUGHT = "try:\n    BODY\nexcept Exception as error:\n    w.log.append(type(error).__name__)"
_MISTAKES = [surrounded(_CAUGHT, [mistake]) for mistake in statements.MISTAKES if mistake != "EARLY"]

#: Statements by kind, and whether they need values.
KINDS: dict[str, tuple[list[str], bool]] = {
    "reads": (_filled([line for line in statements.READS if ".save()" not in line]), False),
    "expressions": (_filled(statements.EXPRESSIONS, kept=True), False),
    "parts": (_filled(statements.PARTS, kept=True), False),
    "edits": (_filled(statements.EDITS), False),
    "tries": (_filled(statements.TRIES + statements.AROUND), False),
    "cuts": (_filled(statements.CUTS), True),
    "value-tries": (_filled(statements.VALUE_TRIES + statements.AROUND_TRIES), True),
    "mistakes": (_filled(_MISTAKES), True),
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_statement_agrees_with_hooks(kind: str, grad: bool) -> None:
    lines, cuts = KINDS[kind]
    plans = []
    for start in range(0, len(lines), 8):
        segment = Segment(_occurrence("body", "output"), "h", False, ("p = h[:, 1:]", *lines[start : start + 8]))
        plans.append(BlockPlan((Actor("trace", (segment,)),), cuts=cuts))
    run_case(Case(("linear",), False, "tensor", grad, "eager", tuple(plans), ROUNDS[:2]))


#: Models that have each kind of part in them, and decoders.
MODELS: dict[str, Spec] = {
    "leaves": ("sequence", *((name,) for name in LEAVES)),
    "wrappers": ("branch", ("linear",), ("sequence", *((name, ("norm",)) for name in WRAPPERS))),
    "breaking": ("sequence", *((name, ("norm",)) for name in BREAKING), *((name,) for name in BREAKING_STOCK)),
    "stock": ("sequence", *((name,) for name in STOCK if name not in BREAKING_STOCK)),
    **{name: (name,) for name in DECODERS},
}


#: Decoders that take seconds to capture.
COSTLY = ("stock", "llama", "mixtral", "mamba-lm", "deepseek")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] if name in COSTLY else []) for name in MODELS])
def test_each_kind_of_model_agrees_with_hooks(name: str) -> None:
    """A block reads all outputs, and edits every third one."""
    spec, ids = MODELS[name], name in DECODERS
    segments = []
    for number, occurrence in enumerate(occurrences_of(spec, ids, "tensor")):
        places = [place.access.replace("H", f"h{number}") for place in occurrence.places if place.floating]
        if occurrence.key == "output" and not occurrence.number and places:
            change = [] if number % 3 else [f"{places[0]}.mul_(1.5)"]
            segments.append(Segment(occurrence, f"h{number}", False, (f"w.kept.append({places[0]}.clone())", *change)))
    plan = BlockPlan((Actor("trace", tuple(segments)),))
    run_case(Case(spec, ids, "tensor", True, "eager", (plan,), ROUNDS[:2]))


# -- random blocks ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_random_blocks_agree_with_hooks(part: int) -> None:
    count = -(-CASES // PARTS)
    done, failures = run_seed(PARTS * SEED + part, count, BACKENDS, survey=True)
    assert not failures, "\n".join(failures)
    assert done >= count


@pytest.mark.slow
def test_random_blocks_agree_with_hooks_when_inductor_lowers_them() -> None:
    done, failures = run_seed(SEED, max(3, CASES // 30), ("inductor",), survey=False)
    assert not failures, "\n".join(failures)
    assert done >= 3


# -- the fuzzer itself ------------------------------------------------------------------------------------------------


def _occurrence(path: str, key: str) -> Occurrence:
    return next(item for item in occurrences_of(("linear",), False, "tensor") if (item.path, item.key) == (path, key))


def _case(*lines: str, plain: bool = False) -> Case:
    plan = BlockPlan((Actor("trace", (Segment(_occurrence("body", "output"), "h", False, lines),)),), plain=plain)
    return Case(("linear",), False, "tensor", False, "eager", (plan,), ROUNDS[:2])


def test_a_plain_case_is_replayed() -> None:
    before = runner.replays
    run_case(_case("h[:, 1:] += w.vector", "sa1 = (h @ w.matrix).save()", "AT = h * w.scalar", plain=True))
    assert runner.replays > before


def _differing(mine: str, theirs: str) -> str:
    """Return an expression that is ``mine`` in a block and ``theirs`` in the reference."""
    return f"{theirs} if isinstance(model, torch.nn.Module) else {mine}"


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        ((f"h += {_differing('1.0', '1.0 + 1e-6')}",), r"result: Tensor-likes are not equal(?s:.)*h = model.body.output\n *h \+= 1\.0"),
        ((_differing("None", "w.log.append(1)"),), "log has 1 items instead of 2"),
        ((f"raise {_differing('KeyError()', 'IndexError()')}",), r"raised KeyError\(\) instead of IndexError\(\)"),
        ((_differing("w.kept.append(h.clone())", "w.kept.append(h)"), "w.kept.append(h)"), "memory is shared by"),
        (("w.log.append(h.sum().item())",), "the graph was cut"),
        (("h[:, int(abs(w.number)) % 3] = 0",), "the block was known, but"),
    ],
    ids=["value", "side effect", "exception", "sharing", "cut", "unknown program"],
)
def test_a_difference_is_found(lines: tuple[str, ...], complaint: str) -> None:
    with pytest.raises(Disagreement, match=complaint):
        run_case(_case(*lines))


def test_a_failing_case_prints_a_program_that_runs(tmp_path: Path) -> None:
    case = _case("w.kept.append(h)")
    file = tmp_path / "pasted.py"
    file.write_text(case.program(0, case.rounds[0]))
    assert len(runpy.run_path(str(file))["w"].kept) == 1
