"""The table of cells in docs/compile.md: ``python -m tests.zoo.table`` writes it.

A cell either works or is refused as :mod:`.refusals` says, and the tests hold it to that, so the table follows from what is declared.
"""

from __future__ import annotations

import sys
from pathlib import Path

from .features import FEATURES
from .models import specimens
from .refusals import Refusal, refusal_of
from .runner import MODES

PAGE = Path(__file__).parents[2] / "docs" / "compile.md"
BEGIN, END = "<!-- zoo: written by python -m tests.zoo.table -->", "<!-- end of zoo -->"


def table() -> str:
    """Return the table: a model in each row, a feature in each column, what is refused below."""
    notes: dict[str, int] = {}
    lines = [
        "| model | what it is | " + " | ".join(FEATURES) + " |",
        "|---|---" + "|---" * len(FEATURES) + "|",
    ]
    for name, specimen in specimens().items():
        cells = []
        for feature in FEATURES.values():
            if not feature.fits(specimen):
                cells.append("-")
                continue
            refused = {mode: refusal_of(name, feature.name, mode) for mode in MODES}
            numbers = sorted({notes.setdefault(_note(one, refused), len(notes) + 1) for one in refused.values() if one})
            cells.append(", ".join(map(str, numbers)) or "ok")
        lines.append(f"| {name} | {specimen.kind} | " + " | ".join(cells) + " |")
    lines += [""] + [f"{number}. {note}" for note, number in notes.items()] if notes else []
    return "\n".join(lines)


def _note(refusal: Refusal, refused: dict[str, Refusal | None]) -> str:
    modes = [mode for mode, one in refused.items() if one is refusal]
    where = "" if len(modes) == len(MODES) else f" ({', '.join(modes)})"
    return f"`{refusal.error}`: {refusal.reason}{where}"


def with_table(page: str) -> str:
    """Return ``page`` with the table between its two marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
    sys.exit(0)
