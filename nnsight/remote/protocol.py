"""The protocol between client and server, except for the format of the payload.

A job is submitted with ``POST /request``: a multipart body whose field ``data`` is a JSON envelope and whose file ``blob`` is the
payload. The server reports the progress of the job in *messages*, JSON objects with ``id``, ``status``, ``description``, ``data``,
``meta`` and ``number``. They arrive through the WebSocket ``/subscribe``; ``GET /response/{id}`` returns the latest one. The numbers of
a job's messages increase. A client that lost its connection asks for the messages above the last number that it saw, and misses none.

One of two messages finishes a job. ``COMPLETED`` has the length of the result in ``data``. A short result is sent together with this
message, and every result can be fetched from ``GET /result/{id}``. ``ERROR`` has the reason in ``description``.

The ``nonce`` of an envelope is an id of the job that the client chooses. If the same nonce is submitted again, the server returns the same
job. So a client that lost the answer submits again, and nothing runs twice.

For a short job, requests and frames are most of the cost. So a client that asks for ``/subscribe?framing=2`` gets *packets*: binary frames
with JSON and bytes (:func:`join_packet`). A packet contains all messages that are ready, and the result of the last one. Such a client
may also submit jobs in packets: the envelope and the payload, up to the length that the server accepts. The answer is the first messages,
or a refusal: an object with the HTTP status ``code`` and the ``detail``. Other clients get a text frame for each message, and a short
result in a frame of its own.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypedDict

#: Type of the blob of a request: a program as a safetensors file.
CONTENT_TYPE = "application/x-nns-graph+safetensors"

KEY_HEADER = "ndif-api-key"
VERSION_HEADER = "nnsight-version"
PYTHON_HEADER = "python-version"
TIME_HEADER = "ndif-timestamp"

#: Value of the query parameter ``framing`` that asks for packets.
FRAMING = "2"

#: The form of ids and nonces.
ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


class JobStatus(str, Enum):  # noqa: UP042 - keeps `str(status) == "JobStatus.RECEIVED"`
    """Stage of a job. ``LOG`` is not a stage: such a message has text that the job prints."""

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

    ``meta`` has measurements: ``runtime`` in seconds, ``waited`` in the queue in seconds, and the number of jobs that ran ``together``.
    When a job begins to run, it has the ``dtype`` and ``attn_implementation`` of the ``model``, if they are known.
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
        model_class: Import path of the class. It is not used to choose the model.
        task: Task of the model for ``transformers.pipeline``; None if the key has none.
        trust_remote_code: Whether code of the repository may run; None if the key does not specify it.
    """

    repo_id: str
    revision: str = "main"
    model_class: str = "nnsight.modeling.language.LanguageModel"
    task: str | None = None
    trust_remote_code: bool | None = None

    @classmethod
    def parse(cls, text: str) -> ModelKey:
        """Parse ``text``, a key or the name of a repository. Raises a :class:`ValueError` if it is neither."""
        model_class, colon, described = text.partition(":{")
        if not colon:
            if not text or len(text) > 512 or not text.isprintable():
                raise ValueError(f"A model key must be the name of a repository, or 'import.path.Class:{{JSON}}'; got {text[:80]!r}.")
            return cls(text)
        try:
            fields = json.loads("{" + described)
            repo_id, revision, task = fields["repo_id"], fields.get("revision") or "main", fields.get("task")
        except (ValueError, KeyError, RecursionError):
            raise ValueError(f"The model key {text[:80]!r} has no JSON object with a `repo_id` after its first colon.") from None
        if not all(isinstance(name, str) and name.isprintable() for name in (repo_id, revision, "" if task is None else task)):
            raise ValueError(f"`repo_id`, `revision` and `task` of the model key {text[:80]!r} must be strings of printable characters.")
        return cls(repo_id, revision, model_class, task, bool(fields["trust_remote_code"]) if "trust_remote_code" in fields else None)

    def matches(self, other: ModelKey) -> bool:
        """Whether both keys name the same model: repository, revision, and the task if both keys have one."""
        same_task = self.task is None or other.task is None or self.task == other.task
        return same_task and (self.repo_id, self.revision) == (other.repo_id, other.revision)

    def __str__(self) -> str:
        further = {"task": self.task, "trust_remote_code": self.trust_remote_code}
        said = {name: value for name, value in further.items() if value is not None}
        return f"{self.model_class}:" + json.dumps({"repo_id": self.repo_id, "revision": self.revision, **said})


def model_key_of(model: Any) -> str:
    """Return the key of a model that was loaded by name. Raises a :class:`ValueError` for other models."""
    name = getattr(model, "_repository", None)
    if name is None:
        raise ValueError(
            f"This {type(model).__name__} was not loaded by name, so a server cannot know which model it is. Name the model: "
            "`backend=RemoteBackend('name of the repository')`."
        )
    kind = getattr(model, "_class_in_keys", type(model))
    further = {"task": getattr(model, "task", None), "trust_remote_code": getattr(model, "_trust_remote_code", None)}
    return str(ModelKey(name[0], name[1], f"{kind.__module__}.{kind.__qualname__}", **further))


def join_packet(content: Any, binary: bytes = b"") -> bytes:
    """Return a packet: the length of the JSON in eight bytes, little-endian; ``content`` as JSON; and the bytes ``binary``."""
    text = json.dumps(content).encode()
    return b"".join((len(text).to_bytes(8, "little"), text, binary))


def split_packet(packet: bytes) -> tuple[Any, bytes]:
    """Return content and bytes of a packet, see :func:`join_packet`. Raises a :class:`ValueError` if the packet is malformed."""
    end = 8 + int.from_bytes(packet[:8], "little")
    if len(packet) < max(end, 9):
        raise ValueError("The packet is malformed: it is shorter than the length in its header.")
    try:
        return json.loads(packet[8:end]), packet[end:]
    except RecursionError:
        raise ValueError("The packet is malformed: its JSON is nested too deeply.") from None


def is_id(text: Any) -> bool:
    """Whether ``text`` has the form of a job's id."""
    return isinstance(text, str) and ID.fullmatch(text) is not None
