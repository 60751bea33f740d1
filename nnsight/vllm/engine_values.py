"""Values of an engine that belong to no module: the logits and the sampled tokens.

Outside of blocks, ``model.logits`` stands for the location. In a block it is a tensor, and ``model.logits.output`` is the same tensor. Both
can be edited in place, and both can be assigned to.
"""

from __future__ import annotations

from typing import Any

import torch

from ..runtime.interleaver import active_interleaver
from ..runtime.iteration import running_mediator
from ..runtime.modules.located import Located
from ..runtime.modules.tree import ModuleTree


class EnginePlace(Located):
    """A point at which the engine has a value in each step. Its location is ``<path>.output``."""

    def __init__(self, path: str, tree: ModuleTree) -> None:
        self.path = self._path = path
        self._tree = tree

    def __repr__(self) -> str:
        return f"<{self.path}.output, a value of each step of the engine>"


class EngineTensor(torch.Tensor):
    """A value of the engine as a block gets it: a tensor whose attribute ``.output`` is the tensor itself.

    Results of calls on it, and copies of it, are plain tensors.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    _place: EnginePlace

    @property
    def output(self) -> Any:
        """This tensor. An assignment replaces the value, as at any location."""
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
    """A descriptor for the value that the engine has at ``model.<name>.output``."""

    def __init__(self, name: str, doc: str) -> None:
        self._name, self.__doc__ = name, doc

    def __get__(self, owner: Any, owner_type: type | None = None) -> Any:
        if owner is None:
            return self
        place = EnginePlace(f"model.{self._name}", owner._tree)
        run = active_interleaver()
        if run is None or run.current is None or run.recorder is not None:  # a recorder cannot handle `EngineTensor`
            return place
        tensor: Any = place.output.as_subclass(EngineTensor)
        tensor._place = place
        return tensor

    def __set__(self, owner: Any, value: Any) -> None:
        place = EnginePlace(f"model.{self._name}", owner._tree)
        now = running_mediator(f"`{place.path}`").request(f"{place.path}.output")
        if isinstance(value, EngineTensor):
            value = value.as_subclass(torch.Tensor)
            if value.data_ptr() == now.data_ptr() and value.shape == now.shape:  # after `model.logits += x`, an edit in place
                return
        place.output = value
