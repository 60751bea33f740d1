"""What a profile and a traceback tell of a compiled trace.

The stages of a trace are ranges in a profile of ``torch.profiler``: ``nnsight::record``, ``nnsight::splice``, ``nnsight::lower``,
``nnsight::run``. Without a profiler they cost one look at a flag.

A graph runs when the block is over, so an error that depends on values, such as an index that is out of range, does not come
from the block's line. The line is on the node that failed; :func:`note_position` adds it to the error.
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
from ...tracing.errors import PACKAGE_DIRECTORY, user_position_now
from ..profiling import stage
from ..splicing.pieces import SplicedGraph
from . import debug
from .explaining import RanPiece

#: Folders of code that is not the user's, nor the model's.
LIBRARIES = (f"{Path(torch.__file__).parent}{os.sep}", PACKAGE_DIRECTORY)

#: Names of the files that dynamo and FX pretend for generated code.
_GENERATED = "<eval_with_key>"

_POSITION = re.compile(r'File "([^"]*)", line (\d+), in .*\n\s*(.*)')


def run_lowered(report: Report, ran: RanPiece, arguments: Sequence[Any]) -> list[Any]:
    """Run a piece of a graph; return its results.

    Args:
        report: Of the trace.
        ran: The piece.
        arguments: Its inputs, then its externals.
    """
    report.pieces.append(ran)
    function, filename = debug.dumped(report, ran)
    grad = torch.is_grad_enabled()
    try:
        with torch._C.DisableTorchFunction():
            if torch.autograd.profiler._is_profiler_enabled:
                with stage("run"):
                    results = list(function(*arguments))
            elif function is ran.lowered.function:
                direct = ran.lowered.direct
                results = list((direct.call or direct.first)(list(arguments)))  # generated code empties its list
            else:
                results = list(function(*arguments))
    except BaseException as error:
        torch.set_grad_enabled(grad)  # the graph may have switched it
        if isinstance(error, Exception):
            note_position(error, ran.variant.spliced, filename)
        raise
    if ran.lowered.uncompiled:
        _note_uncompiled(report, ran)
    return results


def _note_uncompiled(report: Report, ran: RanPiece) -> None:
    """Say in the report, and in a warning at the line of the trace or call, that a piece of the graph is not compiled, and why."""
    end = "the end" if ran.cut is None else f"`{ran.cut.location}`"
    note = f"the graph up to {end} ran operation by operation: {ran.lowered.uncompiled}"
    report.notes.append(note)
    text = f"In this compiled {'trace' if report.where else 'call'} {note}"
    warnings.warn_explicit(text, UncompiledWarning, *position_of(report), registry=_warned)


#: What was warned of: the filters of Python show it once for a line.
_warned: dict[Any, Any] = {}


def position_of(report: Report | None) -> tuple[str, int]:
    """Return file and line of a trace, or of the call that the user has made otherwise."""
    filename, _, line = ("", "", "") if report is None else report.where.rpartition(":")
    return (filename, int(line)) if line.isdigit() else user_position_now(LIBRARIES)


def note_position(error: BaseException, spliced: SplicedGraph, filename: str | None = None) -> None:
    """Add a note to ``error`` with the line of the user, or of the model, that the failed node of ``spliced`` comes from.

    Backends that generate other code leave no trace of the node in the error; then the note says how to find it.

    Args:
        error: What the graph raised.
        spliced: The graph.
        filename: The file that its code is in, if there is one.
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
            found = [position for position in positions if not position[0].startswith(PACKAGE_DIRECTORY)]
            if node is not None and found:
                file, line, code = found[-1]
                owner = "The block" if node.name in spliced.marks else "The model"
                error.add_note(f"{owner} computes this at {file}:{line}: {code.strip()}")
                return
        traceback = traceback.tb_next
    if spliced.marks:
        error.add_note(
            "A compiled graph raised this, which does not tell its line. To find it, run the trace inside "
            "`nnsight.debug_dir(path, step=True)`."
        )
