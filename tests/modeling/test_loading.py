"""Lazy models: nothing is read before it is needed, once when it is, and the envoys stay the same."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensor

import nnsight
from nnsight import Envoy, LanguageModel, NNsight
from nnsight.modeling.mixins import LoadableMixin, LoadingError, MetaMixin

from ..conftest import Case, Hooks

PROMPT = "The Eiffel Tower is in the city of"

Module = torch.nn.Module


@pytest.fixture(scope="module")
def reference() -> Module:
    """The demo model as transformers loads it."""
    return transformers.AutoModelForCausalLM.from_pretrained(nnsight.demo.path()).eval()


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.tensor([transformers.AutoTokenizer.from_pretrained(nnsight.demo.path())(PROMPT)["input_ids"]])


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The options of each time weights are loaded."""
    made: list[dict[str, Any]] = []
    original = transformers.AutoModelForCausalLM.from_pretrained

    def count(name: str, **options: Any) -> Module:
        made.append({"name": name, **options})
        return original(name, **options)

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", count)
    return made


@pytest.fixture
def lazy(loads: list[Any]) -> LanguageModel:
    return LanguageModel(nnsight.demo.path())


def logits_of(model: Any, *inputs: Any, **options: Any) -> torch.Tensor:
    with model.trace(*(inputs or (PROMPT,)), **options):
        logits = model.lm_head.output.save()
    return logits


# -- lazy --------------------------------------------------------------------------------------------------------------


def test_nothing_is_loaded_before_it_is_needed(reference: Module, loads: list[Any]) -> None:
    state = torch.get_rng_state()
    lazy = LanguageModel(nnsight.demo.path())
    assert torch.equal(torch.get_rng_state(), state)
    assert not lazy.dispatched and lazy.device.type == "meta" and not lazy.training
    assert all(tensor.is_meta for tensor in (*lazy.parameters(), *lazy.buffers()))
    assert repr(lazy) == repr(reference)
    assert {path for path, _ in Envoy.named_modules(lazy)} == {
        f"model.{path}".rstrip(".") for path, _ in reference.named_modules()
    }
    assert lazy.lm_head.weight.shape == reference.lm_head.weight.shape
    assert len(lazy.transformer.h) == 6 and lazy.config.n_layer == 6
    assert hasattr(lazy, "to") and callable(lazy.state_dict) and not hasattr(lazy, "no_such_method")
    assert not lazy.dispatched and loads == []


def test_every_architecture_is_made_as_it_is_loaded(case: Case, tmp_path: Path) -> None:
    case.module.save_pretrained(tmp_path)  # type: ignore[operator]
    kinds = {"bert": transformers.AutoModelForMaskedLM, "t5": transformers.AutoModelForSeq2SeqLM}
    automodel = kinds.get(case.name, transformers.AutoModelForCausalLM)
    model = LanguageModel(tmp_path, nnsight.demo_model().tokenizer, automodel=automodel)

    def described(module: Module) -> list[Any]:
        weights = [(name, value.shape, value.dtype) for name, value in module.named_parameters()]
        return [[(name, type(part), part.training) for name, part in module.named_modules()], weights]

    assert described(model._module) == described(case.module)
    inputs = case.inputs(5, 2)
    with model.scan(**inputs):
        shape = model.output.logits.shape.save()
    assert not model.dispatched
    with model.trace(**inputs):
        logits = model.output.logits.save()
    assert torch.equal(logits, case.module(**inputs).logits) and shape == logits.shape


def test_models_that_are_dispatched_at_once(reference: Module, loads: list[Any]) -> None:
    model = LanguageModel(nnsight.demo.path(), dispatch=True)
    assert model.dispatched and len(loads) == 1 and model.device.type == "cpu"
    assert torch.equal(model.lm_head.weight, reference.lm_head.weight)
    assert nnsight.demo_model().dispatched and len(loads) == 2
    wrapped = LanguageModel(reference)
    wrapped.dispatch()
    assert wrapped.dispatched and wrapped._module is reference and len(loads) == 2
    assert not nnsight.demo_model(dispatch=False).dispatched


