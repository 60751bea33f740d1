"""The zoo: every feature on every model in every mode, against plain hooks and autograd.

By default a sample runs. The slow tests run some of the cells that are recorded to work (``tests/zoo/outcomes.json``): a cell that compiles
takes 5 to 60 seconds of a processor. ``ZOO=all make test-slow`` runs all that are recorded, and
``python -m tests.zoo`` any.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
import torch

from .features import FEATURES
from .forms import FORMS
from .models import specimens
from .runner import MODES, Cell, Keeper, fits
from .table import BEGIN, END, PAGE, outcomes, with_table

SPECIMENS = specimens()
KEPT = outcomes()
#: Models and modes that run by default, and which features they run then.
SAMPLE: dict[tuple[str, str], tuple[str, ...]] = {
    ("gpt2", "eager"): ("everything", "batch", "generation", "generate-skip", "half"),
    ("resnet", "eager"): ("forward", "skip-result", "stop", "bfloat16", "training"),
    ("dicts", "aot_eager"): ("forward", "batch"),
    ("shared", "aot_eager"): ("everything", "skip-result", "stop"),
    ("gpt2", "program"): ("forward", "batch", "backward"),
    ("t5", "file"): ("forward", "generation"),
    ("mixtral", "file"): ("batch",),
    ("dicts", "bound"): ("forward",),
    ("gpt2", "baked"): ("skip-result",),
}
#: The slow tests run one of this many features that work eagerly, for each model.
EAGER_SHARE = 8
#: Programs and files, which run eagerly too, are run for one of this many models.
FORM_SHARE = 4
#: They run one feature in each compiled mode, for one of this many models.
COMPILED_SHARE = 8


def share(model: str, mode: str) -> tuple[str, ...]:
    """Return the features that the slow tests run: others for the next model."""
    start = list(SPECIMENS).index(model)
    worked = [feature for feature, modes in KEPT.get(model, {}).items() if modes.get(mode) == "ok"]
    if os.environ.get("ZOO") == "all":
        return tuple(worked)
    if mode == "eager" or (mode in ("program", "file") and (start + list(MODES).index(mode)) % FORM_SHARE == 0):
        return tuple(worked[start % EAGER_SHARE :: EAGER_SHARE])
    number, rest = divmod(start + list(MODES).index(mode), COMPILED_SHARE)
    return () if rest or not worked else (worked[7 * number % len(worked)],)


CELLS = [(model, mode) for model in SPECIMENS for mode in MODES if share(model, mode)]


@pytest.fixture(autouse=True)
def _lean() -> Iterator[None]:
    yield
    torch._dynamo.reset()
    gc.collect()


def run(model: str, mode: str, features: tuple[str, ...]) -> list[Cell]:
    """Run cells that share a wrapped model; return those that failed."""
    keeper = Keeper(SPECIMENS[model], count=1)
    chosen = [FEATURES[name] for name in features if fits(FEATURES[name], SPECIMENS[model], mode)]
    cells = [keeper.run(feature, mode) for feature in chosen]
    return [cell for cell in cells if cell.result == "FAIL"]


@pytest.mark.parametrize(("model", "mode"), SAMPLE)
def test_a_sample_does_what_hooks_do(model: str, mode: str) -> None:
    failed = run(model, mode, SAMPLE[model, mode])
    assert not failed, "\n".join(map(str, failed))


@pytest.mark.slow
@pytest.mark.parametrize(("model", "mode"), CELLS)
def test_what_worked_still_does_what_hooks_do(model: str, mode: str) -> None:
    failed = run(model, mode, share(model, mode))
    assert not failed, "\n".join(map(str, failed))


def test_the_table_is_current_and_complete() -> None:
    page = PAGE.read_text()
    assert BEGIN in page and END in page
    assert page == with_table(page), "run `python -m tests.zoo.table`"
    ours = [name for name, one in SPECIMENS.items() if type(one.build()).__module__.startswith("transformers")]
    assert len(SPECIMENS) >= 40 and len(ours) >= 30
    for name, specimen in SPECIMENS.items():
        for feature in FEATURES.values():
            modes = KEPT[name].get(feature.name, {}) if feature.fits(specimen) else {"eager": "ok", "none": "ok"}
            assert "eager" in modes, f"{name}: {feature.name} has not run eagerly"
            compiled = [said for mode, said in modes.items() if mode not in ("eager", *FORMS) and not said.startswith("fails")]
            assert compiled, f"{name}: {feature.name} has not run compiled"
