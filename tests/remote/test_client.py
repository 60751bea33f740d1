"""The client: it hears everything, loses nothing, and trusts nobody."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import nnsight
from nnsight import CONFIG
from nnsight.intervention.backends.remote import RemoteBackend
from nnsight.program.format.errors import ExecutionFailedError, InvalidProgramError, NotExpressibleError
from nnsight.remote.client import remote_backend as client_module
from nnsight.remote.client.answers import address, error_of
from nnsight.remote.client.client import Client, RemoteConnectionError, RemoteError
from nnsight.remote.client.display import Progress
from nnsight.remote.protocol import JobStatus, Message, ModelKey, join_packet
from nnsight.remote.server.models import engine_of
from nnsight.remote.server.settings import Settings

from ..conftest import Hooks
from .remoting import MODEL, Accounts, Orders, Running, Wire, account, nonce, order, running, until, wire_to

STORY = ["RECEIVED", "QUEUED", "DISPATCHED", "RUNNING", "COMPLETED"]


@pytest.fixture
def wire(server: Running) -> Iterator[Wire]:
    with wire_to(server) as wire:
        yield wire


@contextlib.contextmanager
def client_of(url: str, key: str | None = None, **options: Any) -> Iterator[Client]:
    client = Client(url, key, **{"patience": 10.0, **options})
    try:
        yield client
    finally:
        client.close()


def story(client: Client, payload: bytes) -> tuple[list[str], bytes]:
    """Run a payload; return the statuses, and the result however it came."""
    found = list(client.run(payload, str(MODEL)))
    last, result = found[-1]
    assert last["status"] == "COMPLETED", last
    return [message["status"] for message, _ in found], client.result(last["id"]) if result is None else result


# -- a job ----------------------------------------------------------------------------------------------------------------------


def test_jobs_one_after_the_other_share_a_socket(server: Running) -> None:
    with client_of(server.url) as client:
        for number in range(4):
            assert story(client, order(say=f"{number}")) == (STORY, str(number).encode())
        assert server.figure("nnsight_sockets") == 1
    until(lambda: server.figure("nnsight_sockets") == 0)


def test_threads_share_a_client(server: Running) -> None:
    texts = [f"{number}" for number in range(18)]
    with client_of(server.url) as client, ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda text: story(client, order(say=text))[1], texts))
    assert found == [text.encode() for text in texts]


def test_a_job_can_be_asked_for_by_id(server: Running, orders: Orders) -> None:
    with client_of(server.url) as client:
        job = client.submit(order(say="x", wait=True), str(MODEL))["id"]
        until(orders.started.is_set)
        latest = client.latest(job)
        assert latest is not None and latest["status"] == "RUNNING"
        assert (server.get(f"/result/{job}").status_code, server.get(f"/result/{nonce()}").status_code) == (409, 404)
        orders.gate.set()
        assert [message["status"] for message, _ in client.follow(job)] == STORY
        assert [message["status"] for message, _ in client.follow(job, latest["number"])] == ["COMPLETED"]
        assert client.latest(nonce()) is None
        with pytest.raises(RemoteError, match="no such job"):
            next(client.follow(nonce()))
        for call in (client.latest, client.result, client.follow):
            with pytest.raises(ValueError, match="not the id of a job"):
                list(call("../etc"))  # type: ignore[arg-type]


# -- what breaks ------------------------------------------------------------------------------------------------------------------


def test_a_socket_that_breaks_is_taken_up_again(server: Running, orders: Orders, wire: Wire) -> None:
    with client_of(wire.url) as client:
        seen: list[str] = []
        for message, _ in client.run(order(say="kept", wait=True), str(MODEL)):
            seen.append(message["status"])
            if message["status"] == "RUNNING" and len(seen) == 4:
                wire.cut()
                threading.Timer(0.2, orders.gate.set).start()
        assert seen == STORY and client.result(message["id"]) == b"kept"
    assert orders.seen == ["kept"]
    assert any(request.startswith(b"GET /subscribe?framing=2&job=") for request in wire.requests)


@pytest.mark.parametrize("sockets", [True, False])
def test_what_a_job_prints_while_its_client_is_away_is_heard_later(server: Running, orders: Orders, wire: Wire, sockets: bool) -> None:
    with client_of(wire.url) as client:
        seen: list[tuple[str, str]] = []
        for message, _ in client.run(order(say="x", wait=True, print=["one"]), str(MODEL)):
            seen.append((message["status"], message["description"]))
            if seen[-1] == ("LOG", "one"):
                wire.never = () if sockets else (b"GET /subscribe",)
                wire.cut()
                job = server.gateway.jobs[message["id"]]
                for told in [(JobStatus.LOG, "two"), (JobStatus.QUEUED, "again"), (JobStatus.LOG, "three")]:
                    server.loop.call_soon_threadsafe(job.tell, *told)
                until(lambda job=job: job.messages[-1]["description"] == "three")
                if sockets:
                    orders.gate.set()
            elif seen[-1] == ("QUEUED", "again"):
                wire.never = ()
                orders.gate.set()
    assert sorted(text for status, text in seen if status == "LOG") == ["one", "three", "two"]
    assert [status for status, _ in seen if status != "LOG"] == [*STORY[:4], "QUEUED", "COMPLETED"]


@pytest.mark.parametrize("bytes_of_answer", [0, 40, 250])
@pytest.mark.parametrize("through_socket", [True, False])
def test_a_submission_whose_answer_is_lost_makes_one_job(
    server: Running, orders: Orders, wire: Wire, bytes_of_answer: int, through_socket: bool
) -> None:
    # The first byte of a binary frame; long jobs do not go through the socket.
    wire.rules = [(b"\x82", bytes_of_answer)] if through_socket else [(b"POST /request", bytes_of_answer)] * 2
    with client_of(wire.url) as client:
        found, result = story(client, order(say="once", more="" if through_socket else "x" * 2**16))
        assert result == b"once" and found[-1] == "COMPLETED" and len(server.gateway.jobs) == 1
        assert orders.seen == ["once"]
        posted = 1 if through_socket else 3
        assert sum(request.startswith(b"POST") for request in wire.requests) == posted
        assert story(client, order(say="twice")) == (STORY, b"twice")
    assert sum(request.startswith(b"POST") for request in wire.requests) == posted


def test_frames_that_cannot_be_read_end_the_socket_and_not_the_job(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    packets = [b"", b"x", bytes(8), b"\x09" + bytes(7) + b"[]", *map(join_packet, ([], {}, 3, [{}], {"code": "x"}))]
    with client_of(server.url, patience=30.0) as client:
        for number, packet in enumerate(packets, 1):
            monkeypatch.setattr("nnsight.remote.server.sessions.join_packet", lambda content, binary=b"", packet=packet: packet)
            found, result = story(client, order(say="polled"))
            assert (found[-1], result) == ("COMPLETED", b"polled") and len(server.gateway.jobs) == number


def test_a_download_goes_on_where_it_stopped(orders: Orders, tmp_path: Path) -> None:
    with running(orders.engine(), tmp_path, settings=Settings(inline=0)) as server, wire_to(server) as wire:
        wire.rules = [(b"GET /result", 300_000), (b"GET /result", 200_000)]
        with client_of(wire.url) as client:
            text = "".join(f"{number:07}" for number in range(100_000))
            assert story(client, order(say=text))[1] == text.encode()
    assert sum(request.startswith(b"GET /result") for request in wire.requests) == 3


def test_without_websockets_a_job_is_asked_about(server: Running, wire: Wire) -> None:
    wire.never = (b"GET /subscribe",)
    with client_of(wire.url) as client:
        found, result = story(client, order(say="polled"))
    assert (found[0], found[-1], result) == ("RECEIVED", "COMPLETED", b"polled")


def test_a_server_that_restarts_keeps_a_client_waiting_and_no_more(tmp_path: Path) -> None:
    first, second = Orders(), Orders()
    second.gate.set()
    server = Running(first.engine(), tmp_path)
    wire = Wire(server.port)
    seen: list[str] = []
    with client_of(wire.url, patience=30.0) as client:
        for message, _ in client.run(order(say="kept", wait=True), str(MODEL)):
            seen.append(message["status"])
            if len(seen) == 4:
                server.stop()
                server = Running(second.engine(), tmp_path)
                wire.target = server.port
        assert (seen[:4], seen[-1]) == (STORY[:4], "COMPLETED")
        assert client.result(message["id"]) == b"kept"
    first.gate.set()
    wire.close()
    server.stop()
    assert second.seen == ["kept"]


def test_a_server_that_stays_away_is_given_up_with_the_job_named(server: Running, orders: Orders, wire: Wire) -> None:
    with client_of(wire.url, patience=0.3) as client:
        with pytest.raises(RemoteConnectionError, match=r"get messages of job .*RemoteBackend\(job_id"):
            for message, _ in client.run(order(say="kept", wait=True), str(MODEL)):
                if message["status"] == "RUNNING":
                    wire.close()
    orders.gate.set()
    assert server.finished(message["id"])["status"] == "COMPLETED"
    with client_of(wire.url, patience=0.1) as client, pytest.raises(ConnectionError, match="CONFIG.API.HOST"):
        client.status()


def test_a_job_is_cancelled(server: Running, orders: Orders) -> None:
    with client_of(server.url) as client:
        client.submit(order(say="first", wait=True), str(MODEL))
        until(orders.started.is_set)
        second = client.submit(order(say="second"), str(MODEL))
    backend = RemoteBackend(job_id=second["id"], host=server.url)
    backend.cancel()
    assert backend.job_status is JobStatus.ERROR
    with pytest.raises(RemoteError, match="cancelled"):
        backend.wait()
    with pytest.raises(RemoteError, match="no such job"):
        RemoteBackend(job_id=nonce(), host=server.url).cancel()
    orders.gate.set()


def test_a_server_that_is_about_to_stop_is_asked_again(server: Running) -> None:
    server.gateway.draining = True
    threading.Timer(0.3, setattr, (server.gateway, "draining", False)).start()
    with client_of(server.url) as client:
        assert story(client, order(say="x"))[1] == b"x"


# -- refusals --------------------------------------------------------------------------------------------------------------------


def test_refusals_are_raised_with_what_the_server_says(orders: Orders, tmp_path: Path) -> None:
    door = Accounts(a=account("alice", queue=1, bytes=1000))
    with running(orders.engine(), tmp_path, door=door) as server:
        for key in (None, "wrong"):
            with client_of(server.url, key) as client, pytest.raises(RemoteError, match="API key is missing or unknown") as refused:
                list(client.run(order(say="x"), str(MODEL)))
            assert refused.value.code == 401
        with client_of(server.url, "a") as client:
            limits = {"queue": 1, "bytes": 1000, "seconds": 60.0}
            assert client.whoami() == {"name": "alice", "limits": limits, "email": "alice", "tags": []}
            for payload, model, code, word in [
                (order(say="x" * 2000), MODEL, 413, "1,000 bytes"),
                (b"\x80\x04", MODEL, 415, "a pickle"),
                (order(say="x"), ModelKey("other"), 404, "test/model"),
            ]:
                for submit in (client.submit, lambda *job: list(client.run(*job))):
                    with pytest.raises(RemoteError, match=word) as refused:
                        submit(payload, str(model))
                    assert refused.value.code == code
            client.submit(order(say="x", wait=True), str(MODEL))
            for submit in (client.submit, lambda *job: list(client.run(*job))):
                with pytest.raises(RemoteError, match="1 jobs of this key") as refused:
                    submit(order(say="x"), str(MODEL))
                assert refused.value.code == 429
        orders.gate.set()


def test_errors_of_jobs_have_their_types() -> None:
    def message(name: Any) -> Message:
        return Message(id="i", status="ERROR", description="why", data=name, meta={}, number=1)

    for kind in (InvalidProgramError, ExecutionFailedError):
        error = error_of(message({"error": kind.__name__}))
        assert type(error) is kind and str(error) == "why"
    for data in ({"error": "SystemExit"}, {"error": 3}, {}, None, "x"):
        assert type(error_of(message(data))) is RemoteError


@contextlib.contextmanager
def odd_server(status: int, body: bytes, **headers: str) -> Iterator[tuple[str, list[Any]]]:
    """Yield the address of a server that gives one answer to everything, and the headers it got."""
    got: list[Any] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            got.append(dict(self.headers))
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.do_GET()

        def log_message(self, *args: Any) -> None:
            return

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", got
        finally:
            server.shutdown()


def test_the_key_does_not_follow_redirects() -> None:
    with odd_server(200, b"{}") as (elsewhere, got), odd_server(307, b"", Location=elsewhere) as (url, _):
        with client_of(url, "key") as client:
            for call in (client.status, client.whoami, lambda: client.submit(b"x", "m")):
                with pytest.raises(RemoteError, match="redirects"):
                    call()
        assert got == []


@pytest.mark.parametrize("body", [b"<html>", b"[]", b"{}", b'{"id": "../x"}', b'{"id": 3}'])
def test_answers_that_are_no_messages_are_refused(body: bytes) -> None:
    with odd_server(200, body) as (url, _), client_of(url, patience=0.1) as client:
        with pytest.raises(RemoteError, match="The answer of"):
            client.submit(b"x", "m")


def test_answers_that_name_no_reason() -> None:
    with odd_server(418, b"") as (url, _), client_of(url) as client, pytest.raises(RemoteError, match="418") as refused:
        client.status()
    assert refused.value.code == 418


def test_addresses() -> None:
    for host, expected in [
        ("https://a.example", "https://a.example"),
        ("http://a.example:80/x/", "http://a.example:80/x"),
        ("a.example", "https://a.example"),
        ("localhost:5001", "http://localhost:5001"),
        ("127.0.0.1", "http://127.0.0.1"),
        ("[::1]:5001", "http://[::1]:5001"),
    ]:
        assert address(host) == expected
    for host in ["", "ftp://a", "file:///etc", "http://", "http://a:b", "http://u:p@a", "http://a?x", "http://a#x", "//"]:
        with pytest.raises(ValueError, match="not the address"):
            address(host)


# -- what is shown -----------------------------------------------------------------------------------------------------------------


def test_statuses_are_shown_line_by_line_and_remarks_always(capsys: pytest.CaptureFixture[str]) -> None:
    def say(enabled: bool) -> tuple[str, str]:
        with contextlib.closing(Progress(enabled)) as progress:
            for status, text in [("RUNNING", "The job\x1b[2J runs."), ("LOG", "a remark"), ("COMPLETED", "")]:
                progress.show(Message(id="12345678-", status=status, description=text, data=None, meta={}, number=1))
        return capsys.readouterr()

    out, err = say(True)
    assert out == "a remark\n"
    lines = err.splitlines()
    assert [line.split()[:2] for line in lines] == [["[12345678]", "RUNNING"], ["[12345678]", "COMPLETED"]]
    assert "\x1b" not in err  # a server does not get to control the terminal
    assert say(False) == ("a remark\n", "")


def test_on_a_terminal_one_line_changes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with contextlib.closing(Progress()) as progress:
        for status in ("QUEUED", "COMPLETED"):
            progress.show(Message(id="1", status=status, description="x" * (9 if status == "QUEUED" else 2), data=None, meta={}, number=1))
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and err.count("\r") == 2
    first, second = err.strip("\n").split("\r")[1:]
    assert len(second) == len(first)  # the longer line is wiped


def test_long_transfers_have_bars(server: Running, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("nnsight.remote.client.client._LONG", 1000)
    with client_of(server.url) as client:
        job = client.submit(order(say="x" * 2000), str(MODEL))["id"]
        server.finished(job)
        assert "Uploading" in capsys.readouterr().err
        client.result(job)
        assert "Downloading" in capsys.readouterr().err
        monkeypatch.setenv("NNSIGHT_APP_REMOTE_LOGGING", "0")
        client.result(job)
        assert capsys.readouterr().err == ""


# -- blocks ------------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(demo: Any) -> Any:
    return demo


PROMPT = "The Eiffel Tower is in the city of"


def steered(model: Any) -> torch.Tensor:
    """Logits of the prompt, with a block's output edited by a plain hook."""

    hooks = Hooks(model._module).output("transformer.h.2", lambda out: out + 0.5 * torch.arange(out.shape[-1]) / out.shape[-1])
    with torch.no_grad():
        return hooks(**model.tokenizer(PROMPT, return_tensors="pt")).logits


