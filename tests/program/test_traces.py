"""``trace(program=True)``: the block as a program that runs here, with the values, gradients and errors of any trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import nnsight
from nnsight import NNsight
from nnsight.remote import InvalidProgramError, NotExpressibleError

from ..conftest import Hooks
from .test_bound import stack

PROGRAMS = [{"program": True}, {"remote": "local"}]


@pytest.mark.parametrize("compile", [False, {"backend": "aot_eager"}])
def test_a_trace_has_its_program(compile: Any) -> None:
    net, x = stack(), torch.randn(3, 6)
    direction, alpha = torch.randn(6, requires_grad=True), 2.0
    model = NNsight(net, compile=compile)
    kept: list[torch.Tensor] = []
    with model.trace(x, program=True) as tracer:
        model[1].output[:] += alpha * direction
        kept.append(model[2].output)
        out = model[3].output.save()
    expected = Hooks(net).output("1", lambda value: value + alpha * direction)(x)
    torch.testing.assert_close(out, expected)
    assert [item.shape for item in kept] == [(3, 6)]
    out.sum().backward()
    ours, direction.grad = direction.grad, None
    expected.sum().backward()
    torch.testing.assert_close(ours, direction.grad)
    assert sorted(tracer.program.inputs) == ["alpha", "direction"]
    assert tracer.report.mode == ("compiled" if compile else "eager")
    y = torch.randn(5, 6)
    found = tracer.program.bind(model, inputs=["alpha"])(y, alpha=0.5)["out"]
    torch.testing.assert_close(found, Hooks(net).output("1", lambda value: value + 0.5 * direction)(y))


def test_a_trace_under_inference_mode_has_its_program() -> None:
    net, x = stack(), torch.randn(3, 6)
    model = NNsight(net)
    with torch.inference_mode():
        direction = torch.randn(6)
        with model.trace(x, program=True) as tracer:
            model[1].output[:] += 2 * direction
            out = model[3].output.save()
        other = torch.randn(6)
        found = tracer.program.bind(model, inputs=["direction"])(x, direction=other)["out"]
        expected = [Hooks(net).output("1", lambda value, added=added: value + 2 * added)(x) for added in (direction, other)]
    torch.testing.assert_close([out, found], expected)


def test_parameters_of_a_module_of_ones_own_are_trained() -> None:
    net, x, probe = stack(), torch.randn(3, 6), nn.Linear(6, 2)
    model = NNsight(net)
    with model.trace(x, program=True):
        loss = probe(model[2].output).square().mean().save()
    loss.backward()
    ours = probe.weight.grad.clone()
    probe.weight.grad = None
    hooks = Hooks(net)
    hooks.output("2", hooks.keep("hidden"))(x)
    probe(hooks.seen["hidden"]).square().mean().backward()
    torch.testing.assert_close(ours, probe.weight.grad)


def test_a_generation_has_its_program(model: Any) -> None:
    direction = torch.randn(model.config.n_embd)
    with model.generate("Hello", max_new_tokens=3, do_sample=False, program=True) as tracer:
        for _ in tracer.iter[:3]:
            model.transformer.h[1].output[:, -1] += direction
        tokens = tracer.result.save()
    with model.generate("Hello", max_new_tokens=3, do_sample=False) as plain:
        for _ in plain.iter[:3]:
            model.transformer.h[1].output[:, -1] += direction
        expected = plain.result.save()
    assert torch.equal(tokens, expected)
    assert "direction" in tracer.program.inputs


@pytest.mark.parametrize("how", PROGRAMS, ids=str)
def test_sizes_in_a_generation_are_those_of_the_run(how: dict[str, Any], model: Any) -> None:
    """``generate`` asks for the logits of the last position only, if the signature of ``forward`` has an argument for that."""
    with model.generate("Hello there", max_new_tokens=2, do_sample=False, **how) as tracer:
        sizes = nnsight.save([])
        for _ in tracer.iter[:2]:
            sizes.append((tuple(model.transformer.h[1].output.shape), tuple(model.lm_head.output.shape)))
            model.lm_head.output = model.lm_head.output * 0.5
    length = model.tokenizer("Hello there", return_tensors="pt").input_ids.shape[1]
    width, vocabulary = model.config.n_embd, model.config.vocab_size
    assert length > 1
    assert sizes == [((1, length, width), (1, 1, vocabulary)), ((1, 1, width), (1, 1, vocabulary))]


def _first(v: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    v[0] = 100.0
    return v


def _view(v: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    v[1:].mul_(5.0)
    return v


def _condition(v: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    v[0] = 50.0
    if v.sum() > 20.0:
        v[1] = v.max().item()
    return v


def _both(v: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    v += 1.0
    part = v.view(2, 3)
    part[0] += h.mean(0)[:3]
    return v.clamp(min=0.5)


@pytest.mark.parametrize("edit", [_first, _view, _condition, _both])
def test_what_was_computed_of_inputs_is_edited_in_place(edit: Any) -> None:
    net, x = stack(), torch.randn(3, 6)
    model, direction, alpha = NNsight(net), torch.arange(1.0, 7.0), 2.0

    def run(**options: Any) -> Any:
        with model.trace(x, **options) as tracer:
            hidden = model[1].output
            vector = edit(direction * alpha, hidden)
            model[1].output = hidden + vector
            total = vector.sum().save()
            out = model[3].output.save()
        return total, out, tracer

    total, out, _ = run()
    torch.testing.assert_close(run(program=True)[:2], (total, out))
    if edit is not _both:  # there the vector is a constant of its own, which cannot have values of the model
        torch.testing.assert_close(run(remote="local")[:2], (total, out))
    program = run(program=True)[2].program
    if edit is _condition:
        with pytest.raises(InvalidProgramError, match="`direction` is not an input of this program: Python uses its value"):
            program.bind(model, inputs=["direction"])
        return
    direction = torch.linspace(-1.0, 3.0, 6)
    found = program.bind(model, inputs=["direction"])(x, direction=direction)
    torch.testing.assert_close((found["total"], found["out"]), run()[:2])


class Residual(nn.Module):
    """Goes on with what its first module returns."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.a(x)
        return a + self.c(self.b(a))


