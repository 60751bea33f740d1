"""An engine whose compiled pieces are replayed, as CUDA graphs are, with everything in its graph: each request is as by plain hooks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nnsight import LanguageModel

from .llama import ROOT, adding, close, generated, states

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("vllm_environment")]

PROMPTS = [[40, 41, 42, 43, 44], [300, 301]]


def test_pieces_that_are_replayed_have_edits_functions_captures_and_stops(
    folder: Path, reference: LanguageModel, vector: torch.Tensor
) -> None:
    arguments = json.dumps([str(folder), PROMPTS, vector.tolist()])
    command = [sys.executable, "-m", "tests.vllm.replay", arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("found ")]
    found = json.loads(line.removeprefix("found "))
    expected = [
        generated(reference, PROMPTS[0]),
        generated(reference, PROMPTS[0], {1: lambda hidden: (hidden + vector).clamp(-5.0, 5.0)}),
        generated(reference, PROMPTS[1], {2: adding(vector)}),
        generated(reference, PROMPTS[1]),
    ]
    assert expected[0] != expected[1] and expected[2] != expected[3]
    assert found["tokens"] == [expected, expected]
    for captured in found["states"]:
        close(torch.tensor(captured), states(reference, [*PROMPTS[1], *expected[3][:-1]])[3])
    assert found["counts"]["recorded"] > 10 and found["counts"]["replayed"] > 50, found["counts"]
