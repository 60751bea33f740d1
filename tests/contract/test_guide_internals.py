"""The design document: blocks in unusual forms, the tree of envoys, methods as traces, conflicts of names, invariants."""

from __future__ import annotations

import contextlib
import copy
import pickle
from typing import Any

import pytest
import torch

import nnsight
from nnsight import LanguageModel, NNsight, WithBlockNotFoundError
from nnsight.intervention.envoy import Envoy
from nnsight.intervention.interleaver import Interleaver, Mediator, MissedProviderError, OutOfOrderError

from ..conftest import assert_no_instrumentation
from .guide import PARIS, WIDTH, Hooks, Tower, both, close, encoded, hooked, ids, new_tower, same

# -- where a block can stand ------------------------------------------------------------------------------------------


@both
def test_several_contexts_in_one_header(model: Any, compile: bool) -> None:
    with model.trace(ids(), compile=compile), torch.no_grad():
        first = (model.layers[0].output[0] * 2).save()
    assert not first.requires_grad
    close(first, hooked(model, ids())[1]["layers.0"][0] * 2)


@both
def test_a_header_over_several_lines(model: Any, compile: bool) -> None:
    # fmt: off
    with model.trace(
        ids(),
        compile=compile,
    ) as tracer:
        model.layers[0].output[0][
            :
        ] = 0
        out = (
            model.output
            .save()
        )
    # fmt: on
    assert tracer.report.mode == ("compiled" if compile else "eager")
    same(out, hooked(model, ids(), layers__0=lambda value: (torch.zeros_like(value[0]), value[1]))[0])


def test_a_trace_that_no_with_statement_enters(model: Any) -> None:
    with pytest.raises(WithBlockNotFoundError), contextlib.ExitStack() as stack:
        stack.enter_context(model.trace(ids()))


@both
def test_a_block_in_a_helper_has_its_own_variables(model: Any, compile: bool) -> None:
    def read(index: int) -> Any:
        with model.trace(ids(), compile=compile):
            hidden = model.layers[index].output[0].save()
        return hidden

    seen = hooked(model, ids())[1]
    same([read(0), read(2)], [seen["layers.0"][0], seen["layers.2"][0]])


@both
def test_helper_functions_read_and_edit_for_a_block(model: Any, compile: bool) -> None:
    def scale(index: int, factor: float) -> torch.Tensor:
        model.layers[index].output[0][:] *= factor
        kept = model.layers[index].output[0].clone()
        return kept

    with model.trace(ids(), compile=compile):
        scaled = scale(0, 3.0).save()
        out = model.output.save()
    same(out, hooked(model, ids(), layers__0=lambda value: (value[0] * 3.0, value[1]))[0])
    same(scaled, hooked(model, ids())[1]["layers.0"][0] * 3.0)


def test_a_block_in_a_closure_has_the_values_the_closure_was_made_with(model: Any) -> None:
    def reader(index: int) -> Any:
        def read(scale: float = float(index + 1)) -> torch.Tensor:
            with model.trace(ids()):
                hidden = (model.layers[index].output[0] * scale).save()
            return hidden

        return read

    seen = hooked(model, ids())[1]
    found = [read() for read in [reader(index) for index in range(3)]]
    same(found, [seen[f"layers.{index}"][0] * (index + 1) for index in range(3)])


def test_a_cleared_cache_of_sources_is_filled_again(model: Any) -> None:
    from nnsight.intervention.tracing.globals import Globals

    found = []
    for _ in range(2):
        with model.trace(ids()):
            found.append(model.output.save())
        Globals.cache.clear()
    same(found, [model._module(ids())] * 2)


# -- the tree of envoys -----------------------------------------------------------------------------------------------


def test_the_tree_mirrors_the_modules(lm: LanguageModel) -> None:
    assert isinstance(lm.transformer.h[0].attn, Envoy)
    assert lm.path == "model"
    assert lm.transformer.h[0].attn.path == "model.transformer.h.0.attn"
    assert lm.transformer.h[0].attn._module is lm._module.transformer.h[0].attn
    assert lm.transformer.h[0] is lm.transformer.h[0]
    assert lm.transformer.h[-1] is lm.transformer.h[len(lm.transformer.h) - 1]
    assert lm.transformer.h[0:2] == [lm.transformer.h[0], lm.transformer.h[1]]
    paths = [path for path, _ in lm.named_modules()]
    assert set(paths) == {f"model.{name}" if name else "model" for name, _ in lm._module.named_modules()}
    assert lm.get("transformer.h.0.attn") is lm.transformer.h[0].attn
    assert {"output", "input", "inputs", "skip", "next", "transformer"} <= set(dir(lm))


