"""The documents tell the truth: their code runs, prints what they say, and raises what they list.

The Python blocks of a document run in order, in one namespace. They are compiled from a real file in which each block
has the line numbers it has in the document, so blocks have source and tracebacks point into the document. A
``text`` fence right behind a Python block is what that block prints; ``...`` stands for anything.
"""

from __future__ import annotations

import contextlib
import doctest
import importlib
import io
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import nnsight
import nnsight.fx.driver
from nnsight import DiffusionModel, LanguageModel, NNsight, VisionLanguageModel
from nnsight.fx.lowering import background
from nnsight.fx.lowering.backends import resolve_backend
from nnsight.intervention.backends.base import Backend
from nnsight.intervention.backends.remote import RemoteBackend
from nnsight.intervention.envoy import Envoy, eproperty
from nnsight.intervention.tracing.globals import Globals
from nnsight.modeling.mixins import LoadableMixin, MetaMixin
from nnsight.remote import execute_payload
from nnsight.remote.client.client import Client
from nnsight.remote.server.serve import door_for

from . import ROOT
from .conftest import CACHE

DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
#: The documents, those whose code runs elsewhere being marked so.
RUNNING = [pytest.param(path, marks=pytest.mark.vllm) if path.stem == "vllm" else path for path in DOCUMENTS]
LANGUAGES = {"python", "text", "sh", "mermaid"}
OUTPUT = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@dataclass(frozen=True)
class Fence:
    """A fenced block of a document.

    Attributes:
        language: What follows the opening fence.
        line: Number of the first line of the text, from 1.
        text: What is between the fences.
        output: Text of the ``text`` fence right behind it, if any.
    """

    language: str
    line: int
    text: str
    output: str | None = None


def fences(document: str) -> list[Fence]:
    """Return the fenced blocks of ``document`` in order."""
    found: list[Fence] = []
    for match in re.finditer(r"^```(.*)\n((?:.*\n)*?)```[ \t]*\n?(\s*)", document, re.MULTILINE):
        language, text, _ = match.groups()
        line = document[: match.start(2)].count("\n") + 1
        behind = re.match(r"```text\n((?:.*\n)*?)```", document[match.end() :])
        found.append(Fence(language.strip(), line, text, behind.group(1) if behind else None))
    return found


def run_document(document: str, path: Path) -> None:
    """Run the Python blocks of ``document``, compiled as parts of the file ``path``, and check what they print."""
    blocks = [fence for fence in fences(document) if fence.language == "python"]
    lines = [""] * (document.count("\n") + 1)
    for block in blocks:
        for number, line in enumerate(block.text.splitlines(), block.line - 1):
            lines[number] = line
    path.write_text("\n".join(lines), encoding="utf-8")
    namespace: dict[str, Any] = {"__name__": path.stem, "__file__": str(path)}
    for block in blocks:
        printed = io.StringIO()
        code = compile("\n" * (block.line - 1) + block.text, str(path), "exec")
        with contextlib.redirect_stdout(printed):
            exec(code, namespace)
        if block.output is not None:
            got = printed.getvalue()
            checker = doctest.OutputChecker()
            example = doctest.Example(block.text, block.output)
            assert checker.check_output(block.output, got, OUTPUT), (
                f"{path.name}:{block.line}: " + checker.output_difference(example, got, OUTPUT)
            )


