"""Documented features that take a module of the package each: sources, lazy loading, scans, options, further model classes."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import nnsight
from nnsight import LanguageModel, NNsight, demo
from nnsight.intervention.envoy import Envoy

from .. import ROOT
from .guide import (
    LAYERS,
    PARIS,
    WIDTH,
    Hooks,
    both,
    close,
    encoded,
    hooked,
    ids,
    language_model,
    new_language_model,
    new_tower,
    same,
    tower,
)

PLAIN = {**os.environ, "TERM": "dumb", "NO_COLOR": "1", "PYTHON_BASIC_REPL": "1"}


# -- sources --------------------------------------------------------------------------------------------------------------


def attention_by_hand(layer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return query, weights and the input of the projection of one layer."""
    seen = hooked(tower(), ids())[1]
    x = seen["embed"] if layer == 0 else seen[f"layers.{layer - 1}"][0]
    query = tower()._module.layers[layer].attn.query(x)
    weights = torch.softmax(query @ x.transpose(1, 2), dim=-1)
    return query, weights, weights @ x


def test_a_printed_source_names_the_operations(model: Any) -> None:
    text = str(model.layers[0].attn.source)
    for name in ("self_query_0", "x_transpose_0", "torch_softmax_0", "self_project_0"):
        assert name in text
    line = next(line for line in text.splitlines() if "self_project_0" in line)
    assert "->" in line and "self.project(weights @ x)" in line
    assert "weights = torch.softmax" in text


def test_a_printed_operation_is_marked_in_its_surroundings(model: Any) -> None:
    text = str(model.layers[0].attn.source.self_project_0)
    marked = [line for line in text.splitlines() if "-->" in line]
    assert len(marked) == 1 and marked[0].rstrip().endswith("<--") and "self.project" in marked[0]
    assert "self_project_0" in text and "torch.softmax" in text


@both
def test_outputs_and_inputs_of_operations(model: Any, compile: bool) -> None:
    with model.trace(ids(), compile=compile):
        source = model.layers[1].attn.source
        query = source.self_query_0.output.save()
        given, options = source.torch_softmax_0.inputs
        given, options = nnsight.save(given), nnsight.save(options)
        weights = source.torch_softmax_0.output.save()
        mixed = source.self_project_0.input.save()
    expected = attention_by_hand(1)
    same((query, weights, mixed), expected)
    assert len(given) == 1 and options == {"dim": -1}
    same(torch.softmax(given[0], dim=-1), expected[1])


@both
def test_an_operation_is_edited_in_place(model: Any, compile: bool) -> None:
    with model.trace(ids(), compile=compile):
        model.layers[0].attn.source.self_project_0.output[:] = 0
        out = model.output.save()
    same(out, hooked(model, ids(), layers__0__attn=lambda value: (torch.zeros_like(value[0]), value[1]))[0])


@both
def test_an_operation_is_replaced(model: Any, compile: bool) -> None:
    uniform = torch.full((1, 5, 5), 0.2)
    with model.trace(ids(), compile=compile):
        model.layers[0].attn.source.torch_softmax_0.output = uniform
        mixed = model.layers[0].attn.source.self_project_0.input.save()
        out = model.output.save()
    x = hooked(model, ids())[1]["embed"]
    same(mixed, uniform @ x)
    attention = model._module.layers[0].attn
    same(out, hooked(model, ids(), layers__0__attn=lambda value: (attention.project(uniform @ x), uniform))[0])


@both
def test_an_input_of_an_operation_is_replaced(model: Any, compile: bool) -> None:
    with model.trace(ids(), compile=compile):
        operation = model.layers[0].attn.source.self_project_0
        operation.input = operation.input * 0
        out = model.layers[0].attn.output[0].save()
    same(out, model._module.layers[0].attn.project.bias.expand(1, 5, WIDTH))