@both
def test_a_module_added_later_appears(compile: bool) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 3))
    model = NNsight(module, compile={"backend": "eager"})
    x = torch.rand(1, 3)
    with model.trace(x, compile=compile):
        model.output.save()
    module.append(torch.nn.Linear(3, 2))
    with model.trace(x, compile=compile):
        last = model[1].output.save()
    assert model[1].path == "model.1"
    same(last, module(x))


def test_whether_a_model_runs_is_known(model: Any) -> None:
    assert not model.interleaving
    with model.trace(ids()):
        during = nnsight.save(model.layers[0].interleaving)
        model.output  # noqa: B018
    assert during and not model.interleaving


class ByName(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(3, 3)
        self.scaled = Scaled()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scaled(hidden=self.inner(x), scale=2.0)


class Scaled(torch.nn.Module):
    def forward(self, *, hidden: torch.Tensor, scale: float) -> torch.Tensor:
        return hidden * scale


@both
def test_the_first_input_may_be_given_by_name(compile: bool) -> None:
    model = NNsight(ByName(), compile={"backend": "eager"})
    x = torch.rand(2, 3)
    with model.trace(x, compile=compile):
        first = model.scaled.input.save()
        inputs = nnsight.save(model.scaled.inputs)
        model.scaled.input = first + 1
        out = model.output.save()
    hidden = model._module.inner(x)
    same(first, hidden)
    same(inputs, ((), {"hidden": hidden, "scale": 2.0}))
    same(out, (hidden + 1) * 2.0)


class Conflicting(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input = torch.nn.Linear(3, 4)
        self.output = torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.output(self.input(x) * 2) + 1


@both
@pytest.mark.filterwarnings("ignore")
def test_children_named_like_a_property(compile: bool) -> None:
    model = NNsight(Conflicting(), compile={"backend": "eager"})
    x = torch.rand(2, 3)
    assert model.output.path == "model.output"
    with model.trace(x, compile=compile):
        given = model.nns_input.save()
        first = model.input.output.save()
        model.output.output[:] = 0
        whole = model.nns_output.save()
    same((given, first, whole), (x, model._module.input(x), torch.ones(2, 2)))


def test_copies_and_pickles_work_and_stand_alone() -> None:
    model = new_tower()
    with model.edit(inplace=True):
        model.layers[0].output[0][:] = 0
    model.clear_edits()
    duplicate = copy.deepcopy(model)
    loaded = pickle.loads(pickle.dumps(model))
    for other in (duplicate, loaded):
        assert other._module is not model._module
        with other.trace(ids(), compile=False):
            other.layers[0].output[0][:] = 0
            out = other.output.save()
        same(out, hooked(model, ids(), layers__0=lambda value: (torch.zeros_like(value[0]), value[1]))[0])
    same(model._module(ids()), duplicate._module(ids()))


def test_nothing_stays_on_the_modules(model: Any) -> None:
    with model.trace(ids(), compile=False):
        model.layers[0].output[0][:] = 0
    assert_no_instrumentation(model._module)


def test_a_forward_of_the_instance_is_called() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 3))
    module[0].forward = lambda x: x * 5  # type: ignore[method-assign]
    model = NNsight(module)
    with model.trace(torch.ones(1, 3)):
        hidden = model[0].output.save()
    same(hidden, torch.full((1, 3), 5.0))


# -- methods as traces ------------------------------------------------------------------------------------------------


