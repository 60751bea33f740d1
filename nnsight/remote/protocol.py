"""What client and server say to each other, apart from the payload itself.

A job is submitted with ``POST /request``: a multipart body whose field ``data`` is a JSON envelope and whose file ``blob`` is the
payload. What becomes of it is told in *messages*, JSON objects with ``id``, ``status``, ``description``, ``data``, ``meta`` and
``number``. They come through the WebSocket ``/subscribe``; ``GET /response/{id}`` has the latest. The numbers of the
messages of a job grow, so that a client that lost its connection asks for those above what it has seen and misses none.

A job is finished by one of two messages. ``COMPLETED`` says in ``data`` how long the result is; a short result comes along with
it, and every result can be fetched from ``GET /result/{id}``. ``ERROR`` says in ``description`` what went wrong.

The ``nonce`` of an envelope is the client's own name for the job, and submitting the same nonce again
returns the same job. So an answer that was lost on the way is asked for again without running anything twice.

A request of HTTP, and a frame, cost more than what a short job has to say. So a client that asks for ``/subscribe?framing=2`` gets
*packets*, binary frames with JSON and bytes (:func:`join_packet`): a list of all messages that are ready, with the result of the
last. It may submit a job likewise, an envelope with its payload, if that is no longer than the server said at the beginning that it
takes. The answer is the first messages, or a refusal: an object with the ``code`` of HTTP and the ``detail``. Other clients get a text
frame for each message, and a short result in a frame of its own.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypedDict

#: What the blob of a request is: a program as a safetensors file.
CONTENT_TYPE = "application/x-nns-graph+safetensors"

KEY_HEADER = "ndif-api-key"
VERSION_HEADER = "nnsight-version"
PYTHON_HEADER = "python-version"
TIME_HEADER = "ndif-timestamp"

#: What makes the frames of a socket packets.
FRAMING = "2"

#: The shape of the ids of jobs and of nonces; anything else is refused unseen.
ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


class JobStatus(str, Enum):  # noqa: UP042 - prints as `JobStatus.RECEIVED`, as users know it
    """How far a job is; ``LOG`` is a remark and no stage."""

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
        """Whether nothing more will happen to the job."""
        return self in (JobStatus.COMPLETED, JobStatus.ERROR)


class Message(TypedDict):
    """What a server says about a job.

    ``meta`` has figures: ``runtime`` in seconds, ``waited`` in the queue, ``together`` how many jobs shared the run.
    """

    id: str
    status: str
    description: str
    data: Any
    meta: dict[str, Any]
    number: int


@dataclass(frozen=True)
class ModelKey:
    """The name under which a model is served: ``import.path.Class:{"repo_id": ..., "revision": ...}``.

    Attributes:
        repo_id: Name of the repository, or whatever the operator called the model.
        revision: Branch, tag or commit; ``main`` if the key has none.
        model_class: Import path of the class. It does not choose the model.
    """

    repo_id: str
    revision: str = "main"
    model_class: str = "nnsight.modeling.language.LanguageModel"

    @classmethod
    def parse(cls, text: str) -> ModelKey:
        """Return the key that ``text`` is, or names by its repository alone.

        Raises:
            ValueError: If it is neither.
        """
        model_class, colon, described = text.partition(":{")
        if not colon:
            if not text or len(text) > 512 or not text.isprintable():
                raise ValueError(
                    f"A model key is the name of a repository, or 'import.path.Class:{{JSON}}'; not {text[:80]!r}."
                )
            return cls(text)
        try:
            fields = json.loads("{" + described)
            repo_id, revision = fields["repo_id"], fields.get("revision") or "main"
        except (ValueError, KeyError, RecursionError):
            raise ValueError(
                f"The model key {text[:80]!r} has no JSON object with a `repo_id` behind its first colon."
            ) from None
        if not isinstance(repo_id, str) or not isinstance(revision, str):
            raise ValueError(f"`repo_id` and `revision` of the model key {text[:80]!r} have to be strings.")
        return cls(repo_id, revision, model_class)

    def matches(self, other: ModelKey) -> bool:
        """Whether both name the same model."""
        return (self.repo_id, self.revision) == (other.repo_id, other.revision)

    def __str__(self) -> str:
        return f"{self.model_class}:" + json.dumps({"repo_id": self.repo_id, "revision": self.revision})


def model_key_of(model: Any) -> str:
    """Return the key under which servers have a model that was loaded by name.

    Raises:
        ValueError: If it has no name.
    """
    name = getattr(model, "_repository", None)
    if name is None:
        raise ValueError(
            f"This {type(model).__name__} was not loaded by name, so servers cannot know which model it is. Name the one that is "
            "meant: `backend=RemoteBackend('name of the repository')`."
        )
    kind = type(model)
    return str(ModelKey(name[0], name[1], f"{kind.__module__}.{kind.__qualname__}"))


def join_packet(content: Any, binary: bytes = b"") -> bytes:
    """Return ``content`` as JSON, and bytes behind it: the length of the JSON in eight bytes, the lowest first, the JSON, the bytes."""
    text = json.dumps(content).encode()
    return b"".join((len(text).to_bytes(8, "little"), text, binary))


def split_packet(packet: bytes) -> tuple[Any, bytes]:
    """Return what :func:`join_packet` was given.

    Raises:
        ValueError: If ``packet`` is none.
    """
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


def is_number(value: Any) -> bool:
    """Whether ``value`` is a number as JSON has them, which ``True`` is not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)
