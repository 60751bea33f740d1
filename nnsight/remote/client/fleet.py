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

#: States from the best to the worst. Other states are worse than these.
_STATES = ("RUNNING", "DEPLOYING")

#: Deployments with equal values of these fields are replicas of one model.
_MODEL_FIELDS = ("repo_id", "revision", "task", "trust_remote_code")
_FIELDS = ("model_class", "repo_id", "task", "trust_remote_code", "revision", "level", "state", "hot_replicas", "waiting")


class NdifStatus(dict[str, dict[str, Any]]):
    """The models of a server, by repository. A model that is deployed for several tasks has the keys ``repository (task)``.

    Each value is a dict with ``model_class``, ``repo_id``, ``task``, ``trust_remote_code``, ``revision``, ``level`` (``HOT`` or ``WARM``),
    ``state``, ``hot_replicas`` and ``waiting``, the number of waiting jobs. The replicas of a model are one entry, with the best of their
    states. Prints as a table.

    Args:
        deployments: The deployments in the server's answer, ``status(raw=True)["deployments"]``.
    """

    class Status(str, Enum):  # noqa: UP042 - keeps the `str` of the members, as for `JobStatus`
        """``UP`` if a model accepts jobs; else ``REDEPLOYING`` if a model is being deployed; else ``DOWN``."""

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
                replicas.setdefault(tuple(entry[field] for field in _MODEL_FIELDS), []).append(entry)
        several = Counter(repo_id for repo_id, *_ in replicas)
        for entry in map(_merged, replicas.values()):
            name = entry["repo_id"] if several[entry["repo_id"]] == 1 else f"{entry['repo_id']} ({entry['task']})"
            if name in self:  # the same task, but another revision
                name = f"{entry['repo_id']} ({entry['task']}, {entry['revision']})"
            self[name] = entry

    @property
    def status(self) -> Status:
        """Whether the server accepts jobs for at least one of its models."""
        states = {entry["state"] for entry in self.values()}
        if "RUNNING" in states:
            return self.Status.UP
        return self.Status.REDEPLOYING if "DEPLOYING" in states else self.Status.DOWN

    def __repr__(self) -> str:
        rows = [[str(entry[field]) for field in _FIELDS] for entry in self.values()]
        shown = f"\n{table(_FIELDS, rows)}" if rows else ""
        return f"Service: {self.status.value}, {len(self)} model{'s' * (len(self) != 1)}{shown}"


def _entry(deployment: dict[str, Any]) -> dict[str, Any]:
    """Return the entry of :class:`NdifStatus` for one deployment."""
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


def _merged(replicas: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge the entries of the replicas of a model."""
    best = min(replicas, key=lambda one: _STATES.index(one["state"]) if one["state"] in _STATES else len(_STATES))
    counts = {field: sum(one[field] for one in replicas) for field in ("hot_replicas", "waiting")}
    return {**best, **counts, "level": "HOT" if counts["hot_replicas"] else "WARM"}


def status(raw: bool = False, *, host: str | None = None) -> Any:
    """Return the models of the server. If the server fails to answer, the result is empty, and the reason is printed to standard error.

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
        raise RemoteError("The server's list of models has an unknown format; `status(raw=True)` returns the answer itself.") from error


def ndif_status(raw: bool = False, *, host: str | None = None) -> Any:
    """Deprecated name of :func:`status`; it warns."""
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
    """Whether the server accepts jobs for the model. False if the server cannot be reached.

    Args:
        repo_id: Name of the repository.
        revision: Branch, tag or commit.
        task: Task of the model; None for any task.
        trust_remote_code: Whether code of the repository may run; None for both.
        host: Address of the server; by default ``CONFIG.API.HOST``.
    """
    wanted = {"repo_id": repo_id, "revision": revision, "task": task, "trust_remote_code": trust_remote_code}
    wanted = {field: value for field, value in wanted.items() if value is not None}
    return any(entry["state"] == "RUNNING" and wanted.items() <= entry.items() for entry in status(host=host).values())
