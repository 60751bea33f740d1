"""The recorder: it turns a block into the nodes of a program.

The block runs as Python in an ordinary trace, whose driver runs the model on fake tensors. Two modes see the calls of the block. A mode for
torch *functions* replaces weights and the block's own tensors, which become constants, by fake tensors. A call that needs a value cuts the
recording, or is refused. Calls on such own tensors alone run at once, for real. A mode for torch *operators* records operators as nodes.

A value that the block gets at a location is a ``read``. If the block edits the value in place, the ``read`` becomes a read of a copy, the
operators edit the copy, and a ``write`` copies it into the memory of the model's tensor when the block leaves the location. A replacement
also becomes a ``write``. The rows of an invoke are selected by ordinary operators. Unneeded nodes are removed at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from ...modeling.generation import Generation
from ...runtime.batched_containers import is_batched_container
from ...runtime.interleaver import Interleaver
from ...runtime.report import Report
from ...runtime.rows.fakes import quiet_fakes
from ...runtime.tracer import InterleavingTracer
from ...tracing.saving import saves
from ..counts import counts
from ..format.errors import NotExpressibleError
from ..format.nodes import Node
from ..format.operators import DRAWING
from ..format.payload import Job
from ..format.sizes import has_unknown_size
from ..format.trees import write_tree
from ..run.descriptions import facts_of
from ..run.draws import drawn_seed, may_draw
from ..run.fake_runs import fake_model_of
from ..run.occurrences import keys_of, lists_in, places_of, structure_of, tensors_at
from .binding import Recorded
from .demands import Cuts, tolist_as_one_call
from .inputs import NamedInputs, input_tree, inputs_of_edits
from .listening import OBSERVERS, OperatorMode, PreparedRun, RecordingInterleaver, RecordingMediator
from .memory import is_unedited
from .printing import captured_output
from .pruning import pruned
from .recorded_calls import NodeRecorder
from .refusals import WITHOUT_SIZE, refused
from .saved_values import held_tensors, saved_trees
from .size_reads import unseen
from .visits import Visit


def record(
    tracer: Any,
    function: Callable[[], None],
    for_other_inputs: bool = False,
    send: Callable[[bytes], bytes] | None = None,
    cuts: int = 0,
) -> Recorded:
    """Run the block of a trace on fake tensors, without weights, and return it as data.

    Args:
        tracer: The tracer of ``model.trace(...)`` or ``model.generate(...)``.
        function: The block of the trace, as ``Backend.__call__`` returns it.
        for_other_inputs: Whether the program is for other inputs, too. If so, the sizes that it depends on are recorded.
        send: Runs a payload and returns its results. It is called when the block needs a value.
        cuts: Maximum number of calls of ``send``.

    Raises:
        NotExpressibleError: If the block needs Python that a program cannot contain, or more values than ``cuts`` allows.
    """
    recorder = Recorder(for_other_inputs, send, cuts)
    try:
        recorder.run_trace(tracer, function)
        return recorder.finished(tracer)
    except BaseException:
        recorder.prints.give_up()
        raise
    finally:
        vars(recorder).clear()  # breaks reference cycles, which would keep the model alive


def record_edits(tracer: Any) -> tuple[Job, dict[str, torch.Tensor], dict[str, str]]:
    """Run the edits of the model of ``tracer`` on fake tensors. Each edit is a block of one program for other inputs.

    Returns:
        The program, the tensors that it takes by name (the user's own objects), and the reasons why other names are not inputs.

    Raises:
        NotExpressibleError: If an edit needs values, or Python that a program cannot contain.
    """
    recorder = Recorder(for_other_inputs=True)
    recorder.run_edits(tracer)
    recorder.prints.check()
    job = pruned(recorder.runs, recorder.nodes, recorder._roots, {}, recorder.tensors)[0]
    return job, recorder.taken_by(job), recorder.fixed


class Recorder(NodeRecorder):
    """Records traces. ``report`` is the report of the latest trace, and ``running`` says whether a trace is being recorded."""

    report: Report

    def __init__(self, for_other_inputs: bool = False, send: Callable[[bytes], bytes] | None = None, cuts: int = 0) -> None:
        super().__init__(for_other_inputs)
        self._common: NamedInputs | None = None  # named inputs of the blocks of a trace, which share their variables
        self._inputs: dict[int, NamedInputs] = {}  # named inputs of each edit, which has its own variables
        self.fixed: dict[str, str] = {}  # reasons why names are not inputs of the program, by name
        self.arguments: tuple[Any, dict[str, Any]] = (), {}  # prepared arguments of the model in the latest run
        self.cuts = Cuts(self, send, cuts)
        self.running = False
        self._seed: int | None = None
        self._blocks: dict[Any, int] = {}
        self._barriers: dict[Any, int] = {}
        self._samples = False
        self._outer: dict[str, Any] = {}  # lists and dicts from outside, by name
        self._holders: list[Any] = []  # all objects from outside that have names
        self._of_other_jobs: dict[int, Any] = {}  # fakes in the user's lists that wait for the results of earlier jobs

    # -- runs ------------------------------------------------------------------------------------------------------

    def run_trace(self, tracer: Any, function: Callable[[], None]) -> None:
        """Run the block of ``tracer`` on fake tensors."""
        if self.runs_again:
            self._common = NamedInputs(tracer.info, self._variables(tracer))
        variables = self._variables(tracer)
        self._holders += variables.values()
        self._outer |= {name: value for name, value in variables.items() if type(value) in (list, dict)}
        waiting = [leaf for leaf in pytree.tree_leaves(self._outer) if isinstance(leaf, FakeTensor)]
        self._of_other_jobs.update({id(leaf): leaf for leaf in waiting if leaf not in self._refs})
        call = called_by(tracer)[0]
        self._for_other_inputs = self._for_other_inputs or call == "generate"  # it may end earlier than on fakes

        def note(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.runs[-1].update(args=input_tree(args, self.tensors), kwargs=input_tree(kwargs, self.tensors))
            self._samples = self._samples or may_draw(tracer._modules, call, kwargs)

        self._run(tracer, note, lambda: InterleavingTracer.execute(tracer, function))

    def run_edits(self, tracer: Any) -> None:
        """Run the edits of the model of ``tracer`` on fake tensors, each as a block."""
        edits = tracer._model._edits
        self._inputs = dict(enumerate(inputs_of_edits(edits)))
        for number, edit in enumerate(edits):
            self._outer.update({f"{name} {number}": value for name, value in edit.variables.items() if type(value) in (list, dict)})
        before = {name: value.copy() for name, value in self._outer.items()}
        try:
            self._run(tracer, lambda args, kwargs: None, tracer.call_edited)
        finally:
            changed = [name for name, value in self._outer.items() if not _are_same(value, before[name])]
            for name in changed:
                held = self._outer[name]
                held.clear()
                held.update(before[name]) if isinstance(held, dict) else held.extend(before[name])
        if changed:
            raise NotExpressibleError(f"An edit changes the list or dict `{changed[0].split()[0]}`, which it finds outside.")
        self._finish_inputs()

    def _run(self, tracer: Any, note: Callable[[Any, Any], None], run: Callable[[], Any]) -> None:
        """Run the model and the blocks of ``tracer`` on fake tensors. ``note`` is called with the prepared arguments of the model.

        They run outside inference mode, because inference tensors do not count their edits.
        """
        call, root = called_by(tracer)
        modules, (_, model, args, kwargs) = tracer._modules, tracer._call
        counts["recordings"] += 1
        root._sync()
        self._blocks = {}
        self._visits = []
        self.handed_over = {}
        self.own.forget()

        def drive(interleaver: Interleaver, args: tuple[Any, ...], kwargs: dict[str, Any], report: Any) -> Any:
            report.mode = "remote"
            self.arguments = args, kwargs
            note(args, kwargs)
            try:
                return self.model.run(modules, interleaver, call, args, kwargs)
            except Exception as error:
                if error is not interleaver.failure:
                    operators.explain(error, "A recording of a program")
                raise

        self.gradients.begin_run()
        self.report = tracer.report
        # A block can need a value before the model is called. The job for that value also stops before the call, so it needs no input.
        self.runs.append({"call": call, "args": {"list": []}, "kwargs": {"dict": []}})
        operators = OperatorMode(self)
        tracer._call = (drive, PreparedRun(model), args, kwargs)
        tracer.make_mediator = lambda *given, **named: RecordingMediator(self, *given, **named)
        tracer.make_interleaver = lambda *given, **named: RecordingInterleaver(self, *given, **named)
        self.running = True
        try:
            with torch.inference_mode(False), torch.no_grad(), quiet_fakes:
                self.model = fake_model_of(modules)
                with tolist_as_one_call, self.mode, operators, self, self.checked_functions(), captured_output(self.prints):
                    run()
        finally:
            del tracer.make_mediator, tracer.make_interleaver
            self.block, self.running = None, False
            self._visits.clear()
            operators.forget()
        self.runs, self.nodes = self.with_blocks()

    def with_blocks(self) -> tuple[list[dict[str, Any]], list[Node]]:
        """Return runs and nodes, with the number of blocks in the latest run. The nodes of observers become its last block."""
        last = len(self._blocks)
        nodes = [{**node, "block": last} if node["block"] == OBSERVERS else node for node in self.nodes]
        return [*self.runs[:-1], {**self.runs[-1], "blocks": last + 1}], nodes

    def seeded(self, job: Job) -> Job:
        """Return ``job``, with the seed of this recording if it draws random numbers."""
        if self._samples or any(node.get("name") in DRAWING for node in job.nodes):
            self._seed = job.seed = drawn_seed() if self._seed is None else self._seed
        return job

    def taken_by(self, job: Job) -> dict[str, torch.Tensor]:
        """Return the tensors of a program by name: the user's own objects, or a copy if the block has edited a tensor in place."""
        found = {name: (*self.originals.get(name, (copied, -1)), copied) for name, copied in job.tensors.items()}
        return {name: tensor if is_unedited(tensor, version, copied) else copied for name, (tensor, version, copied) in found.items()}

    def number_of(self, mediator: Any) -> int:
        """Return the number of a block in its run."""
        return self._blocks.setdefault(mediator, len(self._blocks))

    def finished(self, tracer: Any) -> Recorded:
        """Return the job with the values that the block of ``tracer`` saved."""
        marked = saves.get() or {}
        values = {name: value for name, value in tracer.scope.items() if id(value) in marked}
        for name, value in self._outer.items():  # as in any trace, the user finds the values that the block put there
            leaves = pytree.tree_leaves(value)
            if name not in values and any(isinstance(leaf, FakeTensor) and leaf in self._refs for leaf in leaves):
                values[name] = value
        self.prints.check()
        self._finish_inputs()
        self.cuts.check()
        trees = saved_trees(self, values)
        held = held_tensors(self, trees, [*self._holders, *values.values(), *marked.values()])
        if held:  # under a name that the user has not saved; `Recorded.program` leaves it out
            trees |= saved_trees(self, {max(values, key=len, default="") + "_held": held})
        job, numbers = pruned(self.runs, self.nodes, self._roots, trees, self.tensors, self.cuts.forced, self.cuts.printed)
        if not self.runs_again:  # each run of a program draws new numbers
            self.seeded(job)
        known = {id(fake): (fake, numbers[node], output) for fake, (node, output) in self._refs.items() if node in numbers}
        taken, facts = self.taken_by(job), facts_of(self.model.root)
        return Recorded(job, values, known, tracer.scope, self.fixed, self.arguments, taken, facts, self.model.kept)

    @property
    def inputs(self) -> NamedInputs | None:
        """The named inputs of the block whose turn it is."""
        return None if self.block is None else self._inputs.get(self.block, self._common)

    def _finish_inputs(self) -> None:
        """Rename the constants that are not inputs, so that their names are not identifiers."""
        for inputs in (*self._inputs.values(), *([] if self._common is None else [self._common])):
            inputs.finish()
            self.fixed |= inputs.fixed
        others = {name: f"#{len(self.tensors) + number}" for number, name in enumerate(self.fixed)}
        self.tensors = {others.get(name, name): tensor for name, tensor in self.tensors.items()}
        self.originals = {others.get(name, name): tensor for name, tensor in self.originals.items()}
        for node in self.nodes:
            if node["do"] == "const":
                node["tensor"] = others.get(node["tensor"], node["tensor"])

    @staticmethod
    def _variables(tracer: Any) -> dict[str, Any]:
        """Return the outside variables that the block of ``tracer`` uses, by name."""
        used = tracer.module_globals
        names = {name: used[name] for name in tracer.info.looked_up if name in used}
        return {**names, **dict(tracer.scope.items())}

    # -- events of a run -------------------------------------------------------------------------------------------

    @unseen
    def begin_visit(self, mediator: Any, site: str, at: int, value: Any) -> Visit:
        """Record that a block gets a value at a location. Return the visit, for :meth:`end_visit`; its ``given`` is for the block."""
        structure, loop = structure_of(value), bool(getattr(mediator, "loops", 0))
        given, own = self._own_objects(value)
        found = places_of(given)
        self.moves += 1
        places, leaves = [place for place, _ in found], [leaf for _, leaf in found]
        visit = Visit(self.block, site, at, loop, structure, value, given, own, places, leaves)
        if self.runs_again:
            visit.keys = keys_of(value)
            parts: dict[str | None, Any] = {key: value[key] for key, _ in visit.keys} or {None: value}
            visit.lists = {key: lists for key, part in parts.items() if (lists := lists_in(part))}
        for place, leaf in enumerate(visit.leaves):
            if not isinstance(leaf, FakeTensor) or any(leaf is other for other in visit.leaves[:place]):
                continue
            number = visit.reads[place] = self.emit("read", **visit.place(place))
            self._refs[leaf] = (number, 0)
            self.edits.note_read(number, own.get(id(leaf), leaf))
        self._visits.append(visit)
        return visit

    def _own_objects(self, value: Any) -> tuple[Any, dict[int, torch.Tensor]]:
        """Return ``value`` with new objects in place of the tensors that have a node, and these tensors by ``id`` of the new object.

        In the model that is recorded, the values at two locations can be one tensor. In a run of the program, another block may replace
        the second one. So each object of the block stands for the value of one visit.
        """
        leaves = pytree.tree_leaves(value, is_leaf=is_batched_container)
        known = [leaf for leaf in leaves if isinstance(leaf, FakeTensor) and leaf in self._refs]
        if not known:
            return value, {}
        with torch._C.DisableTorchFunction():
            objects = {id(leaf): torch.ops.aten.alias.default(leaf) for leaf in known}
        given = pytree.tree_map(lambda leaf: objects.get(id(leaf), leaf), value, is_leaf=is_batched_container)
        return given, {id(objects[id(leaf)]): leaf for leaf in known}

    @unseen
    def end_visit(self, visit: Visit, left: Any) -> Any:
        """Record the value that a block leaves at a location. Return it as the model gets it."""
        self.moves += 1
        self._visits.remove(visit)
        leaves = tensors_at(left)
        if len(leaves) != len(visit.leaves) or structure_of(left) != visit.structure:
            raise refused(
                f"The replacement of `{visit.site}` has another structure than the model's value there. Replace a tuple by a tuple, "
                "a dict by a dict with its keys."
            )
        self._write_edits(visit)
        for number, (old, new) in enumerate(zip(visit.leaves, leaves, strict=True)):
            if new is old:
                continue
            if not (isinstance(new, torch.Tensor) and isinstance(old, torch.Tensor)):
                if type(new) is type(old) and new == old:
                    continue
                raise refused(f"The replacement of `{visit.site}` replaces a value that is not a tensor, or a tensor by another object.")
            value = self.reference(self.substitute(self._given(new)))
            leaf, inside = visit.places[number]
            if inside is not None:
                kind = type(pytree.tree_leaves(left, is_leaf=is_batched_container)[leaf]).__name__
                raise refused(
                    f"A tensor inside an object of type {kind} at `{visit.site}` is replaced; programs can only replace tensors in tuples, "
                    "lists and dicts. Edit it in place, as in `tensor[:] = new`."
                )
            self.emit("write", **visit.place(number), value=value)
        self.edits.end_visit()
        if visit.barrier is not None:
            self.emit("barrier", **visit.barrier)
        return visit.for_model(left)

    def _write_edits(self, visit: Visit) -> None:
        """Record that the block's in-place edits of tensors from a location are written back to the model's tensors."""
        for leaf, number in visit.reads.items():
            if number in visit.edited:
                self.emit("write", **visit.place(leaf), value={"ref": [number, 0]}, in_place=True)

    @unseen
    def stop(self) -> None:
        """Record that the current block ends the run."""
        self.emit("stop")

    @unseen
    def refuse_unknown_sizes(self, location: str, value: Any) -> None:
        """Refuse a replacement at ``location`` if its size depends on values."""
        if any(isinstance(leaf, torch.Tensor) and has_unknown_size(leaf) for leaf in pytree.tree_leaves(value)):
            raise refused(f"The replacement of `{location}` has a size that depends on values. {WITHOUT_SIZE}")

    @unseen
    def skip(self, site: str, at: int, value: Any, loop: bool) -> None:
        """Record that a module is skipped."""
        for leaf in pytree.tree_leaves(value):
            self._given(leaf)
        tree = self._tree(value, "A module cannot be skipped with a {}: use tensors, in tuples or dicts.")
        self.emit("skip", site=site, at=at, value=tree, **({"loop": True} if loop else {}))

    def _given(self, value: Any) -> Any:
        """Return a value that the block gives to the model, or refuse it. If it is an own tensor of the block, forbid later edits of it."""
        if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor) and id(value) not in self.model.weights:
            self.handed_over[value.untyped_storage()._cdata] = value
        if isinstance(value, torch.Tensor) and has_unknown_size(value):
            raise refused(f"The model cannot continue with a value whose size depends on values. {WITHOUT_SIZE}")
        return value

    def _tree(self, value: Any, refusal: str) -> Any:
        """Return the tree of nested tensors. For an object of another type, raise ``refusal`` with the name of the type."""

        def leaf(item: Any) -> Any:
            if isinstance(item, torch.Tensor):
                return self.reference(self.substitute(item))
            raise refused(refusal.format(type(item).__name__))

        return write_tree(value, leaf)

    def barrier(self, barrier: Any, participants: int, waits: bool) -> None:
        """Record that a block is at a barrier. If it ``waits`` there, its visit ends, and its edits must come before."""
        fields = {"id": self._barriers.setdefault(barrier, len(self._barriers)), "of": participants}
        visit = next((visit for visit in self._visits if visit.block == self.block), None)
        if waits and visit is not None:
            visit.barrier = fields
        else:
            self.emit("barrier", **fields)

    @unseen
    def apply(self, path: str, module: torch.nn.Module, args: Any, kwargs: Any, hook: bool) -> Any:
        """Record that the block calls a module of the model. Return its result on fake tensors."""
        if path not in self.model.by_path or hook:
            raise refused(f"`{path}` is called with `hook=True`, or was not a module of the original model. Neither can be sent.")
        args, kwargs = (pytree.tree_map(self._argument, part) for part in (args, kwargs))
        refusal = f"`{path}` is given a {{}}, which cannot be sent."
        trees = {"args": self._tree(list(args), refusal), "kwargs": self._tree(dict(kwargs), refusal)}
        try:
            result, wrote = self.model.apply(path, args, kwargs)
        except RuntimeError as error:
            why = self.why_size(error, path)
            if not why:
                raise
            raise refused(why) from error
        if wrote:
            raise refused(
                f"`{path}` writes to its arguments or to its buffers, so it cannot be applied. Use a function that does not, such as "
                "`torch.relu`."
            )
        number = self.emit("apply", module=path, **trees)
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        given = {tensor.untyped_storage()._cdata for tensor in tensors} | self.model.storages()
        for output, tensor in enumerate(tensors_at(result)):
            if isinstance(tensor, FakeTensor):
                if tensor not in self._refs:
                    self._refs[tensor] = (number, output)
                if tensor.untyped_storage()._cdata in given:
                    self.nodes[number]["shares"] = True
        return result


def _are_same(one: Any, other: Any) -> bool:
    """Whether two lists or dicts contain identical objects."""
    ones, others = ((list(item.items()) if isinstance(item, dict) else list(enumerate(item))) for item in (one, other))
    return len(ones) == len(others) and all(a == c and b is d for (a, b), (c, d) in zip(ones, others, strict=True))


def called_by(tracer: Any) -> tuple[str, Any]:
    """Return how a trace calls the model (``"trace"`` or ``"generate"``), and the model."""
    model = tracer._call[1]
    if tracer._scan or tracer._validate:
        raise NotExpressibleError("`scan=` and `validate=` are for traces that run here. Programs are always checked.")
    if isinstance(model, Generation):
        call, root = "generate", model._model
    elif hasattr(model, "_module"):
        call, root = "trace", model
    else:
        raise refused(
            "Only `model.trace(...)` and `model.generate(...)` can be sent: a function or "
            "another method of the model is Python of yours."
        )
    return call, root