def test_classes_that_load(reference: Module, ids: torch.Tensor) -> None:
    """A class of transformers that is no auto class is lazy; one that makes no model of a configuration loads at once."""

    class Loader:
        @staticmethod
        def from_pretrained(name: str, **options: Any) -> Module:
            return reference

    model = LanguageModel(nnsight.demo.path(), automodel=Loader)
    assert model.dispatched and model._module is reference
    model = LanguageModel(nnsight.demo.path(), automodel=transformers.GPT2LMHeadModel, trust_remote_code=False)
    assert not model.dispatched
    assert torch.equal(logits_of(model), reference(ids).logits)


# -- dispatch ----------------------------------------------------------------------------------------------------------


def generated(model: Any) -> None:
    with model.generate(PROMPT, max_new_tokens=2):
        model.transformer.h[0].output.save()


RUNS = {
    "dispatch": lambda model: model.dispatch(),
    "trace": logits_of,
    "generate": lambda model: model.generate(PROMPT, max_new_tokens=2),
    "generate with a block": generated,
    "call": lambda model: model(**model._prepare_input(PROMPT)[1]),
    "to": lambda model: model.to("cpu"),
    "state_dict": lambda model: model.state_dict(),
}


@pytest.mark.parametrize("run", RUNS)
def test_what_needs_weights_loads_them_once(
    run: str, lazy: LanguageModel, reference: Module, ids: torch.Tensor, loads: list[Any]
) -> None:
    envoys = dict(Envoy.named_modules(lazy))
    RUNS[run](lazy)
    assert lazy.dispatched and len(loads) == 1 and lazy.device.type == "cpu"
    RUNS[run](lazy)
    assert len(loads) == 1
    assert {path: id(envoy) for path, envoy in Envoy.named_modules(lazy)} == {p: id(e) for p, e in envoys.items()}
    for path, envoy in Envoy.named_modules(lazy):
        assert envoy._module is lazy._module.get_submodule(path.removeprefix("model").removeprefix("."))
    assert torch.equal(logits_of(lazy), reference(ids).logits)


def test_weights_are_there_before_the_first_line_of_the_block(lazy: LanguageModel, reference: Module) -> None:
    with lazy.trace(PROMPT):
        direction = lazy.lm_head.weight[3].clone()
        lazy.transformer.h[1].output[:] += direction
        out = lazy.lm_head.output.save()
    hooks = Hooks(reference).output("transformer.h.1", lambda value: value + reference.lm_head.weight[3])
    assert torch.equal(out, hooks(**lazy._prepare_input(PROMPT)[1]).logits)


def test_a_trace_that_is_only_written_does_not_load(lazy: LanguageModel, loads: list[Any]) -> None:
    class Elsewhere(nnsight.tracing.Backend):
        """Sends the block somewhere else."""

        def __call__(self, tracer: Any) -> None:
            super().__call__(tracer)

    with lazy.trace(PROMPT, backend=Elsewhere()):
        lazy.lm_head.output.save()
    with lazy.edit():
        lazy.transformer.h[0].output[:] = 0
    assert not lazy.dispatched and loads == []


def test_validation_finds_mistakes_before_weights_are_read(lazy: LanguageModel, loads: list[Any]) -> None:
    with pytest.raises(IndexError):
        with lazy.trace(PROMPT, validate=True):
            lazy.transformer.h[0].output[:, 1000] = 0
    assert not lazy.dispatched and loads == []
    with lazy.trace(PROMPT, scan=True):
        hidden = lazy.transformer.h[0].output.shape.save()
    assert lazy.transformer.h[0]._fake_output.shape == hidden and len(loads) == 1


