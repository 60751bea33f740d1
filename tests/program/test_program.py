"""Programs as files: the same block on other inputs, in other models, and to look at."""

from __future__ import annotations

import json
import runpy
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import nnsight
from nnsight import NNsight, Program
from nnsight.remote import ExecutionFailedError, InvalidProgramError

from ..conftest import Hooks
from ..remote.remoting import Catch

PROMPT = "The Eiffel Tower is in the city of"


@pytest.fixture(scope="module")
def direction(model: Any) -> torch.Tensor:
    return torch.randn(model.config.n_embd, generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def steering(model: Any, direction: torch.Tensor) -> Program:
    with model.trace(PROMPT, remote="program") as tracer:
        model.transformer.h[1].output[:, -1] += 4.0 * direction
        logits = model.lm_head.output[:, -1].save()
    with pytest.raises(NameError):
        print(logits)  # nothing has run
    return tracer.program


def steered(model: Any, direction: torch.Tensor, prompt: str) -> torch.Tensor:
    """Return the logits of the last position, by a plain hook."""

    def hook(output: Any) -> None:
        hidden = output if isinstance(output, torch.Tensor) else output[0]
        hidden[:, -1] += 4.0 * direction

    with torch.no_grad():
        return Hooks(model._module).output("transformer.h.1", hook)(**model.tokenizer(prompt, return_tensors="pt")).logits[:, -1]


def test_a_program_runs_on_another_prompt(model: Any, steering: Program, direction: torch.Tensor) -> None:
    found = steering.run(model, "Hello there, my dear")
    assert found.keys() == {"logits"}
    assert torch.allclose(found["logits"], steered(model, direction, "Hello there, my dear"), atol=1e-5)


def test_a_program_survives_its_file(model: Any, steering: Program, tmp_path: Path) -> None:
    steering.save(tmp_path / "steering.safetensors")
    loaded = Program.load(tmp_path / "steering.safetensors")
    assert loaded == steering and hash(loaded) == hash(steering) and repr(loaded) == repr(steering)
    assert torch.equal(loaded.run(model, PROMPT)["logits"], steering.run(model, PROMPT)["logits"])


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_applied_program_runs_in_each_trace(model: Any, steering: Program, direction: torch.Tensor, compile: bool) -> None:
    base = nnsight.LanguageModel(model._module, model.tokenizer, compile={"backend": "eager"}) if compile else model
    edited = base.apply(steering)
    for prompt in (PROMPT, "Hello there, my dear"):
        with edited.trace(prompt):
            logits = edited.lm_head.output[:, -1].save()
        assert torch.allclose(logits, steered(model, direction, prompt), atol=1e-5)
    with base.trace(PROMPT):
        untouched = base.lm_head.output[:, -1].save()
    assert not torch.allclose(untouched, steered(model, direction, PROMPT), atol=1e-3)


def test_a_program_of_a_generation_generates(model: Any) -> None:
    with model.generate(PROMPT, max_new_tokens=3, remote="program") as tracer:
        ids = tracer.result.save()
    expected = model._module.generate(**model.tokenizer("Hello", return_tensors="pt"), max_new_tokens=5, pad_token_id=0)
    assert torch.equal(tracer.program.run(model, "Hello", max_new_tokens=5)["ids"], expected)


def test_the_program_of_a_generation_as_an_edit(model: Any) -> None:
    """It has the steps that were recorded: a longer generation goes on without it, and a shorter one ends its loop."""
    with model.generate(PROMPT, max_new_tokens=3, remote="program") as tracer:
        for _ in tracer.iter[:3]:
            model.transformer.h[0].output[:] = 0
    steered = model.apply(tracer.program)
    with model.edit() as (controls, expected):
        for _ in controls.iter[:3]:
            model.transformer.h[0].output[:] = 0
    for length in (5, 3, 2):
        assert torch.equal(*(edited.generate(PROMPT, max_new_tokens=length, eos_token_id=-1) for edited in (steered, expected)))


def test_apply_of_modules_stays_what_it_is() -> None:
    net = NNsight(nn.Linear(2, 2))
    net.apply(lambda module: module.weight.data.zero_())
    assert net.weight.eq(0).all()


def test_a_program_that_does_not_fit_is_refused(steering: Program) -> None:
    with pytest.raises(InvalidProgramError, match=r"model\.transformer\.h\.1\.output"):
        NNsight(nn.Linear(2, 2)).apply(steering)
    with pytest.raises(InvalidProgramError, match="no location"):
        steering.run(NNsight(nn.Linear(2, 2)), torch.ones(1, 2))


def test_a_program_with_invokes_is_not_applied(model: Any) -> None:
    with model.trace(remote="program") as tracer:
        with tracer.invoke(PROMPT):
            model.transformer.h[0].output[:] = 0
        with tracer.invoke("Hello"):
            model.transformer.h[1].output[:] = 0
    with pytest.raises(ValueError, match="several invokes"):
        model.apply(tracer.program)


def test_a_file_that_is_no_program_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"not a program at all")
    with pytest.raises(InvalidProgramError):
        Program.load(tmp_path / "x")
    with pytest.raises(FileNotFoundError):
        Program.load(tmp_path / "y")


