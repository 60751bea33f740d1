"""The user guide and the design document on sessions, edits, scans, caches, skipping and further names."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import nnsight
from nnsight import LanguageModel
from nnsight.intervention.interleaver import OutOfOrderError

from .guide import (
    LAYERS,
    PARIS,
    ROME,
    WIDTH,
    Hooks,
    both,
    close,
    encoded,
    hooked,
    ids,
    new_language_model,
    new_tower,
    same,
    zero_hidden,
)


def zero_second(value: Any) -> Any:
    changed = value[0].clone()
    changed[:, 1] = 0
    return changed, value[1]


# -- sessions ---------------------------------------------------------------------------------------------------------


@both
def test_a_trace_uses_what_an_earlier_trace_of_the_session_read(lm: LanguageModel, compile: bool) -> None:
    with lm.session():
        with lm.trace(PARIS, compile=compile):
            hidden = lm.transformer.h[1].output[:, -1, :]
        with lm.trace(ROME, compile=compile):
            clean = lm.lm_head.output[0, -1].save()
        with lm.trace(ROME, compile=compile):
            lm.transformer.h[1].output[:, -1, :] = hidden
            patched = lm.lm_head.output[0, -1].save()
    source = hooked(lm, PARIS)[1]["transformer.h.1"][:, -1]

    def patch(value: torch.Tensor) -> torch.Tensor:
        value = value.clone()
        value[:, -1] = source
        return value

    same(clean, lm._module(**encoded(ROME)).logits[0, -1])
    same(patched, hooked(lm, ROME, transformer__h__1=patch)[0].logits[0, -1])
    assert not torch.equal(clean, patched)
    with pytest.raises(NameError):
        hidden  # noqa: B018


@both
def test_a_saved_value_of_a_session_is_also_bound_after_it(model: Any, compile: bool) -> None:
    with model.session() as session:
        with model.trace(ids(1), compile=compile):
            first = model.layers[0].output[0].save()
        with model.trace(ids(2), compile=compile):
            model.layers[0].output[0][:] = first
            second = model.layers[0].output[0].save()
            out = model.output.save()
    assert session is not None
    same(first, hooked(model, ids(1))[1]["layers.0"][0])
    same(second, first)
    same(out, model._module(ids(1)))
    assert not torch.equal(out, model._module(ids(2)))


@both
def test_a_loop_over_traces_in_a_session(model: Any, compile: bool) -> None:
    with model.session():
        results = [].save()
        for seed in (1, 2, 3):
            with model.trace(ids(seed), compile=compile):
                results.append(model.head.output.argmax(dim=-1))
    same(results, [model._module(ids(seed)).argmax(dim=-1) for seed in (1, 2, 3)])


@both
@pytest.mark.parametrize("limit", [1e5, -1.0])
def test_a_condition_in_a_session(model: Any, compile: bool, limit: float) -> None:
    with model.session():
        with model.trace(ids(), compile=compile):
            if torch.all(model.layers[1].output[0] < limit):
                model.layers[-1].output[0][:] = 0
            out = model.output.save()
    same(out, hooked(model, ids(), **({} if limit < 0 else {"layers__2": zero_hidden}))[0])
    assert torch.equal(out, model._module(ids())) == (limit < 0)


# -- edits ------------------------------------------------------------------------------------------------------------


@both
def test_an_edited_copy_and_the_untouched_original(model: Any, compile: bool) -> None:
    with model.edit() as edited:
        model.layers[1].output[0][:, 1] = 0
    with model.trace(ids(), compile=compile):
        plain = model.layers[1].output[0].save()
        out = model.output.save()
    with edited.trace(ids(), compile=compile):
        changed = edited.layers[1].output[0].save()
        out_changed = edited.output.save()
    reference, seen = hooked(model, ids(), layers__1=zero_second)
    same((plain, out), (hooked(model, ids())[1]["layers.1"][0], model._module(ids())))
    same((changed, out_changed), (seen["layers.1"][0], reference))
    assert not changed[:, 1].any() and plain[:, 1].any()


@both
def test_an_edit_in_place_holds_until_it_is_cleared(compile: bool) -> None:
    own = new_tower()
    with own.edit(inplace=True):
        own.layers[1].output[0][:] = 0
    for seed in (1, 2):
        with own.trace(ids(seed), compile=compile):
            hidden = own.layers[1].output[0].save()
            out = own.output.save()
        assert not hidden.any()
        same(out, hooked(own, ids(seed), layers__1=zero_hidden)[0])
    own.clear_edits()
    with own.trace(ids(), compile=compile):
        out = own.output.save()
    same(out, own._module(ids()))


@both
def test_an_edit_runs_while_generating(lm: LanguageModel, compile: bool) -> None:
    own = lm
    with own.edit() as edited:
        own.transformer.h[0].output *= -1.0
    with edited.generate(PARIS, max_new_tokens=1, do_sample=False, compile=compile) as tracer:
        text = tracer.result.save()
    with own._module.transformer.h[0].register_forward_hook(lambda m, a, out: -out):
        expected = own._module.generate(**encoded(PARIS), max_new_tokens=1, do_sample=False)
    same(text, expected)
    assert not torch.equal(text, own._module.generate(**encoded(PARIS), max_new_tokens=1, do_sample=False))


# -- scans ------------------------------------------------------------------------------------------------------------


def test_a_scan_gives_sizes(model: Any, lm: LanguageModel) -> None:
    with model.scan(ids()):
        size = nnsight.save(model.layers[0].output[0].shape[-1])
        shape = nnsight.save(model.head.output.shape)
    assert (size, tuple(shape)) == (WIDTH, (1, 5, 11))
    with lm.scan(PARIS):
        hidden = nnsight.save(lm.transformer.h[0].output.shape)
        logits = nnsight.save(lm.lm_head.output.shape)
    length = encoded(PARIS)["input_ids"].shape[1]
    assert tuple(hidden) == (1, length, 16) and tuple(logits) == (1, length, 1024)


def test_a_scan_computes_nothing(model: Any) -> None:
    real: list[int] = []
    handle = model._module.head.register_forward_hook(
        lambda m, a, out: real.append(1) if type(out) is torch.Tensor else None
    )
    with model.scan(ids()):
        kinds = nnsight.save([type(model.embed.output).__name__, type(model.output).__name__])
    handle.remove()
    assert kinds == ["FakeTensor", "FakeTensor"]
    assert not real


def test_a_scan_drops_what_is_not_saved(model: Any) -> None:
    with model.scan(ids()):
        size = model.layers[0].output[0].shape[-1]
    with pytest.raises(NameError):
        size  # noqa: B018


def test_a_scan_finds_an_index_that_is_too_large(model: Any) -> None:
    with model.scan(ids()):
        model.layers[0].output[0][:, 4] = 0
    with pytest.raises(IndexError):
        with model.scan(ids()):
            model.layers[0].output[0][:, 10] = 0


# -- caches -----------------------------------------------------------------------------------------------------------


@both
def test_a_cache_keeps_every_module(model: Any, compile: bool) -> None:
    with model.trace(ids(), compile=compile) as tracer:
        cache = tracer.cache()
    out, seen = hooked(model, ids())
    for path, value in seen.items():
        same(cache[f"model.{path}"].output, value)
    same(cache["model"].output, out)


@both
def test_a_cache_of_a_language_model(lm: LanguageModel, compile: bool) -> None:
    with lm.trace(PARIS, compile=compile) as tracer:
        cache = tracer.cache()
    _, seen = hooked(lm, PARIS)
    same(cache["model.transformer.h.0"].output, seen["transformer.h.0"])
    same(cache.model.transformer.h[0].output, seen["transformer.h.0"])
    same(cache.model.transformer.h[1].attn.output[0], seen["transformer.h.1.attn"][0])


@both
@pytest.mark.parametrize("by_path", [False, True])
def test_a_cache_of_some_modules(model: Any, compile: bool, by_path: bool) -> None:
    with model.trace(ids(), compile=compile) as tracer:
        chosen = [model.layers[0], model.layers[1], model.head]
        cache = tracer.cache(modules=[envoy.path for envoy in chosen] if by_path else chosen)
    assert set(cache) == {"model.layers.0", "model.layers.1", "model.head"}
    same(cache["model.head"].output, model._module(ids()))
    with pytest.raises(KeyError):
        cache["model.norm"]


@both
def test_a_cache_of_inputs(model: Any, compile: bool) -> None:
    with model.trace(ids(), compile=compile) as tracer:
        cache = tracer.cache(include_inputs=True)
    _, seen = hooked(model, ids())
    same(cache["model.layers.1"].inputs, ((seen["layers.0"][0],), {}))
    same(cache["model.layers.1"].input, seen["layers.0"][0])
    same(cache["model.layers.1"].output, seen["layers.1"])


@both
def test_a_cache_of_inputs_alone(model: Any, compile: bool) -> None:
    with model.trace(ids(), compile=compile) as tracer:
        cache = tracer.cache(modules=[model.norm], include_output=False, include_inputs=True)
    same(cache["model.norm"].input, hooked(model, ids())[1]["layers.2"][0])
    assert cache["model.norm"].output is None


@both
def test_a_cache_keeps_values_after_interventions(model: Any, compile: bool) -> None:
    with model.trace(ids(), compile=compile) as tracer:
        cache = tracer.cache()
        model.layers[0].output[0][:] = 0
    assert torch.all(cache["model.layers.0"].output[0] == 0)
    _, seen = hooked(model, ids(), layers__0=zero_hidden)
    same(cache.model.layers[2].output, seen["layers.2"])


@both
def test_options_of_a_cache(model: Any, compile: bool) -> None:
    with model.trace(ids(), compile=compile) as tracer:
        plain = tracer.cache(modules=[model.head])
        attached = tracer.cache(modules=[model.head], detach=False)
        half = tracer.cache(modules=[model.head], dtype=torch.float16, device="cpu")
    expected = model._module(ids())
    close(plain["model.head"].output, expected)
    assert not plain["model.head"].output.requires_grad and attached["model.head"].output.requires_grad
    same(half["model.head"].output, expected.half())
    assert plain["model.head"].output.device.type == "cpu"


@both
def test_several_calls_of_one_module_are_a_list(lm: LanguageModel, compile: bool) -> None:
    seen: list[torch.Tensor] = []
    handle = lm._module.lm_head.register_forward_hook(lambda m, a, out: seen.append(out.clone()))
    lm._module.generate(**encoded(PARIS), max_new_tokens=3, do_sample=False)
    handle.remove()
    with lm.generate(PARIS, max_new_tokens=3, do_sample=False, compile=compile) as tracer:
        cache = tracer.cache(modules=[lm.lm_head])
    same(cache["model.lm_head"].output, seen)


@both
def test_a_cache_of_one_invoke_and_of_the_batch(model: Any, compile: bool) -> None:
    with model.trace(compile=compile) as tracer:
        with tracer.invoke(ids(1)):
            first = tracer.cache(modules=[model.head])
        with tracer.invoke(ids(2)):
            second = tracer.cache(modules=[model.head])
    close(first["model.head"].output, model._module(ids(1)))
    close(second["model.head"].output, model._module(ids(2)))


# -- skipping ---------------------------------------------------------------------------------------------------------


@both
def test_a_skipped_layer_returns_what_it_is_given(model: Any, compile: bool) -> None:
    with model.trace(ids(), compile=compile):
        first = model.layers[0].output
        model.layers[1].skip(first)
        second = model.layers[1].output
        second = nnsight.save(second[0])
        out = model.output.save()
    module = model._module
    hidden = module.layers[0](module.embed(ids()))[0]
    same(second, hidden)
    same(out, module.head(module.norm(module.layers[2](hidden)[0])))


def test_a_skipped_layer_does_not_run(model: Any) -> None:
    layer = model._module.layers[1]
    weights = {name: value.clone() for name, value in layer.state_dict().items()}
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(torch.nan)
    try:
        with model.trace(ids()):
            model.layers[1].skip(model.layers[0].output)
            out = model.output.save()
    finally:
        layer.load_state_dict(weights)
    assert out.isfinite().all()


@both
def test_a_layer_of_a_language_model_is_skipped(lm: LanguageModel, compile: bool) -> None:
    with lm.trace(PARIS, compile=compile):
        first = lm.transformer.h[0].output
        lm.transformer.h[1].skip(first)
        second = lm.transformer.h[1].output.save()
        logits = lm.lm_head.output.save()
    _, seen = hooked(lm, PARIS)
    same(second, seen["transformer.h.0"])
    reference = Hooks(lm._module).output("transformer.h.1", lambda value: seen["transformer.h.0"])
    same(logits, reference(**encoded(PARIS)).logits)


@both
def test_a_skip_in_every_invoke(model: Any, compile: bool) -> None:
    with model.trace(compile=compile) as tracer:
        with tracer.invoke(ids(1)):
            model.layers[1].skip(model.layers[0].output)
            one = model.output.save()
        with tracer.invoke(ids(2)):
            first = model.layers[0].output
            model.layers[1].skip((first[0] * 2, first[1]))
            two = model.output.save()
    module = model._module
    for seed, factor, out in ((1, 1, one), (2, 2, two)):
        hidden = module.layers[0](module.embed(ids(seed)))[0] * factor
        close(out, module.head(module.norm(module.layers[2](hidden)[0])))


@both
def test_a_skip_in_one_of_several_invokes(model: Any, compile: bool) -> None:
    with pytest.raises(ValueError, match="skipped by some invokes"):
        with model.trace(compile=compile) as tracer:
            with tracer.invoke(ids(1)):
                model.layers[1].skip(model.layers[0].output)
            with tracer.invoke(ids(2)):
                model.output.save()


@both
def test_inside_a_skipped_layer_nothing_can_be_read(model: Any, compile: bool) -> None:
    with pytest.raises(OutOfOrderError):
        with model.trace(ids(), compile=compile):
            model.layers[1].skip(model.layers[0].output)
            model.layers[1].mlp.output.save()


@both
def test_a_layer_that_has_run_cannot_be_skipped(model: Any, compile: bool) -> None:
    with pytest.raises(OutOfOrderError):
        with model.trace(ids(), compile=compile):
            later = model.layers[2].output
            model.layers[1].skip(later)


# -- further names ----------------------------------------------------------------------------------------------------

SHAPES = {
    "simple": ({"transformer.h": "layers"}, "layers.1"),
    "from the root": ({".transformer.h": ".layers"}, "layers.1"),
    "every module of a name": ({"mlp": "feedforward"}, "transformer.h.1.feedforward"),
    "a whole path, to the root": ({".transformer.wte": ".embed"}, "embed"),
    "two names": ({".transformer": ["body", "backbone"]}, "backbone.h.1"),
    "several at once": ({"transformer.h": "layers", "mlp": "feedforward"}, "layers.1.feedforward"),
}


@pytest.mark.parametrize(("rename", "path"), SHAPES.values(), ids=SHAPES)
def test_every_shape_of_renaming(rename: Any, path: str) -> None:
    own = new_language_model(rename=rename)
    named: Any = own
    for part in path.split("."):
        named = named[int(part)] if part.isdigit() else getattr(named, part)
    with own.trace(PARIS, compile=False):
        found = named.output.save()
    with own.trace(PARIS, compile=False):
        by_path = own.get(named.path.removeprefix("model.")).output.save()
    same(found, hooked(own, PARIS)[1][named.path.removeprefix("model.")])
    same(by_path, found)


@both
def test_both_names_are_one_module(compile: bool) -> None:
    own = nnsight.NNsight(new_tower()._module, rename={"layers": "blocks", ".embed": ["wte", "words"]})
    own.compile(backend="eager")
    assert own.blocks is own.layers
    assert own.wte is own.embed and own.words is own.embed
    with own.trace(ids(), compile=compile):
        own.blocks[0].output[0][:] = 0
        old = own.layers[0].output[0].save()
        out = own.output.save()
    assert not old.any()
    same(out, hooked(own, ids(), layers__0=zero_hidden)[0])


def test_a_name_matches_whole_components_of_a_path() -> None:
    own = new_language_model(rename={"h": "blocks"})
    assert own.transformer.blocks is own.transformer.h
    assert not hasattr(own, "lm_blocksead")
    with pytest.raises(ValueError, match="rename"):
        new_language_model(rename={"ransformer.h": "layers"})


def test_one_program_for_two_architectures() -> None:
    """The use of further names: code written once for models whose parts are called differently."""
    one = new_language_model(rename={"transformer.h": "layers", "transformer.ln_f": "final_norm", ".lm_head": ".top"})
    two = nnsight.NNsight(new_tower()._module, rename={"norm": "final_norm", "head": "top"})
    for own, given in ((one, PARIS), (two, ids())):
        with own.trace(given, compile=False):
            hidden = own.layers[LAYERS - 1].output
            hidden = nnsight.save(hidden[0] if isinstance(hidden, tuple) else hidden)
            normed = own.final_norm.output.save()
            top = own.top.output.save()
        same(top, own.top._module(own.final_norm._module(hidden)))
