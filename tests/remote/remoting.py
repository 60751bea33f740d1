"""A real server in a thread of the test process, an engine that obeys its payloads, and connections that break."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket as socketlib
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import requests
from websockets.sync.client import ClientConnection, connect

from nnsight.program.format.errors import ExecutionFailedError, InvalidProgramError
from nnsight.remote.client.backend import ProgramBackend
from nnsight.remote.protocol import CONTENT_TYPE, ModelKey
from nnsight.remote.server.engine import ThreadEngine
from nnsight.remote.server.gateway import Gateway
from nnsight.remote.server.keys import Account, Door, OpenDoor, hash_of
from nnsight.remote.server.serve import GatewayServer
from nnsight.remote.server.settings import Settings
from nnsight.remote.server.spool import Spool

from ..serving import until

MODEL = ModelKey("test/model")
FINISHED = ("COMPLETED", "ERROR")


class Accounts(dict[str, Account]):
    """A door with accounts by key."""

    def admit(self, key: str | None) -> Account | None:
        return self.get(key or "")


def account(name: str, **limits: Any) -> Account:
    return Account(name, hash_of(name), **limits)


def order(**what: Any) -> bytes:
    """Return a payload that tells the engine of :class:`Orders` what to do, in the shape of a safetensors file."""
    header = json.dumps({"__metadata__": {"graph": json.dumps(what)}}).encode()
    return len(header).to_bytes(8, "little") + header


def read_order(payload: bytes) -> dict[str, Any]:
    return json.loads(json.loads(payload[8:])["__metadata__"]["graph"])


class Orders:
    """An engine's function: obeys payloads, and notes which it got.

    Attributes:
        seen: What was run, in order, with the thread it ran in.
        gate: Payloads with ``wait`` stop here.
    """

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.threads: list[int] = []
        self.gate = threading.Event()
        self.started = threading.Event()

    def __call__(self, payload: bytes, log: Callable[[str], None]) -> bytes:
        what = read_order(payload)
        for line in what.get("print", []):
            log(line)
        self.seen.append(what.get("say"))
        self.threads.append(threading.get_ident())
        self.started.set()
        if what.get("wait"):
            assert self.gate.wait(20)
        if what.get("spin"):
            while True:
                time.sleep(0.001)
        if what.get("sleep"):
            time.sleep(what["sleep"])
        for kind in (InvalidProgramError, ExecutionFailedError, RuntimeError):
            if what.get("raise") == kind.__name__:
                raise kind(what["say"])
        if what.get("die", 0) >= self.seen.count(what.get("say")):
            raise SystemExit
        return str(what.get("say", "")).encode() * what.get("times", 1)

    def outcomes(self, payloads: Sequence[bytes], logs: Sequence[Callable[[str], None]]) -> list[bytes | Exception]:
        if len(payloads) == 1:
            return [self(payloads[0], logs[0])]
        self.seen.append([read_order(payload).get("say") for payload in payloads])
        if any(read_order(payload).get("spoils") for payload in payloads):
            raise RuntimeError("the group failed")
        return [str(read_order(payload)["say"]).encode() for payload in payloads]

    def kind_of(self, payload: bytes) -> str | None:
        return read_order(payload).get("kind")

    def engine(self) -> ThreadEngine:
        return ThreadEngine(self.outcomes, "test-engine", self.kind_of)


class Plain:
    """A client of the server at ``url`` without any of ours, which says that it is of nnsight 0.8."""

    url: str

    def post(self, payload: bytes, key: str = "", envelope: Any = None, **fields: Any) -> requests.Response:
        data = {"model_key": str(MODEL), "session_id": "", "compress": False, "env": {}, **fields}
        return requests.post(
            self.url + "/request",
            data={"data": json.dumps(data if envelope is None else envelope)},
            files={"blob": ("payload", payload, CONTENT_TYPE)},
            headers={"ndif-api-key": key, "nnsight-version": "0.8.1"},
            timeout=20,
        )

    def submit(self, payload: bytes, key: str = "", **fields: Any) -> str:
        answer = self.post(payload, key, **fields)
        assert answer.status_code == 200, answer.text
        return answer.json()["id"]

    def get(self, path: str, key: str = "", **headers: str) -> requests.Response:
        return requests.get(self.url + path, headers={"ndif-api-key": key, **headers}, timeout=20)

    def finished(self, job_id: str, key: str = "") -> dict[str, Any]:
        """Wait for a job and return the message that ended it."""
        return until(lambda: (m := self.get(f"/response/{job_id}", key).json())["status"] in FINISHED and m)


class Running(Plain):
    """A server that runs in a thread.

    Attributes:
        gateway: Its gateway.
        door: Who may use it.
    """

    def __init__(
        self,
        engine: Any,
        spool: Path | Spool,
        door: Door | None = None,
        settings: Settings | None = None,
        port: int = 0,
        key: ModelKey = MODEL,
    ) -> None:
        spool = spool if isinstance(spool, Spool) else Spool(spool)
        self.gateway = Gateway({key: engine}, spool, settings)
        self.door: Any = door or OpenDoor()
        self.server = GatewayServer(self.gateway, self.door, port=port)
        self._thread = threading.Thread(target=self._run, name="test-server")
        self._thread.start()
        until(lambda: self.server.started or not self._thread.is_alive())
        self.port = self.server.port
        self.url = f"http://127.0.0.1:{self.port}"

    def _run(self) -> None:
        async def stopped() -> None:  # uvicorn looks ten times a second
            await self.server.on_tick(0)  # which makes the headers
            while not self.server.should_exit:
                await asyncio.sleep(0.005)

        async def run() -> None:
            self.loop, self.server.main_loop = asyncio.get_running_loop(), stopped  # type: ignore[method-assign]
            await self.server.serve()

        asyncio.run(run())

    def stop(self) -> None:
        """Stop at once: what runs is not waited for."""
        self.server.should_exit = True
        self._thread.join(20)
        assert not self._thread.is_alive()

    def terminate(self) -> None:
        """Do what SIGTERM does, and wait for the end."""
        self.loop.call_soon_threadsafe(self.server.handle_exit, 15, None)
        self._thread.join(20)
        assert not self._thread.is_alive()

    def subscribe(self, key: str = "", query: str = "") -> ClientConnection:
        headers = {"ndif-api-key": key} if key else {}
        return connect(f"ws://127.0.0.1:{self.port}/subscribe{query}", additional_headers=headers)

    @contextlib.contextmanager
    def session(self, key: str = "") -> Iterator[tuple[ClientConnection, str]]:
        """Yield a socket, and the id of its session."""
        with self.subscribe(key) as socket:
            yield socket, json.loads(socket.recv(20))["session_id"]

    def figure(self, name: str) -> float:
        """Return the sum of a figure over its labels."""
        lines = self.get("/metrics").text.splitlines()
        values = [float(line.split()[-1]) for line in lines if line.split("{")[0].split(" ")[0] == name]
        assert values, f"no figure {name}"
        return sum(values)


@contextlib.contextmanager
def running(engine: Any, spool: Path | Spool, **options: Any) -> Iterator[Running]:
    server = Running(engine, spool, **options)
    try:
        yield server
    finally:
        server.stop()


def nonce() -> str:
    return str(uuid.uuid4())


def messages(socket: ClientConnection) -> list[dict[str, Any]]:
    """Return the messages of a socket up to the last of a job."""
    found = []
    while not found or found[-1]["status"] not in FINISHED:
        found.append(json.loads(socket.recv(20)))
    return found


class Wire:
    """A connection to a server that breaks where a test wants it to.

    Attributes:
        url: Where it listens.
        rules: Beginning of a request, and after how many bytes of its answer the connection ends; each is used once.
        never: Beginnings of requests that are not answered at all.
    """

    def __init__(self, port: int) -> None:
        self.target = port
        self.rules: list[tuple[bytes, int]] = []
        self.never: tuple[bytes, ...] = ()
        self.requests: list[bytes] = []
        self._listener = socketlib.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._open: list[socketlib.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """End all connections."""
        for end in self._open:
            with contextlib.suppress(OSError):
                end.shutdown(socketlib.SHUT_RDWR)
            end.close()
        self._open.clear()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socketlib.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                near = self._listener.accept()[0]
            except OSError:
                return
            try:
                far = socketlib.create_connection(("127.0.0.1", self.target))
            except OSError:
                near.close()
                continue
            left = [10**12]
            self._open += [near, far]
            threading.Thread(target=self._pump, args=(near, far, left, True), daemon=True).start()
            threading.Thread(target=self._pump, args=(far, near, left, False), daemon=True).start()

    def _pump(self, source: socketlib.socket, sink: socketlib.socket, left: list[int], asks: bool) -> None:
        with contextlib.suppress(OSError):
            while part := source.recv(65536):
                if asks:
                    self.requests.append(part.split(b"\r\n")[0])
                    if part.startswith(self.never or b"\n"):
                        break
                    rule = next((rule for rule in self.rules if part.startswith(rule[0])), None)
                    if rule is not None:
                        self.rules.remove(rule)
                        left[0] = rule[1]
                else:
                    part = part[: left[0]]
                    left[0] -= len(part)
                sink.sendall(part)
                if left[0] <= 0 and not asks:
                    break
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socketlib.SHUT_RDWR)
            end.close()


@contextlib.contextmanager
def wire_to(server: Running) -> Iterator[Wire]:
    wire = Wire(server.port)
    try:
        yield wire
    finally:
        wire.close()


class Catch(ProgramBackend):
    """Keeps the recorded block and runs nothing."""

    recorded: Any
    payload: bytes

    def submit(self, recorded: Any) -> None:
        self.recorded, self.payload = recorded, recorded.payload()