def test_invokes_are_scanned_without_weights(
    lazy: LanguageModel, loads: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    with lazy.scan() as tracer:
        with tracer.invoke("Hello"):
            first = lazy.lm_head.output.shape.save()
        with tracer.invoke([PROMPT, "Hello"]):
            second = lazy.lm_head.output.shape.save()
    assert (first[0], second[0]) == (1, 2) and first[1] == second[1]
    assert not lazy.dispatched and loads == [] and "fake tensors" not in caplog.text


def test_threads_that_come_at_once_load_once(
    lazy: LanguageModel, reference: Module, ids: torch.Tensor, loads: list[Any]
) -> None:
    start, found = threading.Barrier(4), []

    def trace() -> None:
        start.wait()
        with torch.no_grad():
            found.append(logits_of(lazy))

    threads = [threading.Thread(target=trace) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = reference(ids).logits
    assert len(found) == 4 and all(torch.equal(logits, expected) for logits in found)
    assert len(loads) == 1


def test_options_reach_from_pretrained_unchanged(loads: list[Any]) -> None:
    options = {
        "attn_implementation": "eager",
        "device_map": "cpu",
        "revision": "main",
        "trust_remote_code": False,
        "output_hidden_states": True,
    }
    model = LanguageModel(nnsight.demo.path(), torch_dtype=torch.bfloat16, **options)
    assert model.dtype == torch.bfloat16 and model.config._attn_implementation == "eager"
    assert model.config.output_hidden_states and loads == []
    model.dispatch()
    assert loads == [{"name": nnsight.demo.path(), "dtype": torch.bfloat16, **options}]  # under its present name
    assert model.dtype == torch.bfloat16 and model.config._attn_implementation == "eager"


# -- what was done before ----------------------------------------------------------------------------------------------


def test_names_and_classes_of_envoys_survive(reference: Module, ids: torch.Tensor) -> None:
    class Block(Envoy):
        """A class with state."""

    GPT2Block = type(reference.transformer.h[0])
    rename = {"transformer.h": "layers", "mlp": "feedforward"}
    model = LanguageModel(nnsight.demo.path(), envoys={GPT2Block: Block}, rename=rename)
    block = model.layers[1]
    block.note = "mine"
    block.__dict__["norm"] = model._module.transformer.ln_f  # as classes of envoys wire parts of the model together
    with model.trace(PROMPT):
        hidden = model.layers[1].feedforward.output.save()
        normed = block.norm(block.output).save()
    assert type(block) is Block and block is model.transformer.h[1] and block.note == "mine"
    assert block.norm is model._module.transformer.ln_f
    hooks = Hooks(reference)
    hooks.output("transformer.h.1.mlp", hooks.keep("mlp")).output("transformer.h.1", hooks.keep("block"))(ids)
    assert torch.equal(hidden, hooks.seen["mlp"])
    assert torch.equal(normed, reference.transformer.ln_f(hooks.seen["block"]))


def test_a_child_called_output_keeps_its_name(tmp_path: Path, cases: dict[str, Case]) -> None:
    bert = cases["bert"]
    bert.module.save_pretrained(tmp_path)  # type: ignore[operator]
    tokenizer = nnsight.demo_model().tokenizer
    model = LanguageModel(tmp_path, tokenizer, automodel=transformers.AutoModelForMaskedLM)
    with model.trace(**bert.inputs(5)):
        value = model.bert.encoder.layer[0].nns_output.save()
    hooks = Hooks(bert.module)
    hooks.output("bert.encoder.layer.0", hooks.keep("layer"))(**bert.inputs(5))
    assert torch.equal(value, hooks.seen["layer"])
    assert isinstance(model.bert.encoder.layer[0].output, Envoy)


@pytest.mark.parametrize("first", ["model", "copy"])
def test_a_copy_made_by_edit_is_dispatched_with_the_model(
    first: str, lazy: LanguageModel, reference: Module, ids: torch.Tensor, loads: list[Any]
) -> None:
    with lazy.edit() as edited:
        edited.transformer.h[1].output[:] = 0
    (lazy if first == "model" else edited).dispatch()
    assert lazy.dispatched and edited.dispatched and len(loads) == 1
    assert edited._module is lazy._module and edited.device == lazy.device == torch.device("cpu")
    assert edited.transformer.h[0] is lazy.transformer.h[0]
    assert torch.equal(logits_of(lazy), reference(ids).logits)
    zeroed = Hooks(reference).output("transformer.h.1", torch.zeros_like)(ids).logits
    assert torch.equal(logits_of(edited), zeroed) and len(loads) == 1


class Double(Module):
    def __init__(self, inner: Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs) * 2


def test_modules_added_replaced_and_removed_before(lazy: LanguageModel, reference: Module, ids: torch.Tensor) -> None:
    added = torch.nn.Linear(128, 4)
    lazy.transformer.h[0].probe = added
    lazy.transformer.h[1].mlp = Double(lazy.transformer.h[1].mlp._module)
    lazy.transformer.h = torch.nn.ModuleList(list(lazy._module.transformer.h)[:4])
    probe = lazy.transformer.h[0].probe
    with lazy.trace(PROMPT):
        hidden = lazy.transformer.h[0].output
        read = lazy.transformer.h[0].probe(hidden).save()
        inner = lazy.transformer.h[1].mlp.inner.output.save()
        logits = lazy.lm_head.output.save()
    assert lazy.transformer.h[0].probe is probe and probe._module is added

    changed = copy.deepcopy(reference)
    changed.transformer.h = changed.transformer.h[:4]
    changed.transformer.h[1].mlp = Double(changed.transformer.h[1].mlp)
    hooks = Hooks(changed)
    hooks.output("transformer.h.0", hooks.keep("block")).output("transformer.h.1.mlp.inner", hooks.keep("inner"))
    assert torch.equal(logits, hooks(ids).logits)
    assert torch.equal(read, added(hooks.seen["block"])) and torch.equal(inner, hooks.seen["inner"])
    assert not any(weight.is_meta for weight in lazy.parameters())


def test_settings_made_before_are_kept(lazy: LanguageModel) -> None:
    lazy.train()
    lazy.transformer.h[0].eval()
    lazy.transformer.h[1].requires_grad_(False)
    lazy.config.output_hidden_states = True
    lazy.generation_config.max_new_tokens = 2
    lazy.dispatch()
    assert lazy.training and not lazy.transformer.h[0].training and lazy.transformer.h[1].training
    frozen = {name for name, weight in lazy.named_parameters() if not weight.requires_grad}
    assert frozen == {f"transformer.h.1.{name}" for name, _ in lazy.transformer.h[1].named_parameters()}
    assert lazy.config.output_hidden_states and lazy.generation_config.max_new_tokens == 2


def test_hooks_registered_before_run_and_can_be_removed(
    lazy: LanguageModel, reference: Module, ids: torch.Tensor
) -> None:
    layer, calls = lazy.transformer.h[1]._module, []
    handles = [
        layer.register_forward_hook(lambda _, args, kwargs, out: out * 2, with_kwargs=True),
        layer.register_forward_pre_hook(lambda *_: calls.append(1)),
    ]
    doubled = Hooks(reference).output("transformer.h.1", lambda value: value * 2)(ids).logits
    assert torch.equal(logits_of(lazy), doubled) and calls == [1]
    for handle in handles:
        handle.remove()
    assert torch.equal(logits_of(lazy), reference(ids).logits) and calls == [1]


def test_a_second_wrapper_of_the_lazy_module_follows(lazy: LanguageModel, reference: Module, ids: Any) -> None:
    other = NNsight(lazy._module)
    head = other.lm_head
    lazy.dispatch()
    assert other._module is lazy._module and other.lm_head is head
    assert torch.equal(logits_of(other, ids), reference(ids).logits)


# -- copies and lifetime -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_lazy_model_is_lazy_and_its_own(
    duplicate: Any, lazy: LanguageModel, reference: Module, ids: torch.Tensor, loads: list[Any]
) -> None:
    lazy.transformer.h[0].probe = torch.nn.Linear(128, 4)
    copied = duplicate(lazy)
    assert not copied.dispatched and copied.device.type == "meta" and loads == []
    lazy.dispatch()
    assert not copied.dispatched
    assert torch.equal(logits_of(copied), reference(ids).logits) and len(loads) == 2
    assert copied.transformer.h[0].probe._module is not lazy.transformer.h[0].probe._module
    again = duplicate(copied)
    assert again.dispatched and torch.equal(logits_of(again), reference(ids).logits) and len(loads) == 2


def test_the_lazy_modules_go_away_when_the_weights_come(no_gc: None) -> None:
    lazy = LanguageModel(nnsight.demo.path())
    meta = [weakref.ref(lazy._module), weakref.ref(lazy.lm_head._module)]
    lazy.dispatch()
    gc.collect()  # transformers leaves cycles of its own when it makes a model
    assert [reference() for reference in meta] == [None, None]
    loaded = weakref.ref(lazy._module)
    del lazy
    gc.collect()
    assert loaded() is None


# -- errors ------------------------------------------------------------------------------------------------------------


def test_a_name_or_an_option_that_does_not_exist_is_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(LoadingError, match="missing"):
        LanguageModel(tmp_path / "missing", local_files_only=True)
    with pytest.raises(OSError, match="missing"):
        LanguageModel(tmp_path / "missing", dispatch=True, local_files_only=True)
    with pytest.raises(TypeError, match="no_such_option") as error:
        LanguageModel(nnsight.demo.path(), dispatch=True, no_such_option=1)
    assert any(nnsight.demo.path() in note for note in error.value.__notes__)


def test_a_model_whose_weights_cannot_be_read_stays_lazy_and_usable(
    tmp_path: Path, reference: Module, ids: Any
) -> None:
    reference.save_pretrained(tmp_path)  # type: ignore[operator]
    transformers.AutoTokenizer.from_pretrained(nnsight.demo.path()).save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(b"no weights")
    model = LanguageModel(tmp_path)
    for _ in range(2):
        with pytest.raises(LoadingError, match=tmp_path.name):
            logits_of(model)
    assert not model.dispatched and model.device.type == "meta"
    with model.scan(PROMPT):
        shape = model.lm_head.output.shape.save()
    assert shape[1] == ids.shape[1]
    weights.write_bytes(content)
    assert torch.equal(logits_of(model), reference(ids).logits) and model.dispatched


# -- root classes of users ---------------------------------------------------------------------------------------------


def make(width: int, bias: bool = True) -> Module:
    return torch.nn.Sequential(torch.nn.Linear(2, width, bias=bias), torch.nn.Linear(width, 3))


class Lazy(MetaMixin):
    """A root class of a user."""

    loads = 0

    def _load_meta(self, width: int, **options: Any) -> Module:
        return make(width, **options)

    def _load(self, width: int, **options: Any) -> Module:
        type(self).loads += 1
        torch.manual_seed(1)
        return make(width, **options)


def test_a_root_class_with_load_and_load_meta_is_lazy() -> None:
    model, x = Lazy(5, bias=False, rename={"0": "first"}, compile={"backend": "eager"}), torch.ones(1, 2)
    before = Lazy.loads
    assert not model.dispatched and model[0].weight.is_meta and model[0].bias is None
    with model.scan(x):
        hidden = model.first.output.save()
    assert isinstance(hidden, FakeTensor) and hidden.device == x.device and Lazy.loads == before
    with model.trace(x) as tracer:
        out = model.output.save()
    torch.manual_seed(1)
    assert torch.equal(out, make(5, bias=False)(x)) and Lazy.loads == before + 1 and tracer.report.mode == "compiled"
    assert Lazy(5, dispatch=True).dispatched
    module = make(4)
    assert Lazy(module)._module is module and Lazy(module).dispatched


def test_a_root_class_with_load_only_loads_at_once() -> None:
    class Loaded(LoadableMixin):
        def _load(self, width: int, bias: bool = True) -> Module:
            return make(width, bias)

    model = Loaded(5, bias=False)
    assert model[0].weight.shape == (5, 2) and not model[0].weight.is_meta
    module = make(3)
    assert Loaded(module)._module is module
    for more in ({"width": 3}, {"dtype": 7}):
        with pytest.raises(TypeError, match=f"{next(iter(more))}.*loaded already"):
            Loaded(module, **more)
    with pytest.raises(TypeError, match="7.*loaded already"):
        Loaded(module, 7)


def test_update_mirrors_another_module() -> None:
    model, x = NNsight(make(4)), torch.ones(1, 2)
    first, other = model[0], make(4)
    model._module[0] = other[0]
    first._update(other[0])
    assert first._module is other[0] and model[0] is first
    with model.trace(x):
        out = model[0].output.save()
    assert torch.equal(out, other[0](x))
