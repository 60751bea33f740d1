"""vLLM's own server for requests that are steered: ``nnsight vllm serve``.

The server has two processes. The first speaks HTTP and knows the registered vectors; the second runs the engine, whose compiled
graph has tables of parameters for edits (:mod:`..steering`). A request that names a vector is given an entry of the tables, whose number
travels with its sampling parameters. The modules, from the bottom up:

* :mod:`~nnsight.vllm.serving.entries`: who has which entry of the tables;
* :mod:`~nnsight.vllm.serving.worker`: in the engine, writes the tables and says which rows of a step belong to which entry;
* :mod:`~nnsight.vllm.serving.client`: in the first process, what it takes to send a steered request;
* :mod:`~nnsight.vllm.serving.http`: routes for vectors, and a guard against requests that would silently not be steered;
* :mod:`~nnsight.vllm.serving.command`: the command.
"""
