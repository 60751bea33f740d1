"""Directions from contrast prompts: the difference between the hidden states of positive and negative prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from tqdm.auto import tqdm

from ..modeling.base import NNsight
from ..tracing import save
from .layers import count_of, hidden_of, layers_path, read
from .vector import SteeringVector

Method = Literal["mean", "pca", "probe"]


@torch.no_grad()
def contrast(
    model: NNsight,
    positive: Sequence[Any],
    negative: Sequence[Any],
    *,
    method: Method = "mean",
    layers: int | Sequence[int] | None = None,
    at: str = "",
    position: int | Literal["mean"] = -1,
    batch_size: int = 16,
    progress: bool = True,
) -> SteeringVector:
    """Return a vector of directions from ``negative`` to ``positive`` prompts.

    Args:
        model: A model that runs in this process, compiled or not.
        positive: Prompts that show the property for which the vector steers; each is an input of ``model.trace``.
        negative: Prompts that show the opposite.
        method: The method that finds a direction from the hidden states of a layer. "mean" is the difference of the means (Turner et al.
            2023, https://arxiv.org/abs/2308.10248). "pca" is the first principal component of the differences of pairs (Zou et al. 2023,
            https://arxiv.org/abs/2310.01405), so there must be as many positive prompts as negative ones. "probe" is the normal of a
            logistic regression. Each direction points from negative to positive; its length is the distance of the means along it.
        layers: Numbers of the layers, from 0; all by default.
        at: Path of the list of layers, such as ``"transformer.h"``; by default, the list is found.
        position: Position of the token whose hidden state is used, among the tokens of its prompt: -1 is the last one. "mean" uses the mean
            over all tokens.
        batch_size: Prompts in one call of the model.
        progress: Whether a progress bar is shown.

    Returns:
        The vector. Its ``effects`` are Cohen's d for each layer: the distance of the two kinds of prompts along a direction, in standard
        deviations. It is measured on held-out prompts; there is none for fewer than four of a kind. Near 0, a direction separates nothing.

    Raises:
        ValueError: If there are fewer than two prompts of a kind, or for "pca" different numbers; or no such method, layer or position.
    """
    finders: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {"mean": _mean, "pca": _pca, "probe": _probe}
    if method not in finders:
        raise ValueError(f"method={method!r}: the methods are {', '.join(map(repr, finders))}.")
    if min(len(positive), len(negative)) < 2:
        raise ValueError(f"There are {len(positive)} positive prompts and {len(negative)} negative ones: at least two of each are needed.")
    if method == "pca" and len(positive) != len(negative):
        raise ValueError(f"method='pca' needs pairs, and there are {len(positive)} positive prompts and {len(negative)} negative ones.")
    at = at or layers_path(model)
    count = count_of(model, at)
    chosen = list(range(count)) if layers is None else [layers] if isinstance(layers, int) else sorted(layers)
    if not chosen or chosen[0] < 0 or chosen[-1] >= count:
        raise ValueError(f"layers={layers!r}: the model has layers 0 to {count - 1} at `{at}`.")
    prompts = [*positive, *negative]
    paths = [f"{at}.{layer}" for layer in chosen]
    starts = tqdm(range(0, len(prompts), batch_size), desc="hidden states", disable=not progress)
    states = torch.cat([_hidden_states(model, prompts[start : start + batch_size], paths, position) for start in starts], dim=1)
    find, directions, effects = finders[method], {}, {}
    for layer, found in zip(chosen, states, strict=True):
        ours, theirs = found.split([len(positive), len(negative)])
        directions[layer] = _scaled(find(ours, theirs), ours, theirs)
        effects[layer] = _effect(find, ours, theirs)
    about = {"method": method, "position": str(position), "prompts": f"{len(positive)} positive, {len(negative)} negative"}
    about["model"] = _name_of(model)
    return SteeringVector(directions, at, {layer: effect for layer, effect in effects.items() if effect is not None}, about)


def _name_of(model: NNsight) -> str:
    """Return the name from which the model was loaded, or the name of its class."""
    return str(getattr(getattr(model._module, "config", None), "name_or_path", "")) or type(model._module).__name__


def _hidden_states(model: NNsight, prompts: list[Any], paths: list[str], position: int | str) -> torch.Tensor:
    """Return a hidden state for each layer and prompt, float32 ``[layers, prompts, hidden]`` on the CPU."""
    args, kwargs = model._prepare_input(prompts)[:2]
    mask = kwargs.get("attention_mask")
    lengths = None if mask is None else mask.sum(1).tolist()
    with model.trace(*args, **kwargs):
        states = [hidden_of(read(model.get(path))) for path in paths]
        _check_position(position, lengths or [states[0].shape[1]])
        stacked = save(torch.stack([_chosen(state, mask, position) for state in states]))
    return stacked.detach().to("cpu", torch.float32)


def _check_position(position: int | str, lengths: Sequence[int]) -> None:
    """Raise ``ValueError`` if a prompt of one of these lengths has no such position."""
    if position != "mean" and not -min(lengths) <= int(position) < min(lengths):
        raise ValueError(f"position={position}: a prompt has only {min(lengths)} tokens. Choose another position, or longer prompts.")


def _chosen(hidden: torch.Tensor, mask: torch.Tensor | None, position: int | str) -> torch.Tensor:
    """Return one hidden state of each row, ``[batch, hidden]``; ``mask`` is 0 at padding."""
    real = torch.ones(hidden.shape[:2], dtype=torch.long, device=hidden.device) if mask is None else mask
    real = real.to(hidden.device)
    if position == "mean":  # in float32: a sum over all tokens may be too large for float16
        weights = real.float()
        return (hidden.float() * weights[..., None]).sum(1) / weights.sum(1, keepdim=True)
    order = real.cumsum(1) - 1 + (real - 1) * real.shape[1]  # the number of each token in its prompt; negative for padding
    wanted = int(position) if int(position) >= 0 else real.sum(1, keepdim=True) + int(position)
    found = (order == wanted).to(hidden.dtype)
    return (hidden * found[..., None]).sum(1)


def _mean(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    return ours.mean(0) - theirs.mean(0)


def _pca(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """Return the first principal component of the differences of pairs, which are not centered."""
    return torch.linalg.svd(ours - theirs, full_matrices=False).Vh[0]


@torch.inference_mode(False)
@torch.enable_grad()
def _probe(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """Return the normal of a logistic regression on standardized channels, with a small L2 penalty, which makes the solution unique."""
    states = torch.cat([ours, theirs]).double()
    labels = torch.cat([torch.ones_like(ours[:, 0]), torch.zeros_like(theirs[:, 0])]).double()
    spread = states.std(0).clamp_min(1e-6)
    inputs = (states - states.mean(0)) / spread
    weights = torch.zeros(inputs.shape[1] + 1, dtype=torch.float64, device=inputs.device, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=100, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        logits = inputs @ weights[:-1] + weights[-1]
        found = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels) + 1e-2 * weights[:-1].square().sum()
        found.backward()
        return found

    optimizer.step(loss)
    return (weights[:-1] / spread).detach().float()


def _scaled(direction: torch.Tensor, ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """Return a direction scaled to the distance of the means along it, and pointing from ``theirs`` to ``ours``."""
    unit = direction / direction.norm().clamp_min(1e-12)
    return unit * ((ours.mean(0) - theirs.mean(0)) @ unit)


def _effect(find: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], ours: torch.Tensor, theirs: torch.Tensor) -> float | None:
    """Return the mean Cohen's d of either half of the prompts along the direction from the other half; ``None`` for fewer than four."""
    if min(len(ours), len(theirs)) < 4:
        return None
    found = []
    for known, held_out in ((0, 1), (1, 0)):
        direction = _scaled(find(ours[known::2], theirs[known::2]), ours[known::2], theirs[known::2])
        one, other = ours[held_out::2] @ direction, theirs[held_out::2] @ direction
        spread = ((one.var() + other.var()) / 2).sqrt().clamp_min(1e-12)
        found.append(float((one.mean() - other.mean()) / spread))
    return sum(found) / 2
