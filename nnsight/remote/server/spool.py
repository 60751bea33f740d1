"""Jobs on disk: what was accepted is not lost when the process ends, and results do not fill the memory.

A database of SQLite, ``jobs.sqlite``, has the record of each job, which says where it stands, and its payload and its result if they are
short. Long ones are files beside it, ``ID.payload`` and ``ID.result``, written under another name and then renamed. So whatever is there
is there as a whole or not at all, also if the process is killed. Jobs of many clients are written in one transaction: a transaction, and a
file, cost more than what is in them.

That something survives a power failure takes the disk several milliseconds, for which no job waits: a client is told that its job was
received when :meth:`Spool.settle` has returned, and by then the job may run; a payload is removed when the result has settled, until then
the job could be run again. SQLite writes ahead (``journal_mode=WAL``) and syncs nothing at the end of a transaction
(``synchronous=NORMAL``), so a file of its, ``jobs.sqlite-wal``, is all that has to be synced for what was written before.

A full disk is an ordinary event: the job that did not fit is refused or fails, with a message, and what was written of it is removed.
The folder has a budget of its own, so that results nobody fetched do not take the disk of everything else.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import logging
import os
import shutil
import sqlite3
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO

from ..protocol import is_id
from .jobs import ServerJob

_log = logging.getLogger("nnsight.remote.server")

#: What is shorter goes into the database.
SHORT = 2**16

_SCHEMA = """
PRAGMA auto_vacuum = INCREMENTAL;
PRAGMA journal_mode = WAL;
PRAGMA synchronous = NORMAL;
CREATE TABLE IF NOT EXISTS record (id TEXT PRIMARY KEY, content TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS payload (id TEXT PRIMARY KEY, content BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS result (id TEXT PRIMARY KEY, content BLOB NOT NULL);
"""


class StorageFullError(OSError):
    """There is no room on disk for a payload or a result."""


class Spool:
    """The folder of the jobs. Several threads may use it.

    Args:
        folder: Where they are kept; made if it does not exist, for its owner only.
        capacity: How many bytes payloads and results may take together.

    Raises:
        OSError: If the folder cannot be used, or its database is none.
    """

    def __init__(self, folder: str | os.PathLike[str], capacity: int = 16 * 2**30) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._root = str(self.folder)
        self.capacity = capacity
        self._sizes: dict[str, int] = {}
        self._used = 0
        self._counting, self._writing, self._reading = threading.Lock(), threading.Lock(), threading.Lock()
        database = os.path.join(self._root, "jobs.sqlite")
        self._log_of_writes = f"{database}-wal"
        with _translated():
            # One that writes and one that reads: the loop of the server never waits for a transaction of another thread.
            self._writer = _connect(database)
            self._reader = _connect(database)

    def close(self) -> None:
        """Let the database go."""
        with self._writing, self._reading:
            self._writer.close()
            self._reader.close()

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # it was not opened
            self.close()

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

    def _reserve(self, job_id: str, size: int) -> None:
        with self._counting:  # several threads write jobs, and what is left is taken by one of them
            used = self._used - self._sizes.get(job_id, 0) + size
            if used > self.capacity:
                raise StorageFullError(errno.ENOSPC, f"the {self.capacity:,} bytes for jobs are used up")
            self._sizes[job_id], self._used = size, used

    # -- a job goes its way --------------------------------------------------------------------------------------------

    def admit(self, jobs: Sequence[tuple[ServerJob, IO[bytes]]]) -> list[OSError | None]:
        """Write new jobs with their payloads; return for each why it could not be written, which leaves nothing of it.

        A :class:`StorageFullError` says that there is no room.
        """
        for _, payload in jobs:
            payload.seek(0)
        found = self._keep("payload", [(job, payload, job.size, 0) for job, payload in jobs])
        self.remove([job for (job, _), error in zip(jobs, found, strict=True) if error is not None])
        return found

    def settle(self, jobs: Iterable[ServerJob]) -> None:
        """Return when what was written of jobs survives a power failure: all that is needed to run them, or that they have run.

        Raises:
            OSError: If the disk does not keep it.
        """
        for job in jobs:
            name, size = ("result", job.result_size or 0) if job.status.finished else ("payload", job.size)
            if size >= SHORT:
                self._sync(self._path(job, name))
        self._sync(self._log_of_writes)

    def begin(self, jobs: Sequence[ServerJob]) -> list[bytes]:
        """Note that jobs are about to run, and return what was submitted."""
        self._note(jobs)
        return [self.payload(job) for job in jobs]

    def payload(self, job: ServerJob) -> bytes:
        """Return what was submitted.

        Raises:
            FileNotFoundError: If it is not there any more.
        """
        return self._get("payload", job)

    def keep_results(self, results: Sequence[tuple[ServerJob, bytes]]) -> list[int | OSError]:
        """Write results; return the length of each, or why it is not written. A job that has one has run, whatever its record says."""
        found = self._keep("result", [(job, io.BytesIO(result), len(result), job.size) for job, result in results])
        return [len(result) if error is None else error for (_, result), error in zip(results, found, strict=True)]

    def note(self, jobs: Sequence[ServerJob]) -> None:
        """Write where jobs stand now; the payloads of those that are finished are not needed any more.

        That it cannot be written is logged, and costs only what a restart would know.
        """
        if not self._note(jobs):
            return
        finished = [job for job in jobs if job.status.finished]
        try:
            self.settle(finished)
            with self._transaction() as database:
                database.executemany("DELETE FROM payload WHERE id = ?", [(job.id,) for job in finished])
        except OSError as error:
            _log.error("jobs that have ended could not be secured", extra={"error": str(error)})
            return
        for job in finished:
            if job.size >= SHORT:
                _unlink(self._path(job, "payload"))
            self._count(job.id, job.result_size or 0)

    def result(self, job: ServerJob) -> bytes:
        """Return the result of a job.

        Raises:
            FileNotFoundError: If it has none.
        """
        return self._get("result", job)

    def result_path(self, job: ServerJob) -> Path | None:
        """Return the file with the result, ``None`` for a short one."""
        return Path(self._path(job, "result")) if (job.result_size or 0) >= SHORT else None

    def remove(self, jobs: Sequence[ServerJob]) -> None:
        """Forget jobs."""
        if not jobs:
            return
        try:
            with self._transaction() as database:
                for table in ("record", "payload", "result"):
                    database.executemany(f"DELETE FROM {table} WHERE id = ?", [(job.id,) for job in jobs])
            with self._writing, _translated():
                self._writer.execute("PRAGMA incremental_vacuum").fetchall()  # the file gets shorter
        except OSError as error:
            _log.error("jobs could not be removed", extra={"error": str(error)})
        for job in jobs:
            for name in ("payload", "result"):
                _unlink(self._path(job, name))
            self._count(job.id, None)

    def recover(self) -> list[ServerJob]:
        """Return the jobs that are on disk, in the order in which they came. What belongs to none is removed."""
        found: list[ServerJob] = []
        with self._reading, _translated():
            rows = self._reader.execute("SELECT id, content FROM record").fetchall()
            sizes = dict(self._reader.execute("SELECT id, length(content) FROM payload").fetchall())
            results = dict(self._reader.execute("SELECT id, length(content) FROM result").fetchall())
        for path in self.folder.iterdir():
            job_id, _, kind = path.name.partition(".")
            if not is_id(job_id):
                continue
            if kind in ("payload", "result"):
                (sizes if kind == "payload" else results)[job_id] = path.stat().st_size
            else:  # half of a file
                path.unlink()
        for job_id, record in rows:
            try:
                job = ServerJob.from_record(json.loads(record))
                if job.id != job_id:
                    raise ValueError("the record belongs to another job")
                if not job.status.finished and job_id in results:  # the record had no time to follow
                    job.complete(results[job_id])
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                _log.warning("a job could not be read back", extra={"job": job_id, "error": str(error)})
                continue
            self._count(job.id, sizes.get(job_id, 0) + results.get(job_id, 0))
            found.append(job)
        known = {job.id for job in found}
        strays = [
            ServerJob("", "", "", "", 0, 0.0, id=job_id)
            for job_id in {row[0] for row in rows} | sizes.keys() | results.keys()
        ]
        self.remove([job for job in strays if job.id not in known])
        return sorted(found, key=lambda job: job.created)

    # -- the database and the files -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Write all that is written in the block, or nothing.

        Raises:
            OSError: If it cannot be written.
        """
        with self._writing, _translated():
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                yield self._writer
                self._writer.execute("COMMIT")
            except BaseException:
                if self._writer.in_transaction:  # a full disk has ended it
                    self._writer.execute("ROLLBACK")
                raise

    def _note(self, jobs: Sequence[ServerJob]) -> bool:
        """Write the records of jobs; whether they are written."""
        try:
            with self._transaction() as database:
                database.executemany(
                    "UPDATE record SET content = ? WHERE id = ?", [(json.dumps(job.record()), job.id) for job in jobs]
                )
        except OSError as error:
            _log.error(
                "the state of jobs could not be written", extra={"jobs": [job.id for job in jobs], "error": str(error)}
            )
            return False
        return True

    def _keep(self, table: str, items: Sequence[tuple[ServerJob, IO[bytes], int, int]]) -> list[OSError | None]:
        """Write payloads or results, each with its length and that of what the job has besides; return what went wrong with each."""
        errors: list[OSError | None] = [None] * len(items)
        for index, (job, content, size, besides) in enumerate(items):
            try:
                self._reserve(job.id, size + besides)
                if size >= SHORT:
                    self._write_file(self._path(job, table), content)
            except OSError as error:
                errors[index] = _full(error)
        rows = {
            index: (job, content.read() if size < SHORT else None)
            for index, (job, content, size, _) in enumerate(items)
            if errors[index] is None
        }
        try:
            self._insert(table, rows.values())
        except OSError:  # one that does not fit must not take the others along
            for index, row in rows.items():
                try:
                    self._insert(table, [row])
                except OSError as error:
                    errors[index] = error
        return errors

    def _insert(self, table: str, rows: Collection[tuple[ServerJob, bytes | None]]) -> None:
        """Write short payloads or results; with payloads go the records of new jobs."""
        short = [(job.id, content) for job, content in rows if content is not None]
        with self._transaction() as database:
            database.executemany(f"INSERT OR REPLACE INTO {table} VALUES (?, ?)", short)
            if table == "payload":
                records = [(job.id, json.dumps(job.record())) for job, _ in rows]
                database.executemany("INSERT OR REPLACE INTO record VALUES (?, ?)", records)

    def _get(self, table: str, job: ServerJob) -> bytes:
        with self._reading, _translated():
            row = self._reader.execute(f"SELECT content FROM {table} WHERE id = ?", (job.id,)).fetchone()
        if row is not None:
            return bytes(row[0])
        with open(self._path(job, table), "rb") as file:
            return file.read()

    def _path(self, job: ServerJob, name: str) -> str:
        """Return where a long payload or result of a job is."""
        return os.path.join(self._root, f"{job.id}.{name}")

    @staticmethod
    def _sync(path: str) -> None:
        try:
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        except FileNotFoundError:  # of a job that has ended meanwhile
            return

    @staticmethod
    def _write_file(path: str, content: IO[bytes]) -> None:
        """Write a file as a whole."""
        temporary = f"{path}.new"
        try:
            with open(temporary, "wb") as file:
                shutil.copyfileobj(content, file, 2**20)
            os.replace(temporary, path)
        except BaseException:
            _unlink(temporary)
            raise


def _connect(path: str) -> sqlite3.Connection:
    database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    try:
        database.executescript(_SCHEMA)
    except BaseException:
        database.close()
        raise
    return database


def _unlink(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """Raise errors of the database as those of a disk."""
    try:
        yield
    except sqlite3.Error as error:
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
            raise StorageFullError(errno.ENOSPC, "the disk of the server is full") from error
        raise OSError(errno.EIO, f"the database of jobs cannot be used: {error}") from error


def _full(error: OSError) -> OSError:
    """Return the error to raise for ``error``: one of its own kind for a disk that is full."""
    if isinstance(error, StorageFullError) or error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return error
    return StorageFullError(error.errno, "the disk of the server is full")
