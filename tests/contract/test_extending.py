"""Root classes and tracers of one's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

from nnsight import LanguageModel, NNsight
from nnsight.intervention.envoy import Envoy, eproperty
from nnsight.intervention.hooks import requires_output

from ..conftest import both, close, same
from .guide import LAYERS, PARIS, Block, Tower, hooked, ids, language_model, new_language_model, new_tower


class HiddenEnvoy(Envoy):
    """``hidden`` is the first element of what a layer returns."""

    @eproperty(key="output")
    @requires_output
    def hidden(self) -> Any:
        """The hidden state that the layer returns."""

    @hidden.preprocess
    def hidden(self, value: Any) -> Any:
        return value[0]


class Letters(NNsight):
    """A family of its own: loading by name, words as input, batching."""

    envoys = {Block: HiddenEnvoy}  # noqa: RUF012 - as the documentation writes it

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
def test_a_family_loads_by_name_takes_its_own_input_and_joins_that_of_invokes(compile: bool) -> None:
    model = Letters("tiny", compile={"backend": "eager"})
    assert Letters(model._module)._module is model._module
    with model.trace("hello", compile=compile):
        hidden = model.layers[0].hidden.save()
        out = model.output.save()
    same(out, model._module(letters("hello")))
    same(hidden, hooked(model, letters("hello"))[1]["layers.0"][0])
    with model.trace(compile=compile) as tracer:
        with tracer.invoke("hello"):
            one = model.output.save()
        with tracer.invoke(["world", "again"]):
            two = model.output.save()
        with tracer.invoke():
            everything = model.output.save()
    close(one, out)
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
