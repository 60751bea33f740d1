"""Edits as files, and edits of models that are pickled.

The file is a safetensors file. Its tensors are those the edits use; its header holds, as JSON, the text of each block and the
values of its variables (see :mod:`nnsight.tracing.excerpt` and :mod:`nnsight.modeling.values`). Any tool for safetensors can
look at it, and nothing in it is pickled.

Reading a file compiles the blocks and imports the modules they name. Running a model with imported edits runs the blocks.
**An edit file is a program**: import it from people you would take a Python script from.
"""

from __future__ import annotations

import ast
import builtins
import json
import os
import re
import sys
import tempfile
import types
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.torch

from ..envoy import Envoy
from ..runtime.editing import Edit
from ..tracing import Scope
from ..tracing.excerpt import Excerpt, global_names
from .values import ValueReader, ValueWriter

if TYPE_CHECKING:
    from .base import NNsight

#: Where the header of a file has the edits.
KEY = "nnsight edits"
VERSION = 1
SUFFIX = ".safetensors"


def edit_file(model: NNsight, name: Any, export_dir: Any, variant: str) -> Path:
    """Return the file that ``name``, ``export_dir`` and ``variant`` stand for.

    Raises:
        ValueError: If they contradict each other.
    """
    if isinstance(name, os.PathLike) or (isinstance(name, str) and name.endswith(SUFFIX)):
        if export_dir is not None:
            raise ValueError(f"{os.fspath(name)!r} is a file already: give a name and `export_dir`, or the file alone.")
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
    """Write the edits of ``model`` to a file, all or nothing.

    Raises:
        ValueError: If it has none, or the text of one is not to be had any more.
        TypeError: If one of them uses a value that cannot be written.
    """
    if not model._edits:
        raise ValueError(
            "The model has no edits to export. `model.edit()` puts the edit on a copy, which `as` binds: export that one, or "
            "edit with `inplace=True`."
        )
    data = dump_edits(model, model._edits)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with open(handle, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def read_edits(model: NNsight, path: Path) -> list[Edit]:
    """Return the edits in a file, as edits of ``model``.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is no edit file, is damaged, or does not fit the model.
        ImportError: If an edit uses something that cannot be imported.
    """
    if not path.is_file():
        variants = sorted(file.stem for file in path.parent.glob("*" + SUFFIX)) if path.parent.is_dir() else []
        there = f" There are the variants {', '.join(variants)}." if variants else ""
        raise FileNotFoundError(f"There are no exported edits at {path}.{there}")
    try:
        return load_edits(model, path.read_bytes())
    except (ValueError, ImportError) as error:
        kind = ValueError if isinstance(error, ValueError) else ImportError
        raise kind(f"Cannot import the edits in {path}: {error}") from error


def dump_edits(model: NNsight, edits: Iterable[Edit]) -> bytes:
    """Return edits of ``model`` as the contents of a file."""
    writer, edits = ValueWriter(model), list(edits)
    assigned: dict[int, set[str]] = {}
    for edit in edits:
        assigned.setdefault(id(edit.module_globals), set()).update(global_names(edit.block.code)[1])
    written = [_written(model, edit, writer, assigned[id(edit.module_globals)]) for edit in edits]
    writer.finish()
    python = ".".join(map(str, sys.version_info[:2]))
    content = {"version": VERSION, "python": python, "edits": written, "values": writer.table}
    return safetensors.torch.save(writer.tensors, {KEY: json.dumps(content)})


def load_edits(model: NNsight, data: bytes) -> list[Edit]:
    """Return the edits in the contents of a file, as edits of ``model``.

    Raises:
        ValueError: If it is no edit file, is damaged, or does not fit the model.
        ImportError: If an edit uses something that cannot be imported.
    """
    content = _content(data)
    try:
        reader = ValueReader(model, content["values"], safetensors.torch.load(data))
        namespaces: dict[str, dict[str, Any]] = {}
        return [_read(model, row, reader, namespaces, content["python"]) for row in content["edits"]]
    except safetensors.SafetensorError as error:
        raise ValueError(f"The file is damaged: {error}.") from error
    except (LookupError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(f"The file is damaged: {error!r}.") from error


class PortableEdits:
    """The edits of a model on their way to its copy.

    A deep copy shares the objects that the edits use. A pickled model takes them along as an edit file does.
    """

    def __init__(self, model: NNsight) -> None:
        self._model = model
        self._edits = list(model._edits)

    def __deepcopy__(self, memo: dict[int, Any]) -> PortableEdits:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _PickledEdits, (dump_edits(self._model, self._edits) if self._edits else b"",)

    def of(self, model: NNsight) -> list[Edit]:
        """Return the edits as those of ``model``, a copy of the model they belonged to."""
        return [_moved(edit, self._model, model) for edit in self._edits]


class _PickledEdits:
    """What :class:`PortableEdits` is on the other side."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def of(self, model: NNsight) -> list[Edit]:
        return load_edits(model, self._data) if self._data else []


def _moved(edit: Edit, old: NNsight, new: NNsight) -> Edit:
    """Return ``edit`` for a copy of its model: variables that hold parts of the old model hold those of the new one."""
    if old._module is new._module:
        return edit.of(new)
    scope, roots = edit.scope.copy(), set(edit.roots)
    for name, value in list(scope.items()):
        if isinstance(value, Envoy) and value._tree is old._tree:
            path = value._path.split(".")[1:]
            if path:
                scope.cells[name].cell_contents = new._descend(path)
            else:
                del scope.cells[name].cell_contents
                roots.add(name)
    return Edit(edit.block, scope, edit.module_globals, edit.source, weakref.ref(new), frozenset(roots))


def _written(model: NNsight, edit: Edit, writer: ValueWriter, assigned: set[str]) -> dict[str, Any]:
    """Return an edit as JSON. Globals are its variables there, but for those that some edit of their file assigns."""
    source, user = edit.source, f"The edit at {edit.source.place}"
    if not source.text:
        raise ValueError(f"{user} cannot be exported: its text is gone. Put it into a file.")
    read = global_names(edit.block.code)[0]
    needed = source.needed()
    values = {name: value for name, value in edit.scope.items() if name in edit.block.shared and name in needed}
    values |= dict.fromkeys(edit.roots & needed, model)
    values |= {name: edit.module_globals[name] for name in sorted(read - assigned) if name in edit.module_globals}
    values.pop("__name__", None)
    shared = {name: edit.module_globals[name] for name in sorted(assigned) if name in edit.module_globals}
    return {
        "text": source.text,
        "file": source.filename,
        "line": source.line,
        "item": source.item,
        "class": source.class_name,
        "first_argument": source.first_argument,
        "features": source.features,
        "module": edit.module_globals.get("__name__", "__main__"),
        "variables": {name: writer.write(values[name], name, user) for name in sorted(values)},
        "unbound": sorted(set(edit.block.shared) - set(values)),
        "globals": {name: writer.write(value, name, user) for name, value in shared.items()},
        "locations": _locations(source, values, model),
    }


def _read(
    model: NNsight, row: dict[str, Any], reader: ValueReader, namespaces: dict[str, dict[str, Any]], python: str
) -> Edit:
    """Return the edit that :func:`_written` wrote."""
    place = (row["text"], row["file"], row["line"], row["item"])
    source = Excerpt(*place, row["class"], row["first_argument"], tuple(row["features"]))
    values = {name: reader.read(term) for name, term in row["variables"].items()}
    try:
        block = source.block([*values, *row["unbound"]])
        found = _locations(source, values, model)
    except SyntaxError as error:
        here = ".".join(map(str, sys.version_info[:2]))
        raise ValueError(
            f"The edit written at {source.place}, for Python {python}, cannot be compiled by Python {here}: {error}"
        ) from error
    missing = [expression for expression in row["locations"] if expression not in found]
    if missing:
        raise ValueError(
            f"The edit written at {source.place} uses `{missing[0]}`, which this model ({type(model._module).__name__}) "
            "does not have. Import the edits into a model of the kind they were made for, with the same `rename`."
        )
    # Edits of one Python file that assign its globals see each other's; nothing else of that file comes along.
    module_globals = namespaces.setdefault(row["module"], {"__name__": row["module"], "__builtins__": builtins})
    module_globals.update({name: reader.read(term) for name, term in row["globals"].items()})
    roots = {name for name, value in values.items() if value is model}
    cells = {
        name: types.CellType(values[name]) if name in values and name not in roots else types.CellType()
        for name in block.shared
    }
    own = roots & set(block.shared)
    return Edit(block, Scope(cells, block.inner), module_globals, source, weakref.ref(model), frozenset(own))


def _locations(source: Excerpt, values: dict[str, Any], model: NNsight) -> list[str]:
    """Return the modules that a block names outright, as written: ``model.transformer.h[3]``.

    Such a name is followed from a variable that holds a part of the model through child modules and constant indices.
    """
    statement = source.statement()
    target = statement.items[source.item].optional_vars
    envoys = {name: value for name, value in values.items() if isinstance(value, Envoy)}
    if isinstance(target, ast.Tuple) and len(target.elts) == 2:  # the tracer and the model
        target = target.elts[1]
    if isinstance(target, ast.Name):
        envoys[target.id] = model
    found: dict[str, None] = {}
    for node in ast.walk(ast.Module(body=list(statement.body), type_ignores=[])):
        if isinstance(node, (ast.Attribute, ast.Subscript)) and _followed(node, envoys) is not None:
            found[ast.unparse(node)] = None
    return list(found)


def _followed(node: ast.expr, envoys: dict[str, Envoy]) -> Envoy | None:
    """Return the envoy that an expression names outright."""
    match node:
        case ast.Name(id=name):
            return envoys.get(name)
        case ast.Attribute(value=value, attr=name):
            parent = _followed(value, envoys)
            if parent is None or not (name in parent._children or name in parent._aliases):
                return None
            return parent.__dict__.get(name) or parent._children[name]
        case ast.Subscript(value=value, slice=index):
            parent = _followed(value, envoys)
            try:
                child = None if parent is None else parent[ast.literal_eval(index)]
            except (ValueError, LookupError, TypeError):
                return None
            return child if isinstance(child, Envoy) else None
    return None


def _content(data: bytes) -> dict[str, Any]:
    """Return what the header of a file says.

    Raises:
        ValueError: If it is no edit file of a version that can be read.
    """
    try:
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size]) if size < len(data) else {}
        content = json.loads(header["__metadata__"][KEY])
        version = content["version"]
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError("It is not a file of exported edits, or it is damaged.") from error
    if version != VERSION:
        raise ValueError(
            f"It has version {version} of the format, and this nnsight reads version {VERSION}: import it with the version "
            "of nnsight that exported it, or a newer one."
        )
    return content
