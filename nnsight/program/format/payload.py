"""Jobs as bytes.

A client sends a job: one or several runs of a model, the nodes of a program, and the values to return. A job is one safetensors file
(:mod:`~nnsight.program.format.container`), whose tensors are constants and inputs. Decoding a job runs all checks that need no model. Jobs
with equal headers differ only in the values of their tensors, so checked headers are cached.
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
from .errors import InvalidProgramError, require
from .limits import Limits
from .nodes import Node, check_nodes, check_references
from .operators import OPERATORS_HASH
from .trees import Budget, check_tree, is_int, is_text, tensor_names

#: Version of the format.
VERSION = 1

Fact = TypeVar("Fact")

#: Cache of checked jobs without their tensors, and of the sizes of their payloads, by header and limits.
_known: OrderedDict[tuple[bytes, Limits], tuple[Job, int]] = OrderedDict()
_KEPT_BYTES, _LONGEST = 4 * 2**20, 2**18
_lock = threading.Lock()

_INPUTS = frozenset({"list", "tuple", "dict", "tensor", "str", "float", "dtype"})
_SAVES = frozenset({"list", "tuple", "dict", "ref", "str", "float", "dtype", "absent"})


@dataclass
class Job:
    """Runs of a model with a program.

    Attributes:
        runs: For each run ``{"call": "trace" or "generate", "args": tree, "kwargs": tree, "blocks": number of blocks}``.
        nodes: The program, see :mod:`~nnsight.program.format.nodes`.
        saves: The trees of the values to return, by name.
        tensors: Constants and inputs, by name.
        header: The header that the job was decoded from; empty if it was not decoded by :func:`decode_known`.
        seed: The seed of the random numbers of the job, or ``None``.
        facts: Results of :func:`fact`, shared by all jobs with this header.
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
        seed = {} if self.seed is None else {"seed": self.seed}
        parts = {"runs": self.runs, "nodes": self.nodes, "saves": self.saves}
        return {"version": VERSION, "operators": OPERATORS_HASH, **parts, **seed}


def fact(job: Job, name: Hashable, find: Callable[[], Fact]) -> Fact:
    """Return the result of ``find``, which may depend only on the header of ``job``. It is called once for each header."""
    if not job.header:  # such a job may change
        return find()
    if name not in job.facts:
        job.facts[name] = find()
    found: Fact = job.facts[name]
    return found


def inputs_of(job: Job) -> dict[str, torch.Tensor]:
    """Return the inputs of a program by name, with their values in the recording. Names of other constants are not identifiers."""
    used = {node["tensor"] for node in job.nodes if node["do"] == "const"}
    return {name: job.tensors[name] for name in sorted(used) if name.isidentifier()}


def encode(job: Job) -> bytes:
    """Return ``job`` as a payload: one safetensors file."""
    return pack(job.content(), job.tensors)


def decode(payload: bytes, limits: Limits | None = None) -> Job:
    """Return the job in a payload. Nothing in it is executed, imported or looked up by name.

    Raises:
        InvalidProgramError: If the payload is malformed or too large.
    """
    limits = limits or Limits()
    return _checked(*unpack(payload, limits.payload_bytes, limits.header_bytes), limits)


def decode_known(payload: bytes, limits: Limits | None = None) -> Job:
    """Return the job in a payload, as :func:`decode` does. Jobs with equal headers share their content, so callers must not change it."""
    limits = limits or Limits()
    header = header_of(payload, limits.payload_bytes, limits.header_bytes)
    known, size = _known.get((header, limits), (None, 0))
    if known is not None and size == len(payload):
        return replace(known, tensors=read_tensors(bytes(payload)))
    job = decode(payload, limits)
    if len(header) <= _LONGEST:
        job.header = header
        with _lock:
            _known[header, limits] = replace(job, tensors={}), len(payload)
            while sum(len(kept) for kept, _ in _known) > _KEPT_BYTES:
                _known.popitem(last=False)
    return job


def _checked(content: Any, tensors: dict[str, torch.Tensor], limits: Limits) -> Job:
    """Return the job of a container, after checking it."""
    keys = {"version", "operators", "runs", "nodes", "saves"}
    require(type(content) is dict and content.keys() - {"seed"} == keys, "The payload is not a job.")
    known = type(content["version"]) is int and content["version"] == VERSION
    require(known, f"The payload has version {str(content['version'])[:20]} of the format, and this process reads version {VERSION}.")
    operators = content["operators"]
    named = is_text(operators) and operators.isalnum() and operators.isascii()
    require(named, "The payload does not say which operators its client has.")
    seed: Any = content.get("seed")
    require("seed" not in content or (is_int(seed) and seed >= 0), "The seed of the payload is not a nonnegative integer.")
    job = Job(content["runs"], content["nodes"], content["saves"], tensors, seed=seed)
    budget = Budget(limits.items, limits.nesting)
    _check_runs(job, budget, limits)
    check_nodes(job, limits, budget)
    _check_saves(job, budget)
    used = {node["tensor"] for node in job.nodes if node["do"] == "const"}
    used |= {name for run in job.runs for tree in (run["args"], run["kwargs"]) for name in tensor_names(tree)}
    require(used == tensors.keys(), "The container has tensors that the job does not use.")
    return job


def _check_runs(job: Job, budget: Budget, limits: Limits) -> None:
    require(type(job.runs) is list and 1 <= len(job.runs) <= limits.runs, f"A job must have 1 to {limits.runs} runs.")
    for run in job.runs:
        require(type(run) is dict and set(run) == {"call", "args", "kwargs", "blocks"}, "A run is malformed.")
        require(run["call"] in ("trace", "generate"), "A run calls the model in an unknown way.")
        counted = is_int(run["blocks"]) and 0 <= run["blocks"] <= limits.rows
        require(counted, f"A run can have at most {limits.rows} blocks.")
        for key, kind in (("args", "list"), ("kwargs", "dict")):
            require(type(run[key]) is dict and kind in run[key], f"`{key}` of a run is not a {kind}.")
            check_tree(run[key], _INPUTS, budget)
            there = job.tensors.keys() >= set(tensor_names(run[key]))
            require(there, "A run uses a tensor that the container does not have.")
        names = [name for name, _ in run["kwargs"]["dict"]]
        named = all(type(name) is str and name.isidentifier() and name.isascii() for name in names)
        require(named, "The name of an argument of a run is not an identifier.")


def _check_saves(job: Job, budget: Budget) -> None:
    require(type(job.saves) is dict, "The saves are not an object.")
    for name, tree in job.saves.items():
        named = is_text(name) and name.isidentifier() and not name.startswith("__") and not iskeyword(name)
        require(named, f"A value cannot be saved as {name[:40]!r}, which is not a valid name.")
        check_tree(tree, _SAVES, budget)
        try:
            check_references(tree, job.nodes)
        except InvalidProgramError as error:
            raise InvalidProgramError(f"The saved value `{name}`: {error}") from None
