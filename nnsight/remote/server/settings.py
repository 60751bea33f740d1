"""The settings of a server."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """Choices of the operator.

    Attributes:
        keep: Time for which a finished job and its result are kept, in seconds.
        together: Most jobs that share a run; 1 runs each alone.
        attempts: Most starts of a job whose engine or process dies.
        jobs: Most unfinished jobs of all accounts.
        sockets: Most WebSockets.
        inline: Most bytes of a result that is sent through a WebSocket.
        upload: Time limit of an upload, in seconds.
        send: Time limit for a client to accept a message on a WebSocket, in seconds.
        drain: Time for running jobs to end when the server stops, in seconds.
    """

    keep: float = 3600.0
    together: int = 8
    attempts: int = 2
    jobs: int = 10_000
    sockets: int = 1024
    inline: int = 2**20
    upload: float = 300.0
    send: float = 60.0
    drain: float = 60.0