class Encoder(torch.nn.Module):
    """A model with more ways in than ``forward``."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = torch.nn.Linear(3, 4)
        self.head = torch.nn.Linear(4, 2)

    def encode(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return torch.relu(self.trunk(x)) * scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encode(x))


@pytest.fixture
def encoder() -> NNsight:
    torch.manual_seed(0)
    return NNsight(Encoder(), compile={"backend": "eager"})


def test_a_method_in_a_header_is_traced(encoder: Any) -> None:
    x = torch.rand(2, 3)
    with encoder.encode(x, scale=2.0) as tracer:
        hidden = encoder.trunk.output.save()
        result = tracer.result.save()
    same(hidden, encoder._module.trunk(x))
    same(result, encoder._module.encode(x, scale=2.0))


def test_a_traced_method_is_edited(encoder: Any) -> None:
    x = torch.rand(2, 3)
    with encoder.encode(x) as tracer:
        encoder.trunk.output[:] = 1
        result = tracer.result.save()
    same(result, torch.ones(2, 4))


def test_a_traced_method_stays_within_itself(encoder: Any) -> None:
    with pytest.raises(OutOfOrderError):
        with encoder.encode(torch.rand(2, 3)):
            encoder.head.output.save()


def test_a_method_called_without_a_block_is_the_method(encoder: Any) -> None:
    x = torch.rand(2, 3)
    result = encoder.encode(x, scale=3.0)
    same(result, encoder._module.encode(x, scale=3.0))
    same(encoder.trunk.extra_repr(), encoder._module.trunk.extra_repr())


def test_a_method_of_a_submodule_is_traced() -> None:
    outer = NNsight(torch.nn.Sequential(Encoder()))
    x = torch.rand(2, 3)
    with outer[0].encode(x) as tracer:
        hidden = outer[0].trunk.output.save()
        result = tracer.result.save()
    same(hidden, outer._module[0].trunk(x))
    same(result, outer._module[0].encode(x))


def test_a_method_called_inside_a_block_is_the_method(encoder: Any) -> None:
    x = torch.rand(2, 3)
    with encoder.trace(x, compile=False):
        again = encoder.encode(x * 2).save()
        out = encoder.output.save()
    same(again, encoder._module.encode(x * 2))
    same(out, encoder._module(x))


def test_a_class_may_say_how_a_method_is_traced() -> None:
    class Doubling(NNsight):
        def __nnsight_encode__(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            return self._module.encode(x, **kwargs) * 2

    model = Doubling(Encoder())
    x = torch.rand(2, 3)
    with model.encode(x) as tracer:
        hidden = model.trunk.output.save()
        result = tracer.result.save()
    same(hidden, model._module.trunk(x))
    same(result, model._module.encode(x) * 2)


# -- the result, and what a generation has besides --------------------------------------------------------------------


@both
def test_the_result_is_edited_by_nobody_but_read_by_all(model: Any, compile: bool) -> None:
    with model.trace(compile=compile) as tracer:
        with tracer.invoke(ids()):
            one = tracer.result.save()
        with tracer.invoke():
            other = tracer.result.save()
    same(one, model._module(ids()))
    same(other, one)


def test_the_streamer_gets_the_tokens_as_they_come(lm: LanguageModel) -> None:
    with lm.generate(PARIS, max_new_tokens=3, do_sample=False, compile=False) as tracer:
        tokens = [].save()
        for _ in tracer.iter[1:4]:
            tokens.append(lm.generator.streamer.output)
    expected = lm._module.generate(**encoded(PARIS), max_new_tokens=3, do_sample=False)
    assert [int(token) for token in tokens] == expected[0, -3:].tolist()


# -- the machine of turns ---------------------------------------------------------------------------------------------


def test_errors_of_a_run_are_one_family() -> None:
    assert issubclass(OutOfOrderError, MissedProviderError) and issubclass(OutOfOrderError, ValueError)
    assert Mediator.OutOfOrderError is OutOfOrderError
    assert Mediator.MissedProviderError is MissedProviderError


@both
def test_an_error_names_the_occurrence(lm: LanguageModel, compile: bool) -> None:
    with pytest.raises(OutOfOrderError, match=r"model\.transformer\.h\.0\.output\.i1"):
        with lm.generate(PARIS, max_new_tokens=3, do_sample=False, compile=compile) as tracer:
            tracer.next()
            lm.lm_head.output.save()
            tracer.next(0)
            lm.transformer.h[0].next(0).output.save()
            for _ in tracer.iter[1]:
                lm.transformer.h[0].output.save()


def test_a_driver_of_ones_own_offers_values() -> None:
    """``handle`` is the one primitive: whoever calls it plays the model's part."""
    taken: list[Any] = []

    class Owner:
        path = "mine"

        @nnsight.intervention.envoy.eproperty()
        def value(self) -> Any: ...

    owner = Owner()

    def block() -> None:
        taken.append(owner.value)
        owner.value = 7

    with Interleaver([Mediator(block, None)]) as run:
        assert run.handle("mine.other", 1) == 1
        assert run.handle("mine.value", 3) == 7
        assert run.handle("mine.value", 4) == 4
    assert taken == [3]


