"""How engines are made and end, in a process of their own: what is of the process is no other test's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .vllm_llama import GREEDY, OPTIONS, PROMPTS, save_tiny_llama

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("vllm_environment")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, vllm_environment: None) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("llama"))


def told(script: str, *given: Any, **environment: str) -> Any:
    """Run ``script`` with ``given``; return what it says in its last line, as JSON."""
    arguments = json.dumps([str(value) if isinstance(value, Path) else value for value in given])
    command = [sys.executable, "-c", script, arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=os.environ | environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


_ONE_ENDS = """
import gc, json, sys, weakref

from nnsight.modeling.vllm import VLLM

folder, options, prompt, sampling = json.loads(sys.argv[1])
first = VLLM(folder, **options, dispatch=True)
expected = list(first(prompt, **sampling).outputs[0].token_ids)
core = weakref.ref(first.engine.llm_engine.engine_core.engine_core)

from nnsight.modeling.vllm.worker import Worker

load_model = Worker.load_model


def collecting(self, *args, **kwargs):
    global first
    del first
    gc.collect()
    ended.append(core() is None)
    load_model(self, *args, **kwargs)


Worker.load_model, ended = collecting, []
second = VLLM(folder, **options)
second.dispatch()
Worker.load_model = load_model
found = list(second(prompt, **sampling).outputs[0].token_ids)
from vllm.distributed import model_parallel_is_initialized

del second
gc.collect()
print(json.dumps([ended, found == expected, len(found), model_parallel_is_initialized()]))
"""


def test_an_engine_that_ends_while_another_is_made_takes_nothing_from_it(folder: Path) -> None:
    assert told(_ONE_ENDS, folder, OPTIONS, PROMPTS[0], GREEDY) == [[True], True, 6, False]


_NONE_IS_LEFT = """
import gc, json, sys

from nnsight.modeling.vllm import VLLM

folder, options, prompt, sampling = json.loads(sys.argv[1])
first = VLLM(folder, **options, dispatch=True)
from nnsight.modeling.vllm.worker import Worker
from vllm.distributed import model_parallel_is_initialized

load_model = Worker.load_model


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
    assert told(_NONE_IS_LEFT, folder, OPTIONS, PROMPTS[0], GREEDY) == ["no such weights", False, 6]