@pytest.mark.parametrize("options", [{"program": True}, {"remote": "local"}], ids=["program", "remote"])
def test_an_edit_of_what_the_model_was_given_is_made_where_it_stands(options: dict[str, Any]) -> None:
    """Also where the block uses nothing of the location at which it stands."""
    model, x = NNsight(Residual()), torch.randn(2, 4)

    def run(**options: Any) -> torch.Tensor:
        with torch.no_grad(), model.trace(x, **options):
            given = model.a.output * 2.0
            model.a.output = given
            model.b.output  # noqa: B018 - waits
            given += 5.0
            out = model.output.save()
        return out

    torch.testing.assert_close(run(**options), run())
    with pytest.raises(NotExpressibleError, match=r"test_traces.py:\d+: `add_` edits a tensor in place that the block has already given"):
        with model.trace(x, **options):
            own = torch.zeros(2, 4)
            model.a.output = own
            model.b.output  # noqa: B018
            own += 2.0
            model.output.save()
    with model.trace(x, **options):
        own = torch.zeros(2, 4)
        model.a.output = own.clone()
        model.b.output  # noqa: B018
        own += 2.0
        out = model.output.save()
    torch.testing.assert_close(out, model._module.c(torch.zeros(2, 4)))


def test_what_is_no_program_is_refused_at_its_line() -> None:
    model, x = NNsight(stack()), torch.randn(3, 6)
    with pytest.raises(NotExpressibleError, match="needs values"), model.trace(x, program=True):
        if model[1].output.sum() > 0:
            model[2].output[:] = 0.0
    with pytest.raises(ValueError, match="leave out remote= and backend="), model.trace(x, program=True, remote="local"):
        model[1].output.save()
    with pytest.raises(ValueError, match="a program cannot contain a function of yours"), model.trace(x, program=True, fn=model._module):
        model[1].output.save()


