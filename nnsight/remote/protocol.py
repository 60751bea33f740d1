"""The protocol between client and server, apart from the payload.

A job is submitted with ``POST /request``: a multipart body whose field ``data`` is a JSON envelope and whose file ``blob`` is the
payload. Its progress is reported in *messages*, JSON objects with ``id``, ``status``, ``description``, ``data``, ``meta`` and
``number``. They come through the WebSocket ``/subscribe``; ``GET /response/{id}`` has the latest. The numbers of the
messages of a job grow, so a client that lost its connection asks for those above the last one seen and misses none.

One of two messages finishes a job. ``COMPLETED`` has the length of the result in ``data``; a short result comes along with
it, and every result can be fetched from ``GET /result/{id}``. ``ERROR`` has the reason in ``description``.

The ``nonce`` of an envelope is the client's own name for the job. Submitting the same nonce again returns the same job, so a client
whose answer was lost submits again without running anything twice.

Requests and frames are most of the cost of a short job. So a client that asks for ``/subscribe?framing=2`` gets *packets*, binary frames
with JSON and bytes (:func:`join_packet`): a list of all messages that are ready, with the result of the last. It may submit a job in
a packet, an envelope with its payload, up to the length that the server takes. The answer is the first messages, or a refusal: an
object with the ``code`` of HTTP and the ``detail``. Other clients get a text frame for each message, and a short result in a frame
of its own.
"""

from __future__ import annotations

import json
import re
import types
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypedDict

#: Type of the blob of a request: a program as a safetensors file.
CONTENT_TYPE = "application/x-nns-graph+safetensors"

KEY_HEADER = "ndif-api-key"
VERSION_HEADER = "nnsight-version"
PYTHON_HEADER = "python-version"
TIME_HEADER = "ndif-timestamp"

#: Value of the query ``framing`` for packets.
FRAMING = "2"

#: The form of ids and nonces.
ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


class JobStatus(str, Enum):  # noqa: UP042 - prints as `JobStatus.RECEIVED`, as users know it
    """Stage of a job; ``LOG`` is a line that it prints, and no stage."""

    RECEIVED = "RECEIVED"
    QUEUED = "QUEUED"
    PROVISIONING = "PROVISIONING"
    DEPLOYING = "DEPLOYING"
    DISPATCHED = "DISPATCHED"
    RUNNING = "RUNNING"
    LOG = "LOG"
    COMPLETED = "COMPLETED"
    ERROR = "ERROR"

    @property
    def finished(self) -> bool:
        """Whether the job has ended."""
        return self in (JobStatus.COMPLETED, JobStatus.ERROR)


class Message(TypedDict):
    """A message about a job.

    ``meta`` has figures: ``runtime`` in seconds, seconds ``waited`` in the queue, and the number of jobs that ran ``together``.
    """

    id: str
    status: str
    description: str
    data: Any
    meta: dict[str, Any]
    number: int


@dataclass(frozen=True)
class ModelKey:
    """The name of a served model: ``import.path.Class:{"repo_id": ..., "revision": ...}``.

    Attributes:
        repo_id: Name of the repository, or another name that the operator chose.
        revision: Branch, tag or commit; ``main`` if the key has none.
        model_class: Import path of the class. It does not choose the model.
        task: Task of the model, of ``transformers.pipeline``; None if the key has none.
        trust_remote_code: Whether code of the repository may run; None if the key does not say.
    """

    repo_id: str
    revision: str = "main"
    model_class: str = "nnsight.modeling.language.LanguageModel"
    task: str | None = None
    trust_remote_code: bool | None = None

    @classmethod
    def parse(cls, text: str) -> ModelKey:
        """Return the key that ``text`` is, or that of the repository ``text``; raise a :class:`ValueError` if it is neither."""
        model_class, colon, described = text.partition(":{")
        if not colon:
            if not text or len(text) > 512 or not text.isprintable():
                raise ValueError(f"A model key is the name of a repository, or 'import.path.Class:{{JSON}}'; not {text[:80]!r}.")
            return cls(text)
        try:
            fields = json.loads("{" + described)
            repo_id, revision, task = fields["repo_id"], fields.get("revision") or "main", fields.get("task")
        except (ValueError, KeyError, RecursionError):
            raise ValueError(f"The model key {text[:80]!r} has no JSON object with a `repo_id` behind its first colon.") from None
        if not isinstance(repo_id, str) or not isinstance(revision, str) or not isinstance(task, (str, types.NoneType)):
            raise ValueError(f"`repo_id`, `revision` and `task` of the model key {text[:80]!r} have to be strings.")
        return cls(repo_id, revision, model_class, task, bool(fields["trust_remote_code"]) if "trust_remote_code" in fields else None)

    def matches(self, other: ModelKey) -> bool:
        """Whether both name the same model."""
        same_task = self.task is None or other.task is None or self.task == other.task
        return same_task and (self.repo_id, self.revision) == (other.repo_id, other.revision)

    def __str__(self) -> str:
        further = {"task": self.task, "trust_remote_code": self.trust_remote_code}
        said = {name: value for name, value in further.items() if value is not None}
        return f"{self.model_class}:" + json.dumps({"repo_id": self.repo_id, "revision": self.revision, **said})


def model_key_of(model: Any) -> str:
    """Return the key of a model that was loaded by name; raise a :class:`ValueError` if it was not."""
    name = getattr(model, "_repository", None)
    if name is None:
        raise ValueError(
            f"This {type(model).__name__} was not loaded by name, so servers cannot know which model it is. Name the one that is "
            "meant: `backend=RemoteBackend('name of the repository')`."
        )
    kind = getattr(model, "_class_in_keys", type(model))
    further = {"task": getattr(model, "task", None), "trust_remote_code": getattr(model, "_trust_remote_code", None)}
    return str(ModelKey(name[0], name[1], f"{kind.__module__}.{kind.__qualname__}", **further))


def join_packet(content: Any, binary: bytes = b"") -> bytes:
    """Return a packet: the length of the JSON in eight bytes, the lowest first, ``content`` as JSON, and the bytes."""
    text = json.dumps(content).encode()
    return b"".join((len(text).to_bytes(8, "little"), text, binary))


def split_packet(packet: bytes) -> tuple[Any, bytes]:
    """Return the arguments of :func:`join_packet`; raise a :class:`ValueError` if ``packet`` is none."""
    end = 8 + int.from_bytes(packet[:8], "little")
    if len(packet) < max(end, 9):
        raise ValueError("This is no packet: it is shorter than it says.")
    try:
        return json.loads(packet[8:end]), packet[end:]
    except RecursionError:
        raise ValueError("This is no packet: its JSON nests too deep.") from None


def is_id(text: Any) -> bool:
    """Whether ``text`` could be the id of a job."""
    return isinstance(text, str) and ID.fullmatch(text) is not None
