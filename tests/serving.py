"""Servers in processes of their own, and waiting for what happens elsewhere."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import requests

from . import ROOT


def until(found: Callable[[], Any], seconds: float = 20.0) -> Any:
    """Return what ``found`` returns, once that is true."""
    end = time.monotonic() + seconds
    while not (value := found()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)
    return value


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    return port


@contextlib.contextmanager
def serving(log: Path, *command: Any) -> Iterator[str]:
    """Run a command of ``nnsight`` that serves; yield the address when it answers. It writes to ``log``."""
    address, given = f"http://127.0.0.1:{(port := free_port())}", [*map(str, command), "--port", str(port)]
    with log.open("wb") as out:
        process = subprocess.Popen([sys.executable, "-m", "nnsight.cli", *given], stdout=out, stderr=out, cwd=ROOT)

    def answers() -> bool:
        assert process.poll() is None, log.read_text()[-8000:]
        with contextlib.suppress(requests.RequestException):
            return requests.get(f"{address}/health", timeout=5).ok
        return False

    try:
        until(answers, 400)
        yield address
    finally:
        process.terminate()
        process.wait(60)
