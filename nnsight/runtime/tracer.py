"""A trace: one run of a model together with captured blocks.

The block of the trace starts before the model, and runs to its first request or to its end. If it has opened invokes by then, their blocks
join the run, each on the rows of its own input, and their inputs are joined to the batch.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Protocol

import torch

from ..tracing import Backend, Block, Scope, Tracer, save
from ..tracing.saving import saves
from . import gradients  # noqa: F401 - the import lets blocks read `x.grad`
from .cache import Cache, paths_to_cache
from .controls import RunControls
from .editing import Edit
from .errors import EarlyStopException, ReplacementShapeError
from .interleaver import Interleaver
from .invoker import Barrier, Invoke, Invoker, explain_unbound, join_inputs
from .iteration import running_mediator
from .mediator import Mediator
from .modules.eproperty import eproperty
from .modules.mentions import Chains, mentioned_chains
from .modules.tree import ModuleTree
from .probing import find_batch_dims
from .replacing import Replacements
from .report import Report, trace_starts
from .rows.batch_axes import BatchDims
from .rows.batching import BatchGroup

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Prepared = tuple[Arguments, Mapping[Invoke, BatchGroup]]


#: Cache of the operations that each block mentions.
_mentioned: weakref.WeakKeyDictionary[Block, Chains] = weakref.WeakKeyDictionary()


def open_mentioned(
    open_operations: Callable[[Chains], None], block: Block, scope: Scope, module_globals: dict[str, Any]
) -> None:
    """Let runs stop at the operations that a block mentions after ``.source``, by a call of ``open_operations`` of the model's tree."""
    chains = _mentioned.get(block)
    if chains is None:
        variables = {**module_globals, **dict(scope.items())}
        chains = _mentioned[block] = mentioned_chains(block.code, variables.get)
    if chains:
        open_operations(chains)


class Driver(Protocol):
    """Calls a model once, and ``handle`` of the active run at each location."""

    def __call__(
        self, interleaver: Interleaver, args: tuple[Any, ...], kwargs: dict[str, Any], report: Report
    ) -> Any: ...


class Batchable(Protocol):
    """The methods of a model that prepare a trace: one turns user input into arguments, one joins inputs to a batch."""

    def _prepare_input(self, *args: Any, **kwargs: Any) -> Arguments: ...

    def _batch(self, batched: Arguments | None, *args: Any, **kwargs: Any) -> tuple[Arguments, int]: ...


class Named(Protocol):
    """The attributes of a model that a trace uses: its edits, its modules, and the aliases of their paths."""

    _edits: list[Edit]

    @property
    def _tree(self) -> ModuleTree: ...

    def _alias_paths(self) -> Mapping[str, str]: ...


