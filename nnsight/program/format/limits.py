"""Limits of one job, checked before it runs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Upper bounds for one job.

    Attributes:
        payload_bytes: Size of the payload, in bytes.
        header_bytes: Size of the JSON header of the payload, in bytes.
        nodes: Number of nodes.
        nesting: Depth of nested values.
        items: Number of items in all nested values together.
        tensor_bytes: Size of each tensor that the program makes, in bytes.
        total_bytes: Total size of the tensors that the program makes, in bytes.
        flops: Floating point operations of model and program together.
        seconds: Time for running the job, in seconds.
        result_bytes: Total size of the saved tensors, in bytes.
        new_tokens: Number of tokens of a generation, and of its beams and returned sequences.
        rows: Number of rows of the batch, and number of blocks of a run.
        runs: Number of runs of the model.
        logs: Number of lines that the program prints.
        log_characters: Number of characters of all printed lines together.
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
