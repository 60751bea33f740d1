"""Values of an engine that belong to no module: the logits, and the sampled tokens.

``model.logits`` is the value, and the place. In a block it is a tensor, that of ``model.logits.output``. Both can be edited in place,
and assigned.
"""

from __future__ import annotations

from typing import Any

import torch

from ..runtime.interleaver import active_interleaver
from ..runtime.iteration import running_mediator
from ..runtime.modules.located import Located
from ..runtime.modules.tree import ModuleTree


class EnginePlace(Located):
    """Where the engine has a value at each of its steps; the prefix ``path`` of its location."""

    def __init__(self, path: str, tree: ModuleTree) -> None:
        self.path = self._path = path
        self._tree = tree

    def __repr__(self) -> str:
        return f"<{self.path}.output, a value of each step of the engine>"


class EngineTensor(torch.Tensor):
    """A value of the engine as a block gets it: an ordinary tensor, but that ``.output`` is the tensor itself.

    Results of calls on it are plain tensors, and so are copies of it.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    _place: EnginePlace

    @property
    def output(self) -> Any:
        """This tensor. What is assigned takes the place of the value, as with any location."""
        return self

    @output.setter
    def output(self, value: Any) -> None:
        self._place.output = value

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.as_subclass(torch.Tensor))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.as_subclass(torch.Tensor).clone()


class engine_value:  # noqa: N801 - a descriptor, like `property`
    """A descriptor for a value of the engine."""

    def __init__(self, name: str, doc: str) -> None:
        self._name, self.__doc__ = name, doc

    def __get__(self, owner: Any, owner_type: type | None = None) -> Any:
        if owner is None:
            return self
        place = EnginePlace(f"model.{self._name}", owner._tree)
        run = active_interleaver()
        if run is None or run.current is None or run.recorder is not None:  # a recording knows no such tensors
            return place
        tensor: Any = place.output.as_subclass(EngineTensor)
        tensor._place = place
        return tensor

    def __set__(self, owner: Any, value: Any) -> None:
        place = EnginePlace(f"model.{self._name}", owner._tree)
        now = running_mediator(f"`{place.path}`").request(f"{place.path}.output")
        if isinstance(value, EngineTensor):
            value = value.as_subclass(torch.Tensor)
            if value.data_ptr() == now.data_ptr() and value.shape == now.shape:  # `model.logits += x` has edited it in place
                return
        place.output = value
