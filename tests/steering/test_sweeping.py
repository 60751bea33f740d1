"""Sweeps: the table, its baseline of random directions, the plot, and the warning for a vector that does nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nnsight import demo_model
from nnsight.steering import SteeringVector, contrast, sweep

from .test_directions import NEGATIVE, POSITIVE

PROMPTS = ["The Colosseum is in the city of", "The Forum is in the city of"]


@pytest.fixture(scope="module")
def model() -> Any:
    return demo_model()


def paris(model: Any) -> torch.Tensor:
    """Return the log probability of the answer, for each prompt."""
    token = model.tokenizer.encode(" Paris")[0]
    with torch.no_grad(), model.trace(PROMPTS):
        found = model.lm_head.output[:, -1].log_softmax(-1)[:, token].save()
    return found


def test_a_vector_that_works_does_more_than_random_ones(model: Any) -> None:
    asked = [prompt.rpartition(" ")[0] for prompt in POSITIVE], [prompt.rpartition(" ")[0] for prompt in NEGATIVE]
    vector = contrast(model, *asked, layers=[2, 3], progress=False)
    table = sweep(model, vector, paris, scales=(1.0, 2.0), progress=False)
    assert [(row.layer, row.scale) for row in table.rows] == [(2, 1.0), (2, 2.0), (3, 1.0), (3, 2.0)]
    assert table.has_effect
    best = table.best
    assert best.effect > 3 and best.change > 1
    assert table.unsteered == pytest.approx(float(paris(model).mean()))
    steered = vector.apply(model, best.scale, layers=best.layer)
    assert best.value == pytest.approx(float(paris(steered).mean()), abs=1e-4)
    assert best.change == pytest.approx(best.value - table.unsteered)
    assert str(table).count("\n") == 5 and "unsteered" in str(table)


def test_a_vector_that_does_nothing_is_called_so(model: Any) -> None:
    random = SteeringVector({2: torch.randn(128, generator=torch.Generator().manual_seed(5))}, "transformer.h")
    with pytest.warns(UserWarning, match="no more effect than random directions of the same length in any of 2 settings"):
        table = sweep(model, random, paris, scales=(0.5, 1.0), controls=8, progress=False)
    assert not table.has_effect


def test_the_plot_has_a_line_for_each_layer(model: Any, tmp_path: Path) -> None:
    vector = SteeringVector({1: torch.ones(128), 4: torch.ones(128)}, "transformer.h")
    with pytest.warns(UserWarning, match="no more effect than random"):
        table = sweep(model, vector, lambda steered: 1.0, scales=(2.0, -1.0), controls=2, progress=False)
    axes = table.plot(tmp_path / "sweep.png")
    assert [line.get_label() for line in axes.get_lines()] == ["layer 1", "layer 4", "unsteered"]
    assert list(axes.get_lines()[0].get_xdata()) == [-1.0, 2.0]
    assert (tmp_path / "sweep.png").stat().st_size > 1000


@pytest.mark.filterwarnings("ignore:The vector has no more effect")
def test_a_mode_without_a_factor_is_tried_once(model: Any) -> None:
    vector = SteeringVector({1: torch.randn(model.config.n_embd)})
    table = sweep(model, vector, lambda steered: 1.0, mode="ablate", controls=2, progress=False)
    assert [row.scale for row in table.rows] == [1.0]


def test_bad_arguments(model: Any) -> None:
    vector = SteeringVector({1: torch.ones(128)}, "transformer.h")
    for options in ({"scales": ()}, {"layers": ()}, {"controls": 1}):
        with pytest.raises(ValueError, match="one layer, one factor and two controls"):
            sweep(model, vector, paris, **options)
