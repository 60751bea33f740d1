"""Validation: checks of a job against the model, before it runs.

:mod:`~nnsight.program.format.nodes` has the checks that need no model. This module checks that the locations, weights and modules of a job
exist. Then a *rehearsal* runs the whole job, model and program, on fake tensors with the sizes of the real run. So it finds wrong shapes
and dtypes, and counts memory and operations, before the model is touched. The rehearsal is also the second defence against writes to
weights: it compares the memory that the program, or a module that it applies, writes to with the memory of the model.

The result is cached for jobs with the same program and the same sizes of tensors.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import threading
import weakref
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ...modeling.base import NNsight
from ...runtime.errors import EarlyStopException
from ...runtime.interleaver import Interleaver
from ...runtime.modules.listing import SourceError, listing_of
from ...runtime.modules.operations import forward_of, layers_of
from ...runtime.modules.tree import ModuleTree
from ...runtime.rows.fakes import quiet_fakes
from ..counts import counts
from ..format.errors import ExecutionFailedError, InvalidProgramError, require
from ..format.limits import Limits
from ..format.nodes import Node
from ..format.operators import OPERATORS
from ..format.payload import Job, fact
from ..format.trees import ABSENT, leaves, read_tree
from .costs import Costs, Rehearsal
from .fake_runs import fake_model_of, generation_size
from .indices import CONSTANT

#: Allowed options of a generation, with their types.
GENERATION: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(
        "max_new_tokens min_new_tokens max_length min_length top_k num_beams num_return_sequences no_repeat_ngram_size "
        "pad_token_id bos_token_id decoder_start_token_id".split(),
        (int,),
    ),
    **dict.fromkeys(
        "temperature top_p min_p typical_p repetition_penalty length_penalty epsilon_cutoff".split(), (float, int)
    ),
    **dict.fromkeys("do_sample use_cache early_stopping".split(), (bool,)),
    "eos_token_id": (int, list),
}

#: Options of a forward pass of transformers that its signature can hide behind ``**kwargs``.
_OPTIONS = frozenset("output_hidden_states output_attentions use_cache return_dict logits_to_keep labels".split())

_KEPT = 256

#: Types of numbers that do not determine sizes, by the type of the argument in the schema.
_NUMBERS = {"number": (int, float), "float": (int, float), "Tensor": (float,)}

#: Operators for which such numbers do determine sizes.
_SIZED_BY_NUMBERS = frozenset({"aten.arange.default", "aten.arange.start", "aten.arange.start_step"})


@dataclass(frozen=True)
class Checked:
    """A job that has passed all checks.

    Attributes:
        job: The job.
        flops: Floating point operations of model and program.
        tensor_bytes: Total size of the tensors that the program makes, in bytes.
        result_bytes: Total size of the saved tensors, in bytes.
    """

    job: Job
    flops: int
    tensor_bytes: int
    result_bytes: int


_known: weakref.WeakKeyDictionary[torch.nn.Module, OrderedDict[Hashable, tuple[int, int, int]]] = (
    weakref.WeakKeyDictionary()
)
_lock = threading.Lock()


def validate(job: Job, model: NNsight, limits: Limits | None = None) -> Checked:
    """Check a job for ``model``. The weights of the model need not be loaded.

    Raises:
        InvalidProgramError: If the job cannot run on the model. The message has the reason.
    """
    limits = limits or Limits()
    model._sync()
    tree = model._tree
    key = _key(job, tree, limits)
    with _lock:
        known = _known.setdefault(tree.root, OrderedDict())
        found = known.get(key)
    if found is None:
        for run in job.runs:
            check_call(model, run, limits)
        check_parts(job, model)
        found = _rehearse(job, model, limits)
        with _lock:
            known[key] = found
            while len(known) > _KEPT:
                known.popitem(last=False)
    return Checked(job, *found)


def _key(job: Job, tree: ModuleTree, limits: Limits) -> Hashable:
    """Return a key of everything that the checks depend on. Values of numbers and tensors that do not determine sizes are not part of it.

    So the same program with another strength and another direction is not checked again.
    """
    program, sizes, indices = fact(job, "key", lambda: _without_constants(job))
    digest = hashlib.sha256(program)
    for name in indices:
        digest.update(job.tensors[name].contiguous().view(torch.uint8).numpy().tobytes())
    return digest.digest(), sizes, tree.version, tree.root.training, limits


def _without_constants(job: Job) -> tuple[bytes, Hashable, list[str]]:
    """Return a hash of the program without values of numbers, the sizes of its tensors, and the names of tensors that may be indices."""
    nodes = [_without_values(node) for node in job.nodes]
    program = json.dumps([job.runs, nodes, job.saves])
    sizes = tuple((name, tensor.shape, tensor.dtype) for name, tensor in sorted(job.tensors.items()))
    return hashlib.sha256(program.encode()).digest(), sizes, sorted(_index_constants(job))


def _without_values(node: Node) -> Node:
    """Return a node with a type in place of each number that an operator computes with."""
    if node["do"] != "op" or node["name"] in _SIZED_BY_NUMBERS:
        return node
    arguments = OPERATORS[node["name"]]._schema.arguments
    kinds = [str(argument.real_type).removeprefix("Optional[").removesuffix("]") for argument in arguments]
    args = [
        {"any": type(value).__name__} if type(value) in _NUMBERS.get(kind, ()) else value
        for kind, value in zip(kinds, node["args"], strict=False)
    ]
    return {**node, "args": args}


def _index_constants(job: Job) -> set[str]:
    """Return the names of constants that may be indices."""
    constants = {node["tensor"]: job.tensors[node["tensor"]] for node in job.nodes if node["do"] == "const"}
    return {
        name
        for name, tensor in constants.items()
        if tensor.dim() and not tensor.is_floating_point() and tensor.numel() <= 2**20
    }


# -- the parts of the model ------------------------------------------------------------------------------------------


def check_parts(job: Job, model: NNsight) -> None:
    """Raise an :class:`InvalidProgramError` unless the model has all locations, weights and modules that a job names."""
    tree = model._tree
    paths = set(tree.names())
    weights = {name for name, _ in [*tree.root.named_parameters(), *tree.root.named_buffers()]}
    for number, node in enumerate(job.nodes):
        what = None
        if "site" in node and not _is_site(node["site"], tree, paths, job.runs[node["run"]]["call"]):
            what = f"location `{node['site']}`"
        elif node["do"] == "weight" and node["name"] not in weights:
            what = f"weight `{node['name']}`"
        elif node["do"] == "apply" and node["module"] not in paths:
            what = f"module `{node['module']}`"
        if what is not None:
            raise InvalidProgramError(f"Node {number} ({node['do']}): this {type(tree.root).__name__} has no {what}.")


def _is_site(site: str, tree: ModuleTree, paths: set[str], call: str) -> bool:
    if site == "result":
        return True
    path = site.rpartition(".")[0]
    if path in paths:
        return True
    if call == "generate" and site in ("model.generator.output", "model.generator.streamer.output"):
        return True
    module, *operations = path.split(".source.")
    return module in paths and bool(operations) and _open(tree, module, operations)


def _open(tree: ModuleTree, path: str, operations: list[str]) -> bool:
    """Open the functions that have ``operations``: ``forward`` of the module at ``path``, the function that its operation calls, and so on.

    Return False if one of them does not exist. If only a run determines the last function, the rehearsal finds out which operations it
    has. In all other cases the names are checked, so that jobs cannot open any number of paths.
    """
    module = tree.module_at(path)
    assert module is not None
    function = forward_of(module)[1]
    for number, name in enumerate(operations):
        last = number + 1 == len(operations)
        if function is None:
            if last:
                tree.open_source(path)
            return last
        try:
            operation = listing_of(layers_of(function, path)[-1]).operations.get(name)
        except SourceError:
            return False
        if operation is None or (operation.callee is None and not last):
            return False
        tree.open_source(path)
        function, path = tree.callee(path, operation), f"{path}.source.{name}"
        function = tree.called_at(path) if function is None and not last else function
    return True


def check_call(model: NNsight, run: dict[str, Any], limits: Limits) -> None:
    """Raise an :class:`InvalidProgramError` unless a run calls the model with allowed inputs and options."""
    kwargs = dict(run["kwargs"]["dict"])
    if run["call"] == "generate":
        if not hasattr(model, "generate") or not hasattr(model._module, "generate"):
            raise InvalidProgramError(f"A {type(model).__name__} has no `generate`.")
        options = {name: value for name, value in kwargs.items() if name in GENERATION or not _has(value, "tensor")}
        for name, value in options.items():
            kinds = GENERATION.get(name)
            listed = type(value) is dict and set(value) == {"list"} and list in (kinds or ())
            if value is not None and not (listed or (kinds is not None and type(value) in kinds)):
                raise InvalidProgramError(f"`{name}` is not a permitted option of a generation, or has a wrong type.")
        for name in ("max_new_tokens", "max_length", "num_beams", "num_return_sequences"):
            if name in options and options[name] is not None and not 1 <= options[name] <= limits.new_tokens:
                raise InvalidProgramError(f"`{name}` of a generation is not between 1 and {limits.new_tokens}.")
        return
    text = any(_has(tree, "str") for tree in (run["args"], run["kwargs"]))
    require(not text, "The inputs of a run have to be tensors and numbers. The client has to turn text into tokens.")
    code = inspect.unwrap(type(model._module).forward).__code__  # transformers applies several decorators to some methods
    names = set(code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount])
    unknown = kwargs.keys() - names - (_OPTIONS if code.co_flags & 8 else set())
    if unknown:
        raise InvalidProgramError(f"`{min(unknown)}` is not an argument of {type(model._module).__name__}.")


def _has(tree: Any, kind: str) -> bool:
    """Whether a checked tree has a leaf of ``kind``."""
    return any(found == kind for found, _ in leaves(tree))


def inputs_of(
    run: dict[str, Any], tensors: dict[str, torch.Tensor], device: torch.device | None
) -> tuple[Any, dict[str, Any]]:
    """Return the arguments of a run. They are copied to ``device`` unless it is ``None``, because a program may write to its input."""
    used: dict[str, torch.Tensor] = {}

    def leaf(kind: str, content: Any) -> Any:
        if kind != "tensor":
            return ABSENT
        if content not in used:
            used[content] = tensors[content] if device is None else tensors[content].to(device, copy=True)
        return used[content]

    return tuple(read_tree(run["args"], leaf)), read_tree(run["kwargs"], leaf)


# -- the rehearsal ---------------------------------------------------------------------------------------------------


def _rehearse(job: Job, model: NNsight, limits: Limits) -> tuple[int, int, int]:
    """Run a job on fake tensors. Return the number of operations, the bytes that it makes, and the bytes that it returns."""
    counts["rehearsals"] += 1
    with quiet_fakes:
        fakes = fake_model_of(model._tree)
    costs = Costs(limits.flops)
    with torch.inference_mode(False), quiet_fakes, fakes.mode, costs, contextlib.ExitStack() as modes:  # composite operators decompose
        rehearsal = Rehearsal(model, job, limits, fakes, costs)
        for name in _index_constants(job):
            setattr(rehearsal.constants[name], CONSTANT, job.tensors[name])
        modes.enter_context(torch.set_grad_enabled(rehearsal.differentiates))
        if rehearsal.differentiates:
            modes.enter_context(torch.autograd.graph.saved_tensors_hooks(rehearsal.keep, lambda tensor: tensor))
        try:
            for number in range(len(job.runs)):
                _rehearse_run(rehearsal, costs, number)
        except (InvalidProgramError, EarlyStopException, KeyboardInterrupt, SystemExit):
            raise
        except ExecutionFailedError as error:
            hint = ". A size that depends on values is checked as the largest possible one" if costs.selects else ""
            raise InvalidProgramError(f"{error}{hint}") from error
        except BaseException as error:
            raise InvalidProgramError(f"The job does not run on this model: {type(error).__name__}: {error}") from error
        sizes: list[int] = []
        rehearsal.saved(lambda tensor: sizes.append(tensor.numel() * tensor.element_size()))
    if sum(sizes) > limits.result_bytes:
        raise InvalidProgramError(f"The job returns {sum(sizes)} bytes; the limit is {limits.result_bytes}.")
    return costs.flops, rehearsal.made, sum(sizes)


def _rehearse_run(rehearsal: Rehearsal, costs: Costs, number: int) -> None:
    run, fakes, limits = rehearsal.job.runs[number], rehearsal.fakes, rehearsal.limits
    (args, kwargs), steps = inputs_of(run, rehearsal.constants, None), 1
    if run["call"] == "generate":
        steps = generation_size(fakes.root, args, kwargs)[0]
        require(steps <= limits.new_tokens, f"The generation can have {steps} tokens; the limit is {limits.new_tokens}.")
        leaves = pytree.tree_leaves((args, kwargs))
        rows = max((leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()), default=0)
        require(rows <= limits.rows, f"The batch has {rows} rows; the limit is {limits.rows}.")
    costs.begun, costs.on_step = [], rehearsal.check_time
    interleaver = Interleaver(rehearsal.mediators(number))
    with contextlib.suppress(EarlyStopException), interleaver:
        output = fakes.run(rehearsal.model._tree, interleaver, run["call"], args, kwargs, costs)
        interleaver.handle("result", output)
        rehearsal.finish(interleaver)
    if costs.begun:  # the remaining tokens, which no block reads, cost as much as the last token of the rehearsal
        costs.add((costs.flops - costs.begun[-1]) * (steps - len(costs.begun)))
