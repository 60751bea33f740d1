"""Programs bound to a model: named inputs, gradients, other sizes, and no Python of the program on a compiled model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from nnsight import NNsight, Program, fx
from nnsight.remote import ExecutionFailedError, InvalidProgramError

from ..conftest import Hooks

ALPHA = 4.0


def stack() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)])


def recorded(model: NNsight, x: torch.Tensor, direction: torch.Tensor) -> Program:
    alpha, scale = ALPHA, 0.5
    with model.trace(x, remote="program") as tracer:
        model[1].output[:, 0] *= scale
        model[1].output[:] += alpha * direction
        hidden = model[2].output.save()
        out = model[3].output.save()
    return tracer.program


def expected(net: nn.Module, x: torch.Tensor, direction: torch.Tensor, alpha: Any = ALPHA) -> dict[str, torch.Tensor]:
    def edit(value: torch.Tensor) -> torch.Tensor:
        value = value.clone()
        value[:, 0] *= 0.5
        return value + alpha * direction

    hooks = Hooks(net).output("1", edit)
    out = hooks.output("2", hooks.keep("hidden"))(x)
    return {"hidden": hooks.seen["hidden"], "out": out}


@pytest.fixture(params=["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def compile(request: pytest.FixtureRequest) -> Any:
    return False if request.param == "eager" else {"backend": request.param}


@pytest.mark.parametrize("grad", [True, False])
def test_values_of_inputs_are_those_of_each_call(compile: Any, grad: bool) -> None:
    net, x, direction = stack(), torch.randn(3, 6), torch.randn(6)
    model = NNsight(net, compile=compile)
    program = recorded(model, x, direction)
    assert sorted(program.inputs) == ["alpha", "direction", "scale"]
    bound = program.bind(model, inputs=["alpha", "direction"])
    with torch.set_grad_enabled(grad):
        torch.testing.assert_close(bound(x), expected(net, x, direction))
        for rows in (3, 5, 7, 5):
            y, other = torch.randn(rows, 6), torch.randn(6)
            found = bound(y, alpha=float(rows), direction=other)
            torch.testing.assert_close(found, expected(net, y, other, rows), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(bound(x), expected(net, x, direction), rtol=1e-5, atol=1e-5)


def test_a_call_on_a_compiled_model_runs_the_lowered_graph_alone() -> None:
    net, x, direction = stack(), torch.randn(3, 6), torch.randn(6)
    model = NNsight(net, compile={"backend": "aot_eager"})
    bound = recorded(model, x, direction).bind(model, inputs=["alpha"])
    bound(x)
    fx.counters.reset()
    for alpha in (1.0, 2.0, 3.0):
        torch.testing.assert_close(bound(x, alpha=alpha), expected(net, x, direction, alpha))
        assert bound.report.replayed and bound.report.spliced
    assert (fx.counters.captures, fx.counters.recordings, fx.counters.compiles) == (0, 0, 0)


def test_tensors_are_copied_to_the_device_of_the_model_when_they_change() -> None:
    net, x, direction = stack(), torch.randn(3, 6), torch.randn(6)
    model = NNsight(net)
    program = recorded(model, x, direction)
    net.to("meta")
    own = program.bind(model, inputs=["alpha"]).inputs
    first = own.placed(anew=True)
    assert {value.device.type for value in first.values()} == {"meta"} and own.placed() is first
    own.values["direction"].add_(1.0)
    assert own.placed()["direction"] is not first["direction"] and own.placed() is own.placed()
    assert own.checked("alpha", 2.0).item() == 2.0
    own.put("direction", torch.randn(6))  # a tensor of the user, who may edit it through `.data`
    assert own.placed()["direction"] is not own.placed()["direction"]


def test_calls_on_inputs_are_part_of_the_graph() -> None:
    net, x, direction = stack(), torch.randn(3, 6), torch.randn(6)
    model = NNsight(net, compile={"backend": "aot_eager"})
    bound = recorded(model, x, direction).bind(model, inputs=["alpha"])
    bound(x)
    bound(x)
    assert "mul" in bound.report.code.partition("add_")[0]


def test_gradients_flow_to_the_given_values(compile: Any) -> None:
    net, x, direction = stack(), torch.randn(3, 6), torch.randn(6)
    model = NNsight(net, compile=compile)
    bound = recorded(model, x, direction).bind(model, inputs=["direction"])
    ours, theirs = direction.clone().requires_grad_(), direction.clone().requires_grad_()
    for _ in range(2):
        bound(x, direction=ours)["out"].square().sum().backward()
        expected(net, x, theirs)["out"].square().sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_an_input_that_is_edited_in_place_by_its_owner_is_read_anew(compile: Any) -> None:
    net, x, direction = stack(), torch.randn(3, 6), torch.randn(6)
    model = NNsight(net, compile=compile)
    bound = recorded(model, x, direction).bind(model, inputs=["direction"])
    given = direction.clone()
    for _ in range(3):
        torch.testing.assert_close(bound(x, direction=given), expected(net, x, given), rtol=1e-5, atol=1e-5)
        given += 1.0


def test_the_input_of_the_model_as_an_input_of_the_program(compile: Any) -> None:
    net, x = stack(), torch.randn(6, 6)
    model = NNsight(net, compile=compile)
    with model.trace(x, remote="program") as tracer:
        model[0].input[:] += 1.0
        model[1].output += x
        out = model[3].output.save()
    bound = tracer.program.bind(model, inputs=["x"])

    def by_hand(given: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        given = given.clone()
        given += 1.0
        hidden = net[1](net[0](given))
        return net[3](net[2](hidden + other))

    other = torch.randn(6, 6)
    for _ in range(3):
        torch.testing.assert_close(bound(x.clone(), x=other)["out"], by_hand(x, other))


def test_a_language_model_takes_prompts(model: Any) -> None:
    direction, alpha = torch.randn(model.config.n_embd), 2.0
    with model.trace("The Eiffel Tower is in", remote="program") as tracer:
        model.transformer.h[1].output[:, -1] += alpha * direction
        logits = model.lm_head.output[:, -1].save()
    bound = tracer.program.bind(model, inputs=["alpha"])
    for prompt, strength in (("Hello there, my dear", 1.0), (["one", "two and three"], 3.0)):
        with model.trace(prompt):
            model.transformer.h[1].output[:, -1] += strength * direction
            logits = model.lm_head.output[:, -1].save()
        torch.testing.assert_close(bound(prompt, alpha=strength)["logits"], logits)


@pytest.mark.parametrize("compiled", [False, True])
def test_what_a_program_does_beside_the_graph_is_done_in_each_call(compiled: bool, capsys: pytest.CaptureFixture[str]) -> None:
    net, x = stack(), torch.randn(3, 6)
    model = NNsight(net, compile={"backend": "aot_eager"} if compiled else False)
    with model.trace(x, remote="program") as tracer:
        print(model[0].output.isnan().any())
        hidden = model[1].output.save()
        tracer.stop()
    bound = tracer.program.bind(model)
    capsys.readouterr()
    for _ in range(3):
        torch.testing.assert_close(bound(x)["hidden"], net[1](net[0](x)))
    assert capsys.readouterr().out == "tensor(False)\n" * 3


# -- in a function under torch.compile --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compiled", [False, True])
def test_inside_a_function_under_torch_compile_it_is_part_of_the_graph(compiled: bool) -> None:
    net, x, direction = stack(), torch.randn(3, 6), torch.randn(6)
    model = NNsight(net, compile={"backend": "aot_eager"} if compiled else False)
    bound = recorded(model, x, direction).bind(model, inputs=["alpha", "direction"])
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(backend=counter, fullgraph=True)
    def around(x: torch.Tensor, alpha: torch.Tensor, direction: torch.Tensor) -> torch.Tensor:
        saved = bound(2 * x, alpha=alpha, direction=direction)
        return saved["out"] + saved["hidden"]

    counts = []
    for alpha in (1.0, 2.0, -3.0):
        other = torch.randn(6, requires_grad=True)
        found = around(x, torch.tensor(alpha, dtype=torch.float64), other)
        wanted = expected(net, 2 * x, other, alpha)
        torch.testing.assert_close(found, wanted["out"] + wanted["hidden"])
        (grad,) = torch.autograd.grad(found.sum(), other, retain_graph=True)
        torch.testing.assert_close(grad, torch.autograd.grad((wanted["out"] + wanted["hidden"]).sum(), other)[0])
        counts.append(counter.frame_count)
    assert counts[0] == counts[-1]
    torch.testing.assert_close(bound(x, alpha=2.0)["out"], expected(net, x, direction, 2.0)["out"])


def test_inside_such_a_function_it_uses_the_model_of_now() -> None:
    net, x, direction = stack(), torch.randn(3, 6), torch.randn(6)
    net[1].register_module("inner", nn.Dropout(0.5))
    net[1].forward = lambda x: net[1].inner(nn.functional.linear(x, net[1].weight)) * getattr(net[1], "scale", 1.0)
    model = NNsight(net.eval())
    bound = recorded(model, x, direction).bind(model)
    around = torch.compile(lambda x: bound(x)["out"], backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(around(x), bound(x)["out"])
    net[1].weight = nn.Parameter(torch.randn(6, 6))
    net[2].bias = nn.Parameter(torch.randn(6))
    torch.testing.assert_close(around(x), bound(x)["out"])
    net.train()
    for _ in range(2):
        torch.manual_seed(0)
        found = around(x)
        torch.manual_seed(0)
        torch.testing.assert_close(found, bound(x)["out"])
    net.eval()
    torch.testing.assert_close(around(x), bound(x)["out"])
    net[3] = nn.Linear(6, 6)
    with pytest.raises(Exception, match="The module at `3` was replaced after the program was bound"):
        around(x)


class Sometimes(nn.Module):
    """Calls its second layer only if it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.both = nn.Linear(6, 6), nn.Linear(6, 6), True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.second(x) if self.both else x


