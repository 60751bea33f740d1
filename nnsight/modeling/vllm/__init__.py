"""Models in a vLLM engine, traced request by request.

vLLM runs many requests at once: their tokens lie side by side in one flat batch that changes with every step of the engine.
A block is written against one request, so here each request is a run of its own, with its own count of passages; the batch
of a step only says which rows belong to whom. The modules, from the bottom up:

* :mod:`.rows`: the rows of one request, as the block is given them and as they go back;
* :mod:`.functions`, :mod:`.steering`: edits in the compiled graph, whose parameters are data, so that no block has to run at the layer;
* :mod:`.requests`: the run of one request, and how it ends;
* :mod:`.samples`: requests for several samples, each a run of its own;
* :mod:`.steps`: one step of the engine, offered to the runs that take part in it;
* :mod:`.bookkeeping`: which rows of a step are whose;
* :mod:`.taps`: what is put into the graph of a compiled engine, stops for blocks and tables for edits;
* :mod:`.spread`, :mod:`.ranks`: with several devices, what each has of a value, and a step that all make together;
* :mod:`.batches`, :mod:`.hooks`: what vLLM's two model runners say of a step, and where they are stopped;
* :mod:`.worker`: where vLLM calls all that;
* :mod:`.runner`: which of the runners there is, and what of vLLM blocks cannot run with;
* :mod:`.groups`: who uses what belongs to the process;
* :mod:`.engine`, :mod:`.room`: an engine in this process, requests in it, and room on the interpreter's stack for its steps;
* :mod:`.parallel`, :mod:`.follower`: the processes of an engine on several devices;
* :mod:`.residual`: the residual stream of models that carry it in two parts;
* :mod:`.gguf`, :mod:`.vectors`, :mod:`.choices`: directions for steering from files, by name, and what a request chooses of them;
* :mod:`.prompts`, :mod:`.skeleton`: what users pass, and the model before its engine runs;
* :mod:`.tracing`, :mod:`.asynchronous`, :mod:`.model`: the traces, those that are awaited, and the root envoy;
* :mod:`.serving`: vLLM's own server, for requests that are steered.

vLLM itself is imported when a model is made, not with this package.
"""

from .model import VLLM

__all__ = ["VLLM"]