class Passing(nn.Module):
    """Passes what ``first`` returns on to ``again``, after ``between`` has computed with it; or edits it on the way."""

    def __init__(self, edits: bool) -> None:
        super().__init__()
        self.first, self.between, self.again, self.edits = nn.Linear(4, 4), nn.Linear(4, 4), nn.Identity(), edits

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        side = self.between(hidden)
        if self.edits:
            hidden += 1.0
        return self.again(hidden) + side


@torch.no_grad()
@pytest.mark.parametrize("edits", [False, True])
@pytest.mark.parametrize("compile", [False, {"backend": "aot_eager"}])
def test_a_replacement_that_the_model_passes_on_is_edited_where_it_is_found(compile: Any, edits: bool) -> None:
    torch.manual_seed(0)
    model, x = NNsight(Passing(edits), compile=compile), torch.randn(2, 4)
    expected = passing_on(model, x)
    for name, value in passing_on(model, x, program=True).items():
        torch.testing.assert_close(value, expected[name])


def passing_on(model: Any, x: torch.Tensor, **options: Any) -> dict[str, Any]:
    with model.trace(**options) as tracer:
        cache = tracer.cache()
        with tracer.invoke(x):
            model.first.output = model.first.output * 2.0
            model.again.output[:, 0] = model.again.output.mean()
            kept = model.again.output.save()
        with tracer.invoke():
            before = model.between.input.clone().save()
            after = model.again.output.clone().save()
        with tracer.invoke():
            out = model.output.save()
    entries = {path: entry.output for path, entry in cache.items()}
    return {"kept": kept, "before": before, "after": after, "out": out, **entries}


@pytest.mark.slow
def test_a_cache_of_a_compiled_model_is_read_when_the_model_has_returned_it(model: Any) -> None:
    compiled = nnsight.LanguageModel(model._module, model.tokenizer, compile={"backend": "aot_eager"})
    with compiled.trace("Hello", program=True) as tracer:
        model.transformer.h[1].output[:] *= 2.0
        out = compiled.output.save()
    bound, expected = tracer.program.bind(compiled), tracer.program.run(model, "Hello there")["out"]
    assert tracer.report.mode == "compiled"
    torch.testing.assert_close(out.logits, tracer.program.run(model, "Hello")["out"]["logits"])
    for _ in range(2):
        torch.testing.assert_close(bound("Hello there")["out"], expected)


def test_a_program_of_several_invokes_is_refused_on_another_number_of_rows(model: Any) -> None:
    with model.trace(program=True) as tracer:
        for prompt in ("Hello", "Hello there"):
            with tracer.invoke(prompt):
                model.transformer.h[1].output[:] *= 2.0
                out = model.lm_head.output.save()
    bound = tracer.program.bind(model)
    torch.testing.assert_close(bound(["Hello", "Hello there"])["out"], out)
    with pytest.raises(InvalidProgramError, match="dimension 0 of this value, which was 2 when the program was recorded and is 3"):
        bound(["Hello", "Hello there", "Hello"])


def test_an_edit_before_the_end_of_a_run_is_made() -> None:
    """It shows in the user's own input."""
    model = NNsight(stack())
    for options in ({}, {"program": True}):
        x = torch.zeros(3, 6)
        with torch.no_grad(), model.trace(x, **options) as tracer:
            model[0].input[:, 0] = 5.0
            tracer.stop()
        assert x[:, 0].tolist() == [5.0, 5.0, 5.0]