def test_a_location_that_such_a_function_does_not_reach_is_an_error() -> None:
    net, x = Sometimes(), torch.randn(3, 6)
    model = NNsight(net)
    with model.trace(x, program=True) as tracer:
        model.second.output *= 2.0
        out = model.output.save()
    bound = tracer.program.bind(model)
    around = torch.compile(lambda x: bound(x)["out"], backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(around(x), out)
    net.both = False
    with pytest.raises(Exception, match=r"`model.second.output`, line \d+ of the block, was not reached"):
        around(x)
    with pytest.raises(ExecutionFailedError, match="`model.second.output.i0` was not reached"):
        bound(x)


@pytest.mark.slow
def test_a_model_of_transformers_in_such_a_function() -> None:
    config = transformers.GPT2Config(n_layer=3, n_embd=16, n_head=2, vocab_size=40)
    net = transformers.GPT2LMHeadModel(config).eval()
    model, vector = NNsight(net), torch.randn(16)
    with model.trace(torch.randint(0, 40, (1, 5)), program=True) as tracer:
        first = model.transformer.h[0].output
        model.transformer.h[1].output[:, -1] += 3.0 * vector
        model.transformer.h[2].mlp.output.mul_(0.5)
        kept = [first, {"last": model.transformer.h[2].output}].save()
        logits = model.lm_head.output.save()
    bound = tracer.program.bind(model, inputs=["vector"])
    around = torch.compile(lambda ids, vector: bound(ids, vector=vector), fullgraph=True, dynamic=True, backend="aot_eager")
    for batch, length in ((1, 5), (2, 7), (3, 4)):
        ids, other = torch.randint(0, 40, (batch, length)), torch.randn(16)
        found, wanted = around(ids, other), bound(ids, vector=other)
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("compiled", [False, True])
def test_what_cannot_be_in_the_graph_runs_as_python_in_such_a_function(compiled: bool) -> None:
    net, x = stack(), torch.randn(3, 6)
    model = NNsight(net, compile={"backend": "aot_eager"} if compiled else False)
    with model.trace(x, program=True) as tracer:
        out = model[3].output.save()
        print(out.sum() > 0)
    bound = tracer.program.bind(model)
    wanted = bound(x)["out"]
    torch.testing.assert_close(torch.compile(lambda x: bound(x)["out"] + 1, backend="aot_eager")(x), wanted + 1)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="a program that is bound to a model"):
        torch.compile(lambda x: bound(x)["out"], backend="aot_eager", fullgraph=True)(x)