class InterleavingTracer(RunControls, Tracer):
    """Runs a model once, together with blocks that read and edit its internals.

    Args:
        driver: Calls the model.
        model: Prepares and joins inputs.
        args: The positional input of the trace.
        kwargs: The input by name. With invokes, the arguments of the model's call that all invokes share.
        backend: Runs the block; by default in this process.
        named: The model, with its modules, names and edits.
    """

    path = ""
    #: The location of the result inside the graph, for blocks that may be replayed; see :class:`~nnsight.runtime.interleaver.Interleaver`.
    output_location: str | None = None
    #: Whether each step of a loop without an end waits until a location of the step occurs, because the step may not exist.
    awaits_steps = True
    runs_once = "This tracer was entered before, and is one run. Call `trace(...)` again for another run."

    #: Factories of the blocks and the run. `nnsight.compat` and the recorder of programs replace them.
    make_mediator: Callable[..., Mediator] = Mediator
    make_interleaver: Callable[..., Interleaver] = Interleaver

    def __init__(
        self,
        driver: Driver,
        model: Batchable,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        backend: Backend | None = None,
        named: Named | None = None,
    ) -> None:
        super().__init__(backend)
        self.report = Report()
        #: The location that a run of several steps, such as a generation, passes at the end of each step; None for other runs.
        self.pace: str | None = getattr(type(model), "pace", None)
        #: A location that such a run passes once more often than it has steps.
        self.surplus: str | None = getattr(type(model), "surplus", None)
        self._model = named
        self._call: tuple[Driver, Batchable, tuple[Any, ...], dict[str, Any]] | None = (driver, model, args, kwargs)
        self._invokes: list[Invoke] | None = None
        self.invoked: list[Block] = []  # the blocks of its invokes, in the order in which they were opened
        self._at_end: list[Callable[[], None]] = []

    # -- the user's side -------------------------------------------------------------------------------------------

    @eproperty(description="what the traced function returned", iterate=False)
    def result(self) -> Any:
        """The value that the traced call returns. A block that reads it waits until the model has finished."""

    def invoke(self, *args: Any, **kwargs: Any) -> Invoker:
        """Open a block with its own input or, without arguments, a block over the whole batch.

        Raises:
            ValueError: If the model is already running, as in a trace that was given input, or if the trace has ended.
        """
        if self._call is None:
            raise ValueError("Cannot invoke: this trace has ended. Open invokes inside its block.")
        if self._invokes is None:
            raise ValueError(
                "Cannot invoke during an active model execution, the model is already running: open invokes side by side in the "
                "block of a trace that was given no input, before anything in this block reads a value of the model."
            )
        return Invoker(self, args, kwargs)

    def barrier(self, participants: int) -> Barrier:
        """Return a function that ``participants`` invokes (an int of at least 1) call to wait for each other."""
        return Barrier(self, participants)

    def cache(
        self,
        modules: Iterable[Any] | None = None,
        *,
        device: torch.device | str | None = "cpu",
        dtype: torch.dtype | None = None,
        detach: bool = True,
        include_output: bool = True,
        include_inputs: bool = False,
        non_blocking: bool = False,
    ) -> Cache:
        """Keep copies of the outputs, and the inputs, of modules from here on. The cache is saved without ``.save()``.

        Call it before the block reads or modifies a value, so that the cache misses nothing.

        Args:
            modules: Envoys or paths of the modules; by default all modules.
            device: Device of the copies; ``None`` for the device of each tensor.
            dtype: Dtype of the copies of floating point tensors; ``None`` for the dtype of each tensor.
            detach: Whether copies are detached from autograd.
            include_output: Whether to keep the modules' outputs.
            include_inputs: Whether to keep all arguments of the modules.
            non_blocking: As for :meth:`torch.Tensor.to`.

        Raises:
            TypeError: If ``modules`` is no list of envoys and paths, or ``dtype`` is not a torch dtype.
            ValueError: Outside a block, after a read or an edit in the block, for a module that is not part of the model, or if neither
                outputs nor inputs are to be kept.
        """
        mediator, model = running_mediator("tracer.cache()"), self._model
        if not (include_output or include_inputs):
            raise ValueError("tracer.cache() was asked to keep neither outputs nor inputs. Leave out `include_output=False`.")
        if mediator.visited is not None:
            raise ValueError(
                f"tracer.cache() was called after the block had stopped at `{mediator.last_visited}`, so it could miss modules that have "
                "run. Call it before reading or modifying a value of the model."
            )
        if model is None:
            raise ValueError("tracer.cache() was called on a tracer whose trace has ended: use the one of this block.")
        paths = paths_to_cache(modules, list(model._tree.names()), model._alias_paths())
        keys = ["input"] * include_inputs + ["output"] * include_output
        made = Cache(paths, model._alias_paths(), device, dtype, detach, keys, non_blocking)
        assert mediator.interleaver is not None
        made.attach(mediator.interleaver, mediator)
        return save(made)

    # -- the run -----------------------------------------------------------------------------------------------------

    @property
    def opens_invokes(self) -> bool:
        """Whether the block of the trace is still opening invokes, before the model runs."""
        return self._invokes is not None

    def add_invoke(self, invoke: Invoke) -> None:
        """Add the block of an invoke to the run that is being prepared."""
        assert self._invokes is not None
        self._invokes.append(invoke)
        self.invoked.append(invoke.block)

    def on_end(self, action: Callable[[], None]) -> None:
        """Call ``action`` when the run has ended, before saved names are bound in the user's frame."""
        self._at_end.append(action)

    def execute(self, function: Callable[[], None]) -> Any:
        """Run the model with ``function`` as its block, or with the invokes that ``function`` opens."""
        assert self._call is not None
        driver, model, args, kwargs = self._call
        self.note_start()
        self._invokes = [] if not args else None
        explain = partial(explain_unbound, self.info, self.invoked)
        main = self.make_mediator(function, self.info, "trace", explain=explain)
        self._open_mentioned()
        interleaver = self.make_interleaver([*self._edits(), main], self, on_blocks_done=self._drop_unsaved)
        interleaver.tree = None if self._model is None else self._model._tree
        interleaver.returns, interleaver.output_location = False, self.output_location
        try:
            with interleaver:
                invokes, self._invokes = self._invokes or [], None
                args, kwargs = self._prepare(model, interleaver, invokes, args, kwargs)
                self._run(driver, interleaver, args, kwargs)
        except EarlyStopException:
            pass
        finally:
            interleaver.failure = None  # its traceback would keep the run alive
            for action in self._at_end:
                action()

    def note_start(self) -> None:
        """Write the file and line of the trace to the report when the trace starts; further calls do nothing."""
        if self.info is not None and not self.report.where:
            self.report.where = f"{self.info.filename}:{self.info.line}"
            trace_starts(self.report)

    def call_edited(self, must_run: bool = True) -> Any:
        """Call the model with its edits and no other block, on unprepared arguments; return its output.

        Raises:
            OutOfOrderError: If an edit waits for a location that does not occur; without ``must_run``, only if the call passes one.
            ValueError: If an edit stops the run, so that the model returns no output.
        """
        assert self._call is not None and self._model is not None
        driver, _, args, kwargs = self._call
        self._entered = True
        self._open_mentioned()
        interleaver = self.make_interleaver(self._edits(), self)
        interleaver.tree = self._model._tree
        token = saves.set({})  # an edit may call `save` as in a trace; its names are not bound
        try:
            with interleaver:
                return self._run(driver, interleaver, args, kwargs, must_run)
        except EarlyStopException:  # before the model ran
            pass
        finally:
            interleaver.failure = None
            saves.reset(token)
            self._close()
        raise ValueError(
            "An edit called `tracer.stop()`, so this call of the model has no output to return. Trace the model, as in "
            "`with model.trace(x):`, or leave out the edit with `clear_edits()`."
        )

    def _edits(self) -> list[Mediator]:
        """Return a mediator for each edit of the model."""
        edits = [] if self._model is None else self._model._edits
        made = [self.make_mediator(edit.function(), edit.block, f"edit {number}") for number, edit in enumerate(edits)]
        for edit, mediator in zip(edits, made, strict=True):
            mediator.is_edit = True
            mediator.ends_in_loop = edit.block.step_loop is not None
        return made

    def _open_mentioned(self) -> None:
        """Let the run stop at the operations that its blocks mention after ``.source``."""
        if self._model is None:
            return
        if self.info is not None and self.scope is not None:
            open_mentioned(self._model._tree.open_mentioned, self.info, self.scope, self.module_globals)
        for edit in self._model._edits:
            open_mentioned(self._model._tree.open_mentioned, edit.block, edit.scope, edit.module_globals)

    def _run(self, driver: Driver, interleaver: Interleaver, *arguments: Any) -> Any:
        try:
            return self._run_model(driver, interleaver, *arguments)
        except EarlyStopException:  # `suppress` would make another exception group of one that the block raises
            pass
        interleaver.finish()  # outside of the clause, so that the stop is not the context of its errors
        raise EarlyStopException

    def _run_model(
        self,
        driver: Driver,
        interleaver: Interleaver,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        must_run: bool = True,
    ) -> Any:
        replacements = interleaver.check_replacement = Replacements()
        interleaver.check_skip = replacements.note_skip
        try:
            interleaver.end_if_stopped()
            output = driver(interleaver, args, kwargs, self.report)
        except EarlyStopException:
            raise
        except Exception as error:
            if error is not interleaver.failure:
                if replacements.reshaped and not isinstance(error, ReplacementShapeError):
                    raise ReplacementShapeError("\n".join(replacements.reshaped)) from error
                if replacements.differences:
                    error.add_note("A block may be the cause:\n" + "\n".join(replacements.differences))
            raise
        if interleaver.failure is not None:  # the model caught the error of a block
            raise interleaver.failure
        interleaver.end_if_stopped()  # the model may have caught the stop
        if must_run or interleaver.counts:
            interleaver.handle("result", output)
            interleaver.finish()
        return output

    def _prepare(
        self,
        model: Batchable,
        interleaver: Interleaver,
        invokes: list[Invoke],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Arguments:
        """Return the arguments of the model, and start the invokes."""
        prepared, groups = self._arguments(model, invokes, args, kwargs)
        for number, invoke in enumerate(invokes):
            options = {"publish": invoke.publish, "explain": invoke.explain}
            interleaver.add(self.make_mediator(invoke.function, None, f"invoke {number}", groups.get(invoke), **options))
        return prepared

    def _arguments(self, model: Batchable, invokes: list[Invoke], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Prepared:
        """Return the arguments of the model, and the rows of each invoke."""
        with_input = [invoke for invoke in invokes if invoke.has_input]
        if with_input:
            names: set[str] = getattr(self._model, "_options_of_invokes", set()) & kwargs.keys()
            for invoke in with_input:
                invoke.kwargs = {**invoke.kwargs, **{name: kwargs[name] for name in names}}
            return self._join(model, with_input, {name: value for name, value in kwargs.items() if name not in names})
        if not args and not kwargs:
            raise ValueError(
                "The model did not execute: trace() was given no input, and a trace needs an input. Cannot access values outside "
                "of interleaving: pass an input, as in `model.trace(x)`, or open an invoke with one, `with tracer.invoke(x):`, inside "
                "the block."
            )
        args, kwargs = model._prepare_input(*args, **kwargs)[:2]
        return (args, kwargs), {}

    def _join(self, model: Batchable, invokes: list[Invoke], shared: dict[str, Any]) -> Prepared:
        """Join the inputs of ``invokes`` to one batch; return it with the ``shared`` arguments, and the rows of each invoke."""
        first = invokes[0]
        if len(invokes) == 1:
            args, kwargs = model._prepare_input(*first.args, **first.kwargs)[:2]
            first.note((args, kwargs))
            return (args, {**kwargs, **shared}), {}
        batched, parts, sizes = join_inputs(model, [(invoke.args, invoke.kwargs) for invoke in invokes])
        for invoke, part in zip(invokes, parts, strict=True):
            invoke.note(part)
        batched = (batched[0], {**batched[1], **shared})
        call = getattr(model, "_call_on", None)
        dims = BatchDims() if self._model is None else find_batch_dims(self._model._tree, call, batched, parts, sizes)
        groups: dict[Invoke, BatchGroup] = {}
        start = 0
        for invoke, size in zip(invokes, sizes, strict=True):
            groups[invoke] = BatchGroup(start, size, sum(sizes), dims)
            start += size
        return batched, groups

    def _drop_unsaved(self) -> None:
        if self.scope is not None and self.info is not None and self.owns_scope:
            self.scope.drop_unsaved(self.info.stored.union(self.info.inner))

    def _close(self) -> None:
        super()._close()
        self._call = self._invokes = self._model = None
        self._at_end = []
