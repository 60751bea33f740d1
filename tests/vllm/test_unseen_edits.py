"""In-place edits that do not change the version of a tensor: through `.data`, NumPy and DLPack."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nnsight import LanguageModel
from nnsight.vllm import VLLM
from nnsight.vllm.worker.request_rows import RequestRows, RowView, is_same, ordinary

from .llama import GREEDY, OPTIONS, PROMPTS, close, states


def by_data(hidden: torch.Tensor) -> None:
    hidden.data[-1] += 3.0


def by_numpy(hidden: torch.Tensor) -> None:
    hidden.numpy()[-1] += 3.0


def by_dlpack(hidden: torch.Tensor) -> None:
    torch.from_dlpack(hidden)[-1] += 3.0


EDITS = [by_data, by_numpy, by_dlpack]


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("mode", [False, True])
def test_they_reach_the_rows_of_the_request(edit: Callable[[torch.Tensor], None], mode: bool) -> None:
    with torch.inference_mode(mode):
        whole = (torch.zeros(4, 2), None)
    with ordinary():
        view = RowView(RequestRows(1, 2, 4), "x", whole)
        version = view.value[0]._version
        edit(view.value[0])
        assert view.value[0]._version == version
        assert view.is_changed(view.value)
        assert view.put_back(view.value)[0] is whole[0]
    assert whole[0].tolist() == [[0, 0], [0, 0], [3, 3], [0, 0]]


def test_they_are_seen_in_values_of_earlier_steps() -> None:
    view = RowView(RequestRows(0, 1, 2), "x", torch.ones(2, 2), [torch.zeros(3, 2)])
    assert not view.is_changed(view.value)
    view.value.data[0] = 1.0
    assert view.is_changed(view.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool])
def test_equal_values_are_no_edit(dtype: torch.dtype) -> None:
    one = torch.tensor([[0.0, 1.0], [float("nan"), 1.0]]).to(dtype)
    other = one.clone()
    assert is_same(one, other)
    other[0, 0] = 1
    assert not is_same(one, other)


@pytest.mark.vllm
@pytest.mark.usefixtures("vllm_environment")
def test_they_have_effect_in_an_engine(folder: Path, reference: LanguageModel) -> None:
    model = VLLM(folder, **OPTIONS)
    ids = model.tokenizer(PROMPTS[0])["input_ids"]

    def edited(hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden.clone()
        hidden[:, -1] += 3.0
        return hidden

    *_, expected = states(reference, ids, {1: edited})
    with model.trace(**GREEDY) as tracer:
        found = {}.save()
        for edit in EDITS:
            with tracer.invoke(ids):
                edit(model.model.layers[1].residual)
                found[edit] = model.logits.output
        with tracer.invoke(ids):
            by_data(model.model.layers[1].output[0])
            found["output"] = model.logits.output
    for logits in found.values():
        close(logits, expected[-1:])
