"""The settings of a server."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """Settings of the operator. Times are in seconds."""

    keep: float = 3600.0  # how long a finished job and its result are kept
    together: int = 8  # maximum number of jobs that share a run; with 1, each job runs alone
    attempts: int = 2  # maximum number of starts of a job whose engine or process dies
    jobs: int = 10_000  # maximum number of unfinished jobs of all accounts
    sockets: int = 1024  # maximum number of WebSockets
    inline: int = 2**20  # maximum size of a result that is sent through a WebSocket, in bytes
    upload: float = 300.0  # time limit of an upload
    send: float = 60.0  # time limit for a client to accept a message on a WebSocket
    drain: float = 60.0  # how long running jobs may continue when the server stops
