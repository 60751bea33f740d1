"""What one process has compiled, the next one finds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters as torch_counters

from nnsight import NNsight

from ... import ROOT

PROGRAM = """
    import json
    import torch
    from torch._dynamo.utils import counters as torch_counters
    from nnsight import NNsight, fx
    from tests.fx.lowering.test_regions import Stack

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = NNsight(Stack(), compile=True)
    outs = []
    for rows in (4, 5, 6):
        x = torch.linspace(-1, 1, rows * 6).reshape(rows, 6)
        for block in (1, 2):
            with model.trace(x) as tracer:
                model.blocks[block].output[:, 0] += 2.0 * torch.ones(rows)
                out = model.output.save()
            outs.append(out.detach().flatten().view(torch.int32).tolist())
    outs.append(torch.autograd.grad(out.sum(), [model._module.embed.weight])[0].flatten().view(torch.int32).tolist())
    found = {"misses": torch_counters["inductor"]["fxgraph_cache_miss"], "outs": outs}
    found.update({name: getattr(fx.counters, name) for name in ("compiles", "loads", "reuses")})
    print(json.dumps(found))
"""


def run(folder: Path) -> dict[str, Any]:
    """Run the program in a process whose cache is in ``folder``."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder), "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {**found, "log": done.stderr}


@pytest.mark.slow
def test_what_is_lowered_can_be_cached() -> None:
    model = NNsight(torch.nn.Sequential(torch.nn.Linear(3, 3)), compile={"backend": "inductor"})
    before = dict(torch_counters["inductor"])
    with model.trace(torch.ones(2, 3)):
        model[0].output[:] *= 2
        model.output.sum().backward()
    found = torch_counters["inductor"]
    assert found["fxgraph_cache_bypass"] == before.get("fxgraph_cache_bypass", 0)
    cached = ("fxgraph_cache_miss", "fxgraph_cache_hit")
    assert sum(found[name] for name in cached) > sum(before.get(name, 0) for name in cached)


@pytest.mark.slow
def test_what_another_version_lowered_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(5, 3))

    def misses() -> int:
        before = torch_counters["aot_autograd"]["autograd_cache_miss"]
        with torch.no_grad(), NNsight(net, compile={"backend": "inductor"}).trace(torch.ones(2, 5)) as tracer:
            tracer.result.save()
        return torch_counters["aot_autograd"]["autograd_cache_miss"] - before

    misses()
    assert misses() == 0
    monkeypatch.setattr("nnsight.fx.lowering.backends._cache_tag", uuid.uuid4().hex)  # the folder of the cache may be an old one
    assert misses() > 0
    assert torch.compiler.config.cache_key_tag == ""


@pytest.mark.slow
def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    first = run(tmp_path)
    assert first["compiles"] > 0
    assert first["misses"] >= first["compiles"]
    second = run(tmp_path)
    assert second["compiles"] == second["misses"] == 0
    assert second["loads"] == first["compiles"] + first["loads"]
    assert second["reuses"] == first["reuses"]
    assert second["outs"] == first["outs"]