@pytest.mark.parametrize("stops", [False, True])
@pytest.mark.parametrize("how", [{"program": True}, {"remote": "local"}])
def test_weights_and_tensors_from_outside_are_saved(how: Any, stops: bool) -> None:
    net, x, vector = stack(), torch.randn(3, 6), torch.randn(6)
    model = NNsight(net)
    with model.trace(x, **how) as tracer:
        weight = model[0].weight.save()
        kept = vector.save()
        both = [vector, vector + 1.0, model[1].bias].save()
        hidden = model[1].output.save()
        if stops:
            tracer.stop()
    assert kept is vector and both[0] is vector
    values = {"weight": net[0].weight, "kept": vector, "both": [vector, vector + 1.0, net[1].bias], "hidden": net[1](net[0](x))}
    torch.testing.assert_close({"weight": weight, "kept": kept, "both": both, "hidden": hidden}, values)
    for compile in (False, {"backend": "eager"}):
        bound = tracer.program.bind(NNsight(net, compile=compile), inputs=["vector"])
        other = torch.randn(6)
        for _ in range(2):
            torch.testing.assert_close(bound(x), {**values, "vector": vector})  # `vector` is another name of the saved object
            changed = {"vector": other, "kept": other, "both": [other, other + 1.0, net[1].bias]}
            torch.testing.assert_close(bound(x, vector=other), {**values, **changed})


def test_shapes_are_saved_and_read_after_a_recorded_trace() -> None:
    model, shapes = NNsight(stack()), []
    with model.trace(torch.randn(3, 6), program=True):
        shape = nnsight.save(model[1].output.shape)
        shapes.append(model[2].output.shape)
    assert shape == (3, 6) and shapes[0] == (3, 6) and shapes[0].numel() == 18


@pytest.mark.parametrize("how", [{"program": True}, {"remote": "local"}])
def test_a_saved_result_with_fields_keeps_them(how: Any) -> None:
    net, x = stack(), torch.randn(3, 6)
    model = NNsight(net)
    with model.trace(x, **how):
        most = model[1].output.max(-1).save()
    torch.testing.assert_close(most.values, net[1](net[0](x)).max(-1).values)


def test_an_edit_of_a_result_does_not_change_the_program() -> None:
    net, x, vector = stack(), torch.randn(3, 6), torch.arange(6.0)
    model = NNsight(net)
    with model.trace(x, remote="program") as tracer:
        kept, part, out = vector.save(), vector.view(2, 3)[:1].save(), (model[3].output + vector).save()
    for compile in (False, {"backend": "eager"}):
        bound = tracer.program.bind(NNsight(net, compile=compile))
        for _ in range(3):
            found = bound(x)
            torch.testing.assert_close(found["kept"], torch.arange(6.0))
            torch.testing.assert_close(found["part"], torch.arange(3.0)[None])
            for value in found.values():
                value.detach().add_(100.0)


def test_an_object_in_a_saved_list_is_refused_by_bind() -> None:
    model = NNsight(stack())
    with model.trace(torch.randn(3, 6), program=True) as tracer:
        both = nnsight.save([model[1].output, object()])
    assert len(both) == 2
    with pytest.raises(NotExpressibleError, match="`both` contains a object, which a program cannot contain"):
        tracer.program.bind(model)


# -- several blocks ----------------------------------------------------------------------------------------------------


def _agree(model: NNsight, x: torch.Tensor, block: Any, how: dict[str, Any]) -> None:
    """Compare what ``block(model)`` saves with a trace that records no program."""
    found = []
    for options in ({}, how):
        with model.trace(x.clone(), **options):
            saved = nnsight.save(block(model))
        found.append([*saved])
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("how", PROGRAMS, ids=str)
@pytest.mark.parametrize("where", ["input", "output"])
def test_a_block_sees_what_the_edits_of_the_model_left(how: dict[str, Any], where: str) -> None:
    model, x = NNsight(stack()), torch.randn(3, 6)
    with model.edit() as edited:
        setattr(edited[1], where, getattr(edited[1], where) * 3.0)

    def block(model: Any) -> Any:
        seen = getattr(model[1], where).clone()
        getattr(model[1], where)[:, :2] *= 0.5
        return [seen, model.output]

    _agree(edited, x, block, how)


