"""The table of cells in docs/compile.md, and the outcomes it is made of: ``python -m tests.zoo.table`` writes it.

``python -m tests.zoo --record`` keeps the outcome of each cell in ``outcomes.json``. A cell that was never run is in neither.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path

from .. import ROOT
from .features import FEATURES
from .models import specimens
from .runner import MODES, Cell

PAGE = ROOT / "docs" / "compile.md"
OUTCOMES = Path(__file__).with_name("outcomes.json")
BEGIN, END = "<!-- zoo: written by python -m tests.zoo.table -->", "<!-- end of zoo -->"

#: Letters of the modes in the table.
LETTERS = {
    "eager": "e", "aot_eager": "a", "inductor": "i", "whole": "w",
    "program": "p", "file": "f", "bound": "b", "baked": "h",
}

#: Outcomes by model, feature and mode.
Outcomes = dict[str, dict[str, dict[str, str]]]


def outcomes() -> Outcomes:
    """Return what was recorded."""
    found: Outcomes = json.loads(OUTCOMES.read_text()) if OUTCOMES.exists() else {}
    return found


def record(cells: Iterable[Cell]) -> None:
    """Keep the outcomes of cells, in place of earlier ones."""
    kept = outcomes()
    for cell in cells:
        result = cell.result if cell.result != "FAIL" else f"fails: {cell.detail.splitlines()[0][:160]}"
        kept.setdefault(cell.model, {}).setdefault(cell.feature, {})[cell.mode] = result
    ordered = {
        model: {feature: kept[model][feature] for feature in FEATURES if feature in kept[model]}
        for model in specimens()
        if model in kept
    }
    lines = [f"{json.dumps(model)}: {json.dumps(features)}" for model, features in ordered.items()]
    OUTCOMES.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def table() -> str:
    """Return the table: a model in each row, a feature in each column, and below it the reasons of what does not work."""
    kept, notes = outcomes(), dict[str, int]()
    lines = [
        "| model | what it is | " + " | ".join(FEATURES) + " |",
        "|---|---" + "|---" * len(FEATURES) + "|",
    ]
    for name, specimen in specimens().items():
        cells = []
        for feature in FEATURES.values():
            found = kept.get(name, {}).get(feature.name, {})
            worked = "".join(LETTERS[mode] for mode in MODES if found.get(mode) == "ok")
            others = sorted(f"{text} ({mode})" for mode, text in found.items() if text != "ok")
            numbers = [str(notes.setdefault(note, len(notes) + 1)) for note in others]
            cells.append(" ".join([worked, *numbers]).strip() if feature.fits(specimen) else "-")
        lines.append(f"| {name} | {specimen.kind} | " + " | ".join(cells) + " |")
    lines += [""] + [f"{number}. {note}" for note, number in notes.items()] if notes else []
    return "\n".join(lines)


def with_table(page: str) -> str:
    """Return ``page`` with the table between its two marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
    sys.exit(0)
