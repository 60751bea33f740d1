"""Running a piece of a graph, with the user's line in errors.

A graph runs after the block. So an error that depends on values, such as an index out of range, is not raised at the block's line. The node
that failed stores that line, and :func:`note_position` adds it to the error.
"""

from __future__ import annotations

import linecache
import os
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ...runtime.errors import UncompiledWarning
from ...runtime.report import Report
from ...runtime.switching.mode_stacks import unseen
from ...tracing.errors import PACKAGE_DIRECTORY, user_position_now
from ..counters import stage
from ..splicing.pieces import SplicedGraph
from . import debug
from .explaining import RanPiece

#: Folders of code that belongs neither to the user nor to the model.
LIBRARIES = (f"{Path(torch.__file__).parent}{os.sep}", PACKAGE_DIRECTORY)

#: Files that only pass a call on: those of this package, and of torch's function modes (``torch.set_default_device`` enters one).
_PASSED_ON = (PACKAGE_DIRECTORY, torch.overrides.__file__, torch.utils._device.__file__)

#: The beginning of the file names of code that dynamo and FX generate.
_GENERATED = "<eval_with_key>"
_POSITION = re.compile(r'File "([^"]*)", line (\d+), in .*\n\s*(.*)')


def run_lowered(report: Report, ran: RanPiece, arguments: Sequence[Any]) -> list[Any]:
    """Run a piece of a graph on ``arguments``, its inputs, externals and numbers; add it to ``report``, and return its results."""
    report.pieces.append(ran)
    function, filename = debug.dumped(report, ran)
    grad = torch.is_grad_enabled()
    try:
        with unseen(ran.graph.has_subclasses), stage("run"):
            if function is ran.lowered.function and not torch.autograd.profiler._is_profiler_enabled:
                direct = ran.lowered.direct
                results = list((direct.call or direct.first)(list(arguments)))  # a copy: generated code empties the list
            else:
                results = list(function(*arguments))
    except BaseException as error:
        torch.set_grad_enabled(grad)  # the graph may have switched the grad mode before it failed
        if isinstance(error, Exception):
            note_position(error, ran.variant.spliced, filename)
        raise
    if ran.lowered.uncompiled:
        _note_uncompiled(report, ran)
    return results


def _note_uncompiled(report: Report, ran: RanPiece) -> None:
    """Note in the report that a piece of the graph ran uncompiled, and why; and warn at the line of the trace or call."""
    end = "the end" if ran.cut is None else f"`{ran.cut.location}`"
    note = f"the graph up to {end} ran operation by operation: {ran.lowered.uncompiled}"
    report.notes.append(note)
    text = f"In this compiled {'trace' if report.where else 'call'} {note}"
    warnings.warn_explicit(text, UncompiledWarning, *position_of(report), registry=_warned)


#: The registry with which Python shows each warning once per line.
_warned: dict[Any, Any] = {}


def position_of(report: Report | None) -> tuple[str, int]:
    """Return file and line of the trace of ``report``, or of the user's call that is running."""
    filename, _, line = ("", "", "") if report is None else report.where.rpartition(":")
    return (filename, int(line)) if line.isdigit() else user_position_now(LIBRARIES)


def note_position(error: BaseException, spliced: SplicedGraph, filename: str | None = None) -> None:
    """Add a note to ``error`` with the line of the block or the model from which the failed node of ``spliced`` comes.

    If a backend generates other code, its error does not show the node. Then the note says how to find the line. ``filename`` is the file
    with the code of the graph, if there is one.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return
    traceback = error.__traceback__
    while traceback is not None:
        generated = traceback.tb_frame.f_code.co_filename
        if generated == filename or generated.startswith(_GENERATED):
            name = spliced.node_of(linecache.getline(generated, traceback.tb_lineno))
            node = next((node for node in spliced.graph_module.graph.nodes if node.name == name), None)
            positions = _POSITION.findall((node.stack_trace or "") if node is not None else "")
            found = [position for position in positions if not position[0].startswith(_PASSED_ON)]
            if node is not None and found:
                file, line, code = found[-1]
                owner = "The block" if node.name in spliced.marks else "The model"
                error.add_note(f"{owner} computes this at {file}:{line}: {code.strip()}")
                return
        traceback = traceback.tb_next
    if spliced.marks:
        error.add_note(
            "A compiled graph raised this error, so the user's line is not known. To find the line, run the trace inside "
            "`nnsight.debug_dir(path, step=True)`."
        )
