"""Edits inside the user's own ``torch.compile``: the driver that walks dynamo's symbolic execution.

Where a user compiles a function that calls an edited model, dynamo has to trace model and edits into one graph. It executes
Python symbolically, one frame inside the other, and knows nothing of greenlets, through which a block waits for the model.
But dynamo is itself a Python program. So the *symbolic execution* of a block runs in the greenlet of a mediator: when the
block asks for a location, that greenlet is left, dynamo goes on with the forward pass of the model, and at the location the
block is given what dynamo knows of the value there, a ``VariableTracker``. Interleaver and mediators are those of every
other run, and their values are variables of dynamo.

Everything else is dynamo's: what a block reads of the user's objects is guarded, tensors among it are inputs of the graph, so
new values do not recompile and a changed list of edits does, and an effect on a Python object happens after the graph has run. What dynamo
cannot trace is a graph break around the call of the model, which then runs eagerly, or an error with ``fullgraph=True``.

Only :func:`call_edited` and the look-up of the active run are foreign to dynamo; they are registered with it by their identity.
Modules are intercepted at dynamo's variable for them, for the time of such a call: nothing is put on the modules, so no guard
mentions it.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from .. import compat
from ..envoy.source import OperationEnvoy, Source, source_of
from ..runtime.controls import RunControls
from ..runtime.editing import Edit
from ..runtime.errors import ReplacementShapeError
from ..runtime.interleaver import active_interleaver
from ..runtime.iteration import await_step, begin_loop, end_loop, keep_pace, point_at
from ..runtime.mediator import Mediator
from ..runtime.modules.interception import intercepted
from ..runtime.modules.listing import SourceError
from ..runtime.modules.operations import Operations, forward_of, layers_of
from ..runtime.modules.tree import ModuleTree
from ..runtime.tracer import open_mentioned
from ..runtime.uncompiled import leave_frame
from ..shared_changes import replaced
from ..tracing.block import SCOPE_NAME, TRACER_NAME, is_bound
from ..tracing.body import SAVE_NAME
from .dynamo_variables import as_dict, constant, guard_closures, tuple_of, unsupported
from .torch_compat import (
    AttributeMutationNew,
    AttrSource,
    DictGetItemSource,
    GuardBuilder,
    TracingContext,
    ValueMutationNew,
    VariableBuilder,
    VariableTracker,
    exc,
    guard_to_detect_forward_monkeypatching,
    install_guard,
    variables,
)

if TYPE_CHECKING:
    from ..modeling.base import NNsight


def call_edited(model: NNsight, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call ``model`` with its edits. Only dynamo comes here, and traces this as :class:`_CallEdited`."""
    return model._call_edited(None, args, kwargs)


