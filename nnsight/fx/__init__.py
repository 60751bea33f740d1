"""The compiler: a block becomes part of the graph that dynamo captured of the model.

It is a pipeline. :mod:`~nnsight.fx.pipeline` offers its steps as plain functions, and this package exports them: :func:`capture`,
:func:`record`, :func:`splice` and :func:`lower`. The folders, in the order in which a compiled trace uses them:

* :mod:`~nnsight.fx.capturing`: dynamo captures a call of the model; taps mark locations in the graph;
* :mod:`~nnsight.fx.recording`: the block runs on lazy tensors, and the result is a program (:mod:`~nnsight.fx.block_events`);
* :mod:`~nnsight.fx.splicing`: the program is written into a copy of the graph, and passes simplify the copy;
* :mod:`~nnsight.fx.lowering`: a backend turns the spliced graph into a callable, as a whole or region by region;
* :mod:`~nnsight.fx.replay`: a block is not run again if its effects follow from the values that it reads;
* :mod:`~nnsight.fx.show`: explanations, files for debuggers, and the user's line in errors.

:mod:`~nnsight.fx.driver` runs traces with this pipeline. :mod:`~nnsight.fx.inlining` traces edits into a function that the user compiles.
:mod:`~nnsight.fx.effects` knows the side effects of operations, and :mod:`~nnsight.fx.torch_compat` collects the private names of torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .counters import counters
from .lowering.background import wait

if TYPE_CHECKING:
    from .pipeline import CapturedCall, RecordedBlock, capture, lower, record, splice
    from .show.explaining import explain

__all__ = ["CapturedCall", "RecordedBlock", "capture", "counters", "explain", "lower", "record", "splice", "wait"]

#: Names that are imported on first use, and their modules: torch's compiler is slow to import.
_LAZY = {"explain": ".show.explaining"} | dict.fromkeys(
    ("CapturedCall", "RecordedBlock", "capture", "lower", "record", "splice"), ".pipeline"
)


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_LAZY[name], __name__), name)
    globals()[name] = value
    return value
