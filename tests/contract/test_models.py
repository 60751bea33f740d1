"""Some transformers architectures: plain torch hooks, the eager driver and the compiled path agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from nnsight import NNsight

from ..conftest import Case, Hooks, assert_no_instrumentation, output_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*:DeprecationWarning:transformers"),
]


def first(value: Any) -> torch.Tensor:
    return value[0] if isinstance(value, tuple) else value


def is_one_graph(tracer: Any) -> bool:
    return tracer.report.mode == "compiled" and tracer.report.graphs == 1 and not tracer.report.breaks


def test_unedited_model_is_bit_identical(case: Case) -> None:
    inputs = case.inputs()
    expected = case.module(**inputs).logits
    assert torch.equal(case.model(**inputs).logits, expected)
    assert torch.equal(case.model._module(**inputs).logits, expected)
    assert_no_instrumentation(case.module)


def test_reading_outputs(case: Case) -> None:
    inputs = case.inputs()
    path, keyword = case.by_keyword
    reference = Hooks(case.module)
    for index in range(3):
        reference.output(case.layer(index), reference.keep(f"layer{index}", first))
        reference.output(f"{case.layer(index)}.{case.mlp}", reference.keep(f"mlp{index}", first))
    reference.input(case.layer(1), reference.keep("input", lambda a, k: a[0]))
    if keyword:
        reference.input(f"{case.layer(1)}.{path}", reference.keep("keyword", lambda a, k: k[keyword]))
    expected = reference(**inputs)
    layers = case.model.get(case.layers)
    for compile in (False, True):
        with case.model.trace(**inputs, compile=compile) as tracer:
            seen = {}.save()
            for index in range(3):
                if index == 1:
                    seen["input"] = layers[1].input
                    if keyword:
                        seen["keyword"] = layers[1].get(path).inputs[1][keyword]
                seen[f"mlp{index}"] = first(output_of(layers[index].get(case.mlp)))
                seen[f"layer{index}"] = first(output_of(layers[index]))
            out = case.model.output.save()
        assert seen.keys() == reference.seen.keys()
        for name, value in seen.items():
            assert torch.equal(value, reference.seen[name]), (compile, name)
        assert type(out) is type(expected)
        assert list(out.keys()) == list(expected.keys())
        assert torch.equal(out.logits, expected.logits)
    assert is_one_graph(tracer)


NOISE = torch.randn(6, 32, generator=torch.Generator().manual_seed(7))

Change = Callable[[Any], Any]


def add_to_last(value: Any) -> None:
    first(value)[:, -1] += 2.0 * NOISE[0]


def scale(value: Any) -> Any:
    new = first(value) * NOISE[:, :1]
    return (new, *value[1:]) if isinstance(value, tuple) else new


def zero_first(value: Any) -> Any:
    return torch.zeros_like(value[0]), *value[1:]


def raise_one_logit(value: Any) -> None:
    value.logits[..., 5] = 40.0


#: Where the edit is, and the change; what it returns is assigned.
EDITS: dict[str, tuple[Callable[[Case], str], Change]] = {
    "in place": (lambda case: case.layer(1), add_to_last),
    "an output": (lambda case: f"{case.layer(1)}.{case.mlp}", scale),
    "an element of a tuple": (lambda case: f"{case.layer(2)}.{case.attention}", zero_first),
    "an attribute of the result": (lambda _: "", raise_one_logit),
}


@pytest.mark.parametrize("edit", EDITS)
def test_editing_outputs(case: Case, edit: str) -> None:
    at, change = EDITS[edit]
    path, inputs = at(case), case.inputs()
    expected = Hooks(case.module).output(path, change)(**inputs).logits
    assert not torch.allclose(expected, case.module(**inputs).logits)
    module = case.model.get(path) if path else case.model
    for compile in (False, True):
        with case.model.trace(**inputs, compile=compile) as tracer:
            new = change(output_of(module))
            if new is not None:
                module.output = new
            logits = case.model.output.logits.save()
        assert torch.equal(logits, expected), compile
    assert is_one_graph(tracer)


def test_replacing_arguments(case: Case) -> None:
    """The first one of a layer, and one by keyword."""
    path, keyword = case.by_keyword
    if not keyword or case.name == "gpt2":  # GPT-2 passes no tensor by keyword that its attention uses
        path, keyword = "", "input_ids"
    else:
        path = f"{case.layer(1)}.{path}"

    def changed(value: torch.Tensor) -> torch.Tensor:
        return value.flip(1) if keyword == "input_ids" else value * 1.5

    inputs = case.inputs()
    by_keyword = Hooks(case.module).input(path, lambda a, k: (a, {**k, keyword: changed(k[keyword])}))
    by_position = Hooks(case.module).input(case.layer(1), lambda a, k: ((a[0] + NOISE, *a[1:]), k))
    plain = case.module(**inputs).logits
    module, layer = case.model.get(path) if path else case.model, case.model.get(case.layer(1))
    for compile in (False, True):
        with case.model.trace(**inputs, compile=compile) as tracer:
            args, kwargs = module.inputs
            module.inputs = (args, {**kwargs, keyword: changed(kwargs[keyword])})
            logits = case.model.output.logits.save()
        assert torch.equal(logits, by_keyword(**inputs).logits), compile
        assert not torch.allclose(logits, plain)
        with case.model.trace(**inputs, compile=compile) as tracer:
            layer.input = layer.input + NOISE
            logits = case.model.output.logits.save()
        assert torch.equal(logits, by_position(**inputs).logits), compile
        assert not torch.allclose(logits, plain)
    assert is_one_graph(tracer)


@pytest.mark.slow
def test_a_model_lowered_by_the_default_backend_is_close(gpt2: Case) -> None:
    case, model = gpt2, NNsight(gpt2.module, compile=True)
    inputs, vector = case.inputs(), torch.randn(32)
    layer, mlp = model.get(case.layer(1)), model.get(f"{case.layer(0)}.{case.mlp}")

    def edit(value: Any) -> None:
        first(value)[:, -1] += 2.0 * vector

    reference = Hooks(case.module)
    reference.output(f"{case.layer(0)}.{case.mlp}", reference.keep("mlp"))
    expected = reference.output(case.layer(1), edit)(**inputs).logits
    with model.trace(**inputs) as tracer:
        hidden = mlp.output.save()
        first(layer.output)[:, -1] += 2.0 * vector
        logits = model.output.logits.save()
    assert is_one_graph(tracer)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(hidden, reference.seen["mlp"], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(logits, case.module(**inputs).logits, atol=1e-3)
