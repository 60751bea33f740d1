"""Helpers for the service that runs remote traces: its models, its packages, and the user's key."""

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
    """Accept a module that remote blocks use, and do nothing: blocks are recorded here, so their helper functions run here.

    Raises:
        TypeError: If ``module`` is neither a module nor the name of one.
    """
    if not isinstance(module, (ModuleType, str)):
        raise TypeError(f"register() takes a module or its name, not {type(module).__name__}.")
