"""API keys, stored as hashes, each with its own limits.

A key has 32 random bytes; ``nnsight keys add`` creates it and shows it once. Such a key cannot be found by a search, so one SHA-256
suffices; passwords would need a slow hash. The hash of a presented key is compared with all entries in constant time.

The file of keys is JSON and readable by its owner only::

    {"keys": [{"name": "alice", "sha256": "...", "queue": 4, "bytes": 1000000, "seconds": 30}]}

The server reads the file again when it changes. So a key is revoked without a restart when its entry is removed.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from ...options import replace_file

#: Prefix of keys, so that scanners can recognise leaked keys.
_PREFIX = "nns-"


@dataclass(frozen=True)
class Account:
    """A key with its limits."""

    name: str  # names the owner of jobs
    sha256: str = ""  # hash of the key, in hexadecimal; empty on a server without keys
    queue: int = 16  # maximum number of jobs that wait or run at a time
    bytes: int = 64 * 2**20  # maximum size of a payload, in bytes
    seconds: float = 60.0  # time limit of a job

    def limits(self) -> dict[str, Any]:
        """Return the limits, for ``/whoami``."""
        return {"queue": self.queue, "bytes": self.bytes, "seconds": self.seconds}


class Door(Protocol):
    """Decides who may use a server: finds the account of a key."""

    def admit(self, key: str | None) -> Account | None:
        """Return the account of ``key``; ``None`` if there is none."""


class OpenDoor:
    """Admits everybody, with one account and any key."""

    def __init__(self, account: Account | None = None) -> None:
        self._account = account or Account("anonymous")

    def admit(self, key: str | None) -> Account | None:
        return self._account


class KeyFile:
    """Admits the owners of the keys in a file. Raises ``FileNotFoundError`` without the file, and ``ValueError`` if it is malformed."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._stamp = self._stamp_now()
        self._accounts = read_accounts(self.path)

    def admit(self, key: str | None) -> Account | None:
        """Return the account of ``key``; ``None`` if there is none. If the file has become malformed, its previous content applies."""
        self._read_again()
        presented = hash_of(key or "")
        found = None
        for account in self._accounts:  # no early exit, so that the time does not depend on the match
            if hmac.compare_digest(account.sha256, presented):
                found = account
        return found if key else None

    def _read_again(self) -> None:
        try:
            stamp = self._stamp_now()
            if stamp != self._stamp:
                self._accounts, self._stamp = read_accounts(self.path), stamp
        except FileNotFoundError:
            self._accounts, self._stamp = [], (0, 0)
        except (OSError, ValueError):
            return

    def _stamp_now(self) -> tuple[int, int]:
        found = os.stat(self.path)  # called for each job, and faster than `Path.stat`
        return found.st_mtime_ns, found.st_size


def hash_of(key: str) -> str:
    """Return the stored hash of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def read_accounts(path: Path) -> list[Account]:
    """Return the entries of a file of keys. Raises a :class:`ValueError` that names a malformed entry."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"The file of keys {path} is not JSON: {error}. `nnsight keys add` writes such files.") from None
    entries = content.get("keys") if isinstance(content, dict) else None
    if not isinstance(entries, list):
        raise ValueError(f'The file of keys {path} has no list "keys", as in {{"keys": []}}.')
    accounts = [_account(entry, path) for entry in entries]
    names = [account.name for account in accounts]
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        raise ValueError(f"The file of keys {path} has several entries named {', '.join(doubled)}: each needs its own name.")
    return accounts


def _account(entry: Any, path: Path) -> Account:
    known = {"name", "sha256", "queue", "bytes", "seconds"}
    if not isinstance(entry, dict) or not {"name", "sha256"} <= entry.keys() <= known:
        raise ValueError(f"An entry of {path} must have `name` and `sha256`, and may only have {', '.join(sorted(known))}.")
    name, digest = entry["name"], entry["sha256"]
    if not isinstance(name, str) or not name.isprintable() or not name:
        raise ValueError(f"The name {name!r} in {path} must be a line of printable text.")
    if not isinstance(digest, str) or len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
        raise ValueError(f"The `sha256` of {name!r} in {path} is not a SHA-256 hash in hexadecimal. Keys themselves are not stored.")
    for limit in ("queue", "bytes", "seconds"):
        if limit in entry and not (type(entry[limit]) in (int, float) and entry[limit] > 0):
            raise ValueError(f"`{limit}` of {name!r} in {path} is {entry[limit]!r}, but must be a number above 0.")
    return Account(**entry)


def add_key(path: Path, name: str, **limits: Any) -> str:
    """Create a key, write its hash to the file, and return the key. Raises a :class:`ValueError` if the name is taken."""
    accounts = read_accounts(path) if path.exists() else []
    if any(account.name == name for account in accounts):
        raise ValueError(f"{path} already has a key named {name!r}. Remove it first, or choose another name.")
    key = _PREFIX + secrets.token_urlsafe(32)
    chosen = {limit: value for limit, value in limits.items() if value is not None}
    account = _account({"name": name, "sha256": hash_of(key), **chosen}, path)
    _write(path, [*accounts, account])
    return key


def remove_key(path: Path, name: str) -> None:
    """Remove a key from the file. Raises a :class:`ValueError` if there is no key of that name."""
    accounts = read_accounts(path)
    kept = [account for account in accounts if account.name != name]
    if len(kept) == len(accounts):
        raise ValueError(f"{path} has no key named {name!r}. Its keys: {', '.join(a.name for a in accounts) or 'none'}.")
    _write(path, kept)


def _write(path: Path, accounts: Sequence[Account]) -> None:
    replace_file(str(path), json.dumps({"keys": [asdict(account) for account in accounts]}, indent=2) + "\n")