def test_a_block_runs_on_the_server_and_binds_what_it_saved(here: Running, model: Any) -> None:
    seen = []
    with model.trace(PROMPT, remote=True) as tracer:
        hidden = model.transformer.h[2].output
        hidden[:] += 0.5 * torch.arange(hidden.shape[-1]) / hidden.shape[-1]
        logits = model.lm_head.output.save()
        kept = [model.lm_head.output[:, -1].argmax(-1)].save()
        seen.append(logits.shape)
    expected = steered(model)
    assert type(logits) is torch.Tensor
    torch.testing.assert_close(logits, expected, rtol=0, atol=0)
    assert kept[0].item() == expected[0, -1].argmax().item()
    assert tracer.backend.job_status is JobStatus.COMPLETED
    assert str(tracer.backend.job_status) == "JobStatus.COMPLETED"
    assert here.finished(tracer.backend.job_id)["status"] == "COMPLETED"
    assert seen == [logits.shape]  # the block ran here, once


def test_generation(here: Running, model: Any) -> None:
    with model.generate(PROMPT, max_new_tokens=3, do_sample=False, remote=True) as tracer:
        out = tracer.result.save()
    inputs = model.tokenizer(PROMPT, return_tensors="pt")
    expected = model._module.generate(**inputs, max_new_tokens=3, do_sample=False)
    assert torch.equal(out, expected)
    with pytest.raises(ValueError, match="needs a block"):
        model.generate(PROMPT, max_new_tokens=3, remote=True)


