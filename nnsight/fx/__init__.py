"""The compiler: a block becomes part of the graph that dynamo captured of the model.

In the order in which a compiled trace meets them:

* :mod:`~nnsight.fx.taps` marks locations in the graph while dynamo captures;
* :mod:`~nnsight.fx.driver` is the compiled driver and the dynamo backend that hands captured graphs on;
* :mod:`~nnsight.fx.graph` is a captured graph: taps, inputs, known programs and their variants;
* :mod:`~nnsight.fx.recording` walks its taps and runs blocks against lazy tensors (:mod:`~nnsight.fx.lazy`), whose torch
  calls :mod:`~nnsight.fx.calls` writes down, sorted by :mod:`~nnsight.fx.functions`; :mod:`~nnsight.fx.showing` knows which
  memory is seen outside of torch;
* :mod:`~nnsight.fx.program` is what is written: what is called, where it reads and writes;
* :mod:`~nnsight.fx.splice` puts a program into a captured graph, :mod:`~nnsight.fx.lowering` makes it callable, and
  :mod:`~nnsight.fx.variant` keeps the result;
* :mod:`~nnsight.fx.passes` removes what is superfluous in a spliced graph, as far as :mod:`~nnsight.fx.effects` allows;
* :mod:`~nnsight.fx.explaining`, :mod:`~nnsight.fx.debug` and :mod:`~nnsight.fx.stages` show all this;
* :mod:`~nnsight.fx.replay` has the effects of a block again without running it; :mod:`~nnsight.fx.captures` says when a call can
  do without the interception of modules;
* :mod:`~nnsight.fx.regions` lowers the repeated :mod:`~nnsight.fx.blocks` of a model once, and :mod:`~nnsight.fx.direct` calls them,
  :mod:`~nnsight.fx.background` whole graphs beside the program;
* :mod:`~nnsight.fx.capturing` is what has to be different in dynamo while it captures, :mod:`~nnsight.fx.compiled_calls` calls what it has
  compiled, :mod:`~nnsight.fx.opaque_functions` keeps functions of a block in sight of a recording, and
  :mod:`~nnsight.fx.torch_compat` has the private names of torch;
* :mod:`~nnsight.fx.reasons` says why a model is captured again, and :mod:`~nnsight.fx.progress` what a program waits for.

Captured graphs, programs and splices are plain values with plain functions on them; no envoy is needed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .background import wait
from .counters import counters

if TYPE_CHECKING:
    from .explaining import explain

__all__ = ["counters", "explain", "wait"]


def __getattr__(name: str) -> Any:
    if name == "explain":  # imports torch's compiler, which is slow
        value = import_module(".explaining", __name__).explain
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
