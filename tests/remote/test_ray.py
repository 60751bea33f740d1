"""Replicas of a model on a Ray cluster behind one gateway: side by side, lost in the middle of a job, more and fewer of them."""

from __future__ import annotations

import os
import signal
import socket as socketlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import nnsight
from nnsight.program.format.errors import InvalidProgramError
from nnsight.remote.client.client import Client
from nnsight.remote.protocol import ModelKey
from nnsight.remote.server.engine import ThreadEngine
from nnsight.remote.server.settings import Settings

from .. import ROOT
from ..serving import free_port
from .remoting import FINISHED, MODEL, Accounts, Catch, Running, account, messages, order, read_order, running, until

#: What warns here is code of Ray.
pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore::DeprecationWarning")]



@pytest.fixture(scope="module")
def replicas() -> Iterator[Any]:
    """The module under test, on a cluster of this machine."""
    ray = pytest.importorskip("ray", reason="Ray is not installed: `make test-ray` does that, in an environment of its own")
    from nnsight.remote.server import replicas

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
        runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}},
    )
    with replicas.cluster():
        yield replicas
    ray.shutdown()


# -- what runs in a replica ----------------------------------------------------------------------------------------------------------


def obey(payload: bytes, log: Callable[[str], None]) -> bytes:
    """Do what a payload says; ``at`` is a file in which each start is noted."""
    what = read_order(payload)
    for line in what.get("print", []):
        log(line)
    with open(what["at"], "a", encoding="ascii") as file:
        file.write(f"{os.getpid()}\n")
    if len(starts(what["at"])) <= what.get("deaths", 0):
        time.sleep(0.2)  # so that the replica has accepted the job; before, Serve looks for another by itself
        os.kill(os.getpid(), signal.SIGKILL)
    while what.get("until") and not os.path.exists(what["until"]):
        time.sleep(0.01)
    if what.get("refused"):
        raise InvalidProgramError(what["refused"])
    if what.get("fault"):
        raise ZeroDivisionError(what["fault"])
    return what.get("say", "").encode()


def starts(path: str | Path) -> list[int]:
    """Return the processes in which a payload was started."""
    return [int(line) for line in Path(path).read_text(encoding="ascii").split()] if os.path.exists(path) else []


def finished(server: Running, job: str, key: str) -> dict[str, Any]:
    """Wait for a job, for which a replica may have to start, and return the message that ended it."""
    return until(lambda: (m := server.get(f"/response/{job}", key).json())["status"] in FINISHED and m, 150)


def kind_of(payload: bytes) -> str | None:
    return read_order(payload).get("kind")


def together(payloads: Any, logs: Any) -> list[bytes | Exception]:
    return [obey(payload, log) for payload, log in zip(payloads, logs, strict=True)]


def build() -> ThreadEngine:
    return ThreadEngine(together, "test-replica", kind_of)


# -- the tests -----------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(replicas: Any) -> Iterator[Any]:
    engine = replicas.deploy(MODEL, build, kind_of, replicas=(2, 2), cpus=0.25)
    close, engine.close = engine.close, lambda: None  # servers come and go
    yield engine
    close()


@pytest.fixture
def server(engine: Any, tmp_path: Path) -> Iterator[Running]:
    door = Accounts(a=account("alice", seconds=30), short=account("bob", seconds=0.5))
    with running(engine, tmp_path / "jobs", door=door) as server:
        yield server


def test_jobs_run_side_by_side_each_in_a_process_of_its_own(server: Running, tmp_path: Path) -> None:
    go = tmp_path / "go"
    jobs = [server.submit(order(say=f"s{n}", at=str(tmp_path / f"at{n}"), until=str(go)), key="a") for n in range(2)]
    until(lambda: all(starts(tmp_path / f"at{n}") for n in range(2)))
    assert [server.get(f"/response/{job}", "a").json()["status"] for job in jobs] == ["RUNNING"] * 2
    go.touch()
    assert [finished(server, job, "a")["status"] for job in jobs] == ["COMPLETED"] * 2
    assert [server.get(f"/result/{job}", "a").content for job in jobs] == [b"s0", b"s1"]
    processes = {process for n in range(2) for process in starts(tmp_path / f"at{n}")}
    assert len(processes) == 2 and os.getpid() not in processes


def test_a_job_whose_replica_is_lost_runs_again_on_another(server: Running, tmp_path: Path) -> None:
    at = tmp_path / "at"
    with server.session(key="a") as (socket, session):
        job = server.submit(order(say="in the end", at=str(at), deaths=1), key="a", session_id=session)
        said = messages(socket)
    assert [message["status"] for message in said].count("RUNNING") == 2
    assert any("tried again" in message["description"] for message in said)
    assert server.get(f"/result/{job}", "a").content == b"in the end"
    assert len(set(starts(at))) == 2 and server.figure("nnsight_retried_total") == 1


def test_a_job_that_takes_each_replica_down_ends_with_the_reason(server: Running, tmp_path: Path) -> None:
    at = tmp_path / "at"
    last = finished(server, server.submit(order(at=str(at), deaths=99), key="a"), "a")
    assert last["status"] == "ERROR" and last["data"] == {"error": "EngineLostError"}
    assert "replica" in last["description"] and len(starts(at)) == 2
    job = server.submit(order(say="others go on", at=str(tmp_path / "other")), key="a")
    assert finished(server, job, "a")["status"] == "COMPLETED"


