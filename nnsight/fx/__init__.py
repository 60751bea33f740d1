"""The compiler: a block becomes part of the graph that dynamo captured of the model.

In the order in which a compiled trace meets them:

* :mod:`~nnsight.fx.taps` marks locations in the graph while dynamo captures;
* :mod:`~nnsight.fx.driver` is the compiled driver and the dynamo backend that hands captured graphs on;
* :mod:`~nnsight.fx.graph` is a captured graph: taps, inputs, known programs and their variants;
* :mod:`~nnsight.fx.recording` runs blocks against lazy tensors (:mod:`~nnsight.fx.lazy`) and writes a program;
* :mod:`~nnsight.fx.program` is that program: what it calls, where it reads and writes;
* :mod:`~nnsight.fx.splice` puts a program into a captured graph, :mod:`~nnsight.fx.lowering` makes it callable.

Captured graphs, programs and splices are plain values with plain functions on them; no envoy is needed.
"""

from .counters import counters

__all__ = ["counters"]
