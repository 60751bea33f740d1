"""The API key of a user: its owner, and storing it."""

from __future__ import annotations

import getpass
from typing import Any

from ...config import CONFIG
from .facts import ask


def whoami(api_key: str | None = None, *, host: str | None = None) -> dict[str, Any]:
    """Return the owner of a key: ``email``, ``tags``, and further entries of the server such as ``limits``.

    Args:
        api_key: The key; by default ``CONFIG.API.KEY``.
        host: Address of the server; by default ``CONFIG.API.HOST``.

    Raises:
        RemoteError: If the server does not know the key.
        RemoteConnectionError: If the server cannot be reached.
    """
    return {"email": None, "tags": [], **ask("/whoami", host, api_key)}


def login(api_key: str | None = None, *, host: str | None = None) -> dict[str, Any] | None:
    """Check a key with the server, and store it for this process and later ones. After an error, nothing is stored.

    Args:
        api_key: The key; by default, the user is prompted for it, and the input is hidden.
        host: Address of the server; by default ``CONFIG.API.HOST``.

    Returns:
        The owner of the key, see :func:`whoami`; None if the key is empty, and then nothing changes.

    Raises:
        RemoteError: If the server does not know the key.
        RemoteConnectionError: If the server cannot be reached.
        ValueError: If the key contains whitespace.
    """
    key = (getpass.getpass("API key: ") if api_key is None else api_key).strip()
    if not key:
        return None
    identity = whoami(key, host=host)
    CONFIG.set_default_api_key(key)
    return identity