# -- what is an input ------------------------------------------------------------------------------------------------------------


def test_a_float_that_python_computes_with_is_no_input() -> None:
    net, x, alpha = stack(), torch.randn(3, 6), 0.25
    model = NNsight(net)
    with model.trace(x, remote="program") as tracer:
        hidden = model[1].output
        model[1].output = alpha * hidden + (1 - alpha) * hidden.mean()
        out = model[3].output.save()
    assert not tracer.program.inputs
    with pytest.raises(InvalidProgramError, match=r"`alpha` is not an input of this program: Python computes with the float.* in line \d+"):
        tracer.program.bind(model, inputs=["alpha"])
    assert tracer.program.run(model, x).keys() == {"out"}


def test_a_tensor_whose_value_python_uses_is_no_input() -> None:
    net, x, direction = stack(), torch.randn(3, 6), torch.randn(6)
    model = NNsight(net)
    with model.trace(x, remote="program") as tracer:
        unit = direction / direction.norm()
        strength = unit.abs().max().item()
        model[1].output[:] += strength * unit
        out = model[3].output.save()
    with pytest.raises(InvalidProgramError, match=r"`direction` is not an input of this program: Python uses its value in line \d+"):
        tracer.program.bind(model, inputs=["direction"])
    unit = direction / direction.norm()
    found = tracer.program.run(model, x)["out"]
    torch.testing.assert_close(found, Hooks(net).output("1", lambda value: value + unit.abs().max() * unit)(x))


