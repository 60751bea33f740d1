"""The correspondence between locations of a model of transformers and locations of a vLLM engine.

Programs are recorded on the model of transformers. Its values are ``[batch, positions, ...]``, and it returns logits at every position. An
engine runs vLLM's modules on flat values ``[tokens, ...]``, and has logits only at the last position. Most modules have the same path in
both, and compute the same. If a program uses a module that exists only in one of them, or that computes something else in vLLM, it is
refused when it arrives, with the path of the module.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from ...modeling.base import NNsight
from ...program.format.errors import InvalidProgramError
from ...program.format.nodes import Node
from ...program.format.payload import Job
from ...program.run.fake_runs import fake_model_of
from ...program.run.occurrences import leaf_at, places_of
from ...runtime.interleaver import Everywhere, Interleaver
from ...runtime.rows.fakes import quiet_fakes
from ..steering.graph_parts import is_layer
from ..steering.pairs import SUM, WHOLE, form_of
from ..worker.calls import is_head, untapped_class
from ..worker.requests import LOGITS, SAMPLES

#: Locations that belong to no module: result, all token ids, and the sampled tokens.
RESULT, IDS, TOKENS = "result", "model.generator.output", "model.generator.streamer.output"

#: Sizes of the fake input with which the values of the model of transformers are observed.
_BATCH, _POSITIONS = 2, 3

#: Kinds of nodes that an engine cannot run, with the reason.
_DENIED = {
    "skip": "it skips a module, and all requests of a step share the calls of modules",
    **dict.fromkeys(("requires_grad", "backward", "grad", "set_grad"), "it has a backward pass"),
}


class MainTensors(NamedTuple):
    """The tensors in an engine's value that make up the value of transformers: ``first``, or its sum with ``residual``."""

    first: torch.Tensor
    residual: torch.Tensor | None = None


