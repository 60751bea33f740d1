"""``nnsight serve --openai`` as a process: with vectors and edits from files, beside the server of programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import requests
import torch

from nnsight import demo_model
from nnsight.cli import main
from nnsight.steering import SteeringVector

from ...serving import serving

PROMPT = "The Eiffel Tower is in the city of"
OPTIONS: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}


@pytest.mark.slow
def test_the_command_serves_a_model_with_edits_and_vectors(tmp_path: Path) -> None:
    model = demo_model(dispatch=True)
    direction = 4 * torch.randn(128, generator=torch.Generator().manual_seed(1))
    with model.edit() as (tracer, edited):
        for _ in tracer.iter[:]:
            edited.transformer.h[4].output[:] *= 1.5
    edited.export_edits(tmp_path / "edits.safetensors")
    vector = SteeringVector({3: direction}, "transformer.h")
    vector.save(tmp_path / "mood.safetensors")
    length = model.tokenizer(PROMPT, return_tensors="pt")["input_ids"].shape[1]
    due = [
        model.tokenizer.decode(one.generate(PROMPT, **OPTIONS)[0, length:], skip_special_tokens=True)
        for one in (edited, vector.apply(edited, 2.0))
    ]
    options = ["--openai", "--vectors", f"mood={tmp_path}/mood.safetensors", "--edits", f"{tmp_path}/edits.safetensors"]
    with serving(tmp_path / "log", "serve", "nnsight/demo", "--spool", tmp_path / "jobs", *options) as address:
        body: dict[str, Any] = {"model": "nnsight/demo", "prompt": PROMPT, "temperature": 0, "max_tokens": 5}
        steered = {**body, "vllm_xargs": {"nnsight_vector": "mood", "nnsight_scale": 2.0}}
        found = [requests.post(f"{address}/v1/completions", json=one, timeout=60).json()["choices"][0]["text"] for one in (body, steered)]
        assert found == due
        assert "nnsight/demo" in requests.get(f"{address}/status", timeout=5).text  # programs are served beside it


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--vectors", "mood=x"], "--vectors are for --openai"),
        (["--openai", "--ray"], "for models of this process"),
        (["--openai", "--vectors", "mood"], "give a name and a file"),
    ],
)
def test_options_that_make_no_sense(options: list[str], says: str, tmp_path: Path, capsys: Any) -> None:
    assert main(["serve", "nnsight/demo", "--spool", str(tmp_path), *options]) == 2
    assert says in capsys.readouterr().err