def test_a_job_that_is_not_waited_for_is_polled(here: Running, model: Any) -> None:
    with model.trace(PROMPT, remote=True, blocking=False) as tracer:
        collected = [].save()
        collected.append(model.transformer.h[0].output.mean())
        logits = model.lm_head.output.save()
    backend = tracer.backend
    assert backend.job_id in here.gateway.jobs
    with pytest.raises(NameError):
        logits  # noqa: B018 - it has no value yet, and no stand-in either
    results = until(backend)
    assert set(results) == {"id", "logits", "collected"} and results["id"] == backend.job_id
    torch.testing.assert_close(results["logits"], _plain(model), rtol=0, atol=0)
    assert type(collected[0]) is torch.Tensor and collected[0].dim() == 0 and collected == results["collected"]
    assert backend() is results and backend.wait() is results
    again = RemoteBackend(job_id=backend.job_id)  # any process with the key can ask
    torch.testing.assert_close(again.wait()["logits"], results["logits"], rtol=0, atol=0)
    assert again.job_status is JobStatus.COMPLETED
    jobs = len(here.gateway.jobs)
    with model.trace(PROMPT, backend=again):  # its block gets the results of the job, and is not run
        logits = model.lm_head.output.save()
    torch.testing.assert_close(logits, results["logits"], rtol=0, atol=0)
    assert len(here.gateway.jobs) == jobs


