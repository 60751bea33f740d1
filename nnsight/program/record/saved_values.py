"""Saved values of a recording: the trees of a program, whose leaves refer to nodes.

Saved weights, and sizes that become known only here, need nodes of their own. These nodes are in the block of the latest node, after it.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from ...runtime.batched_containers import is_batched_container
from ..format.errors import NotExpressibleError
from ..format.sizes import Shape
from ..format.trees import NONE, references, write_tree
from ..run.occurrences import tensors_at

if TYPE_CHECKING:
    from .recorder import Recorder


def saved_trees(recorder: Recorder, values: dict[str, Any]) -> dict[str, Any]:
    """Return the trees of saved values by name, and record the nodes that they need.

    Raises:
        NotExpressibleError: If a value contains tensors that are not values of the program, or in an object that a program cannot contain.
    """
    with _last_turn(recorder):
        return {name: write_tree(value, functools.partial(saved_leaf, recorder, name)) for name, value in values.items()}


#: Packages whose objects are not searched for tensors of the block: they are part of the model or of a library.
_LIBRARIES = frozenset({"nnsight", "torch", "transformers", "numpy"})

#: Maximum number of objects that are searched.
_MOST = 10_000

#: Types whose objects hold no tensors.
_PLAIN = (str, bytes, int, float, torch.Size, Shape, type, types.ModuleType)


def held_tensors(recorder: Recorder, trees: dict[str, Any], found: Iterable[Any]) -> list[torch.Tensor]:
    """Return the fake tensors in the objects ``found``, and in all that they hold, that saved ``trees`` do not contain.

    Such a tensor may be in an attribute, a set, or a dict with keys that a program cannot contain. At most :data:`_MOST` objects are
    searched, the last of ``found`` first.
    """
    known = {reference for tree in trees.values() for reference in references(tree)}
    held: dict[int, torch.Tensor] = {}
    seen: set[int] = set()
    pending = list(found)
    while pending and len(seen) < _MOST:
        value = pending.pop()
        if id(value) in seen or isinstance(value, _PLAIN):
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            if isinstance(value, FakeTensor) and recorder._refs.get(value, ()) not in known and value in recorder._refs:
                held[id(value)] = value
        elif isinstance(value, dict):
            pending += [*value, *value.values()]
        elif isinstance(value, (list, tuple, set, frozenset, deque)):
            pending.extend(value)
        elif type(value).__module__.partition(".")[0] not in _LIBRARIES and not isinstance(value, torch.nn.Module):
            pending += getattr(value, "__dict__", {}).values()
            pending += [getattr(value, name, None) for name in getattr(type(value), "__slots__", ())]
    return list(held.values())


@contextlib.contextmanager
def _last_turn(recorder: Recorder) -> Iterator[None]:
    """Set the turn to the block of the latest node. A node that stops the run remains the last one."""
    nodes, roots = recorder.nodes, recorder._roots
    stop = nodes.pop() if nodes and nodes[-1]["do"] == "stop" else None
    del roots[len(nodes) :]
    latest = stop or (nodes[-1] if nodes else {})
    with recorder.turn_of(latest["block"] if latest.get("run") == len(recorder.runs) - 1 else 0):
        yield
    if stop is not None:
        roots.append(len(nodes))
        nodes.append(stop)


def saved_leaf(recorder: Recorder, name: str, value: Any, in_cache: bool = False) -> Any:
    """Return the tree of a part of a saved value that is not plain data."""
    if isinstance(value, torch.Tensor):
        return _saved_tensor(recorder, name, value)
    if hasattr(value, "_entries") and hasattr(value, "observe"):  # a cache of activations
        entries = value._entries.items()
        kept = {path: {kind: found for kind, found in entry._values.items() if found} for path, entry in entries}
        kept = {path: kinds for path, kinds in kept.items() if kinds}
        return write_tree(kept, lambda leaf: saved_leaf(recorder, name, leaf, in_cache=True))
    if is_batched_container(value):
        if in_cache:  # key-value caches are not sent
            return {"absent": NONE}
        return {"list": [write_tree(item, lambda leaf: saved_leaf(recorder, name, leaf)) for item in tensors_at(value)]}
    is_object = hasattr(value, "__dict__") and not isinstance(value, (type, types.ModuleType))
    held = value if isinstance(value, (set, frozenset)) else vars(value).values() if is_object else ()
    if any(isinstance(item, FakeTensor) for item in pytree.tree_leaves(list(held))):
        raise NotExpressibleError(
            f"`{name}` holds a {type(value).__name__} that contains tensors, which cannot be sent. "
            "Save the tensors in lists, tuples or dicts."
        )
    return {"absent": type(value).__name__[:100]}


def _saved_tensor(recorder: Recorder, name: str, value: torch.Tensor) -> Any:
    """Return the tree of a tensor. The trace itself does not need the value of the user's own tensor, but other runs of a program do."""
    is_own = id(value) not in recorder.model.weights and not isinstance(value, FakeTensor)
    if id(value) in recorder._of_other_jobs or (is_own and not recorder.runs_again):
        return {"absent": "Tensor"}  # the client has it, or another job returns it
    fake = recorder.substitute(value)
    ref = recorder._refs.get(fake)
    if ref is None:
        raise NotExpressibleError(
            f"`{name}` holds a tensor that the block did not get at a location of the model. Save values that were read at a "
            "location, and values computed from them."
        )
    if not is_own:  # the user's own tensor remains the saved object
        recorder._refs[value] = ref
    recorder.edits.check_fresh(fake)
    return {"ref": list(ref)}
