"""The table of cells in docs/compile.md, and the outcomes it is made of: ``python -m tests.zoo.table`` writes it.

``python -m tests.zoo --record`` keeps what each cell came to in ``outcomes.json``. A cell that was never run is in neither.
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
from .together import TOGETHER

PAGE = ROOT / "docs" / "compile.md"
OUTCOMES = Path(__file__).with_name("outcomes.json")
BEGIN, END = "<!-- zoo: written by python -m tests.zoo.table -->", "<!-- end of zoo -->"

#: How the table calls the modes.
LETTERS = {"eager": "e", "aot_eager": "a", "inductor": "i", "whole": "w"}

#: Outcomes by model, feature and mode.
Outcomes = dict[str, dict[str, dict[str, str]]]


def outcomes() -> Outcomes:
    """Return what was recorded."""
    found: Outcomes = json.loads(OUTCOMES.read_text()) if OUTCOMES.exists() else {}
    return found


def record(cells: Iterable[Cell]) -> None:
    """Keep what cells came to, in place of what was kept of them before."""
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
    """Return the table: a model in each row, a feature in each column, what does not work below."""
    kept, notes = outcomes(), dict[str, int]()
    columns = [feature for feature in FEATURES.values() if feature not in TOGETHER]
    lines = [
        "| model | what it is | " + " | ".join(feature.name for feature in columns) + " |",
        "|---|---" + "|---" * len(columns) + "|",
    ]
    for name, specimen in specimens().items():
        cells = []
        for feature in columns:
            found = kept.get(name, {}).get(feature.name, {})
            together = [kept.get(name, {}).get(one.name, {}) for one in FEATURES.values() if feature.name in one.covers]
            worked = "".join(_letter(mode, found, together) for mode in MODES)
            others = {f"{text} ({mode})" for one in (found, *together) for mode, text in one.items() if text != "ok"}
            numbers = sorted(notes.setdefault(note, len(notes) + 1) for note in others)
            cells.append(" ".join([worked, *map(str, numbers)]).strip() if feature.fits(specimen) else "-")
        lines.append(f"| {name} | {specimen.kind} | " + " | ".join(cells) + " |")
    lines += [""] + [f"{number}. {note}" for note, number in notes.items()] if notes else []
    return "\n".join(lines)


def _letter(mode: str, found: dict[str, str], together: list[dict[str, str]]) -> str:
    """Return the letter of a mode: small where the feature worked by itself, capital where it worked in a block with others."""
    if found.get(mode) == "ok":
        return LETTERS[mode]
    return LETTERS[mode].upper() if any(one.get(mode) == "ok" for one in together) else ""


def with_table(page: str) -> str:
    """Return ``page`` with the table between its two marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
    sys.exit(0)
