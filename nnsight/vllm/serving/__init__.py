"""vLLM's own server, with steering: ``nnsight vllm serve``.

The server has two processes. The first process speaks HTTP and has the registered vectors. The second process runs the engine, whose
compiled graph has tables of parameters for edits (:mod:`..steering`). A request that names a vector gets an entry of the tables, and the
number of the entry travels with its sampling parameters.
"""
