"""Names and classes of envoys: rename=, envoys=, and children whose names are taken."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from nnsight import Envoy, NNsight
from nnsight.runtime.modules.eproperty import eproperty

from ..conftest import both

X = torch.linspace(-1, 1, 8).view(2, 4)


class Attention(torch.nn.Linear):
    heads = 2


class FastAttention(Attention):
    """Found along the base classes."""


class Block(torch.nn.Module):
    def __init__(self, attention: type[Attention]) -> None:
        super().__init__()
        self.attn = attention(4, 4)
        self.mlp = torch.nn.Linear(4, 4)
        self.mlp_norm = torch.nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(x)
        return x + self.mlp(self.mlp_norm(x))


class Body(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.h = torch.nn.ModuleList([Block(Attention), Block(FastAttention)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.h:
            x = block(x)
        return x


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transformer = Body()
        self.head = torch.nn.Linear(4, 3)
        self.width = 4

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.transformer(x))


RENAME: dict[str, Any] = {
    "transformer.h": "layers",
    "mlp": "feedforward",
    ".transformer": ["backbone", "trunk"],
    "attn": ["attention", "mixer"],
}


def make(**options: Any) -> NNsight:
    torch.manual_seed(0)
    model = NNsight(Net(), **options)
    model._make_driver({"backend": "eager"})
    return model


# -- rename -----------------------------------------------------------------------------------------------------------


def test_further_names_lead_to_the_same_envoys() -> None:
    model = make(rename=RENAME)
    assert model.layers is model.transformer.h
    assert model.backbone is model.trunk is model.transformer
    assert model.layers[1].feedforward is model.transformer.h[1].mlp
    assert model.layers[0].attention is model.layers[0].mixer is model.layers[0].attn
    assert model.layers[1].feedforward.path == "model.transformer.h.1.mlp"
    assert model.get("layers.0.feedforward") is model.transformer.h[0].mlp


def test_paths_match_whole_components() -> None:
    model = make(rename={"mlp": "feedforward"})
    assert model.transformer.h[0].feedforward is model.transformer.h[0].mlp
    assert not hasattr(model.transformer.h[0], "feedforward_norm")
    with pytest.warns(UserWarning, match="there is no module `ml`"):
        make(rename={"ml": "x"})


def test_nothing_is_added_to_the_tree_or_the_module() -> None:
    plain, renamed = make(), make(rename=RENAME)
    assert [path for path, _ in renamed.named_modules()] == [path for path, _ in plain.named_modules()]
    assert repr(renamed._module) == repr(plain)
    assert len(list(renamed.transformer.h[0])) == 3
    assert renamed._module.state_dict().keys() == plain._module.state_dict().keys()
    assert not hasattr(renamed._module, "layers")


@both
def test_values_by_further_names(compile: bool, hooks: Any) -> None:
    model = make(rename=RENAME)
    with model.trace(X, compile=compile):
        model.layers[0].feedforward.output = model.layers[0].feedforward.output * 2
        inside = model.trunk.h[1].mixer.input.save()
        out = model.output.save()
    reference = hooks(model._module).output("transformer.h.0.mlp", lambda v: v * 2)
    reference.input("transformer.h.1.attn", lambda args, _: reference.seen.update(inside=args[0].clone()))
    expected = reference(X)
    assert torch.equal(out, expected)
    assert not torch.equal(out, model._module(X))
    assert torch.equal(inside, reference.seen["inside"])


def test_a_leading_dot_ties_a_name_to_the_root() -> None:
    model = make(rename={"transformer.h.0": ".start", ".head": "unembed"})
    assert model.start is model.transformer.h[0]
    assert model.unembed is model.head
    with pytest.warns(UserWarning, match="there is no module"):
        make(rename={".nonsense": "feedforward"})


def test_modules_found_by_another_way_than_their_name_are_envoys() -> None:
    class WithBody(Net):
        @property
        def base_model(self) -> torch.nn.Module:
            return self.transformer

        @property
        def itself(self) -> torch.nn.Module:
            return self

        @property
        def elsewhere(self) -> torch.nn.Module:
            return other

    other = torch.nn.Linear(1, 1)
    model = NNsight(WithBody())
    assert model.base_model is model.transformer
    assert model.itself is model
    assert model.elsewhere._module is other and model.elsewhere.path == "model.elsewhere"
    with model.trace(X):
        hidden = model.base_model.h[1].output.save()
    assert torch.equal(hidden, model._module.transformer(X))


@pytest.mark.parametrize(
    ("name", "what"),
    [("head", "a child module"), ("output", "`.*output`"), ("input", "`Located.input`"), ("trace", "`Envoy.trace`"), ("path", "`.*path`")],
)
def test_a_taken_name(name: str, what: str) -> None:
    with pytest.raises(ValueError, match=f"rename: '{name}' would shadow {what} of `model`"):
        make(rename={"transformer": name})
    with pytest.raises(ValueError, match="'x' would shadow an alias already bound of `model`"):
        make(rename={"transformer": "x", "head": "x"})


def test_a_name_of_the_module_is_taken() -> None:
    """An attribute of the module would be hidden by the envoy."""
    with pytest.raises(ValueError, match="'width' would shadow `Net.width` of `model`"):
        make(rename={"transformer": "width"})


def test_a_name_that_is_a_path() -> None:
    """A further name is one component; a dotted one could never be reached."""
    with pytest.raises(ValueError, match="layers"):
        make(rename={"transformer.h": "body.layers"})


@pytest.mark.parametrize("path", ["nonsense", "transformer.nonsense", "h.7", ".nonsense"])
def test_a_missing_module(path: str) -> None:
    with pytest.warns(UserWarning, match=f"there is no module `{path}`"):
        make(rename={path: "x"})
    model = make(rename={path: "x", "head": "x"})  # one dict for several architectures
    assert model.x is model.head


def test_a_class_of_modules_names_the_one_child_of_it() -> None:
    model = make(rename={Attention: "attention", torch.nn.LayerNorm: ["norm"]})
    for block in model.transformer.h:
        assert block.attention is block.attn and block.norm is block.mlp_norm
    with pytest.raises(ValueError, match=r"`Linear` has several matches below `model\.transformer\.h\.0`.*h\.0\.attn`"):
        make(rename={torch.nn.Linear: "linear"})


def test_a_star_is_any_one_child() -> None:
    model = make(rename={"*.h": "layers"})
    assert model.layers is model.transformer.h
    with pytest.raises(ValueError, match=r"`\*\.mlp` has several matches below `model\.transformer\.h`"):
        make(rename={"*.mlp": "mlp_of_one"})


def test_a_name_further_along_the_key() -> None:
    model = make(rename={"transformer.h.1": "transformer.last", "head": "head"})
    assert model.transformer.last is model.transformer.h[1]
    assert model["head"] is model.head
    assert model.transformer["last"] is model.transformer.last
    with pytest.raises(KeyError):
        model["last"]


def test_a_key_through_the_names_of_other_keys() -> None:
    names = {"trunk.layers": "blocks", "transformer": ["trunk", "backbone"], "h": "layers", "backbone.nothing": "missing"}
    model = make(rename=names)
    assert model.blocks is model.trunk.layers is model.transformer.h
    assert copy.deepcopy(model).blocks[0].path == "model.transformer.h.0"


def test_a_key_through_a_property() -> None:
    class WithBase(Net):
        @property
        def base_model(self) -> torch.nn.Module:
            return self.transformer

    model = NNsight(WithBase(), rename={"base_model.h": "layers"})
    assert model.layers is model.transformer.h


def test_names_survive_deep_copies_and_edits() -> None:
    model = make(rename=RENAME)
    copied = copy.deepcopy(model)
    assert copied.layers is copied.transformer.h
    assert copied.layers is not model.layers
    with model.edit() as edited:
        model.layers[0].output[:] = 0
    assert edited.layers is model.transformer.h
    with edited.trace(X):
        zeros = edited.layers[0].output.save()
    assert torch.equal(zeros, torch.zeros(2, 4))


def test_a_further_name_follows_a_replaced_module() -> None:
    model = make(rename=RENAME)
    model._module.transformer.h[0].mlp = torch.nn.Linear(4, 4, bias=False)
    with model.trace(X):
        value = model.layers[0].feedforward.output.save()
        expected = model.head.input.save()
    assert model.layers[0].feedforward._module is model._module.transformer.h[0].mlp
    assert value.shape == expected.shape == (2, 4)


# -- envoys -----------------------------------------------------------------------------------------------------------


class HeadsEnvoy(Envoy):
    """The output of an attention module by heads."""

    @eproperty(key="output", description="a list of views, one for each head")
    def heads(self) -> Any:
        """Views ``[batch, width of a head]`` of the output."""

    @heads.preprocess
    def heads(self, value: torch.Tensor) -> list[torch.Tensor]:
        by_head = value.view(value.shape[0], self._module.heads, -1)
        return [by_head[:, head] for head in range(self._module.heads)]  # autograd forbids edits of `unbind` views


class Marked(Envoy):
    """A class of one's own."""


