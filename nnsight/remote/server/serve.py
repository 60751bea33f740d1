"""Runs a server until a signal stops it.

The first SIGTERM (or Ctrl-C) drains: no more jobs are accepted, running jobs have some time to end, and waiting jobs stay on disk.
The second signal stops the server at once.
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
    """A web server that drains its gateway before it stops. Port 0 chooses a free port."""

    def __init__(self, gateway: Gateway, door: Door, host: str = "127.0.0.1", port: int = 5001, more: Sequence[Route] = ()) -> None:
        sockets: Any = {"ws_max_size": LONGEST_FRAME, "ws_per_message_deflate": False}  # tensors hardly compress
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
            await asyncio.sleep(0.2)  # time to send the last messages
            uvicorn.Server.handle_exit(self, sig, None)

        if self._draining is None:
            self._draining = asyncio.create_task(drain())

    @property
    def port(self) -> int:
        """The port on which the server listens, once it has started."""
        return int(self.servers[0].sockets[0].getsockname()[1])


@contextlib.contextmanager
def in_background(
    engines: Mapping[ModelKey, Engine],
    spool: Path | str,
    door: Door | None = None,
    more: Sequence[Route] = (),
) -> Iterator[str]:
    """Serve models in a thread, for clients on this machine, while the context is open. For examples, tests and notebooks.

    Args:
        engines: The engine of each model, see :func:`~.models.engine_of`.
        spool: Folder of the jobs.
        door: Checks keys; by default, no key is needed.
        more: Further routes, such as those of :func:`~nnsight.remote.openai.routes.openai_routes`.

    Yields:
        The address of the server.

    Raises:
        OSError: If the server does not start.
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
    """Return the door of a server on ``host``. Raises a ``ValueError`` for other machines without keys, unless ``no_keys`` allows it."""
    if api_keys is not None:
        return KeyFile(api_keys)
    if host not in _LOOPBACK and not no_keys:
        raise ValueError(
            f"Anybody who can reach {host} could run jobs here. Pass --api-keys FILE (`nnsight keys add FILE --name NAME` creates one), "
            "or --no-keys to allow this."
        )
    return OpenDoor()


def log_json() -> None:
    """Write the logs of this package and of the web server to standard error, as JSON lines."""
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
    """Serve models until a signal ends the server.

    The arguments are those of :func:`in_background`, and: the address ``host`` and ``port`` on which the server listens; ``capacity``, the
    maximum size of all payloads and results on disk, in bytes; ``settings`` of the operator.

    Raises:
        OSError: If the address is in use, or if the folder cannot be written.
    """
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:  # raises, where uvicorn would exit the process
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
    gateway = Gateway(engines, Spool(spool, capacity), settings)
    log_json()
    names: Any = [str(key) for key in engines]
    logging.getLogger("nnsight.remote.server").info("serving", extra={"models": names, "host": host, "port": port})
    GatewayServer(gateway, door, host, port, more).run()
