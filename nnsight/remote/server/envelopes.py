"""Checks of envelopes, and of the first bytes of payloads.

A job arrives in an HTTP request or through a socket. Its envelope names the model, and its payload must begin like a safetensors file.
Clients that send pickled Python objects are refused with an explanation.
"""

from __future__ import annotations

import json
from typing import Any

from ... import __version__
from ..protocol import CONTENT_TYPE, is_id

#: First bytes of payloads of other clients.
_OTHER_FORMATS = {
    b"\x80": "a pickle",
    b"PK\x03\x04": "a zip archive, as torch.save writes",
    b"\x28\xb5\x2f\xfd": "compressed",
    b"\x1f\x8b": "compressed",
    b"\x78": "compressed",
}

BAD_KEY = "The API key is missing or unknown. Set it with `CONFIG.set_default_api_key(key)`, or in the environment variable NDIF_API_KEY."


class RefusedError(Exception):
    """A request is refused: ``code`` is the HTTP status, ``reason`` is one word for metrics, the message is for the client."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code, self.reason = code, reason


def too_long(most: int) -> RefusedError:
    """Return the error for a payload that is longer than ``most`` bytes."""
    message = f"The payload is longer than the {most:,} bytes that this key may send. Send less data with the block."
    return RefusedError(413, "length", message)


def checked_envelope(envelope: Any, version: str) -> dict[str, Any]:
    """Return an envelope, given as a dict or as JSON. Raises a :class:`RefusedError` if it is malformed. ``version`` is the client's."""
    if not isinstance(envelope, dict):
        try:
            envelope = json.loads(envelope)
        except (ValueError, TypeError, RecursionError):
            raise RefusedError(400, "envelope", "The field `data` must be a JSON object.") from None
    if not isinstance(envelope, dict) or not isinstance(envelope.get("model_key"), str):
        raise RefusedError(400, "envelope", "The field `data` must be a JSON object with a string `model_key`.")
    for name in ("session_id", "nonce"):
        envelope[name] = envelope.get(name) or ""
    if envelope["session_id"] and not is_id(envelope["session_id"]):
        raise RefusedError(400, "envelope", "`session_id` must be the id from the first frame of /subscribe, or empty.")
    if envelope["nonce"] and not is_id(envelope["nonce"]):
        raise RefusedError(400, "envelope", "`nonce` must be a UUID in lower case, or be left out.")
    if envelope.get("compress"):
        raise RefusedError(415, "format", _format_message("compressed", version))
    return envelope


def check_payload(start: bytes, size: int, most: int, version: str) -> None:
    """Raise a :class:`RefusedError` if a payload of ``size`` bytes is longer than ``most``, or is not a safetensors file.

    ``start`` contains the first nine bytes, and ``version`` is the version of the client.
    """
    if size > most:
        raise too_long(most)
    header = int.from_bytes(start[:8], "little")
    if len(start) == 9 and start[8:] == b"{" and header <= size - 8:
        return
    found = next((kind for magic, kind in _OTHER_FORMATS.items() if start.startswith(magic)), "in an unknown format")
    raise RefusedError(415, "format", _format_message(found, version))


def _format_message(found: str, version: str) -> str:
    return (
        f"The payload is {found}, but this server accepts programs only as data: one uncompressed safetensors file, {CONTENT_TYPE}. "
        f"It never unpickles data of clients. The client reports nnsight {version[:40]!r}; install {__version__} or later."
    )
