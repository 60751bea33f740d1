"""Models and package versions of a server."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from importlib import metadata
from typing import Any

from ..protocol import ModelKey


class Status(dict[str, dict[str, Any]]):
    """The models of a server: by name of the repository, with ``model_class``, ``revision``, ``state``, ``waiting``.

    Prints as a table.
    """

    @property
    def running(self) -> list[str]:
        """The models that take jobs."""
        return [name for name, model in self.items() if model["state"] == "RUNNING"]

    def __repr__(self) -> str:
        rows = [(name, m["revision"], m["state"], str(m["waiting"])) for name, m in self.items()]
        return _table(("model", "revision", "state", "waiting"), rows)


class Comparison(dict[str, tuple[str | None, str | None]]):
    """Versions of packages, here and at the server; ``None`` for a missing package. Prints as a table.

    Programs are data, so versions may differ; they may explain different numbers.
    """

    @property
    def different(self) -> list[str]:
        """The packages whose versions differ."""
        return [name for name, (here, there) in self.items() if here != there]

    def __repr__(self) -> str:
        rows = [(n, here or "-", there or "-", "" if here == there else "differs") for n, (here, there) in self.items()]
        return _table(("package", "here", "server", ""), rows)


def status(raw: bool = False, *, host: str | None = None) -> Any:
    """Return the models of the server.

    Args:
        raw: Return the answer of the server unchanged.
        host: Address of the server; by default ``CONFIG.API.HOST``.

    Raises:
        RemoteConnectionError: If the server cannot be reached.
    """
    from .remote_backend import client_of

    answer = client_of(host).status()
    if raw:
        return answer
    found = Status()
    for deployment in answer.get("deployments", {}).values():
        key = ModelKey.parse(deployment["model_key"])
        found[key.repo_id] = {
            "model_class": key.model_class.rpartition(".")[2],
            "revision": key.revision,
            "state": deployment.get("application_state", "NOT DEPLOYED"),
            "waiting": deployment.get("waiting", 0),
        }
    return found


#: The name by which scripts know :func:`status`.
ndif_status = status


def is_model_running(repo_id: str, revision: str = "main", *, host: str | None = None) -> bool:
    """Whether the server has the model and takes jobs for it.

    Args:
        repo_id: Name of the repository.
        revision: Branch, tag or commit.
        host: Address of the server; by default ``CONFIG.API.HOST``.

    Raises:
        RemoteConnectionError: If the server cannot be reached.
    """
    wanted = ModelKey(repo_id, revision)
    deployments = status(raw=True, host=host).get("deployments", {}).values()
    found = [deployment for deployment in deployments if ModelKey.parse(deployment["model_key"]).matches(wanted)]
    return bool(found) and found[0].get("application_state") == "RUNNING"


def compare(*, host: str | None = None) -> Comparison:
    """Return the versions of Python and packages, here and at the server.

    Args:
        host: Address of the server; by default ``CONFIG.API.HOST``.

    Raises:
        RemoteConnectionError: If the server cannot be reached.
    """
    from ... import __version__
    from .remote_backend import client_of

    there = client_of(host).env()
    found = Comparison(python=(platform.python_version(), there.get("python_version", "").split(" ")[0] or None))
    for name, version in there.get("packages", {}).items():
        try:
            here: str | None = __version__ if name == "nnsight" else metadata.version(name)
        except metadata.PackageNotFoundError:
            here = None
        found[name] = (here, version)
    return found


def _table(titles: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(row[column]) for row in [titles, *rows]) for column in range(len(titles))]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [titles, *rows]
    )
