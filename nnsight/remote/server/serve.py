"""Runs a server until a signal stops it.

The first SIGTERM (or Ctrl-C) drains: no more jobs are accepted, running jobs have some time to end, and waiting jobs stay on disk.
The second stops at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from starlette.routing import Route

from ...program.run.engine import Engine
from ..protocol import ModelKey
from .app import create_app
from .gateway import Gateway
from .keys import Door, KeyFile, OpenDoor
from .sessions import LONGEST_FRAME
from .settings import Settings
from .spool import Spool
from .telemetry import JsonLines

_LOOPBACK = ("127.0.0.1", "::1", "localhost")


class GatewayServer(uvicorn.Server):
    """A server that drains its gateway before it stops; port 0 takes a free port."""

    def __init__(
        self, gateway: Gateway, door: Door, host: str = "127.0.0.1", port: int = 5001, more: Sequence[Route] = ()
    ) -> None:
        sockets: Any = {"ws_max_size": LONGEST_FRAME, "ws_per_message_deflate": False}  # tensors hardly get smaller
        quiet: Any = {"log_config": None, "access_log": False, "server_header": False}
        app = create_app(gateway, door, more)
        super().__init__(uvicorn.Config(app, host, port, timeout_graceful_shutdown=5, **sockets, **quiet))
        self.gateway = gateway
        self._draining: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._draining is not None:
            super().handle_exit(sig, frame)
        else:
            asyncio.get_running_loop().call_soon_threadsafe(self._drain, sig)

    def _drain(self, sig: int) -> None:
        async def drain() -> None:
            await self.gateway.drain()
            await asyncio.sleep(0.2)  # for the last messages
            uvicorn.Server.handle_exit(self, sig, None)

        if self._draining is None:
            self._draining = asyncio.create_task(drain())

    @property
    def port(self) -> int:
        """The port it listens on, once it has started."""
        return int(self.servers[0].sockets[0].getsockname()[1])


@contextlib.contextmanager
def in_background(
    engines: Mapping[ModelKey, Engine],
    spool: Path | str,
    door: Door | None = None,
    more: Sequence[Route] = (),
) -> Iterator[str]:
    """Serve models of this process in a thread, to this machine, while the context is open: for examples, tests and notebooks.

    Args:
        engines: The engine of each model, see :func:`~.models.engine_of`.
        spool: Folder of the jobs.
        door: Checks keys; by default everybody on this machine is admitted.
        more: Further routes, such as those of :func:`~nnsight.remote.openai.routes.openai_routes`.

    Yields:
        The address.
    """
    server = GatewayServer(Gateway(engines, Spool(spool)), door or OpenDoor(), port=0, more=more)
    thread = threading.Thread(target=server.run, name="nnsight-server", daemon=True)
    thread.start()
    try:
        while not server.started:
            if not thread.is_alive():
                raise OSError("The server did not start.")
            time.sleep(0.01)
        yield f"http://127.0.0.1:{server.port}"
    finally:
        server.should_exit = True
        thread.join()


def door_for(host: str, api_keys: Path | None, no_keys: bool) -> Door:
    """Return the door of a server on ``host``; raise a :class:`ValueError` if other machines could use it without a key by mistake."""
    if api_keys is not None:
        return KeyFile(api_keys)
    if host not in _LOOPBACK and not no_keys:
        raise ValueError(
            f"Anybody who reaches {host} could run jobs here. Pass --api-keys FILE (`nnsight keys add FILE --name NAME` makes one), "
            "or --no-keys if this is meant."
        )
    return OpenDoor()


def log_json() -> None:
    """Write the logs of this package and of the web server as lines of JSON to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    for name in ("nnsight", "uvicorn", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.INFO)


def serve(
    engines: Mapping[ModelKey, Engine],
    door: Door,
    spool: Path,
    *,
    host: str = "127.0.0.1",
    port: int = 5001,
    capacity: int = 16 * 2**30,
    settings: Settings | None = None,
    more: Sequence[Route] = (),
) -> None:
    """Serve models until a signal ends it; arguments are those of :func:`in_background`, and ``capacity``: most bytes of the jobs on disk,
    and ``settings``.

    Raises:
        OSError: If the address is taken, or the folder cannot be written.
    """
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:  # uvicorn would exit instead
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
    gateway = Gateway(engines, Spool(spool, capacity), settings)
    log_json()
    names: Any = [str(key) for key in engines]
    logging.getLogger("nnsight.remote.server").info("serving", extra={"models": names, "host": host, "port": port})
    GatewayServer(gateway, door, host, port, more).run()
