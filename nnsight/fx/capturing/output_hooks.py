"""Hooks of transformers that collect hidden states and attentions.

Transformers registers these hooks in the first call that asks for such outputs, under a lock. Dynamo cannot trace that: the first call
would be two graphs, and an error with ``fullgraph=True``, as with plain ``torch.compile``. So the hooks are registered before the capture.
"""

from __future__ import annotations

import sys
from typing import Any

from ...runtime.modules.tree import ModuleTree


def install_output_hooks(tree: ModuleTree, kwargs: dict[str, Any]) -> bool:
    """Register the hooks that a call of the model with ``kwargs`` would register itself. Return whether there were any.

    The outputs are asked for by arguments such as ``output_hidden_states=True``, or by an attribute of that name in the configuration.
    """
    library = sys.modules.get("transformers.utils.output_capturing")
    if library is None or not hasattr(tree.root, "config"):
        return False
    asked = any(value for name, value in kwargs.items() if name.startswith("output_"))
    found = False
    for module in tree.root.modules():
        kinds = getattr(module, "_can_record_outputs", None)
        if not kinds or getattr(module, "_output_capturing_hooks_installed", False) or not _collects(type(module).forward, library):
            continue
        if asked or any(getattr(module.config, f"output_{kind}", False) for kind in kinds):
            library.maybe_install_capturing_hooks(module)
            found = True
    if found:
        tree.refresh()
    return found


def _collects(forward: Any, library: Any) -> bool:
    """Return whether a decorator of ``library`` wraps ``forward``."""
    while forward is not None:
        if getattr(forward, "__globals__", None) is vars(library):
            return True
        forward = getattr(forward, "__wrapped__", None)
    return False
