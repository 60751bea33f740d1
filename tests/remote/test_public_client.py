"""Clients of nnsight 0.8 ask this server what it is and has, and are told plainly that it takes no pickled Python.

They are spoken for by their requests; and by the public package itself, unmodified, where the benchmarks have made an environment for it
(``benchmarks/overhead.py --peer``).
"""

from __future__ import annotations

import itertools
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from .. import ROOT
from .remoting import MODEL, Accounts, Orders, Running, account, running

PEER = ROOT / "benchmarks" / ".peer" / "bin" / "python"

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
    (deployment,) = get(guarded, "/status")["deployments"].values()
    assert deployment["model_key"].partition(":")[0].count(".") >= 1
    assert (deployment["repo_id"], deployment["revision"]) == (MODEL.repo_id, "main")
    assert (deployment["deployment_level"], deployment["application_state"]) == ("HOT", "RUNNING")
    env = get(guarded, "/env")
    assert env["python_version"].split()[0] == sys.version.split()[0]
    assert {"nnsight", "torch", "transformers"} <= env["packages"].keys()
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


PUBLIC = """
import json, sys
import torch
import nnsight
from nnsight import CONFIG
from nnsight.intervention.backends.remote import RemoteBackend
from nnsight.ndif import compare, status, whoami

CONFIG.API.HOST, CONFIG.API.APIKEY = sys.argv[1:3]
found = {"status": str(status()), "models": status().deployments, "env": compare().remote, "who": whoami(), "errors": []}
model = nnsight.NNsight(torch.nn.Linear(2, 2))
for blocking in (True, False):
    try:
        with model.trace(torch.ones(1, 2), backend=RemoteBackend(sys.argv[3], blocking=blocking)):
            out = model.output.save()
    except Exception as error:
        found["errors"].append(f"{type(error).__name__}: {error}")
print("FOUND" + json.dumps(found))
"""

if PEER.exists():

    def test_the_public_client_itself(guarded: Running) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "NDIF"))}
        done = subprocess.run(
            [str(PEER), "-c", PUBLIC, guarded.url, "alice", str(MODEL)],
            capture_output=True,
            check=False,
            text=True,
            env=environment,
            cwd=Path(__file__).parent,
            timeout=120,
        )
        assert "FOUND" in done.stdout, done.stderr
        found = json.loads(done.stdout.partition("FOUND")[2])
        assert found["models"][MODEL.repo_id]["state"] == "RUNNING" and "Up" in found["status"]
        assert found["who"]["email"] == "alice" and "torch" in found["env"]["packages"]
        assert len(found["errors"]) == 2
        assert all(error.startswith("RemoteError") and "never unpickles" in error for error in found["errors"])
