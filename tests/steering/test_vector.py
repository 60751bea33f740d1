"""Steering vectors against plain torch hooks: eager, compiled, traced, generated and baked; and their files."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from nnsight import LanguageModel, NNsight, fx
from nnsight.steering import SteeringVector

from ..conftest import Hooks

GREEDY: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "output_scores": True, "return_dict_in_generate": True}


def gpt2() -> torch.nn.Module:
    config = GPT2Config(n_layer=3, n_embd=32, n_head=2, vocab_size=97, bos_token_id=0, eos_token_id=None, pad_token_id=0)
    return GPT2LMHeadModel(config).eval()


def llama() -> torch.nn.Module:
    config = LlamaConfig(
        num_hidden_layers=3, hidden_size=32, intermediate_size=48, num_attention_heads=2, num_key_value_heads=1, vocab_size=97,
        bos_token_id=0, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture(params=[gpt2, llama])
def net(request: pytest.FixtureRequest) -> Any:
    return request.param()


@pytest.fixture
def vector() -> SteeringVector:
    return SteeringVector({layer: 3 * torch.randn(32) for layer in range(3)})


def changed(hidden: torch.Tensor, direction: torch.Tensor, options: dict[str, Any], scale: float) -> torch.Tensor:
    """Return what becomes of a hidden state, written out."""
    result = hidden.clone()
    part = hidden[:, options.get("positions", slice(None))]
    unit = direction / direction.norm()
    along = (part @ unit)[..., None]
    match options.get("mode", "add"):
        case "add":
            new = part + scale * direction
        case "ablate":
            new = part - along * unit
        case "project":
            new = along * unit
        case "clamp":
            new = part + (along.clamp(options.get("low", -math.inf), options.get("high", math.inf)) - along) * unit
    if options.get("match_norm"):
        new = new * part.norm(dim=-1, keepdim=True) / new.norm(dim=-1, keepdim=True)
    result[:, options.get("positions", slice(None))] = new
    return result


def hooked(net: Any, vector: SteeringVector, options: dict[str, Any]) -> AbstractContextManager[None]:
    """Steer ``net`` with plain hooks."""
    calls = -1

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    def steer(output: torch.Tensor, layer: int) -> torch.Tensor | None:
        steps = options.get("steps", slice(None))
        if calls not in (range(99)[steps] if isinstance(steps, slice) else [steps] if isinstance(steps, int) else steps):
            return None
        scale = options.get("scale", 1.0)
        return changed(output, vector[layer], options, scale(calls) if callable(scale) else scale)

    chosen = options.get("layers", list(vector))
    hooks = Hooks(net).input("", count)
    for layer in [chosen] if isinstance(chosen, int) else chosen:
        hooks.output(f"{'transformer.h' if hasattr(net, 'transformer') else 'model.layers'}.{layer}", partial(steer, layer=layer))
    return hooks.installed()


SETTINGS: list[dict[str, Any]] = [
    {"scale": 2.0},
    {"scale": -1.5, "layers": [2, 0]},
    {"mode": "ablate"},
    {"mode": "project", "layers": 1},
    {"mode": "clamp", "low": -0.5, "high": 1.0},
    {"mode": "clamp", "low": 0.5, "layers": 1},
    {"scale": 3.0, "match_norm": True},
    {"scale": 2.0, "positions": -1},
]


@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_calls_traces_and_generations_are_steered(net: Any, vector: SteeringVector, options: dict[str, Any]) -> None:
    assert_steered(net, vector, options, None)


@pytest.mark.slow
@pytest.mark.parametrize("options", SETTINGS[1::2], ids=str)
def test_compiled_calls_traces_and_generations_are_steered(vector: SteeringVector, options: dict[str, Any]) -> None:
    assert_steered(gpt2(), vector, options, {"backend": "aot_eager"})


@pytest.mark.slow
def test_the_default_backend_agrees(vector: SteeringVector) -> None:
    assert_steered(llama(), vector, {"scale": 3.0, "match_norm": True}, {})


def assert_steered(net: Any, vector: SteeringVector, options: dict[str, Any], compiled_with: dict[str, Any] | None) -> None:
    """Check calls, traces, generations and the baked model against hooks."""
    ids = torch.randint(1, 97, (2, 6))
    with hooked(net, vector, options):
        due = net(ids).logits
        tokens = net.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY)
    steered = vector.apply(LanguageModel(net), **options)
    if compiled_with is not None:
        steered.compile(**compiled_with)
    torch.testing.assert_close(steered(ids).logits, due, atol=1e-4, rtol=1e-4)
    with steered.trace(ids):
        logits = steered.lm_head.output.save()
    torch.testing.assert_close(logits, due, atol=1e-4, rtol=1e-4)
    found = steered.generate(ids, **GREEDY)
    assert torch.equal(found.sequences, tokens.sequences)
    torch.testing.assert_close(torch.stack(found.scores), torch.stack(tokens.scores), atol=1e-4, rtol=1e-4)
    with steered.generate(ids, **GREEDY) as tracer:
        traced = tracer.result.save()
    assert torch.equal(traced.sequences, tokens.sequences)
    baked = steered.bake()
    torch.testing.assert_close(baked(ids).logits, due, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {"scale": lambda step: 3.0 / (1 + step), "layers": 1},
        {"scale": 2.0, "steps": slice(0, 2)},
        {"scale": 2.0, "steps": slice(1, None)},
        {"scale": 2.0, "steps": [0, 3], "layers": [0, 1]},
        {"mode": "ablate", "steps": 2},
        {"scale": 2.0, "steps": (3, 0, 3)},
    ],
    ids=["schedule", "first steps", "behind the prompt", "some steps", "one step", "steps in any order"],
)
@pytest.mark.parametrize(("make", "compile"), [(gpt2, False), (llama, False), pytest.param(gpt2, True, marks=pytest.mark.slow)])
def test_steps_and_schedules(make: Any, compile: bool, vector: SteeringVector, options: dict[str, Any], recwarn: Any) -> None:
    net = make()
    ids = torch.randint(1, 97, (2, 6))
    with hooked(net, vector, options):
        due = net.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY)
    steered = vector.apply(LanguageModel(net), **options)
    if compile:
        steered.compile(backend="aot_eager")
    found = steered.generate(ids, **GREEDY)
    assert torch.equal(found.sequences, due.sequences)
    torch.testing.assert_close(torch.stack(found.scores), torch.stack(due.scores), atol=1e-4, rtol=1e-4)
    assert not [warning for warning in recwarn if "loop ended" in str(warning.message)]


def test_lengths_in_float16_are_neither_too_large_nor_too_small() -> None:
    class Layers(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = torch.nn.ModuleList([torch.nn.Identity(), torch.nn.Identity()])

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return self.blocks[1](self.blocks[0](hidden))

    hidden = torch.tensor([[[0.0] * 4, [60000.0] * 4]], dtype=torch.float16)
    steered = SteeringVector({0: torch.ones(4)}, "blocks").apply(NNsight(Layers()), match_norm=True)
    assert torch.equal(steered(hidden), hidden)


@pytest.mark.slow
def test_another_factor_or_direction_compiles_nothing(vector: SteeringVector) -> None:
    net = gpt2()
    steered = vector.apply(LanguageModel(net), 1.0, layers=[0, 2])
    steered.compile()
    options = {**GREEDY, "cache_implementation": "static"}
    prompts = [torch.randint(1, 97, (2, length)) for length in (5, 6, 7, 8, 9)]
    for prompt in prompts[:3]:
        steered.generate(prompt, **options)
    fx.counters.reset()
    for prompt, scale in zip(prompts[3:], (2.0, -1.0), strict=True):
        steered.params["scale"] = scale
        with hooked(net, vector, {"scale": scale, "layers": [0, 2]}):
            due = net.generate(prompt, attention_mask=torch.ones_like(prompt), **GREEDY)
        assert torch.equal(steered.generate(prompt, **options).sequences, due.sequences)
    assert (fx.counters.captures, fx.counters.recordings, fx.counters.compiles) == (0, 0, 0)


def test_gradients_flow_through_a_steered_model(net: Any, vector: SteeringVector) -> None:
    ids = torch.randint(1, 97, (2, 6))
    with hooked(net, vector, {"scale": 2.0}):
        net(ids).logits.square().sum().backward()
    due = net.lm_head.weight.grad.clone()
    net.zero_grad()
    vector.apply(NNsight(net), 2.0)(ids).logits.square().sum().backward()
    torch.testing.assert_close(net.lm_head.weight.grad, due)


@pytest.mark.parametrize("name", ["mood.safetensors", "mood.gguf"])
def test_a_file_has_the_directions(vector: SteeringVector, tmp_path: Path, name: str) -> None:
    made = SteeringVector(dict(vector), "transformer.h", {0: 1.5, 2: -0.25}, {"method": "mean"})
    found = SteeringVector.load(made.save(tmp_path / name))
    assert found == made
    if name.endswith(".safetensors"):
        assert (found.at, found.effects, found.about) == (made.at, made.effects, made.about)
        assert found.best_layer == 0


def test_a_file_with_damaged_notes_is_refused(vector: SteeringVector, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    file = tmp_path / "mood.safetensors"
    for notes in ({"effects": "["}, {"effects": json.dumps({"a": 1})}, {"about": json.dumps([1])}):
        save_file({"1": vector[1]}, file, metadata=notes)
        with pytest.raises(ValueError, match="metadata of the vector is damaged"):
            SteeringVector.load(file)
    save_file({"1": vector[1]}, file, metadata={"format": "pt"})
    assert torch.equal(SteeringVector.load(file)[1], vector[1])
    save_file({"only": vector[1]}, file)
    with pytest.raises(ValueError, match="for any layer"):
        SteeringVector.load(file)


def test_the_hub_gets_and_gives_the_file(vector: SteeringVector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    sent: dict[str, Any] = {}

    def upload(self: Any, *, path_or_fileobj: str, path_in_repo: str, repo_id: str, **options: Any) -> str:
        sent[repo_id, path_in_repo] = Path(path_or_fileobj).read_bytes()
        return f"{repo_id}/{path_in_repo}"

    def download(repository: str, file: str, **options: Any) -> str:
        (tmp_path / Path(file).name).write_bytes(sent[repository, file])
        return str(tmp_path / Path(file).name)

    monkeypatch.setattr(huggingface_hub.HfApi, "upload_file", upload)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert vector.push("me/moods", "happy/7b.safetensors") == "me/moods/happy/7b.safetensors"
    assert SteeringVector.pull("me/moods", "happy/7b.safetensors") == vector


def test_arithmetic_and_mapping(vector: SteeringVector) -> None:
    assert list(vector) == [0, 1, 2]
    assert torch.equal((2 * vector)[1], 2 * vector[1])
    assert torch.equal((-vector)[2], -vector[2])
    assert vector != 2 * vector
    with pytest.raises(KeyError, match="no direction for layer 7, only for 0, 1, 2"):
        vector[7]
    with pytest.raises(ValueError, match="choose a layer, or compare"):
        _ = vector.best_layer


@pytest.mark.parametrize(
    ("make", "kind", "says"),
    [
        (lambda: SteeringVector({}), ValueError, "no directions"),
        (lambda: SteeringVector({0: torch.randn(4), 1: torch.randn(5)}), ValueError, "different sizes"),
        (lambda: SteeringVector({-1: torch.randn(4)}), TypeError, "layers are numbers from 0"),
        (lambda: SteeringVector({0: torch.randn(4, 4)}), ValueError, "a direction has shape .hidden."),
        (lambda: SteeringVector({0: torch.tensor([1.0, math.nan])}), ValueError, "not finite"),
    ],
)
def test_vectors_that_are_none(make: Callable[[], Any], kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=says):
        make()


@pytest.mark.parametrize(
    ("options", "kind", "says"),
    [
        ({"mode": "twist"}, ValueError, "the modes are 'add'"),
        ({"low": 0.0}, ValueError, "limits are for mode='clamp'"),
        ({"mode": "ablate", "scale": 2.0}, ValueError, "a factor is for mode='add'"),
        ({"mode": "project", "scale": lambda step: 1.0}, ValueError, "a factor is for mode='add'"),
        ({"mode": "clamp"}, ValueError, "one limit or both"),
        ({"mode": "clamp", "low": 2.0, "high": 1.0}, ValueError, "the lower one first"),
        ({"layers": [5]}, KeyError, "no direction for layer 5"),
        ({"layers": []}, ValueError, "steers nothing"),
    ],
)
def test_applications_that_are_refused(net: Any, vector: SteeringVector, options: dict[str, Any], kind: type[Exception], says: str) -> None:
    model = NNsight(net)
    with pytest.raises(kind, match=says):
        vector.apply(model, **options)
    assert not model._edits


def test_models_that_do_not_fit(vector: SteeringVector) -> None:
    deeper = SteeringVector({5: torch.randn(32)})
    with pytest.raises(ValueError, match="has a direction for layer 5, and the model has 3 layers at `transformer.h`"):
        deeper.apply(NNsight(gpt2()))
    with pytest.raises(ValueError, match="no list of layers"):
        vector.apply(NNsight(torch.nn.Linear(32, 32)))
    config = T5Config(num_layers=3, num_decoder_layers=3, d_model=32, d_kv=8, d_ff=48, num_heads=2, vocab_size=97)
    both = NNsight(T5ForConditionalGeneration(config).eval())
    with pytest.raises(ValueError, match="several lists of layers, decoder.block, encoder.block: choose one"):
        vector.apply(both)
    ids = torch.randint(1, 97, (1, 4))
    steered = SteeringVector(dict(vector), "encoder.block").apply(both, 2.0)
    assert not torch.equal(steered(ids, decoder_input_ids=ids).logits, both(ids, decoder_input_ids=ids).logits)
    with pytest.raises(ValueError, match="no list of layers at 'blocks'"):
        SteeringVector(dict(vector), "blocks").apply(both)


@pytest.mark.filterwarnings("ignore:The child module")
def test_layers_with_a_child_called_output() -> None:
    config = BertConfig(num_hidden_layers=3, hidden_size=32, intermediate_size=48, num_attention_heads=2, vocab_size=97)
    net, ids, direction = BertModel(config).eval(), torch.randint(0, 97, (2, 6)), torch.randn(32)
    handle = net.encoder.layer[1].register_forward_hook(lambda module, args, output: output + 2 * direction)
    due = net(ids).last_hidden_state
    handle.remove()
    steered = SteeringVector({1: direction}).apply(NNsight(net), 2.0)
    torch.testing.assert_close(steered(ids).last_hidden_state, due)
    torch.testing.assert_close(steered.bake(ids)(ids).last_hidden_state, due)


def test_layers_that_return_no_hidden_state_are_refused() -> None:
    class Named(torch.nn.Linear):
        def forward(self, hidden: Any) -> Any:
            return {"hidden": super().forward(hidden["hidden"])}

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(Named(32, 32) for _ in range(2))

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            named = {"hidden": hidden}
            for layer in self.layers:
                named = layer(named)
            return named["hidden"]

    steered = SteeringVector({1: torch.ones(32)}).apply(NNsight(Net()))
    with pytest.raises(TypeError, match="The layer returns a dict"):
        steered(torch.randn(2, 3, 32))


def test_a_direction_without_length_cannot_be_ablated(net: Any) -> None:
    with pytest.raises(ValueError, match="length 0"):
        SteeringVector({0: torch.zeros(32)}).apply(NNsight(net), mode="ablate")
