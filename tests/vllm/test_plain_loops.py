"""Which loops over steps may go on as programs, and what they are recorded as; without an engine."""

from __future__ import annotations

import ast
import builtins
from dataclasses import replace
from typing import Any

import pytest
import torch

from nnsight import LanguageModel
from nnsight.tracing import Tracer
from nnsight.vllm.blocks.plain import NotPlainError, check_apart, loop_of
from nnsight.vllm.blocks.recording import StepProgram, recorded

from ..conftest import same


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    """Without weights; its values are flat here."""
    return LanguageModel("nnsight/demo")


class Captured(Tracer):
    """Keeps its block; ``iter`` is only text."""

    iter = ((),)

    def execute(self, function: Any) -> None:
        variables = {**vars(builtins), **self.module_globals, **dict(self.scope.items())}
        self.block, self.variables, self.names = self.info, variables, self.module_globals

    def loop(self) -> Any:
        return loop_of(self.block, self.variables.__getitem__)

    def recorded(self, values: dict[str, torch.Tensor], model: LanguageModel) -> StepProgram:
        return recorded(self.block, self.loop(), self.names, values, model._tree)


def site(number: int) -> str:
    return f"model.transformer.h.{number}.output"


def test_a_body_is_recorded_for_rows_of_many_requests(model: LanguageModel) -> None:
    """Each row is that of a request with parameters of its own, and is what the body makes of it alone."""
    direction, gain, found = torch.randn(128), 0.5, []
    with Captured() as tracer:
        for _ in tracer.iter[0]:
            hidden = model.transformer.h[1].output
            found.append(hidden.mean(0))
            model.transformer.h[1].output[-1] += gain * direction
            model.transformer.h[3].output = model.transformer.h[3].output - hidden
    program = tracer.recorded({site(number): torch.randn(1, 128) for number in (1, 3)}, model)
    assert list(program.parts) == [site(1), site(3)] and found == []
    assert (program.edited, program.replaced) == ({site(1): [0]}, {site(3): [0]})
    directions, gains, first, second = torch.randn(5, 128), torch.randn(5), torch.randn(5, 1, 128), torch.randn(5, 1, 128)
    given = {"direction": directions, "gain": gains}
    first, second = first[:, 0], second[:, 0]
    part = program.parts[site(1)]
    left, *kept = part(first.clone(), *(given[name].to(part.defaults[name].dtype) for name in part.parameters))
    same(left, first + gains[:, None] * directions)
    values = dict(zip(part.gives or (), kept, strict=True))
    (place,) = program.added["found"]
    same(values[place.name], first)
    part = program.parts[site(3)]
    same(part(second.clone(), *(values[name] for name in part.takes))[0], second - left)


