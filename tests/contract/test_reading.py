"""Reading and saving: what a block sees, what is left of it, and in which order blocks run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import nnsight
from nnsight import LanguageModel

from ..conftest import both, same
from .guide import LAYERS, PARIS, WIDTH, encoded, hooked, ids, zero_hidden

# -- values -----------------------------------------------------------------------------------------------------------


@both
def test_what_a_block_has_is_tensors(model: Any, compile: bool) -> None:
    with model.trace(ids(), compile=compile) as tracer:
        hidden = model.layers[-1].output[0]
        assert isinstance(hidden, torch.Tensor)
        assert hidden.shape == (1, 5, WIDTH)
        like = torch.zeros(hidden.shape)
        total = torch.sum(hidden + like).save()
        hidden = hidden.save()
    assert tracer.report.mode == ("compiled" if compile else "eager")
    assert type(hidden) is torch.Tensor
    _, seen = hooked(model, ids())
    same(hidden, seen["layers.2"][0])
    same(total, seen["layers.2"][0].sum())


@both
def test_outputs_of_layers_attention_mlp_and_head(model: Any, compile: bool) -> None:
    with model.trace(ids(), compile=compile):
        attention = model.layers[0].attn.output[0].save()
        mlp = model.layers[0].mlp.output.save()
        middle = model.layers[1].output[0].save()
        logits = model.head.output.save()
    out, seen = hooked(model, ids())
    same((attention, mlp), (seen["layers.0.attn"][0], seen["layers.0.mlp"]))
    same((middle, logits), (seen["layers.1"][0], out))


@both
def test_the_first_input_and_all_inputs(model: Any, compile: bool) -> None:
    with model.trace(ids(), compile=compile):
        first = model.layers[1].input.save()
        args, kwargs = model.layers[1].mlp.inputs
        args, kwargs = nnsight.save(args), nnsight.save(kwargs)
    _, seen = hooked(model, ids())
    same(first, seen["layers.0"][0])
    same(args, (seen["layers.0"][0] + seen["layers.1.attn"][0],))
    assert kwargs == {}


@both
@pytest.mark.parametrize("limit", [100_000.0, -1.0], ids=["taken", "not taken"])
def test_python_decides_on_values(model: Any, compile: bool, limit: float) -> None:
    with model.trace(ids(), compile=compile):
        first = model.layers[0].output[0]
        if torch.all(first < limit):
            model.layers[-1].output[0][:] = 0
        last = model.layers[-1].output[0].save()
        out = model.output.save()
    assert bool(last.any()) == (limit < 0)
    expected, seen = hooked(model, ids(), **({} if limit < 0 else {"layers__2": zero_hidden}))
    same((last, out), (seen["layers.2"][0], expected))
    assert torch.equal(out, model._module(ids())) == (limit < 0)


@both
def test_print_shows_values(model: Any, compile: bool, capsys: pytest.CaptureFixture[str]) -> None:
    with model.trace(ids(), compile=compile):
        hidden = model.layers[0].output[0]
        print("shape:", hidden.shape)
        print("mean:", f"{hidden.mean():.4f}")
    expected = hooked(model, ids())[1]["layers.0"][0]
    assert capsys.readouterr().out == f"shape: {expected.shape}\nmean: {expected.mean():.4f}\n"


def test_a_scan_gives_sizes(model: Any, lm: LanguageModel) -> None:
    with model.scan(ids()):
        size = nnsight.save(model.layers[0].output[0].shape[-1])
        shape = nnsight.save(model.head.output.shape)
        lost = shape[-1]
    assert (size, tuple(shape)) == (WIDTH, (1, 5, 11))
    with pytest.raises(NameError):
        lost  # noqa: B018
    with lm.scan(PARIS):
        hidden = nnsight.save(lm.transformer.h[0].output.shape)
        logits = nnsight.save(lm.lm_head.output.shape)
    length = encoded(PARIS)["input_ids"].shape[1]
    assert tuple(hidden) == (1, length, 16) and tuple(logits) == (1, length, 1024)


# -- saving -----------------------------------------------------------------------------------------------------------


@both
def test_only_saved_names_come_back(model: Any, compile: bool) -> None:
    outer: dict[str, Any] = {}
    before = "untouched"
    with model.trace(ids(), compile=compile):
        lost = model.layers[0].output[0]
        kept = lost.save()
        same_object = nnsight.save(kept is lost and lost.save() is lost)
        outer["seen"] = model.layers[1].output[0]
        before = "changed inside"
        plain = 3
    assert same_object
    seen = hooked(model, ids())[1]
    same((kept, outer["seen"]), (seen["layers.0"][0], seen["layers.1"][0]))
    assert before == "untouched"
    with pytest.raises(NameError):
        plain  # noqa: B018


@both
def test_both_ways_to_save(model: Any, compile: bool) -> None:
    with model.trace(ids(), compile=compile):
        hidden = model.layers[0].output[0]
        by_function = nnsight.save(hidden)
        by_method = hidden.save()
        size = nnsight.save(hidden.shape[-1])
        sizes = nnsight.save({"batch": hidden.shape[0], "both": [hidden.shape[0], hidden.shape[1]]})
        assert by_function is hidden and by_method is hidden
    same(by_function, by_method)
    assert (size, sizes) == (WIDTH, {"batch": 1, "both": [1, 5]})


@both
def test_an_object_with_a_save_of_its_own(model: Any, compile: bool) -> None:
    class Report:
        def __init__(self) -> None:
            self.calls = 0

        def save(self) -> str:
            self.calls += 1
            return "saved to disk"

    with model.trace(ids(), compile=compile):
        report = nnsight.save(Report())
        answer = nnsight.save(report.save())
        model.output.save()
    assert (answer, report.calls) == ("saved to disk", 1)


@both
def test_a_list_is_saved_and_then_filled(model: Any, compile: bool) -> None:
    with model.trace(ids(), compile=compile):
        hidden = list().save()  # noqa: C408 - as it is written in the documents
        for layer in model.layers:
            hidden.append(layer.output[0])
    _, seen = hooked(model, ids())
    same(hidden, [seen[f"layers.{index}"][0] for index in range(LAYERS)])


def test_without_mounting_there_is_the_function(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nnsight.CONFIG.APP, "PYMOUNT", False)
    with model.trace(ids(), compile=False):
        kept = nnsight.save([model.layers[0].output[0]])
    same(kept, [hooked(model, ids())[1]["layers.0"][0]])


# -- blocks side by side ----------------------------------------------------------------------------------------------


@both
def test_one_input_is_one_invoke(model: Any, compile: bool) -> None:
    with model.trace(ids(), compile=compile):
        short = model.output.save()
    with model.trace(compile=compile) as tracer:
        with tracer.invoke(ids()):
            long = model.output.save()
    same((short, long), (model._module(ids()),) * 2)


@both
def test_invokes_share_a_scope_and_helpers_have_their_own(model: Any, compile: bool) -> None:
    def helper() -> int:
        shared = 100
        return shared

    with model.trace(compile=compile) as tracer:
        with tracer.invoke(ids(1)):
            shared = 1
            model.embed.output  # noqa: B018
        with tracer.invoke(ids(2)):
            model.layers[0].output  # noqa: B018
            seen = nnsight.save([shared, helper(), shared])
    assert seen == [1, 100, 1]


@both
@pytest.mark.parametrize("how", [{}, {"program": True}], ids=["trace", "program"])
def test_a_helper_has_the_variables_of_its_inner_blocks(model: Any, compile: bool, how: dict[str, bool]) -> None:
    """The blocks of a backward pass and of a step are parts of the trace, so no value in them has to be saved."""

    def gradient() -> torch.Tensor:
        hidden = model.layers[0].output[0]
        with model.output.sum().backward():
            found = hidden.grad * 2
        return found + 1

    def first(tracer: Any) -> torch.Tensor:
        with tracer.iter[0]:
            found = model.embed.output + 1
        return found

    with model.trace(ids(1), compile=compile, **how) as tracer:
        embedded = first(tracer).save()
        helped = gradient().save()
    with model.trace(ids(1), compile=compile):
        expected = nnsight.save([model.embed.output + 1])
        hidden = model.layers[0].output[0]
        with model.output.sum().backward():
            expected.append(hidden.grad * 2 + 1)
    torch.testing.assert_close([embedded, helped], expected)
