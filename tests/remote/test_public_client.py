"""Clients of nnsight 0.8 ask this server what it is and has, and are told plainly that it takes no pickled Python."""

from __future__ import annotations

import itertools
import json
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from .remoting import MODEL, Accounts, Orders, Running, account, running

#: What the public client sends along.
HEADERS = {"ndif-timestamp": "1700000000.0", "nnsight-version": "0.8.1", "python-version": sys.version, "ndif-api-key": "alice"}


@pytest.fixture
def guarded(orders: Orders, tmp_path: Path) -> Iterator[Running]:
    with running(orders.engine(), tmp_path / "jobs", door=Accounts(alice=account("alice"))) as server:
        yield server


def get(server: Running, path: str, **headers: str) -> Any:
    answer = requests.get(server.url + path, headers={**HEADERS, **headers}, timeout=20)
    assert answer.status_code == 200
    return answer.json()


def test_facts_have_the_shapes_that_clients_expect(guarded: Running, orders: Orders, tmp_path: Path) -> None:
    assert get(guarded, "/health") == {"status": "ok", "problems": []}
    assert [guarded.get(path).status_code for path in ("/docs", "/openapi.json", "/redoc")] == [404] * 3
    (deployment,) = get(guarded, "/status")["deployments"].values()
    assert deployment["model_key"].partition(":")[0].count(".") >= 1
    assert (deployment["repo_id"], deployment["revision"]) == (MODEL.repo_id, "main")
    assert (deployment["deployment_level"], deployment["application_state"]) == ("HOT", "RUNNING")
    env = get(guarded, "/env")
    assert env["python_version"].split()[0] == sys.version.split()[0]
    assert {"nnsight", "torch", "transformers"} <= env["packages"].keys()
    assert "application/x-nns-graph+safetensors" in env["formats"]
    assert all(isinstance(version, str) for version in env["packages"].values())
    who = get(guarded, "/whoami")
    assert (who["email"], who["tags"]) == ("alice", [])
    with running(orders.engine(), tmp_path / "open") as open_to_all:
        assert get(open_to_all, "/whoami")["email"] is None


def test_pickled_python_is_refused_with_the_reason(guarded: Running) -> None:
    env = {"python_version": sys.version, "packages": {f"package_{number}": "1.0.0" for number in range(1500)}}
    blobs = [pickle.dumps({"a": 1}), b"\x28\xb5\x2f\xfd" + bytes(100), b"PK\x03\x04" + bytes(100)]
    for blob, compress in itertools.product(blobs, (True, False)):
        envelope = {"model_key": str(MODEL), "session_id": "", "compress": compress, "env": env}
        answer = requests.post(
            guarded.url + "/request",
            data={"data": json.dumps(envelope)},
            files={"blob": ("request", blob, "application/octet-stream")},
            headers=HEADERS,
            timeout=20,
        )
        assert answer.status_code == 415
        detail = answer.json()["detail"]
        assert "never unpickles" in detail and "0.8.1" in detail and "install" in detail
