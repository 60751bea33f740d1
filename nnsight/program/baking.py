"""Baking: the edits of a model become hooks of its modules. A graph that ``torch.export`` makes of the modules needs no nnsight.

The nodes of a program at one location are a *segment*. A segment becomes a function, which is registered as a forward hook of the module
at that location, or as a forward pre-hook if the location is an input. The source of the function is generated from the nodes. It contains
only calls of torch operators and of small helpers, so ``torch.compile`` and ``torch.export`` trace it like any hook. Values that later
segments use are kept in a dict while the model runs.
"""

from __future__ import annotations

import copy
import copyreg
import itertools
import json
import linecache
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .format.errors import InvalidProgramError
from .format.nodes import Node
from .format.payload import Job
from .format.trees import references
from .python_text import operator_text, returns_several, value_text
from .run.fake_runs import device_of

#: Kinds of nodes that hooks cannot express, and the words for them in errors.
_REFUSED = {
    "barrier": "blocks that wait for each other",
    "stop": "`tracer.stop()`",
    "requires_grad": "gradients",
    "backward": "gradients",
    "log": "`print`",
}

_numbers = itertools.count()


class Segment:
    """The numbered nodes of a block that run at one location, the ``site``."""

    def __init__(self, site: str) -> None:
        self.site = site
        self.nodes: list[tuple[int, Node]] = []


def bake(module: torch.nn.Module, job: Job, values: dict[str, torch.Tensor]) -> torch.nn.Module:
    """Return a copy of ``module`` that shares its weights and runs the program ``job`` in hooks.

    Args:
        module: The model.
        job: A program without saved values.
        values: The inputs and constants of the program, by name. They become buffers of the copy, or parameters if they require gradients,
            on the device of the model. The buffer for ``alpha`` is ``edit_alpha``.

    Raises:
        InvalidProgramError: If hooks cannot express the program, for instance because it computes gradients or prints.
    """
    kept = [*module.parameters(), *module.buffers()]
    try:
        baked = copy.deepcopy(module, {id(tensor): tensor for tensor in kept})
    except Exception as error:  # such as that of a module that FSDP has sharded
        raise InvalidProgramError(f"These edits cannot be baked: the model cannot be copied: {error}") from error
    names, device = {}, device_of(module)
    for name, tensor in values.items():
        names[name] = _free_name(baked, f"edit_{name if name.isidentifier() else f'constant_{name[1:]}'}")
        held = _held(tensor, device)
        if isinstance(held, torch.nn.Parameter):
            baked.register_parameter(names[name], held)
        else:
            baked.register_buffer(names[name], held)
    state: dict[str, Any] = {}
    try:
        found = list(segments(job))
        check_applied(module, job)
    except InvalidProgramError as error:
        raise InvalidProgramError(f"These edits cannot be baked: {error}") from error
    _give_own_class(baked)
    baked.register_forward_pre_hook(_Clear(state))
    for segment in found:
        hook(baked, state, segment, compiled_segment(job, segment, names))
    baked.register_forward_hook(_Clear(state))
    return baked