def test_a_class_for_each_type_of_module() -> None:
    model = make(envoys={Attention: HeadsEnvoy, torch.nn.Linear: Marked})
    block = model.transformer.h[1]
    assert type(block) is Envoy
    assert type(block.attn) is HeadsEnvoy, "the nearest base class decides"
    assert type(block.mlp) is Marked
    assert type(block.mlp_norm) is Envoy
    assert not hasattr(block.mlp, "heads")


def test_the_class_attribute_is_the_default() -> None:
    class WithHeads(NNsight):
        envoys = {Attention: HeadsEnvoy}  # noqa: RUF012 - as the documentation writes it

    assert type(WithHeads(Net()).transformer.h[0].attn) is HeadsEnvoy
    assert type(WithHeads(Net(), envoys=Marked).transformer.h[0].attn) is Marked
    assert type(WithHeads(Net(), envoys=None).transformer.h[0].attn) is Envoy
    assert type(NNsight(Net()).transformer.h[0].attn) is Envoy


def test_added_modules_get_their_class() -> None:
    model = make(envoys={Attention: HeadsEnvoy})
    model.extra = FastAttention(4, 4)
    model.transformer.h[0].extra = FastAttention(4, 4)
    assert type(model.extra) is HeadsEnvoy
    assert type(model.transformer.h[0].extra) is HeadsEnvoy


