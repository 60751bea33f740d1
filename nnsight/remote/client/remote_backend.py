"""``remote=True``: run the block of a trace on a server, see :class:`RemoteBackend`."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Generator, Iterator
from typing import Any

from torch._subclasses.fake_tensor import FakeTensor

from ...config import CONFIG
from ...program.format.errors import NotExpressibleError
from ...program.format.results import decode_results
from ...program.record.binding import Recorded
from ...tracing import Backend, Tracer
from ...tracing.block import is_bound
from ..protocol import JobStatus, Message, model_key_of
from .answers import address, checked_id, error_of
from .backend import LocalBackend, ProgramBackend, RecordingBackend, warn_of_differences
from .client import Client, RemoteError
from .display import Progress

_clients: dict[tuple[str, str | None], Client] = {}
_lock = threading.Lock()


def client_of(host: str | None = None, api_key: str | None = None) -> Client:
    """Return the client for a server and a key. The process shares one client for each pair, so connections are reused."""
    chosen = address(host or CONFIG.API.HOST), api_key or CONFIG.API.KEY
    with _lock:
        if chosen not in _clients:
            _clients[chosen] = Client(*chosen)
        return _clients[chosen]


class RemoteBackend(ProgramBackend):
    """Runs the block of a trace on a server.

    By default, the backend waits: it shows messages as they arrive, and binds the results before the ``with`` statement ends. With
    ``blocking=False``, the statement ends once the job is submitted. Then ``backend()`` polls, ``backend.wait()`` and ``await backend``
    wait, and ``async for message in backend`` yields messages. Any process with the same key can get the results by the id of the job.

    Args:
        model_key: The model on the server: ``model.to_model_key()``, or the name of its repository; by default the traced model.
        blocking: Wait for the results.
        job_id: Id of an earlier job. A block that is traced with this backend does not run. It gets the results of that job, so it must
            be the block of that job.
        host: Address of the server; by default ``CONFIG.API.HOST``.
        api_key: The key; by default ``CONFIG.API.KEY``.
        cuts: Maximum number of cuts, see :class:`~nnsight.remote.client.backend.ProgramBackend`. The backend waits for the jobs of cuts,
            even with ``blocking=False``.
        verbose: While waiting, print each status on a line of its own, regardless of ``CONFIG.APP.REMOTE_LOGGING``.

    Attributes:
        job_id: Id of the latest job; ``None`` before the first job.
        job_status: Latest known status of that job.

    Raises:
        ValueError: If ``job_id`` is not the id of a job, or ``host`` is not an address.

    Example:
        >>> with model.trace("Hello", remote=True, blocking=False) as tracer:
        ...     logits = model.lm_head.output.save()
        >>> results = tracer.backend.wait()
        >>> results["logits"]
    """

    def __init__(
        self,
        model_key: str | None = None,
        *,
        blocking: bool = True,
        job_id: str | None = None,
        host: str | None = None,
        api_key: str | None = None,
        cuts: int | None = None,
        verbose: bool = False,
    ) -> None:
        self.model_key, self.cuts = model_key, cuts
        self.blocking, self._verbose = blocking, verbose
        self.job_id = None if job_id is None else checked_id(job_id)
        self.job_status: JobStatus | None = None
        self._attached = job_id is not None
        self._client = client_of(host, api_key)
        self._recorded: Recorded | None = None
        self._seen = 0
        self._results: dict[str, Any] | None = None

    # -- a block ----------------------------------------------------------------------------------------------------

    def __call__(self, tracer: Tracer | None = None) -> Any:
        """Run the block of ``tracer``. Without a tracer, return the results of the job if it has finished, else ``None``."""
        if tracer is None:
            return self._poll()
        if self.model_key is None:
            model = getattr(tracer, "_model", None)
            if model is None:
                raise ValueError(f"{type(tracer).__name__} names no model for the server: use RemoteBackend(model_key=...).")
            self.model_key = model_key_of(model)
        results = super().__call__(tracer)
        if results is None and tracer.scope is not None:  # no results so far: unbind the names that refer to fake tensors
            for cell in tracer.scope.cells.values():
                if is_bound(cell) and isinstance(cell.cell_contents, FakeTensor):
                    del cell.cell_contents
        return results

    def submit(self, recorded: Recorded) -> Any:
        """Run a recorded block. If ``blocking``, wait for its results."""
        self._recorded, self._results = recorded, None
        if self._attached:
            return self.wait() if self.blocking else self._poll()
        assert self.model_key is not None
        self._forget()
        if self.blocking:
            return self._finish(self._client.run(recorded.payload(), self.model_key))
        self._note(self._client.submit(recorded.payload(), self.model_key))
        return None

    def send(self, payload: bytes) -> bytes:
        """Run a payload, wait, and return its results. Cuts call this even with ``blocking=False``."""
        if self._attached:
            raise NotExpressibleError("A block that needs values cannot use the results of an earlier job: trace without `job_id=`.")
        assert self.model_key is not None
        self._forget()
        return self._follow(self._client.run(payload, self.model_key))[1]

    # -- a job ------------------------------------------------------------------------------------------------------

    def _forget(self) -> None:
        self.job_id, self.job_status, self._seen = None, None, 0

    def wait(self) -> dict[str, Any]:
        """Wait for the job and return its results: the saved values by name, and the ``id`` of the job.

        Raises:
            InvalidProgramError: If the server refused the program.
            ExecutionFailedError: If the program failed.
            RemoteError: If the job failed for another reason, or does not exist.
            ValueError: If there is no job.
        """
        return self._results or self._finish(self._client.follow(self._id(), self._seen))

    def cancel(self) -> None:
        """End the job, unless it has finished. After that, :meth:`wait` raises a :class:`RemoteError`.

        Raises:
            RemoteError: If there is no such job.
            ValueError: If there is no job.
        """
        self._note_status(self._client.cancel(self._id()))

    def __await__(self) -> Generator[Any, None, dict[str, Any]]:
        """Do the same as :meth:`wait`, without blocking the event loop."""
        return asyncio.to_thread(self.wait).__await__()

    async def __aiter__(self) -> AsyncIterator[Message]:
        """Yield the messages of the job, up to the message that finishes it. After that, :meth:`wait` returns the results at once."""
        messages = self._client.follow(self._id(), 0)
        try:
            while (found := await asyncio.to_thread(next, messages, None)) is not None:
                self._note(found[0])
                yield found[0]
        finally:
            with contextlib.suppress(ValueError):  # the task was cancelled while a thread still runs the generator
                messages.close()  # type: ignore[attr-defined]

    def _poll(self) -> dict[str, Any] | None:
        """Return the results if the job has finished, else ``None``. Raises the errors of :meth:`wait`."""
        if self._results is not None:
            return self._results
        message = self._client.latest(self._id())
        if message is None:
            raise RemoteError(f"{self._client.host} has no job {self.job_id} for this key. A server keeps results only for a while.", 404)
        self._note_status(message)
        # The messages are followed for the lines that the job has printed.
        return self._finish(self._client.follow(self._id(), self._seen), quiet=True) if JobStatus(message["status"]).finished else None

    def _finish(self, messages: Iterator[tuple[Message, bytes | None]], quiet: bool = False) -> dict[str, Any]:
        """Show the messages up to the last one, bind the results and return them."""
        return self._end(*self._follow(messages, quiet))

    def _follow(self, messages: Iterator[tuple[Message, bytes | None]], quiet: bool = False) -> tuple[Message, bytes]:
        """Show the messages up to the last one; if ``quiet``, only printed lines. Returns the last message and the results."""
        enabled = not quiet and (self._verbose or CONFIG.APP.REMOTE_LOGGING)
        with contextlib.closing(Progress(enabled, self._verbose)) as progress:
            try:
                for message, result in messages:
                    self._note(message)
                    progress.show(message)
                    if JobStatus(message["status"]).finished:
                        return message, self._result_of(message, result)
            except KeyboardInterrupt as interrupt:
                if self.job_id is not None:
                    backend = f"RemoteBackend(job_id={self.job_id!r})"
                    interrupt.add_note(f"The job continues. Get its results with `{backend}.wait()`, or end it with `{backend}.cancel()`.")
                raise
        raise AssertionError("the last message finishes the job")

    def _result_of(self, message: Message, result: bytes | None = None) -> bytes:
        """Return the results of a finished job: ``result`` if they came with the last message, else by download. Raises the job's error."""
        if message["status"] == JobStatus.ERROR.value:
            raise error_of(message)
        return self._client.result(message["id"]) if result is None else result

    def _end(self, message: Message, result: bytes) -> dict[str, Any]:
        """Bind and return the results of a finished job."""
        values = decode_results(result) if self._recorded is None else self._recorded.bind(result)
        self._recorded = None
        self._results = {"id": message["id"], **values}
        return self._results

    def _note(self, message: Message) -> None:
        """Note a message, which comes after all that were noted before. The last one is followed again, for the results."""
        if not JobStatus(message["status"]).finished:
            self._seen = max(self._seen, message["number"])
        if self._recorded is not None:
            warn_of_differences(self._recorded.facts, message["meta"].get("model"))
        self._note_status(message)

    def _note_status(self, message: Message) -> None:
        """Note the latest status. Lines that the job has printed before may not have been seen."""
        self.job_id = message["id"]
        if message["status"] != JobStatus.LOG.value:
            self.job_status = JobStatus(message["status"])

    def _id(self) -> str:
        if self.job_id is None:
            raise ValueError("This backend has no job so far. Trace a model with it, or attach a job with `RemoteBackend(job_id=...)`.")
        return self.job_id