def test_a_group_that_loses_its_replica_runs_one_by_one(engine: Any, tmp_path: Path) -> None:
    door = Accounts(a=account("alice", seconds=30))
    with running(engine, tmp_path / "jobs", door=door, settings=Settings(together=8)) as server:
        go = tmp_path / "go"
        held = [server.submit(order(at=str(tmp_path / f"held{n}"), until=str(go)), key="a") for n in range(2)]
        until(lambda: all(starts(tmp_path / f"held{n}") for n in range(2)))
        orders = [order(say=f"g{n}", at=str(tmp_path / f"g{n}"), kind="k", deaths=n) for n in range(2)]
        jobs = [server.submit(payload, key="a") for payload in orders]
        go.touch()
        assert [finished(server, job, "a")["status"] for job in [*held, *jobs]] == ["COMPLETED"] * 4
        assert [server.get(f"/result/{job}", "a").content for job in jobs] == [b"g0", b"g1"]
        assert len(starts(tmp_path / "g0")) == 2  # in the group, and alone


def test_lines_and_errors_of_a_replica_are_those_of_an_engine_here(server: Running, tmp_path: Path) -> None:
    with server.session(key="a") as (socket, session):
        payload = order(at=str(tmp_path / "at"), print=["one", "two"], refused="no such module")
        server.submit(payload, key="a", session_id=session)
        said = messages(socket)
    assert [message["description"] for message in said if message["status"] == "LOG"] == ["one", "two"]
    assert said[-1]["data"] == {"error": "InvalidProgramError"} and said[-1]["description"] == "no such module"
    last = finished(server, server.submit(order(at=str(tmp_path / "at"), fault="a secret"), key="a"), "a")
    assert last["data"] == {"error": "InternalError"} and "secret" not in last["description"]


def test_time_and_cancelling_end_a_run_in_its_replica(server: Running, tmp_path: Path) -> None:
    never = str(tmp_path / "never")
    last = finished(server, server.submit(order(at=str(tmp_path / "slow"), until=never), key="short"), "short")
    assert last["data"] == {"error": "TimeLimitError"}
    jobs = [server.submit(order(at=str(tmp_path / f"c{n}"), until=never), key="a") for n in range(2)]
    until(lambda: all(starts(tmp_path / f"c{n}") for n in range(2)))
    client = Client(server.url, "a")
    assert [client.cancel(job)["data"] for job in jobs] == [{"error": "JobCancelledError"}] * 2
    after = [server.submit(order(say="free", at=str(tmp_path / f"d{n}")), key="a") for n in range(2)]
    assert [finished(server, job, "a")["status"] for job in after] == ["COMPLETED"] * 2
    assert not {*starts(tmp_path / "c0"), *starts(tmp_path / "c1")} - {*starts(tmp_path / "d0"), *starts(tmp_path / "d1")}


def test_replicas_come_while_jobs_wait(replicas: Any, tmp_path: Path) -> None:
    engine = replicas.deploy(ModelKey("test/scaled"), build, kind_of, replicas=(1, 2), cpus=0.25)
    with running(engine, tmp_path / "jobs", door=Accounts(a=account("alice", seconds=60))) as server:
        go = tmp_path / "go"
        jobs = [server.submit(order(at=str(tmp_path / f"at{n}"), until=str(go)), key="a") for n in range(2)]
        until(lambda: all(starts(tmp_path / f"at{n}") for n in range(2)), 90)
        go.touch()
        assert [finished(server, job, "a")["status"] for job in jobs] == ["COMPLETED"] * 2
    assert len({*starts(tmp_path / "at0"), *starts(tmp_path / "at1")}) == 2


def test_a_model_on_replicas_computes_what_it_does_here(replicas: Any, tmp_path: Path) -> None:
    key, engine = replicas.deploy_model("nnsight/demo", "main", {}, replicas=(2, 2), cpus=0.5)
    model, direction = nnsight.demo_model(), torch.randn(128)

    def run(**where: Any) -> torch.Tensor:
        with model.trace("The Eiffel Tower is in the city of", **where):
            model.transformer.h[2].output[:, -1] += 4.0 * direction
            logits = model.lm_head.output[:, -1].save()
        return logits

    with running(engine, tmp_path / "jobs", key=key) as server:
        torch.testing.assert_close(run(remote=server.url), run())
        with pytest.raises(IndexError), model.trace("Hello", remote=server.url):
            model.transformer.h[999].output.save()
        catch = Catch()
        with model.trace("Hello", backend=catch):
            logits = model.lm_head.output.save()
        assert engine.kind_of(catch.payload) is not None  # jobs share a run as they do in a process


def test_the_command_serves_on_a_cluster_of_its_own_and_takes_it_down(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: `make test-ray` does that, in an environment of its own")
    port = free_port()
    command = [sys.executable, "-m", "nnsight.cli", "serve", "nnsight/demo", "--ray", "--replicas", "1-2", "--replica-cpus", "0.5"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("RAY_ADDRESS", None)
    process = subprocess.Popen(
        [*command, "--port", str(port), "--spool", str(tmp_path / "jobs")], stderr=subprocess.PIPE, text=True, env=environment
    )
    try:
        client = Client(f"http://127.0.0.1:{port}", patience=150.0)
        assert next(iter(client.status()["deployments"].values()))["application_state"] == "RUNNING"
        model = nnsight.demo_model()
        with model.trace("The Eiffel Tower is in the city of", remote=f"http://127.0.0.1:{port}"):
            token = model.lm_head.output[0, -1].argmax(-1).save()
        assert model.tokenizer.decode(token) == " Paris"
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            said = process.communicate(timeout=60)[1]
        finally:
            process.kill()
    assert "serving" in said and "Traceback" not in said, said
