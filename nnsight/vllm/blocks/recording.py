"""Recording of one step of a loop on fake tensors, to run the step for the rows of many requests.

After the prompt, each request has one row per step, so the body of a loop sees values ``[1, channels]``, and may use positions freely.
The body is recorded (:mod:`~nnsight.program.record.recorder`) on fake tensors of this shape. The nodes at each location are traced under
``torch.vmap``, with the requests as batch, so no request sees the row of another one. Named floats, and named tensors with at most one
dimension, that the body reads from outside are parameters, with a row for each request. All other values from outside are constants.
"""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from ...fx.replay.guards import GuardPlan
from ...program.baking import Segment, segments
from ...program.format.errors import NotExpressibleError
from ...program.format.operators import DRAWING, is_in_place, is_view
from ...program.format.payload import Job
from ...program.format.trees import write_tree
from ...program.record.demands import tolist_as_one_call
from ...program.record.inputs import NamedInputs
from ...program.record.listening import OperatorMode, RecordingInterleaver, RecordingMediator
from ...program.record.memory import OwnTensors
from ...program.record.printing import captured_output
from ...program.record.pruning import pruned
from ...program.record.recorder import Recorder
from ...program.record.refusals import refused
from ...program.record.saved_values import saved_leaf
from ...runtime.rows.fakes import quiet_fakes
from ...tracing import Block, Scope
from ..steering.graph_parts import GraphPart
from ..steering.graph_programs import ROWS, PartsOf
from .plain import Loop, NotPlainError

#: Kinds of nodes that a recorded step can have.
_KINDS = frozenset({"read", "write", "const", "op", "size"})


@dataclass(frozen=True, eq=False)
class StepProgram:
    """The program of one step of a loop.

    Attributes:
        loop: The loop, without the values that its body read from outside.
        parts: The parts by location, in order. A part takes and returns all tensors of the value; otherwise it is as in :class:`GraphPart`.
        replaced: By location, the indices of the tensors in the value that are replaced by new tensors.
        edited: By location, the indices of the tensors in the value that are edited in place.
        parameters: Names of the variables that differ between requests.
        added: The items that the body appends to lists, by name of the list. A :class:`PartValue` stands for each tensor.
    """

    loop: Loop
    parts: Mapping[str, GraphPart]
    replaced: Mapping[str, Sequence[int]]
    edited: Mapping[str, Sequence[int]]
    parameters: Sequence[str]
    added: Mapping[str, Sequence[Any]]

    @functools.cached_property
    def others(self) -> GuardPlan:
        """The plan to read the values from outside that are no parameters."""
        return self.loop.plan(self.parameters)

    @property
    def last(self) -> str:
        """The last location of a step."""
        return list(self.parts)[-1]


class PartValue:
    """Stands for a tensor that a part gives under ``name``. The block gets it as a tensor of the same class as in its Python."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._like: tuple[Any, dict[str, Any]] = torch.Tensor, {}

    def take_kind(self, like: torch.Tensor) -> None:
        """From now on, give the tensors the class and the attributes of ``like``."""
        self._like = type(like), dict(vars(like))

    def dressed(self, value: torch.Tensor) -> torch.Tensor:
        """Return ``value`` with this class and these attributes."""
        kind, attributes = self._like
        if kind is not torch.Tensor:
            value = value.as_subclass(kind)
            vars(value).update(attributes)
        return value


class _OuterTensors:
    """The tensors that a body reads from outside. It may not edit them: the recording would edit them, but the program would not."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._memory = {tensor.untyped_storage()._cdata for tensor in tensors}

    def check(self, function: Any, args: Any, kwargs: Any) -> None:
        """Refuse a call that edits one of the tensors in place. The call is made on fake tensors to detect this."""
        name = getattr(function, "__name__", "a call")
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        with _disable_current_modes(), torch.no_grad(), quiet_fakes, FakeTensorMode() as mode:
            fakes = {id(tensor): mode.from_tensor(tensor) for tensor in given}
            before = {key: fake._version for key, fake in fakes.items()}
            try:
                on_fakes = pytree.tree_map_only(torch.Tensor, lambda tensor: fakes[id(tensor)], (args, kwargs))
                function(*on_fakes[0], **on_fakes[1])
            except Exception as error:
                raise refused(f"`{name}` cannot be followed: {error}") from error
        for tensor in given:
            if fakes[id(tensor)]._version != before[id(tensor)] and tensor.untyped_storage()._cdata in self._memory:
                raise refused(f"`{name}` edits a tensor from outside in place.")


