"""What an operator sees: figures for Prometheus, and logs as lines of JSON."""

from __future__ import annotations

import json
import logging
import time
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_STANDARD = set(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonLines(logging.Formatter):
    """A record as one line of JSON, with what was passed as ``extra``."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
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
    """The figures of one gateway, in a registry of its own.

    Labels are models, which the operator chose, and outcomes; never names of accounts or anything a client sends.
    """

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self.jobs = Counter("nnsight_jobs", "Jobs that are finished.", ["model", "outcome"], registry=registry)
        self.refused = Counter("nnsight_refused", "Requests that did not become jobs.", ["reason"], registry=registry)
        self.retried = Counter(
            "nnsight_retried", "Jobs started again after their engine died.", ["model"], registry=registry
        )
        self.queued = Gauge("nnsight_queued", "Jobs that wait.", ["model"], registry=registry)
        self.running = Gauge("nnsight_running", "Jobs that run.", ["model"], registry=registry)
        self.healthy = Gauge("nnsight_engine_healthy", "Whether the engine can run jobs.", ["model"], registry=registry)
        self.waited = Histogram("nnsight_wait_seconds", "From submission to start.", ["model"], registry=registry)
        self.runtime = Histogram("nnsight_run_seconds", "From start to end.", ["model"], registry=registry)
        self.together = Histogram(
            "nnsight_jobs_per_run",
            "Jobs that share a run.",
            ["model"],
            registry=registry,
            buckets=(1, 2, 4, 8, 16, 32, 64),
        )
        self.received = Counter("nnsight_payload_bytes", "Bytes of payloads.", registry=registry)
        self.results = Counter("nnsight_result_bytes", "Bytes of results.", registry=registry)
        self.spooled = Gauge("nnsight_spool_bytes", "Bytes of payloads and results on disk.", registry=registry)
        self.sockets = Gauge("nnsight_sockets", "Open WebSockets.", registry=registry)

    def text(self) -> bytes:
        """Return the figures in the text format of Prometheus."""
        return generate_latest(self.registry)
