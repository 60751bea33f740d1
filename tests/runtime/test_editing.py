"""Edits: blocks that are kept and run in every later trace, compared with a forward pass edited by hand."""

from __future__ import annotations

import runpy
import textwrap
import threading
import traceback
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import nnsight
from nnsight import LanguageModel, NNsight
from nnsight.runtime import OutOfOrderError

from ..conftest import Hooks, Rows, both
from ..fx.test_compile_around import Net, X


@pytest.fixture
def model() -> NNsight:
    torch.manual_seed(0)
    wrapped = NNsight(Net())
    wrapped._make_driver({"backend": "eager"})
    return wrapped


def by_hand(model: NNsight, first: Any = lambda value: value, second: Any = lambda value: value) -> torch.Tensor:
    """Run the model by plain torch hooks that replace what the two layers return."""
    hooks = Hooks(model._module).output("first", lambda out: first(out.clone()))
    return hooks.output("second", lambda out: second(out.clone()))(X)


def output(model: NNsight, compile: bool) -> torch.Tensor:
    with model.trace(X, compile=compile) as tracer:
        found = model.output.save()
    assert tracer.report.mode == ("compiled" if compile else "eager")
    return found


def zero_column(value: torch.Tensor) -> torch.Tensor:
    value[:, 1] = 0
    return value


# -- what an edit does ------------------------------------------------------------------------------------------------


@both
def test_an_edit_runs_in_every_trace_of_the_copy(model: NNsight, compile: bool) -> None:
    plain = by_hand(model)
    with model.edit() as edited:
        model.first.output[:, 1] = 0
    expected = by_hand(model, zero_column)
    assert not torch.equal(expected, plain)
    for _ in range(3):
        assert torch.equal(output(edited, compile), expected)
        assert torch.equal(output(model, compile), plain)


@both
def test_inplace_edits_and_clearing(model: NNsight, compile: bool) -> None:
    plain = by_hand(model)
    with model.edit(inplace=True) as same:
        model.first.output[:, 1] = 0
    assert same is model
    assert torch.equal(output(model, compile), by_hand(model, zero_column))
    model.clear_edits()
    assert torch.equal(output(model, compile), plain)


def test_defining_an_edit_runs_nothing(model: NNsight) -> None:
    ran: list[int] = []
    model._module.register_forward_hook(lambda *_: ran.append(1))
    with model.edit() as edited:
        ran.append(2)
        model.first.output[:] = 0
    assert ran == []
    output(edited, False)
    assert ran == [2, 1]


@both
def test_edits_stack_in_the_order_of_definition(model: NNsight, compile: bool) -> None:
    with model.edit() as once:
        model.first.output = model.first.output * 2
    with once.edit() as twice:
        once.first.output = once.first.output + 1
    with twice.edit(inplace=True):
        twice.second.output[:, 0] = 7
    assert torch.equal(output(once, compile), by_hand(model, lambda v: v * 2))

    def seven(value: torch.Tensor) -> torch.Tensor:
        value[:, 0] = 7
        return value

    assert torch.equal(output(twice, compile), by_hand(model, lambda v: v * 2 + 1, seven))
    assert not torch.equal(by_hand(model, lambda v: v * 2 + 1), by_hand(model, lambda v: (v + 1) * 2))
    assert torch.equal(output(model, compile), by_hand(model))


@both
def test_clearing_a_copy_leaves_the_others(model: NNsight, compile: bool) -> None:
    with model.edit(inplace=True):
        model.first.output = model.first.output * 2
    with model.edit() as copied:
        model.first.output = model.first.output + 1
    copied.clear_edits()
    assert torch.equal(output(copied, compile), by_hand(model))
    assert torch.equal(output(model, compile), by_hand(model, lambda v: v * 2))
    with model.edit() as again:
        model.first.output = model.first.output + 1
    model.clear_edits()
    assert torch.equal(output(model, compile), by_hand(model))
    assert torch.equal(output(again, compile), by_hand(model, lambda v: v * 2 + 1))


