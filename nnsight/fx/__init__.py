"""The compiler: a block becomes part of the graph that dynamo captured of the model.

It is a pipeline. :mod:`~nnsight.fx.pipeline` has its steps as plain functions, which are names of this package: :func:`capture`,
:func:`record`, :func:`splice` and :func:`lower`. The folders are in the order in which a compiled trace meets them:

* :mod:`~nnsight.fx.capturing`: dynamo captures a call of the model; taps mark locations in the graph;
* :mod:`~nnsight.fx.recording`: the block runs against lazy tensors and leaves a program (:mod:`~nnsight.fx.block_events`);
* :mod:`~nnsight.fx.splicing`: the program is written into a copy of the graph, and passes simplify it;
* :mod:`~nnsight.fx.lowering`: a backend makes it callable, as a whole or region by region;
* :mod:`~nnsight.fx.replay`: a block whose effects follow from what it reads is not run again;
* :mod:`~nnsight.fx.show`: what a user can see of all this.

:mod:`~nnsight.fx.driver` is the driver that runs traces this way, and :mod:`~nnsight.fx.inlining` the one inside a user's own
``torch.compile``. :mod:`~nnsight.fx.effects` knows what operations do besides returning a value, and :mod:`~nnsight.fx.torch_compat` has
the private names of torch.
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

#: Names that are imported when first used, with the module they come from: torch's compiler is slow to import.
_LAZY = {"explain": ".show.explaining"} | dict.fromkeys(
    ("CapturedCall", "RecordedBlock", "capture", "lower", "record", "splice"), ".pipeline"
)


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_LAZY[name], __name__), name)
    globals()[name] = value
    return value
