"""Edits inside the user's own ``torch.compile``: dynamo traces an edited model and its edits into one graph.

When a user compiles a function that calls an edited model, dynamo has to trace model and edits together. It executes Python
symbolically, one frame inside the other, and does not know greenlets, through which a block waits for the model. But dynamo is itself a
Python program. So the *symbolic execution* of a block runs in the greenlet of a mediator. When the block requests a location, dynamo
leaves that greenlet and continues with the forward pass of the model. At the location the block receives dynamo's description of the
value, a ``VariableTracker``. Interleaver and mediators are the usual ones; only their values are variables of dynamo.

Dynamo does the rest in its usual way. It guards the objects that a block reads, and tensors among them become inputs of the graph. So new
values do not recompile, but a changed list of edits does. Effects on Python objects happen after the graph has run. Code that dynamo
cannot trace is a graph break around the call of the model, which then runs eagerly, or an error with ``fullgraph=True``.

Dynamo cannot trace :func:`call_edited`, the look-up of the active run, or the loops over steps. They are registered with it by identity.
During such a call, modules are intercepted at dynamo's variable for them. Nothing is set on the modules, so no guard mentions it.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from .. import compat
from ..envoy.source import source_of
from ..runtime.controls import RunControls
from ..runtime.editing import Edit
from ..runtime.errors import ReplacementShapeError
from ..runtime.interleaver import active_interleaver
from ..runtime.iteration import await_step, begin_loop, end_loop, keep_pace, point_at
from ..runtime.mediator import Mediator
from ..runtime.modules.interception import intercepted
from ..runtime.modules.tree import ModuleTree
from ..runtime.uncompiled import leave_frame
from ..shared_changes import replaced
from ..tracing.block import SCOPE_NAME, TRACER_NAME, is_bound
from ..tracing.body import SAVE_NAME
from .torch_compat import (
    EXTRA_FUNCTION_ARGUMENTS,
    AttrSource,
    DictGetItemSource,
    GuardBuilder,
    TracingContext,
    ValueMutationNew,
    VariableBuilder,
    VariableTracker,
    attribute_of,
    exc,
    install_guard,
    variables,
)

if TYPE_CHECKING:
    from ..modeling.base import NNsight


def call_edited(model: NNsight, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call ``model`` with its edits. Used only in code that dynamo traces; dynamo sees it as :class:`_CallEdited`."""
    return model._call_edited(None, args, kwargs)


def _constant(value: Any) -> VariableTracker:
    return variables.ConstantVariable.create(value)


def _tuple_of(items: list[VariableTracker]) -> VariableTracker:
    return variables.TupleVariable(items, mutation_type=ValueMutationNew())


def _as_dict(mapping: VariableTracker) -> dict[str, VariableTracker]:
    found: Any = mapping.realize()
    return {key.vt.as_python_constant(): value for key, value in found.items.items()}


def _unsupported(message: str) -> Exception:
    return exc.Unsupported(message)


class _TracedRun(compat.Interleaver):
    """A run whose values are variables of dynamo. ``tx`` is dynamo's frame in which the model is called."""

    __slots__ = ("tree_variable", "tx")

    def __init__(self, mediators: Iterable[Mediator], tx: Any, tree: VariableTracker) -> None:
        super().__init__(mediators)
        self.tx = tx
        self.tree_variable = tree
        self.offer = _offer
        self.check_replacement = _check_replacement


def _offer(run: Any, location: str, value: Any) -> Any:
    """Offer a value of an intercepted call to ``run``: its output, a variable, or its arguments, a tuple and a dict of variables."""
    if not location.endswith(".input"):
        return run.handle(location, value)
    args, kwargs = value
    named = {_constant(name): argument for name, argument in kwargs.items()}
    pair = _tuple_of([_tuple_of(list(args)), variables.ConstDictVariable(named, mutation_type=ValueMutationNew())])
    positional, by_name = run.handle(location, pair).unpack_var_sequence(run.tx)
    return tuple(positional.unpack_var_sequence(run.tx)), _as_dict(by_name)


