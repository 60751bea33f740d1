"""Helpers for the service: its models, its packages, and whose key it is."""

from __future__ import annotations

import getpass
import importlib.metadata
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import nnsight
from nnsight import CONFIG, cli, ndif
from nnsight.remote.client.errors import RemoteConnectionError, RemoteError
from nnsight.remote.client.facts import ask

from .remoting import Accounts, Orders, Running, account, running
from .test_client import odd_server

pytestmark = pytest.mark.usefixtures("own_options")

NOWHERE = "http://127.0.0.1:1"


def deployment(repo_id: str, state: str | None = "RUNNING", level: str = "HOT", **fields: Any) -> dict[str, Any]:
    described = ", ".join(f'"{name}": {value}' for name, value in {"repo_id": f'"{repo_id}"', **fields}.items())
    key = f"nnsight.modeling.transformers.TransformersModel:{{{described}}}"
    return {"model_key": key, "deployment_level": level, **({} if state is None else {"application_state": state})}


@pytest.fixture
def keyed(orders: Orders, tmp_path: Path) -> Iterator[Running]:
    """A server with a key, for which the options stand."""
    with running(orders.engine(), tmp_path / "jobs", door=Accounts(secret=account("alice"))) as server:
        CONFIG.API.HOST = server.url
        yield server
        del CONFIG.API.HOST, CONFIG.API.KEY


# -- models ----------------------------------------------------------------------------------------------------------------------


def test_a_status_has_an_entry_for_each_model() -> None:
    found = ndif.NdifStatus(
        {
            "a": deployment("org/one", "DEPLOYING", revision='"main"'),
            "b": deployment("org/one", "RUNNING"),
            "c": deployment("org/one", "RUNNING", level="COLD"),
            "d": deployment("org/two", None, "WARM", task='"fill-mask"', trust_remote_code="true"),
            "e": deployment("org/two", "UNHEALTHY", task='"text-generation"'),
        }
    )
    assert list(found) == list(found.keys()) == ["org/one", "org/two (fill-mask)", "org/two (text-generation)"]
    assert len(found) == 3 and "org/one" in found and "org/two" not in found
    assert found["org/one"]["state"] == "RUNNING" and found["org/one"]["hot_replicas"] == 2
    two = found["org/two (fill-mask)"]
    assert (two["repo_id"], two["model_class"], two["revision"]) == ("org/two", "TransformersModel", "main")
    assert (two["task"], two["trust_remote_code"]) == ("fill-mask", True)
    assert (two["level"], two["state"], two["hot_replicas"]) == ("WARM", "NOT DEPLOYED", 0)
    lines = str(found).splitlines()
    assert lines[0] == "Service: UP, 3 models" and lines[1].split()[:3] == ["model_class", "repo_id", "task"] and len(lines) == 5
    assert found.deployments["a"]["application_state"] == "DEPLOYING"


@pytest.mark.parametrize(("states", "expected"), [(["UNHEALTHY", "DEPLOYING"], "REDEPLOYING"), (["UNHEALTHY"], "DOWN"), ([], "DOWN")])
def test_the_status_of_a_service(states: list[str], expected: str) -> None:
    found = ndif.NdifStatus({str(number): deployment(f"org/{number}", state) for number, state in enumerate(states)})
    assert found.status is ndif.NdifStatus.Status(expected) and found.status == expected


def test_models_of_one_task_and_several_revisions() -> None:
    found = ndif.NdifStatus({revision: deployment("org/one", revision=f'"{revision}"', task='"t"') for revision in ("main", "v2")})
    assert list(found) == ["org/one (t)", "org/one (t, v2)"]


def test_what_a_server_has(server: Running) -> None:
    CONFIG.API.HOST = server.url
    try:
        found = nnsight.status()
        assert found["test/model"]["model_class"] == "LanguageModel" and found.status == "UP"
        assert "deployments" in nnsight.status(raw=True)
        with pytest.warns(nnsight.NNsightDeprecationWarning, match=r"nnsight\.status\(\)") as caught:
            assert list(nnsight.ndif_status()) == ["test/model"]
        assert caught[0].filename == __file__
        assert nnsight.is_model_running("test/model") and not nnsight.is_model_running("test/model", "other")
        assert nnsight.is_model_running("test/model", trust_remote_code=False)
        assert not nnsight.is_model_running("test/model", task="fill-mask") and not nnsight.is_model_running("gpt2")
        versions, installed = nnsight.compare(), importlib.metadata.version("torch")
        assert versions.packages["torch"] == {"local": installed, "remote": installed, "match": True, "critical": True}
        assert versions.mismatches == {} and versions.python_matches and ndif.get_remote_env() is versions.remote
    finally:
        del CONFIG.API.HOST


