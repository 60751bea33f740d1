"""Single requests for information about a server or a key. They need only the standard library."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

from ...config import CONFIG
from ..protocol import KEY_HEADER, VERSION_HEADER
from .answers import address, text_of
from .errors import RemoteConnectionError, RemoteError

#: Maximum wait for the next bytes of an answer, in seconds.
_TIMEOUT = 5.0

#: Maximum size of an answer, in bytes.
_MAX_BYTES = 2**24


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Makes redirects errors with their status code, because the key is for one address only."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


def ask(path: str, host: str | None = None, key: str | None = None) -> dict[str, Any]:
    """Return the JSON object with which a server answers ``GET path``.

    Args:
        path: The path, such as ``/status``.
        host: Address of the server; by default ``CONFIG.API.HOST``.
        key: The key; by default ``CONFIG.API.KEY``.

    Raises:
        RemoteConnectionError: If the server does not answer within 5 seconds.
        RemoteError: If the server refuses the request, or if the answer is not a JSON object.
    """
    from ... import __version__

    server, key = address(host or CONFIG.API.HOST), key or CONFIG.API.KEY
    headers = {VERSION_HEADER: __version__, **({} if key is None else {KEY_HEADER: key})}
    request = urllib.request.Request(server + path, headers=headers)
    try:
        with urllib.request.build_opener(_NoRedirects).open(request, timeout=_TIMEOUT) as answer:
            content = json.loads(answer.read(_MAX_BYTES))
    except urllib.error.HTTPError as error:
        detail = text_of(error.read()) or f"{error.code} {error.reason}"
        raise RemoteError(f"{server} refused the request: {detail}", error.code) from None
    except OSError as error:
        reason = getattr(error, "reason", error)
        raise RemoteConnectionError(f"{server} cannot be reached: {reason}. `CONFIG.API.HOST` chooses the server.") from None
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise RemoteError(f"The answer of {server}{path} is not a JSON object: is it a server of nnsight?")
    return content


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table as text with aligned columns."""
    widths = [max(len(row[column]) for row in [titles, *rows]) for column in range(len(titles))]
    return "\n".join("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in [titles, *rows])
