"""How engines are made and end: in processes of their own, whose state no other test shares."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nnsight.vllm import VLLM
from nnsight.vllm.worker.runner import choose_runner

from .llama import GREEDY, OPTIONS, PROMPTS, ROOT

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("vllm_environment")]


def last_line(script: str, *given: Any, **environment: str) -> Any:
    """Run ``script`` with ``given``; return the JSON of its last line."""
    arguments = json.dumps([str(value) if isinstance(value, Path) else value for value in given])
    command = [sys.executable, "-c", script, arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=os.environ | environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


_BEGIN = """
import gc, json, sys, weakref

from nnsight.vllm import VLLM

folder, options, prompt, sampling = json.loads(sys.argv[1])
"""

_FIRST = f"""{_BEGIN}
first = VLLM(folder, **options, dispatch=True)
expected = list(first(prompt, **sampling).outputs[0].token_ids)
core = weakref.ref(first.engine.llm_engine.engine_core.engine_core)

from nnsight.vllm.worker.worker import Worker
from vllm.distributed import model_parallel_is_initialized

load_model = Worker.load_model
"""

_ONE_ENDS = f"""{_FIRST}
def collecting(self, *args, **kwargs):
    global first
    del first
    gc.collect()
    ended.append(core() is None)
    load_model(self, *args, **kwargs)


Worker.load_model, ended = collecting, []
second = VLLM(folder, **options, dispatch=True)
Worker.load_model = load_model
found = list(second(prompt, **sampling).outputs[0].token_ids)
del second
gc.collect()
print(json.dumps([ended, found == expected, len(found), model_parallel_is_initialized()]))
"""


def test_an_engine_that_ends_while_another_is_made_takes_nothing_from_it(folder: Path) -> None:
    assert last_line(_ONE_ENDS, folder, OPTIONS, PROMPTS[0], GREEDY) == [[True], True, 6, False]


_NONE_IS_LEFT = f"""{_FIRST}
def failing(self, *args, **kwargs):
    global first
    del first
    gc.collect()
    raise OSError("no such weights")


Worker.load_model = failing
try:
    VLLM(folder, **options, dispatch=True)
except OSError as error:
    said = str(error)
Worker.load_model = load_model
left = model_parallel_is_initialized()
third = VLLM(folder, **options, dispatch=True)
print(json.dumps([said, left, len(third(prompt, **sampling).outputs[0].token_ids)]))
"""


def test_an_engine_that_cannot_be_made_leaves_no_groups_of_one_that_ended(folder: Path) -> None:
    assert last_line(_NONE_IS_LEFT, folder, OPTIONS, PROMPTS[0], GREEDY) == ["no such weights", False, 6]


_WITH_NUMBA = f"""import numba
{_BEGIN}
found = [len(VLLM(folder, **options)(prompt, **sampling).outputs[0].token_ids) for _ in range(2)]
print(json.dumps([*found, numba.njit(lambda x: x + 1)(2)]))
"""


def test_engines_are_made_where_numba_is_imported(folder: Path) -> None:
    assert last_line(_WITH_NUMBA, folder, OPTIONS, PROMPTS[0], GREEDY) == [6, 6, 3]


# -- what blocks cannot run with --------------------------------------------------------------------------------------

_CHOICE = "VLLM_USE_V2_MODEL_RUNNER"


@pytest.mark.parametrize(("given", "expected"), [(None, "0"), ("", "0"), ("0", "0"), ("1", "1")])
def test_the_first_model_runner_is_asked_for_unless_the_environment_says_which(
    monkeypatch: pytest.MonkeyPatch, given: str | None, expected: str
) -> None:
    """Where vLLM would choose the second by itself, too."""
    monkeypatch.setenv(_CHOICE, given or "")
    if given is None:
        monkeypatch.delenv(_CHOICE)
    choose_runner()
    assert os.environ[_CHOICE] == expected


@pytest.mark.parametrize("dispatch", [False, True])
def test_the_second_model_runner_is_tried_where_it_is_asked_for(folder: Path, monkeypatch: pytest.MonkeyPatch, dispatch: bool) -> None:
    """Here there is no Triton for CPUs, which vLLM says. `test_v2.py` has one."""
    monkeypatch.setenv(_CHOICE, "1")
    monkeypatch.setattr("vllm.config.vllm.HAS_TRITON", False)
    with pytest.raises(ValueError, match="Model Runner V2 requires Triton"):
        VLLM(folder, **OPTIONS, dispatch=dispatch)


@pytest.mark.parametrize("dispatch", [False, True])
def test_options_that_lead_to_the_second_model_runner_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, dispatch: bool
) -> None:
    """A watermark does, whatever the environment says."""
    monkeypatch.setenv(_CHOICE, "0")
    monkeypatch.setattr("vllm.config.vllm.HAS_TRITON", True)
    with pytest.raises(NotImplementedError, match="model runner V2 with a watermark.*Leave it out"):
        VLLM(folder, **OPTIONS, dispatch=dispatch, watermark_config={"key": 1})


@pytest.mark.parametrize(
    "options",
    [
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}},
        {"spec_method": "ngram"},
        {"spec_model": "drafts"},
        {"spec_tokens": 3},
    ],
)
def test_speculative_decoding_is_refused_with_the_reason(folder: Path, options: dict[str, Any]) -> None:
    with pytest.raises(NotImplementedError, match=f"VLLM.{next(iter(options))}=.* tokens that are discarded later.* Leave it out"):
        VLLM(folder, **OPTIONS, **options)


@pytest.mark.parametrize("dispatch", [False, True])
def test_models_that_bring_drafts_of_their_own_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, dispatch: bool
) -> None:
    """Some repositories name a draft model in their configuration, and vLLM uses it unasked."""
    from vllm.engine.arg_utils import EngineArgs

    create = EngineArgs.create_speculative_config

    def unasked(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.speculative_config = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
        return create(self, *args, **kwargs)

    monkeypatch.setattr(EngineArgs, "create_speculative_config", unasked)
    with pytest.raises(NotImplementedError, match=r"Speculative decoding \(method 'ngram'\) is not implemented: .*Leave out"):
        VLLM(folder, **OPTIONS, dispatch=dispatch)


# -- what it costs -----------------------------------------------------------------------------------------------------


def test_a_quick_run_of_the_benchmark_prints_figures_and_writes_none() -> None:
    benchmarks = ROOT / "benchmarks"
    results = {file: file.stat().st_mtime_ns for file in (benchmarks / "results").iterdir()}
    command = [sys.executable, str(benchmarks / "vllm_engine.py"), "--quick", "--shape", "tiny", "--only", "idle: captures"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=550, check=False)
    assert run.returncode == 0, run.stderr
    assert "idle: captures at all layers: tokens True, logprobs True" in run.stdout
    assert {file: file.stat().st_mtime_ns for file in (benchmarks / "results").iterdir()} == results