class Places:
    """The locations of ``theirs``, a model of transformers, in an engine. ``mine`` has vLLM's modules by path.

    The engine stops at ``stops``, or everywhere if that is ``None``.

    Attributes:
        head_path: Path of the head, the module that computes logits.
        head: Location of the output of the head.
        base: Location of the output of the base model, the input of the head.
        root: Location of the output of the whole model.
        last: The engine's location of the input of the head; ``None`` if the engine does not stop there.
    """

    root = "model.output"

    def __init__(self, theirs: NNsight, mine: dict[str, torch.nn.Module], stops: Iterable[str] | None) -> None:
        self._mine, self._stops = mine, None if stops is None else {*stops, LOGITS, SAMPLES}
        self._theirs = {path: module for module, path in theirs._tree.paths.items()}
        self._values = _observed(theirs)
        self._shapes: dict[str, torch.Size] = {}
        root: Any = theirs._module
        embeddings = root.get_output_embeddings() if hasattr(root, "get_output_embeddings") else None
        self.head_path = next((path for path, module in self._theirs.items() if module is embeddings), "")
        self.head = f"{self.head_path}.output"
        self.base = f"model.{getattr(root, 'base_model_prefix', '')}.output"
        self.last: str | None = self.root  # the root of vLLM's model returns the input of the head
        if self._stops is not None:  # the root cannot be tapped, but the last norm can
            tapped = [site for site in self._stops & self._values.keys() if self._is_last(site)]
            self.last = tapped[0] if tapped else None
        processor: Any = mine.get("model.logits_processor")
        self._scale, self._cap = getattr(processor, "scale", 1.0), getattr(processor, "soft_cap", None)

    def _is_last(self, site: str) -> bool:
        """Whether the value at ``site`` is the input of the head."""
        base = self._values.get(self.base)
        main = None if base is None else _main_leaf(base)
        return main is not None and site != self.base and _main_leaf(self._values[site]) is main

    def sites(self, location: str) -> list[str]:
        """Return the locations of transformers that correspond to ``location`` of the engine, in order."""
        if location != self.last:
            return [location]
        return [self.base] if location == self.root else [location, self.base]

    def trailing(self, site: str) -> torch.Size:
        """Return the sizes of the dimensions after batch and positions in the value at a location of transformers."""
        if site not in self._shapes:
            main = _main_leaf(self._values[site])
            assert main is not None
            self._shapes[site] = main.shape[2:]
        return self._shapes[site]

    def module(self, path: str) -> Any:
        """Return the engine's module at ``path``."""
        return self._mine[path]

    def weight(self, name: str) -> torch.Tensor | None:
        """Return the engine's parameter ``name``, or ``None`` if vLLM does not have it in the form of transformers."""
        path, _, attribute = f"model.{name}".rpartition(".")
        theirs, mine = self._theirs.get(path), self._mine.get(path)
        if theirs is None or mine is None or type(theirs).__name__ == "Conv1D":  # vLLM transposes its weights
            return None
        ours, found = getattr(theirs, attribute, None), getattr(mine, attribute, None)
        if not isinstance(ours, torch.Tensor) or not isinstance(found, torch.Tensor) or found.shape[1:] != ours.shape[1:]:
            return None
        kind = untapped_class(mine)
        if not (is_head(kind) and mine.tp_size == 1) and (found.shape != ours.shape or not _alike(theirs, kind)):
            return None
        return found[: len(ours)]  # vLLM pads the rows of the vocabulary

    def final_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Apply the cap and the scale of the model to the logits of its head."""
        if self._cap is not None:
            logits = torch.tanh(logits / self._cap) * self._cap
        return logits * self._scale if self._scale != 1.0 else logits

    def location(self, site: str, call: str) -> str | None:
        """Return the engine's location for a location of transformers, or ``None`` if that occurs after the last step."""
        if site == RESULT and call == "trace":
            return LOGITS
        if site in (RESULT, IDS):
            return None
        if site == TOKENS:
            return SAMPLES
        if site == self.base:
            return self.last
        return LOGITS if site in (self.root, self.head) else site

    # -- checks --------------------------------------------------------------------------------------------------------

    def check(self, job: Job) -> None:
        """Raise :class:`InvalidProgramError` with the reason if the engine cannot run a job."""
        for number, node in enumerate(job.nodes):
            try:
                self._check_node(node, job.runs[node["run"]]["call"])
            except InvalidProgramError as error:
                line = f", line {node['line']}" if "line" in node else ""
                raise InvalidProgramError(f"Node {number} ({node['do']}){line}: a vLLM engine cannot run it, because {error}") from None

    def _check_node(self, node: Node, call: str) -> None:
        if node["do"] in _DENIED:
            raise InvalidProgramError(_DENIED[node["do"]])
        if node["do"] == "apply":
            self._check_apply(node)
        if node["do"] == "weight" and self.weight(node["name"]) is None:
            raise InvalidProgramError(f"it does not have `{node['name']}` in the form of transformers")
        if "site" not in node:
            return
        site, location = node["site"], self.location(node["site"], call)
        if location == site:
            self._check_module(site, node["do"] == "write")
        if self._stops is not None and location is not None and location not in self._stops:
            raise InvalidProgramError(f"`{site}` is not tapped there")
        if site == self.head and call == "generate" and (self._cap is not None or self._scale != 1.0):
            raise InvalidProgramError(f"it has only the logits that the model returns: use `{self.root}`")
        if (site == self.base or (location == LOGITS and call == "trace")) and self.last is None:
            raise InvalidProgramError("it has no tap at the last norm, and without this tap it has logits of the last position only")
        if site in (IDS, TOKENS) or (site == RESULT and call == "generate"):
            if node["do"] == "write":
                raise InvalidProgramError(f"`{site}` cannot be replaced there")
            return
        value = self._values.get(self.root if site == RESULT else site)
        main = None if value is None else _main_leaf(value)
        if main is None or leaf_at(value, node) is not main:
            raise InvalidProgramError(f"it has only hidden states and logits, and this tensor at `{site}` is neither of them")

    def _check_module(self, site: str, writes: bool) -> None:
        """Raise ``InvalidProgramError`` unless transformers and vLLM compute the same at ``site``."""
        path, _, side = site.rpartition(".")
        theirs, mine = self._theirs.get(path), self._mine.get(path)
        if theirs is None or mine is None:
            raise InvalidProgramError(f"vLLM's {type(self._mine['model']).__name__} has no `{path}`")
        if not is_layer(path) and not _alike(theirs, untapped_class(mine)):
            raise InvalidProgramError(f"`{path}` is a {untapped_class(mine).__name__} there, and computes something else")
        if side == "input" and isinstance(theirs, torch.nn.Embedding):
            raise InvalidProgramError(f"`{site}` has no hidden state")
        if side == "input" and writes and not is_layer(path) and "residual" in _signature(untapped_class(mine)).parameters:
            raise InvalidProgramError(f"`{path}` adds the residual stream there, so an edit of its input would change both")

    def _check_apply(self, node: Node) -> None:
        path, args, kwargs = node["module"], node["args"]["list"], node["kwargs"]["dict"]
        mine, theirs = self._mine.get(path), self._theirs.get(path)
        one = len(args) == 1 and not kwargs
        if mine is None or theirs is None or not one or not _applies(theirs, untapped_class(mine)):
            raise InvalidProgramError(f"`{path}` cannot be called there: norms, linear layers, MLPs and the head can, with one tensor")