# -- children whose names are taken -----------------------------------------------------------------------------------


class Odd(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = torch.nn.Linear(4, 4)
        self.output = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.output(self.heads(x))


class OddEnvoy(Envoy):
    @eproperty(key="output")
    def heads(self) -> Any:
        """Hidden by a child."""


@both
def test_a_child_called_like_a_property_of_a_custom_class(compile: bool) -> None:
    model = NNsight(torch.nn.Sequential(Odd()), envoys={Odd: OddEnvoy}, compile={"backend": "eager"})
    with model.trace(X, compile=compile):
        inner = model[0].heads.output.clone().save()
        last = model[0].output.output.clone().save()
        model[0].nns_heads[:] = 0
        whole = model[0].nns_output.clone().save()
    module = model._module[0]
    assert torch.equal(inner, module.heads(X))
    assert torch.equal(last, module(X))
    assert torch.equal(whole, torch.zeros(2, 4))
    assert isinstance(model[0], OddEnvoy)
    assert model[0].E_heads is model[0].heads and model[0].E_output.path == "model.0.output"
    assert OddEnvoy.heads.key == "output", "the class itself is as it was"


def test_classes_of_envoys_by_component_of_a_path() -> None:
    model = make(envoys={"mlp": Marked, "attn": HeadsEnvoy})
    block = model.transformer.h[1]
    assert (type(block.mlp), type(block.attn), type(block.mlp_norm)) == (Marked, HeadsEnvoy, Envoy)


def test_classes_of_modules_come_before_paths_and_a_star_is_each_entry() -> None:
    model = make(envoys={"attn": Marked, Attention: HeadsEnvoy, "h.*": Marked})
    block = model.transformer.h[1]
    assert (type(block), type(block.attn), type(block.mlp)) == (Marked, HeadsEnvoy, Envoy)


@pytest.mark.parametrize(
    ("rename", "end", "expected"),
    [
        ({"transformer.h": "layers"}, "layers.*", ["transformer.h.0", "transformer.h.1"]),
        ({"transformer.h": "layers", "attn": "attention"}, "layers.*.attention", ["transformer.h.0.attn", "transformer.h.1.attn"]),
        ({"h.1.attn": "h.1.attention"}, "attention", ["transformer.h.1.attn"]),
        ({"*.h": "blocks"}, "blocks.1", ["transformer.h.1"]),
        ({torch.nn.ModuleList: "blocks"}, "blocks", ["transformer.h"]),
    ],
)
def test_ends_of_paths_may_have_further_names(rename: Any, end: str, expected: list[str]) -> None:
    model: Any = NNsight(Net(), rename=rename, envoys={end: Chosen})

    def chosen(model: Any) -> list[str]:
        return [path.removeprefix("model.") for path, envoy in model.named_modules() if type(envoy) is Chosen]

    assert chosen(model) == expected == chosen(copy.deepcopy(model))
    if end == "layers.*":
        setattr(model.transformer.h, "2", Block(Attention))
        assert chosen(model) == [*expected, "transformer.h.2"]


class Chosen(Envoy):
    """For modules that a test names."""
