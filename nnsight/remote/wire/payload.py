"""Jobs as bytes: the container of the wire format.

A job is what a client sends: one or several runs of a model, the nodes of a program, and what comes back. It is one safetensors file
(:mod:`~nnsight.remote.wire.container`) whose tensors are constants and inputs. Reading one checks all that can be known without a model.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from keyword import iskeyword
from typing import Any, TypeVar

import torch

from .container import header_of, pack, read_tensors, unpack
from .errors import InvalidProgramError
from .limits import Limits
from .nodes import Node, check_nodes, check_references
from .operators import OPERATORS_HASH
from .trees import Budget, check_tree, is_int, is_text, tensor_names

#: Version of the format.
VERSION = 1

Fact = TypeVar("Fact")

#: How a model can be called.
CALLS = frozenset({"trace", "generate"})

#: What short headers said of jobs that were checked, by header and limits.
_known: OrderedDict[tuple[bytes, Limits], KnownConstants] = OrderedDict()
_KEPT_BYTES, _LONGEST = 4 * 2**20, 2**18
_lock = threading.Lock()

_INPUTS = frozenset({"list", "tuple", "dict", "tensor", "str", "float", "dtype"})
_SAVES = frozenset({"list", "tuple", "dict", "ref", "tensor", "str", "float", "dtype", "absent"})


@dataclass
class Job:
    """Runs of a model with a program.

    Attributes:
        runs: For each run ``{"call": "trace" or "generate", "args": tree, "kwargs": tree, "blocks": number of blocks}``.
        nodes: The program, see :mod:`~nnsight.remote.wire.nodes`.
        saves: What comes back: a tree by name.
        tensors: Constants and inputs, by name.
        header: The header it was read from, if it was.
        seed: Where its random numbers begin, if it draws some.
        facts: What was found out about the header, for all jobs that have it; see :func:`fact`.
    """

    runs: list[dict[str, Any]]
    nodes: list[Node] = field(default_factory=list)
    saves: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    header: bytes = b""
    seed: int | None = None
    facts: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False)

    def content(self) -> dict[str, Any]:
        """Return the job without its tensors, as JSON."""
        return {
            "version": VERSION,
            "operators": OPERATORS_HASH,
            "runs": self.runs,
            "nodes": self.nodes,
            "saves": self.saves,
            **({} if self.seed is None else {"seed": self.seed}),
        }


@dataclass(frozen=True)
class KnownConstants:
    """A header that was read and checked. It says everything about a job but the values of its tensors; nobody changes what is in it.

    Attributes:
        job: A job without tensors.
        size: How long the payload is.
    """

    job: Job
    size: int


def fact(job: Job, name: Hashable, find: Callable[[], Fact]) -> Fact:
    """Return what ``find`` returns, which depends on the header of ``job`` only, and is not found out for each job that has it."""
    if not job.header:  # it was not read, and may change
        return find()
    found = job.facts.get(name)
    if found is None:
        found = job.facts[name] = find()
    result: Fact = found
    return result


def encode(job: Job) -> bytes:
    """Return ``job`` as a payload: one safetensors file."""
    return pack(job.content(), job.tensors)


def decode(payload: bytes, limits: Limits | None = None) -> Job:
    """Return the job in a payload. Nothing in it is executed, imported or looked up by name.

    Raises:
        InvalidProgramError: If it is malformed or too large.
    """
    limits = limits or Limits()
    return _checked(*unpack(payload, limits.payload_bytes, limits.header_bytes), limits)


def decode_known(payload: bytes, limits: Limits | None = None) -> Job:
    """Return the job in a payload, as :func:`decode`; jobs with equal headers share what is in them, so nobody may change it.

    Raises:
        InvalidProgramError: Likewise.
    """
    limits = limits or Limits()
    header = header_of(payload, limits.payload_bytes, limits.header_bytes)
    known = _known.get((header, limits))
    if known is not None and known.size == len(payload):
        return replace(known.job, tensors=read_tensors(bytes(payload)))
    job = decode(payload, limits)
    if len(header) <= _LONGEST:
        job.header = header
        with _lock:
            _known[header, limits] = KnownConstants(replace(job, tensors={}), len(payload))
            while sum(len(kept) for kept, _ in _known) > _KEPT_BYTES:
                _known.popitem(last=False)
    return job


def _checked(content: Any, tensors: dict[str, torch.Tensor], limits: Limits) -> Job:
    """Return the job of a container."""
    if type(content) is not dict or content.keys() - {"seed"} != {"version", "operators", "runs", "nodes", "saves"}:
        raise InvalidProgramError("The payload is no job.")
    if type(content["version"]) is not int or content["version"] != VERSION:
        raise InvalidProgramError(
            f"The payload has version {str(content['version'])[:20]} of the format; this is {VERSION}."
        )
    if not (is_text(content["operators"]) and content["operators"].isalnum() and content["operators"].isascii()):
        raise InvalidProgramError("The payload does not say which operators its client has.")
    seed: Any = content.get("seed")
    if "seed" in content and not (is_int(seed) and seed >= 0):
        raise InvalidProgramError("The seed of the payload is no natural number.")
    job = Job(content["runs"], content["nodes"], content["saves"], tensors, seed=seed)
    budget = Budget(limits.items, limits.nesting)
    _check_runs(job, budget, limits)
    check_nodes(job, limits, budget)
    _check_saves(job, budget)
    used = {node["tensor"] for node in job.nodes if node["do"] == "const"}
    used |= {name for run in job.runs for tree in (run["args"], run["kwargs"]) for name in tensor_names(tree)}
    if used != tensors.keys():
        raise InvalidProgramError("The container has tensors that nothing uses.")
    return job


def _check_runs(job: Job, budget: Budget, limits: Limits) -> None:
    if type(job.runs) is not list or not 1 <= len(job.runs) <= limits.runs:
        raise InvalidProgramError(f"A job has 1 to {limits.runs} runs.")
    for run in job.runs:
        if type(run) is not dict or set(run) != {"call", "args", "kwargs", "blocks"}:
            raise InvalidProgramError("A run is malformed.")
        if type(run["call"]) is not str or run["call"] not in CALLS:
            raise InvalidProgramError("A run calls the model in an unknown way.")
        if not (is_int(run["blocks"]) and 0 <= run["blocks"] <= limits.rows):
            raise InvalidProgramError(f"A run has at most {limits.rows} blocks.")
        for key, kind in (("args", "list"), ("kwargs", "dict")):
            if type(run[key]) is not dict or kind not in run[key]:
                raise InvalidProgramError(f"`{key}` of a run is no {kind}.")
            check_tree(run[key], _INPUTS, budget)
            for name in tensor_names(run[key]):
                if name not in job.tensors:
                    raise InvalidProgramError("A run uses a tensor that the container does not have.")
        if not all(type(name) is str and name.isidentifier() and name.isascii() for name, _ in run["kwargs"]["dict"]):
            raise InvalidProgramError("The name of an argument of a run is no name.")


def _check_saves(job: Job, budget: Budget) -> None:
    if type(job.saves) is not dict:
        raise InvalidProgramError("The saves are no object.")
    for name, tree in job.saves.items():
        if not (is_text(name) and name.isidentifier() and not name.startswith("__") and not iskeyword(name)):
            raise InvalidProgramError(f"A value cannot be saved as {name[:40]!r}, which is no name.")
        check_tree(tree, _SAVES - {"tensor"}, budget)
        try:
            check_references(tree, job.nodes)
        except InvalidProgramError as error:
            raise InvalidProgramError(f"The saved value `{name}`: {error}") from None
