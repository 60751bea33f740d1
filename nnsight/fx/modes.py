"""The modes that torch keeps for each thread, and that decide what an operation does: grad mode, inference mode, autocast.

A captured graph belongs to the modes in which the model was called. A block may switch them, ``with torch.no_grad():``, and need
a value there, or need it in a thread of its own: the part of the graph up to that place still runs in the modes of the model.
The model may switch them, too, which is then written in its graph. Where a graph is cut inside such a stretch,
the piece before the cut leaves the mode and the piece behind enters it again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.amp import autocast_mode
from torch.autograd import grad_mode


def _autocast_now() -> tuple[Any, ...]:
    """Return kind of device and dtype of each autocast that is on, and whether its cache is."""
    if not torch._C._is_any_autocast_enabled():
        return ()
    kinds = {"cpu"}
    if torch.accelerator.is_available():
        kinds.add(torch.accelerator.current_accelerator().type)  # type: ignore[union-attr]
    enabled = [(kind, torch.get_autocast_dtype(kind)) for kind in sorted(kinds) if torch.is_autocast_enabled(kind)]
    return (torch.is_autocast_cache_enabled(), *enabled)


@dataclass(frozen=True)
class Modes:
    """The modes of a thread at one time.

    Attributes:
        grad: Whether gradients are enabled.
        inference: Whether inference mode is on.
        autocast: Whether autocast has its cache, then device and dtype of each that is on; empty if none is.
        dispatch: The dispatch keys that are added to and left out of each call.
    """

    grad: bool
    inference: bool
    autocast: tuple[Any, ...]
    dispatch: tuple[Any, Any]

    @staticmethod
    def now() -> Modes:
        """Return the modes of the current thread."""
        dispatch = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
        return Modes(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), _autocast_now(), dispatch)

    def keys(self) -> contextlib.AbstractContextManager[None]:
        """Dispatch calls as in these modes, also inside of an operator, where torch leaves out what has been done before."""
        return torch._C._ForceDispatchKeyGuard(*self.dispatch)

    @property
    def hold(self) -> bool:
        """Whether the current thread has these modes."""
        return (
            torch.is_grad_enabled() == self.grad
            and torch.is_inference_mode_enabled() == self.inference
            and self.autocast_holds
        )

    @property
    def autocast_holds(self) -> bool:
        """Whether autocast of the current thread is as in these modes."""
        if not self.autocast:
            return not torch._C._is_any_autocast_enabled()
        return _autocast_now() == self.autocast

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Have these modes on the current thread."""
        with contextlib.ExitStack() as stack:
            if torch.is_inference_mode_enabled() != self.inference:
                stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            if not self.autocast_holds:
                for kind, _ in _autocast_now()[1:]:
                    stack.enter_context(torch.autocast(kind, enabled=False))
                for kind, dtype in self.autocast[1:]:
                    stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=self.autocast[0]))
            stack.enter_context(self.keys())
            yield


_ENTERING = (autocast_mode._enter_autocast, grad_mode._enter_inference_mode)
_LEAVING = {
    autocast_mode._exit_autocast: autocast_mode._enter_autocast,
    grad_mode._exit_inference_mode: grad_mode._enter_inference_mode,
}


@dataclass(frozen=True)
class Switched:
    """Modes that a graph has switched up to some node.

    Attributes:
        grad: The grad mode it has set; ``None`` if it has set none, or has set it back.
        entered: The nodes that entered a mode that is still on, in order.
    """

    grad: bool | None = None
    entered: tuple[torch.fx.Node, ...] = ()

    def leave(self, graph: torch.fx.Graph, env: dict[torch.fx.Node, Any], grad: bool) -> None:
        """Write calls to ``graph`` that leave these modes; ``grad`` is the grad mode outside of the graph."""
        for node in reversed(self.entered):
            leave = next(leave for leave, enter in _LEAVING.items() if enter is node.target)
            graph.call_function(leave, (env[node],))
        if self.grad is not None and self.grad != grad:
            graph.call_function(torch._C._set_grad_enabled, (grad,))

    def enter(self, graph: torch.fx.Graph, env: dict[torch.fx.Node, Any], grad: bool) -> None:
        """Write calls to ``graph`` that enter these modes."""
        for node in self.entered:
            env[node] = graph.node_copy(node)
        if self.grad is not None and self.grad != grad:
            graph.call_function(torch._C._set_grad_enabled, (self.grad,))

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Have the autocast of these modes on the current thread."""
        stack = contextlib.ExitStack()
        for node in self.entered:
            if node.target is autocast_mode._enter_autocast:
                stack.enter_context(torch.autocast(*node.args))  # type: ignore[arg-type]
        return stack


def switched_at(nodes: Sequence[torch.fx.Node], wanted: set[torch.fx.Node]) -> dict[torch.fx.Node, Switched]:
    """Return what the graph with ``nodes`` has switched when it comes to each of ``wanted``, where it has switched anything."""
    found: dict[torch.fx.Node, Switched] = {}
    now = Switched()
    for node in nodes:
        if node in wanted:
            if now != Switched():
                found[node] = now
        elif node.op != "call_function":
            continue
        elif node.target is torch._C._set_grad_enabled:
            now = Switched(bool(node.args[0]), now.entered)
        elif node.target in _ENTERING:
            now = Switched(now.grad, (*now.entered, node))
        elif node.target in _LEAVING:
            now = Switched(now.grad, tuple(entered for entered in now.entered if entered is not node.args[0]))
    return found
