"""Each error that docs/errors.md lists is raised, with its type and message.

The methods of :class:`Mistakes` are in the order of the rows of the document's tables, one for each row.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

import nnsight
from nnsight import DiffusionModel, LanguageModel, NNsight, TransformersModel, VisionLanguageModel
from nnsight.fx.lowering import background
from nnsight.intervention.backends.base import Backend
from nnsight.intervention.backends.remote import RemoteBackend
from nnsight.intervention.envoy import Envoy, eproperty
from nnsight.intervention.tracing.globals import Globals
from nnsight.modeling.mixins import LoadableMixin, MetaMixin
from nnsight.remote import LocalBackend, execute_payload
from nnsight.remote.client.client import Client
from nnsight.remote.server.serve import door_for

from . import ROOT
from .conftest import CACHE, Rows

pytestmark = pytest.mark.usefixtures("own_options")


class Layer(torch.nn.Module):
    """Has a part that never runs, returns a tuple, and calls a function, a module, a class and torch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)
        self.unused = torch.nn.Identity()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        hidden = torch.tanh(self.inner(x))
        if hidden.shape[0]:
            hidden = doubled(hidden)
        return hidden, Nothing().value


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x.mul(2)


class Nothing:
    value = None


def forward_of_a_string() -> NNsight:
    namespace: dict[str, Any] = {"torch": torch}
    text = "class Made(torch.nn.Module):\n    def forward(self, x):\n        return torch.tanh(x)\n"
    exec(compile(text, "<made>", "exec"), namespace)
    return NNsight(namespace["Made"]())