@both
def test_the_block_of_a_trace_sees_and_edits_what_edits_left(model: NNsight, compile: bool) -> None:
    with model.edit() as edited:
        model.first.output = model.first.output * 2
    with edited.trace(X, compile=compile):
        seen = edited.first.output.clone().save()
        edited.first.output = seen + 1
        out = edited.output.save()
    assert torch.equal(seen, model._module.first(X) * 2)
    assert torch.equal(out, by_hand(model, lambda v: v * 2 + 1))


@both
def test_edits_act_on_all_rows_of_a_batch(compile: bool) -> None:
    torch.manual_seed(0)
    model = Rows(Net())
    model._make_driver({"backend": "eager"})
    with model.edit() as edited:
        model.first.output[:, 1] = 0
    with edited.trace(compile=compile) as tracer:
        with tracer.invoke(X[:1]):
            one = edited.output.save()
        with tracer.invoke(X[1:]):
            two = edited.output.save()
    assert torch.equal(torch.cat([one, two]), by_hand(model, zero_column))


@both
def test_a_stopped_trace_ends_edits_that_still_wait(model: NNsight, compile: bool) -> None:
    with model.edit() as edited:
        model.first.output = model.first.output * 2
        model.second.output = model.second.output * 0
    with edited.trace(X, compile=compile) as tracer:
        seen = edited.first.output.save()
        tracer.stop()
    assert torch.equal(seen, model._module.first(X) * 2)
    assert torch.equal(output(edited, compile), torch.zeros(2, 6))


def test_gradients_flow_through_edits(model: NNsight) -> None:
    gradients = []
    for backend in (None, "aot_eager"):
        vector = torch.full((6,), 0.5, requires_grad=True)
        if backend is not None:
            model._make_driver({"backend": backend})
        with model.edit() as edited:
            model.first.output = model.first.output + vector
        with edited.trace(X, compile=backend is not None):
            out = edited.output.save()
        out.pow(2).sum().backward()
        gradients.append(vector.grad)
    leaf = torch.full((6,), 0.5, requires_grad=True)
    (expected,) = torch.autograd.grad(by_hand(model, lambda value: value + leaf).pow(2).sum(), leaf)
    assert expected.abs().sum() > 0
    for found in gradients:
        torch.testing.assert_close(found, expected)


def test_a_compiled_model_is_captured_once_for_all_copies(model: NNsight) -> None:
    model.compile(backend="eager")
    output(model, True)
    copies = []
    for factor in (2.0, 3.0):
        with model.edit() as edited:
            model.first.output = model.first.output * factor
        copies.append((edited, factor))
    for edited, factor in copies:
        assert torch.equal(output(edited, True), by_hand(model, lambda v, factor=factor: v * factor))
    assert nnsight.fx.counters.captures == 1


# -- variables --------------------------------------------------------------------------------------------------------


@both
def test_variables_have_the_values_of_the_definition(model: NNsight, compile: bool) -> None:
    factor = 2.0
    with model.edit() as edited:
        model.first.output = model.first.output * factor
    factor = 100.0
    assert torch.equal(output(edited, compile), by_hand(model, lambda v: v * 2))
    del factor
    assert torch.equal(output(edited, compile), by_hand(model, lambda v: v * 2))


@both
def test_each_run_has_variables_of_its_own(model: NNsight, compile: bool) -> None:
    count = 1
    with model.edit() as edited:
        count += 1
        model.first.output = model.first.output * count
    for _ in range(3):
        assert torch.equal(output(edited, compile), by_hand(model, lambda v: v * 2))
    assert count == 1


def test_edits_go_with_their_copy(model: NNsight, no_gc: None) -> None:
    vector = torch.ones(6)
    with model.edit() as edited:
        model.first.output = model.first.output + vector
    output(edited, False)
    references = [weakref.ref(vector), weakref.ref(edited)]
    del vector, edited
    assert [reference() for reference in references] == [None, None]


@both
def test_a_copy_of_an_edited_copy_outlives_it(model: NNsight, compile: bool) -> None:
    """What ``as`` bound is then the copy that has the edit."""

    def twice() -> NNsight:
        with model.edit() as once:
            once.first.output = once.first.output * 2
        with once.edit() as both_edits:
            both_edits.first.output = both_edits.first.output + 1
        return both_edits

    assert torch.equal(output(twice(), compile), by_hand(model, lambda v: v * 2 + 1))


