"""Metrics for Prometheus, and logs as JSON lines."""

from __future__ import annotations

import json
import logging
import time
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_STANDARD = set(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonLines(logging.Formatter):
    """Formats a record as one line of JSON, with its ``extra`` fields."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
        }
        line.update({name: value for name, value in vars(record).items() if name not in _STANDARD})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class Metrics:
    """The metrics of one gateway, in a registry of its own.

    Labels contain models, outcomes and reasons of refusals, but never names of accounts or data of clients.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter, gauge = partial(Counter, registry=self.registry), partial(Gauge, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry)
        self.jobs = counter("nnsight_jobs", "Finished jobs.", ["model", "outcome"])
        self.refused = counter("nnsight_refused", "Refused requests.", ["reason"])
        self.retried = counter("nnsight_retried", "Jobs that were started again after their engine died.", ["model"])
        self.queued = gauge("nnsight_queued", "Waiting jobs.", ["model"])
        self.running = gauge("nnsight_running", "Running jobs.", ["model"])
        self.healthy = gauge("nnsight_engine_healthy", "Whether the engine can run jobs.", ["model"])
        self.waited = histogram("nnsight_wait_seconds", "Time from the submission of a job to its start.", ["model"])
        self.runtime = histogram("nnsight_run_seconds", "Time from the start of a run to its end.", ["model"])
        sizes = (1, 2, 4, 8, 16, 32, 64)
        self.together = histogram("nnsight_jobs_per_run", "Jobs that share a run.", ["model"], buckets=sizes)
        self.received = counter("nnsight_payload_bytes", "Bytes of received payloads.")
        self.results = counter("nnsight_result_bytes", "Bytes of results that were stored.")
        self.spooled = gauge("nnsight_spool_bytes", "Bytes of payloads and results on disk.")
        self.sockets = gauge("nnsight_sockets", "Open WebSockets.")
