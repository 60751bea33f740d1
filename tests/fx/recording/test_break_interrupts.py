"""Ctrl-C while a compiled piece runs, or between two pieces: the process shows it, and goes on as if the trace had not been."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, signal, sys, torch
from nnsight import NNsight

armed = []

@torch.library.custom_op("interrupts::here", mutates_args=())
def here(x: torch.Tensor) -> torch.Tensor:
    if armed:
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(10**7): pass
    return x * 2

here.register_fake(torch.empty_like)

class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
    def forward(self, x):
        return torch.ops.interrupts.here(self.linear(x))

torch.manual_seed(0)
net = torch.nn.Sequential(Layer(), Layer(), Layer())
model = NNsight(net, compile={"backend": "eager"})
x = torch.ones(2, 4)
way, first = sys.argv[1], sys.argv[2] == "first"

def trace():
    with model.trace(x):
        hidden = model[1].linear.output
        if way != "whole" and hidden.sum() > -1e9:  # a cut
            if way == "between" and armed:
                os.kill(os.getpid(), signal.SIGINT)
                for _ in range(10**7): pass
            model[1].linear.output = hidden * 3
        out = model.output.save()
    return out

with torch.no_grad():
    if not first:
        trace()
    armed.append(1)
    try:
        trace()
        print("not interrupted")
    except KeyboardInterrupt:
        print("interrupted")
    armed.clear()
    hidden = net[1].linear(net[0](x)) * (1 if way == "whole" else 3)
    expected = net[2](hidden * 2)
    print(torch.equal(trace(), expected), torch.equal(model(x), net(x)), torch.is_grad_enabled())
    print(len(torch.overrides._get_current_function_mode_stack()), any("_call_impl" in m.__dict__ for m in net.modules()))
    armed.append(1)
    trace()
"""


@pytest.mark.slow
@pytest.mark.parametrize("first", ["first", "second"])
@pytest.mark.parametrize("way", ["whole", "cut", "between"])
def test_an_interrupt_by_a_signal(way: str, first: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, str(program), way, first],
        check=False,
        capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.stdout.splitlines() == ["interrupted", "True True False", "0 False"], done.stderr
    assert done.returncode != 0 and done.stderr.rstrip().splitlines()[-1].startswith("KeyboardInterrupt")
    assert "nnsight/runtime" not in done.stderr and f'"{program}"' in done.stderr
