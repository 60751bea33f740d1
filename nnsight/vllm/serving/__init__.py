"""vLLM's own server for requests that are steered: ``nnsight vllm serve``.

The server has two processes. The first speaks HTTP and knows the registered vectors; the second runs the engine, whose compiled
graph has tables of parameters for edits (:mod:`..steering`). A request that names a vector gets an entry of the tables, and the number of
the entry travels with its sampling parameters. The modules, from the bottom up:

* :mod:`~nnsight.vllm.serving.client`: in the first process, sends steered requests to the engine;
* :mod:`~nnsight.vllm.serving.http`: routes for vectors, and a guard against requests that would silently not be steered;
* :mod:`~nnsight.vllm.serving.command`: the command.
"""
