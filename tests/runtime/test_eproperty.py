"""eproperty: attributes whose value lives in a running model, and the views they give of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nnsight import LanguageModel, NNsight
from nnsight.intervention.envoy import Envoy, eproperty
from nnsight.intervention.hooks import (
    requires_input,
    requires_operation_input,
    requires_operation_output,
    requires_output,
)

from ..conftest import Case, Hooks, both

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


# -- recipes of the guide to extending -------------------------------------------------------------------------------------


class Attention(torch.nn.Module):
    """Mixes the positions of a sequence; its output is made of heads, side by side."""

    def __init__(self, width: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.mix = torch.nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mix(x).cumsum(1)


class Block(torch.nn.Module):
    """Returns a tuple, as layers of transformers may."""

    def __init__(self, width: int, n_heads: int) -> None:
        super().__init__()
        self.attention = Attention(width, n_heads)
        self.mlp = torch.nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        x = x + self.attention(x)
        return x + self.mlp(x).relu(), None


class Transformer(torch.nn.Module):
    """Token ids to logits."""

    def __init__(self, width: int = 8, n_heads: int = 4, layers: int = 3) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(16, width)
        self.layers = torch.nn.ModuleList([Block(width, n_heads) for _ in range(layers)])
        self.norm = torch.nn.LayerNorm(width)
        self.head = torch.nn.Linear(width, 16)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)[0]
        return self.head(self.norm(x))


class BlockEnvoy(Envoy):
    """Exposes the residual stream behind a layer."""

    @eproperty(key="output", description="residual stream")
    @requires_output
    def hidden(self) -> Any:
        """The hidden state, out of its tuple."""

    @hidden.preprocess
    def hidden(self, value: Any) -> Any:
        return value[0] if isinstance(value, tuple) else value


class AttentionEnvoy(Envoy):
    """Exposes the heads of an attention's output."""

    @eproperty(key="output", description="list of heads")
    @requires_output
    def heads(self) -> Any:
        """Heads, each (batch, sequence, width of a head), that share memory with the output."""

    @heads.preprocess
    def heads(self, value: torch.Tensor) -> list[torch.Tensor]:
        batch, length, width = value.shape
        n_heads = self._module.n_heads
        return list(value.view(batch, length, n_heads, width // n_heads).unbind(dim=2))

    @eproperty(key="output", description="heads as a dimension")
    @requires_output
    def stacked(self) -> Any:
        """A copy of the output as (batch, head, sequence, width of a head)."""

    @stacked.preprocess
    def stacked(self, value: torch.Tensor) -> torch.Tensor:
        batch, length, width = value.shape
        n_heads = self._module.n_heads
        return value.view(batch, length, n_heads, width // n_heads).transpose(1, 2).clone()

    @stacked.transform
    @staticmethod
    def stacked(value: torch.Tensor) -> torch.Tensor:
        return value.transpose(1, 2).reshape(value.shape[0], value.shape[2], -1)


IDS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])


@pytest.fixture
def transformer() -> Transformer:
    torch.manual_seed(0)
    return Transformer().eval().requires_grad_(False)  # autograd forbids edits of one of several views


def without_head(number: int) -> Any:
    """Return a hook function that zeroes one of four heads of width two."""

    def function(value: torch.Tensor) -> torch.Tensor:
        value = value.clone()
        value[..., 2 * number : 2 * number + 2] = 0
        return value

    return function


@both
def test_recipe_rename(transformer: Transformer, compile: bool) -> None:
    model = NNsight(transformer, compile={"backend": "eager"}, rename={"layers": ["blocks", "h"], ".head": "unembed"})
    with model.trace(IDS, compile=compile):
        old = model.layers[1].output[0].save()
        same = (model.blocks[1] is model.layers[1], model.h is model.layers, model.unembed is model.head).save()
        new = model.h[1].output[0].save()
    assert old is new
    assert same == (True, True, True)


@both
def test_recipe_hidden(transformer: Transformer, compile: bool) -> None:
    model = NNsight(transformer, compile={"backend": "eager"}, envoys={Block: BlockEnvoy})
    assert BlockEnvoy.hidden.__doc__ == "The hidden state, out of its tuple."
    with model.trace(IDS, compile=compile):
        hidden = [layer.hidden.clone() for layer in model.layers].save()
        model.layers[2].hidden[:, 0] = 0
        out = model.output.save()
    seen = Hooks(transformer)
    for number in range(3):
        seen.output(f"layers.{number}", seen.keep(str(number), lambda value: value[0]))

    def zero_first(value: tuple[torch.Tensor, None]) -> tuple[torch.Tensor, None]:
        zeroed = value[0].clone()
        zeroed[:, 0] = 0
        return zeroed, None

    seen.output("layers.2", zero_first)
    assert torch.equal(out, seen(IDS))
    for number in range(3):
        assert torch.equal(hidden[number], seen.seen[str(number)])


@both
def test_recipe_heads(transformer: Transformer, compile: bool) -> None:
    model = NNsight(transformer, compile={"backend": "eager"}, envoys={Attention: AttentionEnvoy, Block: BlockEnvoy})
    expected = Hooks(transformer).output("layers.1.attention", without_head(3))(IDS)
    with model.trace(IDS, compile=compile):
        heads = model.layers[1].attention.heads.save()
        heads[3][:] = 0
        out = model.output.save()
    assert [tuple(head.shape) for head in heads] == [(2, 5, 2)] * 4
    assert torch.equal(out, expected)
    with model.trace(IDS, compile=compile):
        stacked = model.layers[1].attention.stacked
        stacked[:, 3] = 0
        again = model.output.save()
    assert torch.equal(again, expected)
    assert not torch.equal(out, transformer(IDS))


def test_a_missing_attribute_in_a_view_is_not_a_missing_property(transformer: Transformer) -> None:
    model = NNsight(transformer, envoys={Block: AttentionEnvoy})
    with pytest.raises(
        RuntimeError, match=r"`\.heads` could not be made of .*layers\.0\.output`.*'tuple'.*shape"
    ) as raised:
        with model.trace(IDS):
            model.layers[0].heads  # noqa: B018
    assert isinstance(raised.value.__cause__, AttributeError)


def test_recipe_classes_of_envoys(transformer: Transformer) -> None:
    class Special(Attention):
        pass

    transformer.layers[0].attention.__class__ = Special
    model = NNsight(transformer, envoys={Attention: AttentionEnvoy})
    assert type(model.layers[0].attention) is type(model.layers[1].attention) is AttentionEnvoy  # by base class
    assert type(model.layers[0]) is Envoy
    assert {type(envoy) for envoy in NNsight(transformer, envoys=BlockEnvoy).layers.modules()} == {BlockEnvoy}
    assert {type(envoy) for envoy in NNsight(transformer).layers.modules()} == {Envoy}


class MyModel(NNsight):
    """Takes lists of token ids, pads them, and joins those of several invokes."""

    envoys = {Attention: AttentionEnvoy, Block: BlockEnvoy}  # noqa: RUF012

    def __init__(self, size_or_model: Any, **kwargs: Any) -> None:
        module = Transformer(layers=size_or_model) if isinstance(size_or_model, int) else size_or_model
        super().__init__(module, **kwargs)

    def _prepare_input(self, *inputs: Any, **kwargs: Any) -> Any:
        rows = inputs[0] if isinstance(inputs[0], torch.Tensor) else torch.tensor([inputs[0]])
        return (rows,), kwargs, len(rows)

    def _batch(self, batched: Any, *inputs: Any, **kwargs: Any) -> Any:
        (rows,) = inputs
        if batched is None:
            return (inputs, kwargs), len(rows)
        return ((torch.cat([batched[0][0], rows]),), {**batched[1], **kwargs}), len(rows)


@both
def test_recipe_root_class(transformer: Transformer, compile: bool) -> None:
    assert len(MyModel(2).layers) == 2
    model = MyModel(transformer, compile={"backend": "eager"})
    assert type(model.layers[0].attention) is AttentionEnvoy
    assert type(MyModel(transformer, envoys=None).layers[0].attention) is Envoy
    with model.trace([3, 1, 4, 1, 5], compile=compile):
        alone = model.layers[0].hidden.clone().save()
    with model.trace(compile=compile) as tracer:
        with tracer.invoke([3, 1, 4, 1, 5]):
            model.layers[1].attention.heads[0][:] = 0
            first = model.output.save()
        with tracer.invoke([9, 2, 6, 5, 3]):
            hidden = model.layers[0].hidden.clone().save()
            second = model.output.save()
    reference = Hooks(transformer)
    reference.output("layers.0", reference.keep("hidden", lambda value: value[0]))
    plain = reference(IDS)
    edited = Hooks(transformer).output("layers.1.attention", without_head(0))(IDS)
    torch.testing.assert_close(alone, reference.seen["hidden"][:1])
    torch.testing.assert_close(hidden, reference.seen["hidden"][1:])
    torch.testing.assert_close(first, edited[:1])
    torch.testing.assert_close(second, plain[1:])
    assert not torch.allclose(first, plain[:1])


@both
def test_recipe_parts_of_the_model_in_its_envoys(gpt2: Case, compile: bool) -> None:
    """The logit lens as a property: layers reach for the final norm and the head, which are elsewhere in the tree."""

    class LensBlockEnvoy(Envoy):
        @eproperty(key="output")
        @requires_output
        def lens(self) -> Any:
            """Logits that the final norm and the head make of this layer's output."""

        @lens.preprocess
        def lens(self, value: Any) -> Any:
            hidden = value[0] if isinstance(value, tuple) else value
            return self._lens_head(self._lens_norm(hidden))

    class LensLanguageModel(LanguageModel):
        envoys = {type(gpt2.module.transformer.h[0]): LensBlockEnvoy}  # noqa: RUF012

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            for block in self.transformer.h:
                block.__dict__["_lens_norm"] = self._module.transformer.ln_f
                block.__dict__["_lens_head"] = self._module.lm_head

    model = LensLanguageModel(gpt2.module, compile={"backend": "eager"})
    ids = gpt2.inputs()["input_ids"]
    with model.trace(ids, compile=compile):
        tokens = [block.lens.argmax(-1) for block in model.transformer.h].save()
        logits = model.lm_head.output.save()
    reference = Hooks(gpt2.module)
    for number in range(len(tokens)):
        reference.output(
            f"transformer.h.{number}", reference.keep(str(number), lambda v: v[0] if isinstance(v, tuple) else v)
        )
    expected = reference(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    assert len(tokens) == 3
    for number, predicted in enumerate(tokens):
        hidden = reference.seen[str(number)]
        assert torch.equal(predicted, gpt2.module.lm_head(gpt2.module.transformer.ln_f(hidden)).argmax(-1))
    torch.testing.assert_close(logits, expected)


# -- print(model) -----------------------------------------------------------------------------------------------------------


def test_described_properties_are_shown_in_the_tree(transformer: Transformer) -> None:
    model = MyModel(transformer)
    expected = (
        repr(transformer)
        .replace("3 x Block(\n", "3 x Block(\n      .hidden: residual stream\n")
        .replace("Attention(\n", "Attention(\n        .heads: list of heads\n        .stacked: heads as a dimension\n")
    )
    assert repr(model) == expected
    assert len(expected.splitlines()) == len(repr(transformer).splitlines()) + 3
    assert repr(model.layers[0].attention).splitlines()[1] == "  .heads: list of heads"
    assert repr(model.embed) == repr(transformer.embed)
    assert "heads" not in repr(transformer)
    assert "extra_repr" not in transformer.layers[0].__dict__


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
    assert repr(wrapped[0]) == "Linear(\n  in_features=4, out_features=4, bias=True\n  .doubled: doubled\n)"
    assert repr(NNsight(torch.nn.Sequential(torch.nn.ReLU()), envoys=Own)[0]) == "ReLU(.doubled: doubled)"
    assert repr(NNsight(model._module, envoys=Undescribed)) == repr(model._module)
    assert ".heads: split into two heads, shared memory" in repr(model)


def test_plain_envoys_show_what_torch_shows(gpt2: Case) -> None:
    assert repr(gpt2.model) == repr(gpt2.module)

    class Named(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.output = torch.nn.Linear(2, 2)

    assert repr(NNsight(Named())) == repr(Named())
