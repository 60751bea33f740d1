"""Cells from the command line: ``python -m tests.zoo --models gpt2,llama --features forward,stop --modes inductor``.

Prints one line for each cell and a summary; ends with 1 if a cell failed. ``--trace`` prints the tracebacks.
"""

from __future__ import annotations

import argparse
import gc
import logging
import sys
import time
import warnings
from collections import Counter

import torch

from nnsight import CONFIG

from .features import FEATURES
from .models import specimens
from .runner import MODES, Cell, Keeper, fits
from .table import record


def _chosen(given: str, known: list[str]) -> list[str]:
    names = [name.strip() for name in given.split(",")] if given else known
    unknown = [name for name in names if name not in known]
    if unknown:
        sys.exit(f"unknown: {', '.join(unknown)}; there are {', '.join(known)}")
    return names


def main() -> int:
    """Run the cells that were asked for."""
    for noisy in ("transformers", "torch._subclasses.fake_tensor", "nnsight.runtime"):
        logging.getLogger(noisy).setLevel(logging.CRITICAL)
    known = specimens()
    parser = argparse.ArgumentParser(prog="python -m tests.zoo", description=__doc__)
    parser.add_argument("--models", default="", help="names, with commas; all by default")
    parser.add_argument("--features", default="", help="likewise")
    parser.add_argument("--modes", default="", help=f"of {', '.join(MODES)}")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--failures", action="store_true", help="print failures only")
    parser.add_argument("--trace", action="store_true", help="print tracebacks")
    parser.add_argument("--record", action="store_true", help="keep the outcomes for the table in docs/compile.md")
    options = parser.parse_args()
    models = _chosen(options.models, list(known))
    modes = _chosen(options.modes, list(MODES))
    features = _chosen(options.features, list(FEATURES))
    CONFIG.APP.DEBUG = options.trace  # with all frames
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    cells: list[Cell] = []
    began = time.perf_counter()
    for name in models:
        keeper = Keeper(known[name], options.device)
        for mode in modes:
            for feature in features:
                if not fits(FEATURES[feature], known[name], mode):
                    continue
                cell = keeper.run(FEATURES[feature], mode)
                cells.append(cell)
                if not options.failures or cell.result == "FAIL":
                    print(cell, flush=True)
                if options.trace and cell.trace:
                    print(cell.trace, flush=True)
            keeper.close(mode)
            gc.collect()
        if options.record:
            record(cells)
    counts = Counter(cell.result.partition(":")[0] for cell in cells)
    print(f"{len(cells)} cells in {time.perf_counter() - began:.0f} s: {dict(counts)}")
    return 1 if counts["FAIL"] else 0


if __name__ == "__main__":
    sys.exit(main())
