"""The documents tell the truth: their code runs, prints what they say, and raises what they list.

The Python blocks of a document run in order, in one namespace. They are compiled from a real file in which each block
has the line numbers it has in the document, so blocks have source and tracebacks point into the document. A
``text`` fence right behind a Python block is what that block prints; ``...`` stands for anything.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import nnsight
import nnsight.fx.driver
from nnsight import LanguageModel, NNsight
from nnsight.fx.compat import resolve_backend

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
LANGUAGES = {"python", "text", "sh"}
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
@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_code_runs_and_prints_what_is_said(path: Path, tmp_path: Path) -> None:
    run_document(path.read_text(encoding="utf-8"), tmp_path / f"{path.stem}.py")


@pytest.mark.slow
@pytest.mark.usefixtures("_plain_torch")
@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
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


class Mistakes:
    """One method per row of the table; ``compiled`` says how its traces run."""

    def __init__(self, compiled: bool) -> None:
        self.compiled = compiled
        net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 2))
        self.model = NNsight(net, compile={"backend": "eager"})
        self.x = torch.ones(3, 4)

    def trace(self, *args: Any) -> Any:
        return self.model.trace(*args, compile=self.compiled)

    def value_was_missed(self) -> None:
        with self.trace(self.x):
            self.model[2].output.save()
            self.model[0].output.save()

    def was_not_provided(self) -> None:
        other = NNsight(torch.nn.Linear(4, 4))
        other._children["unused"] = self.model[1]
        with other.trace(self.x, compile=self.compiled):
            self.model[1].output.save()

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

    def body_on_the_line(self) -> None:
        with self.trace(self.x): self.model.output.save()  # fmt: skip  # noqa: E701

    def no_source(self) -> None:
        exec("with trace(x):\n    y = 1\n", {"trace": self.trace, "x": self.x})

    def no_with_statement(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.trace(self.x))

    def jump_out(self) -> Any:
        with self.trace(self.x):
            return self.model.output.save()

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

    def unknown_option(self) -> None:
        self.model.compile(backends="eager")

    def not_a_module(self) -> None:
        NNsight(lambda x: x)  # type: ignore[arg-type]


class CompiledMistakes(Mistakes):
    """Rows that only a compiled trace can raise."""

    def wrong_shape(self) -> None:
        with self.trace(self.x):
            self.model[0].output = torch.zeros(1, 8)

    def wrong_structure(self) -> None:
        with self.trace(self.x):
            self.model[0].output = (self.model[0].output,)

    def not_a_tensor(self) -> None:
        with self.trace(self.x):
            self.model[0].output = 3

    def constant(self) -> None:
        model = language_model()
        with model.trace("The movie was"):
            args, kwargs = model.transformer.h[0].attn.inputs
            model.transformer.h[0].attn.inputs = args, {**kwargs, "use_cache": 5}

    def opaque(self) -> None:
        model = language_model()
        with model.trace("The movie was"):
            model.output.past_key_values.get_seq_length()

    def fullgraph(self) -> None:
        model = NNsight(self.model._module, compile={"backend": "eager", "fullgraph": True})
        with model.trace(self.x):
            if model[1].output.mean() > 0:
                pass

    def never_computed(self) -> None:
        kept = []
        with contextlib.suppress(KeyError), self.trace(self.x):
            kept.append(self.model[0].output)
            raise KeyError("a mistake")
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
    "is on the line of its": "body_on_the_line",
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
    "cannot count from the end": "negative_step",
    "inside the block of a trace only": "skip_outside",
    "is skipped by some invokes": "skip_in_one",
    "got unknown options": "unknown_option",
    "NNsight wraps a": "not_a_module",
    "has shape": "wrong_shape",
    "another structure": "wrong_structure",
    "where the model has a tensor": "not_a_tensor",
    "as a constant": "constant",
    "a compiled trace cannot look inside": "opaque",
    "fullgraph=True": "fullgraph",
    "was never computed": "never_computed",
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
