"""An engine whose compiled pieces are replayed, as CUDA graphs are, with everything in its graph: each request is as by plain hooks."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nnsight import LanguageModel

from .llama import ROOT, close

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("vllm_environment")]

PROMPTS = [[40, 41, 42, 43, 44], [300, 301]]


def by_hand(
    reference: LanguageModel, prompt: list[int], number: int, edit: Callable[[torch.Tensor], Any]
) -> tuple[list[int], torch.Tensor]:
    """Return six tokens that follow with the hidden state after a layer edited, and those after the last layer; by plain hooks."""
    layers, seen = reference._module.model.layers, []
    handles = [
        layers[number].register_forward_hook(lambda module, args, output: edit(output)),
        layers[3].register_forward_hook(lambda module, args, output: seen.append(output[0])),
    ]
    made = list(prompt)
    with torch.no_grad():
        for _ in range(6):
            made.append(int(reference._module(torch.tensor([made]), use_cache=False).logits[0, -1].argmax()))
    for handle in handles:
        handle.remove()
    return made[-6:], seen[-1]


def test_pieces_that_are_replayed_have_edits_functions_captures_and_stops(
    folder: Path, reference: LanguageModel, vector: torch.Tensor
) -> None:
    arguments = json.dumps([str(folder), PROMPTS, vector.tolist()])
    command = [sys.executable, "-m", "tests.vllm.replay", arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("found ")]
    found = json.loads(line.removeprefix("found "))
    wanted = [
        by_hand(reference, PROMPTS[0], 1, lambda hidden: hidden),
        by_hand(reference, PROMPTS[0], 1, lambda hidden: (hidden + vector).clamp(-5.0, 5.0)),
        by_hand(reference, PROMPTS[1], 2, lambda hidden: hidden + vector),
        by_hand(reference, PROMPTS[1], 2, lambda hidden: hidden),
    ]
    expected = [tokens for tokens, _ in wanted]
    assert expected[0] != expected[1] and expected[2] != expected[3]
    assert found["tokens"] == [expected, expected]
    for states in found["states"]:
        close(torch.tensor(states), wanted[3][1])
    assert found["counts"]["recorded"] > 10 and found["counts"]["replayed"] > 50, found["counts"]
