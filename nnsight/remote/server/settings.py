"""The settings of a server."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """What an operator chooses.

    Attributes:
        keep: How long a finished job and its result are kept, in seconds.
        together: How many jobs may share a run; 1 runs each alone.
        attempts: How often a job is started if its engine or the process dies.
        jobs: How many unfinished jobs there may be, of all accounts.
        sockets: How many WebSockets there may be.
        inline: Results up to this many bytes are sent through the WebSocket.
        upload: How long an upload may take, in seconds.
        send: How long a WebSocket may take to accept a message, in seconds.
        idle: How long a WebSocket without a key may be open before a job uses it, in seconds.
        drain: How long running jobs have to end when the server stops, in seconds.
    """

    keep: float = 3600.0
    together: int = 8
    attempts: int = 2
    jobs: int = 10_000
    sockets: int = 1024
    inline: int = 2**20
    upload: float = 300.0
    send: float = 60.0
    idle: float = 30.0
    drain: float = 60.0
