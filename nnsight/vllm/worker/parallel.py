"""The processes of an engine on several devices (tensor parallelism).

vLLM's own executor for several devices uses a process per device, and another one for the engine. Here the first device stays in the user's
process, as with one device. So blocks work on the model's own values, and only parts of tensors are sent;
:mod:`~nnsight.vllm.worker.ranks` describes a step. The other devices run in *followers*, processes that this executor starts with a new
interpreter. They do not run the user's script again, so it needs no ``if __name__ == "__main__"``.

The executor sends each of its calls to the followers. A follower makes the same call on its own worker, and answers. The engine ends if
an answer does not come, or if a call fails in only some of the processes: ranks with different states must not continue.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import traceback
from concurrent.futures import Future
from multiprocessing import Pipe
from typing import Any, NamedTuple

import cloudpickle
import torch
from vllm.distributed import cleanup_dist_env_and_memory, get_tp_group
from vllm.platforms import current_platform
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.outputs import AsyncModelRunnerOutput
from vllm.v1.serial_utils import run_method
from vllm.v1.worker.worker_base import WorkerWrapperBase

from ...runtime.modules.tree import ModuleTree
from ..steering.graph_functions import register, registered
from .ranks import Follower, Group, Leader, send
from .spread import Spreads

#: Seconds that followers have to answer after a failure.
_PATIENCE = 10.0

#: The program of a follower's interpreter. It first receives the search path of the leader.
_PROGRAM = (
    "import sys; from multiprocessing.connection import Connection; connection = Connection(int(sys.argv[1])); "
    "sys.path[:] = connection.recv(); from nnsight.vllm.worker.parallel import follow; follow(connection)"
)

#: Methods that make a step. If a call of one fails, it has to fail on all ranks.
STEPS = frozenset(("execute_model", "sample_tokens"))


class WorkerCall(NamedTuple):
    """A message: call a method of the worker, by name, or a pickled function with the worker as argument."""

    method: str | bytes
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    attended: bool  # whether the engine has requests with blocks


class Answer(NamedTuple):
    """The result of a call, or the traceback of its error."""

    result: Any = None
    error: str | None = None


class Followers:
    """The ``count`` follower processes of an engine. They get ``start``, and the ranks after ``rank`` and ``local_rank``."""

    def __init__(self, count: int, start: bytes, rank: int, local_rank: int) -> None:
        self.connections: list[Any] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        threads = {}
        if current_platform.is_cpu() and "OMP_NUM_THREADS" not in os.environ:  # all processes share the threads of this one
            share = max(1, torch.get_num_threads() // (count + 1))
            torch.set_num_threads(share)
            threads = {"OMP_NUM_THREADS": str(share)}
        for number in range(1, count + 1):
            mine, theirs = Pipe()
            command = [sys.executable, "-c", _PROGRAM, str(theirs.fileno())]
            self._processes.append(subprocess.Popen(command, pass_fds=[theirs.fileno()], env=os.environ | threads))
            theirs.close()
            self.connections.append(mine)
            mine.send(sys.path)
            mine.send((start, rank + number, local_rank + number))

    def answers(self, patience: float | None = None) -> list[Answer]:
        """Return the answer of each follower. Raise ``RuntimeError`` if one has ended, or does not answer within ``patience`` seconds."""
        found = []
        until = None if patience is None else time.monotonic() + patience
        for connection, process in zip(self.connections, self._processes, strict=True):
            if until is not None and not connection.poll(max(until - time.monotonic(), 0)):
                raise RuntimeError("a process of another device does not answer")
            try:
                found.append(connection.recv())
            except (EOFError, OSError) as error:
                raise RuntimeError(f"a process of another device has ended, with code {process.wait()}") from error
        return found

    def end(self, kill: bool = False) -> None:
        """Close the connections and wait for the processes to end. With ``kill``, or after a while, kill them."""
        for connection in self.connections:
            connection.close()
        for process in self._processes:
            if kill:
                process.kill()
            try:
                process.wait(_PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.connections, self._processes = [], []


class ParallelExecutor(UniProcExecutor):  # type: ignore[misc]
    """An executor that runs the first rank in this process, and the other ranks in followers."""

    def _init_executor(self) -> None:
        processes, size = self.parallel_config.world_size, self.parallel_config.tensor_parallel_size
        if processes != size:
            raise NotImplementedError(
                f"An engine of {processes} processes with tensor_parallel_size={size}: blocks run with tensor parallelism only."
            )
        if not current_platform.is_cpu() and torch.accelerator.device_count() < size:
            raise ValueError(f"tensor_parallel_size={size}: this machine has {torch.accelerator.device_count()} devices.")
        self._ended: str | None = None
        self._leader: Leader | None = None
        self._place = super()._distributed_args()
        init_method, rank, local_rank = self._place
        layout = self.vllm_config.additional_config.get("nnsight", {})
        functions = [registered(digest) for digest in layout.get("functions", ())]
        programs = [registered(digest) for digest in layout.get("programs", ())]
        start = cloudpickle.dumps((self.vllm_config, functions, programs, init_method))
        self._followers = Followers(size - 1, start, rank, local_rank)
        try:
            super()._init_executor()
            failed = [answer.error for answer in self._followers.answers() if answer.error]
            if failed:
                raise RuntimeError(f"A process of another device could not start:\n{failed[0]}")
        except BaseException:
            self._followers.end(kill=True)
            raise
        runner = self.driver_worker.worker.model_runner
        self._leader = runner.link = Leader(self._followers.connections, Group(get_tp_group()), Spreads(runner.get_model()))

    def _distributed_args(self) -> tuple[str, int, int]:
        return self._place

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        """Return false: a step begins when the previous step has ended."""
        return False

    def collective_rpc(
        self,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
        single_value: bool = False,
    ) -> Any:
        """Call a method on all workers; see vLLM's ``Executor.collective_rpc``."""
        future: Future[Any] = Future()
        try:
            results = self._call(method, args, kwargs or {})
            future.set_result(results[0] if single_value else results)
        except Exception as error:
            future.set_exception(error)
        return future if non_block else future.result()

    def _call(self, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Call a method on all workers, and return the results, in the order of the ranks."""
        self.check_health()
        attended = self._leader is not None and bool(self.driver_worker.worker.model_runner.bookkeeping.runs)
        if self._leader is not None:
            self._leader.attended = attended
        call = WorkerCall(method if isinstance(method, str) else cloudpickle.dumps(method), args, kwargs, attended)
        try:
            send(call, self._followers.connections)
        except OSError:
            self._end("a process of another device has ended")
            self.check_health()
        try:
            [result] = super().collective_rpc(method, args=args, kwargs=kwargs)
        except BaseException as error:
            self._compare(call.method, error)
            raise
        try:
            answers = self._followers.answers()
        except BaseException as error:
            self._end(str(error) or type(error).__name__)
            raise
        failed = [answer.error for answer in answers if answer.error]
        if failed:
            self._end(f"`{call.method!r}` failed in the process of another device")
            raise RuntimeError(f"{self._ended}:\n{failed[0]}")
        return [result, *(answer.result for answer in answers)]

    def _compare(self, method: str | bytes, error: BaseException) -> None:
        """After a call has failed here with ``error``, end the engine unless all followers answer, and a step has failed on all of them."""
        try:
            answers = self._followers.answers(_PATIENCE)
        except RuntimeError as silence:
            self._end(f"{type(error).__name__} in the middle of a step, and {silence}")
            return
        if method in STEPS and not all(answer.error for answer in answers):
            self._end(f"{type(error).__name__} in one of its processes only")

    def _end(self, reason: str) -> None:
        self._ended = reason
        self._followers.end(kill=True)

    def check_health(self) -> None:
        """Raise ``RuntimeError`` with the reason if the engine has ended."""
        if self._ended is not None:
            raise RuntimeError(f"This engine has ended: {self._ended}. Make another one.")

    def shutdown(self) -> None:
        """End the workers and the follower processes."""
        if self._ended is None:
            self._ended = "it was shut down"
            send(None, self._followers.connections)
        super().shutdown()
        self._followers.end()


# -- the process of a follower --------------------------------------------------------------------------------------------


def follow(connection: Any) -> None:
    """Run a worker until the leader sends ``None`` or ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C interrupts the leader, which tells the followers
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    try:
        worker = _answer(connection, _start_worker, connection, *connection.recv())
        if worker is not None:
            runner = worker.worker.model_runner
            while (message := connection.recv()) is not None:
                if isinstance(message, WorkerCall):  # other messages belong to a step that this process has abandoned
                    runner.link.attended = message.attended
                    _answer(connection, _run_call, worker, message)
            worker.shutdown()
            cleanup_dist_env_and_memory()
    except (EOFError, OSError):
        os._exit(1)  # without the leader, a cleanup may hang


def _answer(connection: Any, function: Any, *args: Any) -> Any:
    """Call ``function``, which returns a value and an answer. Send the answer, or the traceback of an error, and return the value."""
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


def _start_worker(connection: Any, start: bytes, rank: int, local_rank: int) -> tuple[Any, Answer]:
    """Return a worker with a loaded model. ``start`` has vLLM's configuration, functions, programs, and the URL where ranks meet."""
    config, functions, programs, init_method = cloudpickle.loads(start)
    for found in (*functions, *programs):  # the registry has weak references, and these locals last until the layers are made
        register(found)
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


def _run_call(worker: Any, call: WorkerCall) -> tuple[None, Answer]:
    result = run_method(worker, call.method, call.args, call.kwargs)
    if isinstance(result, AsyncModelRunnerOutput):
        result = result.get_output()
    return None, Answer(None if call.method in STEPS else result)


def _end_with_parent(parent: int) -> None:
    """End this process when the leader ends, even while it waits for the leader in a collective operation."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)
