"""Baked edits: a plain module that torch compiles and exports, with the result of the edits."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import CLIPConfig, CLIPModel, LlamaConfig, LlamaForCausalLM, ViTConfig, ViTForImageClassification

from nnsight import NNsight
from nnsight.program.baking import bake
from nnsight.program.edits import _record
from nnsight.remote import InvalidProgramError, NotExpressibleError

from .test_bound import stack


class Logits(nn.Module):
    """A model that takes ids and returns logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(input_ids=ids, use_cache=False).logits
        return logits


@pytest.fixture(scope="module")
def steered(model: Any) -> Any:
    direction, alpha = torch.randn(model.config.n_embd, generator=torch.Generator().manual_seed(1)), 2.0
    with model.edit() as steered:
        early = model.transformer.h[0].output
        model.transformer.h[1].output[:, -1] += alpha * direction + early.mean(1)
        model.transformer.h[2].mlp.output = model.transformer.h[2].mlp.output * 0.5
    return steered


@pytest.fixture(scope="module")
def baked(steered: Any) -> nn.Module:
    return steered.bake()


def ids(rows: int, length: int) -> torch.Tensor:
    return torch.randint(0, 1000, (rows, length))


SIZES = [(1, 5), (2, 8), (3, 5)]


def test_a_baked_module_computes_what_the_edits_compute(steered: Any, baked: nn.Module) -> None:
    assert isinstance(baked, type(steered._module))
    for size in SIZES:
        given = ids(*size)
        torch.testing.assert_close(baked(given).logits, steered(given).logits)


def test_it_shares_the_weights_and_has_the_inputs_as_buffers(model: Any, baked: nn.Module) -> None:
    ours, theirs = dict(baked.named_parameters()), dict(model._module.named_parameters())
    assert ours.keys() == theirs.keys() and all(ours[name] is theirs[name] for name in ours)
    assert sorted(name for name, _ in baked.named_buffers() if name.startswith("edit_")) == ["edit_alpha", "edit_direction"]


def test_inputs_are_on_the_device_of_the_model() -> None:
    net, vector, alpha = stack(), torch.nn.Parameter(torch.randn(6)), 2.0
    with NNsight(net).edit() as edited:
        edited[1].output = edited[1].output + alpha * vector
    job, values, _ = _record(edited, (torch.randn(3, 6),), {})
    with FakeTensorMode(allow_non_fake_inputs=True):
        layers = [nn.Identity() for _ in net]
        layers[0].weight = nn.Parameter(torch.empty(6, device="cuda"))
        on_gpu = bake(nn.Sequential(*layers), job, values)
    assert on_gpu.edit_alpha.device.type == on_gpu.edit_vector.device.type == "cuda"
    assert isinstance(on_gpu.edit_vector, nn.Parameter) and on_gpu.edit_vector.requires_grad
    assert edited.bake(torch.randn(3, 6)).edit_vector is vector


def test_a_list_of_another_length_is_refused() -> None:
    class Parts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = Rows()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return sum(self.rows(x))

    class Rows(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
            return [row * 2.0 for row in x]

    with NNsight(Parts()).edit() as edited:
        for row in edited.rows.output:
            row.add_(1.0)
    baked = edited.bake(torch.ones(2, 4))
    for module in (baked, torch.compile(baked, backend="aot_eager", fullgraph=True)):
        assert torch.equal(module(torch.ones(2, 4)), torch.full((4,), 6.0))
    with pytest.raises(ValueError, match=r"had the lengths \[2\] when the edits were recorded, and have \[3\]"):
        baked(torch.ones(3, 4))


def _halves(h: torch.Tensor) -> torch.Tensor:
    return h.unflatten(-1, (2, 4)).flatten(-2)


def _double(h: torch.Tensor) -> torch.Tensor:
    h[:] *= 2
    return h


def _zero(h: torch.Tensor) -> torch.Tensor:
    h[..., 3] = h[:, 0] = 0
    return h


def _reshaped(h: torch.Tensor) -> torch.Tensor:
    return h.reshape(-1, 2, 4).relu().reshape(-1, 5, 8)


@pytest.mark.parametrize("edit", [_double, _zero, _halves, _reshaped])
def test_an_applied_program_that_reads_no_sizes_is_baked_for_all_sizes(edit: Any) -> None:
    net = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6))
    model, x, larger = NNsight(net), torch.randn(2, 5, 6), torch.randn(4, 5, 6)
    with model.trace(x, program=True) as tracer:
        model[0].output = edit(model[0].output)
    with torch.no_grad():
        torch.testing.assert_close(model.apply(tracer.program).bake(x)(larger), net[1](edit(net[0](larger))))