def _check_replacement(location: str, old: VariableTracker, new: VariableTracker) -> None:
    """Refuse a replacement of another structure, as :class:`~nnsight.runtime.replacing.Replacements` does."""
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

    Dynamo keeps a stack of its current frames. The frames of a block are removed from it while the model runs, and put back for
    the block's turn. Model and block each have a grad mode, so a turn also switches the grad mode in the graph.
    """

    __slots__ = ("_frames", "_tx")

    def __init__(self, tx: Any, function: VariableTracker, name: str) -> None:
        super().__init__(lambda: tx.inline_user_function_return(function, [], {}), name=name)
        self._tx = tx
        self._frames: tuple[list[Any], list[Any], dict[str, Any], bool] | None = None

    def _turn(self, switch: Callable[..., Any], *arguments: Any) -> None:
        before = torch.is_grad_enabled()
        if self._mode_contexts.grad not in (None, before):
            self._set_grad_enabled(bool(self._mode_contexts.grad))
        with self._own_frames():
            super()._turn(switch, *arguments)
        if self._mode_contexts.grad_now != before:
            self._set_grad_enabled(before)

    def leave_loop(self) -> None:
        raise _unsupported("An edit loops over more steps than the call of the model has: bound the loop, as in `tracer.iter[:1]`.")

    def cancel(self) -> None:
        with self._own_frames():
            super().cancel()

    def _set_grad_enabled(self, enabled: bool) -> None:
        torch._C._set_grad_enabled(enabled)
        self._tx.output.create_node("call_function", torch._C._set_grad_enabled, (enabled,), {})

    @contextlib.contextmanager
    def _own_frames(self) -> Iterator[None]:
        """Replace dynamo's frames by those of the block inside this context."""
        outer = self._take_frames()
        if self._frames is not None:
            self._put_frames(self._frames)
        try:
            yield
        finally:
            self._frames = self._take_frames()
            self._put_frames(outer)

    def _take_frames(self) -> tuple[list[Any], list[Any], dict[str, Any], bool]:
        """Return dynamo's frames, their summaries, the position in the innermost frame, and whether a child tracer is active."""
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
            raise _unsupported("A model with edits is called inside the run of another edited model, which torch.compile cannot trace.")
        tree: Any = attribute_of(tx, root, "_tree").realize()
        tree.value.refresh()
        edits = attribute_of(tx, root, "_edits").unpack_var_sequence(tx)
        blocks = [_block_of(tx, edit.realize(), root) for edit in edits]
        mediators = [_TracedMediator(tx, block, f"edit {number}") for number, block in enumerate(blocks)]
        module = attribute_of(tx, root, "_module")
        run = _TracedRun(mediators, tx, tree)
        try:
            with _intercepting(run, tree.value), run:
                output = module.call_function(tx, positional.unpack_var_sequence(tx), _as_dict(named))
                if run.failure is not None:  # the model caught the error of a block
                    raise run.failure
                run.handle("result", output)
                run.finish()
                return output
            raise _unsupported("An edit ended the run, so the call of the model has no output to return.")
        except (ValueError, TypeError) as error:
            raise _unsupported(f"{type(error).__name__}: {error}") from error
        finally:
            run.failure = None


class _Block(variables.NestedUserFunctionVariable):
    """The function of a block. Dynamo must not build a real function from it: some of its variables have no value yet."""

    def get_function(self, _converting: set[int] | None = None) -> types.FunctionType:
        raise NotImplementedError


#: The tracer of an edit with two names, as in ``with model.edit() as (tracer, edited)``. It has no state.
_CONTROLS = RunControls()


def _block_of(tx: Any, edit: Any, root: VariableTracker) -> VariableTracker:
    """Return the block of an edit as a function on new variables. They start with the values that they had when the edit was defined."""
    value: Edit = edit.value
    source = edit.source
    install_guard(source.make_guard(GuardBuilder.ID_MATCH))
    bound: VariableTracker = root
    if isinstance(value.block.target, tuple):
        controls = AttrSource(tx.import_source(__name__), "_CONTROLS")
        bound = _tuple_of([VariableTracker.build(tx, _CONTROLS, controls), root])
    own = {TRACER_NAME: bound, SCOPE_NAME: _constant(None), SAVE_NAME: VariableTracker.build(tx, _unchanged)}
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
        _constant(function.__name__),
        VariableTracker.build(tx, function.__code__),
        function.__globals__,
        defaults=None,
        kwdefaults=None,
        closure=_tuple_of(closure),
        **EXTRA_FUNCTION_ARGUMENTS,
    )


def _unchanged(value: Any) -> Any:
    """Return ``value``. Stands for ``.save()`` in an edit, which saves nothing."""
    return value


