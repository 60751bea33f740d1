"""The spool: jobs on disk. Accepted jobs survive the end of the process, and results do not fill the memory.

A SQLite database, ``jobs.sqlite``, contains the record of each job with its status, and short payloads and results. Long payloads and
results are files in the same folder, ``ID.payload`` and ``ID.result``. They are written under another name and then renamed. So even after
a kill, each file is complete or does not exist.

A sync of the disk takes several milliseconds, and no job waits for it. A job may run before :meth:`Spool.settle` returns, but the client is
told only then that the job was received. A payload is removed after the sync of the result; until then the job could run again. SQLite
writes to its log first (``journal_mode=WAL``) and does not sync the log (``synchronous=NORMAL``). So one sync of ``jobs.sqlite-wal``
secures everything that was written before.

A full disk is an ordinary event: the job that does not fit is refused or fails with a message, and its data is removed.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import logging
import math
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

#: Payloads and results below this size, in bytes, are short; others are files.
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
    """The folder of the jobs, created for its owner only if it does not exist. Several threads may use it.

    ``capacity`` is the maximum size of all payloads and results together, in bytes. Raises an ``OSError`` if the folder or its database
    cannot be used.
    """

    def __init__(self, folder: str | os.PathLike[str], capacity: int = 16 * 2**30) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._root = str(self.folder)
        self.capacity = capacity
        self._sizes: dict[str, int] = {}
        self.used = 0  # bytes of all payloads and results
        self._counting, self._writing, self._reading = threading.Lock(), threading.Lock(), threading.Lock()
        database = os.path.join(self._root, "jobs.sqlite")
        self._log_of_writes = f"{database}-wal"
        with _translated():
            # Two connections, so that reads of the event loop never wait for a transaction of another thread.
            self._writer = _connect(database)
            self._reader = _connect(database)

    def close(self) -> None:
        with self._writing, self._reading:
            self._writer.close()
            self._reader.close()

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # the constructor failed
            self.close()

    def _count(self, job_id: str, size: int, most: float = math.inf) -> None:
        """Set the size of a job's data, 0 to remove the job. Raises a :class:`StorageFullError` if the total would exceed ``most``."""
        with self._counting:
            used = self.used - self._sizes.get(job_id, 0) + size
            if used > most:
                raise StorageFullError(errno.ENOSPC, f"the server's {most:,} bytes for jobs are used up")
            self._sizes[job_id], self.used = size, used
            if not size:
                del self._sizes[job_id]

    # -- the steps of a job ---------------------------------------------------------------------------------------------

    def admit(self, jobs: Sequence[tuple[ServerJob, IO[bytes]]]) -> list[OSError | None]:
        """Write new jobs with their payloads. Returns the error of each job or None; :class:`StorageFullError` if there is no room."""
        for _, payload in jobs:
            payload.seek(0)
        found = self._keep("payload", [(job, payload, job.size, 0) for job, payload in jobs])
        self.remove([job for (job, _), error in zip(jobs, found, strict=True) if error is not None])
        return found

    def settle(self, jobs: Iterable[ServerJob]) -> None:
        """Sync jobs to disk: the payloads of unfinished jobs, the results of finished jobs, and all records."""
        for job in jobs:
            name, size = ("result", job.result_size or 0) if job.status.finished else ("payload", job.size)
            if size >= SHORT:
                self._sync(self._path(job, name))
        self._sync(self._log_of_writes)

    def begin(self, jobs: Sequence[ServerJob]) -> list[bytes]:
        """Record the start of jobs, and return their payloads."""
        self._write_records(jobs)
        return list(map(self.payload, jobs))

    def payload(self, job: ServerJob) -> bytes:
        """Return the payload of a job. Raises a :class:`FileNotFoundError` if it was removed."""
        return self._get("payload", job)

    def keep_results(self, results: Sequence[tuple[ServerJob, bytes]]) -> list[int | OSError]:
        """Write results. Returns the length of each, or its error. On recovery, a job with a result counts as finished."""
        found = self._keep("result", [(job, io.BytesIO(result), len(result), job.size) for job, result in results])
        return [len(result) if error is None else error for (_, result), error in zip(results, found, strict=True)]

    def note(self, jobs: Sequence[ServerJob]) -> None:
        """Write the records of jobs, and remove the payloads of finished jobs. Errors are logged; then the records on disk are outdated."""
        if not self._write_records(jobs):
            return
        finished = [job for job in jobs if job.status.finished]
        try:
            self.settle(finished)
            with self._transaction() as database:
                database.executemany("DELETE FROM payload WHERE id = ?", [(job.id,) for job in finished])
        except OSError as error:
            _log.error("finished jobs could not be written", extra={"error": str(error)})
            return
        for job in finished:
            if job.size >= SHORT:
                Path(self._path(job, "payload")).unlink(missing_ok=True)
            self._count(job.id, job.result_size or 0)

    def result(self, job: ServerJob) -> bytes:
        """Return the result of a job. Raises a :class:`FileNotFoundError` if the job has none."""
        return self._get("result", job)

    def result_path(self, job: ServerJob) -> Path | None:
        """Return the file of a long result; ``None`` for a short result."""
        return Path(self._path(job, "result")) if (job.result_size or 0) >= SHORT else None

    def remove(self, jobs: Sequence[ServerJob]) -> None:
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
                Path(self._path(job, name)).unlink(missing_ok=True)
            self._count(job.id, 0)

    def recover(self) -> list[ServerJob]:
        """Return the jobs on disk in the order of their submission, and remove data that belongs to no job."""
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
            else:  # a file whose writing was interrupted
                path.unlink()
        for job_id, record in rows:
            try:
                job = ServerJob.from_record(json.loads(record))
                if job.id != job_id:
                    raise ValueError("the record belongs to another job")
                if not job.status.finished and job_id in results:  # the process ended before it wrote the record
                    job.complete(results[job_id])
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                _log.warning("a job on disk could not be read", extra={"job": job_id, "error": str(error)})
                continue
            self._count(job.id, sizes.get(job_id, 0) + results.get(job_id, 0))
            found.append(job)
        known = {job.id for job in found}
        strays = ({row[0] for row in rows} | sizes.keys() | results.keys()) - known
        self.remove([ServerJob("", "", "", "", 0, 0.0, id=job_id) for job_id in strays])
        return sorted(found, key=lambda job: job.created)

    # -- the database and the files -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Run the block in a transaction. Raises an :class:`OSError` if it cannot be written."""
        with self._writing, _translated():
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                yield self._writer
                self._writer.execute("COMMIT")
            except BaseException:
                if self._writer.in_transaction:  # SQLite rolls back by itself if the disk is full
                    self._writer.execute("ROLLBACK")
                raise

    def _write_records(self, jobs: Sequence[ServerJob]) -> bool:
        """Write the records of jobs. Returns False, and logs the error, if that fails."""
        records = [(json.dumps(job.record()), job.id) for job in jobs]
        try:
            with self._transaction() as database:
                database.executemany("UPDATE record SET content = ? WHERE id = ?", records)
        except OSError as error:
            about = {"jobs": [job.id for job in jobs], "error": str(error)}
            _log.error("the state of jobs could not be written", extra=about)
            return False
        return True

    def _keep(self, table: str, items: Sequence[tuple[ServerJob, IO[bytes], int, int]]) -> list[OSError | None]:
        """Write payloads or results, and return the error of each or None.

        An item is a job, the content, its length, and the length of the job's data that is on disk already.
        """
        errors: list[OSError | None] = [None] * len(items)
        for index, (job, content, size, present) in enumerate(items):
            try:
                self._count(job.id, size + present, self.capacity)
                if size >= SHORT:
                    self._write_file(self._path(job, table), content)
            except OSError as error:
                full = error.errno in (errno.ENOSPC, errno.EDQUOT) and not isinstance(error, StorageFullError)
                errors[index] = StorageFullError(error.errno, "the disk of the server is full") if full else error
        accepted = [(index, *item) for index, item in enumerate(items) if errors[index] is None]
        rows = {index: (job, content.read() if size < SHORT else None) for index, job, content, size, _ in accepted}
        try:
            self._insert(table, rows.values())
        except OSError:  # one job may not fit: try each alone, so that the others succeed
            for index, row in rows.items():
                try:
                    self._insert(table, [row])
                except OSError as error:
                    errors[index] = error
        return errors

    def _insert(self, table: str, rows: Collection[tuple[ServerJob, bytes | None]]) -> None:
        """Write short payloads or results to the database. With payloads, also write the records of the new jobs."""
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
        return Path(self._path(job, table)).read_bytes()

    def _path(self, job: ServerJob, name: str) -> str:
        """Return the path of a long payload or result."""
        return os.path.join(self._root, f"{job.id}.{name}")

    @staticmethod
    def _sync(path: str) -> None:
        with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:  # missing if the job was removed meanwhile
            os.fsync(file.fileno())

    @staticmethod
    def _write_file(path: str, content: IO[bytes]) -> None:
        temporary = f"{path}.new"
        try:
            with open(temporary, "wb") as file:
                shutil.copyfileobj(content, file, 2**20)
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise


def _connect(path: str) -> sqlite3.Connection:
    database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    try:
        database.executescript(_SCHEMA)
    except BaseException:
        database.close()
        raise
    return database


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """Translate errors of the database to :class:`OSError`."""
    try:
        yield
    except sqlite3.Error as error:
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
            raise StorageFullError(errno.ENOSPC, "the disk of the server is full") from error
        raise OSError(errno.EIO, f"the database of jobs cannot be used: {error}") from error