def test_what_is_computed_from_an_input_alone_follows_it(compile: Any) -> None:
    net, x, direction = stack(), torch.randn(3, 6), torch.randn(6)
    model = NNsight(net, compile=compile)
    with model.trace(x, remote="program") as tracer:
        unit = direction / direction.norm()
        model[1].output[:] += unit
        out = model[3].output.save()
    bound, other = tracer.program.bind(model, inputs=["direction"]), torch.randn(6)
    for given in (direction, other, 3 * other):
        reference = Hooks(net).output("1", lambda value, given=given: value + given / given.norm())(x)
        torch.testing.assert_close(bound(x, direction=given)["out"], reference)


def test_inputs_survive_a_file(tmp_path: Any) -> None:
    net, x, direction = stack(), torch.randn(3, 6), torch.randn(6)
    model = NNsight(net)
    recorded(model, x, direction).save(tmp_path / "program.safetensors")
    loaded = Program.load(tmp_path / "program.safetensors")
    bound = loaded.bind(model, inputs=["alpha", "direction"])
    torch.testing.assert_close(bound(x, alpha=1.0), expected(net, x, direction, 1.0))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"direction": torch.zeros(6, dtype=torch.float64)}, "torch.float32 with 1 dimensions, and is given torch.float64"),
        ({"direction": torch.zeros(1, 6)}, "with 1 dimensions, and is given torch.float32 with 2"),
        ({"direction": 2.0}, "is given float"),
        ({"alpha": "a lot"}, "float or tensor of torch.float64 with 0 dimensions, and is given str"),
        ({"alpha": torch.tensor(2.0)}, r"given torch.float32 with 0 dimensions. Pass `value.to\(torch.float64\)`"),
        ({"scale": 2.0}, r"`scale` is an input of the program that `bind` was not given: `program.bind\(model, inputs=\['scale'\]\)`"),
    ],
)
def test_a_value_that_does_not_fit_is_refused(given: dict[str, Any], message: str) -> None:
    net, x, direction = stack(), torch.randn(3, 6), torch.randn(6)
    model = NNsight(net)
    bound = recorded(model, x, direction).bind(model, inputs=["alpha", "direction"])
    with pytest.raises(TypeError, match=message):
        bound(x, **given)


def test_a_program_is_bound_to_a_wrapped_model_and_names() -> None:
    net, x, direction = stack(), torch.randn(3, 6), torch.randn(6)
    program = recorded(NNsight(net), x, direction)
    with pytest.raises(TypeError, match="bound to a wrapped model.*not to a Sequential"):
        program.bind(net)
    torch.testing.assert_close(program.bind(NNsight(net), "alpha")(x, alpha=1.0), expected(net, x, direction, 1.0))


