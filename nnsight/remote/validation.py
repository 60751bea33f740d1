"""Checks of a job before it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .limits import Limits
from .payload import Job

if TYPE_CHECKING:
    from ..modeling.base import NNsight


@dataclass(frozen=True)
class Checked:
    """A job that may run.

    Attributes:
        job: The job.
        flops: Floating point operations of model and program.
        tensor_bytes: Bytes of all tensors that the program makes.
    """

    job: Job
    flops: int
    tensor_bytes: int


def validate(job: Job, model: NNsight, limits: Limits | None = None) -> Checked:
    """Check a job for ``model``, whose weights are not needed.

    Raises:
        InvalidProgramError: With the reason.
    """
    raise NotImplementedError