@functools.cache
def language_model() -> LanguageModel:
    """Return a model of one layer with the tokenizer of the demo."""
    config = transformers.GPT2Config(
        n_layer=1, n_embd=16, n_head=2, n_positions=64, vocab_size=1024, bos_token_id=None, eos_token_id=None, pad_token_id=0
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(nnsight.demo.path())
    return LanguageModel(transformers.GPT2LMHeadModel(config).eval(), tokenizer, compile={"backend": "eager"})


def only_compiled(mistake: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a mistake that only a compiled trace can raise."""
    mistake.only_compiled = True  # type: ignore[attr-defined]
    return mistake


class Models:
    """What mistakes are made with; ``compiled`` says how traces run."""

    def __init__(self, compiled: bool) -> None:
        self.compiled = compiled
        net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 2))
        self.model = NNsight(net, compile={"backend": "eager"})
        self.x = torch.ones(3, 4)
        self.layers = Rows(torch.nn.Sequential(Layer(), torch.nn.Identity()), compile={"backend": "eager"})

    def trace(self, *args: Any) -> Any:
        return self.model.trace(*args, compile=self.compiled)

    def call_in_one_graph(self, edited: NNsight) -> None:
        torch._dynamo.reset()
        torch.compile(lambda x: edited(x) + 1, backend="eager", fullgraph=True)(self.x)

    def skip_with(self, first: Any, second: Any) -> None:
        with self.layers.trace(compile=self.compiled) as tracer:
            with tracer.invoke(self.x):
                self.layers[0].skip(first)
            with tracer.invoke(self.x):
                self.layers[0].skip(second)

    def change_cache(self, change: Any) -> None:
        model = language_model()
        with model.trace(use_cache=True, compile=False) as tracer:
            with tracer.invoke("The movie was"):
                change(model.output.past_key_values)
            with tracer.invoke("The movie was"):
                pass

    def replace_gradient(self, value: Any) -> None:
        with self.trace(self.x):
            hidden = self.model[0].output.requires_grad_()
            with self.model.output.sum().backward():
                hidden.grad = value

    def export(self, name: str) -> Path:
        path = Path(os.environ["XDG_CACHE_HOME"]) / f"{name}.safetensors"
        self.model.export_edits(path)
        return path

    def sent(self, remote: str = "local") -> Any:
        return self.model.trace(self.x, compile=self.compiled, remote=remote)


class Mistakes(Models):
    """One method per row of the tables, in their order."""

    def value_was_missed(self) -> None:
        with self.trace(self.x):
            self.model[2].output.save()
            self.model[0].output.save()

    def was_not_provided(self) -> None:
        with self.layers.trace(self.x, compile=self.compiled):
            self.layers[0].unused.output.save()

    def outside_of_interleaving(self) -> None:
        self.model[0].output  # noqa: B018

    def no_input(self) -> None:
        model = language_model()
        with model.trace(compile=self.compiled):
            model.output.save()

    def wrong_shape(self) -> None:
        with self.trace(self.x):
            self.model[0].output = torch.zeros(3, 5)

    def tensor_for_tuple(self) -> None:
        with self.layers.trace(self.x, compile=False):
            self.layers[0].output = self.x

    def inputs_alone(self) -> None:
        with self.layers.trace(self.x, compile=False):
            self.layers[0].inputs = self.x

    def no_attribute(self) -> None:
        self.model.layers  # noqa: B018

    def out_of_range(self) -> None:
        self.model[9]

    def save_outside(self) -> None:
        nnsight.save(self.x)

    def no_source(self) -> None:
        exec("with trace(x):\n    y = 1\n", {"trace": self.trace, "x": self.x})

    def no_with_statement(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.trace(self.x))

    def jump_out(self) -> Any:
        with self.trace(self.x):
            return self.model.output.save()

    def misspelt_assignment(self) -> None:
        with self.trace(self.x):
            self.model[0].outputs = self.x

    def another_model(self) -> None:
        with self.layers.trace(self.x, compile=self.compiled):
            self.model[0].output.save()

    def not_a_module(self) -> None:
        NNsight(lambda x: x)  # type: ignore[arg-type]

    def unknown_option(self) -> None:
        self.model.compile(backends="eager")

    def options_for_a_trace(self) -> None:
        with self.model.trace(self.x, compile={"backend": "eager"}):  # type: ignore[arg-type]
            pass

    def options_of_a_plain_call(self) -> None:
        self.model.trace(self.x, trace=False, scan=True)

    def entered_twice(self) -> None:
        tracer = self.trace(self.x)
        with tracer:
            self.model.output.save()
        with tracer:
            self.model.output.save()

    def no_tokenizer(self) -> None:
        with LanguageModel(language_model()._module).trace("The movie was", compile=self.compiled):
            pass

    def empty_prompt(self) -> None:
        with language_model().trace("", compile=self.compiled):
            pass

    def no_pad_token(self) -> None:
        model = LanguageModel(language_model()._module, tokenizer=copy.deepcopy(language_model().tokenizer))
        model.tokenizer.pad_token = None
        with model.trace(["The movie was", "The"], compile=self.compiled):
            pass

    def nested_invoke(self) -> None:
        with self.trace() as tracer:
            with tracer.invoke(self.x):
                with tracer.invoke(self.x):
                    pass

    def negative_step(self) -> None:
        with self.trace(self.x) as tracer:
            for _ in tracer.iter[-1]:
                pass

    def skip_outside(self) -> None:
        self.model[0].skip(self.x)

    def no_steps(self) -> None:
        with self.trace(self.x) as tracer:
            for _ in tracer.iter:
                pass

    def negative_next(self) -> None:
        with self.trace(self.x):
            self.model[0].next(-1)

    def too_many_steps(self) -> None:
        with self.trace(self.x) as tracer:
            for _ in tracer.iter[:2]:
                self.model[0].output.save()

    def loop_over_nothing(self) -> None:
        with self.trace(self.x) as tracer:
            for _ in tracer.iter[:]:
                pass

    def skip_elsewhere(self) -> None:
        with self.trace(self.x):
            self.model.interleaver.current.skip("model.0.output", self.x)

    def barrier_outside(self) -> None:
        with self.trace() as tracer:
            tracer.barrier(2)()

    def two_inputs(self) -> None:
        with self.trace() as tracer:
            with tracer.invoke(self.x):
                pass
            with tracer.invoke(self.x):
                pass

    def no_barrier(self) -> None:
        with self.trace() as tracer:
            with tracer.invoke(self.x):
                hidden = self.model[0].output
            with tracer.invoke():
                self.model[0].output = hidden

    def options_differ(self) -> None:
        with language_model().trace(compile=self.compiled) as tracer:
            with tracer.invoke("The movie was", use_cache=True):
                pass
            with tracer.invoke("The movie was", use_cache=False):
                pass

    def labels_of_one(self) -> None:
        with language_model().trace(compile=self.compiled) as tracer:
            with tracer.invoke("The movie was", labels=[0.5]):
                pass
            with tracer.invoke("The movie was"):
                pass

    def skip_in_one(self) -> None:
        model = language_model()
        with model.trace(compile=self.compiled) as tracer:
            with tracer.invoke("The movie was"):
                model.transformer.h[0].mlp.skip(model.transformer.h[0].ln_2.output)
            with tracer.invoke("The movie was"):
                pass

    def other_rows(self) -> None:
        with self.layers.trace(compile=False) as tracer:
            with tracer.invoke(self.x):
                self.layers[0].output = (self.layers[0].output[0][:1], None)
            with tracer.invoke(self.x):
                pass

    def shorter_tuple(self) -> None:
        with self.layers.trace(compile=False) as tracer:
            with tracer.invoke(self.x):
                self.layers[0].output = (self.layers[0].output[0],)
            with tracer.invoke(self.x):
                pass

    def skip_with_other_rows(self) -> None:
        self.skip_with((self.x[:1], None), (self.x, None))

    def skip_with_other_structure(self) -> None:
        self.skip_with((self.x, None), self.x)

    def no_cache(self) -> None:
        self.change_cache(lambda cache: cache.layers.__setitem__(0, None))

    def shorter_cache(self) -> None:
        self.change_cache(lambda cache: cache.layers.pop())

    def other_size_in_cache(self) -> None:
        def cut(cache: Any) -> None:
            cache.layers[0].keys = cache.layers[0].keys[:, :, :1]

        self.change_cache(cut)

    def loss_without_gradient(self) -> None:
        with torch.no_grad(), self.trace(self.x):
            with self.model.output.sum().backward():
                pass

    def gradient_of_none(self) -> None:
        with self.trace(self.x):
            hidden = self.model[0].output.detach()
            with self.model.output.sum().backward():
                hidden.grad  # noqa: B018

    def gradient_elsewhere(self) -> None:
        other = torch.ones(1, requires_grad=True)
        with self.trace(self.x):
            with self.model.output.sum().backward():
                other.grad  # noqa: B018

    @only_compiled
    def gradient_of_one_graph(self) -> None:
        with self.trace(self.x):
            hidden, out = self.model[0].output.save(), self.model.output.save()
        with (hidden.sum() + out.sum()).backward():
            hidden.grad  # noqa: B018

    def gradient_of_patched_rows(self) -> None:
        with self.layers.trace(compile=False) as tracer:
            barrier = tracer.barrier(2)
            with tracer.invoke(self.x):
                hidden = self.layers[0].inner.output
                barrier()
            with tracer.invoke(self.x):
                barrier()
                self.layers[0].inner.output[:, 0] = hidden[:, 0]
                with self.layers[1].output[0].sum().backward():
                    hidden.grad  # noqa: B018

    @only_compiled
    def gradient_of_a_gradient(self) -> None:
        model = NNsight(torch.nn.Linear(4, 4), compile={"backend": "aot_eager"})
        with model.trace(self.x):
            loss = model.output.pow(3).sum().save()
        (gradient,) = torch.autograd.grad(loss, model.weight, create_graph=True)
        gradient.sum().backward()

    def output_in_backward(self) -> None:
        with self.trace(self.x):
            with self.model.output.sum().backward():
                self.model[0].output  # noqa: B018

    def gradient_by_number(self) -> None:
        self.replace_gradient(0)

    def gradient_by_another_shape(self) -> None:
        self.replace_gradient(torch.zeros(2))

    def edit_in_checkpoint(self) -> None:
        class Saving(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = torch.nn.Linear(4, 4)

            def forward(self, x: torch.Tensor) -> Any:
                return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)

        model = NNsight(Saving())
        with model.trace(self.x):
            model.inner.output[:] = 0

    def cache_of_one(self) -> None:
        with self.trace(self.x) as tracer:
            tracer.cache(modules=self.model[0])

    def cache_of_nothing(self) -> None:
        with self.trace(self.x) as tracer:
            tracer.cache(modules=["model.7"])

    def cache_of_a_module_that_did_not_run(self) -> None:
        with self.trace(self.x) as tracer:
            cache = tracer.cache()
            _ = self.model[0].output
            tracer.stop()
        cache["model.1"]

    def cache_behind_an_access(self) -> None:
        with self.trace(self.x) as tracer:
            _ = self.model.output
            tracer.cache()

    def scan_of_beams(self) -> None:
        with language_model().generate("The", max_new_tokens=2, num_beams=2, scan=True):
            pass

    def scan_of_a_function(self) -> None:
        with self.model.trace(self.x, fn=self.model, scan=True):
            pass

    def value_in_scan(self) -> None:
        with self.model.scan(self.x):
            self.model.output.sum().item()

    def nowhere(self) -> None:
        LanguageModel(ROOT / "docs")

    def loaded_with_options(self) -> None:
        LanguageModel(language_model()._module, dtype=torch.float16)

    def no_task_of_a_class(self) -> None:
        TransformersModel(transformers.GPT2Model(transformers.GPT2Config(n_layer=1, n_embd=16, n_head=2)))

    def no_task_of_a_folder(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            transformers.GPT2Config(architectures=["GPT2Model"]).save_pretrained(folder)
            TransformersModel(folder)

    def no_class_of_a_task(self) -> None:
        TransformersModel("nnsight/demo", task="audio-classification", config=transformers.GPT2Config(n_layer=1))

    def no_load(self) -> None:
        LoadableMixin("name")

    def no_load_meta(self) -> None:
        MetaMixin("name")

    def rename_nothing(self) -> None:
        NNsight(self.model._module, rename={"transformer.h": "layers"})

    def rename_several(self) -> None:
        NNsight(self.model._module, rename={torch.nn.Module: "child"})

    def rename_taken(self) -> None:
        NNsight(self.model._module, rename={"0": "forward"})

    def nothing_to_export(self) -> None:
        with self.model.edit():
            self.model[0].output[:] = 0
        self.model.export_edits()

    def not_exportable(self) -> None:
        thing = object()
        with self.model.edit(inplace=True):
            self.model[0].output[:] = hash(thing)
        self.model.export_edits()

    def nothing_to_import(self) -> None:
        self.model.import_edits("nothing")

    def edits_of_another_model(self) -> None:
        with self.model.edit(inplace=True) as model:
            model[2].output[:] = 0
        self.layers.import_edits(self.export("other"))

    def no_file_of_edits(self) -> None:
        path = Path(os.environ["NNSIGHT_CONFIG"]).with_name("other.safetensors")
        path.write_bytes(b"no edits")
        self.model.import_edits(path)

    def edits_of_another_library(self) -> None:
        folder = Path(os.environ["XDG_CACHE_HOME"]).parent
        (folder / "gone_library.py").write_text("def zero(x):\n    x[:] = 0\n")
        sys.path.insert(0, str(folder))
        try:
            zero = importlib.import_module("gone_library").zero
        finally:
            sys.path.remove(str(folder))
        with self.model.edit(inplace=True) as model:
            zero(model[0].output)
        path = self.export("library")
        del sys.modules["gone_library"]
        self.model.import_edits(path)

    def no_batch(self) -> None:
        model = language_model()
        with model.trace(compile=self.compiled) as tracer:
            with tracer.invoke("A cat", logits_to_keep=torch.tensor([0])):
                pass
            with tracer.invoke("A dog", logits_to_keep=torch.tensor([0])):
                pass

    def no_processor(self) -> None:
        model = VisionLanguageModel(language_model()._module)
        model._prepare_input("<image> what is this ?", images=[None])

    def image_nowhere(self) -> None:
        from .modeling.test_vision import IMAGES, llava

        with VisionLanguageModel(*llava()).trace("what is this ?", images=IMAGES[0], compile=False):
            pass

    def tensors_for_a_pipeline(self) -> None:
        from .modeling.pipelines import stable_diffusion

        DiffusionModel(stable_diffusion()).generate(torch.ones(1, 4, 8, 8))

    def image_for_a_text_pipeline(self) -> None:
        from .modeling.pipelines import stable_diffusion

        with DiffusionModel(stable_diffusion()).trace("a cat", strength=0.5):
            pass

    def no_class_of_pipelines(self) -> None:
        DiffusionModel("nowhere", automodel="StableDifusionPipeline")

    def no_operation(self) -> None:
        self.layers[0].source.torch_tan_0  # noqa: B018

    def operation_in_c(self) -> None:
        self.layers[0].source.torch_tanh_0.source  # noqa: B018

    def function_not_known_yet(self) -> None:
        class Choosing(torch.nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                chosen = doubled
                return chosen(x)

        list(NNsight(Choosing()).source.chosen_0.source)

    def operation_of_a_class(self) -> None:
        self.layers[0].source.Nothing_0.source  # noqa: B018

    def operation_of_a_module(self) -> None:
        self.layers[0].source.self_inner_0.source  # noqa: B018

    def no_text(self) -> None:
        forward_of_a_string().source  # noqa: B018

    def edited_file(self) -> None:
        text = "import torch\nclass Edited(torch.nn.Module):\n    def forward(self, x):\n        return torch.tanh(x)\n"
        path = Path(os.environ["XDG_CACHE_HOME"]).parent / "edited.py"
        path.write_text(text.replace("tanh", "relu"))
        namespace: dict[str, Any] = {}
        exec(compile(text, str(path), "exec"), namespace)
        NNsight(namespace["Edited"]()).source  # noqa: B018

    def uncounted(self) -> None:
        with self.layers.trace(self.x, compile=False):
            self.layers[0].output.save()
            getattr(self.layers[0].source, "doubled" + "_0").output.save()

    def no_such_option(self) -> None:
        nnsight.CONFIG.APP.DEBUGG = True

    def option_of_another_type(self) -> None:
        nnsight.CONFIG.APP.DEBUG = 1  # type: ignore[assignment]

    def broken_variable(self) -> None:
        os.environ["NNSIGHT_APP_DEBUG"] = "perhaps"
        try:
            nnsight.CONFIG.APP.DEBUG  # noqa: B018
        finally:
            del os.environ["NNSIGHT_APP_DEBUG"]

    def broken_file(self) -> None:
        Path(os.environ["NNSIGHT_CONFIG"]).write_text("{")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            nnsight.CONFIG.save()

    def broken_property(self) -> None:
        class Broken(Envoy):
            @eproperty(key="output")
            def broken(self) -> Any: ...

            @broken.preprocess
            def broken(self, value: Any) -> Any:
                return value.nothing

        model = NNsight(self.model._module, envoys=Broken)
        with model.trace(self.x, compile=False):
            model[0].broken  # type: ignore[attr-defined]  # noqa: B018

    def unbalanced(self) -> None:
        Globals.exit()

    def remote_number(self) -> None:
        self.model.trace(self.x, remote=1)  # type: ignore[arg-type]

    def remote_and_backend(self) -> None:
        self.model.trace(self.x, remote="local", backend=Backend())

    def blocking_here(self) -> None:
        self.model.trace(self.x, blocking=False)

    def nameless_remotely(self) -> None:
        self.model.trace(self.x, remote=True)

    def remote_call(self) -> None:
        nnsight.demo_model().generate("Hello", remote=True)

    def no_address(self) -> None:
        nnsight.demo_model().trace("Hello", remote="ftp://models.example.org")

    def no_id(self) -> None:
        RemoteBackend(job_id="the last one")

    def no_job(self) -> None:
        RemoteBackend("nnsight/demo")()

    def no_server(self) -> None:
        Client("http://127.0.0.1:9", patience=0.0).status()

    def open_to_all(self) -> None:
        door_for("0.0.0.0", api_keys=None, no_keys=False)

    def condition_sent(self) -> None:
        with self.sent("program"):
            if self.model[0].output.sum() > 0:
                self.model[2].output[:] = 0

    def size_of_a_selection(self) -> None:
        with self.sent("program"):
            len(self.model[0].output[self.model[0].output > 0])

    def selection_of_known_size(self) -> None:
        with self.sent():
            found = (self.model[0].output[self.model[0].output > 0] + torch.ones(2)).save()
        print(found)

    def too_many_values(self) -> None:
        with self.model.trace(self.x, backend=LocalBackend(self.model, cuts=1)):
            for module in self.model[0], self.model[2]:
                module.output.sum().item()

    def value_edited_between(self) -> None:
        with self.model.session(remote="local"):
            with self.model.trace(self.x):
                hidden = self.model[0].output
            hidden[0].zero_()
            with self.model.trace(self.x):
                self.model[0].output[:] = hidden

    def step_that_was_not(self) -> None:
        model = nnsight.demo_model()
        with model.session(remote="local"):
            with model.generate("The Eiffel Tower is in the city of", max_new_tokens=9, eos_token_id=14) as tracer:
                tokens = [model.lm_head.output[0, -1].argmax() for _ in tracer.iter[:8]]
            tokens[7].item()

    def bare_pass_sent(self) -> None:
        with self.sent():
            self.model.output.sum().backward()

    def pass_behind_no_grad_sent(self) -> None:
        with self.sent():
            with torch.no_grad():
                self.model[0].output[:] = 0
            with self.model.output.sum().backward():
                pass

    def gradient_behind_values_sent(self) -> None:
        with self.sent():
            hidden = self.model[0].output
            torch.linalg.svdvals(hidden)
            with self.model.output.sum().backward():
                hidden.grad.save()

    def generator_sent(self) -> None:
        with self.sent():
            torch.bernoulli(self.model[0].output.sigmoid(), generator=torch.Generator())

    def operator_sent(self) -> None:
        with self.sent("program"):
            torch.linalg.svd(self.model[0].output)

    def late_edit_sent(self) -> None:
        with self.sent():
            hidden, later = self.model[0].output, self.model[2].output
            hidden[:] = later.sum()

    def function_sent(self) -> None:
        with self.model.trace(self.x, fn=self.model._module, compile=self.compiled, remote="local"):
            self.model.output.save()

    def half_a_payload(self) -> None:
        execute_payload(self.model, b"half")

    def program_of_another(self) -> None:
        with self.model.trace(self.x, remote="program") as tracer:
            out = self.model[2].output.save()
        tracer.program.run(NNsight(torch.nn.Linear(4, 4)), self.x)

    def model_of_another_dtype(self) -> None:
        with self.model.trace(self.x, backend=LocalBackend(NNsight(copy.deepcopy(self.model._module).double()))):
            out = self.model[2].output.save()

    def computed_index(self) -> None:
        with self.sent():
            place = self.model[0].output.argmax().unsqueeze(0) + 1000
            row = self.model[0].output.index_select(0, place).save()

    @only_compiled
    def wrong_structure(self) -> None:
        with self.trace(self.x):
            self.model[0].output = (self.model[0].output,)

    @only_compiled
    def not_a_tensor(self) -> None:
        with self.trace(self.x):
            self.model[0].output = 3

    @only_compiled
    def constant(self) -> None:
        model = language_model()
        with model.trace("The movie was"):
            args, kwargs = model.transformer.h[0].attn.inputs
            model.transformer.h[0].attn.inputs = args, {**kwargs, "use_cache": 5}

    @only_compiled
    def one_of_several(self) -> None:
        class SelfAttention(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.attention = torch.nn.MultiheadAttention(4, 2, batch_first=True)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.attention(x, x, x)[0]

        model = NNsight(SelfAttention(), compile={"backend": "eager"})
        with model.trace(self.x[None]):
            model.attention.input = model.attention.input * 2

    @only_compiled
    def opaque(self) -> None:
        model = language_model()
        with model.trace("The movie was"):
            model.transformer.h[0].attn.inputs[1][CACHE].get_seq_length()

    @only_compiled
    def uncaptured(self) -> None:
        with self.layers.trace(self.x):
            self.layers.input.save()
            getattr(self.layers[0].source, "torch_tanh" + "_0").output.save()

    @only_compiled
    def fullgraph(self) -> None:
        model = NNsight(self.model._module, compile={"backend": "eager", "fullgraph": True})
        with model.trace(self.x):
            if model[1].output.mean() > 0:
                pass

    @only_compiled
    def too_many_captures(self) -> None:
        self.uncompiled_call(fullgraph=True)

    @only_compiled
    def uncompiled_call(self, fullgraph: bool = False) -> None:
        options = {"backend": "eager", "max_captures": 1, "fullgraph": fullgraph}
        model = NNsight(self.model._module, compile=options)
        for x in (self.x, self.x.clone().requires_grad_()):
            model(x)

    @only_compiled
    def call_under_a_dispatch_mode(self) -> None:
        with FlopCounterMode(display=False), self.model.trace(self.x):
            self.model.output.save()

    @only_compiled
    def call_under_a_function_mode(self) -> None:
        class Mode(TorchFunctionMode):
            def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                return function(*args, **(kwargs or {}))

        with Mode(), self.model.trace(self.x):
            self.model[0].output[:] = 0

    @only_compiled
    def uncompiled_graph(self) -> None:
        def backend(graph_module: Any, inputs: Any) -> Any:
            raise NotImplementedError("no such kernel")

        model = NNsight(self.model._module, compile={"backend": backend})
        with model.trace(self.x):
            model.output.save()

    @only_compiled
    def never_computed(self) -> None:
        kept = []
        with contextlib.suppress(KeyboardInterrupt), self.trace(self.x):
            kept.append(self.model[0].output)
            raise KeyboardInterrupt
        kept[0] + 1

    def trace_in_one_graph(self) -> None:
        def traced(x: torch.Tensor) -> torch.Tensor:
            with self.trace(x):
                out = self.model.output.save()
            return out

        torch.compile(traced, backend="eager", fullgraph=True)(self.x)

    def endless_edit_in_one_graph(self) -> None:
        with self.model.edit() as (tracer, edited):
            for _ in tracer.iter[:]:
                self.model[0].output = self.model[0].output * 2
        self.call_in_one_graph(edited)

    def operations_in_one_graph(self) -> None:
        with self.model.edit() as edited:
            self.model[0].source.F_linear_0.output[:] = 0
        self.call_in_one_graph(edited)

    def edited_model_in_an_edit(self) -> None:
        with NNsight(torch.nn.Linear(4, 4)).edit() as inner:
            inner.output[:] = 0
        with self.model.edit() as edited:
            self.model[0].input = inner(self.model[0].input)
        self.call_in_one_graph(edited)

    def stopping_edit(self) -> None:
        with self.model.edit() as (tracer, edited):
            tracer.stop()
        edited(self.x)

    @only_compiled
    def explain_a_number(self) -> None:
        nnsight.fx.explain(3)  # type: ignore[arg-type]

    @only_compiled
    def explain_with_arguments(self) -> None:
        with self.trace(self.x) as tracer:
            pass
        nnsight.fx.explain(tracer, self.x)

    @only_compiled
    def explain_too_early(self) -> None:
        with self.trace(self.x) as tracer:
            nnsight.fx.explain(tracer)

    @only_compiled
    def debug_dir_twice(self) -> None:
        with tempfile.TemporaryDirectory() as folder, nnsight.debug_dir(folder), nnsight.debug_dir(folder):
            pass

    @only_compiled
    def no_depyf(self) -> None:
        with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, "depyf", None)
            with nnsight.debug_dir(folder, bytecode=True):
                pass

    @only_compiled
    def wait_in_the_background(self) -> None:
        failed: list[BaseException] = []

        def wait() -> None:
            try:
                nnsight.fx.wait()
            except RuntimeError as error:
                failed.append(error)

        background.submit(wait)
        nnsight.fx.wait()
        raise failed[0]


def cases() -> Iterator[Any]:
    """Yield error, message, whether to compile and the method that makes the mistake, for each row and driver."""
    text = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)`: (.*?) \| .* \| .* \|$", text, re.MULTILINE)
    methods = [(name, method) for name, method in vars(Mistakes).items() if callable(method)]
    assert len(rows) == len(methods), "each row of docs/errors.md has a method of Mistakes at the same place"
    for (error, message), (name, method) in zip(rows, methods, strict=True):
        for compiled in (True,) if hasattr(method, "only_compiled") else (False, True):
            yield pytest.param(error, message, compiled, name, id=f"{name}-{'compiled' if compiled else 'eager'}")


@pytest.mark.parametrize(("error", "message", "compiled", "method"), list(cases()))
def test_listed_error_is_raised(error: str, message: str, compiled: bool, method: str) -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - the row says which
        getattr(Mistakes(compiled), method)()
    assert error in {kind.__name__ for kind in type(caught.value).__mro__}
    pattern = ".*".join(re.escape(part) for part in message.replace("`` ", "").replace(" ``", "").split("…"))
    assert re.search(pattern, str(caught.value), re.DOTALL), str(caught.value)