def _held(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the tensor that a baked model holds for ``value``: on ``device``, and a parameter if it requires gradients."""
    tensor = value.detach() if device.type == "meta" else value.detach().to(device)
    if isinstance(value, torch.nn.Parameter) and tensor.device == value.device:
        return value
    is_parameter = isinstance(value, torch.nn.Parameter) or (value.requires_grad and value.is_leaf)
    return torch.nn.Parameter(tensor, value.requires_grad) if is_parameter else tensor


def check_applied(module: torch.nn.Module, job: Job) -> None:
    """Check that the modules that a program applies have no hooks. In a copy of ``module``, the hooks are the program itself.

    Raises:
        InvalidProgramError: If an applied module has hooks.
    """
    for node in job.nodes:
        if node["do"] == "apply":
            applied = module.get_submodule(node["module"].partition(".")[2])
            if applied._forward_hooks or applied._forward_pre_hooks:
                line, path = node.get("line", "?"), node["module"]
                raise InvalidProgramError(f"line {line} calls `{path}`, which has hooks of its own. Remove them.")


def _free_name(module: torch.nn.Module, first: str) -> str:
    """Return ``first``, with a number appended if the module already has an attribute of this name."""
    names = itertools.chain([first], (f"{first}_{number}" for number in itertools.count(2)))
    return next(name for name in names if not hasattr(module, name))


def segments(job: Job) -> Iterator[Segment]:
    """Yield the segments of each block in order.

    Raises:
        InvalidProgramError: If hooks cannot express a node. The message has the line of the node and the reason.
    """
    for block in range(job.runs[0]["blocks"]):
        waiting: list[tuple[int, Node]] = []  # nodes before the first location
        segment: Segment | None = None
        for number, node in enumerate(job.nodes):
            if node["block"] != block:
                continue
            why = _REFUSED.get(node["do"])
            if why is not None:
                raise InvalidProgramError(f"line {node.get('line', '?')} has {why}.")
            if "site" in node and (segment is None or node["site"] != segment.site):
                if node["at"] or "inside" in node or ".source." in node["site"] or node["site"] == "result":
                    raise InvalidProgramError(
                        f"line {node.get('line', '?')} is at `{node['site']}.i{node['at']}`. Only the first input and output of a "
                        "module in each call of the model can be used."
                    )
                if segment is not None:
                    yield segment
                segment = Segment(node["site"])
                segment.nodes, waiting = waiting, []
            (waiting if segment is None else segment.nodes).append((number, node))
        if segment is not None:
            yield segment


def _give_own_class(module: torch.nn.Module) -> None:
    """Change the class of a module to a subclass of it that no other module has.

    Dynamo has no guards on hooks. Without the subclass, it would reuse code that it compiled for another module of the class.
    """
    kind = type(module)
    if not hasattr(kind, "_is_baked"):
        module.__class__ = _own_class(kind)


def _own_class(kind: type) -> type:
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__reduce_ex__": _reduced, "_is_baked": True}
    return type(kind.__name__, (kind,), names)


def _reduced(module: torch.nn.Module, protocol: Any) -> Any:
    """Copy or pickle a module with a class of its own. The copy gets another such class."""
    kind: Any = type(module).__bases__[0]
    function, args, *rest = kind.__reduce_ex__(module, protocol)
    if function is copyreg.__newobj__ and args[0] is type(module):  # type: ignore[attr-defined]
        function, args = _new, (kind, *args[1:])
    return (function, args, *rest)


def _new(kind: type, *args: Any) -> Any:
    made = _own_class(kind)
    return made.__new__(made, *args)


def hook(root: torch.nn.Module, state: dict[str, Any], segment: Segment, run: Callable[..., Any]) -> str:
    """Register ``run`` as a hook at the location of a segment. It runs at the first occurrence in each call of ``root``.

    Returns:
        The key of ``state`` that is present after the hook has run.
    """
    path, _, side = segment.site.rpartition(".")
    name = path.partition(".")[2]
    module, passed = root.get_submodule(name) if name else root, f"{segment.site} {next(_numbers)}"
    _give_own_class(module)
    if side == "output":
        module.register_forward_hook(_After(root, state, passed, run))
        return passed
    module.register_forward_pre_hook(_Before(root, state, passed, run), with_kwargs=True)
    if any(node["do"] == "skip" for _, node in segment.nodes):
        module.forward = _Skippable(module.forward, state, f"skip {path}")
    return passed


# The hooks are objects instead of functions, so that a copy of the model has hooks of its own, and the model can be pickled.


class _Hook:
    """A hook that runs the function of a segment at the first occurrence in each call of ``root``. Its pickle has the function's text."""

    def __init__(self, root: torch.nn.Module, state: dict[str, Any], passed: str, run: Callable[..., Any]) -> None:
        self.root, self.state, self.passed, self.run = root, state, passed, run

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "run": self.run.text}  # type: ignore[attr-defined]

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, run=_function("edit", state["run"]))