@both
def test_attention_inside_a_transformers_model(lm: LanguageModel, compile: bool) -> None:
    with lm.trace(PARIS, compile=compile):
        operation = lm.transformer.h[0].attn.source.attention_interface_0
        args, kwargs = operation.inputs
        query = args[1].save()
        attended = operation.output[0].save()
        projected = lm.transformer.h[0].attn.source.self_c_proj_0.output.save()
    seen: dict[str, Any] = {}
    reference = Hooks(lm._module).output("transformer.h.0.attn.c_attn", lambda value: seen.update(qkv=value.clone()))
    reference.output("transformer.h.0.attn.c_proj", lambda value: seen.update(out=value.clone()))
    reference.input("transformer.h.0.attn.c_proj", lambda args, kwargs: seen.update(given=args[0].clone()))
    reference(**encoded(PARIS))
    same(query.transpose(1, 2).flatten(2), seen["qkv"].split(16, dim=2)[0])
    same(attended.flatten(2), seen["given"])
    same(projected, seen["out"])


@both
def test_operations_inside_an_operation(lm: LanguageModel, compile: bool) -> None:
    with lm.trace(PARIS, compile=compile):
        inner = lm.transformer.h[
            0
        ].attn.source.attention_interface_0.source.torch_nn_functional_scaled_dot_product_attention_0.output.save()
        outer = lm.transformer.h[0].attn.source.attention_interface_0.output[0].save()
    same(inner.transpose(1, 2), outer)
    assert inner.abs().sum() > 0


def test_attention_patterns_through_the_source() -> None:
    own = new_language_model()
    own._module.set_attn_implementation("eager")
    with own.trace(PARIS, compile=False):
        weights = own.transformer.h[0].attn.source.attention_interface_0.output[1].save()
    expected = own._module(**encoded(PARIS), output_attentions=True).attentions[0]
    same(weights, expected)


def test_a_submodule_has_its_own_source_not_one_inside_another() -> None:
    model = new_tower()
    with pytest.raises(Exception, match="(?i)module"):
        with model.trace(ids(), compile=False):
            model.layers[0].source.self_attn_0.source.torch_softmax_0.output.save()
    with model.trace(ids(), compile=False):
        weights = model.layers[0].attn.source.torch_softmax_0.output.save()
    same(weights, attention_by_hand(0)[1])