def test_a_value_is_provided_by_its_property() -> None:
    class Owner(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    class WithLogits(NNsight):
        @nnsight.intervention.envoy.eproperty(description="given from outside")
        def logits(self) -> Any:
            """Values that no module returns."""

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return super().__call__(*args, **kwargs)

    model = WithLogits(Owner())
    handle = model._module.register_forward_hook(
        lambda module, args, out: WithLogits.__dict__["logits"].provide(model, out + 1)
    )
    with model.trace(torch.zeros(2)):
        seen = model.logits.clone().save()
        model.logits = model.logits * 10
        out = model.output.save()
    handle.remove()
    same(seen, torch.ones(2))
    same(out, torch.full((2,), 10.0))


# -- invariants of the compiled path that the documents promise implicitly ----------------------------------------------


class Sideways(torch.nn.Module):
    """A value is used between two locations at which it is the same tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.second = torch.nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        aside = y * 2
        return self.second(y) + aside


@both
@pytest.mark.parametrize("order", ["late first", "early first"])
def test_the_same_edit_at_another_location_is_another_program(compile: bool, order: str) -> None:
    torch.manual_seed(0)
    model = NNsight(Sideways(), compile={"backend": "eager"})
    x = torch.randn(1, 4)
    kept = model._module.first(x)

    def late() -> torch.Tensor:
        with model.trace(x, compile=compile):
            hidden = model.first.output
            model.second.input  # noqa: B018
            hidden[:] = 0
            out = model.output.save()
        return out

    def early() -> torch.Tensor:
        with model.trace(x, compile=compile):
            hidden = model.first.output
            hidden[:] = 0
            model.second.input  # noqa: B018
            out = model.output.save()
        return out

    found = {"late": late(), "early": early()} if order == "late first" else {"early": early(), "late": late()}
    same(found["late"], kept * 2)
    same(found["early"], torch.zeros(1, 4))


@both
def test_a_replacement_at_an_earlier_location_after_one_at_a_later(compile: bool) -> None:
    """Two traces of one model whose calls agree and whose places differ."""
    model = new_tower()
    with model.trace(compile=compile) as tracer:
        with tracer.invoke(ids(1)):
            embeddings = model.embed.output
        with tracer.invoke(ids(2)):
            own = model.layers[0].input
            model.layers[0].input = embeddings
            late = model.output.save()
    with model.trace(compile=compile) as tracer:
        with tracer.invoke(ids(1)):
            embeddings = model.embed.output
        with tracer.invoke(ids(2)):
            own = model.embed.output
            model.embed.output = embeddings
            early = model.output.save()
    close(late, model._module(ids(1)))
    close(early, model._module(ids(1)))


def test_a_model_is_traced_from_two_threads_at_once() -> None:
    import threading

    model, found = new_tower(), {}

    def work(seed: int) -> None:
        with torch.no_grad():
            for _ in range(5):
                with model.trace(ids(seed), compile=False):
                    model.layers[0].output[0][:] *= seed
                    out = model.output.save()
                found.setdefault(seed, []).append(out)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in (2, 3):
        expected = hooked(model, ids(seed), layers__0=lambda value, seed=seed: (value[0] * seed, value[1]))[0]
        assert len(found[seed]) == 5
        for out in found[seed]:
            same(out, expected)


def test_sizes_of_the_reference_are_what_they_seem() -> None:
    """The models these tests compare with are what a reader takes them for."""
    module = Tower()
    assert module(ids(batch=2)).shape == (2, 5, 11)
    assert module.layers[0](module.embed(ids()))[0].shape == (1, 5, WIDTH)
    assert Hooks(module)(ids()).shape == (1, 5, 11)
