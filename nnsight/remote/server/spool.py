"""Jobs on disk: what was accepted is not lost when the process ends, and results do not fill the memory.

Every job is a folder named by its id, with ``payload``, ``job.jsonl`` and later ``result``. The first and the last are written beside
their places and then renamed, so they are there as a whole or not at all, also if the process is killed. To the other one a line is added
at each step of the job; the last line that is whole says where it stands. That a file survives a power failure takes the disk several
milliseconds, for which no job waits: a client is told that its job was received when :meth:`Spool.settle` has returned, and by then the
job may run; a payload is removed when the result has settled, until then the job could be run again.

A full disk is an ordinary event: the job that did not fit is refused or fails, with a message, and what was written of it is removed.
The folder has a budget of its own, so that results nobody fetched do not take the disk of everything else.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from ..protocol import is_id
from .jobs import Job

_log = logging.getLogger("nnsight.remote.server")

#: What is known of a job, a line for each step.
_RECORD = "job.jsonl"


class StorageFullError(OSError):
    """There is no room on disk for a payload or a result."""


class Spool:
    """The folder of the jobs.

    Args:
        folder: Where they are kept; made if it does not exist, for its owner only.
        capacity: How many bytes payloads and results may take together.
    """

    def __init__(self, folder: str | os.PathLike[str], capacity: int = 16 * 2**30) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._root = str(self.folder)
        self.capacity = capacity
        self._sizes: dict[str, int] = {}
        self._used = 0
        self._counting = threading.Lock()

    @property
    def used(self) -> int:
        """How many bytes payloads and results take."""
        return self._used

    def _count(self, job_id: str, size: int | None) -> None:
        """Note how many bytes a job takes; ``None`` for one that is forgotten."""
        with self._counting:
            before = self._sizes.pop(job_id, 0)
            if size is not None:
                self._sizes[job_id] = size
            self._used += (size or 0) - before

    def admit(self, job: Job, payload: IO[bytes]) -> None:
        """Write a new job.

        Raises:
            StorageFullError: If there is no room. Nothing is left of the job then.
        """
        try:
            self._reserve(job.id, job.size)
            os.mkdir(self._path(job), mode=0o700)
            self._write(self._path(job, "payload"), lambda file: shutil.copyfileobj(payload, file, 2**20))
            self._write_record(job)
        except OSError as error:
            self.remove(job)
            raise _full(error) from error

    def settle(self, job: Job) -> None:
        """Return when what was written of a job survives a power failure: all that is needed to run it, or that it has run."""
        for name in ("result" if job.status.finished else "payload", _RECORD):
            try:
                with open(self._path(job, name), "rb") as file:
                    os.fsync(file.fileno())
            except FileNotFoundError:  # the job has ended, or has not
                continue

    def note(self, job: Job) -> None:
        """Write where a job stands now; once it is finished, its payload is not needed any more.

        That it cannot be written is logged, and costs only what a restart would know.
        """
        try:
            self._write_record(job)
            if job.status.finished:
                self.settle(job)
        except OSError as error:
            _log.error("the state of a job could not be written", extra={"job": job.id, "error": str(error)})
        else:
            if job.status.finished:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._path(job, "payload"))
                self._count(job.id, job.result_size or 0)

    def payload(self, job: Job) -> bytes:
        """Return what was submitted."""
        with open(self._path(job, "payload"), "rb") as file:
            return file.read()

    def begin(self, job: Job) -> bytes:
        """Note that a job is about to run, and return what was submitted."""
        self.note(job)
        return self.payload(job)

    def keep_result(self, job: Job, result: bytes) -> int:
        """Write a result and return its length. A job that has one has run, whatever its record says.

        Raises:
            StorageFullError: If there is no room.
        """
        try:
            self._reserve(job.id, job.size + len(result))
            self._write(self._path(job, "result"), lambda file: file.write(result))
        except OSError as error:
            raise _full(error) from error
        return len(result)

    def result_path(self, job: Job) -> Path:
        """Return where the result is."""
        return Path(self._path(job, "result"))

    def _path(self, job: Job, name: str = "") -> str:
        """Return where a file of a job is; each job asks a dozen times, so as text."""
        return os.path.join(self._root, job.id, name)

    def remove(self, job: Job) -> None:
        """Forget a job."""
        self._count(job.id, None)
        shutil.rmtree(self.folder / job.id, ignore_errors=True)

    def recover(self) -> list[Job]:
        """Return the jobs that are on disk, in the order in which they came. Folders without a record are removed."""
        found: list[Job] = []
        for folder in self.folder.iterdir():
            if not is_id(folder.name) or not folder.is_dir():
                continue
            try:
                job = Job.from_record(_last_record((folder / _RECORD).read_bytes()))
                if job.id != folder.name:
                    raise ValueError("the record belongs to another job")
                if not job.status.finished and (folder / "result").exists():  # the record had no time to follow
                    job.complete((folder / "result").stat().st_size)
            except (OSError, ValueError, TypeError, KeyError) as error:
                _log.warning("a job could not be read back", extra={"job": folder.name, "error": str(error)})
                shutil.rmtree(folder, ignore_errors=True)
                continue
            sizes = [(folder / name).stat().st_size for name in ("payload", "result") if (folder / name).exists()]
            self._count(job.id, sum(sizes))
            found.append(job)
        return sorted(found, key=lambda job: job.created)

    def _reserve(self, job_id: str, size: int) -> None:
        with self._counting:  # several threads write jobs, and what is left is taken by one of them
            used = self._used - self._sizes.get(job_id, 0) + size
            if used > self.capacity:
                raise StorageFullError(errno.ENOSPC, f"the {self.capacity:,} bytes for jobs are used up")
            self._sizes[job_id], self._used = size, used

    def _write_record(self, job: Job) -> None:
        with open(self._path(job, _RECORD), "ab") as file:
            file.write(b"\n" + json.dumps(job.record()).encode())  # a line of its own, even behind half of one

    def _write(self, path: str, fill: Callable[[IO[bytes]], object]) -> None:
        """Write a file as a whole."""
        temporary = f"{path}.new"
        try:
            with open(temporary, "wb") as file:
                fill(file)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            raise


def _last_record(lines: bytes) -> dict[str, Any]:
    """Return what the last whole line of a record says.

    Raises:
        ValueError: If there is none.
    """
    for line in reversed(lines.split(b"\n")):
        with contextlib.suppress(ValueError):
            found = json.loads(line)
            if isinstance(found, dict):
                return found
    raise ValueError("the record has no line that is whole")


def _full(error: OSError) -> OSError:
    """Return the error to raise for ``error``: one of its own kind for a disk that is full."""
    if isinstance(error, StorageFullError) or error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return error
    return StorageFullError(error.errno, "the disk of the server is full")
