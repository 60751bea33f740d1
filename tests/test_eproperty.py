"""eproperty: attributes whose value lives in a running model, and the views they give of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nnsight import NNsight
from nnsight.eproperty import eproperty

X = torch.ones(2, 4)
both = pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])


class Heads(NNsight):
    """Views of the first layer's output; located at the root by the property's key."""

    @eproperty(key="0.output", description="split into two heads, shared memory")
    def heads(self) -> Any:
        """Output of the first layer as (batch, head, width)."""

    @heads.preprocess
    def heads(self, value: torch.Tensor) -> torch.Tensor:
        return value.view(value.shape[0], 2, -1)

    @heads.postprocess
    def heads(self, view: torch.Tensor) -> torch.Tensor:
        return view.reshape(view.shape[0], -1)

    @eproperty(key="0.output")
    def doubled(self) -> Any:
        """A copy, sent back through ``transform``."""

    @doubled.preprocess
    def doubled(self, value: torch.Tensor) -> torch.Tensor:
        return value * 2

    @doubled.transform
    @staticmethod
    def doubled(view: torch.Tensor) -> torch.Tensor:
        return view / 2

    @eproperty(key="0.output")
    def plain(self) -> Any:
        """The value itself."""

    @eproperty()
    def custom(self) -> Any:
        """A location that only :meth:`provide` offers."""


@pytest.fixture
def model() -> Heads:
    torch.manual_seed(0)
    return Heads(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)), compile={"backend": "eager"})


def hidden(model: Heads) -> torch.Tensor:
    return model._module[0](X)


def test_the_stub_gives_name_and_docstring() -> None:
    assert isinstance(Heads.heads, eproperty)
    assert Heads.heads.__doc__ == "Output of the first layer as (batch, head, width)."
    assert Heads.heads.name == "heads"
    assert Heads.heads.key == "0.output"
    assert Heads.custom.key == "custom"
    assert Heads.heads.description == "split into two heads, shared memory"


def test_outside_of_a_run(model: Heads) -> None:
    with pytest.raises(ValueError, match=r"Cannot access `model\.0\.output` outside of interleaving"):
        model.heads  # noqa: B018
    with pytest.raises(ValueError, match="outside of interleaving"):
        model.heads = X


@both
def test_preprocess_gives_a_view(model: Heads, compile: bool) -> None:
    with model.trace(X, compile=compile):
        heads = model.heads.clone().save()
    assert torch.equal(heads, hidden(model).view(2, 2, 2))


@both
def test_an_edit_of_a_view_that_shares_memory(model: Heads, compile: bool) -> None:
    with model.trace(X, compile=compile):
        model.heads[:, 1] = 0
        out = model.output.save()
    expected = hidden(model)
    expected = torch.cat([expected[:, :2], torch.zeros(2, 2)], -1)
    assert torch.equal(out, model._module[1](expected))


@both
def test_postprocess_turns_an_assigned_view_back(model: Heads, compile: bool) -> None:
    with model.trace(X, compile=compile):
        model.heads = model.heads.flip(1)
        value = model.plain.save()
        out = model.output.save()
    expected = hidden(model).view(2, 2, 2).flip(1).reshape(2, 4)
    assert torch.equal(value, expected)
    assert torch.equal(out, model._module[1](expected))
    assert not torch.equal(out, model._module(X))


@both
def test_transform_sends_an_edited_copy_back(model: Heads, compile: bool) -> None:
    with model.trace(X, compile=compile):
        model.doubled[:] += 1.0
        out = model.output.save()
    expected = model._module[1]((hidden(model) * 2 + 1.0) / 2)
    assert torch.equal(out, expected)


@both
def test_views_share_one_location(model: Heads, compile: bool) -> None:
    """Several views of one value in one visit: no request waits for a second occurrence."""
    with model.trace(X, compile=compile):
        plain = model.plain.clone().save()
        heads = model.heads.clone().save()
        envoy = model[0].output.clone().save()
    assert torch.equal(plain, envoy)
    assert torch.equal(heads.view(2, 4), plain)


@both
def test_provide_offers_a_location_of_ones_own(compile: bool) -> None:
    class Inner(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    model = Heads(Inner())

    class Owner:
        path = "owner"

        @eproperty()
        def score(self) -> Any:
            """A score."""

    owner = Owner()
    assert Owner.score.provide(owner, 3) == 3
    from nnsight.runtime import Interleaver, Mediator

    seen: list[int] = []

    def block() -> None:
        seen.append(owner.score)
        owner.score = 10

    run = Interleaver([Mediator(block)])
    with run:
        assert Owner.score.provide(owner, 4) == 10
        run.finish()
    assert seen == [4]
    assert model.path == "model"


def test_a_location_that_nobody_provides(model: Heads) -> None:
    with pytest.raises(Exception, match=r"`model\.custom\.i0` was not provided"):
        with model.trace(X):
            model.custom.save()