def _plain(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model._module(**model.tokenizer(PROMPT, return_tensors="pt")).logits


def test_a_job_can_be_awaited_and_its_messages_followed(here: Running, model: Any) -> None:
    async def one(scale: float) -> tuple[list[str], torch.Tensor]:
        with model.trace(PROMPT, remote=True, blocking=False) as tracer:
            logits = (scale * model.lm_head.output).save()
        statuses = [message["status"] async for message in tracer.backend]
        return statuses, (await tracer.backend)["logits"]

    async def several() -> list[Any]:
        return await asyncio.gather(*(one(scale) for scale in (1.0, 2.0, 3.0)))

    for number, (statuses, logits) in enumerate(asyncio.run(several()), 1):
        assert statuses == STORY
        torch.testing.assert_close(logits, number * _plain(model))


def test_a_backend_without_a_job_or_with_none_that_exists(here: Running) -> None:
    with pytest.raises(ValueError, match="no job so far"):
        RemoteBackend("nnsight/demo")()
    with pytest.raises(RemoteError, match="has no job"):
        RemoteBackend(job_id=nonce())()
    with pytest.raises(ValueError, match="not the id"):
        RemoteBackend(job_id="../x")


def test_errors_of_the_program_are_raised_at_the_trace(here: Running, model: Any) -> None:
    with pytest.raises(ExecutionFailedError, match="outside of its tensor"):
        with model.trace(PROMPT, remote=True):
            rows = model.lm_head.output[0, :, 0].argmax().reshape(1) + 100_000
            picked = model.transformer.wte.weight.index_select(0, rows).save()
    with model.trace(PROMPT, remote=True, blocking=False) as tracer:
        rows = model.lm_head.output[0, :, 0].argmax().reshape(1) + 100_000
        picked = model.transformer.wte.weight.index_select(0, rows).save()
    with pytest.raises(ExecutionFailedError, match="outside of its tensor"):
        tracer.backend.wait()


def test_what_a_remote_trace_is_given_wrongly(here: Running, model: Any) -> None:
    with pytest.raises(ValueError, match="not both"):
        model.trace(PROMPT, remote=True, backend=RemoteBackend("nnsight/demo"))
    with pytest.raises(ValueError, match="add remote=True"):
        model.trace(PROMPT, blocking=False)
    with pytest.raises(ValueError, match="leave out blocking"):
        model.trace(PROMPT, remote="local", blocking=False)
    with pytest.raises(TypeError, match="got int"):
        model.trace(PROMPT, remote=1)
    with pytest.raises(ValueError, match="not the address"):
        model.trace(PROMPT, remote="ftp://x")
    said = '{"repo_id": "nnsight/demo", "revision": "main", "task": "text-generation"}'
    assert model.to_model_key() == f"nnsight.modeling.transformers.TransformersModel:{said}"
    nameless = nnsight.LanguageModel(model._module, model.tokenizer)
    with pytest.raises(ValueError, match="was not loaded by name"):
        nameless.trace(PROMPT, remote=True)
    with nameless.trace(PROMPT, backend=RemoteBackend("nnsight/demo")):  # but the server's may be meant
        logits = nameless.lm_head.output.save()
    torch.testing.assert_close(logits, _plain(model), rtol=0, atol=0)
    with model.trace(PROMPT, backend=RemoteBackend()):  # the key is that of the model
        logits = model.lm_head.output.save()
    torch.testing.assert_close(logits, _plain(model), rtol=0, atol=0)


def test_the_status_of_a_blocking_trace_is_shown(
    here: Running, model: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for shown in (True, False):
        monkeypatch.setattr(CONFIG.APP, "REMOTE_LOGGING", shown)
        with model.trace(PROMPT, remote=True):
            model.lm_head.output.save()
        captured = capsys.readouterr()
        assert [line.split()[1] for line in captured.err.splitlines()] == (STORY if shown else [])
        assert captured.out == ""


def test_a_trace_is_given_the_results_of_an_earlier_job(here: Running, model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with model.trace(PROMPT, remote=True, verbose=True) as tracer:
        first = model.lm_head.output.save()
    assert [line.split()[1] for line in capsys.readouterr().err.splitlines()] == STORY  # although REMOTE_LOGGING is off
    with model.trace(PROMPT, remote=True, job_id=tracer.backend.job_id) as again:
        first = model.lm_head.output.save()
    assert again.backend.job_id == tracer.backend.job_id
    torch.testing.assert_close(first, _plain(model), rtol=0, atol=0)
    with model.generate(PROMPT, max_new_tokens=1, remote=True, verbose=False) as tracer:
        tokens = tracer.result.save()
    assert tokens.shape[-1] == len(model.tokenizer(PROMPT)["input_ids"]) + 1
    for remote in ("local", "program"):
        with pytest.raises(ValueError, match="job_id= names a job of a server"):
            model.trace(PROMPT, remote=remote, job_id=nonce())


def test_importing_the_package_imports_nothing_of_this() -> None:
    code = "import sys, nnsight; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "nnsight.config" in found
    assert not {"requests", "websockets", "fastapi", "uvicorn", "nnsight.remote"} & set(found)


# -- sessions ----------------------------------------------------------------------------------------------------------------------

HERE, THERE = "The Colosseum there is in", "The Eiffel Tower is in the"


def patched(model: Any, **where: Any) -> tuple[torch.Tensor, torch.Tensor]:
    with model.session(**where):
        with model.trace(THERE):
            hidden = model.transformer.h[1].output[:, -1, :]
        with model.trace(HERE):
            clean = model.lm_head.output.save()
        with model.trace(HERE):
            model.transformer.h[1].output[:, -1, :] = hidden
            changed = model.lm_head.output.save()
    with pytest.raises(NameError):
        hidden  # noqa: B018 - was not saved
    return clean.detach(), changed.detach()


def test_a_session_is_one_job(here: Running, model: Any) -> None:
    before = len(here.gateway.jobs)
    clean, changed = patched(model, remote=True)
    assert len(here.gateway.jobs) - before == 1
    torch.testing.assert_close((clean, changed), patched(model), rtol=0, atol=0)
    assert not torch.equal(clean, changed)


def test_a_server_that_has_the_model_otherwise_is_noticed(here: Running, demo: Any) -> None:
    client = nnsight.LanguageModel("nnsight/demo", dtype=torch.bfloat16)
    with pytest.warns(UserWarning, match=r"dtype=torch.float32 .here torch.bfloat16") as found:
        with client.trace(HERE, remote=True):
            logits = client.lm_head.output.save()
    assert logits.dtype is torch.float32 and [warning.filename for warning in found] == [__file__]


def test_what_a_remote_session_cannot_have(here: Running, model: Any) -> None:
    jobs = len(here.gateway.jobs)
    with pytest.raises(ValueError, match="leave out remote="):
        with model.session(remote=True):
            with model.trace(HERE, remote=True):
                model.lm_head.output.save()
    with pytest.raises(NotExpressibleError, match="contains no trace"):
        with model.session(remote=True):
            number = 3
    other = nnsight.demo_model()
    with pytest.raises(NotExpressibleError, match="two models"):
        with model.session(remote=True):
            with model.trace(HERE):
                hidden = model.transformer.h[1].output
            with other.trace(HERE):
                other.transformer.h[1].output[:] = hidden
    assert len(here.gateway.jobs) == jobs
    with model.trace(HERE):  # and traces afterwards run here again
        clean = model.lm_head.output.save()
    assert clean.requires_grad
