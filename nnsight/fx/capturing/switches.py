"""Modes that a captured graph switches: grad mode, autocast, inference mode.

The switches are calls in the graph. A block between two of them computes in the model's autocast, and has a grad mode of its own. Where the
graph is cut between them, the piece before the cut leaves the modes and the piece behind it enters them again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.amp import autocast_mode
from torch.autograd import grad_mode

_ENTERING = (autocast_mode._enter_autocast, grad_mode._enter_inference_mode)
_LEAVING = {
    autocast_mode._exit_autocast: autocast_mode._enter_autocast,
    grad_mode._exit_inference_mode: grad_mode._enter_inference_mode,
}


@dataclass(frozen=True)
class Switched:
    """Modes that a graph has switched up to some node.

    Attributes:
        grad: The grad mode it has set; ``None`` if it has set none.
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
        """Enter the autocast of these modes on the current thread."""
        stack = contextlib.ExitStack()
        for node in self.entered:
            if node.target is autocast_mode._enter_autocast:
                stack.enter_context(torch.autocast(*node.args))  # type: ignore[arg-type]
        return stack


def switched_at(nodes: Sequence[torch.fx.Node], wanted: set[torch.fx.Node]) -> dict[torch.fx.Node, Switched]:
    """Return the modes that the graph with ``nodes`` has switched before each of ``wanted``, where it has switched any."""
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