class _BodyInputs(NamedInputs):
    """The named values of a body. Calls that edit values from outside are refused."""

    def __init__(self, outside: _OuterTensors, *given: Any) -> None:
        super().__init__(*given)
        self._outside = outside

    def call(self, function: Any, args: Any, kwargs: Any, record: Callable[[], Any]) -> Any:
        self._outside.check(function, *pytree.tree_map_only(torch.Tensor, self.value_of, (args, kwargs)))
        return super().call(function, args, kwargs, record)


class _BodyTensors(OwnTensors):
    """The tensors of a body. Calls that edit tensors from outside are refused."""

    def __init__(self, outside: _OuterTensors, recorder: Any) -> None:
        super().__init__(recorder)
        self._outside = outside

    def call(self, name: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._outside.check(function, args, kwargs)
        return super().call(name, function, args, kwargs)


def recorded(block: Block, loop: Loop, names: dict[str, Any], values: Mapping[str, Any], tree: Any) -> StepProgram:
    """Record the body of ``loop``, the loop of ``block``, and trace its parts.

    ``names`` are the globals of the block. ``values`` has the value at each location of a step, with one row, in the order in which the
    block asked for them. ``tree`` has the modules of the model.

    Raises:
        NotPlainError: If the body cannot be a program.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the Python of the block gives the same warnings
            job, added, fixed = _record(block.only(loop.body), loop, names, values, tree)
            _check(job)
            return _traced(job, added, fixed, loop, values)
    except NotPlainError:
        raise
    except NotExpressibleError as error:
        raise NotPlainError(str(error)) from error
    except Exception as error:  # the block can always go on as Python
        raise NotPlainError(f"it cannot be recorded: {type(error).__name__}: {error}") from error


def _record(
    block: Block, loop: Loop, names: dict[str, Any], values: Mapping[str, Any], tree: Any
) -> tuple[Job, dict[str, list[Any]], set[str]]:
    """Return the job of a body, the items that it appends to lists, by name of the list, and the names that are no inputs."""
    used = loop.used
    recorder: Any = Recorder(for_other_inputs=True)
    leaves = [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    recorder.model = types.SimpleNamespace(weights={}, by_path={}, device=leaves[0].device, storages=set, is_lazy=False)
    exact = all(leaf.dtype == torch.float32 for leaf in leaves if leaf.is_floating_point())  # else floats would be rounded
    variables = {name: list(value) if type(value) is list else value for name, value in used.items()}
    read = loop.plan().read(used.__getitem__)
    outside = _OuterTensors([] if read is None else read.tensors)
    recorder._common = _BodyInputs(outside, block, {key: value for key, value in variables.items() if exact or type(value) is not float})
    recorder.own = _BodyTensors(outside, recorder)
    scope = Scope({name: types.CellType() for name in block.shared})
    for name, value in variables.items():
        if name in scope.cells:
            scope.cells[name].cell_contents = value
    globals_of_body = {**names, **{name: value for name, value in variables.items() if name not in scope.cells}}
    function = block.bind(scope, None, globals_of_body)
    mediator: Any = RecordingMediator(recorder, function)
    run: Any = RecordingInterleaver(recorder, [mediator])
    run.tree, run.recorder = tree, recorder
    recorder.runs.append({"call": "trace", "args": {"list": []}, "kwargs": {"dict": []}})
    order = list(values)
    with torch.inference_mode(False), torch.no_grad(), quiet_fakes, tolist_as_one_call, recorder.mode:
        with recorder.paused():
            fake = lambda leaf: torch.empty(leaf.shape, dtype=leaf.dtype, device=leaf.device)  # noqa: E731
            fakes = pytree.tree_map_only(torch.Tensor, fake, dict(values))
        recorder.running = True
        try:
            with OperatorMode(recorder), recorder, recorder.checked_functions(), captured_output(recorder.prints), run:
                while mediator.waiting is not None:
                    location = mediator.waiting[0]
                    if not order or order.pop(0) != location:
                        raise NotPlainError(f"it did not ask for `{location}` in the step before")
                    run.handle(location, fakes[location])
            recorder.runs, recorder.nodes = recorder.with_blocks()
            recorder._finish_inputs()
            added = {name: made[len(used[name]) :] for name, made in variables.items() if type(made) is list}
            trees = {name: write_tree(made, functools.partial(saved_leaf, recorder, name)) for name, made in added.items() if made}
            job, numbers = pruned(recorder.runs, recorder.nodes, recorder._roots, trees, recorder.tensors)
            fixed = set(recorder.fixed)
            places = {id(fake): (fake, f"v{numbers[node]}", output) for fake, (node, output) in recorder._refs.items() if node in numbers}
        finally:
            vars(recorder).clear()  # breaks reference cycles

    def place(leaf: Any) -> Any:
        if not isinstance(leaf, FakeTensor):
            return leaf
        _, name, output = places[id(leaf)]
        return PartValue(f"{name}.{output}")

    return job, {name: [pytree.tree_map(place, item) for item in made] for name, made in added.items() if made}, fixed


def _check(job: Job) -> None:
    """Raise ``NotPlainError`` if a job has nodes that a step of many requests cannot run."""
    roots, place, site = _roots(job), list[str](), ""
    for number, node in enumerate(job.nodes):
        line = f"line {node.get('line', '?')}"
        if node["do"] not in _KINDS or node.get("name") in DRAWING or "key" in node or "inside" in node or node.get("at"):
            raise NotPlainError(f"{line} has `{node.get('name', node['do'])}`, which a step of many requests cannot do")
        site = node.get("site", site)
        place.append(site)
        if node["do"] == "op" and is_in_place(node["name"]) and place[roots[number]] != site:
            raise NotPlainError(f"{line} edits a value of another location in place")


def _roots(job: Job) -> list[int]:
    """Return, for each node, the number of the node that allocated the memory of its value."""
    roots: list[int] = []
    for number, node in enumerate(job.nodes):
        of = node["do"] == "op" and (is_view(node["name"]) or is_in_place(node["name"]))
        roots.append(roots[node["args"][0]["ref"][0]] if of else number)
    return roots


def _traced(job: Job, added: dict[str, list[Any]], fixed: set[str], loop: Loop, values: Mapping[str, Any]) -> StepProgram:
    used, found = loop.used, list(segments(job))
    parameters = [
        name
        for name, tensor in job.tensors.items()
        if name in used and name not in fixed and tensor.dim() <= 1 and isinstance(used[name], (float, torch.Tensor))
    ]
    samples = [[leaf for leaf in pytree.tree_leaves(values[segment.site]) if isinstance(leaf, torch.Tensor)] for segment in found]
    if any(leaf.shape[:1] != (1,) for leaves in samples for leaf in leaves):
        raise NotPlainError("a value has other rows than those of the request")
    kept = {place.name for place in pytree.tree_leaves(list(added.values())) if isinstance(place, PartValue)}
    roots = _roots(job)
    if len({roots[int(name[1:].partition(".")[0])] for name in kept}) < len(kept):
        raise NotPlainError("it appends values that share memory")
    parts = _Parts(job, found, parameters, values, samples, kept).parts()
    writes: list[dict[str, list[int]]] = [{}, {}]
    for node in job.nodes:
        if node["do"] == "write":
            at = [place for place, leaf in enumerate(pytree.tree_leaves(values[node["site"]])) if isinstance(leaf, torch.Tensor)]
            writes[bool(node.get("in_place"))].setdefault(node["site"], []).append(at.index(node["leaf"]))
    if any(set(writes[0].get(site, ())) & set(places) for site, places in writes[1].items()):
        raise NotPlainError("it edits a value in place and replaces it")
    return StepProgram(loop._replace(used=dict.fromkeys(used)), parts, writes[0], writes[1], parameters, added)


class _Parts(PartsOf):
    """The parts of a body. ``kept`` names the values that they give because the body appends them to lists."""

    def __init__(
        self, job: Job, found: list[Segment], names: list[str], values: Mapping[str, Any], samples: list[list[torch.Tensor]], kept: set[str]
    ) -> None:
        self._forms = [pytree.tree_flatten(values[segment.site]) for segment in found]
        tensors = {key: value.detach() for key, value in job.tensors.items()}
        rows = [[leaf.expand(ROWS, *leaf.shape[1:]) for leaf in leaves] for leaves in samples]
        super().__init__("block", job, found, names, tensors, rows, kept)

    def _row(self, at: int, leaves: Sequence[torch.Tensor], state: dict[str, Any]) -> list[torch.Tensor]:
        known, structure = self._forms[at]
        given = iter(leaves)
        value = pytree.tree_unflatten([next(given).clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in known], structure)
        return [leaf for leaf in pytree.tree_leaves(self._functions[at](value, None, state)) if isinstance(leaf, torch.Tensor)]


# -- the comparison with Python --------------------------------------------------------------------------------------------


def compare(program: StepProgram, used: Mapping[str, Any], watched: Mapping[str, tuple[Any, Any]]) -> None:
    """Raise :class:`.plain.NotPlainError` unless a program does the same as the Python of the block has done in a step.

    ``watched`` has the values before and after the block, by location. ``used`` has the values that the block reads from outside. Its lists
    end with the items that the block has appended.
    """
    state: dict[str, torch.Tensor] = {}
    for location, part in program.parts.items():
        before, left = ([leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)] for value in watched[location])
        given = [torch.as_tensor(used[name], dtype=part.defaults[name].dtype)[None] for name in part.parameters]
        found = part(*[leaf.clone() for leaf in before], *given, *(state[name] for name in part.takes))
        state |= dict(zip(part.gives or (), found[len(left) :], strict=True))
        if not all(map(_close, found, left)):
            raise NotPlainError(f"its program does something else at `{location}`")
    for name, added in program.added.items():
        mine, structure = pytree.tree_flatten(list(added))
        theirs, other = pytree.tree_flatten(used[name][-len(added) :])
        pairs = [(one, real) for one, real in zip(mine, theirs, strict=False) if isinstance(one, PartValue)]
        if other != structure or not all(_close(state[one.name][0], real) for one, real in pairs):
            raise NotPlainError(f"its program appends something else to `{name}`")
        for one, real in pairs:
            one.take_kind(real)


def _close(mine: torch.Tensor, theirs: Any) -> bool:
    """Whether two tensors are equal up to rounding."""
    if not isinstance(theirs, torch.Tensor) or mine.shape != theirs.shape or mine.dtype != theirs.dtype:
        return False
    exact = mine.dtype in (torch.float32, torch.float64) or not mine.is_floating_point()
    scale = float(theirs.abs().amax()) if theirs.numel() else 0.0
    return torch.allclose(mine, theirs, rtol=1e-4 if exact else 2e-2, atol=(1e-5 if exact else 1e-2) * scale, equal_nan=True)