class Twice(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.exp(torch.neg(torch.exp(x)))


@both
def test_occurrences_of_one_callee_are_counted_inner_call_first(compile: bool) -> None:
    model = NNsight(torch.nn.Sequential(Twice()), compile={"backend": "eager"})
    x = torch.rand(2, 2)
    with model.trace(x, compile=compile):
        first = model[0].source.torch_exp_0.output.save()
        middle = model[0].source.torch_neg_0.output.save()
        second = model[0].source.torch_exp_1.output.save()
    same((first, middle, second), (x.exp(), -x.exp(), (-x.exp()).exp()))


def test_there_is_no_source_of_what_is_not_written_in_python() -> None:
    own = new_tower()
    with pytest.raises(Exception, match="(?i)softmax"):
        with own.trace(ids(), compile=False):
            own.layers[0].attn.source.torch_softmax_0.source.anything_0.output.save()


def test_an_operation_that_does_not_exist(model: Any) -> None:
    with pytest.raises(AttributeError, match="torch_softmaxx_0"):
        model.layers[0].attn.source.torch_softmaxx_0  # noqa: B018


def test_a_source_that_was_looked_at_changes_nothing() -> None:
    own = new_tower()
    str(own.layers[0].attn.source)
    same(own._module(ids()), tower()._module(ids()))
    with own.trace(ids(), compile=False):
        own.layers[0].attn.source.self_project_0.output[:] = 0
    same(own._module(ids()), tower()._module(ids()))


# -- lazy loading -------------------------------------------------------------------------------------------------------------


def test_a_model_is_loaded_when_it_first_runs() -> None:
    lazy = LanguageModel(demo.path())
    assert lazy.device.type == "meta" and not lazy.dispatched
    block, head = lazy.transformer.h[0], lazy.lm_head
    assert all(parameter.device.type == "meta" for parameter in lazy._module.parameters())
    with lazy.trace(PARIS):
        answer = lazy.lm_head.output[0, -1].argmax().save()
    assert lazy.dispatched and lazy.device.type == "cpu"
    assert lazy.tokenizer.decode(answer) == " Paris"
    assert lazy.transformer.h[0] is block and lazy.lm_head is head
    assert block._module is lazy._module.transformer.h[0]


def test_a_scan_does_not_load_the_weights() -> None:
    lazy = LanguageModel(demo.path())
    with lazy.scan(PARIS):
        size = nnsight.save(lazy.transformer.h[0].output.shape[-1])
    assert size == lazy.config.n_embd
    assert not lazy.dispatched and lazy.device.type == "meta"


def test_weights_are_loaded_on_request() -> None:
    lazy = LanguageModel(demo.path())
    lazy.dispatch()
    assert lazy.dispatched and lazy.device.type == "cpu"
    at_once = LanguageModel(demo.path(), dispatch=True)
    assert at_once.dispatched and at_once.device.type == "cpu"
    same(lazy._module(**encoded(PARIS)).logits, at_once._module(**encoded(PARIS)).logits)


def test_an_edit_of_a_lazy_model_holds_when_it_is_loaded() -> None:
    lazy = LanguageModel(demo.path())
    with lazy.edit() as edited:
        lazy.transformer.h[0].output[:] = 0
    with edited.trace(PARIS):
        hidden = edited.transformer.h[0].output.save()
    assert not hidden.any()


def test_loading_classes_of_ones_own() -> None:
    from nnsight.modeling.mixins import LoadableMixin, MetaMixin

    class Loaded(LoadableMixin):
        def _load(self, width: int) -> torch.nn.Module:
            torch.manual_seed(0)
            return torch.nn.Linear(width, width)

    made = Loaded(3)
    with made.trace(torch.ones(1, 3)):
        out = made.output.save()
    same(out, made._module(torch.ones(1, 3)))
    assert Loaded(made._module)._module is made._module

    class Lazy(MetaMixin):
        def _load_meta(self, width: int) -> torch.nn.Module:
            return torch.nn.Linear(width, width)

        def _load(self, width: int) -> torch.nn.Module:
            torch.manual_seed(0)
            return torch.nn.Linear(width, width)

    lazy = Lazy(3)
    assert lazy._module.weight.is_meta and not lazy.dispatched
    with lazy.trace(torch.ones(1, 3)):
        loaded = lazy.output.save()
    assert lazy.dispatched
    same(loaded, out)
    assert Lazy(3, dispatch=True).dispatched


# -- scans and validation -------------------------------------------------------------------------------------------------------


def test_sizes_stay_on_the_envoys_after_a_scan() -> None:
    own = new_tower()
    with own.scan(ids()):
        own.layers[0].output  # noqa: B018
    assert tuple(own.layers[0]._fake_output[0].shape) == (1, 5, WIDTH)
    assert tuple(own.layers[0].output[0].shape) == (1, 5, WIDTH)
    assert tuple(own.head.output.shape) == (1, 5, 11)
    assert tuple(own.layers[0].input.shape) == (1, 5, WIDTH)


def real_calls(model: Any) -> tuple[list[int], Any]:
    calls: list[int] = []

    def count(_: Any, args: tuple[Any, ...]) -> None:
        if type(args[0]) is torch.Tensor and not args[0].is_meta:
            calls.append(1)

    return calls, model._module.embed.register_forward_pre_hook(count)


def test_a_mistake_is_found_on_fakes_before_the_model_runs() -> None:
    own = new_tower()
    calls, handle = real_calls(own)
    with pytest.raises(IndexError):
        with own.trace(ids(), scan=True, validate=True, compile=False):
            own.layers[0].output[0][:, 1000] = 0
    assert not calls
    with own.trace(ids(), scan=True, validate=True, compile=False):
        own.layers[0].output[0][:] = 0
        out = own.output.save()
    assert calls == [1]
    handle.remove()
    same(out, hooked(own, ids(), layers__0=lambda value: (torch.zeros_like(value[0]), value[1]))[0])


def test_a_scan_before_a_trace_leaves_sizes() -> None:
    own = new_tower()
    with own.trace(ids(), scan=True, compile=False):
        out = own.output.save()
    same(out, own._module(ids()))
    assert tuple(own.norm.output.shape) == (1, 5, WIDTH)


# -- options --------------------------------------------------------------------------------------------------------------------


def run_program(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_options_have_their_documented_defaults_and_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    change = (
        "from nnsight import CONFIG\n"
        "print(CONFIG.APP.DEBUG, CONFIG.APP.CROSS_INVOKER, CONFIG.APP.PYMOUNT)\n"
        "CONFIG.APP.DEBUG = True\n"
        "CONFIG.set_default_api_key('secret')\n"
        "CONFIG.APP.REMOTE_LOGGING = False\n"
        "CONFIG.save()\n"
    )
    look = "from nnsight import CONFIG\nprint(CONFIG.APP.DEBUG, CONFIG.APP.REMOTE_LOGGING, CONFIG.API.KEY)"
    assert run_program(change, NNSIGHT_CONFIG=str(file)) == "False True True"
    assert json.loads(file.read_text())["APP"]["DEBUG"] is True
    assert run_program(look, NNSIGHT_CONFIG=str(file)) == "True False secret"


def test_without_mounting_there_is_the_function(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nnsight.CONFIG.APP, "PYMOUNT", False)
    with model.trace(ids(), compile=False):
        kept = nnsight.save([model.layers[0].output[0]])
    same(kept, [hooked(model, ids())[1]["layers.0"][0]])


# -- the machine's documented names -----------------------------------------------------------------------------------------------

SURFACE = {
    "nnsight.intervention.interleaver": (
        "T NNSIGHT_PREFIX IEnvoy eproperty Events Cancelation EarlyStopException SkipException Interleaver Mediator"
    ),
    "nnsight.intervention.envoy": "Envoy eproperty",
    "nnsight.intervention.hooks": ("requires_output requires_input requires_operation_output requires_operation_input"),
    "nnsight.intervention.batching": "Batchable BatchGroup Batcher",
    "nnsight.intervention.backends.base": "Backend",
    "nnsight.intervention.backends.execution": "ExecutionBackend",
    "nnsight.intervention.tracing.base": "Tracer",
    "nnsight.intervention.tracing.tracer": "InterleavingTracer ScanningTracer",
    "nnsight.intervention.tracing.editing": "EditingTracer",
    "nnsight.intervention.tracing.iterator": "IteratorTracer",
    "nnsight.intervention.tracing.backwards": "BackwardsTracer",
    "nnsight.intervention.tracing.invoker": "Invoker",
    "nnsight.intervention.tracing.globals": "Globals",
    "nnsight.intervention.tracing.util": "wrap_exception",
    "nnsight": "NNsight LanguageModel VisionLanguageModel DiffusionModel CONFIG Envoy save",
    "nnsight.modeling.mixins": "LoadableMixin MetaMixin",
}


@pytest.mark.parametrize(("module", "names"), SURFACE.items(), ids=SURFACE)
def test_documented_names_are_where_they_are_said_to_be(module: str, names: str) -> None:
    found = importlib.import_module(module)
    missing = [name for name in names.split() if not hasattr(found, name)]
    assert not missing


INTERLEAVER = (
    "mediators tracer batcher current defer_exceptions interleaving initialize cancel iterate_requester wrap_module handle "
    "check_dangling_mediators check_cache_full __enter__ __exit__ __deepcopy__"
)
MEDIATOR = (
    "intervention name idx info batch_group interleaver event_queue response_queue worker skip_container history user_cache "
    "hooks iteration_tracker iteration all_stop args cross_invoker original_globals deferred_exception transform lock alive "
    "frame MissedProviderError OutOfOrderError Value __enter__ __exit__ start cancel handle handle_value_event "
    "handle_swap_event handle_exception_event handle_barrier_event handle_end_event handle_skip_event respond send request "
    "swap stop skip end exception push pull set_user_cache remove_hooks __getstate__ __setstate__"
)
VALUE = "value lock has_value get wait put restore"


def test_members_of_the_interleaver_and_its_mediators() -> None:
    from nnsight.intervention.interleaver import Interleaver, Mediator

    mediator = Mediator(lambda: None, None, "mine", None, 1)
    run = Interleaver([mediator], None, None)
    assert [name for name in INTERLEAVER.split() if not hasattr(run, name)] == []
    assert [name for name in MEDIATOR.split() if not hasattr(mediator, name)] == []
    assert [name for name in VALUE.split() if not hasattr(Mediator.Value(), name)] == []


def test_kinds_of_events_and_exceptions() -> None:
    from nnsight.intervention.interleaver import Events, SkipException

    assert {event.name: event.value for event in Events} == {
        "VALUE": "value", "SWAP": "swap", "END": "end", "EXCEPTION": "exception", "SKIP": "skip", "BARRIER": "barrier",
    }  # fmt: skip
    assert SkipException(3).value == 3


# -- edits as files, and further forms -------------------------------------------------------------------------------------------


@both
def test_edits_are_exported_and_imported(tmp_path: Path, compile: bool) -> None:
    first, second = new_tower(), new_tower()
    with first.edit(inplace=True):
        first.layers[1].output[0][:, 1] = 0
    first.export_edits("mine", export_dir=tmp_path)
    second.import_edits("mine", export_dir=tmp_path)
    with second.trace(ids(), compile=compile):
        out = second.output.save()

    def zero_second(value: Any) -> Any:
        changed = value[0].clone()
        changed[:, 1] = 0
        return changed, value[1]

    same(out, hooked(second, ids(), layers__1=zero_second)[0])


@both
def test_an_edit_may_bind_the_tracer_and_the_copy(model: Any, compile: bool) -> None:
    with model.edit() as (tracer, edited):
        model.head.output[:] = 0
    assert type(edited) is type(model)
    with edited.trace(ids(), compile=compile):
        out = edited.output.save()
    assert not out.any()


def test_classes_of_envoys_by_component_of_a_path() -> None:
    class Own(Envoy):
        pass

    wrapped = NNsight(new_tower()._module, envoys={"mlp": Own, "attn.query": Own})
    assert type(wrapped.layers[0].mlp) is Own and type(wrapped.layers[1].attn.query) is Own
    assert type(wrapped.layers[0].attn) is Envoy


def test_a_function_is_traced_with_the_modules_of_a_model() -> None:
    own = new_tower()

    def both_ways(x: torch.Tensor) -> torch.Tensor:
        return own._module(x) + own._module(x.flip(1))

    with own.trace(ids(), fn=both_ways, compile=False) as tracer:
        first = own.head.output.save()
        second = own.head.next().output.save()
        result = tracer.result.save()
    same((first, second), (own._module(ids()), own._module(ids().flip(1))))
    same(result, first + second)


# -- rows elsewhere than in the first dimension ---------------------------------------------------------------------------------


class Turned(torch.nn.Module):
    """Works on ``[sequence, batch, width]`` inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)
        self.outer = torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.inner(x.transpose(0, 1)).transpose(0, 1))


@both
def test_rows_in_another_dimension(compile: bool) -> None:
    from ..conftest import Rows

    torch.manual_seed(0)
    wrapped = Rows(Turned(), compile={"backend": "eager"})
    one, two = torch.rand(1, 3, 4), torch.rand(2, 3, 4)
    with wrapped.trace(compile=compile) as tracer:
        with tracer.invoke(one):
            first = wrapped.inner.output.save()
            wrapped.inner.output[:] = 0
            out_one = wrapped.output.save()
        with tracer.invoke(two):
            second = wrapped.inner.output.save()
            out_two = wrapped.output.save()
    assert first.shape == (3, 1, 4)
    close(second, wrapped._module.inner(two.transpose(0, 1)))
    close(out_one, wrapped._module.outer(torch.zeros(1, 3, 4)))
    close(out_two, wrapped._module(two))


# -- prompts, notebooks, tracebacks -----------------------------------------------------------------------------------------------


def test_a_trace_typed_at_a_prompt() -> None:
    lines = [
        "import torch, nnsight",
        "model = nnsight.NNsight(torch.nn.Linear(2, 2))",
        "with model.trace(torch.ones(1, 2)):",
        "    model.output[:] = 7",
        "    out = model.output.save()",
        "",
        "print('found', out.sum().item())",
    ]
    pexpect = pytest.importorskip("pexpect")
    prompt = pexpect.spawn(sys.executable, ["-q"], encoding="utf-8", timeout=60, cwd=str(ROOT), env=PLAIN)
    for line in lines:
        prompt.expect(r"(>>>|\.\.\.) ")
        prompt.sendline(line)
    prompt.expect(r"found 14\.0")
    prompt.sendline("exit()")
    prompt.close()


def test_a_trace_in_a_notebook_cell() -> None:
    shell_module = pytest.importorskip("IPython.core.interactiveshell")
    shell = shell_module.InteractiveShell()
    shell.run_cell("import torch, nnsight\nmodel = nnsight.NNsight(torch.nn.Linear(2, 2))")
    shell.run_cell("with model.trace(torch.ones(1, 2)):\n    model.output[:] = 7\n    out = model.output.save()")
    same(shell.user_ns["out"], torch.full((1, 2), 7.0))


def test_a_printed_traceback_shows_the_users_lines_only(model: Any) -> None:
    try:
        with model.trace(ids(), compile=False):
            model.layers[0].output[0].save()
            model.layers[100].output.save()
    except IndexError as error:
        text = "".join(traceback.format_exception(error))
    assert "model.layers[100].output.save()" in text
    assert "/nnsight/runtime/" not in text and "/nnsight/tracing/" not in text


# -- further model classes ----------------------------------------------------------------------------------------------------------


def test_images_and_text() -> None:
    assert issubclass(nnsight.VisionLanguageModel, LanguageModel)
    own = new_language_model()
    model = nnsight.VisionLanguageModel(own._module, tokenizer=own.tokenizer)
    with model.trace(PARIS):
        logits = model.lm_head.output.save()
    same(logits, own._module(**encoded(PARIS)).logits)


def pipeline() -> Any:
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    denoiser = diffusers.UNet2DModel(
        sample_size=8, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(8, 8), norm_num_groups=4,
        down_block_types=("DownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    return diffusers.DDIMPipeline(denoiser.eval(), diffusers.DDIMScheduler(num_train_timesteps=10))


@pytest.mark.filterwarnings("ignore")
def test_denoising_step_by_step() -> None:
    pipe = pipeline()
    pipe.set_progress_bar_config(disable=True)
    model = nnsight.DiffusionModel(pipe)
    seen: list[torch.Tensor] = []
    handle = pipe.unet.register_forward_hook(lambda module, args, out: seen.append(out[0].clone()))
    options = {"num_inference_steps": 3, "output_type": "np"}
    expected = pipe(batch_size=1, generator=torch.Generator().manual_seed(0), **options).images
    handle.remove()
    with model.generate(batch_size=1, generator=torch.Generator().manual_seed(0), **options) as tracer:
        steps = [].save()
        for _ in tracer.iter[:3]:
            steps.append(model.unet.output[0].clone())
        result = tracer.result.save()
    close(steps, seen)
    close(torch.tensor(result.images), torch.tensor(expected))
    with model.generate(batch_size=1, generator=torch.Generator().manual_seed(0), **options) as tracer:
        for step in tracer.iter[:3]:
            if step < 2:
                model.unet.output[0][:] *= 1.5
        edited = tracer.result.save()
    assert not torch.equal(torch.tensor(edited.images), torch.tensor(expected))


def test_transformers_is_what_the_documents_assume() -> None:
    """Blocks of GPT-2 return a tensor, not a tuple; so the first element of their output is a row."""
    assert int(transformers.__version__.split(".")[0]) >= 5
    assert language_model()._module.transformer.h[0](torch.zeros(2, 3, 16)).shape == (2, 3, 16)
    assert len(language_model().transformer.h) == LAYERS