def test_equal_parts_are_traced_once(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    from nnsight.vllm.steering import graph_programs

    vectors, traced, trace = [torch.randn(128) for _ in range(6)], [], graph_programs.traced_on
    monkeypatch.setattr(graph_programs, "traced_on", lambda *given: traced.append(None) or trace(*given))
    with Captured() as tracer:
        for _ in tracer.iter[0]:
            for layer, vector in zip(model.transformer.h, vectors, strict=True):
                layer.output += vector
    program = tracer.recorded({site(number): torch.zeros(1, 128) for number in range(6)}, model)
    assert len(traced) == 1
    for number, vector in enumerate(vectors):
        same(program.parts[site(number)](torch.zeros(3, 128))[0], vector.expand(3, 128))


class Counter:
    steps = 0

    def __call__(self, value: Any) -> Any:
        return value

    @property
    def total(self) -> float:
        self.steps += 1
        return 1.0


class Helper:
    def __init__(self) -> None:
        self.gain = torch.zeros(128)

    def grow(self, value: Any) -> Any:
        self.gain += 1
        return value * self.gain


def scaled(value: Any) -> Any:
    return (value * 2).save()


#: Bodies that may have effects beyond the values of the model, or that are not the same in each step.
HOSTILE = [
    "layer.output *= counter.total",
    "layer.output = counter(layer.output)",
    "layer.output += counter",
    "counter.steps = layer.output",
    "vector[0] = 1.0",
    "vector.mul_(2)",
    "vector.data.mul_(2)",
    "torch.nn.init.zeros_(vector)",
    "torch.add(vector, 1, out=vector)",
    "torch.relu_(vector)",
    "torch.nn.functional.relu(vector, True)",
    "torch.nn.functional.relu(vector, inplace=True)",
    "part = vector.view(2, 64)[0]; part += layer.output[0, :64]",
    "for part in vectors: part += 1",
    "[part.add_(1) for part in vectors]",
    "parts = [vector]; parts[0] += 1",
    "first, second = vectors; first += 1",
    "vectors[0] = layer.output",
    "vectors.sort()",
    "vectors.append(layer.output); vectors.pop()",
    "table['a'] = layer.output",
    "table.clear()",
    "layer.output = table.setdefault('b', layer.output)",
    "torch.manual_seed(0)",
    "torch.save(layer.output, 'file')",
    "torch.set_grad_enabled(False)",
    "torch.nn.functional.batch_norm(layer.output, vector, vector, training=True)",
    "layer.output += torch.randn(128)",
    "layer.output.normal_()",
    "layer.output.register_hook(print)",
    "layer.output.map_(vector, counter)",
    "open('file')",
    "exec('x = 1')",
    "layer.output += __import__('torch').ones(128)",
    "layer.output = (lambda value: value)(layer.output)",
    "print(layer.output)",
    "print(f'{layer.output}')",
    "scaled(layer.output)",
    "helper.__dict__['gain'] = layer.output",
    "helper.gain += layer.output",
    "layer.output = helper.grow(layer.output)",
    "layer.skip(layer.output)",
    "layer.steer(add=vector)",
    "model.transformer(layer.output)",
    "layer.output.numpy()",
    "layer.output = layer.output if layer.output.item() else vector",
    "del layer.output",
    "import torch",
    "while True: pass",
    "try: layer.output += 1\n        except ValueError: pass",
    "tracer.stop()",
    "layer.output += step",
    "assert layer.output is not None",
    "raise ValueError",
    "break",
    "layer.anything = layer.output",
    "model.transformer.h[0].mlp.c_proj.weight += 1",
    "vector.output = layer.output",
    "unknown(layer.output)",
    "layer.output += inferred",
]


@pytest.mark.parametrize("body", HOSTILE)
def test_hostile_bodies_stay_python(model: LanguageModel, body: str) -> None:
    """Nothing outside is changed to find that out, and no code of other objects is run."""
    with torch.inference_mode():
        inferred = torch.ones(128)
    vector, counter, helper = torch.zeros(128), Counter(), Helper()
    variables = {
        "model": model, "layer": model.transformer.h[1], "torch": torch, "vector": vector, "counter": counter, "inferred": inferred,
        "vectors": [torch.zeros(128), torch.zeros(128)], "table": {"a": vector}, "tracer": object(),
        "helper": helper, "scaled": scaled,
    }
    with Captured() as tracer:
        pass
    loop = f"for step in tracer.iter[:]:\n        {body}"
    tree = ast.parse(loop if "\n" in body else loop.replace("        ", "    "))
    block = replace(tracer.block, body=tuple(tree.body), shared=(), stored=frozenset())
    variables |= vars(builtins)
    with pytest.raises(NotPlainError):
        recorded(block, loop_of(block, variables.__getitem__), variables, {site(1): torch.randn(1, 128)}, model._tree)
    assert counter.steps == 0 and not vector.any() and not helper.gain.any()


def test_variables_of_several_requests(model: LanguageModel) -> None:
    """A block of another text may not see the variables of a loop; one of the same text has its own."""
    vector, common = torch.randn(128), []
    with Captured() as reads:
        for _ in reads.iter[0]:
            hidden = model.transformer.h[1].output
            common.append(hidden)
            model.transformer.h[2].output = hidden + vector
    with Captured() as sees:
        print(hidden)
    with Captured() as own:
        hidden = vector * 2
        print(hidden)
    with Captured() as assigns:
        vector = vector * 2
    loop, block = reads.loop(), reads.block
    for others in ([], [own.block]):
        check_apart(loop, ["vector"], block, others)
    for others, name in (([sees.block], "hidden"), ([assigns.block], "vector"), ([block], "common")):
        with pytest.raises(NotPlainError, match=f"`{name}`"):
            check_apart(loop, ["vector"], block, others)
