"""Modules called by blocks: parts of the model out of their place, and modules added after wrapping."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ..conftest import Hooks, Rows, both

X = torch.linspace(-1, 1, 12).view(2, 6)


class Autoencoder(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = torch.nn.Linear(6, 8)
        self.decoder = torch.nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(torch.relu(self.encoder(x)))


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(6, 6)
        self.last = torch.nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.first(x)))


@pytest.fixture
def model() -> Rows:
    torch.manual_seed(0)
    wrapped = Rows(Net())
    wrapped._make_driver({"backend": "eager"})
    wrapped.sae = Autoencoder()
    return wrapped


def patched(module: Any, replace: Any, x: torch.Tensor = X) -> torch.Tensor:
    """Run the model with what ``first`` returns replaced, by a plain torch hook."""
    return Hooks(module).output("first", replace)(x)


@both
def test_a_plain_call_applies_the_module(model: Rows, compile: bool) -> None:
    with model.trace(X, compile=compile) as tracer:
        hidden = model.first.output
        rebuilt = model.sae(hidden).save()
        model.first.output = rebuilt
        out = model.output.save()
    module = model._module
    assert tracer.report.mode == ("compiled" if compile else "eager")
    assert torch.equal(rebuilt, module.sae(module.first(X)))
    assert torch.equal(out, patched(module, module.sae))
    assert not torch.equal(out, module(X))


@both
def test_a_part_of_the_model_out_of_its_place(model: Rows, compile: bool) -> None:
    with model.trace(X, compile=compile):
        early = model.last(model.first.output).save()
        where = model.last.input.clone().save()
        out = model.last.output.save()
    module = model._module
    assert torch.equal(early, module.last(module.first(X)))
    assert torch.equal(where, torch.relu(module.first(X))), "the early call is no occurrence"
    assert torch.equal(out, module(X))


@both
def test_a_plain_call_passes_no_location(model: Rows, compile: bool) -> None:
    with pytest.raises(ValueError, match=r"`model\.sae\.output\.i0` was not provided"):
        with model.trace(compile=compile) as tracer:
            with tracer.invoke(X):
                model.sae(model.first.output)
            with tracer.invoke():
                model.sae.output.save()


@both
@pytest.mark.parametrize("hook", [False, True], ids=["alone", "hooked"])
def test_the_hooks_of_a_module_run_when_a_block_calls_it(model: Rows, compile: bool, hook: bool) -> None:
    module = model._module
    seen: list[str] = []

    def shifted(called: Any, args: Any) -> Any:
        seen.append("before")
        return (args[0] + 1.0,)

    def doubled(called: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        seen.append("behind")
        return 2.0 * output

    module.sae.register_forward_pre_hook(shifted)
    module.sae.decoder.register_forward_hook(doubled)
    expected = 2.0 * module.sae.decoder.forward(torch.relu(module.sae.encoder(module.first(X) + 1.0)))
    for _ in range(3):
        seen.clear()
        with model.trace(X, compile=compile):
            rebuilt = model.sae(model.first.output, hook=hook).save()
            out = model.output.save()
        assert torch.equal(rebuilt, expected) and torch.equal(out, module(X))
        assert seen == ["before", "behind"]


@both
def test_a_hooked_call_is_read_by_a_later_invoke(model: Rows, compile: bool) -> None:
    with model.trace(compile=compile) as tracer:
        with tracer.invoke(X):
            model.first.output = model.sae(model.first.output, hook=True)
        with tracer.invoke():
            given = model.sae.input.clone().save()
            made = model.sae.output.clone().save()
            out = model.output.save()
    module = model._module
    hidden = module.first(X)
    assert torch.equal(given, hidden)
    assert torch.equal(made, module.sae(hidden))
    assert torch.equal(out, patched(module, module.sae))


@both
def test_a_hooked_call_is_edited_by_a_later_invoke(model: Rows, compile: bool) -> None:
    with model.trace(compile=compile) as tracer:
        with tracer.invoke(X):
            model.first.output = model.sae(model.first.output, hook=True)
            out = model.output.save()
        with tracer.invoke():
            model.sae.input = model.sae.input * 2
            model.sae.output[:, 0] = 0
    module = model._module

    def replace(hidden: torch.Tensor) -> torch.Tensor:
        rebuilt = module.sae(hidden * 2)
        rebuilt[:, 0] = 0
        return rebuilt

    expected = patched(module, replace)
    assert torch.equal(out, expected)
    assert not torch.equal(out, patched(module, module.sae))


@both
def test_a_hooked_call_with_rows(model: Rows, compile: bool) -> None:
    """The documented use: one invoke applies the module to its rows, another, with its own input, reads."""
    with model.trace(compile=compile) as tracer:
        with tracer.invoke(X[:1]):
            model.first.output = model.sae(model.first.output, hook=True)
            one = model.output.save()
        with tracer.invoke(X[1:]):
            made = model.sae.output.clone().save()
            two = model.output.save()
    module = model._module
    hidden = module.first(X)
    torch.testing.assert_close(made, module.sae(hidden)[:1])
    torch.testing.assert_close(one, patched(module, module.sae)[:1])
    torch.testing.assert_close(two, module(X)[1:])


@both
@pytest.mark.parametrize("is_edit", [False, True])
def test_the_location_of_a_hooked_call_is_read_behind_the_call(model: Rows, compile: bool, is_edit: bool) -> None:
    """The call is made while the model stands at ``first``: a later block gets its values, and then the value at ``first``."""
    if is_edit:
        with model.edit(inplace=True):
            model.first.output[:] = model.sae(model.first.output, hook=True)
    with model.trace(compile=compile) as tracer:
        with tracer.invoke(X):
            if not is_edit:
                model.first.output[:] = model.sae(model.first.output, hook=True)
        with tracer.invoke():
            coded = model.sae.encoder.output.clone().save()
            first = model.first.output.clone().save()
    module = model._module
    assert torch.equal(coded, module.sae.encoder(module.first(X)))
    assert torch.equal(first, module.sae(module.first(X)))


@both
def test_modules_below_a_hooked_call_pass_their_locations(model: Rows, compile: bool) -> None:
    module = model._module

    def replace(hidden: torch.Tensor) -> torch.Tensor:
        coded = module.sae.encoder(hidden)
        coded[:, 0] = 3.0
        return module.sae.decoder(torch.relu(coded))

    for _ in range(2):
        with model.trace(compile=compile) as tracer:
            with tracer.invoke(X):
                model.first.output = model.sae(model.first.output, hook=True)
                out = model.output.save()
            with tracer.invoke():
                cache = tracer.cache(modules=[model.sae.decoder])
                model.sae.encoder.output[:, 0] = 3.0
                coded = model.sae.decoder.input.clone().save()
        hidden = module.first(X)
        expected = module.sae.encoder(hidden)
        expected[:, 0] = 3.0
        assert torch.equal(coded, torch.relu(expected))
        assert torch.equal(cache["model.sae.decoder"].output, replace(hidden))
        assert torch.equal(out, patched(module, replace))


@both
def test_modules_below_the_hooked_call_of_an_edit(model: Rows, compile: bool) -> None:
    with model.edit() as edited:
        model.first.output = model.sae(model.first.output, hook=True)
        model.sae(model.first.output * 2, hook=True)
    module = model._module
    with edited.trace(compile=compile) as tracer:
        with tracer.invoke(X[:1]):
            one = edited.sae.encoder.output.clone().save()
            edited.sae.decoder.output *= 0
            first = edited.output.save()
        with tracer.invoke(X[1:]):
            two = edited.sae.encoder.output.clone().save()
            again = edited.sae.encoder.next().output.clone().save()
            second = edited.output.save()
    coded = module.sae.encoder(module.first(X))
    assert torch.equal(torch.cat([one, two]), coded)
    hidden = module.sae(module.first(X))
    hidden[0] = 0
    torch.testing.assert_close(again, module.sae.encoder(hidden[1:] * 2))
    expected = module.last(torch.relu(hidden))
    torch.testing.assert_close(torch.cat([first, second]), expected)


@both
def test_a_hooked_call_is_skipped_by_another_invoke(model: Rows, compile: bool) -> None:
    with model.trace(compile=compile) as tracer:
        with tracer.invoke(X):
            made = model.sae(model.first.output, hook=True).save()
        with tracer.invoke():
            model.sae.skip(torch.ones(2, 6))
    assert torch.equal(made, torch.ones(2, 6))


@both
def test_several_hooked_calls_are_occurrences(model: Rows, compile: bool) -> None:
    with model.trace(compile=compile) as tracer:
        with tracer.invoke(X):
            hidden = model.first.output
            model.sae(hidden, hook=True)
            model.sae(hidden * 3, hook=True)
        with tracer.invoke():
            once = model.sae.output.clone().save()
            twice = model.sae.next().output.clone().save()
    module = model._module
    assert torch.equal(once, module.sae(module.first(X)))
    assert torch.equal(twice, module.sae(module.first(X) * 3))


@both
def test_an_edit_calls_and_the_trace_reads(model: Rows, compile: bool) -> None:
    with model.edit() as edited:
        model.first.output = model.sae(model.first.output, hook=True)
    with edited.trace(X, compile=compile):
        made = edited.sae.output.clone().save()
        out = edited.output.save()
    module = model._module
    assert torch.equal(made, module.sae(module.first(X)))
    assert torch.equal(out, patched(module, module.sae))


@both
def test_a_cache_sees_hooked_calls(model: Rows, compile: bool) -> None:
    with model.trace(X, compile=compile) as tracer:
        cache = tracer.cache(modules=[model.sae], include_inputs=True)
        model.first.output = model.sae(model.first.output, hook=True)
    module = model._module
    assert torch.equal(cache["model.sae"].output, module.sae(module.first(X)))
    assert torch.equal(cache["model.sae"].input, module.first(X))


def test_outside_of_a_trace_a_call_is_the_modules(model: Rows) -> None:
    calls: list[int] = []
    model._module.sae.register_forward_hook(lambda *_: calls.append(1))
    assert torch.equal(model.sae(X), model._module.sae(X))
    assert torch.equal(model.sae(X, hook=True), model._module.sae(X))
    assert calls == [1] * 4


@both
def test_an_error_in_an_added_module(model: Rows, compile: bool, clean: Any) -> None:
    with pytest.raises((RuntimeError, ValueError)):
        with model.trace(X, compile=compile):
            model.sae(model.first.output[:, :3], hook=True).save()
    clean(model._module)
    with model.trace(X, compile=compile):
        out = model.output.save()
    assert torch.equal(out, model._module(X))


@both
def test_a_block_that_waits_in_a_hooked_call_of_another_ends_with_the_run(model: Rows, compile: bool) -> None:
    """It is ended from outside of the block that made the call."""
    with model.edit() as edited:
        edited.first.output = edited.sae(edited.first.output, hook=True)
    with pytest.warns(UserWarning, match="ended"), edited.trace(X, compile=compile) as tracer:
        seen = [].save()
        for _ in tracer.iter[:3]:
            seen.append(edited.sae.output)
    assert len(seen) == 1
    with pytest.raises(KeyError, match="own error"), edited.trace(compile=compile) as tracer:
        with tracer.invoke(X):
            edited.last.output.save()
            raise KeyError("own error")
        with tracer.invoke():
            edited.sae.output.save()
            edited.output.save()
