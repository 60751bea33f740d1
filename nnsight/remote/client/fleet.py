"""The models of a server."""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any

from ...runtime.errors import NNsightDeprecationWarning
from ..protocol import ModelKey
from .errors import RemoteError
from .facts import ask, table

#: States from the best to the worst; others come behind these.
_STATES = ("RUNNING", "DEPLOYING")

_OF_A_MODEL = ("repo_id", "revision", "task", "trust_remote_code")
_FIELDS = ("model_class", "repo_id", "task", "trust_remote_code", "revision", "level", "state", "hot_replicas", "waiting")


class NdifStatus(dict[str, dict[str, Any]]):
    """The models that a server has, by repository; one that is there for several tasks is ``repository (task)``.

    Each is a dict with ``model_class``, ``repo_id``, ``task``, ``trust_remote_code``, ``revision``, ``level`` (``HOT`` or ``WARM``),
    ``state``, ``hot_replicas`` and ``waiting``, the number of its waiting jobs. Replicas of a model are one entry, with the best of
    their states. Prints as a table.

    Args:
        deployments: What the server says of each deployment, as ``status(raw=True)["deployments"]`` has it.
    """

    class Status(str, Enum):  # noqa: UP042 - prints as other statuses here do
        """``UP`` if a model takes jobs, else ``REDEPLOYING`` if one is about to, else ``DOWN``."""

        UP = "UP"
        REDEPLOYING = "REDEPLOYING"
        DOWN = "DOWN"

    def __init__(self, deployments: Mapping[str, dict[str, Any]] | Iterable[dict[str, Any]] = ()) -> None:
        self.deployments = deployments
        given = deployments.values() if isinstance(deployments, Mapping) else deployments
        replicas: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
        for deployment in given:
            if deployment.get("deployment_level") in ("HOT", "WARM"):
                entry = _entry(deployment)
                replicas.setdefault(tuple(entry[field] for field in _OF_A_MODEL), []).append(entry)
        several = Counter(repo_id for repo_id, *_ in replicas)
        for entry in map(_joined, replicas.values()):
            name = entry["repo_id"] if several[entry["repo_id"]] == 1 else f"{entry['repo_id']} ({entry['task']})"
            if name in self:  # of the same task, but another revision
                name = f"{entry['repo_id']} ({entry['task']}, {entry['revision']})"
            self[name] = entry

    @property
    def status(self) -> Status:
        """Whether the server takes jobs for one of its models."""
        states = {entry["state"] for entry in self.values()}
        if "RUNNING" in states:
            return self.Status.UP
        return self.Status.REDEPLOYING if "DEPLOYING" in states else self.Status.DOWN


    def __repr__(self) -> str:
        rows = [[str(entry[field]) for field in _FIELDS] for entry in self.values()]
        shown = f"\n{table(_FIELDS, rows)}" if rows else ""
        return f"Service: {self.status.value}, {len(self)} model{'s' * (len(self) != 1)}{shown}"


def _entry(deployment: dict[str, Any]) -> dict[str, Any]:
    """Return what a status shows of one deployment."""
    key = ModelKey.parse(deployment["model_key"])
    level, state = deployment["deployment_level"], deployment.get("application_state") or "NOT DEPLOYED"
    return {
        "model_class": key.model_class.rpartition(".")[2],
        "repo_id": key.repo_id,
        "task": key.task,
        "trust_remote_code": bool(key.trust_remote_code),
        "revision": key.revision,
        "level": level,
        "state": state,
        "hot_replicas": int(level == "HOT"),
        "waiting": deployment.get("waiting", 0),
    }


def _joined(replicas: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the entry of a model with these replicas."""
    best = min(replicas, key=lambda one: _STATES.index(one["state"]) if one["state"] in _STATES else len(_STATES))
    counts = {field: sum(one[field] for one in replicas) for field in ("hot_replicas", "waiting")}
    return {**best, **counts, "level": "HOT" if counts["hot_replicas"] else "WARM"}


def status(raw: bool = False, *, host: str | None = None) -> Any:
    """Return the models of the server; of one that cannot be reached, none, with the reason on standard error.

    Args:
        raw: Return the answer of the server unchanged.
        host: Address of the server; by default ``CONFIG.API.HOST``.

    Returns:
        A :class:`NdifStatus`, or with ``raw`` a dict.

    Raises:
        RemoteError: If the answer cannot be understood.
    """
    try:
        answer = ask("/status", host)
    except RemoteError as error:
        print(f"nnsight: no status: {error}", file=sys.stderr)
        answer = {}
    if raw:
        return answer
    try:
        return NdifStatus(answer.get("deployments", {}))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise RemoteError("The server lists models in a way that is not understood here; `status(raw=True)` has its answer.") from error


def ndif_status(raw: bool = False, *, host: str | None = None) -> Any:
    """Return :func:`status`, under an older name, which warns."""
    warnings.warn("nnsight.ndif_status() is now nnsight.status().", NNsightDeprecationWarning, stacklevel=2)
    return status(raw, host=host)


def is_model_running(
    repo_id: str,
    revision: str = "main",
    task: str | None = None,
    trust_remote_code: bool | None = None,
    *,
    host: str | None = None,
) -> bool:
    """Whether the server has the model and takes jobs for it; False if the server cannot be reached.

    Args:
        repo_id: Name of the repository.
        revision: Branch, tag or commit.
        task: Only for this task; any by default.
        trust_remote_code: Only with, or only without, code of the repository.
        host: Address of the server; by default ``CONFIG.API.HOST``.
    """
    wanted = {"repo_id": repo_id, "revision": revision, "task": task, "trust_remote_code": trust_remote_code}
    wanted = {field: value for field, value in wanted.items() if value is not None}
    return any(entry["state"] == "RUNNING" and wanted.items() <= entry.items() for entry in status(host=host).values())
