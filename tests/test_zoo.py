"""The zoo: every feature on every model in every mode, against plain hooks and autograd.

By default a sample runs. All of it: ``make test-slow``, or ``python -m tests.zoo`` for some of it.
"""

from __future__ import annotations

import gc
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
    assert cells
    return [cell for cell in cells if cell.result == "FAIL"]


@pytest.mark.parametrize(("model", "mode"), SAMPLE)
def test_a_sample_does_what_hooks_do(model: str, mode: str) -> None:
    failed = run(model, mode, SAMPLE[model, mode])
    assert not failed, "\n".join(map(str, failed))


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("model", SPECIMENS)
def test_all_does_what_hooks_do(model: str, mode: str) -> None:
    failed = run(model, mode, tuple(FEATURES))
    assert not failed, "\n".join(map(str, failed))


def test_the_table_is_current() -> None:
    page = PAGE.read_text()
    assert BEGIN in page and END in page
    assert page == with_table(page), "run `python -m tests.zoo.table`"


def test_there_are_enough_of_each_kind() -> None:
    ours = [name for name, one in SPECIMENS.items() if type(one.build()).__module__.startswith("transformers")]
    assert len(SPECIMENS) >= 40
    assert len(ours) >= 30
