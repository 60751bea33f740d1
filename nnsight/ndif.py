"""Helpers for the service that runs remote traces: its models, its installed packages, and the user's key."""

from __future__ import annotations

from types import ModuleType

from .remote.client.account import login, whoami
from .remote.client.environments import EnvComparison, build_table, compare, get_local_env, get_remote_env
from .remote.client.fleet import NdifStatus, is_model_running, ndif_status, status

__all__ = [
    "EnvComparison",
    "NdifStatus",
    "build_table",
    "compare",
    "get_local_env",
    "get_remote_env",
    "is_model_running",
    "login",
    "ndif_status",
    "register",
    "status",
    "whoami",
]


def register(module: ModuleType | str) -> None:
    """Do nothing. Remote blocks are recorded in this process, so their helper functions run here and need no registration.

    Raises:
        TypeError: If ``module`` is neither a module nor the name of one.
    """
    if not isinstance(module, (ModuleType, str)):
        raise TypeError(f"register() takes a module or its name, not {type(module).__name__}.")