def test_a_server_that_cannot_be_reached_is_empty_within_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    began = time.monotonic()
    found = nnsight.status(host=NOWHERE)
    assert len(found) == 0 and found.status == "DOWN" and str(found) == "Service: DOWN, 0 models"
    assert NOWHERE in capsys.readouterr().err
    assert nnsight.status(raw=True, host=NOWHERE) == {}
    assert nnsight.is_model_running("gpt2", host=NOWHERE) is False
    for call in (ndif.compare, ndif.whoami):
        with pytest.raises(RemoteConnectionError, match=r"cannot be reached.*CONFIG\.API\.HOST"):
            call(host=NOWHERE)
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("body", [b"<html>", b"[]", b""])
def test_something_else_than_a_server(body: bytes) -> None:
    with odd_server(200, body) as (url, _), pytest.raises(RemoteError, match="is it a server of nnsight"):
        ask("/status", url)


@pytest.mark.parametrize("deployments", ["3", '{"a": {"deployment_level": "HOT"}}', '{"a": 1}'])
def test_models_that_are_not_understood(deployments: str) -> None:
    with odd_server(200, f'{{"deployments": {deployments}}}'.encode()) as (url, _), pytest.raises(RemoteError, match="unknown format"):
        nnsight.status(host=url)


def test_the_key_goes_to_one_address_only() -> None:
    with odd_server(200, b"{}") as (other, got), odd_server(302, b"", Location=other) as (url, _):
        with pytest.raises(RemoteError, match="302"):
            ndif.whoami("secret", host=url)
    assert got == []


# -- packages --------------------------------------------------------------------------------------------------------------------


def test_the_environment_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_own_module.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = ndif.get_local_env()
    assert found["python_version"] == platform.python_version()
    packages = found["packages"]
    assert packages["my_own_module"] == "local" and packages["nnsight"] == nnsight.__version__
    assert packages["torch"] == importlib.metadata.version("torch") and packages["yaml"] != "local"
    assert not {"json", "os", "asyncio", "_ast"} & packages.keys()


def test_environments_are_compared() -> None:
    here = {"python_version": "3.11.1", "packages": {"torch": "2.1", "numpy": "1.0", "mine": "local", "nnsight": "1"}}
    there = {"python_version": "3.11.2 (main)", "packages": {"numpy": "2.0", "torch": "2.2", "nnsight": "1", "ray": "5"}}
    found = ndif.EnvComparison(here, there)
    assert (found.local, found.remote) == (here, there)
    assert (found.local_python, found.remote_python, found.python_matches) == ("3.11.1", "3.11.2", False)
    assert list(found.packages) == ["nnsight", "torch", "numpy", "ray"]
    assert found.packages["ray"] == {"local": None, "remote": "5", "match": False, "critical": False}
    assert list(found.mismatches) == ["torch", "numpy", "ray"] and list(found.critical_mismatches) == ["torch"]
    lines = str(found).splitlines()
    assert str(found) == ndif.build_table(here, there)
    assert lines[1].split() == ["python", "3.11.1", "3.11.2", "differs"]
    assert lines[3].split() == ["torch", "2.1", "2.2", "differs", "(critical)"] and lines[5].split() == ["ray", "-", "5", "differs"]


# -- the key ---------------------------------------------------------------------------------------------------------------------


def test_whose_key_it_is(keyed: Running) -> None:
    found = nnsight.whoami("secret")
    assert (found["email"], found["tags"]) == ("alice", [])
    with pytest.raises(RemoteError, match="API key is missing or unknown"):
        nnsight.whoami()


def test_a_key_is_checked_and_kept(keyed: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    answers = iter(["", " secret\n", "wrong"])
    monkeypatch.setattr(getpass, "getpass", lambda prompt: (asked.append(prompt), next(answers))[1])
    assert nnsight.login() is None and CONFIG.API.KEY is None
    found = nnsight.login()
    assert found is not None and found["email"] == "alice"
    assert CONFIG.load().API.KEY == "secret" and len(asked) == 2
    with pytest.raises(RemoteError, match="API key"):
        nnsight.login()
    assert CONFIG.API.KEY == CONFIG.load().API.KEY == "secret"


def test_the_commands(keyed: Running, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli.main(["whoami"]) == 2
    assert "API key is missing or unknown" in capsys.readouterr().err
    assert cli.main(["login", "secret"]) == 0
    assert capsys.readouterr().out == "This is the key of alice. It is stored.\n"
    assert cli.main(["whoami"]) == 0
    assert capsys.readouterr().out == "alice\n"
    monkeypatch.setattr(getpass, "getpass", lambda prompt: "")
    assert cli.main(["login"]) == 0
    assert capsys.readouterr().out == "No key was given, so nothing was stored.\n"


def test_modules_need_no_registration() -> None:
    assert nnsight.register("my_helpers") is None and nnsight.register(sys.modules[__name__]) is None
    with pytest.raises(TypeError, match="a module or its name, not int"):
        nnsight.register(3)  # type: ignore[arg-type]


def test_the_helpers_need_no_package_beyond_the_library() -> None:
    code = "import sys, nnsight; nnsight.ndif.NdifStatus; bad = {'requests', 'websockets', 'cloudpickle'} & set(sys.modules); print(bad)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
