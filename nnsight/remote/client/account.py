"""The key of a user: whose it is, and keeping it."""

from __future__ import annotations

import getpass
from typing import Any

from ...config import CONFIG
from .facts import ask


def whoami(api_key: str | None = None, *, host: str | None = None) -> dict[str, Any]:
    """Return whose key it is: ``email``, ``tags``, and what else the server says, such as ``limits``.

    Args:
        api_key: The key; by default ``CONFIG.API.KEY``.
        host: Address of the server; by default ``CONFIG.API.HOST``.

    Raises:
        RemoteError: If the server does not know the key.
        RemoteConnectionError: If it cannot be reached.
    """
    return {"email": None, "tags": [], **ask("/whoami", host, api_key)}


def login(api_key: str | None = None, *, host: str | None = None) -> dict[str, Any] | None:
    """Check a key at the server, and use it from now on, also in later programs.

    Args:
        api_key: The key; by default it is asked for, without showing it.
        host: Address of the server; by default ``CONFIG.API.HOST``.

    Returns:
        Whose key it is, see :func:`whoami`; None without a key, which changes nothing.

    Raises:
        RemoteError: If the server does not know the key. Nothing is stored then, as with the errors below.
        RemoteConnectionError: If it cannot be reached.
        ValueError: If the key has blanks in it.
    """
    key = (getpass.getpass("API key: ") if api_key is None else api_key).strip()
    if not key:
        return None
    identity = whoami(key, host=host)
    CONFIG.set_default_api_key(key)
    return identity
