"""Many cases: ``python -m tests.fuzz --cases 20000``.

Each seed is a run of its own, so that seeds can be shared out among processes. A failing seed prints its
smallest program and the next seed goes on. ``--survey`` does not look for the smallest program; it prints all that fail.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

from .cases import LONG_BACKENDS, cases
from .runner import Case, Disagreement, run_case


def run_seed(
    number: int, count: int, backends: tuple[str, ...], survey: bool, backward: bool = False, stock: bool = False
) -> tuple[int, list[str]]:
    """Run about ``count`` blocks that ``number`` yields.

    Returns:
        How many ran, not counting those that only served to find a smaller program, and the messages of those that failed.
    """
    done, failures = 0, []
    failed = False

    @seed(number)
    @settings(
        max_examples=max(1, count),
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        print_blob=False,
        report_multiple_bugs=False,
        phases=[Phase.generate] if survey else [Phase.generate, Phase.shrink],
    )
    @given(case=cases(backends, backward, stock))
    def run(case: Case) -> None:
        nonlocal done, failed
        if not failed:
            if done >= count:
                return
            done += len(case.blocks)
        try:
            run_case(case)
        except Disagreement as error:
            if survey:
                failures.append(str(error))
                return
            failed = True
            raise

    try:
        run()
    except Disagreement as error:
        failures.append(str(error))
    return done, failures


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=20_000, help="blocks to run, shared among the seeds")
    parser.add_argument("--seeds", default="0:100", help="a range of seeds, the end excluded")
    parser.add_argument("--backends", default=",".join(LONG_BACKENDS), help="separated by commas; one that comes twice is drawn more")
    parser.add_argument("--survey", action="store_true", help="print each failing program as it is drawn")
    parser.add_argument("--backward", action="store_true", help="blocks with a backward pass only")
    parser.add_argument("--stock", action="store_true", help="models with a stock part, or that are a decoder, only")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)
    first, end = (int(part) for part in options.seeds.split(":"))
    total, failed, start = 0, 0, time.monotonic()
    for number in range(first, end):
        done, failures = run_seed(
            number,
            options.cases // (end - first),
            tuple(options.backends.split(",")),
            options.survey,
            options.backward,
            options.stock,
        )
        total, failed = total + done, failed + len(failures)
        for message in failures:
            print(f"{message}\n# seed {number}\n{'=' * 100}", flush=True)
        print(f"seed {number}: {total} blocks, {failed} failed, {time.monotonic() - start:.0f} s", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
