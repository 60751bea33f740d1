"""Versions of Python and of packages, here and at a server."""

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

#: Packages whose versions decide what a model computes and what a block can say.
CRITICAL = ("nnsight", "torch", "transformers")

_known: dict[str | None, dict[str, Any]] = {}  # what servers have said, by address


def get_local_env() -> dict[str, Any]:
    """Return ``python_version`` and ``packages``: versions by import name, ``"local"`` for modules of your own on ``sys.path``."""
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
    """Return the same of the server, which is asked once unless ``force_refresh``.

    Raises:
        RemoteConnectionError: If the server cannot be reached.
        RemoteError: If it refuses to answer.
    """
    from ...config import CONFIG

    server = host or CONFIG.API.HOST
    if force_refresh or server not in _known:
        _known[server] = ask("/env", server)
    return _known[server]


class EnvComparison:
    """Versions here and at a server. Prints as a table.

    Programs are data, so versions may differ; they may explain different numbers.

    Attributes:
        local: The environment here, as :func:`get_local_env` returns it.
        remote: That of the server.
        local_python: The version of Python here.
        remote_python: The version of Python at the server.
        python_matches: Whether they are the same.
        packages: For each package of the server ``{"local": version or None, "remote": version, "match": bool, "critical": bool}``.
        mismatches: The packages whose versions differ.
        critical_mismatches: Those of them that are critical: nnsight, torch and transformers.
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
    """Return an :class:`EnvComparison` as text, the critical packages first."""
    compared = EnvComparison(local_env, remote_env)
    rows = [("python", compared.local_python, compared.remote_python, "" if compared.python_matches else "differs")]
    for name, package in compared.packages.items():
        remark = "" if package["match"] else "differs (critical)" if package["critical"] else "differs"
        rows.append((name, package["local"] or "-", package["remote"] or "-", remark))
    return table(("package", "here", "server", ""), rows)


def compare(*, host: str | None = None) -> EnvComparison:
    """Return the versions of Python and packages, here and at the server.

    Args:
        host: Address of the server; by default ``CONFIG.API.HOST``.

    Raises:
        RemoteConnectionError: If the server cannot be reached.
        RemoteError: If it refuses to answer.
    """
    return EnvComparison(get_local_env(), get_remote_env(force_refresh=True, host=host))
