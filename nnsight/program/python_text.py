"""Python source for parts of programs: nested values and calls of operators. Used by the modules that write programs as Python."""

from __future__ import annotations

from collections.abc import Callable
from keyword import iskeyword
from typing import Any

from .format.nodes import Node
from .format.operators import OPERATORS


def value_text(tree: Any, reference: Callable[[int, int], str]) -> str:
    """Return a checked tree as an expression. ``reference(node, output)`` returns the expression for an output of a node.

    In the expression, the name ``device`` stands for the device of the model.
    """
    if type(tree) is list:
        return f"[{', '.join(value_text(item, reference) for item in tree)}]"
    if type(tree) is not dict:
        return repr(tree)
    ((kind, content),) = tree.items()
    match kind:
        case "ref":
            return reference(*content)
        case "list":
            return value_text(content, reference)
        case "tuple":
            return f"({', '.join(value_text(item, reference) for item in content)}{',' * (len(content) == 1)})"
        case "dict":
            return "{" + ", ".join(f"{key!r}: {value_text(item, reference)}" for key, item in content) + "}"
        case "float":
            return f"float({content!r})"
        case "dtype" | "layout" | "memory_format":
            return f"torch.{content}"
        case "device":
            return "device"
        case "absent":
            return "None"
    return repr(content)


def operator_text(node: Node, reference: Callable[[int, int], str]) -> str:
    """Return the call of an operator as an expression, in which ``aten`` is ``torch.ops.aten``.

    If the name of the overload is a keyword, as in ``random_.from``, the expression calls the overload packet.
    """
    packet, _, overload = node["name"].rpartition(".")
    parts = [value_text(item, reference) for item in node["args"]]
    parts += [f"{key}={value_text(item, reference)}" for key, item in node.get("kwargs", {}).items()]
    return f"{packet if iskeyword(overload) else node['name']}({', '.join(parts)})"


def returns_several(node: Node) -> bool:
    """Whether the result of a node is a list of tensors in Python."""
    if node["do"] != "op":
        return bool(node["do"] == "apply")
    returned = OPERATORS[node["name"]]._schema.returns
    return len(returned) > 1 or str(returned[0].type).startswith("List")
