"""Workers that time the tiny net in the environments of this package and of the public package.

The public package has the same name as this one, so both cannot be in one process. The public package gets a virtual
environment on first use. A worker (``tiny_net.py``) runs in each environment, and the parent lets them take turns, so
that changes of the machine's speed affect both.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

PEER = "nnsight==0.8.1"
#: Later versions lack names that the public package imports.
PEER_NEEDS = "transformers<5.23"
PEER_FOLDER = Path(__file__).parent / ".peer"


def peer_python(folder: Path, torch_version: str) -> Path:
    """Return the interpreter of the environment of the public package; make the environment if it does not exist.

    Args:
        folder: Folder of the environment.
        torch_version: The version of torch to install there; both packages are measured on the same version.

    Raises:
        RuntimeError: If ``folder`` has another package, or an installation that was interrupted.
    """
    python = folder / "bin" / "python"
    if not folder.exists():
        print(f"installing {PEER} into {folder} ...", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        # Torch first and pinned. Otherwise pip would install the newest one, with its accelerator libraries.
        torch = f"torch=={torch_version.partition('+')[0]}"
        subprocess.run([*install, torch], check=True)
        subprocess.run([*install, torch, PEER, PEER_NEEDS], check=True)
    found = _installed(python)
    if found != PEER:
        raise RuntimeError(
            f"{folder} has {found or 'no nnsight'}, not {PEER}; perhaps its installation was interrupted. Delete the "
            "folder to have it made anew, or name another one with `--peer FOLDER`."
        )
    return python


def _installed(python: Path) -> str:
    """Return the nnsight of an environment, such as ``nnsight==0.8.1``, or an empty string."""
    if not python.exists():
        return ""
    command = "from importlib.metadata import version; print('nnsight==' + version('nnsight'))"
    answer = subprocess.run([str(python), "-P", "-c", command], check=False, capture_output=True, text=True)
    return answer.stdout.strip()


class Worker:
    """A process of ``tiny_net.py``. As a context manager, it ends the process.

    Args:
        python: The interpreter of the environment.
        *options: Command line of ``tiny_net.py``.

    Attributes:
        contenders: Names of the contenders that it can time.
        versions: Versions by package.
    """

    def __init__(self, python: Path, *options: str) -> None:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        # Packages come only from the environment of the interpreter.
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONNOUSERSITE": "1"}
        self._process = subprocess.Popen(
            [str(python), "-P", str(Path(__file__).parent / "tiny_net.py"), *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        hello = self._answer()
        self.contenders: list[str] = hello["contenders"]
        self.versions: dict[str, str] = hello["versions"]

    def times(self, name: str, calls: int) -> list[int]:
        """Return the nanoseconds of each of ``calls`` calls of a contender."""
        assert self._process.stdin is not None
        print(f"run {calls} {name}", file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"The worker `{self._process.args}` ended with code {self._process.wait()}; see above.")
        return json.loads(line)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()  # the worker ends at the end of its input
        self._process.wait()
        self._process.stdout.close()
