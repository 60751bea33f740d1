"""Versions of Python and of packages, in this process and on a server."""

from __future__ import annotations

import pkgutil
import platform
import sys
import sysconfig
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from .facts import ask, table

#: Packages whose versions determine the results of a model and the features of blocks.
CRITICAL = ("nnsight", "torch", "transformers")

_known: dict[str | None, dict[str, Any]] = {}  # environments of servers, by address


def get_local_env() -> dict[str, Any]:
    """Return ``python_version`` and ``packages``: versions by import name, ``"local"`` for the user's own modules on ``sys.path``."""
    from ... import __version__

    paths = sysconfig.get_paths()
    installed = {Path(paths[name]).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    own = [path for path in sys.path if not any(Path(path).resolve().is_relative_to(folder) for folder in installed)]
    names = {module.name for module in pkgutil.iter_modules(own)} - set(sys.stdlib_module_names)
    packages = dict.fromkeys(sorted(names), "local")
    for name, distributions in metadata.packages_distributions().items():
        if name.isidentifier() and name not in sys.stdlib_module_names:
            packages[name] = metadata.version(distributions[0])
    return {"python_version": platform.python_version(), "packages": {**packages, "nnsight": __version__}}


def get_remote_env(force_refresh: bool = False, *, host: str | None = None) -> dict[str, Any]:
    """Return the environment of the server, as :func:`get_local_env`. The answer is cached; ``force_refresh`` asks again.

    Raises:
        RemoteConnectionError: If the server cannot be reached.
        RemoteError: If the server refuses to answer.
    """
    from ...config import CONFIG

    server = host or CONFIG.API.HOST
    if force_refresh or server not in _known:
        _known[server] = ask("/env", server)
    return _known[server]


class EnvComparison:
    """Comparison of the versions in this process and on a server. Prints as a table.

    Programs are data, so they run even if the versions differ. But different versions may explain different results.

    Attributes:
        local: The environment of this process, from :func:`get_local_env`.
        remote: The environment of the server.
        local_python: The version of Python in this process.
        remote_python: The version of Python on the server.
        python_matches: Whether the two versions of Python are equal.
        packages: For each package of the server ``{"local": version or None, "remote": version, "match": bool, "critical": bool}``.
        mismatches: The packages whose versions differ.
        critical_mismatches: The entries of ``mismatches`` for nnsight, torch and transformers.
    """

    def __init__(self, local_env: Mapping[str, Any], remote_env: Mapping[str, Any]) -> None:
        self.local, self.remote = local_env, remote_env
        self.local_python, self.remote_python = (str(found.get("python_version", "")).split(" ")[0] for found in (local_env, remote_env))
        self.python_matches = self.local_python == self.remote_python
        here, there = local_env.get("packages", {}), remote_env.get("packages", {})
        self.packages: dict[str, dict[str, Any]] = {
            name: {"local": here.get(name), "remote": there[name], "match": here.get(name) == there[name], "critical": name in CRITICAL}
            for name in sorted(there, key=lambda name: (name not in CRITICAL, name))
        }
        self.mismatches = {name: package for name, package in self.packages.items() if not package["match"]}
        self.critical_mismatches = {name: package for name, package in self.mismatches.items() if package["critical"]}

    def __repr__(self) -> str:
        return build_table(self.local, self.remote)


def build_table(local_env: Mapping[str, Any], remote_env: Mapping[str, Any]) -> str:
    """Return an :class:`EnvComparison` as a table, critical packages first."""
    compared = EnvComparison(local_env, remote_env)
    rows = [("python", compared.local_python, compared.remote_python, "" if compared.python_matches else "differs")]
    for name, package in compared.packages.items():
        remark = "" if package["match"] else "differs (critical)" if package["critical"] else "differs"
        rows.append((name, package["local"] or "-", package["remote"] or "-", remark))
    return table(("package", "here", "server", ""), rows)


def compare(*, host: str | None = None) -> EnvComparison:
    """Compare the versions of Python and packages in this process with those of the server.

    Args:
        host: Address of the server; by default ``CONFIG.API.HOST``.

    Raises:
        RemoteConnectionError: If the server cannot be reached.
        RemoteError: If the server refuses to answer.
    """
    return EnvComparison(get_local_env(), get_remote_env(force_refresh=True, host=host))