def backend_for(model: Any, remote: bool | str, backend: Backend | None, blocking: bool, **options: Any) -> Backend:
    """Return the backend for ``remote=`` of a trace.

    Args:
        model: The model of the trace.
        remote: ``True`` for the server of ``CONFIG.API.HOST``, the address of another server, ``"local"`` for this process, ``"program"``
            to record the block and run nothing.
        backend: The argument ``backend=`` of the trace; must be None.
        blocking: Whether to wait for the results.
        **options: ``job_id`` and ``verbose`` of :class:`RemoteBackend`; both need a server.

    Raises:
        TypeError: If ``remote`` has another type.
        ValueError: If ``backend`` is given, if ``remote`` is not an address, or if the model was not loaded by name.
    """
    if not isinstance(remote, (bool, str)):
        raise TypeError(f"remote= must be True, 'local', 'program' or the address of a server; got {type(remote).__name__}.")
    if backend is not None:
        raise ValueError("Give `remote=` or `backend=`, not both.")
    if options.get("job_id") is not None and remote in ("local", "program"):
        raise ValueError(f"job_id= names a job of a server, but remote={remote!r} uses no server.")
    if remote == "local":
        if not blocking:
            raise ValueError("remote='local' runs the block in this process at once: leave out blocking=False.")
        return LocalBackend(model)
    if remote == "program":
        return RecordingBackend()
    return RemoteBackend(model_key_of(model), blocking=blocking, host=remote if isinstance(remote, str) else None, **options)
