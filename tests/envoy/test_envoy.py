"""Envoys: a mirror of the module tree that keeps the module's own names, attributes and looks."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch

from nnsight import Envoy, NNsight
from nnsight.intervention.eproperty import eproperty
from nnsight.runtime.errors import MissedProviderError

from ..conftest import both, same

X = torch.ones(2, 4)


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = torch.nn.Linear(4, 4)
        self.output = torch.nn.Linear(4, 4)
        self.width = 4
        self.register_buffer("offset", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.output(self.attention(x)) + self.offset

    def helper(self, number: int) -> int:
        return self.width * number


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Block() for _ in range(3))
        self.heads = torch.nn.ModuleDict({"a": torch.nn.Linear(4, 2), "b": torch.nn.Linear(4, 3)})
        self.absent = None
        self.register_module("none", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return torch.cat([self.heads["a"](x), self.heads["b"](x)], -1)


@pytest.fixture
def model() -> NNsight:
    torch.manual_seed(0)
    return NNsight(Model(), compile=False)


def test_printing_shows_what_torch_shows(model: NNsight) -> None:
    assert repr(model) == repr(model._module)
    assert str(model.layers[0]) == str(model._module.layers[0])
    assert "(attention): Linear(in_features=4" in str(model)


def test_paths(model: NNsight) -> None:
    assert model.path == "model"
    assert model.layers[2].attention.path == "model.layers.2.attention"
    assert model.heads["a"].path == "model.heads.a"
    paths = [path for path, _ in model.named_modules()]
    expected = [".".join(filter(None, ["model", name])) for name, _ in model._module.named_modules()]
    assert sorted(paths) == sorted(expected)
    assert paths[-1] == "model", "children come before the envoy that has them"
    for place, path in enumerate(paths):
        assert all(not above.startswith(f"{path}.") for above in paths[place:])
    assert [envoy.path for envoy in model.modules()] == paths
    layers = [name for name, _ in model.layers.named_modules(lambda envoy: envoy.path.count(".") == 2)]
    assert layers == [f"model.layers.{number}" for number in range(3)]


def test_parents_and_the_root(model: NNsight) -> None:
    attention = model.layers[2].attention
    assert attention.parent is model.layers[2]
    assert model.layers.parent is attention.root is model.root is model
    assert model.parent is None
    with model.edit() as edited:
        model.layers[0].output[:] = 0
    assert attention.root is model and edited.root is edited

    class Own(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parent, self.root, self.iter = torch.nn.Linear(1, 1), "a path", torch.nn.Linear(1, 1)

    own = NNsight(Own())
    assert own.parent.path == "model.parent" and own.root == "a path" and own.iter.path == "model.iter"
    held = NNsight(torch.nn.Sequential(torch.nn.Linear(1, 1)))[0]
    gc.collect()
    assert held.parent is None and held.root is held


def test_a_container_without_children_is_false() -> None:
    model = NNsight(torch.nn.Sequential(torch.nn.ModuleList(), torch.nn.ReLU(), torch.nn.ModuleList([torch.nn.ReLU()])))
    assert not model[0] and model[1] and model[2] and model


def test_a_compiled_module_keeps_its_inner_name() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(2, 2))
    model = NNsight(torch.compile(net, backend="eager"))
    assert model._orig_mod is model and model._orig_mod[0].path == "model.0"
    with pytest.raises(AttributeError, match="_orig_mod"):
        NNsight(net)._orig_mod  # noqa: B018


class Aside(torch.nn.Module):
    """Has a block that is no child, and shows another by a property."""

    def __init__(self) -> None:
        super().__init__()
        self.real = torch.nn.Linear(4, 4)
        self.__dict__["aside"] = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
        self.__dict__["elsewhere"] = [torch.nn.Linear(4, 4)]

    @property
    def listed(self) -> torch.nn.Module:
        return self.elsewhere[0]

    @property
    def fresh(self) -> torch.nn.Module:
        return torch.nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.listed(self.aside(self.real(x)))


@both
@pytest.mark.parametrize("first", ["in the block", "before"])
def test_a_module_that_is_no_child_becomes_an_envoy(first: str, compile: bool) -> None:
    model: Any = NNsight(Aside(), compile={"backend": "eager"})
    x = torch.rand(2, 4)
    module = model._module
    assert list(model.fresh.parameters()) == [] and isinstance(model.fresh, torch.nn.Identity)
    if first == "before":
        assert model.aside is model.aside and model.aside[0].path == "model.aside.0" and model.listed.path == "model.listed"
        assert "aside" not in dict(module.named_children())
    with model.trace(x, compile=compile):
        inner = model.aside[0].output.save()
        model.aside.output[:, 0] = 3.0
        whole = model.listed.input.save()
        out = model.output.save()
    assert torch.equal(inner, module.aside[0](module.real(x)))
    assert torch.equal(whole[:, 1:], torch.relu(inner)[:, 1:]) and whole[:, 0].tolist() == [3.0, 3.0]
    assert torch.equal(out, module.elsewhere[0](whole))
    module.__dict__["aside"] = torch.nn.Sequential(torch.nn.Identity())
    with model.trace(x, compile=compile):
        inner = model.aside[0].output.save()
    assert torch.equal(inner, module.real(x))
    assert copy.deepcopy(model).aside[0].path == "model.aside.0"


def test_printing_shows_further_names_and_described_properties() -> None:
    class Split(Envoy):
        @eproperty(key="output", description="both halves")
        def halves(self) -> tuple[torch.Tensor, torch.Tensor]:
            """The output, cut in two."""

    net = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()), torch.nn.ReLU())
    model = NNsight(net, rename={"0.0": "first", ".1": ["last", "end"]}, envoys={"0.0": Split})
    assert repr(model).splitlines() == [
        "Sequential(",
        "  (first) -> 0.0",
        "  (0): Sequential(",
        "    (0): Linear(",
        "      in_features=2, out_features=2, bias=True",
        "      (halves) -> tuple[torch.Tensor, torch.Tensor]: both halves",
        "    )",
        "    (1): ReLU()",
        "  )",
        "  (end/last/1): ReLU()",
        ")",
    ]
    assert repr(NNsight(net)) == repr(net)


def test_indexing_slicing_length_and_iteration(model: NNsight) -> None:
    layers = model.layers
    assert len(layers) == 3
    assert layers[-1] is layers[2]
    assert layers[1:] == [layers[1], layers[2]]
    assert layers[::-1] == [layers[2], layers[1], layers[0]]
    assert list(layers) == [layers[0], layers[1], layers[2]]
    assert model.heads["b"]._module is model._module.heads["b"]
    assert bool(layers[0].attention), "an envoy without children is true"
    with pytest.raises(IndexError, match=r"`model.layers` has 3 children; index 999 is out of range"):
        layers[999]
    with pytest.raises(KeyError):
        model.heads["c"]


class Entries(torch.nn.Module):
    """Keeps its modules one level down, as sets of transcoders do; ``iterates``: whether it has ``__iter__``."""

    def __init__(self, iterates: bool) -> None:
        super().__init__()
        self.items = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))
        if iterates:
            self.__class__ = type("Iterating", (Entries,), {"__iter__": lambda self: iter(self.items)})

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, key: Any) -> Any:
        return self.items[0].weight if key == "weight" else self.items[key]


class WithEntries(torch.nn.Module):
    def __init__(self, iterates: bool) -> None:
        super().__init__()
        self.set = Entries(iterates)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in range(len(self.set)):
            x = self.set[number](x)
        return x


@both
@pytest.mark.parametrize("iterates", [True, False])
def test_a_module_with_entries_of_its_own(iterates: bool, compile: bool) -> None:
    """Its envoy has the same entries; indexing by child would give another module, without a word."""
    model = NNsight(WithEntries(iterates), compile={"backend": "eager"} if compile else False)
    items = model.set.items
    assert len(model.set) == 3 and list(model.set) == [items[0], items[1], items[2]]
    assert model.set[-1] is items[2] and model.set[1:] == [items[1], items[2]] and model.set["items"] is items
    with pytest.raises(IndexError):
        model.set[3]
    with pytest.raises(AttributeError, match=r"`model\.set\[\.\.\.\]` is a Parameter that is no module of the model"):
        model.set["weight"]
    for _ in range(2):
        with model.trace(torch.ones(1, 4)):
            model.set[1].output[:] = 0.0
            out = model.output.save()
        assert torch.equal(out, items[2]._module(torch.zeros(1, 4)))


def test_attributes_fall_through(model: NNsight) -> None:
    block = model.layers[0]
    assert block.width == 4
    assert block.helper(3) == 12
    assert block.attention.weight is model._module.layers[0].attention.weight
    assert block.offset is model._module.layers[0].offset
    assert model.absent is None
    assert model.training is True
    assert model.eval() is model
    assert model.layers[0].training is False
    assert len(list(model.parameters())) == len(list(model._module.parameters()))
    assert model.state_dict().keys() == model._module.state_dict().keys()


@both
def test_methods_that_return_the_module_return_its_envoy(compile: bool) -> None:
    model = NNsight(Model(), compile={"backend": "eager"} if compile else False)
    moved = model.to(torch.float64)
    assert moved is model
    for name in ("cpu", "eval", "train", "double", "share_memory"):
        assert getattr(model, name)() is model
    assert model.requires_grad_(False) is model
    assert model.apply(lambda module: None) is model
    assert model.layers[0].half() is model.layers[0]
    assert model.layers[0].attention.weight.dtype == torch.float16
    assert model.double().layers[0].attention.weight.dtype == torch.float64
    with moved.trace(X.double()):
        result = moved.output.save()
    assert result.dtype == torch.float64
    assert not result.requires_grad
    assert model.layers[0].helper(3) == 12


def test_the_device_of_any_module() -> None:
    model = NNsight(Model())
    assert model.device == torch.device("cpu")
    assert model.layers[1].attention.devices == {torch.device("cpu")}
    model.layers[1].to("meta")
    assert model.layers[1].device == torch.device("meta")
    assert model.devices == {torch.device("cpu"), torch.device("meta")}
    bare = NNsight(torch.nn.ReLU())
    assert bare.device is None
    assert bare.devices == set()
    bare._module.device = "its own"
    assert bare.device == "its own"
    with pytest.raises(AttributeError, match="no attribute `devise`"):
        _ = model.devise


def test_unknown_attributes_name_near_matches(model: NNsight) -> None:
    with pytest.raises(AttributeError, match=r"`model.layers.0` \(Block\) has no attribute `atention`.*`attention`"):
        model.layers[0].atention  # noqa: B018
    with pytest.raises(AttributeError, match=r"has no attribute `outptu`.*`output`"):
        model.heads["a"].outptu  # noqa: B018
    with pytest.raises(AttributeError, match=r"Its child modules: layers, heads\."):
        model.layer  # noqa: B018
    assert not hasattr(model, "nonsense")
    assert getattr(model, "nonsense", 5) == 5


@both
def test_a_child_called_output(model: NNsight, compile: bool) -> None:
    model.compile(backend="eager")
    block = model.layers[0]
    assert isinstance(block.output, Envoy)
    assert block.output.path == "model.layers.0.output"
    with model.trace(X, compile=compile):
        inner = block.output.output.clone().save()
        outer = block.nns_output.clone().save()
        block.nns_output = outer * 0
        nothing = model.layers[1].input.save()
    module = model._module.layers[0]
    assert torch.equal(inner, module.output(module.attention(X)))
    assert torch.equal(outer, module(X))
    assert torch.equal(nothing, torch.zeros(2, 4))
    assert isinstance(block, Envoy)
    assert type(block).__name__ == "Envoy"
    with pytest.raises(AttributeError, match=r"The output of `model\.layers\.0` is `model\.layers\.0\.nns_output`\."):
        block.output.shape  # noqa: B018


@pytest.mark.parametrize("name", ["input", "inputs", "path", "get", "interleaving"])
def test_a_child_called_like_an_attribute(name: str) -> None:
    class Odd(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module(name, torch.nn.Linear(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self._modules[name](x)

    model = NNsight(Odd())
    child = model[0]
    assert getattr(model, name) is child
    with model.trace(X):
        value = child.output.save()
        whole = model.output.save()
    assert torch.equal(value, whole)
    assert torch.equal(whole, model._module(X))


def test_shared_modules_have_one_envoy(model: NNsight) -> None:
    model._module.extra = model._module.layers[0]
    wrapped = NNsight(model._module)
    assert wrapped.extra is wrapped.layers[0]
    assert wrapped.extra.path == "model.layers.0"
    assert len(wrapped.modules()) == len(list(model._module.modules()))


def test_searching_modules(model: NNsight) -> None:
    linear = model.modules(lambda envoy: isinstance(envoy._module, torch.nn.Linear))
    assert linear == model.modules(include_fn=lambda envoy: isinstance(envoy._module, torch.nn.Linear))
    assert model.modules(names=True) == model.named_modules() == [(envoy.path, envoy) for envoy in model.modules()]
    assert [envoy.path for envoy in linear] == [
        f"model.{name}" for name, module in model._module.named_modules() if isinstance(module, torch.nn.Linear)
    ]
    assert model.get("layers.1.attention") is model.layers[1].attention
    assert model.get("layers.1.width") == 4
    with model.trace(X):
        value = model.get("layers.1.attention.output").save()
    assert value.shape == (2, 4)


@both
def test_a_module_replaced_after_wrapping(model: NNsight, compile: bool) -> None:
    model.compile(backend="eager")
    kept = model.layers[1]
    with model.trace(X, compile=compile):
        before = model.layers[0].attention.output.save()
    new = torch.nn.Linear(4, 4)
    model._module.layers[0].attention = new
    with model.trace(X, compile=compile):
        after = model.layers[0].attention.output.save()
    assert torch.equal(after, new(X))
    assert not torch.equal(before, after)
    assert model.layers[1] is kept
    assert model.layers[0].attention._module is new


@both
def test_a_module_added_after_wrapping(model: NNsight, compile: bool) -> None:
    model.compile(backend="eager")
    model._module.layers.append(Block())
    assert model.layers[2].path == "model.layers.2"
    with model.trace(X, compile=compile):
        value = model.layers[3].nns_output.save()
    assert torch.equal(value, model._module.layers[3](_through(model._module, 3)))


@both
def test_modules_that_have_moved(model: NNsight, compile: bool) -> None:
    """Their envoys had the paths of their former places, where other modules are now."""
    model.compile(backend="eager")
    layers = model._module.layers
    kept = model.layers[1]
    layers[0], layers[1] = layers[1], layers[0]
    with model.trace(X, compile=compile):
        first = kept.nns_output.save()
        second = model.layers[1].nns_output.save()
    same((first, second), (_through(model._module, 1), _through(model._module, 2)))
    assert model.layers[0] is kept and kept.path == "model.layers.0"
    layers.insert(0, Block())
    with model.trace(X, compile=compile):
        moved = kept.nns_output.save()
    same(moved, _through(model._module, 2))
    with kept.trace(X, compile=compile):
        alone = kept.nns_output.save()
    same(alone, layers[1](X))


@both
def test_a_module_under_another_name(compile: bool) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(4, 4))
    model = NNsight(net, compile={"backend": "eager"})
    with model.trace(X, compile=compile):
        before = model[0].output.save()
    net.last = net._modules.pop("0")
    with model.trace(X, compile=compile) as tracer:
        cache = tracer.cache()
        after = model.last.output.save()
    same(before, after)
    assert list(cache) == ["model.last", "model"] and "0" not in model._children


@both
def test_the_envoy_of_a_removed_module(model: NNsight, compile: bool) -> None:
    """The module that is in its place now was read."""
    model.compile(backend="eager")
    removed = model.layers[0]
    del model._module.layers[0]
    with pytest.raises(MissedProviderError, match="does not run here"):
        with model.trace(X, compile=compile):
            removed.nns_output.save()


@both
def test_a_moved_module_in_an_edited_copy(model: NNsight, compile: bool) -> None:
    """All wrappers of a model follow it, whichever is traced."""
    model.compile(backend="eager")
    with model.edit() as edited:
        model.layers[0].nns_output[:] = 1
    kept = edited.layers[1]
    model._module.layers.insert(0, Block())
    with model.trace(X, compile=compile):
        value = kept.nns_output.save()
    same(value, _through(model._module, 3))


def _through(module: Any, count: int) -> torch.Tensor:
    x = X
    for layer in list(module.layers)[:count]:
        x = layer(x)
    return x


def test_calling_an_envoy_outside_a_block_calls_the_module(model: NNsight) -> None:
    calls: list[int] = []
    handle = model._module.layers[0].register_forward_hook(lambda *_: calls.append(1))
    assert torch.equal(model.layers[0](X), model._module.layers[0](X))
    assert torch.equal(model(X), model._module(X))
    assert len(calls) == 4
    handle.remove()


def test_dir_lists_envoy_and_module(model: NNsight) -> None:
    names = dir(model.layers[0])
    assert {"attention", "output", "nns_output", "inputs", "width", "helper", "state_dict", "path"} <= set(names)
    assert names == sorted(set(names))


def test_setting_a_plain_attribute_stays_on_the_envoy(model: NNsight) -> None:
    model.layers[0].note = "mine"
    assert model.layers[0].note == "mine"
    assert not hasattr(model._module.layers[0], "note")


@both
def test_release_by_reference_counting(no_gc: None, compile: bool) -> None:
    def make() -> list[weakref.ref[Any]]:
        model = NNsight(Model(), compile={"backend": "eager"})
        with model.trace(X, compile=compile):
            value = model.layers[0].nns_output.save()
        assert value is not None
        return [weakref.ref(model), weakref.ref(model.layers[0]), weakref.ref(model._module)]

    references = make()
    assert [reference() is None for reference in references] == [True, True, True]


def _tracer(model: Any, compile: bool) -> Any:
    with model.trace(X, compile=compile) as tracer:
        model.layers[0].nns_output.save()
    return tracer


def _source(model: Any, compile: bool) -> Any:
    with model.trace(X, compile=compile) as tracer:
        model.layers[0].source.self_attention_0.output.save()
    return tracer


def _cache_that_is_dropped(model: Any, compile: bool) -> None:
    with model.trace(X, compile=compile) as tracer:
        tracer.cache()


def _error_of_the_block(model: Any, compile: bool) -> Any:
    with pytest.raises(ZeroDivisionError):
        with model.trace(X, compile=compile) as tracer:
            model.layers[0].nns_output / (1 // 0)
    return tracer


def _error_of_the_model(model: Any, compile: bool) -> Any:
    with pytest.raises(RuntimeError):
        with model.trace(torch.rand(1, 5), compile=False) as tracer:  # exceptions of dynamo refer to themselves
            model.layers[0].nns_output.save()
    return tracer


def _program(model: Any, compile: bool) -> Any:
    tracer = _tracer(model, compile)
    assert isinstance(str(tracer.program), str)
    return tracer


def _edit_and_component(model: Any, compile: bool) -> Any:
    with model.edit() as edited:
        model.layers[0].nns_output[:] = 0.0
    edited(X)
    with model.layers[1].trace(X, compile=compile) as tracer:
        model.layers[1].attention.output.save()
    return tracer


@both
@pytest.mark.parametrize(
    "use",
    [_tracer, _source, _cache_that_is_dropped, _error_of_the_block, _error_of_the_model, _program, _edit_and_component],
)
def test_a_model_goes_with_its_wrapper(no_gc: None, use: Any, compile: bool) -> None:
    """Although what the function returns is held; once first, because dynamo refers to the frames that import it."""
    for _ in range(2):
        model: Any = NNsight(Model(), compile={"backend": "eager"})
        module = weakref.ref(model._module)
        held = use(model, compile)
        del model
    assert module() is None and (held is None or hasattr(held, "report"))


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["eager", "compiled"])  # Inductor
def test_a_child_that_is_held_does_not_hold_the_model(no_gc: None, compile: bool) -> None:
    model: Any = NNsight(Model(), compile={"backend": "eager"}, rename={"layers": "blocks"}, envoys={"blocks.*": Held})
    module, child = weakref.ref(model._module), model.layers[0]
    other: Any = NNsight(model._module)
    assert isinstance(child, Held) and child.parent is model.layers
    del model
    assert child._tree is other._tree  # of another wrapper of the same model
    del other
    assert module() is None
    assert child.parent is None and child.path == "model.layers.0"
    with child.trace(X, compile=compile) as tracer:  # a root of its own
        child.attention.output[:] = 0.0
        out = tracer.result.save()
    attention = child._module.output(torch.zeros(2, 4)) + 1.0
    assert torch.equal(out, attention)


class Held(Envoy):
    """For modules that a test names."""


def test_a_child_that_takes_a_name_is_announced() -> None:
    class Parent(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.output = torch.nn.Linear(2, 2)

    with pytest.warns(UserWarning, match=r"`\.output` is the child, `\.nns_output` the attribute"):
        NNsight(Parent())
