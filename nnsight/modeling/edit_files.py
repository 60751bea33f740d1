"""Edit files, and the edits of models that are copied or pickled.

An edit file is a safetensors file with the tensors that the edits use. Its header has, as JSON, the text of each block and the values of
its variables (:mod:`nnsight.tracing.excerpt`, :mod:`nnsight.modeling.values`). Nothing in it is pickled.

Reading a file compiles its blocks and imports the modules that they name, and a model with imported edits runs the blocks. So **an edit
file is a program**: import files only from people whose Python scripts you would run.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import dis
import functools
import json
import os
import re
import sys
import types
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors
import safetensors.torch
import torch

from ..envoy.envoy import Envoy
from ..runtime.editing import Edit
from ..tracing import Block, Scope
from ..tracing.block import names_of
from ..tracing.excerpt import Excerpt
from .reruns import container_copy
from .values import ValueWriter, read_term, read_values

if TYPE_CHECKING:
    from .base import NNsight

#: The key of the edits in the header of a file.
KEY = "nnsight edits"
VERSION = 2
SUFFIX = ".safetensors"


def edit_file(model: NNsight, name: Any, export_dir: Any, variant: str) -> Path:
    """Return the path of the file for these arguments of :meth:`.Editable.export_edits`; raises the same errors."""
    if isinstance(name, os.PathLike) or (isinstance(name, str) and name.endswith(SUFFIX)):
        if export_dir is not None:
            raise ValueError(f"{os.fspath(name)!r} is the path of a file: pass it without `export_dir`, or a name and `export_dir`.")
        return Path(name)
    if name is None:
        known = model.__dict__.get("repo_id") or getattr(model._module, "name_or_path", None)
        name = known if isinstance(known, str) and known else type(model._module).__name__
    if export_dir is None:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        export_dir = Path(cache) / "nnsight" / "edits"
    folder, file = (re.sub(r"[/\\:]+", "--", part) for part in (name, variant))
    if folder.strip(".") == "" or not file:
        raise ValueError(f"The name {name!r} and the variant {variant!r} make no file name.")
    return Path(export_dir) / folder / (file + SUFFIX)


def write_edits(model: NNsight, path: Path) -> None:
    """Write the edits of ``model`` to a file. If an edit cannot be written, the file does not change."""
    if not model._edits:
        raise ValueError(
            "The model has no edits to export. `model.edit()` edits a copy, which `as` binds: export the edits of the copy, or edit "
            "with `inplace=True`."
        )
    content, tensors = _dumped(model, model._edits)
    path.parent.mkdir(parents=True, exist_ok=True)
    safetensors.torch.save_file(tensors, path, {KEY: json.dumps(content)})


def read_edits(model: NNsight, path: Path) -> list[Edit]:
    """Return the edits in a file, as edits of ``model``; raises the errors of :meth:`.Editable.import_edits`."""
    if not path.is_file():
        variants = sorted(file.stem for file in path.parent.glob("*" + SUFFIX)) if path.parent.is_dir() else []
        there = f" These variants exist: {', '.join(variants)}." if variants else ""
        raise FileNotFoundError(f"There are no exported edits at {path}.{there}")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            content = json.loads(file.metadata()[KEY])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dictionary
        return _loaded(content, tensors, model)
    except (safetensors.SafetensorError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        what = "It is not a file of exported edits, or it is damaged."
        raise ValueError(f"Cannot import the edits in {path}: {what}") from error
    except (ValueError, ImportError) as error:
        kind = ValueError if isinstance(error, ValueError) else ImportError
        raise kind(f"Cannot import the edits in {path}: {error}") from error


class PortableEdits:
    """The edits of a model that is copied or pickled; a call with the copy returns the edits of the copy.

    A deep copy shares the objects that the edits use. A pickle contains the content of an edit file.
    """

    def __init__(self, model: NNsight) -> None:
        self._model = model

    def __deepcopy__(self, memo: dict[int, Any]) -> PortableEdits:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial, (_loaded, *_dumped(self._model, self._model._edits))

    def __call__(self, model: NNsight) -> list[Edit]:
        """Return the edits as those of ``model``."""
        copies: dict[int, Any] = {}
        return [_moved(edit, self._model, model, copies) for edit in self._model._edits]


def _moved(edit: Edit, old: NNsight, new: NNsight, copies: dict[int, Any]) -> Edit:
    """Return ``edit`` for ``new``, a copy of its model: variables with parts of ``old`` get the same parts of ``new``.

    A container with such parts is copied once; ``copies`` are those of all edits, by the ``id`` of the original.
    """
    scope, roots, module_globals = edit.scope.copy(), set(edit.roots), edit.module_globals

    def moved(value: Any) -> Any:
        copies.update((id(part), new._descend(part._path.split(".")[1:])) for part in _parts(value, old, set()))
        return container_copy(value, copies)

    for name, value in list(scope.items()):
        if isinstance(value, Envoy) and value._tree is old._tree and value._path == old._path:
            del scope.cells[name].cell_contents
            roots.add(name)
        elif _has_parts(value, old):
            scope.cells[name].cell_contents = moved(value)
    read = {name: module_globals[name] for name in edit.block.globals_read if name in module_globals}
    changed = {name: moved(value) for name, value in read.items() if _has_parts(value, old)}
    module_globals = {**module_globals, **changed} if changed else module_globals
    return Edit(edit.block, scope, module_globals, edit.source, weakref.ref(new), frozenset(roots))


def _parts(value: Any, model: NNsight, seen: set[int]) -> Iterator[Envoy]:
    """Yield the parts of ``model`` in nested containers; ``seen`` are the ids of containers that were searched."""
    if isinstance(value, Envoy):
        if value._tree is model._tree:
            yield value
    elif isinstance(value, (list, tuple, dict, set)) and id(value) not in seen:
        seen.add(id(value))
        for item in value.values() if isinstance(value, dict) else value:
            yield from _parts(item, model, seen)


def _has_parts(value: Any, model: NNsight) -> bool:
    return any(True for _ in _parts(value, model, set()))


def _dumped(model: NNsight, edits: Iterable[Edit]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return edits of ``model`` as JSON and named tensors."""
    writer = ValueWriter(model)
    written = [_written(model, edit, writer) for edit in edits]
    return {"version": VERSION, "edits": written, "values": writer.table}, writer.tensors


