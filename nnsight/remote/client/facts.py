"""What a server says about itself and about a key, asked once and with the standard library only."""

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

#: Longest silence of a server, in seconds.
_TIMEOUT = 5.0

#: Most bytes of an answer.
_MOST = 2**24


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Follows no redirect, for the key is for one address only; it is an error with its status code then."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


def ask(path: str, host: str | None = None, key: str | None = None) -> dict[str, Any]:
    """Return what a server answers to ``GET path``.

    Args:
        path: Such as ``/status``.
        host: Address of the server; by default ``CONFIG.API.HOST``.
        key: The key; by default ``CONFIG.API.KEY``.

    Raises:
        RemoteConnectionError: If the server cannot be reached within seconds.
        RemoteError: If it refuses the request, or answers with something else than a JSON object.
    """
    from ... import __version__

    server, key = address(host or CONFIG.API.HOST), key or CONFIG.API.KEY
    headers = {VERSION_HEADER: __version__, **({} if key is None else {KEY_HEADER: key})}
    request = urllib.request.Request(server + path, headers=headers)
    try:
        with urllib.request.build_opener(_NoRedirects).open(request, timeout=_TIMEOUT) as answer:
            content = json.loads(answer.read(_MOST))
    except urllib.error.HTTPError as error:
        detail = text_of(error.read()) or f"{error.code} {error.reason}"
        raise RemoteError(f"{server} refused the request: {detail}", error.code) from None
    except OSError as error:
        reason = getattr(error, "reason", error)
        raise RemoteConnectionError(f"{server} cannot be reached: {reason}. `CONFIG.API.HOST` says which server is asked.") from None
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise RemoteError(f"{server}{path} answered with something else than a JSON object: is it a server of nnsight?")
    return content


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return columns of text."""
    widths = [max(len(row[column]) for row in [titles, *rows]) for column in range(len(titles))]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in [titles, *rows]
    )
