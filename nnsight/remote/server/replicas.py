"""Replicas of a model: processes of a Ray cluster, each with a copy of the model.

Keys, limits, queues, the spool and sockets are in the process of the gateway. A replica has an engine (:mod:`nnsight.program.run.engine`).
Ray Serve starts the replicas and replaces a replica that dies or hangs. Within bounds, it starts more replicas while jobs wait, and ends
idle ones.

If a replica is lost during a job, the gateway treats it as an engine that died. If it is lost before it has accepted the job, Serve chooses
another replica. Replicas get programs as the bytes that the client sent, and return errors as name and message. Ray itself sends pickles
between its processes, so a cluster needs a private network.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import re
import threading
from collections.abc import AsyncIterator, Callable, Hashable, Iterator, Sequence
from typing import Any

from ...program.format.errors import ExecutionFailedError, InvalidProgramError
from ...program.run.engine import Engine, EngineLostError, Log, Outcome, TimeLimitError
from ..protocol import ModelKey
from ..together import kind_of
from .models import engine_of, load

try:
    import ray
    from ray import serve
    from ray.exceptions import RayError, RayTaskError, TaskCancelledError
    from ray.serve.exceptions import RayServeException
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(f"Serving on a Ray cluster needs further packages ({missing.name}): pip install 'nnsight[ray]'.") from missing

_log = logging.getLogger("nnsight.remote.server")

#: Errors about a job, by name. Other errors are faults of the server.
_ERRORS = {kind.__name__: kind for kind in (InvalidProgramError, ExecutionFailedError, TimeLimitError, EngineLostError)}

#: How many groups a replica with a vLLM engine runs at a time.
_VLLM_WIDTH = 64

#: Interval between checks of the replicas' states, in seconds.
_CHECK_INTERVAL = 2.0


class Replica:
    """The part of a replica that runs in its process. ``build`` creates the engine."""

    def __init__(self, build: Callable[[], Engine]) -> None:
        self._engine = build()

    async def execute(self, payloads: list[bytes], seconds: float) -> AsyncIterator[tuple[str, int, Any]]:
        """Run payloads of one kind. Yields ``("log" | "result" | "error", number of the payload, content)``.

        If the caller disconnects, the run is interrupted, and the replica is free once the run has ended.
        """
        said: asyncio.Queue[tuple[str, int, Any] | None] = asyncio.Queue()
        logs = [lambda line, number=number: said.put_nowait(("log", number, line)) for number in range(len(payloads))]
        run = asyncio.ensure_future(self._engine.execute(payloads, seconds, logs))
        run.add_done_callback(lambda _: said.put_nowait(None))
        try:
            while (item := await said.get()) is not None:
                yield item
        finally:
            if not run.done():
                self._engine.interrupt(payloads)
                await asyncio.wait([run])
        try:
            outcomes = run.result()
        except Exception as error:
            outcomes = [error] * len(payloads)
        for number, outcome in enumerate(outcomes):
            if isinstance(outcome, Exception):
                yield "error", number, _described(outcome)
            else:
                yield "result", number, outcome

    def check_health(self) -> None:
        """Raise a ``RuntimeError`` if this replica must be replaced. Serve calls this method regularly."""
        if not self._engine.healthy:
            raise RuntimeError("The engine of this replica hangs.")


def _described(error: Exception) -> tuple[str, str]:
    kind = next((name for name, kind in _ERRORS.items() if isinstance(error, kind)), type(error).__name__)
    if kind not in _ERRORS:
        _log.error("a job failed because of the server", exc_info=error)
    return kind, str(error)


def _error(kind: str, message: str) -> Exception:
    return _ERRORS[kind](message) if kind in _ERRORS else RuntimeError(f"in a replica: {kind}: {message}")


class RayEngine:
    """The engine of a model with replicas: an application of Ray Serve. All replicas together run up to ``width`` groups at a time."""

    def __init__(self, name: str, handle: Any, kinds: Callable[[bytes], Hashable | None], width: int) -> None:
        self.width = width
        self._name, self._handle, self.kind_of = name, handle, kinds
        self._streams: dict[int, Any] = {}
        self.healthy = True  # whether a replica was running at the last check
        self._closing = threading.Event()
        self._watching = threading.Thread(target=self._watch, name=f"nnsight-watch {name}", daemon=True)
        self._watching.start()

    async def execute(self, payloads: Sequence[bytes], seconds: float, logs: Sequence[Log]) -> list[Outcome]:
        """Run payloads on a free replica."""
        outcomes: dict[int, Outcome] = {}
        stream = self._streams[id(payloads)] = self._handle.execute.options(stream=True).remote(list(payloads), seconds)
        try:
            async for what, number, content in stream:
                if what == "log":
                    logs[number](content)
                else:
                    outcomes[number] = content if what == "result" else _error(*content)
        except TaskCancelledError as error:
            raise TimeLimitError("The run was ended.") from error
        except (RayError, RayServeException) as error:
            if isinstance(error, RayTaskError):  # a Python error in a replica that is still alive
                raise
            _log.warning("a replica was lost", extra={"application": self._name, "error": str(error)[:500]})
            raise EngineLostError("The replica that ran the job was lost.") from error
        finally:
            del self._streams[id(payloads)]
            if len(outcomes) < len(payloads):  # interrupted: the remaining results are no longer needed
                stream.cancel()
        return [outcomes[number] for number in range(len(payloads))]

    def interrupt(self, payloads: Sequence[bytes]) -> None:
        stream = self._streams.get(id(payloads))
        if stream is not None:
            stream.cancel()

    def close(self) -> None:
        self._closing.set()
        self._watching.join()
        with contextlib.suppress(RayError, RayServeException):
            serve.delete(self._name)

    def _watch(self) -> None:
        while not self._closing.wait(_CHECK_INTERVAL):
            try:
                deployments = serve.status().applications[self._name].deployments.values()
                healthy = any(found.replica_states.get("RUNNING", 0) for found in deployments)
            except Exception as error:  # such as a cluster that does not answer
                _log.debug("no status of %s: %r", self._name, error)
                healthy = False
            if healthy != self.healthy:
                event = "a replica is running again" if healthy else "no replica is running"
                _log.warning(event, extra={"application": self._name})
            self.healthy = healthy


@contextlib.contextmanager
def cluster() -> Iterator[None]:
    """Join the Ray cluster at ``RAY_ADDRESS``, or run a cluster on this machine while the context is open."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    mine = not ray.is_initialized()
    if mine:
        ray.init(include_dashboard=False, log_to_driver=False, configure_logging=False)
    serve.start(proxy_location="Disabled")  # only the gateway accepts requests
    try:
        yield
    finally:
        if mine:
            if "RAY_ADDRESS" not in os.environ:
                serve.shutdown()
            ray.shutdown()


