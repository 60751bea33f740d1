"""Conversion of server answers to text and exceptions, and checks of addresses and ids."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING
from urllib.parse import urlsplit, urlunsplit

from ...program.format.errors import ExecutionFailedError, InvalidProgramError
from ..protocol import Message, is_id
from .errors import RemoteError

if TYPE_CHECKING:
    import requests

_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def detail_of(answer: requests.Response) -> str:
    """Return the reason for a refusal."""
    if answer.is_redirect:
        return f"it redirects to {answer.headers['location']!r}; redirects are not followed, because the key is for this address only"
    return text_of(answer.content) or f"{answer.status_code} {answer.reason}"


def text_of(body: bytes) -> str:
    """Return the reason in the body of an answer: the ``detail`` of its JSON, or else the text."""
    try:
        detail = json.loads(body)["detail"]
    except (ValueError, LookupError, TypeError):
        detail = body.decode("utf-8", "replace")
    return str(detail)[:2000]


def error_of(message: Message) -> Exception:
    """Return the exception that an ``ERROR`` message describes."""
    name = message["data"].get("error") if isinstance(message["data"], dict) else None
    for kind in (InvalidProgramError, ExecutionFailedError):
        if name == kind.__name__:
            return kind(message["description"])
    return RemoteError(f"{message['description']} (job {message['id']})")


def checked_id(job_id: str) -> str:
    """Return ``job_id``. Raises a :class:`ValueError` if it is not the id of a job."""
    if not is_id(job_id):
        raise ValueError(f"{job_id!r} is not the id of a job. `backend.job_id` is such an id.")
    return job_id


def address(host: str) -> str:
    """Return the address of a server without a trailing slash. The default scheme is https, or http for this machine.

    Raises:
        ValueError: If ``host`` is not an address.
    """
    text = host if "://" in host else f"//{host}"
    try:
        parts = urlsplit(text)
        name, _ = parts.hostname, parts.port
    except ValueError:
        name, parts = None, urlsplit("")
    if not name or parts.scheme not in ("", "http", "https") or parts.query or parts.fragment or "@" in parts.netloc:
        raise ValueError(f"{host!r} is not the address of a server, such as 'https://models.example.org' or 'localhost:5001'.")
    scheme = parts.scheme or ("http" if name in _LOOPBACK else "https")
    return urlunsplit((scheme, parts.netloc, parts.path.rstrip("/"), "", ""))
