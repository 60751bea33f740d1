"""Limits of one job, checked before it runs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Upper bounds for one job.

    Attributes:
        payload_bytes: Size of the payload.
        header_bytes: Size of its JSON.
        nodes: Number of nodes.
        nesting: Depth of nested values.
        items: Items of all nested values together.
        tensor_bytes: Size of one tensor that the program makes.
        total_bytes: Size of all tensors that the program makes, together.
        flops: Floating point operations of model and program together.
        seconds: Time for running the job.
        result_bytes: Size of the results.
        new_tokens: Tokens of a generation.
        rows: Rows of the batch, and blocks of a run.
        runs: Runs of the model.
        logs: Lines that it prints.
        log_characters: Characters of all of them together.
    """

    payload_bytes: int = 256 * 2**20
    header_bytes: int = 8 * 2**20
    nodes: int = 20_000
    nesting: int = 16
    items: int = 200_000
    tensor_bytes: int = 2 * 2**30
    total_bytes: int = 16 * 2**30
    flops: int = 10**16
    seconds: float = 600.0
    result_bytes: int = 2**30
    new_tokens: int = 4096
    rows: int = 1024
    runs: int = 64
    logs: int = 1000
    log_characters: int = 2**20
