"""Sweeps: the effect of a steering vector at several layers and with several factors, compared with that of random directions."""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm.auto import tqdm

from ..modeling.base import NNsight
from .vector import SteeringVector

#: A function of the steered model that a sweep evaluates. It returns a number, or a tensor of numbers, such as one for each prompt.
Metric = Callable[[Any], float | torch.Tensor]

#: The least number of standard deviations by which a change must differ from that of random directions to count as an effect.
_NOTABLE = 3.0

#: The factors of a sweep, unless others are given.
_SCALES = (-4.0, -2.0, 2.0, 4.0)


class SweepRow(NamedTuple):
    """One setting of a sweep.

    Attributes:
        layer: The layer.
        scale: The factor.
        value: The metric of the steered model.
        change: ``value`` minus the metric of the unsteered model.
        random: The mean change from random directions of the same length, at this layer and with this factor.
        effect: ``change - random``, in standard deviations of the changes from random directions.
    """

    layer: int
    scale: float
    value: float
    change: float
    random: float
    effect: float


@dataclass(frozen=True)
class Sweep:
    """The table of a sweep. ``unsteered`` is the metric of the unsteered model. ``pandas.DataFrame(sweep.rows)`` makes a pandas table."""

    rows: tuple[SweepRow, ...]
    unsteered: float

    @property
    def best(self) -> SweepRow:
        """The setting with the largest increase among those that exceed chance, or among all settings if none does."""
        notable = [row for row in self.rows if row.effect >= _NOTABLE]
        return max(notable or self.rows, key=lambda row: row.change)

    @property
    def has_effect(self) -> bool:
        """Whether the change of some setting, up or down, exceeds that of random directions."""
        return any(abs(row.effect) >= _NOTABLE for row in self.rows)

    def __str__(self) -> str:
        lines = [f"{'layer':>5} {'scale':>8} {'metric':>10} {'change':>10} {'random':>10} {'effect':>8}"]
        form = "{:5} {:8g} {:10.4g} {:+10.4g} {:+10.4g} {:+8.1f}"
        lines += [form.format(*row) for row in self.rows]
        return "\n".join([*lines, f"unsteered: {self.unsteered:.4g}"])

    def plot(self, path: str | Path | None = None) -> Any:
        """Plot the metric over the factor, with a line for each layer; return the axes of matplotlib, and write to ``path`` if given.

        Raises:
            ImportError: If matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError("A plot takes matplotlib: `pip install matplotlib`, or `pip install 'nnsight[steering]'`.") from error
        figure = Figure(figsize=(6, 4), layout="constrained")
        axes = figure.add_subplot()
        for layer in dict.fromkeys(row.layer for row in self.rows):
            points = sorted((row.scale, row.value) for row in self.rows if row.layer == layer)
            axes.plot(*zip(*points, strict=True), marker="o", label=f"layer {layer}")
        axes.axhline(self.unsteered, color="gray", linestyle=":", label="unsteered")
        axes.set_xlabel("scale")
        axes.set_ylabel("metric")
        axes.legend()
        if path is not None:
            figure.savefig(path)
        return axes


def sweep(
    model: NNsight,
    vector: SteeringVector,
    metric: Metric,
    *,
    scales: Sequence[float] | None = None,
    layers: Sequence[int] | None = None,
    controls: int = 5,
    seed: int = 0,
    progress: bool = True,
    **options: Any,
) -> Sweep:
    """Return a table of the effects of ``vector`` on ``model`` at each layer, with each factor.

    Args:
        model: The model.
        vector: The vector.
        metric: Called with the steered model; returns a number, or a tensor of numbers, whose mean is used. It should grow with the
            property for which the vector steers.
        scales: The factors; by default -4, -2, 2 and 4, or 1 with a ``mode`` that takes none.
        layers: The layers; by default all layers of the vector.
        controls: Number of random directions to compare with each direction, 2 or more. They have the same length.
        seed: Seed of the random directions.
        progress: Whether a progress bar is shown.
        **options: Further arguments of :meth:`.SteeringVector.apply`.

    Warns:
        UserWarning: If no setting exceeds random directions of the same length, so that the vector has no more effect than noise.

    Raises:
        ValueError: If there are no layers, no factors, or fewer than two controls.
    """
    chosen = list(vector) if layers is None else list(layers)
    if scales is None:
        scales = _SCALES if options.get("mode", "add") == "add" else (1.0,)
    if not chosen or not scales or controls < 2:
        raise ValueError("sweep() takes at least one layer, one factor and two controls.")
    unsteered = _number(metric(model))
    rows = []
    with tqdm(total=len(chosen) * len(scales) * (1 + controls), desc="sweep", disable=not progress) as bar:

        def change(directions: SteeringVector, layer: int, scale: float) -> float:
            value = _number(metric(directions.apply(model, scale, layers=layer, **options)))
            bar.update()
            return value - unsteered

        for layer, others in _controls(vector, chosen, controls, seed):
            for scale in scales:
                made, by_chance = change(vector, layer, scale), [change(other, layer, scale) for other in others]
                random, spread = statistics.mean(by_chance), max(statistics.stdev(by_chance), 1e-12)
                rows.append(SweepRow(layer, float(scale), unsteered + made, made, random, (made - random) / spread))
    table = Sweep(tuple(rows), unsteered)
    if not table.has_effect:
        warnings.warn(
            f"The vector has no more effect than random directions of the same length in any of {len(rows)} settings: try other layers, "
            "larger factors, or a vector from more prompts.",
            UserWarning,
            stacklevel=2,
        )
    return table


def _controls(vector: SteeringVector, layers: Sequence[int], count: int, seed: int) -> Iterator[tuple[int, list[SteeringVector]]]:
    """Yield each layer, with ``count`` random directions that are as long as that of the vector at this layer."""
    generator = torch.Generator().manual_seed(seed)
    for layer in layers:
        drawn = torch.randn(count, len(vector[layer]), generator=generator, device="cpu")
        drawn *= vector[layer].norm() / drawn.norm(dim=1, keepdim=True)
        yield layer, [SteeringVector({layer: direction}, vector.at) for direction in drawn]


def _number(value: float | torch.Tensor) -> float:
    return float(value.detach().float().mean()) if isinstance(value, torch.Tensor) else float(value)
