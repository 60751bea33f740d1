"""The root of an envoy tree: any ``torch.nn.Module``, traced eagerly or compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..envoy import Envoy, EnvoyClasses
from ..runtime.eager import EagerDriver
from ..runtime.editing import Edit, EditingTracer
from ..runtime.interleaver import active_interleaver
from ..runtime.scanning import ScanningDriver
from ..runtime.tracer import Driver, InterleavingTracer
from ..tracing import Backend, Tracer
from ..tree import ModuleTree

if TYPE_CHECKING:
    from ..fx.driver import CompiledDriver


class NNsight(Envoy):
    """A model whose internals can be read and edited while it runs.

    Args:
        module: The model. A module that was compiled with ``torch.compile`` or ``Module.compile`` is recognised:
            traces then run compiled too, with the same options.
        compile: ``True``, or the keyword arguments of ``torch.compile``, to run traces compiled; see
            :meth:`compile`.
        rename: Further names for modules, by path: ``{"transformer.h": "layers"}`` lets ``model.layers`` stand for
            ``model.transformer.h``, ``{"mlp": "feedforward"}`` names every ``mlp``. Several names go into a list; a
            leading dot ties a path, or a name, to the root.
        **options: ``envoys``, the class of the envoys below (see :class:`Envoy`); by default the class attribute
            ``envoys``.

    Raises:
        TypeError: If ``module`` is not a module.
        ValueError: If ``rename`` names no module, or takes a name that exists.

    Example:
        >>> model = NNsight(torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU()))
        >>> with model.trace(torch.ones(1, 2)):
        ...     hidden = model[0].output.save()
    """

    #: The class of the envoys below, for all instances; see :class:`Envoy`.
    envoys: EnvoyClasses = None

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        compile: bool | dict[str, Any] = False,
        rename: Mapping[str, str | Sequence[str]] | None = None,
        **options: Any,
    ) -> None:
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"NNsight wraps a torch.nn.Module, not {type(module).__name__}.")
        envoys = options.pop("envoys", type(self).envoys)
        if options:
            raise TypeError(f"{type(self).__name__}() got unknown options {sorted(options)}.")
        chosen: dict[str, Any] | None = dict(compile) if isinstance(compile, dict) else {} if compile else None
        # By name: without dynamo imported (it takes a second) there are no such modules.
        if type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None:
            from ..fx.compat import options_of_compiled

            module, found = options_of_compiled(module)
            chosen = found if chosen is None else chosen
        self.__dict__["_compiled"] = None
        self.__dict__["_compile_by_default"] = False
        self.__dict__["_edits"] = []
        self.__dict__["_rename"] = dict(rename or {})
        self._mount(module, envoys, chosen)
        if chosen is not None:
            self.__dict__["_compile_by_default"] = True

    def _mount(self, module: torch.nn.Module, envoys: EnvoyClasses, compile_options: dict[str, Any] | None) -> None:
        """Mirror ``module``, and prepare to compile it if there are options for that."""
        Envoy.__init__(self, module, tree=ModuleTree.of(module, _traced_call), envoys=envoys)
        self._alias(self._rename)
        if compile_options is not None:
            self._make_driver(compile_options)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Copy and pickle as the module with its options; the mirror, and what was compiled, is made anew."""
        kind = next(base for base in type(self).__mro__ if "_moved" not in vars(base))
        own = {"_module", "_tree", "_children", "_envoys", "_version", "_compiled", "_path", "_aliases"}
        state = {
            name: value for name, value in self.__dict__.items() if name not in own and not isinstance(value, Envoy)
        }
        options = None if self._compiled is None else self._compiled.options
        return _rebuild, (kind, self._module, self._envoys, options, state)

    def compile(self, **options: Any) -> None:
        """Run later traces, and plain calls of this object, compiled. Like ``nn.Module.compile``, in place.

        Args:
            **options: Those of ``torch.compile``: ``backend``, ``mode``, ``options``, ``dynamic``, ``fullgraph``.
        """
        self._make_driver(options)
        self.__dict__["_compile_by_default"] = True

    def trace(
        self, *args: Any, compile: bool | None = None, backend: Backend | None = None, **kwargs: Any
    ) -> InterleavingTracer:
        """Run the model once, with the block of the ``with`` statement reading and editing its internals.

        Args:
            *args: The model's input.
            compile: Whether this trace runs compiled; by default as chosen with :meth:`compile`.
            backend: Where the block runs; in this process by default.
            **kwargs: The model's input, by name.

        Returns:
            The tracer; ``tracer.report`` tells how the trace ran.
        """
        return InterleavingTracer(self._driver(compile), self, args, kwargs, backend, _Names(self))

    def scan(self, *args: Any, backend: Backend | None = None, **kwargs: Any) -> InterleavingTracer:
        """Run the block on fake tensors: sizes and types without values, and without computing anything.

        Args:
            *args: The model's input.
            backend: Where the block runs; in this process by default.
            **kwargs: The model's input, by name.

        Example:
            >>> model = NNsight(torch.nn.Linear(2, 3))
            >>> with model.scan(torch.ones(5, 2)):
            ...     shape = model.output.shape.save()
        """
        self._sync()
        driver = ScanningDriver(self._module, self._tree.instrumentation)
        return InterleavingTracer(driver, self, args, kwargs, backend, _Names(self))

    def session(self, backend: Backend | None = None) -> Tracer:
        """Group traces: inside the block, each can use the variables of those before it without saving them.

        Args:
            backend: Where the block runs; in this process by default.
        """
        return Tracer(backend)

    def edit(self, *, inplace: bool = False) -> EditingTracer:
        """Keep a block and run it in every later trace.

        Args:
            inplace: Edit this object; by default the block goes to a copy, which ``as`` binds. The copy shares modules,
                weights and compiled graphs with this object.

        Example:
            >>> model = NNsight(torch.nn.Linear(2, 2))
            >>> with model.edit() as edited:
            ...     model.output[:] = 0
        """
        edited = self
        if not inplace:
            edited = object.__new__(type(self))
            edited.__dict__.update(self.__dict__, _edits=list(self._edits), _children=dict(self._children), _aliases=set(self._aliases))
        return EditingTracer(edited._edits, edited)

    def clear_edits(self) -> None:
        """Forget the blocks of :meth:`edit`."""
        self._edits.clear()

    def _driver(self, compile: bool | None, function: Callable[..., Any] | None = None) -> Driver:
        """Return what runs the model, compiled or not.

        Args:
            compile: The choice for this run; by default as chosen with :meth:`compile`.
            function: What to call instead of the module; it calls the module itself, any number of times.
        """
        self._sync()
        if self._compile_by_default if compile is None else compile:
            driver = self._compiled_driver()
            return driver if function is None else driver.around(function)
        return EagerDriver(function or self._module, self._tree.instrumentation)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model, compiled if :meth:`compile` was called; inside a block, apply it to the block's values."""
        if self._compile_by_default and active_interleaver() is None:
            return self._compiled_driver().call_plain(args, kwargs)
        return super().__call__(*args, **kwargs)

    def _prepare_input(self, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Turn what the user passed to :meth:`trace` into the arguments of the module; subclasses override."""
        return args, kwargs

    def _compiled_driver(self) -> CompiledDriver:
        return self._compiled or self._make_driver({})

    def _batch(
        self, batched: tuple[tuple[Any, ...], dict[str, Any]] | None, *args: Any, **kwargs: Any
    ) -> tuple[tuple[tuple[Any, ...], dict[str, Any]], int]:
        """Join the arguments of one more invoke to those of earlier ones; subclasses that can do so override.

        Args:
            batched: The arguments joined so far, ``None`` for the first invoke.
            *args: Arguments of this invoke, as :meth:`_prepare_input` returned them.
            **kwargs: Likewise.

        Returns:
            The joined arguments ``(args, kwargs)`` and the number of rows of this invoke.
        """
        raise NotImplementedError(
            f"Batching is not implemented for {type(self).__name__}: it does not know how to join the inputs of several "
            "invokes. Use one invoke with input (any number of invokes without input can follow it), or define "
            "`_prepare_input` and `_batch` in a subclass."
        )

    def _make_driver(self, options: dict[str, Any]) -> CompiledDriver:
        from ..fx.driver import CompiledDriver

        driver = self.__dict__["_compiled"] = CompiledDriver(self._tree, options)
        return driver

    def _mirror(self, known: dict[torch.nn.Module, Envoy], version: int) -> None:
        super()._mirror(known, version)
        self._alias(self._rename, strict=False)

    _compiled: CompiledDriver | None
    _edits: list[Edit]
    _rename: dict[str, str | Sequence[str]]
    _compile_by_default: bool


def _rebuild(
    kind: type[NNsight],
    module: torch.nn.Module,
    envoys: EnvoyClasses,
    compile_options: dict[str, Any] | None,
    state: dict[str, Any],
) -> NNsight:
    """Return the wrapper that :meth:`NNsight.__reduce_ex__` took apart."""
    made = kind.__new__(kind)
    made.__dict__.update(state, _compiled=None)
    made._mount(module, envoys, compile_options)
    return made


class _Names:
    """What a trace asks about the names and edits of a model."""

    def __init__(self, model: NNsight) -> None:
        self.edits = model._edits
        self._model = model

    def location_paths(self) -> Iterable[str]:
        return self._model._tree.names()

    def alias_paths(self) -> dict[str, str]:
        """Return the path behind each further name that ``rename`` gave."""
        found: dict[str, str] = {}
        for envoy in Envoy.modules(self._model):
            found.update({f"{envoy._path}.{name}": envoy.__dict__[name]._path for name in envoy._aliases})
        return found


def _traced_call(
    input_location: str,
    output_location: str,
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call a module while dynamo traces it; see :func:`nnsight.fx.taps.tapped_call`."""
    from ..fx.taps import tapped_call

    return tapped_call(input_location, output_location, call, args, kwargs)
