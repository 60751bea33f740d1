"""The zoo: every feature on every model in every mode, against plain hooks and autograd.

By default a sample runs. ``make test-slow`` runs every cell eagerly and, since a cell that compiles takes seconds, a share of those of the
compiled modes: each feature on models of all kinds, each model in all modes. ``ZOO=all make test-slow`` runs them all, in hours, and
``python -m tests.zoo`` runs some.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
import torch

from .zoo.features import FEATURES
from .zoo.models import specimens
from .zoo.runner import MODES, Cell, Keeper
from .zoo.table import BEGIN, END, PAGE, with_table

SPECIMENS = specimens()
#: Models and modes that run by default, and which features they run then.
SAMPLE: dict[tuple[str, str], tuple[str, ...]] = {
    ("gpt2", "eager"): tuple(FEATURES),
    ("resnet", "eager"): tuple(FEATURES),
    ("dicts", "aot_eager"): ("edit", "everything", "invokes", "skip", "source-edit", "gradients", "second-backward"),
    ("llama", "aot_eager"): ("generate", "one-gradient"),
    ("shared", "inductor"): ("edit", "one-gradient"),
}
#: Of how many cells of a mode the slow tests run one.
SHARES = {"eager": 1, "aot_eager": 9, "inductor": 25, "whole": 25}


def share(model: str, mode: str) -> tuple[str, ...]:
    """Return the features that the slow tests run: others for the next model, others for the next mode, at least one."""
    every = 1 if os.environ.get("ZOO") == "all" else SHARES[mode]
    start = list(SPECIMENS).index(model) + list(MODES).index(mode)
    fitting = [feature.name for feature in FEATURES.values() if feature.fits(SPECIMENS[model])]
    chosen = [name for index, name in enumerate(fitting) if (start + index) % every == 0]
    return tuple(chosen or [fitting[start % len(fitting)]])


@pytest.fixture(autouse=True)
def _lean() -> Iterator[None]:
    yield
    torch._dynamo.reset()
    gc.collect()


def run(model: str, mode: str, features: tuple[str, ...]) -> list[Cell]:
    """Run cells that share a wrapped model; return those that failed."""
    keeper = Keeper(SPECIMENS[model], count=1)
    chosen = [FEATURES[name] for name in features if FEATURES[name].fits(SPECIMENS[model])]
    cells = [keeper.run(feature, mode) for feature in chosen]
    return [cell for cell in cells if cell.result == "FAIL"]


@pytest.mark.parametrize(("model", "mode"), SAMPLE)
def test_a_sample_does_what_hooks_do(model: str, mode: str) -> None:
    failed = run(model, mode, SAMPLE[model, mode])
    assert not failed, "\n".join(map(str, failed))


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("model", SPECIMENS)
def test_all_does_what_hooks_do(model: str, mode: str) -> None:
    failed = run(model, mode, share(model, mode))
    assert not failed, "\n".join(map(str, failed))


def test_the_table_is_current() -> None:
    page = PAGE.read_text()
    assert BEGIN in page and END in page
    assert page == with_table(page), "run `python -m tests.zoo.table`"


def test_there_are_enough_of_each_kind() -> None:
    ours = [name for name, one in SPECIMENS.items() if type(one.build()).__module__.startswith("transformers")]
    assert len(SPECIMENS) >= 40
    assert len(ours) >= 30


@pytest.mark.parametrize("mode", MODES)
def test_the_share_of_a_mode_has_every_feature_and_every_model(mode: str) -> None:
    shares = {model: share(model, mode) for model in SPECIMENS}
    assert all(shares.values())
    assert {name for names in shares.values() for name in names} == FEATURES.keys()