class _Before(_Hook):
    """A forward pre-hook."""

    def __call__(self, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        if self.passed in self.state:
            return None
        self.state[self.passed] = True
        return self.run((args, kwargs), self.root, self.state)


class _After(_Hook):
    """A forward hook."""

    def __call__(self, module: torch.nn.Module, args: Any, output: Any) -> Any:
        if self.passed in self.state:
            return None
        self.state[self.passed] = True
        return self.run(output, self.root, self.state)


class _Skippable:
    """A ``forward`` that returns the value at ``key`` of ``state``, if there is one."""

    def __init__(self, forward: Callable[..., Any], state: dict[str, Any], key: str) -> None:
        self.forward, self.state, self.key = forward, state, key

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.state.pop(self.key) if self.key in self.state else self.forward(*args, **kwargs)


class _Clear:
    """A hook that drops the values of a call."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def __call__(self, *_: Any) -> None:
        self.state.clear()


# -- text of the functions ---------------------------------------------------------------------------------------------


def compiled_segment(job: Job, segment: Segment, names: dict[str, str] | None) -> Callable[..., Any]:
    """Return the function ``(value, root, state)`` of a segment. It returns the value that replaces ``value`` at the location.

    With ``names``, constants are read from the attributes of ``root`` that it maps them to. Without, they are read from ``state``.
    """
    return _function("edit", "\n".join(_lines(job, segment, names)))


def compiled_saves(job: Job) -> Callable[..., Any]:
    """Return the function ``(root, state)`` that returns the saved values by name, after all segments have run."""
    used = sorted({node for node, _ in references(job.saves)})
    lines = ["def saves(root, state):", *(f"    v{node} = state['v{node}']" for node in used)]
    lines.append(f"    return {value_text({'dict': list(job.saves.items())}, _reference(job))}")
    return _function("saves", "\n".join(lines))


def _function(name: str, text: str) -> Any:
    """Return the function ``name`` of a text, with the text as its attribute ``text``."""
    filename = f"<baked edits {next(_numbers)}>"
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    known = {"torch": torch, "leaf": _leaf, "with_leaf": _with_leaf, "device_of": _device_of, "tensors": _tensors}
    known |= {"check": _check, "check_lists": _check_lists}
    exec(compile(text, filename, "exec"), known)  # this module wrote the text, from a checked program
    made: Any = known[name]
    made.text = text
    return made


def _lines(job: Job, segment: Segment, names: dict[str, str] | None) -> Iterator[str]:
    here = {node for node, _ in segment.nodes}
    later = {used for other, node in enumerate(job.nodes) if other not in here for used, _ in references(node)}
    later |= {used for used, _ in references(job.saves)}
    used = {ref for _, node in segment.nodes for ref, _ in references(node)}
    yield "def edit(value, root, state):"
    yield f"    # at {segment.site}"
    if "device" in json.dumps([(node.get("args"), node.get("kwargs")) for _, node in segment.nodes]):
        yield "    device = device_of(value)"
    for earlier in sorted(used - here):
        yield f"    v{earlier} = state['v{earlier}']"
    line = None
    for node_number, node in segment.nodes:
        if node.get("line") != line:
            line = node.get("line")
            yield f"    # line {line}"
        indent = "    "
        if node.get("no_grad"):
            yield "    with torch.no_grad():"
            indent *= 2
        yield from (indent + text for text in _statement(job, node_number, node, names))
    for kept in sorted(here & later):
        yield f"    state['v{kept}'] = v{kept}"
    yield "    return value"


def _statement(job: Job, number: int, node: Node, names: dict[str, str] | None) -> list[str]:
    def text(tree: Any) -> str:
        return value_text(tree, _reference(job))

    match node["do"]:
        case "const":
            name = node["tensor"]
            return [f"v{number} = root.{names[name]}" if names is not None else f"v{number} = state[{f'const {name}'!r}]"]
        case "weight":
            path, _, attribute = node["name"].rpartition(".")
            return [f"v{number} = root{_getter(path)}.{attribute}"]
        case "read":
            copied = ".clone()" if node.get("copy") else ""
            part = f"value[{node['key']!r}]" if "key" in node else "value"
            checked = [f"check_lists({part}, {node['lists']})"] if "lists" in node else []
            return [*checked, f"v{number} = leaf({_place(node)}){copied}"]
        case "write":
            if node.get("in_place"):
                source, output = node["value"]["ref"]
                follows = [f"v{source} = old"] if output == 0 and job.nodes[source]["do"] == "read" else []
                return [f"old = leaf({_place(node)})", f"old.copy_({text(node['value'])})", *follows]
            return [f"value = with_leaf({_place(node)}, {text(node['value'])})"]
        case "skip":
            path = node["site"].rpartition(".")[0]
            return [f"state[{f'skip {path}'!r}] = {text(node['value'])}"]
        case "size":
            return [f"check({text(node['value'])}, {node['dim']}, {node['size']})"]
        case "apply":
            args, kwargs = text(node["args"]), text(node["kwargs"])
            path = node["module"].partition(".")[2]
            copied = f"; v{number} = [item.clone() for item in v{number}]" if node.get("copy") else ""
            return [f"v{number} = tensors(root{_getter(path)}.forward(*{args}, **{kwargs})){copied}"]
    return [f"v{number} = torch.ops.{operator_text(node, _reference(job))}"]


def _place(node: Node) -> str:
    """Return the arguments of ``leaf`` and ``with_leaf`` for the leaf that a node names."""
    return f"value, {node.get('key')!r}, {node['leaf']}"


def _getter(path: str) -> str:
    return f".get_submodule({path!r})" if path else ""


def _reference(job: Job) -> Callable[[int, int], str]:
    """Return a function that maps an output of a node to the expression for it."""
    return lambda node, output: f"v{node}[{output}]" if returns_several(job.nodes[node]) else f"v{node}"


# -- helpers that the functions call -----------------------------------------------------------------------------------


#: Types that are not caches. They are tested first, because dynamo cannot look up the names of their classes.
_NO_CACHES = (torch.Tensor, dict, list, tuple, type(None), bool, int, float, str)


def _is_cache(value: Any) -> bool:
    return not isinstance(value, _NO_CACHES) and type(value).__name__.endswith("Cache")


def _leaf(value: Any, key: str | None, number: int) -> Any:
    """Return leaf ``number`` of a nested value, or of its item ``key``."""
    value = value if key is None else value[key]
    if isinstance(value, torch.Tensor):
        return value
    if number == 0 and isinstance(value, tuple) and value and isinstance(value[0], torch.Tensor):
        return value[0]
    return pytree.tree_leaves(value, is_leaf=_is_cache)[number]


def _with_leaf(value: Any, key: str | None, number: int, new: torch.Tensor) -> Any:
    """Return ``value`` with ``new`` in place of leaf ``number``, or of leaf ``number`` in its item ``key``."""
    if isinstance(value, torch.Tensor):
        return new
    if number == 0 and type(value) is tuple and value and isinstance(value[0], torch.Tensor):
        return (new, *value[1:])
    leaves, structure = pytree.tree_flatten(value, is_leaf=_is_cache)
    for name in value if key is not None else ():
        if name == key:
            break
        number += len(pytree.tree_leaves(value[name], is_leaf=_is_cache))
    leaves[number] = new
    return pytree.tree_unflatten(leaves, structure)


def _tensors(value: Any) -> list[Any]:
    return [value] if isinstance(value, torch.Tensor) else pytree.tree_leaves(value, is_leaf=_is_cache)


def _device_of(value: Any) -> torch.device | None:
    return next((item.device for item in _tensors(value) if isinstance(item, torch.Tensor)), None)


def _check(tensor: torch.Tensor, dim: int, size: int) -> None:
    if tensor.shape[dim] != size:
        raise ValueError(f"The edits looked at dimension {dim}, which was {size} when they were recorded and is {tensor.shape[dim]} here.")


def _lists_in(value: Any) -> list[int]:
    """Do the same as :func:`~nnsight.program.run.occurrences.lists_in`, in Python that dynamo can trace."""
    if not isinstance(value, (list, tuple, dict)):
        return []
    items = list(value.values()) if isinstance(value, dict) else list(value)
    found = [len(value)] if type(value) is list else []
    for item in items:
        found += _lists_in(item)
    return found


def _check_lists(value: Any, lists: list[int]) -> None:
    found = _lists_in(value)
    if found != lists:
        raise ValueError(f"The lists in this value had the lengths {lists} when the edits were recorded, and have {found} here.")
