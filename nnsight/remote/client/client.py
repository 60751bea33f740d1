"""The client of a server: submits jobs, follows them, fetches results.

A submitted job does not depend on the connection, so the client retries every step that breaks. It submits again with the same nonce, so
there is no second job. It opens a new WebSocket and continues after the last message that it saw. It continues a download after the last
byte. If the server cannot be reached for longer than ``patience``, the client raises an error. The result can be fetched later by job id.

The client does not trust the server: it unpickles nothing, and it sends the key to the chosen address only. It follows no redirects, and
no addresses in messages.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import platform
import threading
import time
import uuid
from collections.abc import Iterable, Iterator
from typing import Any

try:
    import requests
    from tqdm.auto import tqdm
    from tqdm.utils import CallbackIOWrapper
    from urllib3.filepost import encode_multipart_formdata
    from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus
    from websockets.sync.client import connect
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"Remote execution needs further packages ({error.name}): pip install 'nnsight[remote]'.") from error

from ...config import CONFIG
from ..protocol import CONTENT_TYPE, FRAMING, KEY_HEADER, PYTHON_HEADER, TIME_HEADER, VERSION_HEADER, JobStatus, Message
from .answers import address, checked_id, detail_of, error_of, text_of
from .errors import RemoteConnectionError, RemoteError, RetryableError, refusal
from .sockets import Socket, is_message

__all__ = ["Client", "RemoteConnectionError", "RemoteError", "address", "checked_id", "error_of"]

#: Minimum size of a transfer with a progress bar, in bytes.
_LONG = 4 * 2**20
_CHUNK = 256 * 1024
#: How long an idle WebSocket is kept for the next job, in seconds.
_IDLE_SECONDS = 60.0


class Client:
    """A server, and a key for it. Several threads may use one client.

    Args:
        host: Address of the server, such as ``https://models.example.org``; by default ``CONFIG.API.HOST``.
        api_key: The key; by default ``CONFIG.API.KEY``.
        timeout: Maximum wait for the next bytes of an answer, in seconds.
        patience: Maximum time for attempts to reach the server, in seconds.

    Raises:
        ValueError: If ``host`` is not an address.
    """

    def __init__(self, host: str | None = None, api_key: str | None = None, *, timeout: float = 60.0, patience: float = 60.0) -> None:
        self.host = address(host or CONFIG.API.HOST)
        self._key = api_key or CONFIG.API.KEY
        self._timeout = timeout
        self._patience = patience
        self._local = threading.local()
        self._idle: list[tuple[float, Socket]] = []
        self._lock = threading.Lock()

    # -- jobs --------------------------------------------------------------------------------------------------------

    def submit(self, payload: bytes, model_key: str) -> Message:
        """Submit a job without waiting for its end, and return its first message.

        Args:
            payload: The program.
            model_key: The model, see :class:`~nnsight.remote.protocol.ModelKey`.

        Raises:
            RemoteError: If the server refuses the job.
            RemoteConnectionError: If the server cannot be reached.
        """
        return self._post(_envelope(model_key), payload)

    def _post(self, envelope: dict[str, Any], payload: bytes) -> Message:
        fields: dict[str, Any] = {"data": json.dumps(envelope), "blob": ("payload", payload, CONTENT_TYPE)}
        body, content_type = encode_multipart_formdata(fields)
        return self._message("POST", "/request", body, content_type)

    def latest(self, job_id: str) -> Message | None:
        """Return the latest status message of a job; ``None`` if there is no such job for this key.

        Raises:
            RemoteError: If the server refuses the request.
            ValueError: If ``job_id`` is not the id of a job.
        """
        try:
            return self._message("GET", f"/response/{checked_id(job_id)}")
        except RemoteError as error:
            if error.code == 404:
                return None
            raise

    def cancel(self, job_id: str) -> Message:
        """End a job that waits or runs, and return its latest status message. A finished job does not change.

        Raises:
            RemoteError: If there is no such job for this key.
        """
        return self._message("DELETE", f"/request/{checked_id(job_id)}")

    def result(self, job_id: str) -> bytes:
        """Download the result of a job. A download that breaks off continues where it stopped.

        Raises:
            RemoteError: If there is no result.
            RemoteConnectionError: If the server cannot be reached.
        """
        path, got = f"/result/{checked_id(job_id)}", bytearray()
        patience = _Patience(self._patience, f"fetch the result of job {job_id} from {self.host}")
        while True:
            try:
                headers = {"Range": f"bytes={len(got)}-"} if got else {}
                with self._http("GET", path, headers=headers, stream=True) as answer:
                    if answer.status_code != 206:
                        got.clear()
                    length = len(got) + int(answer.headers.get("content-length", "0"))
                    with _bar("Downloading", length, len(got)) as bar:
                        for chunk in answer.iter_content(_CHUNK):
                            got += chunk
                            bar.update(len(chunk))
                            patience.renew()
                if len(got) >= length:
                    return bytes(got)
                raise RetryableError("the connection ended before the end of the result")
            except (requests.RequestException, RetryableError) as error:
                patience.wait(error)

    def run(self, payload: bytes, model_key: str) -> Iterator[tuple[Message, bytes | None]]:
        """Submit a job and yield its messages, each with its result or ``None``; see :meth:`follow`."""
        envelope = _envelope(model_key)
        socket: Socket | None = None
        with contextlib.suppress(RetryableError):  # without a socket, the client polls
            socket = self._idle_socket() or self._open()
        first: list[tuple[Message, bytes | None]] = []
        try:
            if socket is not None and len(payload) <= socket.takes:
                try:
                    first = socket.submit(envelope, payload)
                except RetryableError:  # submitted again below; the nonce prevents a second job
                    socket.close()
                    socket = None
            if not first:
                session_id = "" if socket is None else socket.session_id
                message = self._post({**envelope, "session_id": session_id}, payload)
        except BaseException:
            if socket is not None:
                socket.close()
            raise
        if first:
            yield from self._follow(first[0][0]["id"], 0, socket, first)
        else:
            yield message, None
            yield from self._follow(message["id"], message["number"], socket)

    def follow(self, job_id: str, after: int = 0) -> Iterator[tuple[Message, bytes | None]]:
        """Yield the messages of a job with numbers above ``after``, up to the message that finishes the job.

        Each message comes with a result or ``None``: a short result is sent with ``COMPLETED``, others are fetched with :meth:`result`.

        Raises:
            RemoteError: If there is no such job for this key.
            RemoteConnectionError: If the server cannot be reached. The job continues.
        """
        yield from self._follow(checked_id(job_id), after, None)

    def _follow(
        self, job_id: str, after: int, socket: Socket | None, first: Iterable[tuple[Message, bytes | None]] = ()
    ) -> Iterator[tuple[Message, bytes | None]]:
        """Yield the messages ``first`` and the following messages of a job. ``socket`` must serve no other job meanwhile."""
        patience = _Patience(self._patience, f"get messages of job {job_id} from {self.host}")
        polled = 0  # number of the latest message that came without a socket
        while True:
            worked = socket is not None  # whether this socket has brought something
            try:
                if socket is None:
                    socket = self._open(f"&job={job_id}&after={after}")
                    patience.renew()
                for message, result in itertools.chain(first, socket.messages(job_id)):
                    worked, after = True, message["number"]
                    finished = JobStatus(message["status"]).finished
                    if finished and socket is not None and socket.serves_many:
                        # Done before the last message is yielded, because callers stop iterating there.
                        with self._lock:
                            self._idle.append((time.monotonic(), socket))
                        socket = None
                    if after > polled or message["status"] == JobStatus.LOG.value:
                        yield message, result
                    if finished:
                        return
            except (ConnectionClosed, RetryableError) as error:
                if worked:  # another socket brings all later messages, while polling brings only the latest status
                    patience.wait(error)
                    continue
                try:  # a proxy may allow HTTP but no WebSockets
                    latest = self._message("GET", f"/response/{job_id}", once=True)
                except RemoteConnectionError:
                    patience.wait(error)
                    continue
                if latest["number"] > max(after, polled):
                    polled = latest["number"]
                    patience.renew()
                    yield latest, None
                if JobStatus(latest["status"]).finished:
                    return
                patience.wait(error)
            finally:
                if socket is not None:
                    socket.close()
                socket, first = None, ()

    # -- the server --------------------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """Return the answer of ``GET /status``: the models of the server."""
        return self._json("GET", "/status")

    def whoami(self) -> dict[str, Any]:
        """Return the answer of ``GET /whoami``: the owner and the limits of the key."""
        return self._json("GET", "/whoami")

    def close(self) -> None:
        """Close idle connections."""
        with self._lock:
            idle, self._idle = self._idle, []
        for _, socket in idle:
            socket.close()

    # -- HTTP --------------------------------------------------------------------------------------------------------

    def _message(self, *args: Any, **options: Any) -> Message:
        """Make a request with :meth:`_json` and return the answer, which must be a message."""
        message = self._json(*args, **options)
        if not is_message(message):
            raise RemoteError(f"The answer of {self.host} is not a message about a job: is it a server of nnsight?")
        return message

    def _json(self, method: str, path: str, body: bytes = b"", content_type: str | None = None, once: bool = False) -> Any:
        """Make a request and return the JSON of the answer. Unless ``once``, retry while the server cannot be reached or restarts."""
        patience = _Patience(0.0 if once else self._patience, f"reach {self.host}")
        headers = {} if content_type is None else {"Content-Type": content_type}
        while True:
            try:
                with _bar("Uploading", len(body)) as bar:
                    data = CallbackIOWrapper(bar.update, io.BytesIO(body)) if body else None
                    return self._http(method, path, data=data, headers=headers).json()
            except RetryableError as error:
                patience.wait(error)
            except ValueError:
                raise RemoteError(f"The answer of {self.host}{path} is not JSON: is it a server of nnsight?") from None

    def _http(self, method: str, path: str, headers: dict[str, str], **options: Any) -> requests.Response:
        """Make a request and return the answer. Raises a :class:`RetryableError` if another attempt may succeed."""
        if not hasattr(self._local, "session"):
            self._local.session = requests.Session()
        timeout = (min(10.0, self._timeout), self._timeout)
        options |= {"headers": {**self._headers(), **headers}, "timeout": timeout, "allow_redirects": False}
        try:
            answer: requests.Response = self._local.session.request(method, self.host + path, **options)
        except requests.RequestException as error:
            raise RetryableError(str(error)) from error
        if not {"content-length", "transfer-encoding"} & {name.lower() for name in answer.headers}:
            raise RetryableError("the connection ended within the headers of the answer")
        if answer.ok and not answer.is_redirect:
            return answer
        raise refusal(self.host, answer.status_code, detail_of(answer))

    def _headers(self) -> dict[str, str]:
        from ... import __version__

        key = {} if self._key is None else {KEY_HEADER: self._key}
        versions = {VERSION_HEADER: __version__, PYTHON_HEADER: platform.python_version()}
        return {**versions, TIME_HEADER: str(time.time()), **key}

    # -- WebSockets --------------------------------------------------------------------------------------------------

    def _open(self, query: str = "") -> Socket:
        """Open a socket, for one job if ``query`` names it. Raises a :class:`RetryableError` if another attempt may succeed."""
        try:
            manager = connect(
                f"ws{self.host.removeprefix('http')}/subscribe?framing={FRAMING}{query}",
                additional_headers=self._headers(),
                open_timeout=min(10.0, self._timeout),
                close_timeout=1.0,
                max_size=None,
                compression=None,
                user_agent_header=None,
            )
            connection = manager.__enter__()  # not in a `with` statement, because it may be kept for the next job
        except InvalidStatus as error:
            if error.response.status_code in (401, 403, 404):
                detail = text_of(bytes(error.response.body or b""))
                raise refusal(self.host, error.response.status_code, detail) from None
            raise RetryableError(str(error)) from error
        except (OSError, InvalidHandshake, EOFError) as error:  # a timeout is an OSError
            raise RetryableError(str(error)) from error
        return Socket(self.host, connection, self._timeout, serves_many=not query)

    def _idle_socket(self) -> Socket | None:
        """Return an idle socket that is still open, if there is one."""
        while True:
            with self._lock:
                if not self._idle:
                    return None
                since, socket = self._idle.pop()
            if time.monotonic() - since < _IDLE_SECONDS and socket.usable:
                return socket
            socket.close()


class _Patience:
    """Waits between attempts, longer each time, and gives up after ``seconds`` without success. ``goal`` completes the error message."""

    def __init__(self, seconds: float, goal: str) -> None:
        self._seconds, self._goal = seconds, goal
        self.renew()

    def renew(self) -> None:
        """Restart the clock, after a success."""
        self._until = time.monotonic() + self._seconds
        self._pause = 0.05

    def wait(self, error: Exception) -> None:
        """Wait before the next attempt. Raises a :class:`RemoteConnectionError` if the time is over."""
        if time.monotonic() + self._pause > self._until:
            raise RemoteConnectionError(
                f"Could not {self._goal} within {self._seconds:g} seconds: {error}. Check the address (CONFIG.API.HOST). "
                "A job that was submitted continues: get its results later with `RemoteBackend(job_id=...)`."
            ) from error
        time.sleep(self._pause)
        self._pause = min(2 * self._pause, 5.0)


def _bar(title: str, total: int, done: int = 0) -> Any:
    """Return a progress bar, which is only visible for long transfers."""
    hidden = total < _LONG or not CONFIG.APP.REMOTE_LOGGING
    return tqdm(desc=title, total=total, initial=done, unit="B", unit_scale=True, leave=False, disable=hidden)


def _envelope(model_key: str) -> dict[str, Any]:
    """Return the envelope of a new job that belongs to no WebSocket."""
    return {"model_key": model_key, "session_id": "", "compress": False, "env": {}, "nonce": str(uuid.uuid4())}
