"""Random numbers of a job. Each job has its own generator, with the seed of the job.

So a job has the same results when it runs alone, in a batch, or again, and it does not advance the generators of the server. The client
draws the seed from its own generator: after ``torch.manual_seed(s)``, the same block is the same job.

The interpreter passes the generator to random operators of a program (:data:`~nnsight.program.format.operators.DRAWING`).
:class:`Drawing` passes it to random operators of the model, which it uses for sampling or dropout.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ...runtime.modules.tree import ModuleTree

_aten = torch.ops.aten

#: Minimum and maximum of the parameter of a distribution, by operator.
_PARAMETERS = {
    "aten.bernoulli.default": (0.0, 1.0),
    "aten.bernoulli_.Tensor": (0.0, 1.0),
    "aten.multinomial.default": (0.0, 1e30),
    "aten.poisson.default": (0.0, 1e9),
}

#: The overload that takes a generator, for operators that do not.
_WITH_GENERATOR = {
    _aten.rand.default: _aten.rand.generator,
    _aten.randn.default: _aten.randn.generator,
    _aten.randint.default: _aten.randint.generator,
    _aten.randint.low: _aten.randint.low_generator,
    _aten.randperm.default: _aten.randperm.generator,
}


def drawn_seed() -> int:
    """Return a seed drawn with the generator of this process."""
    with _disable_current_modes():
        return int(torch.randint(2**62, ()))


def generator_of(seed: int | None, device: torch.device) -> torch.Generator:
    """Return the generator of a job. If the job has no seed, the seed is a secret random number."""
    return torch.Generator(device).manual_seed(secrets.randbits(62) if seed is None else seed)


def has_active_dropout(modules: Iterable[torch.nn.Module]) -> bool:
    """Whether one of ``modules`` is an active dropout."""
    return any(isinstance(module, _DropoutNd) and module.training and module.p for module in modules)


def dropout(value: torch.Tensor, probability: float, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the results of ``aten.native_dropout``, which takes no generator: the kept and scaled values, and where they are kept."""
    kept = torch.empty_like(value).bernoulli_(1 - probability, generator=generator)
    return value * kept / (1 - probability if probability < 1 else 1), kept.bool()


def check_parameters(name: str, parameter: Any) -> None:
    """Raise a :class:`ValueError` unless the parameter of a random operator is in range. Some kernels do not check it."""
    if name not in _PARAMETERS or not isinstance(parameter, torch.Tensor) or isinstance(parameter, FakeTensor):
        return
    low, high = _PARAMETERS[name]
    if parameter.numel() and not bool(((parameter >= low) & (parameter <= high)).all()):
        raise ValueError(f"`{name}` is given a parameter that is not between {low:g} and {high:g}.")


def may_draw(tree: ModuleTree, call: str, kwargs: dict[str, Any]) -> bool:
    """Whether a call of the model may draw random numbers."""
    if has_active_dropout(tree.paths):
        return True
    config = getattr(tree.root, "generation_config", None)
    return call == "generate" and bool(kwargs.get("do_sample", getattr(config, "do_sample", False)))


class Drawing(TorchDispatchMode):
    """Makes the random operators of a model draw from the generator of a job."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self._generator = generator

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = operator._schema.name.removeprefix("aten::")
        if name == "native_dropout" and args[2] is not False:
            return dropout(args[0], args[1], self._generator)
        if name in ("rand_like", "randn_like"):
            made = torch.empty_like(args[0], **kwargs)
            return made.uniform_(generator=self._generator) if name == "rand_like" else made.normal_(generator=self._generator)
        if name == "randint_like":
            low, high = (0, args[1]) if len(args) == 2 else args[1:3]
            return torch.empty_like(args[0], **kwargs).random_(low, high, generator=self._generator)
        operator = _WITH_GENERATOR.get(operator, operator)
        takes = any(argument.name == "generator" for argument in operator._schema.arguments)
        if takes and kwargs.get("generator") is None:
            kwargs = {**kwargs, "generator": self._generator}
        return operator(*args, **kwargs)
