"""The server: protocol, keys and limits, and what it does when something goes wrong."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
import json
import logging
import os
import signal
import socket as sockets
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from websockets.exceptions import ConnectionClosed, InvalidStatus

from nnsight import cli
from nnsight.remote.protocol import CONTENT_TYPE, JobStatus, ModelKey, join_packet, split_packet
from nnsight.remote.server import sessions
from nnsight.remote.server.engine import ThreadEngine, _Worker
from nnsight.remote.server.gateway import Gateway
from nnsight.remote.server.jobs import ServerJob
from nnsight.remote.server.keys import Account, KeyFile, add_key, read_accounts, remove_key
from nnsight.remote.server.queues import FairQueue
from nnsight.remote.server.serve import GatewayServer
from nnsight.remote.server.settings import Settings
from nnsight.remote.server.spool import Spool, StorageFullError
from nnsight.remote.server.telemetry import JsonLines

from .. import ROOT
from ..serving import free_port
from .remoting import (
    MODEL,
    Accounts,
    Orders,
    Plain,
    Running,
    account,
    messages,
    nonce,
    order,
    read_order,
    running,
    until,
)

# -- the protocol ----------------------------------------------------------------------------------------------------------------


def test_a_job_runs_and_its_result_is_fetched(server: Running) -> None:
    message = server.post(order(say="hello")).json()
    assert message["status"] == "RECEIVED" and set(message) == {"id", "status", "description", "data", "meta", "number"}
    ended = server.finished(message["id"])
    assert ended["status"] == "COMPLETED"
    assert ended["data"] == {"size": 5, "result": f"/result/{message['id']}"}
    assert ended["meta"]["runtime"] >= 0 and ended["meta"]["together"] == 1
    assert server.get(ended["data"]["result"]).content == b"hello"


def test_messages_come_through_the_socket_in_order_with_a_short_result(server: Running) -> None:
    with server.session() as (socket, session):
        job = server.submit(order(say="hello", print=["one", "two"]), session_id=session)
        found = messages(socket)
        assert [message["status"] for message in found] == ["QUEUED", "DISPATCHED", "RUNNING", "LOG", "LOG", "COMPLETED"]
        assert [message["description"] for message in found if message["status"] == "LOG"] == ["one", "two"]
        assert {message["id"] for message in found} == {job}
        numbers = [message["number"] for message in found]
        assert numbers == sorted(set(numbers))
        assert found[-1]["data"]["inline"] is True
        assert socket.recv(5) == b"hello"
        second = server.submit(order(say="again"), session_id=session)  # one socket, any number of jobs
        assert messages(socket)[-1]["id"] == second
        assert socket.recv(5) == b"again"


def test_what_comes_through_a_socket_is_checked_as_what_is_posted(guarded: Running) -> None:
    alice, good = {"model_key": str(MODEL)}, order(say="x")
    with guarded.subscribe(key="a", query="?framing=2") as socket:
        assert "takes" in json.loads(socket.recv(5))
        for frame, code, word in [
            (b"", 400, "packet"),
            (b"\xff" * 20, 400, "packet"),
            (join_packet([]), 400, "JSON object"),
            (join_packet("{}"), 400, "JSON object"),
            ((5000).to_bytes(8, "little") + b"[" * 5000, 400, "packet"),
            (join_packet({**alice, "nonce": "mine"}, good), 400, "UUID"),
            (join_packet({"model_key": "other"}, good), 404, "not served here"),
            (join_packet(alice), 415, "an unknown format"),
            (join_packet(alice, b"\x80\x04" + bytes(20)), 415, "a pickle"),
            (join_packet({**alice, "compress": True}, good), 415, "compressed"),
            (join_packet(alice, order(say="x" * 5000)), 413, "4,096 bytes"),
        ]:
            socket.send(frame)
            answer, rest = split_packet(socket.recv(5))
            assert (answer["code"], rest) == (code, b"") and word in answer["detail"], answer
        assert not guarded.gateway.jobs
        assert guarded.figure("nnsight_refused_total") == 11
        del guarded.door["a"]
        socket.send(join_packet(alice, good))  # a key that is withdrawn is so at once
        assert split_packet(socket.recv(5))[0]["code"] == 401
    job = guarded.submit(order(say="x", wait=True), key="b")
    for key, query, frame in [
        ("b", "?framing=2", "text"),
        ("b", "?framing=2", bytes(2**17)),
        ("b", "", join_packet(alice, good)),
        ("b", f"?framing=2&job={job}", join_packet(alice, good)),
    ]:
        with guarded.subscribe(key=key, query=query) as socket, pytest.raises(ConnectionClosed):
            socket.send(frame)
            while True:
                socket.recv(5)
    assert list(guarded.gateway.jobs) == [job]


def test_a_model_is_found_by_its_repository_alone_or_by_a_key_of_another_class(server: Running) -> None:
    for key in ("test/model", 'other.Class:{"repo_id": "test/model", "revision": null}'):
        assert server.finished(server.submit(order(say="x"), model_key=key))["status"] == "COMPLETED"
    answer = server.post(order(say="x"), model_key='x.Y:{"repo_id": "test/model", "revision": "dev"}')
    assert answer.status_code == 404 and "test/model (main)" in answer.json()["detail"]
    for key in ("", "x:{", 'x:{"revision": "main"}', 'x:{"repo_id": 3}', "a\nb", "x" * 600, "x:{" + '{"a":' * 5000):
        assert server.post(order(say="x"), model_key=key).status_code in (400, 404)


# -- what comes from outside ------------------------------------------------------------------------------------------------------


def test_payloads_of_other_clients_are_refused_and_never_run(server: Running, orders: Orders) -> None:
    for payload, word in [
        (b"\x80\x04\x95\x10\x00\x00\x00", "a pickle"),
        (b"PK\x03\x04" + bytes(20), "zip"),
        (b"\x28\xb5\x2f\xfd" + bytes(20), "compressed"),
        (b"\x78\x9c" + bytes(20), "compressed"),
        (b"\x1f\x8b" + bytes(20), "compressed"),
        (b"", "an unknown format"),
        (b"hello, this is no program", "an unknown format"),
        ((2**40).to_bytes(8, "little") + b"{}", "an unknown format"),
    ]:
        answer = server.post(payload, env={"packages": {f"package_{number}": "1.0.0" for number in range(1500)}})
        assert answer.status_code == 415
        for part in (word, "safetensors", "never unpickles", "0.8.1", "install"):
            assert part in answer.json()["detail"]
    for payload in (order(say="x"), b"\x80\x04"):
        answer = server.post(payload, compress=True)  # so nothing unpacks to more than the limit
        assert answer.status_code == 415 and "uncompressed" in answer.json()["detail"]
    assert not orders.seen and not server.gateway.jobs


def test_bad_envelopes_and_bodies_are_refused(server: Running) -> None:
    named = [f'x.Y:{{"repo_id": {repo}, "revision": {revision}}}' for repo, revision in (('"\\ud800"', '""'), ('"m"', '"\\ud800"'))]
    odd = ({"session_id": "../x"}, {"nonce": "1"}, {"nonce": 3}, *({"model_key": key} for key in named))
    for envelope in ([], 3, {}, {"model_key": 3}, *({"model_key": "m", **more} for more in odd)):
        assert server.post(order(say="x"), envelope=envelope).status_code == 400

    def post(**options: Any) -> int:
        return requests.post(server.url + "/request", timeout=10, **options).status_code

    assert post(data=b"hello") == 415
    assert post(data=b"hello", headers={"Content-Type": "multipart/form-data; boundary=x"}) == 400
    assert post(data=b"hello", headers={"Content-Type": "multipart/form-data"}) == 400
    assert post(data={"data": "{}"}, files={}) == 415
    assert post(data={"data": "no json"}, files={"blob": b"x"}) == 400
    assert post(data={"data": "[" * 40000}, files={"blob": b"x"}) == 400
    assert post(data={"data": json.dumps({"model_key": "test/model"})}, files={"other": b"x"}) == 400
    assert post(data={"data": json.dumps({"model_key": "test/model"}), "blob": "text"}, files={"other": b"x"}) == 400
    assert post(data={"data": "x" * 10**6}, files={"blob": b"x"}) == 400
    assert post(data={"data": "{}"}, files=[("blob", b"x"), ("blob", b"y")]) == 400
    assert server.finished(server.submit(order(say="x")))["status"] == "COMPLETED"


def test_ids_never_become_paths(server: Running) -> None:
    for path in ("..%2f..%2fetc%2fpasswd", "%2e%2e", "*", "a" * 5000, "....//", "%00"):
        for kind in ("response", "result"):
            assert server.get(f"/{kind}/{path}").status_code == 404
        with pytest.raises(InvalidStatus) as refused:
            server.subscribe(query=f"?job={path}")
        assert refused.value.response.status_code == 404


def test_a_payload_that_is_too_long_is_refused_with_and_without_its_length(guarded: Running) -> None:
    def chunks() -> Iterator[bytes]:
        yield b'--x\r\nContent-Disposition: form-data; name="blob"; filename="p"\r\n\r\n'
        for _ in range(100):
            yield bytes(4096)

    answer = guarded.post(order(say="x" * 5000), key="a")
    assert answer.status_code == 413 and "4,096 bytes" in answer.json()["detail"]
    assert guarded.post(order(say="x" * 500_000), key="a").status_code == 413
    headers = {"ndif-api-key": "a", "Content-Type": "multipart/form-data; boundary=x"}
    answer = requests.post(guarded.url + "/request", data=chunks(), headers=headers, timeout=10)
    assert answer.status_code == 413
    assert guarded.submit(order(say="x" * 5000), key="b")


HALF = (b"POST /request HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=x\r\nContent-Length: 1000\r\n\r\n--x\r\n")


def test_an_upload_that_never_ends_is_given_up(orders: Orders, tmp_path: Path) -> None:
    with running(orders.engine(), tmp_path, settings=Settings(upload=0.2)) as server:
        raw = sockets.create_connection(("127.0.0.1", server.port))
        raw.sendall(HALF)
        assert b" 408 " in raw.recv(1000)
        raw.close()


def test_an_upload_that_breaks_off_leaves_nothing(server: Running) -> None:
    with sockets.create_connection(("127.0.0.1", server.port)) as raw:
        raw.sendall(HALF)
        until(lambda: server.gateway._uploads["anonymous"] == 1)
    until(lambda: server.gateway._uploads["anonymous"] == 0)
    assert not server.gateway.jobs
    assert server.finished(server.submit(order(say="x")))["status"] == "COMPLETED"


# -- keys ---------------------------------------------------------------------------------------------------------------------------


def test_without_a_key_nothing_is_submitted_or_read(guarded: Running) -> None:
    job = guarded.submit(order(say="x"), key="a")
    for key in ("", "wrong"):
        assert guarded.post(order(say="x"), key=key).status_code == 401
        for path in (f"/response/{job}", f"/result/{job}", "/whoami"):
            assert guarded.get(path, key=key).status_code == 401
        with pytest.raises(InvalidStatus) as refused:
            guarded.subscribe(key=key)
        assert refused.value.response.status_code == 401
    assert "CONFIG.set_default_api_key" in guarded.get("/whoami").json()["detail"]


def test_jobs_of_another_key_are_as_if_they_were_not_there(guarded: Running) -> None:
    name = nonce()
    job = guarded.submit(order(say="secret"), key="a", nonce=name)
    assert guarded.submit(order(say="secret"), key="b", nonce=name) != job  # a nonce belongs to its key
    guarded.finished(job, key="a")
    nowhere = guarded.get(f"/response/{nonce()}", key="b")
    for path in (f"/response/{job}", f"/result/{job}"):
        answer = guarded.get(path, key="b")
        assert (answer.status_code, answer.content) == (404, nowhere.content)
    with pytest.raises(InvalidStatus) as refused:
        guarded.subscribe(key="b", query=f"?job={job}")
    assert refused.value.response.status_code == 404
    with guarded.session(key="b") as (socket, session):
        job = guarded.submit(order(say="secret"), key="a", session_id=session)
        assert guarded.finished(job, key="a")["status"] == "COMPLETED"
        with pytest.raises(TimeoutError):
            socket.recv(0.1)


def test_a_key_has_so_many_jobs_at_a_time(guarded: Running, orders: Orders) -> None:
    jobs = [guarded.submit(order(say=number, wait=True), key="a") for number in range(2)]
    answer = guarded.post(order(say=3), key="a")
    assert answer.status_code == 429 and "2 jobs of this key" in answer.json()["detail"] and "Retry-After" in answer.headers
    assert guarded.submit(order(say=4), key="b")
    orders.gate.set()
    for job in jobs:
        guarded.finished(job, key="a")
    assert guarded.submit(order(say=5), key="a")


def test_an_engine_that_hangs_is_replaced_and_in_the_end_reported(orders: Orders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nnsight.remote.server.engine._PATIENCE", 0.05)
    with running(orders.engine(), tmp_path, door=Accounts(a=account("alice", seconds=0.1))) as server:
        for number in range(2):  # these wait in a call into C, which no exception reaches
            ended = server.finished(server.submit(order(say=number, wait=True), key="a"), key="a")
            assert ended["data"]["error"] == "TimeLimitError"
            assert (server.get("/health").status_code == 503) == (number == 1)
        job = server.submit(order(say="after"), key="a")
        time.sleep(0.3)
        assert server.get(f"/response/{job}", key="a").json()["status"] == "QUEUED"
        assert server.get("/status").json()["deployments"][str(MODEL)]["application_state"] == "UNHEALTHY"
        orders.gate.set()  # the threads come back, and so does the engine
        assert server.finished(job, key="a")["status"] == "COMPLETED"
        assert server.get("/health").status_code == 200


def test_a_job_that_runs_out_of_its_time_is_interrupted(guarded: Running, orders: Orders) -> None:
    """An interrupt must leave nothing behind that a debugger, or the tracing by which blocks are captured, waits for."""
    for number in range(2):
        ended = guarded.finished(guarded.submit(order(say=number, spin=True), key="a"), key="a")
        assert ended["status"] == "ERROR" and ended["data"]["error"] == "TimeLimitError" and "0.2 seconds" in ended["description"]
    assert guarded.finished(guarded.submit(order(say="quick"), key="a"), key="a")["status"] == "COMPLETED"
    assert len(set(orders.threads)) == 1  # the thread came back
    lines: list[int] = []

    def trace(frame: Any, event: str, argument: Any) -> Any:
        lines.append(frame.f_lineno)
        return trace

    def traced() -> int:
        return sum(range(10))

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        assert traced() == 45
    finally:
        sys.settrace(before)
    assert lines


def test_keys_are_stored_as_hashes_and_can_be_withdrawn(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    alice, bob = add_key(path, "alice", queue=2), add_key(path, "bob")
    assert alice not in path.read_text() and stat.S_IMODE(path.stat().st_mode) == 0o600
    door = KeyFile(path)
    found = door.admit(alice)
    assert found is not None and (found.name, found.queue) == ("alice", 2)
    assert door.admit(bob + "x") is door.admit("") is door.admit(None) is None
    remove_key(path, "alice")
    os.utime(path, ns=(1, 1))
    assert door.admit(alice) is None and door.admit(bob) is not None
    path.write_text("{")  # somebody edits it
    assert door.admit(bob) is not None
    path.unlink()
    assert door.admit(bob) is None


def test_the_command_for_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "keys.json")
    assert cli.main(["keys", "add", path, "--name", "alice", "--seconds", "5"]) == 0
    key = capsys.readouterr().out.strip()
    assert KeyFile(path).admit(key) == read_accounts(Path(path))[0]
    assert cli.main(["keys", "list", path]) == 0
    assert "alice: queue 16" in capsys.readouterr().out
    assert cli.main(["keys", "add", path, "--name", "alice"]) == 2
    assert "already has a key named 'alice'" in capsys.readouterr().err
    assert cli.main(["keys", "remove", path, "--name", "alice"]) == 0
    assert cli.main(["keys", "remove", path, "--name", "alice"]) == 2


ENTRY = {"name": "a", "sha256": "0" * 64}


def test_a_file_of_keys_that_is_wrong_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    wrong = ({"sha256": "short"}, {"queue": 0}, {"bytes": "x"}, {"seconds": True}, {"other": 1})
    entries = [[{"name": "a"}], [ENTRY, ENTRY], *([{**ENTRY, **more}] for more in wrong)]
    for content in ["", "[]", '{"keys": 3}', *(json.dumps({"keys": listed}) for listed in entries)]:
        path.write_text(content)
        with pytest.raises(ValueError, match="keys.json"):
            KeyFile(path)


def test_a_server_for_other_machines_needs_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "nnsight/demo", "--host", "0.0.0.0", "--spool", str(tmp_path)]) == 2
    assert "--api-keys" in capsys.readouterr().err
    assert cli.main(["serve", "nnsight/demo", "--api-keys", str(tmp_path / "none")]) == 2


def test_replicas_need_ray_and_sensible_numbers(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "nnsight.remote.server.replicas", raising=False)
    assert cli.main(["serve", "nnsight/demo", "--ray"]) == 2
    assert "pip install 'nnsight[ray]'" in capsys.readouterr().err
    assert cli.main(["serve", "nnsight/demo", "--replicas", "2"]) == 2
    assert "add --ray" in capsys.readouterr().err
    for wrong in ("0", "4-2", "two", "1-2-3"):
        assert cli.main(["serve", "nnsight/demo", "--ray", "--replicas", wrong]) == 2
        assert "1-4" in capsys.readouterr().err


def test_options_of_engines_that_make_no_sense_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "nnsight/demo", "--taps", "transformer.h.*"]) == 2
    assert "add --engine vllm" in capsys.readouterr().err
    for wrong in ("--compile", "--openai"):
        assert cli.main(["serve", "nnsight/demo", "--engine", "vllm", wrong]) == 2
        assert "--engine local" in capsys.readouterr().err


# -- jobs and clients come and go ---------------------------------------------------------------------------------------------------


def test_the_same_nonce_is_the_same_job(server: Running, orders: Orders) -> None:
    name = nonce()
    first = server.submit(order(say="x"), nonce=name)
    assert server.submit(order(say="x"), nonce=name) == first
    server.finished(first)
    answer = server.post(order(say="x"), nonce=name)  # a replay gets what became of it
    assert (answer.json()["id"], answer.json()["status"]) == (first, "COMPLETED")
    assert orders.seen == ["x"]
    assert server.post(order(say="other"), nonce=name).status_code == 409


def test_a_slow_reader_blocks_nobody_and_is_cut_off(orders: Orders, tmp_path: Path) -> None:
    settings = Settings(inline=2**30, send=0.2)
    with running(orders.engine(), tmp_path, settings=settings) as server, server.session() as (slow, session):
        for _ in range(3):
            server.submit(order(say="x" * 1000, times=20_000), session_id=session)  # 20 MB each, never read
        with server.session() as (quick, mine):
            server.submit(order(say="quick"), session_id=mine)
            assert messages(quick)[-1]["status"] == "COMPLETED"
            assert quick.recv(5) == b"quick"
        until(lambda: server.figure("nnsight_sockets") == 0)


def test_a_job_that_is_submitted_with_a_socket_that_ends_is_taken(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """A socket that is cut off is known for a moment longer."""

    async def cut(session: Any, job: ServerJob, after: int) -> None:
        raise TimeoutError

    async def late(tasks: Any, **options: Any) -> Any:
        try:
            return await wait(tasks, **options)
        finally:
            if isinstance(tasks[0], asyncio.Task):  # those of the socket
                await asyncio.sleep(0.1)

    wait = asyncio.wait
    monkeypatch.setattr(sessions._Session, "_send_messages", cut)
    monkeypatch.setattr(asyncio, "wait", late)
    with server.session() as (socket, session):
        jobs = [server.submit(order(say=f"{number}"), session_id=session) for number in range(2)]
        monkeypatch.undo()
        assert [server.finished(job)["status"] for job in jobs] == ["COMPLETED"] * 2


def test_accounts_take_turns() -> None:
    queue = FairQueue()
    names = ["a1", "a2", "a3", "b1", "c1", "b2"]
    for name in names:
        queue.put(ServerJob(name[0], "m", name, "", 0, 1.0))
    assert len(queue) == 6
    assert [queue.take()[0].nonce for _ in names] == ["a1", "b1", "c1", "a2", "b2", "a3"]
    assert queue.take() == [] and len(queue) == 0


def test_jobs_of_a_kind_share_a_run(server: Running, orders: Orders) -> None:
    blocker = server.submit(order(say="first", wait=True))
    until(orders.started.is_set)
    kinds = ["k", "k", "other", None, "k", None]
    jobs = [server.submit(order(say=f"{number}", kind=kind)) for number, kind in enumerate(kinds)]
    orders.gate.set()
    ended = [server.finished(job) for job in jobs]
    assert orders.seen == ["first", ["0", "1", "4"], "2", "3", "5"]
    assert [message["meta"]["together"] for message in ended] == [3, 3, 1, 1, 3, 1]
    assert [server.get(f"/result/{job}").content for job in jobs] == [b"0", b"1", b"2", b"3", b"4", b"5"]
    assert server.finished(blocker)["status"] == "COMPLETED"


def test_a_group_that_fails_as_a_whole_is_run_one_by_one(server: Running, orders: Orders) -> None:
    server.submit(order(say="first", wait=True))
    until(orders.started.is_set)
    good = [server.submit(order(say=f"{number}", kind="k")) for number in range(2)]
    bad = server.submit(order(say="bad", kind="k", spoils=True, **{"raise": "ExecutionFailedError"}))
    orders.gate.set()
    assert [server.finished(job)["status"] for job in (*good, bad)] == ["COMPLETED", "COMPLETED", "ERROR"]
    assert orders.seen[1:] == [["0", "1", "bad"], "0", "1", "bad"]


# -- faults ------------------------------------------------------------------------------------------------------------------------


def test_what_is_wrong_with_a_program_is_told(server: Running) -> None:
    for kind in ("InvalidProgramError", "ExecutionFailedError"):
        ended = server.finished(server.submit(order(say="because", **{"raise": kind})))
        assert (ended["status"], ended["description"], ended["data"]) == ("ERROR", "because", {"error": kind})
        assert "runtime" in ended["meta"]
    assert server.finished(server.submit(order(say="next")))["status"] == "COMPLETED"


def test_what_is_wrong_with_the_server_is_logged_and_not_told(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "nnsight.remote.server")
    ended = server.finished(server.submit(order(say="/secret/path", **{"raise": "RuntimeError"})))
    assert ended["status"] == "ERROR" and "/secret/path" not in json.dumps(ended)
    assert ended["id"] in ended["description"]
    assert any("/secret/path" in str(record.exc_info) for record in caplog.records)


def test_a_job_whose_engine_dies_is_tried_once_more(server: Running, orders: Orders) -> None:
    assert server.finished(server.submit(order(say="twice", die=1)))["status"] == "COMPLETED"
    assert orders.seen == ["twice", "twice"]
    ended = server.finished(server.submit(order(say="never", die=9)))
    assert ended["status"] == "ERROR" and ended["data"]["error"] == "EngineLostError"
    assert orders.seen.count("never") == 2
    assert server.finished(server.submit(order(say="next")))["status"] == "COMPLETED"
    assert server.figure("nnsight_retried_total") == 2


def full(*args: Any, **kwargs: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_client_that_goes_away_takes_no_other_along(orders: Orders, tmp_path: Path) -> None:
    async def story() -> None:
        gateway = Gateway({MODEL: orders.engine()}, Spool(tmp_path))
        await gateway.start()
        uploads = [io.BytesIO(order(say=word)) for word in ("gone", "here")]
        gone, here = (
            asyncio.create_task(gateway.submit(Account("a"), str(MODEL), "", upload, len(upload.getvalue()))) for upload in uploads
        )
        await asyncio.sleep(0)
        uploads[0].close()
        gone.cancel()
        job = await here
        await job.ending()
        with pytest.raises(asyncio.CancelledError):
            await gone
        assert job.status is JobStatus.COMPLETED and list(gateway.jobs) == [job.id]
        await gateway.stop()
        assert [found.id for found in Spool(tmp_path).recover()] == [job.id]

    asyncio.run(story())
    assert orders.seen == ["here"]


@contextlib.contextmanager
def full_disk(spool: Spool, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let neither the database grow nor files come."""
    pages = spool._writer.execute("PRAGMA page_count").fetchone()[0]
    with patch.context() as patched:
        patched.setattr("nnsight.remote.server.spool.os.replace", full)
        spool._writer.execute(f"PRAGMA max_page_count = {pages}").fetchone()
        try:
            yield
        finally:
            spool._writer.execute("PRAGMA max_page_count = 1000000").fetchone()