def test_a_float_in_an_invoke_is_an_input() -> None:
    net, x, alpha = stack(), torch.randn(3, 6), 0.25
    model = NNsight(net)
    with model.trace(program=True) as tracer:
        with tracer.invoke(x):
            model[1].output *= alpha
        with tracer.invoke():
            out = model[3].output.save()
    found = tracer.program.bind(model, ["alpha"])(x, alpha=3.0)["out"]
    torch.testing.assert_close(found, Hooks(net).output("1", lambda value: 3.0 * value)(x))


def test_a_listing_shows_what_autograd_does_not_follow() -> None:
    model, x = NNsight(stack()), torch.randn(3, 6)
    with model.trace(x, remote="program") as tracer:
        with torch.no_grad():
            model[1].output = model[1].output * 2.0
        model[2].output = model[2].output * 3.0
    shown = str(tracer.program)
    assert "aten.mul.Tensor(%0, 2.0, no_grad)" in shown and "3.0)" in shown and shown.count("no_grad") == 1


def test_a_name_that_is_no_input() -> None:
    net, x, direction = stack(), torch.randn(3, 6), torch.randn(6)
    model = NNsight(net)
    with pytest.raises(InvalidProgramError, match="`beta` is not an input.*Its inputs are alpha, direction, scale"):
        recorded(model, x, direction).bind(model, inputs=["beta"])


# -- composition -----------------------------------------------------------------------------------------------------------------


def shift(model: NNsight, x: torch.Tensor, layer: int, by: torch.Tensor) -> Program:
    with model.trace(x, remote="program") as tracer:
        model[layer].output[:] += by
    return tracer.program


def test_programs_are_equal_by_what_they_do() -> None:
    model, x, by = NNsight(stack()), torch.randn(3, 6), torch.randn(6)
    with model.trace(x, remote="program") as tracer:
        other_name = by.clone()

        model[1].output[:] += other_name
    one, again, other = shift(model, x, 1, by), shift(model, torch.randn(5, 6), 1, by.clone()), shift(model, x, 2, by)
    assert one == again and hash(one) == hash(again)
    assert one != other and one != shift(model, x, 1, 2 * by)
    assert len(tracer.program.inputs) == 1


@pytest.mark.parametrize("compiled", [False, True])
def test_one_program_after_the_other(compiled: bool, tmp_path: Any) -> None:
    net, x, first, second = stack(), torch.randn(3, 6), torch.randn(6), torch.randn(6)
    model = NNsight(net, compile={"backend": "aot_eager"} if compiled else False)
    with model.trace(x, remote="program") as tracer:
        model[1].output *= 2.0
        out = model[3].output.save()
    both = shift(model, x, 2, second).then(shift(model, x, 1, first)).then(tracer.program)
    assert sorted(both.inputs) == ["by", "by_2"]
    expected = net[3](net[2](2.0 * (net[1](net[0](x)) + first)) + second)
    bound = both.bind(model, inputs=["by", "by_2"])
    for _ in range(3):
        torch.testing.assert_close(bound(x)["out"], expected)
    torch.testing.assert_close(bound(x, by=torch.zeros(6))["out"], net[3](net[2](2.0 * (net[1](net[0](x)) + first))))
    both.save(tmp_path / "both")
    for program in (both, Program.load(tmp_path / "both")):
        torch.testing.assert_close(model.apply(program)(x), expected)
    with pytest.raises(ValueError, match="Both programs save a value as `out`"):
        both.then(tracer.program)


def test_barriers_of_combined_programs_are_different_barriers() -> None:
    net, x = stack(), torch.randn(3, 6)
    model = NNsight(net)

    def through_a_barrier(factor: float) -> Program:
        with model.trace(remote="program") as tracer:
            barrier = tracer.barrier(2)
            with tracer.invoke(x):
                hidden = model[1].output
                barrier()
            with tracer.invoke():
                barrier()
                model[1].output = factor * hidden
        return tracer.program

    with model.trace(x, remote="program") as tracer:
        out = model[3].output.save()
    program = through_a_barrier(2.0).then(through_a_barrier(3.0)).then(tracer.program)
    torch.testing.assert_close(program.run(model, x)["out"], net[3](net[2](6.0 * net[1](net[0](x)))))
