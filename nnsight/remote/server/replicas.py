"""Replicas of a model: processes of a Ray cluster, each with a copy of the model.

Keys, limits, queues, the spool and sockets are in the process of the gateway. A replica has an engine (:mod:`nnsight.program.run.engine`).
Ray Serve starts the replicas, replaces one that dies or hangs, and, within bounds, starts more of them while jobs wait and ends idle ones.

A replica that is lost during a job is an engine that died. (If a replica is lost before it has accepted the job, Serve takes another one.)
Replicas get programs as the bytes of the client, and return errors as name and message. Ray itself sends pickles between its processes,
so a cluster needs a network of its own.
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
    raise ModuleNotFoundError(
        f"Serving on a Ray cluster needs further packages ({missing.name}): pip install 'nnsight[ray]'."
    ) from missing

_log = logging.getLogger("nnsight.remote.server")

#: Errors about a job, by name; others are faults of the server.
_ERRORS = {kind.__name__: kind for kind in (InvalidProgramError, ExecutionFailedError, TimeLimitError, EngineLostError)}

#: Groups that a replica with an engine of vLLM runs at a time.
_WIDTH = 64

#: Interval of the checks for running replicas, in seconds.
_WATCH = 2.0


class Replica:
    """The process of a replica; ``build`` makes its engine."""

    def __init__(self, build: Callable[[], Engine]) -> None:
        self._engine = build()

    async def execute(self, payloads: list[bytes], seconds: float) -> AsyncIterator[tuple[str, int, Any]]:
        """Run payloads of one kind; yield ``("log" | "result" | "error", number of the payload, content)``.

        If the caller goes away, the run is interrupted, and this replica is free when it has ended.
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
        """Raise if this replica has to be replaced; Serve calls this from time to time."""
        if not self._engine.healthy:
            raise RuntimeError("The engine of this replica hangs.")


def _described(error: Exception) -> tuple[str, str]:
    kind = next((name for name, kind in _ERRORS.items() if isinstance(error, kind)), type(error).__name__)
    if kind not in _ERRORS:
        _log.error("a job met a fault of the server", exc_info=error)
    return kind, str(error)


def _error(kind: str, message: str) -> Exception:
    return _ERRORS[kind](message) if kind in _ERRORS else RuntimeError(f"in a replica: {kind}: {message}")


class RayEngine:
    """The engine of a model with replicas: an application of Ray Serve. All replicas together run ``width`` groups at a time."""

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
            if isinstance(error, RayTaskError):  # a Python error in a replica, which is still there
                raise
            _log.warning("a replica was lost", extra={"application": self._name, "error": str(error)[:500]})
            raise EngineLostError("The replica that ran the job was lost.") from error
        finally:
            del self._streams[id(payloads)]
            if len(outcomes) < len(payloads):  # its results are not needed any more
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
        while not self._closing.wait(_WATCH):
            try:
                deployments = serve.status().applications[self._name].deployments.values()
                healthy = any(found.replica_states.get("RUNNING", 0) for found in deployments)
            except Exception as error:  # the cluster does not answer
                _log.debug("no status of %s: %r", self._name, error)
                healthy = False
            if healthy != self.healthy:
                event = "replicas are there again" if healthy else "no replica runs"
                _log.warning(event, extra={"application": self._name})
            self.healthy = healthy


@contextlib.contextmanager
def cluster() -> Iterator[None]:
    """Join the Ray cluster that ``RAY_ADDRESS`` names, or run one on this machine while the context is open."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # send no statistics
    mine = not ray.is_initialized()
    if mine:
        ray.init(include_dashboard=False, log_to_driver=False, configure_logging=False)
    serve.start(proxy_location="Disabled")  # the gateway is the only way in
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
    """Start the replicas of a model within :func:`cluster`, and return their engine when the first is ready.

    ``build`` makes the engine of a replica, in its process; ``kinds`` finds the kind of a program. ``replicas`` are the least and the most,
    each with so many ``cpus`` and ``gpus``, for ``width`` groups at a time. An existing application of this name is replaced. Raises
    ``RuntimeError`` if none starts.
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
        graceful_shutdown_timeout_s=120,  # an idle replica that is ended may have got a job just now
        **scaling,
    )(Replica)
    handle = serve.run(deployment.bind(build), name=name, route_prefix=None)
    return RayEngine(name, handle, kinds, most * width)


def deploy_model(
    name: str, revision: str, options: dict[str, Any], *, build: Callable[[], Engine] | None = None, **scaling: Any
) -> tuple[ModelKey, RayEngine]:
    """Start replicas of a language model, as :func:`deploy`; raise ``OSError`` if it cannot be loaded. This process has no weights."""
    key, structure = load(name, revision, dispatch=False, **options)

    def usual() -> Engine:
        return engine_of(load(name, revision, **options)[1], name=f"nnsight-engine {name}")

    if build is None:
        return key, deploy(key, usual, functools.partial(kind_of, structure), **scaling)
    return key, deploy(key, build, lambda payload: None, width=_WIDTH, **scaling)
