"""The benchmarks run: what a change of the package breaks in them would be seen only when somebody measures again."""

from __future__ import annotations

import subprocess
import sys

import pytest

from . import ROOT

BENCHMARKS = ROOT / "benchmarks"

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("command", "printed"),
    [
        ("breaks.py --quick --backend eager", "a cut at every layer / eager with hooks"),
        ("overhead.py --quick --only tiny", "trace, 12 saves"),
        ("notebook.py --quick --cells every_layer generation", "second process / compiled"),
        ("remote.py --quick", "together_over_alone"),
        ("decode.py --quick --batches 2 --only steered", "compiled edit"),
        ("gpu.py --device cpu --shapes tiny --rounds 2 --tables capture,attribution --out /dev/null", "attribution patching"),
    ],
)
def test_a_quick_run_prints_figures_and_writes_none(command: str, printed: str) -> None:
    results = {file: file.stat().st_mtime_ns for file in (BENCHMARKS / "results").iterdir()}
    script, *options = command.split()
    run = subprocess.run([sys.executable, str(BENCHMARKS / script), *options], capture_output=True, text=True, timeout=550, check=False)
    assert run.returncode == 0, run.stderr
    assert printed in run.stdout
    assert {file: file.stat().st_mtime_ns for file in (BENCHMARKS / "results").iterdir()} == results