@pytest.fixture(autouse=True)
def _own_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Let nothing of the user's options, file or cache folder be seen or changed."""
    if request.node.get_closest_marker("vllm"):
        request.getfixturevalue("vllm_environment")
    for variable in list(os.environ):
        if variable.startswith(("NNSIGHT_", "NDIF_")):
            monkeypatch.delenv(variable)
    monkeypatch.setenv("NNSIGHT_CONFIG", str(tmp_path / "config.json"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(nnsight.CONFIG._file, "_values", None)


@pytest.fixture
def _plain_torch() -> Iterator[None]:
    """Put back what a document may switch."""
    grad_enabled = torch.is_grad_enabled()
    yield
    torch.set_grad_enabled(grad_enabled)
    torch._dynamo.reset()


@pytest.fixture
def _quick_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower every graph with the ``eager`` backend: what is captured, recorded and spliced stays the same."""

    def quick(**options: Any) -> Any:
        return resolve_backend(backend="eager", dynamic=options.get("dynamic"))

    monkeypatch.setattr(nnsight.fx.driver, "resolve_backend", quick)


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_every_block_has_a_known_language(path: Path) -> None:
    for fence in fences(path.read_text(encoding="utf-8")):
        assert fence.language in LANGUAGES, f"{path.name}:{fence.line}: {fence.language!r}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text(encoding="utf-8")):
        if not target.startswith("https://"):
            assert (path.parent / target).exists(), f"{path.name}: {target}"


@pytest.mark.usefixtures("_plain_torch", "_quick_backend")
@pytest.mark.parametrize("path", RUNNING, ids=map(name_of, DOCUMENTS))
def test_code_runs_and_prints_what_is_said(path: Path, tmp_path: Path) -> None:
    run_document(path.read_text(encoding="utf-8"), tmp_path / f"{path.stem}.py")


@pytest.mark.slow
@pytest.mark.usefixtures("_plain_torch")
@pytest.mark.parametrize("path", [path for path in DOCUMENTS if path.stem != "vllm"], ids=name_of)
def test_code_runs_with_the_backends_it_names(path: Path, tmp_path: Path) -> None:
    run_document(path.read_text(encoding="utf-8"), tmp_path / f"{path.stem}.py")


@pytest.mark.slow
def test_demo_program() -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "nnsight.demo", "--backend", "aot_eager"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert "->' Rome' instead of' Paris'" in done.stdout
    assert "0 recordings, 0 compiles, 0 breaks" in done.stdout


def test_extractor() -> None:
    document = "# Title\n\n```python\nprint(1)\n```\n\n```text\n1\n```\n\nprose\n\n```sh\nmake\n```\n"
    found = fences(document)
    assert [(fence.language, fence.line, fence.output) for fence in found] == [
        ("python", 4, "1\n"),
        ("text", 8, None),
        ("sh", 14, None),
    ]


def test_wrong_output_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="wrong.py:2"):
        run_document("```python\nprint(1)\n```\n```text\n2\n```\n", tmp_path / "wrong.py")


# -- docs/errors.md -----------------------------------------------------------------------------------------------


def rows() -> list[tuple[str, str]]:
    """Return the exceptions listed in ``docs/errors.md``, as type and message with ``…`` for what varies."""
    text = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    return re.findall(r"^\| `(\w+)`: (.*?) \| .* \| .* \|$", text, re.MULTILINE)


def language_model() -> LanguageModel:
    return nnsight.demo_model(compile={"backend": "eager"})


class Layer(torch.nn.Module):
    """Has a part that never runs, returns a tuple, and calls all kinds of things."""

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


class Rows(NNsight):
    """Joins the tensors of several invokes along their first dimension."""

    def _batch(self, batched: Any, x: torch.Tensor) -> Any:
        return (((x if batched is None else torch.cat([batched[0][0], x])),), {}), len(x)


def forward_of_a_string() -> NNsight:
    namespace: dict[str, Any] = {"torch": torch}
    text = "class Made(torch.nn.Module):\n    def forward(self, x):\n        return torch.tanh(x)\n"
    exec(compile(text, "<made>", "exec"), namespace)
    return NNsight(namespace["Made"]())


class Mistakes:
    """One method per row of the table; ``compiled`` says how its traces run."""

    def __init__(self, compiled: bool) -> None:
        self.compiled = compiled
        net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 2))
        self.model = NNsight(net, compile={"backend": "eager"})
        self.x = torch.ones(3, 4)
        self.layers = Rows(torch.nn.Sequential(Layer(), torch.nn.Identity()), compile={"backend": "eager"})

    def trace(self, *args: Any) -> Any:
        return self.model.trace(*args, compile=self.compiled)

    def trace_in_one_graph(self) -> None:
        def traced(x: torch.Tensor) -> torch.Tensor:
            with self.trace(x):
                out = self.model.output.save()
            return out

        torch.compile(traced, backend="eager", fullgraph=True)(self.x)

    def call_in_one_graph(self, edited: NNsight) -> None:
        torch._dynamo.reset()
        torch.compile(lambda x: edited(x) + 1, backend="eager", fullgraph=True)(self.x)

    def endless_edit_in_one_graph(self) -> None:
        with self.model.edit() as (tracer, edited):
            for _ in tracer.iter[:]:
                self.model[0].output = self.model[0].output * 2
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

    def remote_number(self) -> None:
        self.model.trace(self.x, remote=1)  # type: ignore[arg-type]

    def remote_and_backend(self) -> None:
        self.model.trace(self.x, remote="local", backend=Backend())

    def blocking_here(self) -> None:
        self.model.trace(self.x, blocking=False)

    def nameless_remotely(self) -> None:
        self.model.trace(self.x, remote=True)

    def remote_call(self) -> None:
        language_model().generate("Hello", remote=True)

    def no_address(self) -> None:
        language_model().trace("Hello", remote="ftp://models.example.org")

    def no_id(self) -> None:
        RemoteBackend(job_id="the last one")

    def no_job(self) -> None:
        RemoteBackend("nnsight/demo")()

    def no_server(self) -> None:
        Client("http://127.0.0.1:9", patience=0.0).status()

    def open_to_all(self) -> None:
        door_for("0.0.0.0", api_keys=None, no_keys=False)

    def value_was_missed(self) -> None:
        with self.trace(self.x):
            self.model[2].output.save()
            self.model[0].output.save()

    def was_not_provided(self) -> None:
        with self.layers.trace(self.x, compile=self.compiled):
            self.layers[0].unused.output.save()

    def another_model(self) -> None:
        with self.layers.trace(self.x, compile=self.compiled):
            self.model[0].output.save()

    def misspelt_assignment(self) -> None:
        with self.trace(self.x):
            self.model[0].outputs = self.x

    def wrong_shape(self) -> None:
        with self.trace(self.x):
            self.model[0].output = torch.zeros(3, 5)

    def tensor_for_tuple(self) -> None:
        with self.layers.trace(self.x, compile=False):
            self.layers[0].output = self.x

    def inputs_alone(self) -> None:
        with self.layers.trace(self.x, compile=False):
            self.layers[0].inputs = self.x

    def outside_of_interleaving(self) -> None:
        self.model[0].output  # noqa: B018

    def no_input(self) -> None:
        with self.trace():
            self.model.output.save()

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

    def options_for_a_trace(self) -> None:
        with self.model.trace(self.x, compile={"backend": "eager"}):  # type: ignore[arg-type]
            pass

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

    def nested_invoke(self) -> None:
        with self.trace() as tracer:
            with tracer.invoke(self.x):
                with tracer.invoke(self.x):
                    pass

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
            with tracer.invoke("The movie was", labels=[1, 2, 3]):
                pass
            with tracer.invoke("The movie was"):
                pass

    def negative_step(self) -> None:
        with self.trace(self.x) as tracer:
            for _ in tracer.iter[-1]:
                pass

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

    def options_of_a_plain_call(self) -> None:
        self.model.trace(self.x, trace=False, scan=True)

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

    def skip_outside(self) -> None:
        self.model[0].skip(self.x)

    def skip_in_one(self) -> None:
        model = language_model()
        with model.trace(compile=self.compiled) as tracer:
            with tracer.invoke("The movie was"):
                hidden = model.transformer.h[0].output
                model.transformer.h[1].skip(hidden)
            with tracer.invoke("The movie was"):
                pass

    # -- several inputs

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

    def skip_with(self, first: Any, second: Any) -> None:
        with self.layers.trace(compile=self.compiled) as tracer:
            with tracer.invoke(self.x):
                self.layers[0].skip(first)
            with tracer.invoke(self.x):
                self.layers[0].skip(second)

    def no_cache(self) -> None:
        self.change_cache(lambda cache: cache.layers.__setitem__(0, None))

    def shorter_cache(self) -> None:
        self.change_cache(lambda cache: cache.layers.pop())

    def other_size_in_cache(self) -> None:
        def cut(cache: Any) -> None:
            cache.layers[0].keys = cache.layers[0].keys[:, :, :1]

        self.change_cache(cut)

    def change_cache(self, change: Any) -> None:
        model = language_model()
        with model.trace(use_cache=True, compile=False) as tracer:
            with tracer.invoke("The movie was"):
                change(model.output.past_key_values)
            with tracer.invoke("The movie was"):
                pass

    # -- gradients, caches, scans

    def gradient_of_none(self) -> None:
        with torch.no_grad(), self.trace(self.x):
            hidden = self.model[0].output
            with self.model.output.requires_grad_().sum().backward():
                hidden.grad  # noqa: B018

    def gradient_elsewhere(self) -> None:
        other = torch.ones(1, requires_grad=True)
        with self.trace(self.x):
            with self.model.output.sum().backward():
                other.grad  # noqa: B018

    def output_in_backward(self) -> None:
        with self.trace(self.x):
            with self.model.output.sum().backward():
                self.model[0].output  # noqa: B018

    def gradient_by_number(self) -> None:
        self.replace_gradient(0)

    def gradient_by_another_shape(self) -> None:
        self.replace_gradient(torch.zeros(2))

    def replace_gradient(self, value: Any) -> None:
        with self.trace(self.x):
            hidden = self.model[0].output.requires_grad_()
            with self.model.output.sum().backward():
                hidden.grad = value

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

    def cache_of_a_module_that_had_run(self) -> None:
        with self.trace(self.x) as tracer:
            _ = self.model.output
            cache = tracer.cache()
        cache["model.0"]

    def scan_of_beams(self) -> None:
        with language_model().generate("The", max_new_tokens=2, num_beams=2, scan=True):
            pass

    def scan_of_a_function(self) -> None:
        with self.model.trace(self.x, fn=self.model, scan=True):
            pass

    def value_in_scan(self) -> None:
        with self.model.scan(self.x):
            self.model.output.sum().item()

    # -- loading

    def nowhere(self) -> None:
        LanguageModel(ROOT / "docs")

    def loaded_with_options(self) -> None:
        LanguageModel(language_model()._module, dtype=torch.float16)

    def no_load(self) -> None:
        LoadableMixin("name")

    def no_load_meta(self) -> None:
        MetaMixin("name")

    def rename_nothing(self) -> None:
        NNsight(self.model._module, rename={"transformer.h": "layers"})

    def rename_taken(self) -> None:
        NNsight(self.model._module, rename={"0": "forward"})

    # -- edits

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

    def export(self, name: str) -> Path:
        path = Path(os.environ["XDG_CACHE_HOME"]) / f"{name}.safetensors"
        self.model.export_edits(path)
        return path

    def edits_of_another_model(self) -> None:
        with self.model.edit(inplace=True) as model:
            model[2].output[:] = 0
        self.layers.import_edits(self.export("other"))

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

    def no_file_of_edits(self) -> None:
        path = Path(os.environ["NNSIGHT_CONFIG"]).with_name("other.safetensors")
        path.write_bytes(b"no edits")
        self.model.import_edits(path)

    # -- images

    def no_processor(self) -> None:
        model = VisionLanguageModel(language_model()._module)
        model._prepare_input("<image> what is this ?", images=[None])

    def image_nowhere(self) -> None:
        from .modeling.test_vision import IMAGES, llava

        with VisionLanguageModel(*llava()).trace("what is this ?", images=IMAGES[0], compile=False):
            pass

    def prompt_for_a_step(self) -> None:
        from .modeling.test_diffusion import build

        with DiffusionModel(build()).trace("a cat", compile=False):
            pass

    # -- operations

    def no_operation(self) -> None:
        self.layers[0].source.torch_tan_0  # noqa: B018

    def operation_in_c(self) -> None:
        self.layers[0].source.torch_tanh_0.source  # noqa: B018

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

    # -- configuration and extensions

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

    def unknown_option(self) -> None:
        self.model.compile(backends="eager")

    def not_a_module(self) -> None:
        NNsight(lambda x: x)  # type: ignore[arg-type]


    def sent(self) -> Any:
        return self.model.trace(self.x, compile=self.compiled, remote="local")

    def condition_sent(self) -> None:
        with self.sent():
            if self.model[0].output.sum() > 0:
                self.model[2].output[:] = 0

    def mask_sent(self) -> None:
        with self.sent():
            self.model[0].output[self.model[0].output > 0].save()

    def bare_pass_sent(self) -> None:
        with self.sent():
            self.model.output.sum().backward()

    def pass_behind_no_grad_sent(self) -> None:
        with self.sent():
            with torch.no_grad():
                hidden = self.model[0].output * 2
            with self.model.output.sum().backward():
                pass

    def generator_sent(self) -> None:
        with self.sent():
            torch.bernoulli(self.model[0].output.sigmoid(), generator=torch.Generator())

    def operator_sent(self) -> None:
        with self.sent():
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

    def computed_index(self) -> None:
        with self.sent():
            place = self.model[0].output.argmax().unsqueeze(0) + 1000
            row = self.model[0].output.index_select(0, place).save()


class CompiledMistakes(Mistakes):
    """Rows that only a compiled trace can raise."""

    def explain_a_number(self) -> None:
        nnsight.fx.explain(3)  # type: ignore[arg-type]

    def explain_with_arguments(self) -> None:
        with self.trace(self.x) as tracer:
            pass
        nnsight.fx.explain(tracer, self.x)

    def explain_too_early(self) -> None:
        with self.trace(self.x) as tracer:
            nnsight.fx.explain(tracer)

    def debug_dir_twice(self) -> None:
        with tempfile.TemporaryDirectory() as folder, nnsight.debug_dir(folder), nnsight.debug_dir(folder):
            pass

    def no_depyf(self) -> None:
        with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, "depyf", None)
            with nnsight.debug_dir(folder, bytecode=True):
                pass

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

    def gradient_of_one_graph(self) -> None:
        with self.trace(self.x):
            hidden, out = self.model[0].output.save(), self.model.output.save()
        with (hidden.sum() + out.sum()).backward():
            hidden.grad  # noqa: B018

    def wrong_structure(self) -> None:
        with self.trace(self.x):
            self.model[0].output = (self.model[0].output,)

    def not_a_tensor(self) -> None:
        with self.trace(self.x):
            self.model[0].output = 3

    def uncaptured(self) -> None:
        with self.layers.trace(self.x):
            self.layers[0].inner.output.save()
            getattr(self.layers[0].source, "torch_tanh" + "_0").output.save()

    def constant(self) -> None:
        model = language_model()
        with model.trace("The movie was"):
            args, kwargs = model.transformer.h[0].attn.inputs
            model.transformer.h[0].attn.inputs = args, {**kwargs, "use_cache": 5}

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

    def opaque(self) -> None:
        model = language_model()
        with model.trace("The movie was"):
            model.transformer.h[0].attn.inputs[1][CACHE].get_seq_length()

    def fullgraph(self) -> None:
        model = NNsight(self.model._module, compile={"backend": "eager", "fullgraph": True})
        with model.trace(self.x):
            if model[1].output.mean() > 0:
                pass

    def too_many_captures(self) -> None:
        self.uncompiled_call(fullgraph=True)

    def uncompiled_call(self, fullgraph: bool = False) -> None:
        options = {"backend": "eager", "max_captures": 1, "fullgraph": fullgraph}
        model = NNsight(self.model._module, compile=options)
        for x in (self.x, self.x.clone().requires_grad_()):
            model(x)

    def uncompiled_graph(self) -> None:
        def backend(graph_module: Any, inputs: Any) -> Any:
            raise NotImplementedError("no such kernel")

        model = NNsight(self.model._module, compile={"backend": backend})
        with model.trace(self.x):
            model.output.save()

    def never_computed(self) -> None:
        kept = []
        with contextlib.suppress(KeyboardInterrupt), self.trace(self.x):
            kept.append(self.model[0].output)
            raise KeyboardInterrupt
        kept[0] + 1


#: Method that makes each mistake, by a part of its message.
RAISED_BY: dict[str, str] = {
    "Value was missed for": "value_was_missed",
    "was not provided": "was_not_provided",
    "outside of interleaving": "outside_of_interleaving",
    "The model did not execute": "no_input",
    "has no attribute": "no_attribute",
    "is out of range": "out_of_range",
    "save() was called outside a trace": "save_outside",
    "cannot be read": "no_source",
    "No `with` statement was found": "no_with_statement",
    "would leave a block": "jump_out",
    "Tokenizer not found": "no_tokenizer",
    "it has no tokens": "empty_prompt",
    "during an active model execution": "nested_invoke",
    "Batching is not implemented": "two_inputs",
    "not associated with a value": "no_barrier",
    "differs between invokes": "options_differ",
    "Only some of the invokes have": "labels_of_one",
    "tracer.iter cannot count from the end": "negative_step",
    "inside the block of a trace only": "skip_outside",
    "is skipped by some invokes": "skip_in_one",
    "got unknown options": "unknown_option",
    "NNsight wraps a": "not_a_module",
    "has shape": "wrong_shape",
    "Replace a tuple by a tuple, a dict": "wrong_structure",
    "where the model has a tensor": "not_a_tensor",
    "as a constant": "constant",
    "changes one of several arguments": "one_of_several",
    "a compiled trace cannot look inside": "opaque",
    "fullgraph=True": "fullgraph",
    "This call cannot run compiled": "too_many_captures",
    "A call of the compiled model": "uncompiled_call",
    "In this compiled trace": "uncompiled_graph",
    "was never computed": "never_computed",
    "Assigning to it would do nothing": "misspelt_assignment",
    "a model that does not run here": "another_model",
    "a tensor instead of": "tensor_for_tuple",
    "is a pair of a tuple and a dict": "inputs_alone",
    "trace(compile=...) is True": "options_for_a_trace",
    "was entered before": "entered_twice",
    "is a plain call of the model": "options_of_a_plain_call",
    "Choose the steps of tracer.iter": "no_steps",
    "next() cannot count": "negative_next",
    "The loop ended at": "too_many_steps",
    "The loop over tracer.iter[...] has no end": "loop_over_nothing",
    "is skipped at its input": "skip_elsewhere",
    "A barrier can be called": "barrier_outside",
    "may not change how many rows": "other_rows",
    "each may replace its own rows only": "shorter_tuple",
    "each gives its own rows": "skip_with_other_rows",
    "of different structure for one module": "skip_with_other_structure",
    "…has a … in place of": "no_cache",
    "another number of entries": "shorter_cache",
    "none can change its size": "other_size_in_cache",
    "does not require one was read": "gradient_of_none",
    "does not flow through": "gradient_elsewhere",
    "of this tensor cannot be told": "gradient_of_one_graph",
    "in a backwards tracer": "output_in_backward",
    "A gradient was replaced by a": "gradient_by_number",
    "A gradient was replaced by one": "gradient_by_another_shape",
    "was edited inside an activation checkpoint": "edit_in_checkpoint",
    "takes a list of modules": "cache_of_one",
    "no module of this model has the path": "cache_of_nothing",
    "`return_dict_in_generate` depends": "scan_of_beams",
    "takes no scan= or validate=": "scan_of_a_function",
    "The cache has nothing": "cache_of_a_module_that_had_run",
    "A scan has sizes and no values": "value_in_scan",
    "could not be loaded": "nowhere",
    "is loaded already": "loaded_with_options",
    "how to load a model": "no_load",
    "its model without weights": "no_load_meta",
    "rename: there is no module": "rename_nothing",
    "choose another name": "rename_taken",
    "no edits to export": "nothing_to_export",
    "it cannot be exported": "not_exportable",
    "There are no exported edits": "nothing_to_import",
    "which this model (…) does not have": "edits_of_another_model",
    "It is not a file of exported edits": "no_file_of_edits",
    "which cannot be imported here": "edits_of_another_library",
    "Processor not found": "no_processor",
    "There are images": "image_nowhere",
    "`trace` runs one step": "prompt_for_a_step",
    "has no operation": "no_operation",
    "no Python source to look into": "operation_in_c",
    "only functions can be looked into": "operation_of_a_class",
    "calls a module": "operation_of_a_module",
    "has no source text": "no_text",
    "The file of": "edited_file",
    "cannot be served in this run": "uncounted",
    "is not in the captured graph": "uncaptured",
    "CONFIG.… has no option": "no_such_option",
    "CONFIG.… is of type": "option_of_another_type",
    "it is not used": "broken_variable",
    "Nothing was saved": "broken_file",
    "could not be made of the value": "broken_property",
    "Globals.exit()": "unbalanced",
    "cannot be part of a graph of torch.compile": "trace_in_one_graph",
    "loops over more steps": "endless_edit_in_one_graph",
    "with edits of its own": "edited_model_in_an_edit",
    "no output to return": "stopping_edit",
    "takes a tracer, as in": "explain_a_number",
    "takes a tracer alone": "explain_with_arguments",
    "whose trace has not run": "explain_too_early",
    "Graphs are being written to": "debug_dir_twice",
    "decompiles the bytecode": "no_depyf",
    "fx.wait() was called by": "wait_in_the_background",
    "remote= is True": "remote_number",
    "not both": "remote_and_backend",
    "blocking=False is for": "blocking_here",
    "was not loaded by name": "nameless_remotely",
    "needs a block": "remote_call",
    "not the address of a server": "no_address",
    "not the id of a job": "no_id",
    "no job yet": "no_job",
    "It was not possible to": "no_server",
    "could run jobs here": "open_to_all",
    "and they are where the model runs": "condition_sent",
    "returns depends on values": "mask_sent",
    "A bare": "bare_pass_sent",
    "A backward pass cannot be sent": "pass_behind_no_grad_sent",
    "A generator of your own": "generator_sent",
    "There is no operator": "operator_sent",
    "is edited in place after": "late_edit_sent",
    "can be sent": "function_sent",
    "The payload is shorter": "half_a_payload",
    "…this … has no": "program_of_another",
    "an index points outside": "computed_index",
}


def cases() -> Iterator[Any]:
    """Yield error, message, whether to compile and the method that makes the mistake, for each row and driver."""
    for error, message in rows():
        for method in (name for part, name in RAISED_BY.items() if part in message):
            for compiled in (False, True) if hasattr(Mistakes, method) else (True,):
                name = f"{method}-{'compiled' if compiled else 'eager'}"
                yield pytest.param(error, message, compiled, method, id=name)


@pytest.mark.parametrize(("error", "message", "compiled", "method"), list(cases()))
def test_listed_error_is_raised(error: str, message: str, compiled: bool, method: str) -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - which one is what the table says
        getattr(CompiledMistakes(compiled), method)()
    assert error in {kind.__name__ for kind in type(caught.value).__mro__}
    pattern = ".*".join(re.escape(part) for part in message.replace("`` ", "").replace(" ``", "").split("…"))
    assert re.search(pattern, str(caught.value), re.DOTALL), str(caught.value)


def test_every_mistake_is_listed() -> None:
    messages = [message for _, message in rows()]
    for part in RAISED_BY:
        assert sum(part in message for message in messages) == 1, part
    for message in messages:
        assert sum(part in message for part in RAISED_BY) == 1, message


def test_listed_tests_exist() -> None:
    text = (ROOT / "docs" / "coverage.md").read_text(encoding="utf-8")
    listed = re.findall(r"`(test_\w+\.py)::(test_\w+)`", text)
    assert listed
    for file, name in listed:
        assert f"def {name}(" in (ROOT / "tests" / file).read_text(encoding="utf-8"), f"{file}::{name}"


# -- the table of models in docs/compile.md -----------------------------------------------------------------------

_SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
_GROUPED = _SMALL | {"num_key_value_heads": 2}
_GPT2 = {"vocab_size": 64, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
_T5 = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
_MAMBA = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}

#: Name of the configuration's class, and a small configuration, by class of model.
CONFIGURATIONS: dict[str, tuple[str, dict[str, int]]] = {
    "GPT2LMHeadModel": ("GPT2Config", _GPT2),
    "GPTNeoXForCausalLM": ("GPTNeoXConfig", _SMALL),
    "LlamaForCausalLM": ("LlamaConfig", _GROUPED),
    "MistralForCausalLM": ("MistralConfig", _GROUPED),
    "MixtralForCausalLM": ("MixtralConfig", _GROUPED | {"num_local_experts": 4}),
    "Qwen2ForCausalLM": ("Qwen2Config", _GROUPED),
    "Qwen3ForCausalLM": ("Qwen3Config", _GROUPED | {"head_dim": 8}),
    "Gemma2ForCausalLM": ("Gemma2Config", _GROUPED | {"head_dim": 8}),
    "Gemma3ForCausalLM": ("Gemma3TextConfig", _GROUPED | {"head_dim": 8}),
    "BertForMaskedLM": ("BertConfig", _SMALL),
    "T5ForConditionalGeneration": ("T5Config", _T5),
    "MambaForCausalLM": ("MambaConfig", _MAMBA),
}


def listed_models() -> list[str]:
    text = (ROOT / "docs" / "compile.md").read_text(encoding="utf-8")
    table = text[text.index("| family | class | graphs |") :]
    return re.findall(r"`(\w+(?:LM|HeadModel|Generation))`", table)


@pytest.mark.slow
@pytest.mark.usefixtures("_plain_torch")
@pytest.mark.parametrize("name", listed_models())
def test_listed_model_is_one_graph(name: str) -> None:
    configuration, options = CONFIGURATIONS[name]
    module = getattr(transformers, name)(getattr(transformers, configuration)(**options)).eval()
    model = LanguageModel(module, compile={"backend": "eager"})
    torch.set_grad_enabled(False)
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
    decoder = {"decoder_input_ids": ids} if module.config.is_encoder_decoder else {}
    with model.trace(ids, **decoder) as tracer:
        model.output.logits.save()
    assert tracer.report.graphs == 1
    assert not tracer.report.breaks
