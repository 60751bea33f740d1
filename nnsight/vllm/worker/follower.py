"""The process of another device, see :mod:`.parallel`: makes the calls of the leader's executor to a worker of its own."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
import traceback
from typing import Any

import cloudpickle
from vllm.distributed import cleanup_dist_env_and_memory, get_tp_group
from vllm.platforms import current_platform
from vllm.v1.outputs import AsyncModelRunnerOutput
from vllm.v1.serial_utils import run_method
from vllm.v1.worker.worker_base import WorkerWrapperBase

from ...runtime.modules.tree import ModuleTree
from ..steering.graph_functions import register
from .parallel import STEPS, Answer, WorkerCall
from .ranks import Follower, Group, send
from .spread import Spreads


def follow(connection: Any) -> None:
    """Run a worker until the leader sends ``None``, or has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the leader is interrupted, and says so
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    try:
        worker = _answered(connection, _started, connection, connection.recv())
        if worker is not None:
            runner = worker.worker.model_runner
            while (message := connection.recv()) is not None:
                if isinstance(message, WorkerCall):  # anything else was for a step that this process has abandoned
                    runner.link.attended = message.attended
                    _answered(connection, _done, worker, message)
            worker.shutdown()
            cleanup_dist_env_and_memory()
    except (EOFError, OSError):
        os._exit(1)  # without its leader, cleaning up may hang


def _answered(connection: Any, function: Any, *args: Any) -> Any:
    """Call ``function``, which returns a value and an answer; send the answer, and return the value."""
    value = None
    try:
        value, answer = function(*args)
    except Exception:
        answer = Answer(error=traceback.format_exc())
    try:
        send(answer, [connection])
    except (TypeError, AttributeError, ValueError, pickle.PicklingError):  # the result cannot be pickled
        send(Answer(error=traceback.format_exc()), [connection])
    return value


def _started(connection: Any, start: bytes) -> tuple[Any, Answer]:
    """Return a worker with its model, made from vLLM's configuration, functions in the layers, rank, device and place to meet."""
    config, functions, rank, local_rank, init_method = cloudpickle.loads(start)
    for function in functions:  # held here until the layers hold them
        register(function)
    worker = WorkerWrapperBase(rpc_rank=rank, global_rank=rank)
    kwargs = {
        "vllm_config": config,
        "local_rank": local_rank,
        "rank": rank,
        "distributed_init_method": init_method,
        "is_driver_worker": False,
        "shared_worker_lock": threading.Lock(),
    }
    worker.init_worker([{}] * rank + [kwargs])
    worker.init_device()
    worker.load_model()
    current_platform.update_block_size_for_backend(config)
    runner = worker.worker.model_runner
    model = runner.get_model()
    tree = runner.tree = ModuleTree.of(model)
    runner.link = Follower(connection, Group(get_tp_group()), Spreads(model), tree)
    return worker, Answer()


def _done(worker: Any, call: WorkerCall) -> tuple[None, Answer]:
    result = run_method(worker, call.method, call.args, dict(call.kwargs))
    if isinstance(result, AsyncModelRunnerOutput):
        result = result.get_output()
    return None, Answer(None if call.method in STEPS else result)


def _end_with(parent: int) -> None:
    """End this process when its leader ends, even if it waits for the leader inside of a collective operation."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)