def test_edits_in_place_do_not_keep_their_model_alive(no_gc: None) -> None:
    """Also where the block reaches the model by its variable, and runs."""
    edited = NNsight(Net())
    with edited.edit(inplace=True) as same:
        edited.first.output = same.first.output * 2
    assert torch.equal(output(edited, False), by_hand(edited, lambda v: v * 2))
    reference = weakref.ref(edited)
    del edited, same
    assert reference() is None


def test_cleared_edits_let_their_variables_go(model: NNsight, no_gc: None) -> None:
    vector = torch.ones(6)
    with model.edit(inplace=True):
        model.first.output = model.first.output + vector
    output(model, False)
    reference = weakref.ref(vector)
    del vector
    assert reference() is not None
    model.clear_edits()
    assert reference() is None


# -- the copy ---------------------------------------------------------------------------------------------------------


class Encoder(Net):
    """A module with further methods, some of which call it, or parts of it."""

    def encode(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        with torch.no_grad():
            return self(x).mean(dim=1) * scale

    def begin(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x)

    def width(self) -> int:
        return self.second.out_features

    def width_of(self, other: Any, x: torch.Tensor) -> torch.Tensor:
        return other(x)


@both
def test_a_plain_call_of_a_method_runs_edits(compile: bool) -> None:
    torch.manual_seed(0)
    model = NNsight(Encoder(), compile={"backend": "eager"} if compile else False)
    plain = model.encode(X, scale=2.0)
    ran: list[int] = []
    with model.edit() as edited:
        ran.append(1)
        model.first.output[:, 1] = 0
    expected = by_hand(model, zero_column)
    torch.testing.assert_close(edited.encode(X, scale=2.0), expected.mean(dim=1) * 2.0, rtol=0.0, atol=0.0)
    torch.testing.assert_close(edited.forward(X), expected, rtol=0.0, atol=0.0)
    torch.testing.assert_close(edited.begin(X), zero_column(model._module.first(X)), rtol=0.0, atol=0.0)
    torch.testing.assert_close(model.encode(X, scale=2.0), plain, rtol=0.0, atol=0.0)
    assert ran == [1, 1, 1]
    with edited.encode(X) as tracer:
        result = tracer.result.save()
    torch.testing.assert_close(result, expected.mean(dim=1), rtol=0.0, atol=0.0)


@both
def test_a_method_that_calls_no_module_needs_no_edit(compile: bool) -> None:
    model = NNsight(Encoder(), compile={"backend": "eager"} if compile else False)
    other = torch.nn.Linear(6, 2)
    with model.edit() as edited:
        model.second.output[:] = 0
    assert edited.width() == 6
    torch.testing.assert_close(edited.width_of(other, X), other(X), rtol=0.0, atol=0.0)
    assert edited.eval() is edited
    assert len(list(edited.parameters())) == 4


@both
def test_an_edit_that_a_method_does_not_get_to_is_an_error(compile: bool) -> None:
    model = NNsight(Encoder(), compile={"backend": "eager"} if compile else False)
    with model.edit() as edited:
        model.second.output[:] = 0
    with pytest.raises(OutOfOrderError, match=r"model\.second\.output"):
        edited.begin(X)


def test_the_copy_shares_modules_and_envoys(model: NNsight) -> None:
    with model.edit() as edited:
        model.first.output[:] = 0
    assert edited is not model
    assert type(edited) is type(model)
    assert edited._module is model._module
    assert edited.first is model.first
    assert edited.first.weight is model.first.weight
    assert repr(edited) == repr(model)
    assert edited.path == "model"


@both
def test_an_edit_may_bind_the_tracer_and_the_copy(model: NNsight, compile: bool) -> None:
    with model.edit() as (tracer, edited):
        model.first.output[:, 1] = 0
    assert type(edited) is type(model)
    assert torch.equal(output(edited, compile), by_hand(model, zero_column))


# -- language models --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny() -> LanguageModel:
    """A transformer small enough to be captured for each width of its input."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=1, n_embd=8, n_head=2, vocab_size=50, n_positions=16, bos_token_id=0, eos_token_id=0
    )
    module = transformers.GPT2LMHeadModel(config).eval()
    return LanguageModel(module, compile={"backend": "eager", "dynamic": False})


IDS = torch.tensor([[3, 4, 5]])
GREEDY: dict[str, Any] = {"max_new_tokens": 2, "do_sample": False}


@both
def test_an_edit_acts_on_the_prompt_of_a_generation(tiny: LanguageModel, compile: bool) -> None:
    """A location of an edit is its first occurrence: the pass over the prompt."""
    vector = torch.linspace(-30, 30, 50)
    with tiny.edit() as edited:
        tiny.lm_head.output = tiny.lm_head.output + vector
    with edited.generate(IDS, **GREEDY, compile=compile) as tracer:
        ids = tracer.result.save()
    with tiny.generate(IDS, **GREEDY, compile=compile) as tracer:
        plain = tracer.result.save()

    calls: list[int] = []

    def on_prompt(_: Any, __: Any, out: Any) -> Any:
        calls.append(1)
        return out + vector if len(calls) == 1 else None

    handle = tiny._module.lm_head.register_forward_hook(on_prompt)
    try:
        expected = tiny._module.generate(IDS, attention_mask=torch.ones_like(IDS), pad_token_id=0, **GREEDY)
    finally:
        handle.remove()
    assert len(calls) == 2
    assert torch.equal(ids, expected)
    assert not torch.equal(ids, plain)


# -- misuse -----------------------------------------------------------------------------------------------------------


@both
def test_an_exception_in_an_edit_ends_at_its_line(model: NNsight, compile: bool, clean: Any) -> None:
    with model.edit() as edited:
        hidden = model.first.output
        hidden / (1 // 0)
    with pytest.raises(ZeroDivisionError) as raised:
        with edited.trace(X, compile=compile):
            early = edited.first.input.save()
            out = edited.output.save()
    last = traceback.extract_tb(raised.value.__traceback__)[-1]
    assert (last.filename, last.line) == (__file__, "hidden / (1 // 0)")
    text = "".join(traceback.format_exception(raised.value))
    assert "mediator" not in text
    assert "_SkipBody" not in text
    clean(model._module)
    assert torch.equal(early, X)
    edited.clear_edits()
    assert torch.equal(output(edited, compile), by_hand(model))


# -- threads ----------------------------------------------------------------------------------------------------------


@both
def test_two_threads_with_different_copies(model: NNsight, compile: bool, clean: Any) -> None:
    copies = {}
    for factor in (2.0, 3.0):
        with model.edit() as edited:
            model.first.output = model.first.output * factor
        copies[factor] = edited
        output(edited, compile)
    expected = {factor: by_hand(model, lambda v, factor=factor: v * factor) for factor in copies}
    wrong: list[Any] = []
    start = threading.Barrier(2)

    def work(factor: float) -> None:
        try:
            start.wait(10)
            found = [output(copies[factor], compile) for _ in range(20)]
            wrong.extend(factor for value in found if not torch.equal(value, expected[factor]))
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(factor,)) for factor in copies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    clean(model._module)


def test_an_edit_at_module_level_keeps_the_values_of_its_variables(tmp_path: Path) -> None:
    """As an edit in a function does, although the variables are globals there."""
    script = tmp_path / "edits.py"
    script.write_text(
        textwrap.dedent(
            """
            import torch
            from nnsight import NNsight

            model = NNsight(torch.nn.Sequential(torch.nn.Identity()))
            made = []
            for factor in (2.0, 3.0):
                with model.edit() as edited:
                    scaled = model[0].output * factor
                    model[0].output = scaled
                made.append(edited)
            factor = 7.0
            found = [edited(torch.ones(1)).item() for edited in made]
            """
        )
    )
    names = runpy.run_path(str(script))
    assert names["found"] == [2.0, 3.0]
    assert "scaled" not in names
