"""Inductor knows which inputs are parameters: a CUDA graph copies all others at each call."""

from __future__ import annotations

import pytest
import torch
from torch._functorch import config as functorch_config

from nnsight import NNsight


@pytest.mark.parametrize("grad", [False, True])
def test_parameters_of_the_model_are_known_and_the_rest_is_not(lowered: list[tuple[int, int]], grad: bool) -> None:
    model = NNsight(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4).eval()), compile={"regions": False})
    vector, x = torch.ones(4), torch.ones(2, 4)
    with functorch_config.patch(enable_autograd_cache=False), torch.set_grad_enabled(grad), model.trace(x):
        model[0].output[:] = model[0].output + vector
        model.output.save()
    # A weight and a bias of each module and the statistics of the second one; the input and the vector are other tensors in another call.
    assert lowered == [(8, 6)]
