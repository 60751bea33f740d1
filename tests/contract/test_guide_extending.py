"""The document on extending: further names, properties, envoys, root classes, tracers and backends of one's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

from nnsight import LanguageModel, NNsight
from nnsight.intervention.backends.base import Backend
from nnsight.intervention.envoy import Envoy, eproperty
from nnsight.intervention.hooks import requires_input, requires_output
from nnsight.intervention.tracing.globals import Globals
from nnsight.intervention.tracing.util import wrap_exception

from .guide import (
    HEADS,
    LAYERS,
    PARIS,
    WIDTH,
    Tower,
    both,
    close,
    encoded,
    hooked,
    ids,
    language_model,
    new_language_model,
    new_tower,
    same,
)
from .guide import Attention as AttentionModule
from .guide import Block as BlockModule


class HiddenEnvoy(Envoy):
    """``hidden`` is the first element of what a layer returns."""

    @eproperty(key="output")
    @requires_output
    def hidden(self) -> Any:
        """The hidden state the layer returns."""

    @hidden.preprocess
    def hidden(self, value: Any) -> Any:
        return value[0] if isinstance(value, tuple) else value

    @hidden.postprocess
    def hidden(self, value: Any) -> Any:
        return value, None


class HeadsEnvoy(Envoy):
    """Views of the attention's output, one for each head."""

    @eproperty(key="output", description="by head")
    @requires_output
    def heads(self) -> Any:
        """The output as a list with a view for each head."""

    @heads.preprocess
    def heads(self, value: Any) -> Any:
        batch, length, width = value[0].shape
        split = value[0].view(batch, length, self.num_heads, width // self.num_heads)
        return [split[:, :, head] for head in range(self.num_heads)]

    @eproperty(key="input")
    @requires_input
    def doubled(self) -> Any:
        """The first argument, twice; edits of it go back halved."""

    @doubled.preprocess
    def doubled(self, value: Any) -> Any:
        return value[0][0] * 2

    @doubled.transform
    @staticmethod
    def doubled(value: Any) -> Any:
        return (value / 2,), {}


ENVOYS = {BlockModule: HiddenEnvoy, AttentionModule: HeadsEnvoy}


def made(**options: Any) -> NNsight:
    torch.manual_seed(0)
    return NNsight(Tower().eval(), compile={"backend": "eager"}, envoys=ENVOYS, **options)


# -- properties -------------------------------------------------------------------------------------------------------


@both
def test_a_property_unpacks_the_hidden_state(compile: bool) -> None:
    model = made()
    with model.trace(ids(), compile=compile):
        hidden = [layer.hidden for layer in model.layers]
        hidden = list(hidden).save()
    seen = hooked(model, ids())[1]
    same(hidden, [seen[f"layers.{index}"][0] for index in range(LAYERS)])


@both
def test_a_property_is_edited_in_place(compile: bool) -> None:
    model = made()
    with model.trace(ids(), compile=compile):
        model.layers[0].hidden[:] = 0
        out = model.output.save()
    same(out, hooked(model, ids(), layers__0=lambda value: (torch.zeros_like(value[0]), value[1]))[0])


def test_what_is_assigned_to_a_property_is_postprocessed() -> None:
    model = made()
    with model.trace(ids(), compile=False):
        model.layers[0].hidden = torch.zeros(1, 5, WIDTH)
        whole = model.layers[0].output
        nothing = (whole[1] is None).save()
        out = model.output.save()
    assert nothing
    same(out, hooked(model, ids(), layers__0=lambda value: (torch.zeros_like(value[0]), value[1]))[0])


@both
def test_views_of_heads_write_through(compile: bool) -> None:
    model = made()
    with model.trace(ids(), compile=compile):
        heads = model.layers[1].attn.heads
        heads[1][:] = 0
        first = heads[0].clone().save()
        out = model.output.save()
    size = WIDTH // HEADS

    def zero_head(value: Any) -> Any:
        changed = value[0].clone()
        changed[..., size:] = 0
        return changed, value[1]

    same(out, hooked(model, ids(), layers__1__attn=zero_head)[0])
    same(first, hooked(model, ids())[1]["layers.1.attn"][0][..., :size])


@both
def test_a_transform_sends_an_edited_copy_back(compile: bool) -> None:
    model = made()
    with model.trace(ids(), compile=compile):
        view = model.layers[0].attn.doubled
        view[:] = 2.0
        out = model.output.save()
    from .guide import Hooks

    reference = Hooks(model._module).input("layers.0.attn", lambda args, kwargs: ((torch.ones_like(args[0]),), kwargs))
    same(out, reference(ids()))


def test_without_a_transform_edits_of_a_copy_stay_in_the_block() -> None:
    class CopyEnvoy(Envoy):
        @eproperty(key="output")
        @requires_output
        def copied(self) -> Any: ...

        @copied.preprocess
        def copied(self, value: Any) -> Any:
            return value.clone()

    model = NNsight(torch.nn.Sequential(torch.nn.Linear(3, 3)), envoys=CopyEnvoy)
    x = torch.rand(1, 3)
    with model.trace(x):
        model[0].copied[:] = 0
        out = model.output.save()
    same(out, model._module(x))


def test_a_property_has_the_name_and_the_text_of_its_stub() -> None:
    descriptor = HiddenEnvoy.__dict__["hidden"]
    assert (descriptor.name, descriptor.key, descriptor.iterate) == ("hidden", "output", True)
    assert "hidden state the layer returns" in descriptor.__doc__
    assert HeadsEnvoy.__dict__["heads"].description == "by head"
    assert Envoy.input.key == Envoy.inputs.key == "input"


def test_a_property_outside_a_trace() -> None:
    with pytest.raises(ValueError, match="outside of interleaving"):
        made().layers[0].hidden  # noqa: B018


# -- classes of envoys ------------------------------------------------------------------------------------------------


def test_the_three_forms_of_envoys() -> None:
    module = new_tower()._module
    plain, everywhere, by_type = NNsight(module), NNsight(module, envoys=HiddenEnvoy), NNsight(module, envoys=ENVOYS)
    assert type(plain.layers[0]) is Envoy and type(plain.head) is Envoy
    assert type(everywhere.layers[0]) is HiddenEnvoy and type(everywhere.layers[0].mlp[0]) is HiddenEnvoy
    assert type(by_type.layers[0]) is HiddenEnvoy and type(by_type.layers[0].attn) is HeadsEnvoy
    assert type(by_type.head) is Envoy


def test_a_class_stands_for_its_subclasses() -> None:
    class Special(BlockModule):
        pass

    model = NNsight(torch.nn.Sequential(Special(), BlockModule()), envoys={BlockModule: HiddenEnvoy})
    assert type(model[0]) is HiddenEnvoy and type(model[1]) is HiddenEnvoy
    model = NNsight(
        torch.nn.Sequential(Special(), BlockModule()), envoys={Special: HeadsEnvoy, BlockModule: HiddenEnvoy}
    )
    assert type(model[0]) is HeadsEnvoy and type(model[1]) is HiddenEnvoy


def test_a_class_attribute_is_the_default() -> None:
    class Wrapped(NNsight):
        envoys = ENVOYS  # type: ignore[assignment]

    module = new_tower()._module
    assert type(Wrapped(module).layers[0]) is HiddenEnvoy
    assert type(Wrapped(module, envoys=None).layers[0]) is Envoy
    assert type(Wrapped(module, envoys=HeadsEnvoy).layers[0]) is HeadsEnvoy


# -- a root class -----------------------------------------------------------------------------------------------------


class Letters(NNsight):
    """A family of its own: loading by name, words as input, batching, a generation."""

    envoys = ENVOYS  # type: ignore[assignment]

    def __init__(self, name_or_model: Any, *args: Any, **kwargs: Any) -> None:
        module = self.load(name_or_model) if isinstance(name_or_model, str) else name_or_model
        super().__init__(module, *args, **kwargs)

    @staticmethod
    def load(name: str) -> torch.nn.Module:
        torch.manual_seed(len(name))
        return Tower().eval()

    def _prepare_input(self, *inputs: Any, **kwargs: Any) -> Any:
        words = [inputs[0]] if isinstance(inputs[0], str) else list(inputs[0])
        return (torch.tensor([[ord(letter) % 11 for letter in word] for word in words]),), kwargs, len(words)

    def _batch(self, batched: Any, *inputs: Any, **kwargs: Any) -> Any:
        if batched is None:
            return (inputs, kwargs), len(inputs[0])
        return ((torch.cat([batched[0][0], inputs[0]]),), kwargs), len(inputs[0])


def letters(word: str) -> torch.Tensor:
    return torch.tensor([[ord(letter) % 11 for letter in word]])


@both
def test_a_family_loads_by_name_and_takes_its_own_input(compile: bool) -> None:
    model = Letters("tiny", compile={"backend": "eager"})
    with model.trace("hello", compile=compile):
        hidden = model.layers[0].hidden.save()
        out = model.output.save()
    same(out, model._module(letters("hello")))
    same(hidden, hooked(model, letters("hello"))[1]["layers.0"][0])
    wrapped = Letters(model._module, compile={"backend": "eager"})
    assert wrapped._module is model._module


@both
def test_a_family_joins_the_inputs_of_invokes(compile: bool) -> None:
    model = Letters("tiny", compile={"backend": "eager"})
    with model.trace(compile=compile) as tracer:
        with tracer.invoke("hello"):
            one = model.output.save()
        with tracer.invoke(["world", "again"]):
            two = model.output.save()
        with tracer.invoke():
            everything = model.output.save()
    close(one, model._module(letters("hello")))
    close(two, torch.cat([model._module(letters("world")), model._module(letters("again"))]))
    same(everything, torch.cat([one, two]))


class LensEnvoy(Envoy):
    """``lens`` is what the model would predict from this layer."""

    @eproperty(key="output")
    @requires_output
    def lens(self) -> Any:
        """The hidden state through the last norm and the head."""

    @lens.preprocess
    def lens(self, value: Any) -> Any:
        hidden = value[0] if isinstance(value, tuple) else value
        return self._lens_head(self._lens_norm(hidden))


class LensModel(LanguageModel):
    envoys = {GPT2Block: LensEnvoy}  # noqa: RUF012

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for block in self.transformer.h:
            block.__dict__["_lens_norm"] = self._module.transformer.ln_f
            block.__dict__["_lens_head"] = self._module.lm_head


def test_a_lens_on_every_layer_wired_across_the_tree() -> None:
    own = new_language_model()
    model = LensModel(own._module, own.tokenizer)
    with model.trace(PARIS):
        tokens = [block.lens.argmax(-1) for block in model.transformer.h]
        tokens = list(tokens).save()
    module, seen = model._module, hooked(language_model(), PARIS)[1]
    expected = [
        module.lm_head(module.transformer.ln_f(seen[f"transformer.h.{index}"])).argmax(-1) for index in range(LAYERS)
    ]
    same(tokens, expected)


# -- tracers and backends ---------------------------------------------------------------------------------------------


class Counting(Backend):
    """Runs blocks in this process, and counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks: list[str] = []

    def __call__(self, tracer: Any) -> Any:
        function = super().__call__(tracer)
        self.blocks.append(type(tracer).__name__)
        try:
            Globals.enter()
            return tracer.execute(function)
        except Exception as error:
            raise wrap_exception(error, tracer.info) from None
        finally:
            Globals.exit()


@both
def test_a_backend_gets_the_compiled_function(compile: bool) -> None:
    model, backend = new_tower(), Counting()
    with model.trace(ids(), compile=compile, backend=backend):
        out = model.output.save()
    assert len(backend.blocks) == 1
    same(out, model._module(ids()))


def test_a_backend_of_a_generation_and_of_a_session() -> None:
    model, backend = language_model(), Counting()
    with model.generate(PARIS, max_new_tokens=2, do_sample=False, compile=False, backend=backend) as tracer:
        text = tracer.result.save()
    same(text, model._module.generate(**encoded(PARIS), max_new_tokens=2, do_sample=False))
    with model.session(backend=backend):
        with model.trace(PARIS, compile=False):
            out = model.lm_head.output.save()
    assert len(backend.blocks) == 2
    same(out, model._module(**encoded(PARIS)).logits)


def test_errors_of_a_backend_show_the_users_line() -> None:
    model = new_tower()
    with pytest.raises(ZeroDivisionError) as caught:
        with model.trace(ids(), compile=False, backend=Counting()):
            model.layers[0].output  # noqa: B018
            1 / 0  # noqa: B018
    assert "1 / 0" in str(caught.traceback[-1].statement)


class Later(Backend):
    """Keeps blocks instead of running them; the results are asked for later."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Any] = []

    def __call__(self, tracer: Any = None) -> Any:
        if tracer is None:
            return "not finished"
        self.kept.append(super().__call__(tracer))
        return None


def test_a_backend_that_does_not_run_the_block() -> None:
    model, backend = new_tower(), Later()
    calls: list[int] = []
    handle = model._module.register_forward_hook(lambda *_: calls.append(1))
    with model.trace(ids(), compile=False, backend=backend) as tracer:
        out = model.output.save()
    handle.remove()
    assert not calls and len(backend.kept) == 1 and callable(backend.kept[0])
    assert tracer.backend is backend
    assert tracer.backend() == "not finished"
    with pytest.raises(NameError):
        out  # noqa: B018


@both
def test_a_tracer_of_ones_own_traces_a_model(compile: bool) -> None:
    from nnsight.intervention.tracing.tracer import InterleavingTracer

    class Announced(InterleavingTracer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.runs: list[Any] = []

        def execute(self, function: Any) -> Any:
            self.runs.append(function)
            return super().execute(function)

    model = new_tower()
    for _ in range(3):
        with model.trace(ids(), compile=compile, tracer_cls=Announced) as tracer:
            out = model.output.save()
            result = tracer.result.save()
        assert isinstance(tracer, Announced) and type(tracer).__name__ == "Announced"
        assert len(tracer.runs) == 1 and tracer.report.mode == ("compiled" if compile else "eager")
        same((out, result), (model._module(ids()),) * 2)
    with model.trace(compile=compile, tracer_cls=Announced) as tracer:
        with tracer.invoke(ids()):
            inside = model.output.save()
    same(inside, out)
    with pytest.raises(TypeError, match="tracer_cls= is a subclass of InterleavingTracer"):
        model.trace(ids(), tracer_cls=int)


def test_a_session_of_a_class_of_ones_own() -> None:
    from nnsight.intervention.tracing.base import Tracer

    class Twice(Tracer):
        def execute(self, function: Any) -> Any:
            function()
            return super().execute(function)

    model, seen = new_tower(), []
    with model.session(tracer_cls=Twice):
        seen.append(1)
        with model.trace(ids(), compile=False):
            out = model.output
        kept = out.save()
    same((kept, torch.tensor(len(seen))), (model._module(ids()), torch.tensor(2)))


def test_a_tracer_of_ones_own_runs_the_block_twice() -> None:
    from nnsight.intervention.tracing.base import Tracer

    class Twice(Tracer):
        def execute(self, function: Any) -> Any:
            function()
            return super().execute(function)

    seen: list[int] = []
    with Twice():
        seen.append(len(seen))
        count = len(seen).save()
    assert seen == [0, 1]
    assert count == 2
