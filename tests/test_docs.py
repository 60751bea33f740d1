"""The documents tell the truth: their code runs, and prints what they say.

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
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import nnsight.fx.driver
from nnsight import LanguageModel, NNsight
from nnsight.fx.lowering.backends import resolve_backend

from . import ROOT

DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
#: The documents, with a mark at those whose code runs in an environment of its own, or with the slow tests.
_MARKS = {"vllm": pytest.mark.vllm, "programs": pytest.mark.slow}
RUNNING = [pytest.param(path, marks=_MARKS.get(path.stem, ())) for path in DOCUMENTS]
LANGUAGES = {"python", "py", "text", "sh", "mermaid", "yaml"}  # py: code of other libraries, which is not run
OUTPUT = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
#: Beginnings of blocks that take more than 5 s to capture, by document; "" stands for all. By default they run eagerly, with the slow
#: tests compiled.
COSTLY = {"README.md": "with model.trace() as tracer:", "language.md": ""}

#: Those whose subject are compiled traces.
COMPILING = {"README", "compile", "compiler", "debugging", "language"}

pytestmark = pytest.mark.usefixtures("own_options")


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


@contextlib.contextmanager
def eagerly() -> Iterator[None]:
    """Run traces that do not choose eagerly, also those of compiled models."""
    choose = NNsight._driver

    def driver(model: Any, compile: Any, function: Any = None) -> Any:
        return choose(model, False if compile is None else compile, function)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NNsight, "_driver", driver)
        yield


def run_document(document: str, path: Path, costly: str | None = None) -> None:
    """Run the Python blocks of ``document``, compiled as parts of the file ``path``, and check what they print.

    Blocks that begin with ``costly`` run eagerly.
    """
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
        is_costly = costly is not None and block.text.startswith(costly)
        mode: AbstractContextManager[None] = eagerly() if is_costly else contextlib.nullcontext()
        with contextlib.redirect_stdout(printed), mode:
            exec(code, namespace)
        if block.output is not None:
            got = printed.getvalue()
            checker = doctest.OutputChecker()
            example = doctest.Example(block.text, block.output)
            assert checker.check_output(block.output, got, OUTPUT), (
                f"{path.name}:{block.line}: " + checker.output_difference(example, got, OUTPUT)
            )


@pytest.fixture
def _plain_torch(request: pytest.FixtureRequest) -> Iterator[None]:
    """Put back what a document may switch."""
    if request.node.get_closest_marker("vllm"):
        request.getfixturevalue("vllm_environment")
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


def test_blocks_have_known_languages_and_links_lead_somewhere() -> None:
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        for fence in fences(text):
            assert fence.language in LANGUAGES, f"{path.name}:{fence.line}: {fence.language!r}"
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
            assert target.startswith("https://") or (path.parent / target).exists(), f"{path.name}: {target}"


@pytest.mark.usefixtures("_plain_torch", "_quick_backend")
@pytest.mark.parametrize("path", RUNNING, ids=map(name_of, DOCUMENTS))
def test_code_runs_and_prints_what_is_said(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where documents write files
    folder = tmp_path / "scripts"  # in the working directory, processes that a document starts would import `vllm.py` as `vllm`
    folder.mkdir()
    run_document(path.read_text(encoding="utf-8"), folder / f"{path.stem}.py", COSTLY.get(path.name))


@pytest.mark.slow
@pytest.mark.usefixtures("_plain_torch")
@pytest.mark.parametrize("path", [path for path in DOCUMENTS if path.stem in COMPILING], ids=name_of)
def test_code_runs_with_the_backends_it_names(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_document(path.read_text(encoding="utf-8"), tmp_path / f"{path.stem}.py")


@pytest.mark.slow
def test_demo_program() -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tools.demo", "--backend", "aot_eager"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert "->' Rome' instead of' Paris'" in done.stdout
    assert "0 recordings, 0 compiles, 0 breaks" in done.stdout


def test_the_extractor_notices_a_wrong_output(tmp_path: Path) -> None:
    document = "# Title\n\n```python\nprint(1)\n```\n\n```text\n1\n```\n\nprose\n\n```sh\nmake\n```\n"
    found = [(fence.language, fence.line, fence.output) for fence in fences(document)]
    assert found == [("python", 4, "1\n"), ("text", 8, None), ("sh", 14, None)]
    run_document(document, tmp_path / "right.py")
    with pytest.raises(AssertionError, match="wrong.py:4"):
        run_document(document.replace("\n1\n", "\n2\n"), tmp_path / "wrong.py")


def test_listed_tests_exist() -> None:
    text = (ROOT / "docs" / "coverage.md").read_text(encoding="utf-8")
    listed = re.findall(r"`((?:\w+/)*test_\w+\.py)::(test_\w+)`", text)
    assert listed
    for file, name in listed:
        assert f"def {name}(" in (ROOT / "tests" / file).read_text(encoding="utf-8"), f"{file}::{name}"


# -- the table of models in docs/compile.md -----------------------------------------------------------------------

_SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
_GROUPED = _SMALL | {"num_key_value_heads": 2}
_GPT2 = {"vocab_size": 64, "n_positions": 64, "n_embd": 32, "n_layer": 1, "n_head": 4}
_T5 = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4}
_MAMBA = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "state_size": 4}

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