def test_it_compiles_as_one_graph(steered: Any, baked: nn.Module) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(baked, fullgraph=True, backend="aot_eager")
    for size in (*SIZES, *SIZES):
        given = ids(*size)
        torch.testing.assert_close(compiled(given).logits, steered(given).logits, rtol=1e-5, atol=1e-5)
    baked.edit_alpha.fill_(0.0)
    try:
        given = ids(2, 8)
        torch.testing.assert_close(compiled(given).logits, baked(given).logits, rtol=1e-5, atol=1e-5)
    finally:
        baked.edit_alpha.fill_(2.0)


@pytest.mark.slow
def test_it_is_not_taken_for_another_module_that_was_compiled(model: Any, steered: Any) -> None:
    torch._dynamo.reset()
    given = ids(1, 5)
    plain = torch.compile(model._module, backend="aot_eager")
    plain(given)
    baked = steered.bake()
    with model.edit() as zeroed:
        model.transformer.h[1].output[:] = 0.0
    for edited, made in ((steered, baked), (zeroed, zeroed.bake())):
        found = torch.compile(made, backend="aot_eager")(given).logits
        torch.testing.assert_close(found, edited(given).logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(plain(given).logits, model._module(given).logits, rtol=1e-5, atol=1e-5)


def test_it_generates(steered: Any, baked: nn.Module) -> None:
    given = ids(1, 6)
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        expected = baked.generate(given, **options)
        static = baked.generate(given, cache_implementation="static", **options)
        by_hand = given
        for _ in range(5):
            by_hand = torch.cat([by_hand, steered(by_hand).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(expected, static)
    assert expected.shape == by_hand.shape


def test_it_exports_for_any_batch_and_length(steered: Any, baked: nn.Module) -> None:
    batch, length = torch.export.Dim("batch", min=1, max=64), torch.export.Dim("length", min=2, max=64)
    exported = torch.export.export(Logits(baked), (ids(2, 7),), dynamic_shapes={"ids": {0: batch, 1: length}})
    for size in SIZES:
        given = ids(*size)
        torch.testing.assert_close(exported.module()(given), steered(given).logits, rtol=1e-5, atol=1e-5)


RUN = """
import sys
sys.modules["nnsight"] = None  # an import of it fails
import torch
ids, expected = torch.load(sys.argv[2])
found = torch._inductor.aoti_load_package(sys.argv[1])(ids)
torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
print("same")
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_package_runs_without_nnsight(steered: Any, baked: nn.Module, tmp_path: Path) -> None:
    batch, length = torch.export.Dim("batch", min=1, max=64), torch.export.Dim("length", min=2, max=64)
    with torch.no_grad():
        exported = torch.export.export(Logits(baked), (ids(2, 7),), dynamic_shapes={"ids": {0: batch, 1: length}})
        package = torch._inductor.aoti_compile_and_package(exported, package_path=str(tmp_path / "steered.pt2"))
        given = ids(3, 9)
        torch.save((given, steered(given).logits), tmp_path / "expected.pt")
    command = [sys.executable, "-c", RUN, package, str(tmp_path / "expected.pt")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.stdout.strip() == "same", done.stderr[-2000:]


@pytest.mark.slow
def test_a_llama_with_skips_weights_and_applied_modules() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2, vocab_size=50)
    net = LlamaForCausalLM(config).eval()
    model: Any = NNsight(net)
    example = torch.randint(0, 50, (1, 5))
    with model.edit() as edited:
        model.model.layers[0].skip(model.model.layers[0].input * 2)
        hidden = model.model.layers[1].output
        model.model.layers[1].output = model.model.norm(hidden) + model.model.embed_tokens.weight.mean()
    baked = edited.bake(example)
    compiled = torch.compile(baked, fullgraph=True, backend="aot_eager")
    for given in (example, torch.randint(0, 50, (2, 7))):
        expected = edited(given, use_cache=False).logits
        torch.testing.assert_close(baked(given, use_cache=False).logits, expected)
        torch.testing.assert_close(compiled(given).logits, expected, rtol=1e-5, atol=1e-5)


def test_a_direction_is_trained_in_a_baked_module() -> None:
    net, x = stack(), torch.randn(3, 6)
    model: Any = NNsight(net)
    direction = nn.Parameter(torch.zeros(6))
    with model.edit() as edited:
        model[1].output += direction
    baked = edited.bake(x)
    optimizer = torch.optim.SGD([baked.edit_direction], lr=0.1)
    losses = []
    for _ in range(5):
        loss = baked(x).square().mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses == sorted(losses, reverse=True) and losses[0] > losses[-1]


@pytest.mark.parametrize("kind", ["print", "stop", "value", "none", "no example"])
def test_what_cannot_be_baked_is_refused(kind: str) -> None:
    model: Any = NNsight(stack())
    x: Any = torch.randn(3, 6)
    error: Any = InvalidProgramError
    message = r"cannot be baked: line \d+ has"
    edited = model
    if kind == "print":
        with model.edit() as edited:
            print(model[1].output.sum())
    elif kind == "stop":
        error, message = ValueError, r"An edit called `tracer.stop\(\)`"
        with model.edit() as (tracer, edited):
            model[1].output[:] = 0.0
            tracer.stop()
    elif kind == "value":
        error, message = NotExpressibleError, "needs values"
        with model.edit() as edited:
            if model[1].output.sum() > 0:
                model[2].output[:] = 0.0
    elif kind == "none":
        error, message = ValueError, "has no edits to bake"
    else:
        error, message = ValueError, "needs an example of the input"
        with model.edit() as edited:
            model[1].output[:] = 0.0
    with pytest.raises(error, match=message):
        edited.bake(*([] if kind == "no example" else [x]))


def test_examples_of_models_of_transformers() -> None:
    """Their ``dummy_inputs`` are token ids, which only models of text take, and not all of these."""
    ids = torch.randint(0, 20, (2, 5))
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    image: Any = NNsight(ViTForImageClassification(ViTConfig(**sizes, image_size=4, patch_size=2)))
    with image.edit() as edited:
        image.classifier.output[:] = 0.0
    with pytest.raises(ValueError, match="needs an example of the input"):
        edited.bake()
    pixels = torch.randn(2, 3, 4, 4)
    assert not edited.bake(pixels)(pixels).logits.any()

    text, vision = {**sizes, "vocab_size": 20, "eos_token_id": 1}, {**sizes, "image_size": 4, "patch_size": 2}
    both: Any = NNsight(CLIPModel(CLIPConfig(text_config=text, vision_config=vision)))
    with both.edit() as edited:
        both.text_projection.output[:] = 1.0
    with pytest.raises(AttributeError) as caught:
        edited.bake()
    assert "pass an example of the input" in caught.value.__notes__[0]
    inputs = {"input_ids": ids, "pixel_values": pixels}
    torch.testing.assert_close(edited.bake(**inputs)(**inputs).logits_per_text, edited(**inputs).logits_per_text)


def test_hooks_of_an_applied_module() -> None:
    """A program runs them; a baked copy has hooks of its own, so it would run both."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    x = torch.randn(2, 4)
    model = NNsight(net)
    with model.edit() as edited:
        edited[1].output[:] = edited[2](edited[0].output)
    hook = net[2].register_forward_hook(lambda module, args, output: 3.0 * output)
    expected = net[2](net[2](net[0](x)))
    assert torch.equal(edited(x), expected)
    with model.trace(x, program=True) as tracer:
        model[1].output[:] = model[2](model[0].output)
        out = model.output.save()
    assert torch.equal(tracer.program.bind(model)(x)["out"], expected)
    with pytest.raises(InvalidProgramError, match=r"calls `model\.2`, which has hooks of its own"):
        edited.bake(x)
    hook.remove()
    torch.testing.assert_close(edited.bake(x)(x), edited(x))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_a_copy_of_a_baked_module_has_edits_of_its_own(copied: Any) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model, x, vector = NNsight(net), torch.randn(2, 4), torch.randn(4)
    with model.edit() as edited:
        edited[1].skip(edited[1].input * 0.5)
        edited[1].output[:] += vector
    baked = edited.bake(x)
    found = copied(baked)
    expected = edited(x)
    torch.testing.assert_close(found(x), expected)
    found.edit_vector.zero_()
    found[2].weight.data.zero_()
    torch.testing.assert_close(found(x), found[2].bias.expand(2, 4))
    torch.testing.assert_close(baked(x), expected)
    torch.testing.assert_close(torch.compile(found, backend="eager", fullgraph=True)(x), found(x))


def test_copies_and_files_of_a_model_with_a_program(tmp_path: Path) -> None:
    """They use their own weights."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model, x = NNsight(net), torch.randn(2, 4)
    with model.trace(x, program=True) as tracer:
        first = model[0].output
        model[1].output = model[1].output + model[2](first)
    steered = model.apply(tracer.program)
    expected = steered(x)

    def by_hand(net: nn.Module) -> torch.Tensor:
        first = net[0](x)
        return net[2](net[1](first) + net[2](first))

    torch.testing.assert_close(expected, by_hand(net))
    steered.export_edits("steering", export_dir=tmp_path)
    other = NNsight(copy.deepcopy(net))
    other.import_edits("steering", export_dir=tmp_path)
    for found in (copy.deepcopy(steered), pickle.loads(pickle.dumps(steered)), other):
        torch.testing.assert_close(found(x), expected)
        found._module[2].weight.data.mul_(2.0)
        torch.testing.assert_close(found(x), by_hand(found._module))
    torch.testing.assert_close(steered(x), expected)