def kept(folder: Path) -> list[str]:
    """Return the files of jobs."""
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("jobs.sqlite"))


@pytest.mark.parametrize("size", [20_000, 200_000])
def test_a_full_disk_refuses_jobs_and_leaves_nothing(server: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    with full_disk(server.gateway.spool, monkeypatch):
        answer = server.post(order(say="x" * size))
        assert answer.status_code == 507 and "full" in answer.json()["detail"]
    assert not server.gateway.jobs and not kept(tmp_path / "jobs")
    assert not Spool(tmp_path / "jobs").recover() and server.gateway.spool.used == 0
    assert server.finished(server.submit(order(say="y")))["status"] == "COMPLETED"


def test_a_job_that_does_not_fit_takes_no_other_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spool, jobs = Spool(tmp_path), [submitted(size) for size in (10, 20_000, 20)]
    with full_disk(spool, monkeypatch):
        found = spool.admit([(job, io.BytesIO(b"x" * job.size)) for job in jobs])
    assert [type(error) for error in found] == [type(None), StorageFullError, type(None)]
    assert sorted(job.size for job in Spool(tmp_path).recover()) == [10, 20] and spool.used == 30


def test_who_listens_to_a_short_job_does_not_wait_for_the_disk(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, written = threading.Event(), []
    monkeypatch.setattr(server.gateway.spool, "settle", lambda jobs: written.append(disk.wait(10)))
    with server.session() as (socket, session):
        server.submit(order(say="at once"), session_id=session)
        assert messages(socket)[-1]["status"] == "COMPLETED" and not written
    alone = threading.Thread(target=lambda: answered.append(server.submit(order(say="safe"))))
    answered: list[str] = []
    alone.start()
    until(lambda: server.figure("nnsight_jobs_total") == 2)
    assert not answered  # nobody hears of its end, so its answer says that it is not lost
    disk.set()
    alone.join(20)
    assert server.finished(answered[0])["status"] == "COMPLETED"


@pytest.mark.parametrize("size", [20_000, 200_000])
def test_a_disk_that_is_full_when_a_result_comes_ends_the_job(
    server: Running, orders: Orders, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    job = server.submit(order(say="x", wait=True, times=size))
    until(orders.started.is_set)
    with full_disk(server.gateway.spool, monkeypatch):
        orders.gate.set()
        ended = server.finished(job)
    assert ended["status"] == "ERROR" and ended["data"]["error"] == "StorageFullError"
    assert server.get(f"/result/{job}").status_code == 409
    assert server.finished(server.submit(order(say="y")))["status"] == "COMPLETED"


def test_a_job_that_a_full_disk_does_not_keep_is_refused(
    server: Running, orders: Orders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = server.submit(order(say="first", wait=True))
    until(orders.started.is_set)
    with monkeypatch.context() as patch:
        patch.setattr("nnsight.remote.server.spool.os.fsync", full)
        assert server.post(order(say="x")).status_code == 507
    assert list(server.gateway.jobs) == [first]
    orders.gate.set()
    assert server.finished(first)["status"] == "COMPLETED"
    assert orders.seen == ["first"]


def test_a_job_that_runs_is_cancelled_at_once(server: Running, orders: Orders) -> None:
    job = server.submit(order(say="endless", spin=True))
    until(orders.started.is_set)
    assert requests.delete(f"{server.url}/request/{job}", timeout=10).json()["status"] == "ERROR"
    assert server.finished(server.submit(order(say="next")))["status"] == "COMPLETED"
    assert server.get(f"/response/{job}").json()["data"] == {"error": "JobCancelledError"}


def test_a_job_that_is_cancelled_before_its_thread_begins_does_not_run(
    server: Running, orders: Orders, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, go, run = threading.Event(), threading.Event(), _Worker._run

    def later(worker: Any, function: Any) -> Any:
        given.set()
        assert go.wait(20)
        return run(worker, function)

    monkeypatch.setattr(_Worker, "_run", later)
    job = server.submit(order(say="x"))
    until(given.is_set)
    assert requests.delete(f"{server.url}/request/{job}", timeout=20).json()["status"] == "ERROR"
    go.set()
    assert server.finished(server.submit(order(say="y")))["status"] == "COMPLETED"
    assert orders.seen == ["y"]


def test_a_job_that_is_cancelled_while_its_payload_is_read_does_not_run(
    server: Running, orders: Orders, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, reading, read = server.gateway.spool.begin, threading.Event(), threading.Event()

    def slow(jobs: Any) -> list[bytes]:
        reading.set()
        assert read.wait(20)
        return begin(jobs)

    monkeypatch.setattr(server.gateway.spool, "begin", slow)
    job = server.submit(order(say="endless", spin=True))
    until(reading.is_set)
    assert requests.delete(f"{server.url}/request/{job}", timeout=10).json()["status"] == "ERROR"
    read.set()
    assert server.finished(server.submit(order(say="next")))["status"] == "COMPLETED" and orders.seen == ["next"]


def test_a_job_that_is_cancelled_before_its_group_runs_takes_no_other_along(
    server: Running, orders: Orders, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool, reading, read = server.gateway.spool, threading.Event(), threading.Event()
    begin = spool.begin

    def slow(jobs: Any) -> list[bytes]:
        if len(jobs) == 2:
            reading.set()
            assert read.wait(20)
        return begin(jobs)

    monkeypatch.setattr(spool, "begin", slow)
    first = server.submit(order(say="first", wait=True))
    until(orders.started.is_set)
    pair = [server.submit(order(say=word, kind="k")) for word in "ab"]
    orders.gate.set()
    until(reading.is_set)
    requests.delete(f"{server.url}/request/{pair[0]}", timeout=10)
    until(lambda: not spool._reader.execute("SELECT 1 FROM payload WHERE id = ?", (pair[0],)).fetchall())
    read.set()
    assert [server.finished(job)["status"] for job in (first, *pair)] == ["COMPLETED", "ERROR", "COMPLETED"]


def test_jobs_of_a_group_are_cancelled_one_by_one_and_by_their_owner(guarded: Running, orders: Orders) -> None:
    def delete(job: str, key: str) -> int:
        return requests.delete(f"{guarded.url}/request/{job}", headers={"ndif-api-key": key}, timeout=10).status_code

    first = guarded.submit(order(say="first", wait=True), key="b")
    until(orders.started.is_set)
    pair = [guarded.submit(order(say=word, kind="k"), key="b") for word in "ab"]
    assert [delete(pair[0], key) for key in ("a", "", "b")] == [404, 401, 200]
    orders.gate.set()
    assert [guarded.finished(job, key="b")["status"] for job in (first, *pair)] == ["COMPLETED", "ERROR", "COMPLETED"]


def submitted(size: int) -> ServerJob:
    job = ServerJob("a", "m", nonce(), "", size, 1.0)
    job.tell(JobStatus.RECEIVED)
    return job


def test_the_spool_knows_what_its_jobs_take(tmp_path: Path) -> None:
    spool = Spool(tmp_path, capacity=100)
    first, second, third = submitted(40), submitted(50), submitted(11)
    assert spool.admit([(first, io.BytesIO(b"x" * 40)), (second, io.BytesIO(b"y" * 50))]) == [None, None]
    assert spool.used == 90
    (error,) = spool.admit([(third, io.BytesIO(b"z" * 11))])
    assert isinstance(error, StorageFullError)
    assert [spool.payload(job) for job in (first, second)] == [b"x" * 40, b"y" * 50] and spool.used == 90
    second.tell(JobStatus.ERROR)  # it leaves no result
    spool.note([second])
    assert spool.used == 40
    found = Spool(tmp_path)
    assert len(found.recover()) == 2 and found.used == 40
    spool.remove([first])
    spool.remove([first])
    assert spool.used == 0


@pytest.mark.parametrize("size", [100, 100_000])
def test_the_spool_has_what_was_written_to_it(tmp_path: Path, size: int) -> None:
    spool, job = Spool(tmp_path), submitted(size)
    assert spool.admit([(job, io.BytesIO(b"p" * size))]) == [None]
    spool.settle([job])
    assert spool.begin([job]) == [b"p" * size]
    assert spool.keep_results([(job, b"r" * size)]) == [size] and spool.used == 2 * size
    spool.close()
    (found,) = Spool(tmp_path).recover()  # the record had no time to follow
    assert found.status is JobStatus.COMPLETED and found.result_size == size
    spool = Spool(tmp_path)
    spool.note(spool.recover())
    assert spool.used == size and spool.result(job) == b"r" * size
    assert kept(tmp_path) == ([f"{job.id}.result"] if size > 2**16 else [])
    with pytest.raises(FileNotFoundError):
        spool.payload(job)
    spool.remove([found])
    assert not kept(tmp_path) and spool.used == 0 and not spool.recover()


def test_what_a_dead_server_left_half_written_is_removed(tmp_path: Path) -> None:
    left = [f"{nonce()}.payload", f"{nonce()}.result.new", "notes.payload"]
    for name in left:
        (tmp_path / name).write_bytes(b"x")
    assert not Spool(tmp_path).recover() and kept(tmp_path) == left[-1:]


def test_results_are_kept_for_a_while(orders: Orders, tmp_path: Path) -> None:
    with running(orders.engine(), tmp_path, settings=Settings(keep=0.2)) as server:
        jobs = [server.submit(order(say="x"), nonce=chosen) for chosen in ([], {}, None, nonce())]
        until(lambda: all(server.get(f"/response/{job}").status_code == 404 for job in jobs))
        assert not server.gateway.problems
        until(lambda: not kept(tmp_path) and not Spool(tmp_path).recover())
        assert not server.gateway._by_nonce
        assert server.figure("nnsight_spool_bytes") == 0


def test_the_payload_goes_when_the_job_has_ended(server: Running, tmp_path: Path) -> None:
    long, short = server.submit(order(say="x" * 100_000)), server.submit(order(say="x"))
    server.finished(long), server.finished(short)
    until(lambda: kept(tmp_path / "jobs") == [f"{long}.result"])
    until(lambda: server.gateway.spool.used == 100_001)
    with pytest.raises(FileNotFoundError):
        server.gateway.spool.payload(server.gateway.jobs[short])


def test_what_waits_and_what_is_ready_outlives_the_server(tmp_path: Path) -> None:
    first = Orders()
    name = nonce()
    with running(first.engine(), tmp_path) as server:
        ready = server.submit(order(say="ready"))
        failed = server.submit(order(say="failed", **{"raise": "ExecutionFailedError"}))
        server.finished(failed)
        running_job = server.submit(order(say="running", wait=True))
        until(lambda: "running" in first.seen)
        waiting = [server.submit(order(say=f"w{number}"), nonce=name if number == 0 else "") for number in range(3)]
        last = server.get(f"/response/{running_job}").json()
    first.gate.set()
    second = Orders()
    second.gate.set()
    with running(second.engine(), tmp_path) as server:
        with server.subscribe(query=f"?job={running_job}&after={last['number']}") as socket:
            socket.recv(5)
            assert messages(socket)[-1]["status"] == "COMPLETED"  # numbers go on, so the client misses nothing
        assert [server.finished(job)["status"] for job in waiting] == ["COMPLETED"] * 3
        assert second.seen == ["running", "w0", "w1", "w2"]
        assert server.get(f"/result/{ready}").content == b"ready"
        assert server.get(f"/response/{failed}").json()["description"] == "failed"
        assert server.submit(order(say="w0"), nonce=name) == waiting[0]


def test_a_job_that_ends_the_process_each_time_is_not_tried_for_ever(tmp_path: Path) -> None:
    for attempt in range(3):
        orders = Orders()
        with running(orders.engine(), tmp_path) as server:
            if attempt == 0:
                job = server.submit(order(say="deadly", wait=True))
            if attempt < 2:
                until(orders.started.is_set)
            else:
                ended = server.finished(job)
        orders.gate.set()
        assert orders.seen == ["deadly"] * (attempt < 2)
    assert ended["status"] == "ERROR" and ended["data"]["error"] == "EngineLostError"


def test_jobs_of_a_group_that_ends_the_process_run_alone_after_it(tmp_path: Path) -> None:
    started = threading.Event()
    gates = {"first": threading.Event(), "deadly": threading.Event()}
    seen: list[list[str]] = []

    def outcomes(payloads: Any, logs: Any) -> Any:
        said = [str(read_order(payload)["say"]) for payload in payloads]
        seen.append(said)
        for text in gates.keys() & set(said):
            started.set()
            assert gates[text].wait(60)
        return [text.encode() for text in said]

    def engine() -> ThreadEngine:
        return ThreadEngine(outcomes, "test-engine", lambda payload: read_order(payload).get("kind"))

    with running(engine(), tmp_path) as server:
        server.submit(order(say="first"))
        until(started.is_set)
        jobs = {say: server.submit(order(say=say, kind="k")) for say in ("one", "deadly", "other")}
        started.clear()
        gates["first"].set()
        until(started.is_set)
    for _ in range(2):
        started.clear()
        with running(engine(), tmp_path) as server:
            until(lambda: started.is_set() or server.get(f"/response/{jobs['other']}").json()["status"] == "COMPLETED")
            if not started.is_set():
                ended = {say: server.finished(job)["status"] for say, job in jobs.items()}
    gates["deadly"].set()
    assert seen == [["first"], ["one", "deadly", "other"], ["one"], ["deadly"], ["other"]]
    assert ended == {"one": "COMPLETED", "deadly": "ERROR", "other": "COMPLETED"}


def test_damaged_records_and_strange_files_do_not_stop_the_server(tmp_path: Path) -> None:
    other, spool = tmp_path / "something", Spool(tmp_path)
    other.mkdir()
    for record in ('{"id": 3', '{"id": 3}', '"x"', json.dumps(submitted(3).record())):
        spool._writer.execute("INSERT INTO record VALUES (?, ?)", (nonce(), record))
    spool.close()
    gone = Orders()
    with running(gone.engine(), tmp_path, key=ModelKey("other/model")) as server:
        job = server.submit(order(say="x", wait=True), model_key="other/model")
        until(gone.started.is_set)
    gone.gate.set()
    with running(Orders().engine(), tmp_path) as server:
        assert other.exists() and list(server.gateway.jobs) == [job]
        assert "no longer serves" not in server.finished(job)["description"]  # what the operator did is in the log
        assert server.finished(job)["status"] == "ERROR"


def test_a_file_that_is_no_database_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "jobs.sqlite").write_bytes(b"something else" * 1000)
    with pytest.raises(OSError, match="file is not a database"):
        Spool(tmp_path)
    assert (tmp_path / "jobs.sqlite").read_bytes() == b"something else" * 1000


def test_a_server_that_is_told_to_stop_lets_jobs_end_and_takes_no_more(tmp_path: Path) -> None:
    orders = Orders()
    server = Running(orders.engine(), tmp_path)
    with server.session() as (socket, session):
        running_job = server.submit(order(say="running", wait=True), session_id=session)
        until(orders.started.is_set)
        waiting = server.submit(order(say="waiting"))
        server.loop.call_soon_threadsafe(server.server.handle_exit, signal.SIGTERM, None)
        until(lambda: server.gateway.draining)
        assert server.post(order(say="late")).status_code == 503
        assert server.get("/health").status_code == 503
        orders.gate.set()
        assert messages(socket)[-1]["status"] == "COMPLETED"
        assert socket.recv(5) == b"running"
    server.stop()
    assert orders.seen == ["running"]
    with running(orders.engine(), tmp_path) as server:
        assert server.finished(waiting)["status"] == "COMPLETED"
        assert server.get(f"/result/{running_job}").content == b"running"


# -- what an operator sees ----------------------------------------------------------------------------------------------------------


def test_facts_have_the_shapes_that_clients_expect(server: Running) -> None:
    assert server.get("/health").json() == {"status": "ok", "problems": []}
    assert [server.get(path).status_code for path in ("/docs", "/openapi.json", "/redoc")] == [404] * 3
    (deployment,) = server.get("/status").json()["deployments"].values()
    assert ModelKey.parse(deployment["model_key"]) == MODEL
    assert (deployment["repo_id"], deployment["revision"]) == (MODEL.repo_id, "main")
    assert (deployment["deployment_level"], deployment["application_state"]) == ("HOT", "RUNNING")
    env = server.get("/env").json()
    assert env["python_version"].split()[0] == sys.version.split()[0] and CONTENT_TYPE in env["formats"]
    assert {"nnsight", "torch", "transformers"} <= env["packages"].keys()
    assert all(isinstance(version, str) for version in env["packages"].values())
    assert server.get("/whoami").json()["email"] is None


def test_figures(server: Running) -> None:
    server.finished(server.submit(order(say="good")))
    server.finished(server.submit(order(say="bad", **{"raise": "InvalidProgramError"})))
    server.post(b"\x80")
    until(lambda: server.figure("nnsight_jobs_total") == 2)
    text = server.get("/metrics").text
    assert 'outcome="completed"} 1.0' in text and 'outcome="InvalidProgramError"} 1.0' in text
    assert 'nnsight_refused_total{reason="format"} 1.0' in text
    assert server.figure("nnsight_run_seconds_count") == server.figure("nnsight_wait_seconds_count") == 2
    assert server.figure("nnsight_result_bytes_total") == 4 and server.figure("nnsight_engine_healthy") == 1
    assert server.figure("nnsight_queued") == server.figure("nnsight_running") == 0


def test_logs_are_lines_of_json(server: Running, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level(logging.INFO, "nnsight.remote.server")
    monkeypatch.setattr(caplog.handler, "formatter", JsonLines())
    job = server.submit(order(say="x"), key="secret-key")
    server.finished(job)
    until(lambda: len(caplog.records) >= 2)
    lines = [json.loads(line) for line in caplog.text.splitlines()]
    assert [line["event"] for line in lines] == ["received", "finished"]
    assert {line["job"] for line in lines} == {job} and lines[1]["outcome"] == "completed"
    assert "secret-key" not in caplog.text
    try:
        raise ValueError("a\nb")
    except ValueError:
        record = logging.LogRecord("x", logging.ERROR, "", 0, "failed %d", (3,), sys.exc_info())
    line = JsonLines().format(record)
    assert "\n" not in line and json.loads(line)["event"] == "failed 3" and "ValueError" in json.loads(line)["traceback"]


# -- parts -------------------------------------------------------------------------------------------------------------------------


def test_a_job_tells_nothing_after_its_end_and_keeps_so_many_remarks() -> None:
    async def story() -> list[str]:
        job = ServerJob("a", "m", "", "", 0, 1.0)
        job.tell(JobStatus.RUNNING)
        for _ in range(2000):
            job.tell(JobStatus.LOG, "x" * 100_000)
        assert job.status is JobStatus.RUNNING and len(job.messages) == 1001
        assert len(job.messages[5]["description"]) < 20_000
        half = ServerJob("a", "m", "", "", 0, 1.0)
        half.tell(JobStatus.ERROR, "half a pair: \ud800")
        assert half.latest["description"] == "half a pair: ?"
        job.tell(JobStatus.COMPLETED)
        job.tell(JobStatus.ERROR, "late")
        return [message["status"] async for told in job.follow(job.messages[-2]["number"]) for message in told]

    assert asyncio.run(story()) == ["COMPLETED"]


def test_other_errors_of_a_disk_stay_what_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spool, job = Spool(tmp_path), submitted(100_000)

    def broken(*args: Any) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr("nnsight.remote.server.spool.os.replace", broken)
    (error,) = spool.admit([(job, io.BytesIO(b"a" * job.size))])
    assert isinstance(error, OSError) and error.strerror == "broken" and not isinstance(error, StorageFullError)
    assert spool.used == 0 and not kept(tmp_path)


def test_the_command_serves_and_drains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a thread; the test of a killed server sends a signal to a process."""
    servers: list[GatewayServer] = []
    stream, run = io.StringIO(), GatewayServer.run
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(GatewayServer, "run", lambda server: (servers.append(server), run(server)))
    for name in ("nnsight", "uvicorn", "uvicorn.error"):  # as they were, after the test
        for attribute in ("handlers", "propagate", "level"):
            monkeypatch.setattr(logging.getLogger(name), attribute, getattr(logging.getLogger(name), attribute))
    port = free_port()
    command = ["serve", "nnsight/demo", "--port", str(port), "--spool", str(tmp_path / "jobs")]
    thread = threading.Thread(target=cli.main, args=(command,))
    thread.start()
    until(lambda: servers and servers[0].started, 60)
    found = requests.get(f"http://127.0.0.1:{port}/status", timeout=10).json()["deployments"]
    assert [deployment["repo_id"] for deployment in found.values()] == ["nnsight/demo"]
    servers[0].gateway._loops[0].get_loop().call_soon_threadsafe(servers[0].handle_exit, signal.SIGTERM, None)
    thread.join(20)
    events = [json.loads(line)["event"] for line in stream.getvalue().splitlines() if line.startswith("{")]
    assert "serving" in events and "draining" in events and not thread.is_alive()


KILLED = """
import sys
from pathlib import Path
from nnsight.remote.server.keys import OpenDoor
from nnsight.remote.server.serve import serve
from tests.remote.remoting import MODEL, Orders
serve({MODEL: Orders().engine()}, OpenDoor(), Path(sys.argv[1]), port=int(sys.argv[2]))
"""


@pytest.mark.slow
def test_a_server_that_is_killed_goes_on_when_it_is_started_again(tmp_path: Path) -> None:
    port = free_port()
    server = Plain()
    server.url = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        with contextlib.suppress(requests.ConnectionError):
            return bool(server.get("/health"))
        return False

    def start() -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", KILLED, str(tmp_path / "jobs"), str(port)]
        process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
        until(answers, 120)
        return process

    process = start()
    try:
        done = server.submit(order(say="done"))
        assert server.finished(done)["status"] == "COMPLETED"
        jobs = [server.submit(order(say="runs", sleep=1)), *(server.submit(order(say=f"waits {number}")) for number in range(3))]
        until(lambda: server.get(f"/response/{jobs[0]}").json()["status"] == "RUNNING")
        process.kill()
        process.wait()
        process = start()
        assert [server.finished(job)["status"] for job in jobs] == ["COMPLETED"] * 4
        found = [server.get(f"/result/{job}").content for job in (done, *jobs)]
        assert found == [b"done", b"runs", b"waits 0", b"waits 1", b"waits 2"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) in (0, -signal.SIGTERM)
    finally:
        process.kill()
        process.wait()
