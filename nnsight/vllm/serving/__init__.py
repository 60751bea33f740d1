"""vLLM's own server for requests that are steered: ``nnsight vllm serve``.

The server has two processes. The first speaks HTTP and knows the registered vectors; the second runs the engine, whose compiled
graph has tables of parameters for edits (:mod:`..steering`). A request that names a vector gets an entry of the tables, and the number of
the entry travels with its sampling parameters.
"""
