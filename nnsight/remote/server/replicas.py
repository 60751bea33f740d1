"""Engines of several replicas: processes of a Ray cluster, each with a copy of the model.

The gateway stays the one gateway. Keys, limits, queues, the spool and sockets are in its process; a replica gets payloads, gives what came
of them, and has an engine of its own (:mod:`.engine`) with all that can go wrong there. Ray Serve starts the replicas, replaces one that
dies or hangs, and, within bounds, starts more of them while jobs wait and ends some that have nothing to do.

A replica that is lost in the middle of a job is an engine that died: the gateway starts the job once more, on another replica, and ends it
with an error if that is lost, too. (Of one that is lost before it has accepted the job nobody hears: Serve takes another.) Programs go to
the replicas as the bytes that the client sent, and errors come back as their name and message. What Ray itself sends between its processes
is pickled: a cluster belongs on a network of its own.
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

from ..protocol import ModelKey
from ..run.together import kind_of
from ..wire.errors import ExecutionFailedError, InvalidProgramError
from .engine import Engine, EngineLostError, Log, Outcome, TimeLimitError
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

#: Errors that are told by their name; others are faults of the server.
_ERRORS = {kind.__name__: kind for kind in (InvalidProgramError, ExecutionFailedError, TimeLimitError, EngineLostError)}

#: How often is asked whether replicas are there, in seconds.
_WATCH = 2.0


class Replica:
    """What runs in the process of a replica.

    Args:
        build: Makes its engine.
    """

    def __init__(self, build: Callable[[], Engine]) -> None:
        self._engine = build()

    async def execute(self, payloads: list[bytes], seconds: float) -> AsyncIterator[tuple[str, int, Any]]:
        """Run payloads of one kind; yield ``("log" | "result" | "error", number of the payload, content)``.

        If the caller goes away, the run is ended, and this replica is free when it has.
        """
        said: asyncio.Queue[tuple[str, int, Any] | None] = asyncio.Queue()
        logs = [functools.partial(_say, said, number) for number in range(len(payloads))]
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
            yield (
                ("error", number, _described(outcome))
                if isinstance(outcome, Exception)
                else ("result", number, outcome)
            )

    def check_health(self) -> None:
        """Raise if this replica has to be replaced; Serve asks from time to time.

        Raises:
            RuntimeError: If its engine cannot run jobs.
        """
        if not self._engine.healthy:
            raise RuntimeError("The engine of this replica hangs.")


def _say(said: asyncio.Queue[tuple[str, int, Any] | None], number: int, line: str) -> None:
    said.put_nowait(("log", number, line))


def _described(error: Exception) -> tuple[str, str]:
    kind = next((name for name, kind in _ERRORS.items() if isinstance(error, kind)), type(error).__name__)
    if kind not in _ERRORS:
        _log.error("a job met a fault of the server", exc_info=error)
    return kind, str(error)


def _error(kind: str, message: str) -> Exception:
    return _ERRORS[kind](message) if kind in _ERRORS else RuntimeError(f"in a replica: {kind}: {message}")


class RayEngine:
    """The engine of a model that has replicas.

    Args:
        name: Of the application in Ray Serve.
        handle: How it is called.
        kinds: See :meth:`~.engine.Engine.kind_of`.
        width: How many replicas there may be, each of which runs one group of payloads at a time.
    """

    def __init__(self, name: str, handle: Any, kinds: Callable[[bytes], Hashable | None], width: int) -> None:
        self.width = width
        self._name, self._handle, self._kinds = name, handle, kinds
        self._streams: dict[int, Any] = {}
        self._healthy = True
        self._closing = threading.Event()
        self._watching = threading.Thread(target=self._watch, name=f"nnsight-watch {name}", daemon=True)
        self._watching.start()

    def kind_of(self, payload: bytes) -> Hashable | None:
        """Return what programs have in common that can run as one batch; ``None`` for one that runs alone."""
        return self._kinds(payload)

    async def execute(self, payloads: Sequence[bytes], seconds: float, logs: Sequence[Log]) -> list[Outcome]:
        """Run payloads of one kind on a replica that is free; see :meth:`.engine.Engine.execute`."""
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
            if isinstance(error, RayTaskError):  # a fault of the replica's Python, which lives on
                raise
            _log.warning("a replica was lost", extra={"application": self._name, "error": str(error)[:500]})
            raise EngineLostError("The replica that ran the job was lost.") from error
        finally:
            del self._streams[id(payloads)]
            if len(outcomes) < len(payloads):  # nobody waits for it any more
                stream.cancel()
        return [outcomes[number] for number in range(len(payloads))]

    def interrupt(self, payloads: Sequence[bytes]) -> None:
        """End the run that was given this very list of payloads, in its replica."""
        stream = self._streams.get(id(payloads))
        if stream is not None:
            stream.cancel()

    @property
    def healthy(self) -> bool:
        """Whether there is a replica that runs jobs, as of a moment ago."""
        return self._healthy

    def close(self) -> None:
        """End the replicas."""
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
            if healthy != self._healthy:
                _log.warning(
                    "replicas are there again" if healthy else "no replica runs", extra={"application": self._name}
                )
            self._healthy = healthy


@contextlib.contextmanager
def cluster() -> Iterator[None]:
    """Join the Ray cluster that ``RAY_ADDRESS`` names, or run one on this machine while the context is open."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a server tells nobody that it is there
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
) -> RayEngine:
    """Start the replicas of a model within :func:`cluster`, and return their engine once the first is ready.

    Args:
        key: The model; an application of this name that is there already is replaced.
        build: Makes the engine of a replica, in its process.
        kinds: See :meth:`~.engine.Engine.kind_of`.
        replicas: How many there are at least, and at most.
        cpus: Cores that a replica reserves.
        gpus: Accelerators that it reserves.

    Raises:
        RuntimeError: If a replica cannot be started.
    """
    least, most = replicas
    scaling: dict[str, Any] = {"num_replicas": least}
    if most > least:
        bounds = {"min_replicas": least, "max_replicas": most}
        scaling = {"autoscaling_config": {**bounds, "target_ongoing_requests": 1, "upscale_delay_s": 5}}
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", f"nnsight-{key.repo_id}-{key.revision}")
    deployment = serve.deployment(
        name="replicas",
        max_ongoing_requests=1,
        ray_actor_options={"num_cpus": cpus, "num_gpus": gpus},
        health_check_period_s=5,
        graceful_shutdown_timeout_s=120,  # a replica that is ended for want of work may have got some just now
        **scaling,
    )(Replica)
    handle = serve.run(deployment.bind(build), name=name, route_prefix=None)
    return RayEngine(name, handle, kinds, most)


def deploy_model(name: str, revision: str, options: dict[str, Any], **scaling: Any) -> tuple[ModelKey, RayEngine]:
    """Start replicas of a language model; as :func:`deploy`. This process has no weights, only the model's structure.

    Raises:
        OSError: If the model cannot be loaded.
    """
    key, structure = load(name, revision, dispatch=False, **options)
    build = functools.partial(_engine, name, revision, options)
    return key, deploy(key, build, functools.partial(kind_of, structure), **scaling)


def _engine(name: str, revision: str, options: dict[str, Any]) -> Engine:
    return engine_of(load(name, revision, **options)[1], name=f"nnsight-engine {name}")
