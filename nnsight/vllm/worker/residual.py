"""The residual stream of models that carry it in two parts.

Many models of vLLM keep the output of a layer apart from the hidden state before it: a layer returns ``(hidden, residual)``, and the next
one adds them inside its first norm. The hidden state of the model, as in transformers, is their sum. :attr:`LayerEnvoy.residual` is
that sum, to be read, edited in place and replaced; ``.output`` is vLLM's pair.

An edit goes back as ``(edited, zeros)``: the next addition then gives the edited sum exactly.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ...envoy.envoy import Envoy
from ...runtime.interleaver import active_interleaver
from ...runtime.iteration import running_mediator
from ...runtime.modules.eproperty import eproperty
from ..steering.graph_parts import is_layer
from ..steering.tables import Steering
from .calls import called
from .requests import RequestRun


class _Residual(eproperty):
    """An eproperty whose view goes back only if the block changed it."""

    def __get__(self, owner: Any, owner_type: type | None = None) -> Any:
        if owner is None:
            return self
        location = self.location(owner)
        mediator = self._mediator(owner, location)
        held = mediator.held_view(location, self.name)
        if held is not None:
            return held
        value = mediator.request(location)
        view = _sum_of(value, location)
        version = view._version
        if view is not value:
            back = lambda: _like(mediator._value, view) if view._version > version else mediator._value  # noqa: E731
            mediator.on_leave(back, self.name, view)
        return view

    def __set__(self, owner: Any, value: Any) -> None:
        location = self.location(owner)
        mediator = self._mediator(owner, location)
        mediator.swap(location, _like(mediator.request(location), value))


class ModuleEnvoy(Envoy):
    """A module of the model."""

    def __call__(self, *args: Any, hook: bool = False, **kwargs: Any) -> Any:
        """Call the module on values of the block, see :mod:`~nnsight.vllm.worker.calls`; with ``hook`` as in every trace."""
        run = active_interleaver()
        if hook or not isinstance(run, RequestRun) or run.current is None:
            return super().__call__(*args, hook=hook, **kwargs)
        return called(run, self._path, self._module, args, kwargs)

    def _class_for(self, module: torch.nn.Module, path: str) -> type[Envoy]:
        return LayerEnvoy if is_layer(path) else ModuleEnvoy


class LayerEnvoy(ModuleEnvoy):
    """A layer of the model."""

    @_Residual(key="output", description="hidden state after the layer")
    def residual(self) -> Any:
        """The residual stream after the layer, ``[tokens, hidden]``: the hidden state that transformers has there.

        Edit it in place, or assign a replacement of the same shape.
        """

    def steer(
        self, *, add: Any = None, scale: Any = None, remove: Any = None, start: int = 0, use: str | None = None, **parameters: Any
    ) -> None:
        """Edit the residual stream after this layer, for all tokens of the request; see :mod:`~nnsight.vllm.steering.tables`.

        It stands at the top of a block. In a compiled engine it is a part of the graph, and no Python runs at the layer.

        Args:
            add: Added last, ``[hidden]`` or a number; or the name of a vector in ``model.vectors``.
            scale: Factor before that, ``[hidden]`` or a number.
            remove: Direction, or directions, that are projected out first, ``[hidden]`` or ``[directions, hidden]``; or a name.
            start: First position, counted from the start of the prompt.
            use: Name of a function that the engine was made with, called on the result; see
                :mod:`~nnsight.vllm.steering.graph_functions`.
            **parameters: Parameters of the function, each a number or a tensor of the shape of its default.

        Raises:
            ValueError: For another size or an unknown name, after the block has read a value, or if a compiled engine has no
                room for it.
            TypeError: For an argument that is no number or tensor.
        """
        run = running_request()
        add, remove = (self._named(value, run.limits.hidden) for value in (add, remove))
        functions = run.limits.functions
        if use is None and parameters:
            raise TypeError(f"steer() has no parameter {next(iter(parameters))!r}. Parameters of a function go with its name, `use=`.")
        if use is not None and use not in functions:
            names = ", ".join(map(repr, functions)) or "no function"
            raise ValueError(
                f"steer(use={use!r}): this engine was made with {names}. Make the model with `edits={{'modules': [...], 'functions': "
                f"{{{use!r}: ...}}}}`."
            )
        chosen = {} if use is None else {use: functions[use].parameters(parameters)}
        run.steer(f"{self._path}.output", Steering.of(run.limits.hidden, add, scale, remove, start, chosen))

    def _named(self, value: Any, hidden: int) -> Any:
        """Return the direction that ``value`` names; if it is no name, ``value``."""
        if not isinstance(value, str):
            return value
        root: Any = next(iter(self._tree.roots))  # all roots share their vectors
        number = layer_number(self._path)
        if number is None:
            raise ValueError(f"steer({value!r}): `{self._path}` has no number, and directions are kept by the numbers of layers.")
        direction: torch.Tensor = root.vectors.direction(value, number, hidden)
        return direction


def running_request() -> RequestRun:
    """Return the run of the request whose block is running; raise ``ValueError`` if no block is running, or not on an engine."""
    run = running_mediator("steer()").interleaver
    if not isinstance(run, RequestRun):
        raise ValueError("steer() is for traces on a vLLM engine.")
    return run


def layer_number(path: str) -> int | None:
    """Return the number of the layer that ``path`` leads to or into; ``None`` if there is none in it."""
    numbers = [int(name) for name in path.split(".") if name.isdecimal()]
    return numbers[-1] if numbers else None


def places_of(locations: Iterable[str]) -> dict[int, str]:
    """Return locations of layers by the numbers of the layers; raise ``ValueError`` if two have one number, or one has none."""
    places: dict[int, str] = {}
    for location in locations:
        number = layer_number(location)
        if number is None or number in places:
            raise ValueError(
                f"`{location}` cannot be addressed by a number of a layer"
                + ("." if number is None else f": `{places[number]}` is {number}, too. Steer it through `layer.steer(...)`.")
            )
        places[number] = location
    return places


def _sum_of(value: Any, location: str) -> torch.Tensor:
    """Return the hidden state in a layer's output."""
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], torch.Tensor):
        hidden, residual = value
        return hidden.clone() if residual is None else hidden + residual
    raise ValueError(
        f"`{location}` is no hidden state and no pair `(hidden, residual)`, but a {type(value).__name__}: this layer has no "
        "`.residual`. Use `.output`."
    )


def _like(value: Any, hidden: Any) -> Any:
    """Return ``hidden`` in the form of ``value``, a layer's output."""
    if isinstance(value, torch.Tensor):
        return hidden
    _, residual = value
    return hidden, None if residual is None else torch.zeros_like(residual)
