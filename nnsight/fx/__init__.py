"""The compiler: a block becomes part of the graph that dynamo captured of the model.

In the order in which a compiled trace meets them:

* :mod:`~nnsight.fx.capturing.taps` marks locations in the graph while dynamo captures;
* :mod:`~nnsight.fx.driver` is the compiled driver and the dynamo backend that hands captured graphs on;
* :mod:`~nnsight.fx.capturing.graph` is a captured graph: taps, inputs, known programs and their variants;
* :mod:`~nnsight.fx.recording.recording` walks its taps and runs blocks against lazy tensors (:mod:`~nnsight.fx.recording.lazy`), whose torch
  calls :mod:`~nnsight.fx.recording.calls` writes down, sorted by :mod:`~nnsight.fx.recording.functions`; :mod:`~nnsight.fx.recording.exposed_memory`
  knows which memory is seen outside of torch;
* :mod:`~nnsight.fx.program` is what is written: what is called, where it reads and writes;
* :mod:`~nnsight.fx.splicing.splice` puts a program into a captured graph, :mod:`~nnsight.fx.lowering.lowering` makes it callable, and
  :mod:`~nnsight.fx.lowering.variant` keeps the result;
* :mod:`~nnsight.fx.splicing.passes` removes what is superfluous in a spliced graph, as far as :mod:`~nnsight.fx.effects` allows;
* :mod:`~nnsight.fx.show.explaining`, :mod:`~nnsight.fx.show.debug` and :mod:`~nnsight.fx.show.stages` show all this;
* :mod:`~nnsight.fx.replay.replay` has the effects of a block again without running it; :mod:`~nnsight.fx.capturing.captures` says when a call
  can do without the interception of modules;
* :mod:`~nnsight.fx.lowering.regions` lowers the repeated :mod:`~nnsight.fx.lowering.repeated_modules` of a model once, and
  :mod:`~nnsight.fx.capturing.direct` calls them, :mod:`~nnsight.fx.lowering.background` whole graphs beside the program;
* :mod:`~nnsight.fx.capturing.dynamo` is what has to be different in dynamo while it captures, :mod:`~nnsight.fx.capturing.compiled_calls`
  calls what it has compiled, :mod:`~nnsight.fx.recording.opaque_functions` keeps functions of a block in sight of a recording, and
  :mod:`~nnsight.fx.torch_compat` has the private names of torch;
* :mod:`~nnsight.fx.capturing.reasons` says why a model is captured again, and :mod:`~nnsight.fx.progress` what a program waits for.

Captured graphs, programs and splices are plain values with plain functions on them; no envoy is needed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .counters import counters
from .lowering.background import wait

if TYPE_CHECKING:
    from .show.explaining import explain

__all__ = ["counters", "explain", "wait"]


def __getattr__(name: str) -> Any:
    if name == "explain":  # imports torch's compiler, which is slow
        value = import_module(".show.explaining", __name__).explain
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