class _Handle(VariableTracker):
    """An object of this package in dynamo's execution, such as the run or its current mediator. Its methods run at once, untraced."""

    def __init__(self, value: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.value = value

    def var_getattr(self, tx: Any, name: str) -> VariableTracker:
        found = getattr(self.value, name)
        if name == "interleaver":
            return _Handle(found)
        if name == "current":
            return _constant(None) if found is None else _Handle(found)
        if name == "tree":
            return self.value.tree_variable
        if callable(found):
            return variables.GetAttrVariable(self, name)
        return _constant(found)

    tp_getattro_impl = var_getattr  # its name since torch 2.14

    def call_method(
        self, tx: Any, name: str, args: list[VariableTracker], kwargs: dict[str, VariableTracker]
    ) -> VariableTracker:
        plain = [argument.as_python_constant() if argument.is_python_constant() else argument for argument in args]
        if name == "on_leave":
            plain = [functools.partial(args[0].call_function, tx, [], {}), *plain[1:2], *args[2:]]
        elif name in ("swap", "skip"):
            plain[1] = args[1].realize()
        try:
            found = getattr(self.value, name)(*plain)
        except (ValueError, TypeError) as error:
            raise _unsupported(f"{type(error).__name__}: {error}") from error
        return found if isinstance(found, VariableTracker) else _constant(found)


class _ActiveRun(VariableTracker):
    """:func:`active_interleaver`, as dynamo sees it: the active run if dynamo traces that run, else ``None``."""

    def call_function(self, tx: Any, args: list[VariableTracker], kwargs: dict[str, VariableTracker]) -> VariableTracker:
        run = active_interleaver()
        return _Handle(run) if isinstance(run, _TracedRun) else _constant(None)


class _HostFunction(VariableTracker):
    """A function of this package that dynamo calls at once, instead of tracing it."""

    def __init__(self, function: Callable[..., Any], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.function = function

    def call_function(self, tx: Any, args: list[VariableTracker], kwargs: dict[str, VariableTracker]) -> VariableTracker:
        given = [argument.value if isinstance(argument, _Handle) else argument.as_python_constant() for argument in args]
        return _constant(self.function(*given))


class _LeaveFrame(VariableTracker):
    """:func:`leave_frame`, as dynamo sees it."""

    def call_function(self, tx: Any, args: list[VariableTracker], kwargs: dict[str, VariableTracker]) -> VariableTracker:
        what = args[0].as_python_constant()
        if tx.one_graph or tx.error_on_graph_break:
            raise _unsupported(
                f"`{what}` cannot be part of a graph of torch.compile, and fullgraph=True asks for one graph. Its block runs in "
                "turns with the model. Store the block with `model.edit()` and call the edited model in the compiled function; or move "
                "the trace out of it and compile the model, as in `model.compile()`; or compile without fullgraph=True."
            )
        raise exc.SkipFrame(f"`{what}` has a block, which is found through its frame and runs in turns with a model")


_call_module = variables.UnspecializedNNModuleVariable.call_function


@contextlib.contextmanager
def _intercepting(run: _TracedRun, tree: ModuleTree) -> Iterator[None]:
    """Intercept the module calls that dynamo traces, and offer their values to ``run``. Dynamo holds its compile lock here."""

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        path = tree.paths.get(self.value)
        if path is None:
            return _call_module(self, tx, args, kwargs)

        def call(*args: Any, **kwargs: Any) -> Any:
            return _call_module(self, tx, list(args), kwargs)

        return intercepted(path, None)(call, *args, **kwargs)

    with replaced(variables.UnspecializedNNModuleVariable, "call_function", call_function):
        yield


class _SourceOf(VariableTracker):
    """:func:`~nnsight.envoy.source.source_of`, as dynamo sees it."""

    def call_function(self, tx: Any, args: list[VariableTracker], kwargs: dict[str, VariableTracker]) -> VariableTracker:
        raise _unsupported("An edit uses `.source`, which cannot be part of a graph of torch.compile.")


VariableBuilder._id_dispatch()[id(active_interleaver)] = lambda builder, value: _ActiveRun()
VariableBuilder._id_dispatch()[id(source_of)] = lambda builder, value: _SourceOf()
VariableBuilder._id_dispatch()[id(leave_frame)] = lambda builder, value: _LeaveFrame()
VariableBuilder._id_dispatch()[id(call_edited)] = lambda builder, value: _CallEdited()
for called in (begin_loop, point_at, await_step, keep_pace, end_loop):
    VariableBuilder._id_dispatch()[id(called)] = lambda builder, value: _HostFunction(value)