@pytest.mark.parametrize("how", PROGRAMS, ids=str)
def test_calls_are_recorded_while_another_block_waits_with_a_replacement(how: dict[str, Any]) -> None:
    model, x = NNsight(stack()), torch.randn(3, 6)
    with model.edit() as edited:
        edited[2].output = edited[0].output * 2.0

    def block(model: Any) -> Any:
        hidden = model[0].output
        hidden[:, :2].mul_(0.5)
        model[3].output = hidden * 3.0
        return [hidden, model.output]

    _agree(edited, x, block, how)
    found = []
    for options in ({}, how):
        with model.trace(**options) as tracer:
            with tracer.invoke(x):
                model[2].output = model[0].output * 2.0
            with tracer.invoke():
                hidden = model[0].output
                hidden[:, :2].mul_(0.5)
                found.append([hidden.clone(), model[1].output, model.output].save())
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("how", PROGRAMS, ids=str)
def test_blocks_that_read_the_same_tensor_at_two_locations(how: dict[str, Any]) -> None:
    """The read of the other block comes later in a run than the use of the own one."""
    model, x, factor = NNsight(nn.Sequential(nn.Identity(), nn.Identity(), nn.Linear(6, 6))), torch.randn(3, 6), torch.tensor(2.0)
    with model.edit() as edited:
        edited[0].input = edited[0].input + factor
        edited[1].output = edited[1].input.flip(1) * factor

    def block(model: Any) -> Any:
        hidden = model[0].input
        model[2].input  # noqa: B018 - the program does not need it
        return [hidden.flip(0) * factor, model[2].weight + factor, model.output]

    _agree(edited, x, block, how)


@pytest.mark.parametrize("edits", [False, True])
@pytest.mark.parametrize("how", PROGRAMS, ids=str)
def test_a_value_is_used_after_the_model_has_edited_it(how: dict[str, Any], edits: bool) -> None:
    """Also if the program does not need the location at which the block waits meanwhile."""
    model, x = NNsight(nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 6))), torch.randn(3, 6)

    def block(model: Any) -> Any:
        hidden = model[0].output
        early = hidden * 1.0
        if edits:
            hidden[:, :1].mul_(0.5)
        model[2].output  # noqa: B018
        return [early, hidden * 1.0]

    with torch.no_grad():
        _agree(model, x, block, how)


@pytest.mark.parametrize("how", PROGRAMS, ids=str)
def test_a_block_uses_a_value_after_another_has_edited_it(how: dict[str, Any]) -> None:
    model, x = NNsight(nn.Sequential(nn.Linear(6, 6), nn.Identity(), nn.Linear(6, 6))), torch.randn(3, 6)
    with model.edit() as edited:
        hidden = edited[0].output
        edited[2].output  # noqa: B018
        edited[2].output = hidden * 1.5

    def block(model: Any) -> Any:
        model[1].output[:, :2].mul_(0.5)
        return [model.output]

    _agree(edited, x, block, how)


def test_calls_that_may_fail_inside_a_try_are_made_on_values() -> None:
    model, x, table = NNsight(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))), torch.randn(2, 4), torch.randn(4, 3)

    def block(**how: Any) -> Any:
        with model.trace(x, **how):
            hidden = model[0].output
            for more in (0, 100):
                try:
                    hidden[:, 0] += table[:2, hidden[0].argmax() % 3 + more]
                except IndexError:
                    hidden[:] *= 2
            out = model.output.save()
        return out

    expected = block()
    torch.testing.assert_close(block(remote="local"), expected.detach())
    torch.testing.assert_close(block(compile=True), expected)
    with pytest.raises(NotExpressibleError, match=r"`__getitem__` may fail because of values, inside a `try`"):
        block(program=True)