def deploy(
    key: ModelKey,
    build: Callable[[], Engine],
    kinds: Callable[[bytes], Hashable | None],
    *,
    replicas: tuple[int, int] = (1, 1),
    cpus: float = 1.0,
    gpus: float = 0.0,
    width: int = 1,
) -> RayEngine:
    """Start the replicas of a model within :func:`cluster`, and return their engine when the first replica is ready.

    ``build`` creates the engine of a replica, in its process, and ``kinds`` returns the kind of a program. ``replicas`` are the minimum and
    maximum number. ``cpus``, ``gpus`` and ``width``, the number of groups that run at a time, are for each replica. An existing application
    for the same key is replaced. Raises a ``RuntimeError`` if no replica starts.
    """
    least, most = replicas
    scaling: dict[str, Any] = {"num_replicas": least}
    if most > least:
        bounds = {"min_replicas": least, "max_replicas": most}
        scaling = {"autoscaling_config": {**bounds, "target_ongoing_requests": max(width // 2, 1), "upscale_delay_s": 5}}
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", f"nnsight-{key.repo_id}-{key.revision}")
    deployment = serve.deployment(
        name="replicas",
        max_ongoing_requests=width,
        ray_actor_options={"num_cpus": cpus, "num_gpus": gpus},
        health_check_period_s=5,
        graceful_shutdown_timeout_s=120,  # an idle replica may get a job at the moment when it is ended
        **scaling,
    )(Replica)
    handle = serve.run(deployment.bind(build), name=name, route_prefix=None)
    return RayEngine(name, handle, kinds, most * width)


def deploy_model(
    name: str, revision: str, options: dict[str, Any], *, build: Callable[[], Engine] | None = None, **scaling: Any
) -> tuple[ModelKey, RayEngine]:
    """Start replicas of a language model, see :func:`deploy`; ``build`` replaces the default engine. This process loads no weights.

    Raises an ``OSError`` if the model cannot be loaded.
    """
    key, structure = load(name, revision, dispatch=False, **options)

    def default_engine() -> Engine:
        return engine_of(load(name, revision, **options)[1], name=f"nnsight-engine {name}")

    if build is None:
        return key, deploy(key, default_engine, functools.partial(kind_of, structure), **scaling)
    return key, deploy(key, build, lambda payload: None, width=_VLLM_WIDTH, **scaling)
