"""The residual stream of models that carry it in two parts.

Many models of vLLM delay the addition to the residual stream: a layer returns ``(hidden, residual)``, and the next layer adds the two
inside its first norm. The hidden state of the model, as in transformers, is their sum. :attr:`LayerEnvoy.residual` is this sum, which
blocks can read, edit in place and replace. ``.output`` is vLLM's pair.

An edited sum goes back as ``(edited, zeros)``, so that the next addition gives exactly the edited sum.

Other layers return the whole hidden state, and a second tensor that the next layer ignores; see :mod:`~nnsight.vllm.steering.pairs`. There
``.residual`` is the first tensor.
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
from ..steering.pairs import WHOLE, form_of
from ..steering.tables import Steering
from .calls import called
from .request_rows import is_same
from .requests import RequestRun


class _Residual(eproperty):
    """An eproperty whose value is written back only if the block changed it."""

    def __get__(self, owner: Any, owner_type: type | None = None) -> Any:
        if owner is None:
            return self
        location = self.location(owner)
        mediator = self._mediator(owner, location)
        held = mediator.held_view(location, self.name)
        if held is not None:
            return held
        value = mediator.request(location)
        first, residual = _parts_of(value, owner._module, location)
        if residual is None:
            return first
        view = first + residual
        versions = view._version, first._version, residual._version

        def is_edited() -> bool:
            now = view._version, first._version, residual._version
            if now != versions or type(view) is not torch.Tensor:  # no tensor of a recording, which has no values
                return now[0] > versions[0]
            return not is_same(view, first + residual)

        back = lambda: _like(mediator._value, view, True) if is_edited() else mediator._value  # noqa: E731
        mediator.on_leave(back, self.name, view)
        return view

    def __set__(self, owner: Any, value: Any) -> None:
        location = self.location(owner)
        mediator = self._mediator(owner, location)
        old = mediator.request(location)
        _, residual = _parts_of(old, owner._module, location)
        mediator.swap(location, _like(old, value, residual is not None))


class ModuleEnvoy(Envoy):
    """A module of the model."""

    def __call__(self, *args: Any, hook: bool = False, **kwargs: Any) -> Any:
        """Call the module on values of the block, see :mod:`~nnsight.vllm.worker.calls`. With ``hook``, do as in other traces."""
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
        """The residual stream after the layer, ``[tokens, hidden]``: the hidden state that the layer outputs in transformers.

        Edit it in place, or assign a replacement of the same shape.
        """

    def steer(
        self, *, add: Any = None, scale: Any = None, remove: Any = None, start: int = 0, use: str | None = None, **parameters: Any
    ) -> None:
        """Edit the residual stream after this layer, for all tokens of the request; see :mod:`~nnsight.vllm.steering.tables`.

        Call this at the top of a block. In a compiled engine the edit is a part of the graph, and no Python runs at the layer.

        Args:
            add: Vector that is added last, ``[hidden]`` or a number; or the name of a vector in ``model.vectors``.
            scale: Factor that is applied before the addition, ``[hidden]`` or a number.
            remove: Direction or directions that are projected out first, ``[hidden]`` or ``[directions, hidden]``; or the name of a vector.
            start: First edited position, counted from the start of the prompt.
            use: Name of a function that the engine was made with. It is called on the result; see
                :mod:`~nnsight.vllm.steering.graph_functions`.
            **parameters: Parameters of the function, each a number or a tensor of the shape of its default.

        Raises:
            ValueError: For a wrong size or an unknown name, if the block has already read a value, or if a compiled engine has no
                tables, or not enough directions, for the edit.
            TypeError: For an argument that is no number or tensor, or parameters without ``use``.
        """
        run = running_request()
        add, remove = (self._named(value, run.limits.hidden) for value in (add, remove))
        functions = run.limits.functions
        if use is None and parameters:
            raise TypeError(f"steer() has no parameter {next(iter(parameters))!r}. For parameters of a function, pass its name as `use=`.")
        if use is not None and use not in functions:
            names = ", ".join(map(repr, functions)) or "no function"
            raise ValueError(
                f"steer(use={use!r}): this engine was made with {names}. Make the model with `edits={{'modules': [...], 'functions': "
                f"{{{use!r}: ...}}}}`."
            )
        chosen = {} if use is None else {use: functions[use].parameters(parameters)}
        form_of(self._module, f"{self._path}.output")  # raises an error here, at the user's line
        run.steer(f"{self._path}.output", Steering.of(run.limits.hidden, add, scale, remove, start, chosen))

    def _named(self, value: Any, hidden: int) -> Any:
        """Return the direction that ``value`` names, or ``value`` itself if it is no name."""
        if not isinstance(value, str):
            return value
        root: Any = next(iter(self._tree.roots))  # all roots share their vectors
        number = layer_number(self._path)
        if number is None:
            raise ValueError(f"steer({value!r}): `{self._path}` has no layer number, and vectors have a direction per layer number.")
        direction: torch.Tensor = root.vectors.direction(value, number, hidden)
        return direction


def running_request() -> RequestRun:
    """Return the run of the request whose block is running. Raise ``ValueError`` if no block is running, or none of a vLLM engine."""
    run = running_mediator("steer()").interleaver
    if not isinstance(run, RequestRun):
        raise ValueError("steer() is for traces on a vLLM engine.")
    return run


def layer_number(path: str) -> int | None:
    """Return the number of the layer at ``path`` or around it, or ``None`` if ``path`` has no number."""
    numbers = [int(name) for name in path.split(".") if name.isdecimal()]
    return numbers[-1] if numbers else None


def places_of(locations: Iterable[str]) -> dict[int, str]:
    """Return locations of layers by layer number. Raise ``ValueError`` if two have the same number, or one has none."""
    places: dict[int, str] = {}
    for location in locations:
        number = layer_number(location)
        if number is None or number in places:
            raise ValueError(
                f"`{location}` cannot be addressed by a layer number"
                + ("." if number is None else f": `{places[number]}` has the number {number}, too. Use `layer.steer(...)`.")
            )
        places[number] = location
    return places


def _parts_of(value: Any, module: Any, location: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the tensors in a layer's output whose sum is the hidden state. The second one is ``None`` if the first one is the whole."""
    if isinstance(value, torch.Tensor):
        return value, None
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], torch.Tensor):
        hidden, residual = value
        return hidden, None if residual is None or form_of(module, location) == WHOLE else residual
    raise ValueError(
        f"`{location}` is not a hidden state or a pair `(hidden, residual)`, but a {type(value).__name__}, so this layer has no "
        "`.residual`. Use `.output`."
    )


def _like(value: Any, hidden: Any, is_sum: bool) -> Any:
    """Return ``hidden`` in the form of the layer output ``value``. If that is a sum, its residual becomes zero."""
    if isinstance(value, torch.Tensor):
        return hidden
    return hidden, torch.zeros_like(value[1]) if is_sum else value[1]