def offered_call(
    input_location: str, output_location: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Make the call of an operation. Dynamo traces what it calls as :class:`_OfferCall`."""
    return offer_call(input_location, call, args, kwargs)


def offer_call(input_location: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make a call, and offer its input and output to the run that dynamo traces."""
    raise AssertionError("only dynamo calls this")


class _TracedRun(compat.Interleaver):
    """A run whose values are variables of dynamo.

    Args:
        mediators: The blocks.
        tx: The frame of dynamo that makes the call.
        tree: The modules of the model, as a variable.
    """

    __slots__ = ("tree_variable", "tx")

    def __init__(self, mediators: Iterable[Mediator], tx: Any, tree: VariableTracker) -> None:
        super().__init__(mediators)
        self.tx = tx
        self.tree_variable = tree
        self.offer = _offer
        self.check_replacement = _check_replacement


def _offer(run: Any, location: str, value: Any) -> Any:
    """Offer what an intercepted call has: the variable it returns, or a tuple and a dict of variables, its arguments."""
    if not location.endswith(".input"):
        return run.handle(location, value)
    args, kwargs = value
    named = {constant(name): argument for name, argument in kwargs.items()}
    pair = tuple_of([tuple_of(list(args)), variables.ConstDictVariable(named, mutation_type=ValueMutationNew())])
    positional, by_name = run.handle(location, pair).unpack_var_sequence(run.tx)
    return tuple(positional.unpack_var_sequence(run.tx)), as_dict(by_name)


def _check_replacement(location: str, old: VariableTracker, new: VariableTracker) -> None:
    """Refuse what would not mean the same, as :class:`~nnsight.runtime.replacing.Replacements` does."""
    if location.endswith(".input"):
        parts = new.items if isinstance(new, variables.BaseListVariable) and new.python_type() is tuple else []
        if [part.python_type() for part in parts] not in ([tuple, dict], [list, dict]):
            raise ReplacementShapeError(f"The replacement of `{location}s` is not a pair of a tuple and a dict.")
    elif isinstance(new, variables.TensorVariable) and issubclass(old.python_type(), (tuple, list, dict)):
        raise ReplacementShapeError(
            f"The replacement of `{location}` has another structure than the model's value there: a tensor instead of a "
            f"{old.python_type().__name__}. Assign a {old.python_type().__name__}, or edit its tensors in place."
        )


class _TracedMediator(compat.Mediator):
    """A block that dynamo executes symbolically, in a greenlet.

    Dynamo keeps a stack of the frames it is in. The frames of a block are taken off it while the model runs, and put
    back when it is the block's turn. Grad mode, of which each side has its own, is switched in the graph as well.

    Args:
        tx: The frame of dynamo that makes the call.
        function: The block, as a variable.
        name: Tells the blocks of a run apart.
    """

    __slots__ = ("_frames", "_tx")

    def __init__(self, tx: Any, function: VariableTracker, name: str) -> None:
        super().__init__(lambda: tx.inline_user_function_return(function, [], {}), name=name)
        self._tx = tx
        self._frames: tuple[list[Any], list[Any], dict[str, Any], bool] | None = None

    def _turn(self, switch: Callable[..., Any], *arguments: Any) -> None:
        before = torch.is_grad_enabled()
        if self._sides.grad not in (None, before):
            self._set_grad_enabled(bool(self._sides.grad))
        with self._own_frames():
            super()._turn(switch, *arguments)
        if self._sides.grad != before:
            self._set_grad_enabled(before)

    def leave_loop(self) -> None:
        raise unsupported("An edit loops over more steps than the call of the model has: bound it, as in `tracer.iter[:1]`.")

    def cancel(self) -> None:
        with self._own_frames():
            super().cancel()

    def _set_grad_enabled(self, enabled: bool) -> None:
        torch._C._set_grad_enabled(enabled)
        self._tx.output.create_node("call_function", torch._C._set_grad_enabled, (enabled,), {})

    @contextlib.contextmanager
    def _own_frames(self) -> Iterator[None]:
        """Exchange dynamo's frames for those of the block."""
        outer = self._take_frames()
        if self._frames is not None:
            self._put_frames(self._frames)
        try:
            yield
        finally:
            self._frames = self._take_frames()
            self._put_frames(outer)

    def _take_frames(self) -> tuple[list[Any], list[Any], dict[str, Any], bool]:
        """Return the frames that dynamo is in, and where in the innermost it is."""
        context = TracingContext.get()
        place = {name: value for name, value in vars(context).items() if name.startswith("loc_in_frame")}
        active = self._tx.is_child_tracer_active
        return [*self._tx.output._current_tx], [*context.frame_summary_stack], place, active

    def _put_frames(self, frames: tuple[list[Any], list[Any], dict[str, Any], bool]) -> None:
        context = TracingContext.get()
        self._tx.output._current_tx[:], context.frame_summary_stack[:], place, self._tx.is_child_tracer_active = frames
        vars(context).update(place)


class _CallEdited(VariableTracker):
    """:func:`call_edited`, as dynamo sees it."""

    def call_function(self, tx: Any, args: list[VariableTracker], kwargs: dict[str, VariableTracker]) -> VariableTracker:
        positional, named = args[1:]
        root: Any = args[0].realize()
        if active_interleaver() is not None:
            raise unsupported("A model was called in an edit, inside a run of another model, with edits of its own.")
        tree: Any = root.var_getattr(tx, "_tree").realize()
        tree.value.refresh()
        for edit in root.value._edits:
            open_mentioned(tree.value.open_mentioned, edit.block, edit.scope, edit.module_globals)
        edits = root.var_getattr(tx, "_edits").unpack_var_sequence(tx)
        blocks = [_block_of(tx, edit.realize(), root) for edit in edits]
        mediators = [_TracedMediator(tx, block, f"edit {number}") for number, block in enumerate(blocks)]
        module = root.var_getattr(tx, "_module")
        run = _TracedRun(mediators, tx, tree)
        try:
            with _intercepting(run, tree.value), run:
                output = module.call_function(tx, positional.unpack_var_sequence(tx), as_dict(named))
                if run.failure is not None:  # the model caught what a block raised
                    raise run.failure
                run.handle("result", output)
                run.finish()
                return output
            raise unsupported("An edit ended the run, so the call of the model has no output to return.")
        except (ValueError, TypeError) as error:
            raise unsupported(f"{type(error).__name__}: {error}") from error
        finally:
            run.failure = None


class _Block(variables.NestedUserFunctionVariable):
    """The function of a block. Dynamo must not look for a Python function like it: some variables have no value yet."""

    def get_function(self, _converting: set[int] | None = None) -> types.FunctionType:
        raise NotImplementedError


#: What an edit with two names behind ``as`` calls its tracer. It has no state.
_CONTROLS = RunControls()


def _block_of(tx: Any, edit: Any, root: VariableTracker) -> VariableTracker:
    """Return the block of an edit as a function, on variables of its own, that has the values of the definition."""
    value: Edit = edit.value
    source = edit.source
    install_guard(source.make_guard(GuardBuilder.ID_MATCH))
    bound: VariableTracker = root
    if isinstance(value.block.target, tuple):
        controls = AttrSource(tx.import_source(__name__), "_CONTROLS")
        bound = tuple_of([VariableTracker.build(tx, _CONTROLS, controls), root])
    own = {TRACER_NAME: bound, SCOPE_NAME: constant(None), SAVE_NAME: VariableTracker.build(tx, _unchanged)}
    cells_source = AttrSource(AttrSource(source, "scope"), "cells")
    closure = []
    function = value.function()
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        made = tx.output.side_effects.track_cell_new()
        closure.append(made)
        if name in value.roots:
            content = root
        elif name in own:
            content = own[name]
        elif name not in value.scope.cells:
            content = VariableTracker.build(tx, cell.cell_contents)
        elif is_bound(cell):
            content_source = AttrSource(DictGetItemSource(cells_source, name), "cell_contents")
            content = VariableTracker.build(tx, cell.cell_contents, content_source)
        else:
            continue
        tx.output.side_effects.store_cell(made, content)
    return _Block(
        constant(function.__name__),
        VariableTracker.build(tx, function.__code__),
        function.__globals__,
        None,
        None,
        tuple_of(closure),
    )


def _unchanged(value: Any) -> Any:
    """Do what ``.save()`` does in an edit: names of an edit do not come home."""
    return value


class _Handle(VariableTracker):
    """An object of the package that blocks work with, as dynamo sees it.

    Args:
        value: The object.
    """

    def __init__(self, value: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.value = value

    def var_getattr(self, tx: Any, name: str) -> VariableTracker:
        found = getattr(self.value, name)
        if name == "interleaver":
            return _Handle(found)
        if name == "current":
            return constant(None) if found is None else _Handle(found)
        if name == "tree":
            return self.value.tree_variable
        if callable(found):
            return variables.GetAttrVariable(self, name)
        return constant(found)

    def call_method(
        self, tx: Any, name: str, args: list[VariableTracker], kwargs: dict[str, VariableTracker]
    ) -> VariableTracker:
        plain = [argument.as_python_constant() if argument.is_python_constant() else argument for argument in args]
        if name == "on_leave":
            plain = [functools.partial(args[0].call_function, tx, [], {})]
        elif name in ("swap", "skip"):
            plain[1] = args[1].realize()
        try:
            found = getattr(self.value, name)(*plain)
        except (ValueError, TypeError) as error:
            raise unsupported(f"{type(error).__name__}: {error}") from error
        return found if isinstance(found, VariableTracker) else constant(found)


class _ActiveRun(VariableTracker):
    """The look-up of the active run, as dynamo sees it: only a run that dynamo traces is active for it."""

    def call_function(self, tx: Any, args: list[VariableTracker], kwargs: dict[str, VariableTracker]) -> VariableTracker:
        run = active_interleaver()
        return _Handle(run) if isinstance(run, _TracedRun) else constant(None)


class _HostFunction(VariableTracker):
    """A function on objects of the package that dynamo calls at once instead of tracing it.

    Args:
        function: The function.
    """

    def __init__(self, function: Callable[..., Any], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.function = function

    def call_function(self, tx: Any, args: list[VariableTracker], kwargs: dict[str, VariableTracker]) -> VariableTracker:
        given = [argument.value if isinstance(argument, _Handle) else argument.as_python_constant() for argument in args]
        return constant(self.function(*given))


class _LeaveFrame(VariableTracker):
    """:func:`leave_frame`, as dynamo sees it."""

    def call_function(self, tx: Any, args: list[VariableTracker], kwargs: dict[str, VariableTracker]) -> VariableTracker:
        what = args[0].as_python_constant()
        if tx.one_graph or tx.error_on_graph_break:
            raise unsupported(
                f"`{what}` cannot be part of a graph of torch.compile, and fullgraph=True asks for one graph. Its block runs "
                "beside the model. Keep the block with `model.edit()` and call the edited model in the compiled function; or leave "
                "the trace outside of it and compile the model, as in `model.compile()`; or compile without fullgraph=True."
            )
        raise exc.SkipFrame(f"`{what}` has a block, which is found by its frame and runs beside a model")


_call_module = variables.UnspecializedNNModuleVariable.call_function


@contextlib.contextmanager
def _intercepting(run: _TracedRun, tree: ModuleTree) -> Iterator[None]:
    """Pass the calls of modules that dynamo traces through ``run``. Dynamo holds a lock meanwhile."""
    operations = tree.operations(offered_call)

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        path = tree.paths.get(self.value)
        if path is None:
            return _call_module(self, tx, args, kwargs)

        def call(*args: Any, **kwargs: Any) -> Any:
            if path in operations.opened:
                return _call_with_operations(tx, self, operations, path, args, kwargs)
            return _call_module(self, tx, list(args), kwargs)

        return intercepted(path, None)(call, *args, **kwargs)

    with replaced(variables.UnspecializedNNModuleVariable, "call_function", call_function):
        yield


def _call_with_operations(
    tx: Any, module: Any, operations: Operations, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> VariableTracker:
    """Call a module whose operations are watched."""
    value = module.value
    layers = layers_of(forward_of(value)[1], path)
    hooked = value._forward_hooks or value._forward_pre_hooks or value._backward_hooks or value._backward_pre_hooks
    if hooked or "forward" in value.__dict__:
        raise unsupported(f"`{path}.source`: a module with hooks, or with a forward of its own, cannot be part of a graph.")
    guard_to_detect_forward_monkeypatching(module.source, value)
    rewritten = operations.intercept(path, layers[0])
    guard_closures(tx, layers, module.get_source_by_walking_mro(tx, "forward"))
    return variables.UserFunctionVariable(rewritten).call_function(tx, [module, *args], kwargs)


class _OfferCall(VariableTracker):
    """:func:`offer_call`, as dynamo sees it."""

    def call_function(self, tx: Any, args: list[VariableTracker], kwargs: dict[str, VariableTracker]) -> VariableTracker:
        location, function, positional, named = args

        def call(*args: Any, **kwargs: Any) -> Any:
            return function.call_function(tx, list(args), kwargs)

        path = location.as_python_constant().removesuffix(".input")
        return intercepted(path, None)(call, *positional.unpack_var_sequence(tx), **as_dict(named))


class _SourceOf(VariableTracker):
    """:func:`~nnsight.envoy.source.source_of`, as dynamo sees it: looking into functions is done beside the symbolic execution."""

    def call_function(self, tx: Any, args: list[VariableTracker], kwargs: dict[str, VariableTracker]) -> VariableTracker:
        envoy: Any = args[0].realize()
        return _SourceVariable(source_of(envoy.value))


class _SourceVariable(VariableTracker):
    """The operations of a function, as dynamo sees them.

    Args:
        value: The operations.
    """

    def __init__(self, value: Source, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.value = value

    def var_getattr(self, tx: Any, name: str) -> VariableTracker:
        try:
            operation = getattr(self.value, name)
        except (AttributeError, SourceError) as error:
            raise unsupported(f"{type(error).__name__}: {error}") from error
        kind: Any = AttrSource(tx.import_source(OperationEnvoy.__module__), OperationEnvoy.__qualname__)
        return variables.UserDefinedObjectVariable(operation, cls_source=kind, mutation_type=AttributeMutationNew())


VariableBuilder._id_dispatch()[id(active_interleaver)] = lambda builder, value: _ActiveRun()
VariableBuilder._id_dispatch()[id(offer_call)] = lambda builder, value: _OfferCall()
VariableBuilder._id_dispatch()[id(source_of)] = lambda builder, value: _SourceOf()
VariableBuilder._id_dispatch()[id(leave_frame)] = lambda builder, value: _LeaveFrame()
VariableBuilder._id_dispatch()[id(call_edited)] = lambda builder, value: _CallEdited()
for called in (begin_loop, point_at, await_step, keep_pace, end_loop):
    VariableBuilder._id_dispatch()[id(called)] = lambda builder, value: _HostFunction(value)
