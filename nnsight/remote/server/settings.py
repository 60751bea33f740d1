"""The settings of a server."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """Choices of the operator; times are in seconds."""

    keep: float = 3600.0  # for which a finished job and its result are kept
    together: int = 8  # most jobs that share a run; 1 runs each alone
    attempts: int = 2  # most starts of a job whose engine or process dies
    jobs: int = 10_000  # most unfinished jobs of all accounts
    sockets: int = 1024  # most WebSockets
    inline: int = 2**20  # most bytes of a result that is sent through a WebSocket
    upload: float = 300.0  # time limit of an upload
    send: float = 60.0  # time limit for a client to accept a message on a WebSocket
    drain: float = 60.0  # for running jobs to end when the server stops