def tensors_of(location: str, value: Any, module: Any) -> MainTensors:
    """Return the tensors in an engine's value at ``location`` that make up the value of transformers."""
    path, _, side = location.rpartition(".")
    if side == "input":
        args, kwargs = value
        given = _signature(untapped_class(module)).bind(module, *args, **kwargs).arguments
        residual = None if is_layer(path) and form_of(module, location) == WHOLE else given.get("residual")
        first = given.get("hidden_states")
        if first is None:
            first = next(leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point())
        return MainTensors(first, residual)
    if isinstance(value, torch.Tensor):
        return MainTensors(value)
    first, second = value[0], value[1] if len(value) > 1 else None
    is_sum = second is not None and is_layer(path) and form_of(module, location) == SUM
    return MainTensors(first, second if is_sum else None)


@functools.cache
def _signature(kind: Any) -> inspect.Signature:
    """Return the signature of modules of a class. vLLM's custom operations have it in ``forward_native``."""
    return inspect.signature(getattr(kind, "forward_native", kind.forward))


def _alike(theirs: torch.nn.Module, mine: Any) -> bool:
    """Whether a module of transformers computes the same as vLLM's module of the class ``mine`` at the same path."""
    names = [base.__name__ for base in mine.__mro__]
    if isinstance(theirs, torch.nn.Embedding):
        return type(theirs) is torch.nn.Embedding and is_head(mine)
    if _is_linear(theirs) or "LinearBase" in names:
        return _is_linear(theirs) and "LinearBase" in names
    if "Norm" in type(theirs).__name__ or "Norm" in names[0]:
        return "Norm" in type(theirs).__name__ and "Norm" in names[0]
    if "Experts" in names[0] or "MoE" in names[0]:
        return False
    return "AndMul" not in names[0]  # vLLM's activation also multiplies with the gate


def _applies(theirs: torch.nn.Module, mine: Any) -> bool:
    """Whether a block can call the module with one hidden state, and vLLM's class ``mine`` computes the same."""
    if is_head(mine):
        return _is_linear(theirs)
    needed = [
        parameter
        for parameter in list(_signature(mine).parameters.values())[1:]
        if parameter.default is parameter.empty and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    return len(needed) == 1 and _alike(theirs, mine)


def _is_linear(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.Linear) or type(module).__name__ == "Conv1D"


def _main_leaf(value: Any) -> torch.Tensor | None:
    """Return the first floating-point tensor in ``value`` that is ``[batch, positions, ...]``."""
    for _, leaf in places_of(value):
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.shape[:2] == (_BATCH, _POSITIONS):
            return leaf
    return None


def _observed(model: NNsight) -> dict[str, Any]:
    """Run a model of transformers on fake tensors, and return the first value at each location."""
    noting, values = Interleaver(), dict[str, Any]()
    noting.waited, noting.offer = Everywhere(), lambda _, location, value: values.setdefault(location, value)
    with torch.inference_mode(False), torch.no_grad(), quiet_fakes:
        fakes = fake_model_of(model._tree)
        with fakes.mode:
            ids = torch.zeros(_BATCH, _POSITIONS, dtype=torch.int64)
            fakes.run(model._tree, noting, "trace", (), {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    return values
