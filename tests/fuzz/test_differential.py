"""The main proof: random models and random blocks, run by plain torch hooks, by the eager driver and compiled.

Values, side effects, exceptions and what is shared between tensors must agree: bit by bit with the eager lowering, closely with
others. A block that ran before must be known. :mod:`tests.fuzz` has the machinery, docs/fuzzing.md the instructions.

``NNSIGHT_FUZZ_CASES`` sets the number of blocks, ``NNSIGHT_FUZZ_SEED`` the seed.
"""

from __future__ import annotations

import os
import runpy
from dataclasses import replace
from pathlib import Path

import pytest

from . import runner
from .__main__ import run_seed
from .blocks import Actor, BlockPlan, Segment
from .cases import BACKENDS
from .passages import passages_of
from .runner import Case, Disagreement, run_case

CASES = int(os.environ.get("NNSIGHT_FUZZ_CASES", "300"))
SEED = int(os.environ.get("NNSIGHT_FUZZ_SEED", "0"))

#: Parts of the default run, so that workers can share it.
PARTS = 4


@pytest.mark.parametrize("part", range(PARTS))
def test_random_blocks_agree_with_hooks(part: int) -> None:
    count = -(-CASES // PARTS)
    done, failures = run_seed(PARTS * SEED + part, count, BACKENDS, survey=True)
    assert not failures, "\n".join(failures)
    assert done >= count


@pytest.mark.slow
def test_random_blocks_agree_with_hooks_when_inductor_lowers_them() -> None:
    done, failures = run_seed(SEED, max(10, CASES // 30), ("inductor",), survey=False)
    assert not failures, "\n".join(failures)
    assert done >= 10


# -- the fuzzer itself ------------------------------------------------------------------------------------------------


def _case(*statements: str, grad: bool = False) -> Case:
    passage = next(
        item for item in passages_of(("linear",), False, "tensor") if (item.path, item.key) == ("body", "output")
    )
    plan = BlockPlan((Actor("trace", (Segment(passage, "h", False, statements),)),))
    return Case(("linear",), False, "tensor", grad, "eager", (plan,))


def test_a_plain_case_is_replayed() -> None:
    statements = ("h[:, 1:] += w.vector", "sa1 = (h @ w.matrix).save()", "AT = h * w.scalar")
    case = _case(*statements)
    case = replace(case, blocks=tuple(replace(plan, plain=True) for plan in case.blocks))
    before = runner.replays
    run_case(case)
    assert runner.replays > before


def _broken(case: Case) -> str:
    with pytest.raises(Disagreement) as raised:
        run_case(case)
    return str(raised.value)


def test_a_case_that_agrees_passes() -> None:
    run_case(_case("h[:, 1:] += w.vector", "w.kept.append(h)", "AT = h * 2.0"))


def _differing(mine: str, theirs: str) -> str:
    """Return an expression that is ``mine`` in a block and ``theirs`` in the reference."""
    return f"{theirs} if isinstance(model, torch.nn.Module) else {mine}"


def test_a_wrong_value_is_found() -> None:
    message = _broken(_case(f"h += {_differing('1.0', '1.0 + 1e-6')}"))
    assert "result: Tensor-likes are not equal" in message
    assert "h = model.body.output" in message and "h += 1.0" in message, "the program is shown"


def test_a_missing_side_effect_is_found() -> None:
    assert "log has 1 items instead of 2" in _broken(_case(_differing("None", "w.log.append(1)")))


def test_another_exception_is_found() -> None:
    message = _broken(_case(f"raise {_differing('KeyError()', 'IndexError()')}"))
    assert "raised KeyError() instead of IndexError()" in message


def test_lost_sharing_is_found() -> None:
    message = _broken(_case(_differing("w.kept.append(h.clone())", "w.kept.append(h)"), "w.kept.append(h)"))
    assert "memory is shared by" in message


def test_an_unexpected_cut_is_found() -> None:
    assert "the graph was cut" in _broken(_case("w.log.append(h.sum().item())"))


def test_a_program_that_is_not_known_again_is_found() -> None:
    assert "the block was known, but" in _broken(_case("h[:, int(abs(w.number)) % 3] = 0"))


def test_a_failing_case_prints_a_program_that_runs(tmp_path: Path) -> None:
    case = _case("w.kept.append(h)")
    file = tmp_path / "pasted.py"
    file.write_text(case.program(0, case.rounds[0]))
    assert len(runpy.run_path(str(file))["w"].kept) == 1