def _loaded(content: dict[str, Any], tensors: dict[str, torch.Tensor], model: NNsight) -> list[Edit]:
    """Return the edits in the result of :func:`_dumped`, as edits of ``model``; raises the errors of :func:`read_edits`."""
    if content["version"] != VERSION:
        raise ValueError(
            f"The file has version {content['version']} of the format, and this nnsight reads version {VERSION}: import it with the "
            "version of nnsight that exported it, or export the edits again."
        )
    values = read_values(model, content["values"], tensors)
    return [_read(model, row, values) for row in content["edits"]]


def _written(model: NNsight, edit: Edit, writer: ValueWriter) -> dict[str, Any]:
    """Return an edit as JSON, in which the globals that it reads become variables."""
    source, user = edit.source, f"The edit at {edit.source.place}"
    if not source.text:
        raise ValueError(f"{user} cannot be exported: its source text is not available. Define it in a file.")
    code, own = edit.block.code, set(edit.block.shared)
    needed = own - _assigned_first(code)
    assigned = {step.argval for step in dis.get_instructions(code) if step.opname == "STORE_GLOBAL"}
    if "__class__" in own or any(map(str.isidentifier, assigned)):  # pytest's rewritten assertions assign names that are no identifiers
        raise TypeError(f"{user} assigns a global or calls `super()`: it cannot be exported.")
    values = {name: value for name, value in edit.scope.items() if name in needed}
    values |= dict.fromkeys(edit.roots & needed, model)
    values |= {name: edit.module_globals[name] for name in names_of(code)[1] - own if name in edit.module_globals}
    variables = {}
    for name, value in sorted(values.items()):
        try:
            variables[name] = writer.write(value)
        except TypeError as error:
            holds = "which holds " if isinstance(value, (list, tuple, dict)) else ""
            raise TypeError(f"{user} uses `{name}`, {holds}{error}") from error
    return {
        "source": dataclasses.asdict(source),
        "module": edit.module_globals.get("__name__", "__main__"),
        "variables": variables,
        "locations": _locations(edit.block, values, model),
    }


def _read(model: NNsight, row: dict[str, Any], table: list[Any]) -> Edit:
    """Return the edit in a result of :func:`_written`."""
    source = Excerpt(**row["source"])
    values = {name: read_term(term, table) for name, term in row["variables"].items()}
    try:
        block = source.block(values)
    except SyntaxError as error:
        here = ".".join(map(str, sys.version_info[:2]))
        raise ValueError(f"The edit written at {source.place} cannot be compiled by Python {here}: {error}") from error
    found = _locations(block, values, model)
    missing = [expression for expression in row["locations"] if expression not in found]
    if missing:
        raise ValueError(
            f"The edit written at {source.place} uses `{missing[0]}`, which this model ({type(model._module).__name__}) "
            "does not have. Import the edits into a model with the same modules and the same `rename` as the one they were made for."
        )
    roots = frozenset(name for name in block.shared if values.get(name) is model)
    scope = Scope({name: types.CellType() for name in block.shared})
    for name in (values.keys() & scope.cells) - roots:
        scope.cells[name].cell_contents = values[name]
    module_globals = {"__name__": row["module"], "__builtins__": builtins}
    return Edit(block, scope, module_globals, source, weakref.ref(model), roots)


def _assigned_first(code: types.CodeType) -> set[str]:
    """Return the variables that ``code`` assigns before it reads them, so that their earlier values do not matter.

    Code after the first condition may not run, and does not count. The body of a ``for`` loop is assumed to run.
    """
    first: dict[str, str] = {}
    for instruction in dis.get_instructions(code):
        if "JUMP_IF" in instruction.opname:
            break
        if instruction.argval in code.co_freevars:
            first.setdefault(instruction.argval, instruction.opname)
    return {name for name, operation in first.items() if operation == "STORE_DEREF"}


def _locations(block: Block, values: dict[str, Any], model: NNsight) -> list[str]:
    """Return the expressions in a block that name a part of the model, as written: ``model.transformer.h[3]``."""
    targets = block.target if isinstance(block.target, tuple) else [block.target or ""]
    values = values | dict.fromkeys(targets, model)
    nodes = [node for part in block.body for node in ast.walk(part) if isinstance(node, (ast.Attribute, ast.Subscript))]
    return list(dict.fromkeys(ast.unparse(node) for node in nodes if _part(node, values) is not None))


def _part(node: ast.expr, values: dict[str, Any]) -> Envoy | None:
    """Return the part of the model that an expression names: a variable, followed by child modules and constant indices."""
    found: Any = None
    try:
        match node:
            case ast.Name(id=name):
                found = values.get(name)
            case ast.Attribute(value=parent, attr=name):
                envoy: Any = _part(parent, values)
                found = vars(envoy).get(name, envoy._children.get(name))
            case ast.Subscript(value=parent, slice=index):
                found = _part(parent, values)[ast.literal_eval(index)]  # type: ignore[index]
    except (ValueError, LookupError, TypeError):  # the parent is no part of the model, or the index is no constant or out of range
        return None
    return found if isinstance(found, Envoy) else None
