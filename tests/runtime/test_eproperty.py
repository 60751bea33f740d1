"""eproperty: attributes whose value lives in a running model, and the views they give of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nnsight import NNsight
from nnsight.intervention.envoy import Envoy, eproperty
from nnsight.intervention.hooks import (
    requires_input,
    requires_operation_input,
    requires_operation_output,
    requires_output,
)

from ..conftest import Case, both

X = torch.ones(2, 4)


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
def test_a_view_read_twice_in_one_statement_is_one_view(model: Heads, compile: bool) -> None:
    with model.trace(X, compile=compile):
        model.doubled[0] += model.doubled[1].relu()
        model.doubled[1] = 3.0
        value = model.plain.clone().save()  # asks for something else, so the view has gone back
        model.doubled[:, 0] = model.doubled[:, 1]
        out = model.output.save()
    view = hidden(model) * 2
    view[0] += view[1].relu()
    view[1] = 3.0
    assert torch.equal(value, view / 2)
    view[:, 0] = view[:, 1]
    assert torch.equal(out, model._module[1](view / 2))


@both
def test_what_is_assigned_wins_over_a_view_read_before(model: Heads, compile: bool) -> None:
    with model.trace(X, compile=compile):
        model.plain = model.doubled * 3
        out = model.output.save()
    assert torch.equal(out, model._module[1](hidden(model) * 2 * 3))


class Both(NNsight):
    """The stub is the preprocess, and the transform sees the value as it was."""

    @eproperty(key="0.output")
    def halves(self, value: torch.Tensor) -> torch.Tensor:
        """First half, as a copy."""
        return value[:, :2].clone()

    @halves.transform
    def halves(self, view: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return torch.cat([view, value[:, 2:] * self.factor], 1)

    @eproperty
    def custom(self) -> Any:
        """Without parentheses."""

    factor = 2


@both
def test_a_stub_with_a_value_is_the_preprocess(model: Heads, compile: bool) -> None:
    model = Both(model._module, compile={"backend": "eager"})
    with model.trace(X, compile=compile):
        model.halves[:, 0] += model.halves[:, 1]
        out = model.output.save()
    expected = hidden(model)
    expected = torch.stack([expected[:, 0] + expected[:, 1], expected[:, 1], *(expected[:, 2:] * 2).T], 1)
    assert torch.equal(out, model._module[1](expected))
    assert Both.custom.key == "custom"
    assert Both.custom.__doc__ == "Without parentheses."


class Overriding(Envoy):
    """An envoy whose output is another view of the value that all envoys have."""

    @property
    def output(self) -> Any:
        return Envoy.output.__get__(self)[:, :2]

    @output.setter
    def output(self, view: torch.Tensor) -> None:
        Envoy.output.__set__(self, view.repeat(1, 2))


@both
def test_a_property_of_a_subclass_uses_the_one_it_overrides(model: Heads, compile: bool) -> None:
    model = NNsight(model._module, envoys={"0": Overriding}, compile={"backend": "eager"})
    assert isinstance(Envoy.output, property) and isinstance(Heads.heads, property)
    with model.trace(X, compile=compile):
        part = model[0].output.save()
        model[0].output = part * 2
        out = model.output.save()
    expected = model._module[0](X)[:, :2]
    assert torch.equal(part, expected)
    assert torch.equal(out, model._module[1]((expected * 2).repeat(1, 2)))


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


def test_the_body_of_a_stub_does_not_run_unless_a_decorator_runs_it(model: Heads) -> None:
    calls: list[str] = []

    def prepares(stub: Any) -> Any:
        def prepared(owner: Any) -> None:
            calls.append(owner.path)

        prepared.__name__ = stub.__name__
        return prepared if stub else None

    class Own(Envoy):
        @eproperty(key="output")
        def bare(self) -> Any:
            raise AssertionError

        @eproperty(key="output")
        @prepares
        def decorated(self) -> Any:
            """Decorated."""

    model = Heads(model._module, envoys=Own)
    with model.trace(X):
        model[0].bare  # noqa: B018
        model[0].decorated  # noqa: B018
        model[1].decorated  # noqa: B018
        model[1].decorated = torch.zeros(2, 4)
        out = model.output.save()
    assert calls == ["model.1"]  # where the model stands already, nothing has to be prepared
    assert torch.equal(out, torch.zeros(2, 4))
    assert Own.decorated.name == "decorated"


@pytest.mark.parametrize("mark", [requires_input, requires_output, requires_operation_input, requires_operation_output])
def test_marks_leave_a_stub_as_it_is(mark: Any) -> None:
    def stub(self: Any) -> Any:
        """A docstring."""

    assert mark(stub) is stub


def test_owners_of_any_kind() -> None:
    class Own:
        @eproperty()
        def value(self) -> Any:
            """A value."""

    class Paths(Own):
        _path = "of something else"

    owner = Paths()
    assert Own.value.location(owner) == "value"
    for path, location in ((None, "value"), ("", "value"), ("a.b", "a.b.value")):
        owner.path = path  # type: ignore[attr-defined]
        assert Own.value.location(owner) == location


def test_an_envoy_with_a_child_called_path_or_interleaver() -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.path = torch.nn.Linear(4, 4)
            self.interleaver = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.interleaver(self.path(x))

    model = NNsight(Net())
    with pytest.raises(ValueError, match=r"Cannot access `model\.output` outside of interleaving"):
        model.output  # noqa: B018
    with model.trace(X):
        hidden = model.path.output.save()
        out = model.output.save()
    assert torch.equal(hidden, model._module.path(X))
    assert torch.equal(out, model._module(X))


class Attention(torch.nn.Module):
    """Its output is made of heads, side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mix(x)


