"""The same by hand: plain torch hooks on a model that nnsight has never seen."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .specimen import Operation

#: Gets the value of a location, and which call of the module this is; returns a replacement, or None.
Hook = Callable[[Any, int], Any]


class Hooks:
    """Hooks on modules, by path, for one run.

    Args:
        module: The model.
        call: What runs, instead of the model itself.
    """

    def __init__(self, module: torch.nn.Module, call: Callable[..., Any] | None = None) -> None:
        self._module = module
        self._call = call or module
        self._stack = contextlib.ExitStack()

    def output(self, path: str, hook: Hook) -> Hooks:
        """Call ``hook`` with what the module returns."""
        calls = 0

        def run(_: Any, __: Any, value: Any) -> Any:
            nonlocal calls
            calls += 1
            return hook(value, calls - 1)

        self._stack.callback(self._module.get_submodule(path).register_forward_hook(run).remove)
        return self

    def input(self, path: str, hook: Hook) -> Hooks:
        """Call ``hook`` with the first argument of the module, given by position or by name."""
        calls = 0

        def run(_: Any, args: Any, kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            name = None if args else next(iter(kwargs))
            new = hook(args[0] if args else kwargs[name], calls - 1)
            if new is None:
                return None
            return ((new, *args[1:]), kwargs) if args else (args, {**kwargs, name: new})

        handle = self._module.get_submodule(path).register_forward_pre_hook(run, with_kwargs=True)
        self._stack.callback(handle.remove)
        return self

    def skip(self, path: str, value: Callable[[], Any]) -> Hooks:
        """Return ``value()`` from the module instead of running it."""
        module = self._module.get_submodule(path)
        forward = module.forward
        module.forward = lambda *_, **__: value()  # type: ignore[method-assign]
        self._stack.callback(setattr, module, "forward", forward)
        return self

    def operation(self, operation: Operation, hook: Hook) -> Hooks:
        """Call ``hook`` with the value of an operation."""
        if operation.called is not None:
            return self.output(operation.called, hook)
        self._stack.enter_context(_attention(self._module.get_submodule(operation.module), hook))
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._stack:
            return self._call(*args, **kwargs)


@contextlib.contextmanager
def _attention(module: torch.nn.Module, hook: Hook) -> Iterator[None]:
    """Call ``hook`` with what the attention function of transformers returns for ``module``."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    calls = 0

    def hooked(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(caller: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            value = function(caller, *args, **kwargs)
            if caller is module:
                new = hook(value, calls)
                calls += 1
                value = value if new is None else new
            return value

        return run

    kind = module.config._attn_implementation
    modeling = sys.modules[type(module).__module__]
    if kind in ALL_ATTENTION_FUNCTIONS:
        ALL_ATTENTION_FUNCTIONS[kind], before = hooked(ALL_ATTENTION_FUNCTIONS[kind]), ALL_ATTENTION_FUNCTIONS[kind]
        try:
            yield
        finally:
            ALL_ATTENTION_FUNCTIONS[kind] = before
    else:
        name = "eager_attention_forward"
        before = getattr(modeling, name)
        setattr(modeling, name, hooked(before))
        try:
            yield
        finally:
            setattr(modeling, name, before)


def visits(module: torch.nn.Module, arguments: dict[str, Any], operation: Operation | None = None) -> list[tuple[str, str]]:
    """Return ``("input" or "output", path)`` of all modules that a call runs, first visits only, in order.

    Among them is ``("operation", path)`` where the module at ``path`` runs ``operation``.
    """
    found: dict[tuple[str, str], None] = {}
    handles = []
    at_operation = ("operation", "" if operation is None else operation.module)
    for path, child in module.named_modules():
        before, after = ("input", path), ("output", path)
        handles.append(child.register_forward_pre_hook(lambda *_, before=before: found.setdefault(before)))
        handles.append(child.register_forward_hook(lambda *_, after=after: found.setdefault(after)))
    hooks = Hooks(module)
    if operation is not None:
        hooks.operation(operation, lambda *_: found.setdefault(at_operation))
    try:
        with torch.no_grad():
            hooks(**arguments)
    finally:
        for handle in handles:
            handle.remove()
    return list(found)