def test_a_program_shows_what_it_does_and_has_no_inputs(steering: Program) -> None:
    content = json.loads(steering.to_json())
    assert content["runs"][0]["args"] == {"list": []} and content["runs"][0]["kwargs"] == {"dict": []}
    shown = repr(steering)
    assert "read model.transformer.h.1.output" in shown and "aten.add_.Tensor" in shown and "save logits" in shown


class Routed(torch.nn.Module):
    """Splits its input into parts whose sizes depend on values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(torch.split(x.flatten(), (x > 0).sum(1).tolist()))


def test_a_model_whose_sizes_depend_on_values_is_not_recorded_and_says_why() -> None:
    model = NNsight(Routed())
    with pytest.raises(RuntimeError, match="split_sizes") as caught, model.trace(torch.ones(2, 3), program=True):
        model.output.save()
    assert "A recording of a program has sizes but no values" in caught.value.__notes__[0]


def test_a_program_is_drawn_by_graphviz(steering: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ImportError, match="graphviz"):
        steering.draw()
    assert steering._repr_svg_() is None
    dot = tmp_path / "dot"
    dot.write_text('#!/bin/sh\necho "<svg>"\nwhile IFS= read -r line; do echo "$line"; done\n')
    dot.chmod(dot.stat().st_mode | stat.S_IXUSR)
    drawn = steering.draw()
    assert drawn.startswith("<svg>") and "read model.transformer.h.1.output" in drawn and "->" in drawn
    assert steering._repr_svg_() == drawn


# -- sizes ---------------------------------------------------------------------------------------------------------------------------

SHORT = "Hello"  # of 3 tokens; PROMPT has 12


def on_any_length(model: Any, of: Any, prompt: str) -> tuple[Program, torch.Tensor]:
    """Return a program that saves ``of(hidden)``, and what an ordinary trace of ``prompt`` saves."""
    with model.trace(SHORT, remote="program") as tracer:
        found = of(model.transformer.h[1].output).save()
    with model.trace(prompt):
        expected = of(model.transformer.h[1].output).save()
    return tracer.program, expected


@pytest.mark.parametrize(
    "of",
    [
        lambda h: h[:, -1],
        lambda h: h.mean(1) / h.shape[-1],
        lambda h: h * torch.ones(h.shape[2]),
        lambda h: nn.functional.layer_norm(h, h.shape[-1:]),
        lambda h: h.norm(dim=-1) + h.dim() + len(h.shape),
        lambda h: nn.functional.pad(h, (0, 0, 1, 0)),
        lambda h: h.diff(dim=1).sum(1),
        lambda h: h.flatten(0, 1).sum(0),
    ],
)
def test_a_program_that_looks_at_no_length_runs_on_any(model: Any, of: Any) -> None:
    program, expected = on_any_length(model, of, PROMPT)
    torch.testing.assert_close(program.run(model, PROMPT)["found"], expected)


@pytest.mark.parametrize(
    "of",
    [
        lambda h: h[:, h.shape[1] - 1],
        lambda h: h.sum(1) / h.size(1),
        lambda h: h.sum(1) / len(h[0]),
        lambda h: h.sum() / h.numel(),
        lambda h: sum(h[:, position] for position in range(h.shape[1])),
        lambda h: h.chunk(2, dim=1)[0].sum(1),
        lambda h: h.unbind(1)[0],
        lambda h: h.sum(1) + torch.ones(h.shape).sum(),
        lambda h: h.sum(1) + (h.shape == (1, 3, 32)),
        lambda h: h.sum(1) + len((1, *h.shape)) + sum((2,) + h.shape + (2,)),  # noqa: RUF005 - how a shape adds up is the question
        lambda h: h.sum(1) + (3 in h.shape) + h.shape.numel() + {h.shape: 1.0}[h.shape],
        lambda h: h.sum(1) + h.stride()[0],
    ],
)
def test_a_program_that_looked_at_a_length_is_refused_on_another(model: Any, of: Any) -> None:
    program, _ = on_any_length(model, of, SHORT)
    with pytest.raises(InvalidProgramError, match=r"size, line \d+: .* dimension \d .* was \d+ when the program was recorded and is \d+"):
        program.run(model, PROMPT)
    with pytest.raises(InvalidProgramError, match="Record it for inputs of this size"), model.apply(program).trace(PROMPT):
        pass
    _, expected = on_any_length(model, of, SHORT)
    torch.testing.assert_close(program.run(model, SHORT)["found"], expected)


def _assigned(part: Any) -> Any:
    def of(hidden: torch.Tensor) -> torch.Tensor:
        changed = hidden.clone()
        part(changed, hidden)
        return changed

    return of


@pytest.mark.parametrize("recorded", [1, 2])
@pytest.mark.parametrize(
    "of",
    [
        lambda h: h[:1, :3],
        lambda h: h[0:1, None, ..., 0:2],
        lambda h: h[:, :3, [0, 2]],
        _assigned(lambda new, h: new.__setitem__(slice(1), 0.0)),
        _assigned(lambda new, h: new.__setitem__((slice(1), slice(0, 3)), h[0, 0])),
        _assigned(lambda new, h: new.__setitem__(slice(None), h.mean(1, keepdim=True))),
        _assigned(lambda new, h: new.__setitem__(..., h[:, :1])),
        _assigned(lambda new, h: new.__setitem__((slice(None), 0), h[None, :, 0])),
        _assigned(lambda new, h: new.__setitem__((slice(None), [0, 2]), h[:, :1])),
        _assigned(lambda new, h: new.__setitem__((slice(None), [0, 2]), h[None, :, :1])),
        _assigned(lambda new, h: new.__setitem__(h[..., 0] > 0, h[0, :1, 0])),
    ],
)
def test_indices_of_a_program_do_not_depend_on_the_recorded_sizes(of: Any, recorded: int) -> None:
    """torch drops a slice such as `:3` of three entries, and gives an assigned value the sizes of the part."""
    net = nn.Sequential(nn.Linear(4, 4))
    model = NNsight(net)
    with model.trace(torch.randn(recorded, 3, 4), remote="program") as tracer:
        found = of(model[0].output).save()
    for sizes in ((1, 3, 4), (2, 3, 4), (3, 5, 4)):
        x = torch.randn(sizes)
        torch.testing.assert_close(tracer.program.run(model, x)["found"], of(net(x)))


def test_sizes_of_a_program_survive_its_file_and_those_of_a_job_are_not_sent(model: Any, tmp_path: Path) -> None:
    program, _ = on_any_length(model, lambda h: h.sum(1) / h.shape[1], SHORT)
    program.save(tmp_path / "program.safetensors")
    assert "size" in repr(program) and "dim=1, size=3" in repr(program)
    with pytest.raises(InvalidProgramError, match="dimension 1"):
        Program.load(tmp_path / "program.safetensors").run(model, PROMPT)
    kept = Catch()
    with model.trace(SHORT, backend=kept):
        hidden = model.transformer.h[1].output
        found = (hidden.sum(1) / hidden.shape[1]).save()
    nodes = kept.recorded.job.nodes
    assert nodes and not any(node["do"] == "size" for node in nodes)  # it has its input along


def test_a_program_of_several_invokes_depends_on_the_number_of_rows_only(model: Any) -> None:
    with model.trace(remote="program") as tracer:
        for number, prompt in enumerate((SHORT, PROMPT, SHORT)):
            with tracer.invoke(prompt):
                model.transformer.h[1].output[:, -1, number] += 4.0
                logits = model.lm_head.output[:, -1].save()
    assert {node["dim"] for node in tracer.program._job.nodes if node["do"] == "size"} == {0}


def test_a_generation_that_ends_early_is_refused_where_the_block_looked_at_its_length(model: Any) -> None:
    with model.generate(PROMPT, max_new_tokens=4):
        ids = model.generator.output.save()
    options = {"max_new_tokens": 4, "eos_token_id": int(ids[0, 12])}
    with pytest.raises(ExecutionFailedError, match=r"dimension 1 of this value, which was 16 when .* is 13 here"):
        with model.generate(PROMPT, **options, remote="local") as tracer:
            found = (tracer.result.sum(1) / tracer.result.shape[1]).save()
    with model.generate(PROMPT, **options, remote="local") as tracer:
        last = (tracer.result[:, -1] * len(tracer.result)).save()
    assert last.tolist() == [options["eos_token_id"]]


def test_a_field_of_an_output_is_found_where_another_input_gives_more_fields(model: Any, tmp_path: Path) -> None:
    with model.trace(SHORT, remote="program") as tracer:
        model.output.logits[:, -1] *= 2.0
        model.output.logits = model.output.logits + 1.0
        logits = model.output.logits.save()
    assert "key=logits" in repr(tracer.program)
    ids = model.tokenizer(PROMPT, return_tensors="pt").input_ids
    expected = model._module(ids).logits
    expected[:, -1] *= 2.0
    found = tracer.program.run(model, input_ids=ids, labels=ids, use_cache=False)["logits"]
    torch.testing.assert_close(found, expected + 1.0)
    written = _run(tracer.program.to_python(), tmp_path)["program"](model, input_ids=ids, labels=ids, **tracer.program.inputs)
    torch.testing.assert_close(written["logits"], expected + 1.0)
    baked = model.apply(tracer.program).bake()
    torch.testing.assert_close(baked(ids, labels=ids).logits, expected + 1.0)
    with model.trace(SHORT, labels=ids[:, :3], remote="program") as tracer:
        loss = model.output.loss.save()
    with pytest.raises(InvalidProgramError, match="the value there has no `loss`"):
        tracer.program.run(model, PROMPT)


def test_a_program_as_python(model: Any, tmp_path: Path) -> None:
    """The text runs in a trace, eager or compiled, and saves what the program saves."""
    direction, alpha = torch.randn(model.config.n_embd), 4.0
    with model.trace("The Eiffel Tower is in", remote="program") as tracer:
        hidden = model.transformer.h[0].output
        model.transformer.h[1].output[:, -1] += alpha * direction
        model.transformer.h[2].mlp.skip(model.transformer.h[2].mlp.input)
        first, second = hidden.chunk(2, -1)
        parts = nnsight.save([first + second, hidden.masked_fill(hidden > 0.5, 0.25)])
        lens = model.lm_head(model.transformer.ln_f(hidden)).argmax(-1).save()
        norm = model.transformer.ln_f.output.detach().norm().save()
        with model.lm_head.output.sum().backward():
            gradient = hidden.grad.save()
            hidden.grad = hidden.grad * 2.0
        print("norm", norm)
    program = tracer.program
    text = program.to_python()
    assert "  # line" in text
    assert "model.transformer.h[1].output[:, -1] += alpha * direction" in text
    names = _run(text, tmp_path)
    ids = torch.arange(9)[None]
    for each in (NNsight(model._module), NNsight(model._module, compile={"backend": "aot_eager"})):
        found = names["program"](each, ids, **program.inputs)
        expected = program.run(each, ids)
        assert found.keys() == expected.keys() == {"parts", "lens", "norm", "gradient"}
        torch.testing.assert_close(found, expected)
    program.save(tmp_path / "program.safetensors")
    loaded = Program.load(tmp_path / "program.safetensors").to_python()
    assert "# line" in loaded and ": model.transformer" not in loaded, "a file has numbers of lines, and not their text"


def _run(text: str, folder: Path) -> dict[str, Any]:
    path = folder / f"written_{len(text)}.py"
    path.write_text(text)
    return runpy.run_path(str(path))


def test_invokes_and_generations_as_python(model: Any, tmp_path: Path) -> None:
    direction = torch.randn(model.config.n_embd)
    with model.generate("Hello", max_new_tokens=3, do_sample=False, remote="program") as tracer:
        for _ in tracer.iter[:3]:
            model.transformer.h[1].output[:, -1] += direction
        tokens = tracer.result.save()
    names = _run(tracer.program.to_python(), tmp_path)
    found = names["program"](model, "Hello", max_new_tokens=3, do_sample=False, **tracer.program.inputs)
    torch.testing.assert_close(found, tracer.program.run(model, "Hello", max_new_tokens=3, do_sample=False))
    with model.trace(remote="program") as tracer:
        barrier = tracer.barrier(2)
        with tracer.invoke("Hello there"):
            hidden = model.transformer.h[0].output
            barrier()
            one = model.lm_head.output.save()
        with tracer.invoke("Hello"):
            barrier()
            model.transformer.h[1].output[:] = hidden[:, -1:] * 0.0
            two = model.lm_head.output.save()
    program = tracer.program
    names = _run(program.to_python(), tmp_path)
    constants = {"constants": program.constants} if program.constants else {}
    found = names["program"](model, ["Hello there", "Hello"], **constants, **program.inputs)
    torch.testing.assert_close(found, program.run(model, ["Hello there", "Hello"]))


def test_a_list_of_another_length_is_refused(tmp_path: Path) -> None:
    """What a block makes of a list, one step for each item, is part of the program."""

    class Parts(nn.Module):
        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            return {"parts": [row * 2.0 for row in x], "whole": x * 3.0}

    model = NNsight(Parts())
    with model.trace(torch.ones(2, 4), remote="program") as tracer:
        total = sum(model.output["parts"]).save()
    with model.trace(torch.ones(2, 4), remote="program") as other:
        whole = model.output["whole"].save()
    assert torch.equal(tracer.program.run(model, torch.ones(2, 4))["total"], torch.full((4,), 4.0))
    for program in (tracer.program, Program(tracer.program._job)):
        with pytest.raises(InvalidProgramError, match=r"line \d+: a list in the value there has another length"):
            program.run(model, torch.ones(3, 4))
    written = _run(tracer.program.to_python(), tmp_path)["program"]
    assert torch.equal(written(model, torch.ones(2, 4))["total"], torch.full((4,), 4.0))
    with pytest.raises(InvalidProgramError, match="a list in the value there has another length"):
        written(model, torch.ones(3, 4))
    assert other.program.run(model, torch.ones(3, 4))["whole"].shape == (3, 4)
    with pytest.raises(NameError):
        print(total, whole)


def test_results_with_several_tensors_and_a_stop_as_python(tmp_path: Path) -> None:
    net, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(2, 4)
    model = NNsight(net)
    with model.trace(x, remote="program") as tracer:
        most = model[0].output.max(-1).save()
        applied = model[1](model[0].output).save()
        tracer.stop()
    path = tmp_path / "program.py"
    path.write_text(tracer.program.to_python())
    found = runpy.run_path(str(path))["program"](model, x)
    hidden = net[0](x)
    torch.testing.assert_close(found, {"most": tuple(hidden.max(-1)), "applied": net[1](hidden)})


@pytest.mark.parametrize("how", [{"program": True}, {"remote": "local"}], ids=str)
def test_a_function_that_is_opened_in_the_middle_of_a_block(how: Any) -> None:
    def attended(model: Any, **how: Any) -> Any:
        with torch.no_grad(), model.trace("Hello there", **how):
            first = model.transformer.h[0].output.save()
            inner = model.transformer.h[1].attn.source.attention_interface_0.source
            found = inner.torch_nn_functional_scaled_dot_product_attention_0.output.save()
        return first, found

    torch.testing.assert_close(attended(nnsight.demo_model(), **how), attended(nnsight.demo_model()))


def test_random_numbers_are_those_of_an_ordinary_trace() -> None:
    net, x = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 2)), torch.ones(2, 4)
    model = NNsight(net)

    def run(**how: Any) -> tuple[torch.Tensor, torch.Tensor, Any]:
        torch.manual_seed(0)
        with model.trace(x, **how) as tracer:
            model[0].output += torch.randn_like(model[0].output)
            out = model.output.save()
        return out, torch.rand(1), tracer

    out, after, tracer = run()
    found = run(program=True)
    assert torch.equal(found[0], out) and torch.equal(found[1], after)
    before = torch.get_rng_state()
    assert "aten.normal_" in str(tracer.program)
    assert torch.equal(torch.get_rng_state(), before), "to look at a program draws no numbers"


@pytest.mark.parametrize("where", [{"program": True}, {"remote": "local"}], ids=str)
@pytest.mark.parametrize("around", [True, False], ids=["gradients", "no gradients"])
def test_a_model_that_differentiates_sees_replacements(around: bool, where: dict[str, Any]) -> None:
    class Force(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.energy = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
            self.last = nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                (force,) = torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)
                (change,) = torch.autograd.grad(force.sum(), x)
            return self.last(force + change)

    def edited(x: torch.Tensor, **where: Any) -> Any:
        with model.trace(x, **where) as tracer:
            model.energy[0].output = model.energy[0].output + 1
            model.energy.output = model.energy.output ** 2
            out = model.output.save()
        return out, tracer

    model, x, other = NNsight(Force()), torch.randn(3, 4), torch.randn(3, 4)
    with torch.set_grad_enabled(around):
        out, tracer = edited(x, **where)
        torch.testing.assert_close(out, edited(x)[0])
        torch.testing.assert_close(tracer.program.bind(model)(other)["out"], edited(other)[0])
