"""The user's view of the inside of a function: ``envoy.source``.

``print(module.source)`` shows the source of the module's ``forward`` with the names of its operations: its calls and assignments. An
operation has ``.output``, ``.input`` and ``.inputs`` like a module, and a ``.source`` if it calls a Python function. Runs pass the
locations of a function's operations once code has asked for them; see :mod:`nnsight.runtime.modules.operations`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..runtime.interleaver import active_interleaver
from ..runtime.modules.listing import Listing, Operation, SourceError, listing_of, no_operation
from ..runtime.modules.located import Located
from ..runtime.modules.operations import forward_of, layers_of
from ..runtime.modules.tree import ModuleTree

if TYPE_CHECKING:
    from .envoy import Envoy

#: Lines shown on either side of an operation that is printed.
_CONTEXT = 5


class Source:
    """The operations of ``function``, which the module or operation at ``path`` calls.

    ``function`` may be decorated. It is ``None`` if only a run can determine which function is called.

    Raises:
        SourceError: If the function has no Python source.
    """

    def __init__(self, tree: ModuleTree, path: str, function: Any) -> None:
        self._tree = tree
        self._path = path
        self._function = None if function is None else layers_of(function, f"`{path}`")[-1]
        if self._function is not None:
            listing_of(self._function)  # raises now if there is no source

    @property
    def _listing(self) -> Listing:
        function = self._function or self._tree.called_at(self._path)
        if function is None:
            raise SourceError(
                f"The function that `{self._path}` calls is only known while the model runs. Trace the model once; after that, its "
                "operations can be listed."
            )
        return listing_of(layers_of(function, f"`{self._path}`")[-1])

    @property
    def path(self) -> str:
        """Path of the module or operation."""
        return self._path

    def __getattr__(self, name: str) -> OperationEnvoy:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        if self._function is None:
            return OperationEnvoy(self, name, None)
        operations = self._listing.operations
        operation = operations.get(self._listing.aliases.get(name, name))
        if operation is None:
            raise AttributeError(no_operation(self._path, name, self._listing))
        return OperationEnvoy(self, operation.name, operation)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *(self._listing.operations if self._is_known else ())})

    @property
    def _is_known(self) -> bool:
        return self._function is not None or self._tree.called_at(self._path) is not None

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the operations, in the order in which they run."""
        return tuple(self._listing.operations)

    def __iter__(self) -> Iterator[NamedOperation]:
        """Iterate over the operations. Each is a string, its name, with the attributes of the operation."""
        return (NamedOperation(self, name) for name in self._listing.operations)

    def __len__(self) -> int:
        return len(self._listing.operations)

    def __contains__(self, name: object) -> bool:
        return name in self._listing.operations

    def __repr__(self) -> str:
        """Return the source, each line with the names of the operations that begin on it."""
        if not self._is_known:
            return f"<source of {self._path}, known after the next run of the model>"
        listing = self._listing
        starting: dict[int, list[str]] = {}
        for operation in listing.operations.values():
            starting.setdefault(operation.line, []).append(operation.name)
        width = max((len(name) for name in listing.operations), default=0)
        digits = len(str(len(listing.lines)))
        start = next((number for number, text in enumerate(listing.lines) if text.lstrip().startswith(("def ", "async def "))), None)
        shown = []
        for number, text in enumerate(listing.lines):
            first, *others = starting.get(number, [""])
            arrow = "->" if first else " *" if number == start else "  "
            shown.append(f" {first:{width}} {arrow} {number:{digits}} {text}".rstrip())
            shown += [f" {other:{width}} -> {'+':>{digits}} {'...'}" for other in others]
        return "\n".join(shown)


class NamedOperation(str):
    """The name of an operation of ``source``, as a string with the attributes of the operation: ``.output``, ``.input``, ``.source``, …"""

    def __new__(cls, source: Source, name: str) -> NamedOperation:
        made = super().__new__(cls, name)
        made.__dict__.update(name=name, _source=source)
        return made

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return getattr(getattr(self._source, self.name), attribute)

    def __setattr__(self, attribute: str, value: Any) -> None:
        setattr(getattr(self._source, self.name), attribute, value)

    name: str
    _source: Source


def source_of(envoy: Envoy) -> Source:
    """Return the operations of the ``forward`` of a module."""
    return Source(envoy._tree, envoy._path, forward_of(envoy._module)[1])


class OperationEnvoy(Located):
    """The operation ``name`` of ``source``. ``operation`` is ``None`` if only a run can determine the function of ``source``."""

    def __init__(self, source: Source, name: str, operation: Operation | None) -> None:
        self._source = source
        self._name = name
        self._operation = operation
        self._path = f"{source._path}.source.{name}"
        self._watch(source._path)

    @property
    def path(self) -> str:
        """Path of the operation, the prefix of its locations."""
        return self._path

    @property
    def source(self) -> Source:
        """The operations of the function that this operation calls.

        Raises:
            SourceError: If the operation calls a module (use that module's envoy) or a C function, or is an assignment.
        """
        source, tree = self._source, self._source._tree
        if self._operation is not None and self._operation.callee is None:
            raise SourceError(f"`{self._path}` is an assignment, which calls nothing. Use the `.source` of the call that made its value.")
        callee = None if self._operation is None else tree.callee(source._path, self._operation)
        for known, path in tree.paths.items():
            if known is callee:
                raise SourceError(f"`{self._path}` calls a module. Use the module's own envoy: `{path}.source`.")
        if callee is None and self._path in tree.refused:
            raise SourceError(tree.refused[self._path])
        if callee is None:
            self._watch(self._path)
        return Source(tree, self._path, callee)

    def _watch(self, path: str) -> None:
        """Make runs pass the locations of the operations of the function at ``path``."""
        run = active_interleaver()
        in_block = run is not None and run.current is not None
        self._source._tree.open_source(path, run if in_block else None)

    def __repr__(self) -> str:
        """Return the lines around the operation. Arrows mark its line."""
        operation = self._operation
        if operation is None:
            return f"<operation {self._path}, known while the model runs>"
        lines = self._source._listing.lines
        start, end = max(0, operation.line - _CONTEXT), min(len(lines), operation.end_line + 1 + _CONTEXT)
        shown = ["    ...."] * (start > 0)
        for number in range(start, end):
            if number == operation.line:
                shown.append(f"--> {lines[number]} <--")
            else:
                shown.append(f"    {lines[number]}".rstrip())
        shown += ["    ...."] * (end < len(lines))
        return "\n".join([f"{self._path}:", "", *shown])