class Block(torch.nn.Module):
    """Returns a tuple, as layers of transformers may."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return x + self.attention(x), None


class Layers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Block() for _ in range(3))
        self.head = torch.nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)[0]
        return self.head(x)


class BlockEnvoy(Envoy):
    @eproperty(key="output", description="residual stream")
    def hidden(self) -> Any:
        """The hidden state, out of its tuple."""

    @hidden.preprocess
    def hidden(self, value: Any) -> Any:
        return value[0]


class AttentionEnvoy(Envoy):
    @eproperty(key="output", description="list of heads")
    def heads(self) -> Any:
        """Two heads that share memory with the output."""

    @heads.preprocess
    def heads(self, value: torch.Tensor) -> list[torch.Tensor]:
        return list(value.view(value.shape[0], 2, 2).unbind(dim=1))

    @eproperty(key="output", description="heads as a dimension")
    def stacked(self) -> Any:
        """Described."""


def test_a_missing_attribute_in_a_view_is_not_a_missing_property() -> None:
    model = NNsight(Layers(), envoys={Block: AttentionEnvoy})
    with pytest.raises(RuntimeError, match=r"`\.heads` could not be computed from .*layers\.0\.output`.*'tuple'.*view") as raised:
        with model.trace(X):
            model.layers[0].heads  # noqa: B018
    assert isinstance(raised.value.__cause__, AttributeError)


# -- print(model) -----------------------------------------------------------------------------------------------------------


def test_described_properties_are_shown_in_the_tree() -> None:
    module = Layers()
    model = NNsight(module, envoys={Attention: AttentionEnvoy, Block: BlockEnvoy})
    expected = (
        repr(module)
        .replace("3 x Block(\n", "3 x Block(\n      (hidden): residual stream\n")
        .replace("Attention(\n", "Attention(\n        (heads): list of heads\n        (stacked): heads as a dimension\n")
    )
    assert repr(model) == expected
    assert len(expected.splitlines()) == len(repr(module).splitlines()) + 3
    assert repr(model.layers[0].attention).splitlines()[1] == "  (heads): list of heads"
    assert repr(model.head) == repr(module.head)
    assert "heads" not in repr(module)
    assert "extra_repr" not in module.layers[0].__dict__


def test_a_leaf_shows_its_properties_and_its_own_line(model: Heads) -> None:
    class Own(Envoy):
        @eproperty(description="doubled")
        def doubled(self) -> Any:
            """Described."""

        @eproperty()
        def silent(self) -> Any:
            """Without a description."""

    class Undescribed(Own):
        @eproperty(key="doubled")
        def doubled(self) -> Any:
            """Overridden, without a description."""

    wrapped = NNsight(model._module, envoys=Own)
    assert repr(wrapped[0]) == "Linear(\n  in_features=4, out_features=4, bias=True\n  (doubled): doubled\n)"
    assert repr(NNsight(torch.nn.Sequential(torch.nn.ReLU()), envoys=Own)[0]) == "ReLU((doubled): doubled)"
    assert repr(NNsight(model._module, envoys=Undescribed)) == repr(model._module)
    assert "(heads): split into two heads, shared memory" in repr(model)


def test_plain_envoys_show_what_torch_shows(gpt2: Case) -> None:
    assert repr(gpt2.model) == repr(gpt2.module)

    class Named(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.output = torch.nn.Linear(2, 2)

    assert repr(NNsight(Named())) == repr(Named())
