"""Compiled graphs as files, to read and to step through.

While a :class:`debug_dir` is open, every graph that runs is written to files: the captured graph with its taps, the program, the spliced
graph, and an index (``README.md``) from the user's lines to the files. With ``depyf``, so is dynamo's bytecode, decompiled.

A graph that Python runs (with the ``eager`` backend or ``step=True``) runs *from its file*: its code object has the name of the file. So
breakpoints in the file are hit, and a debugger shows its lines. File names depend only on the order in which graphs run, so a breakpoint
stays valid when the program is started again.
"""

from __future__ import annotations

import re
import threading
import types
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.fx.graph_module import _format_import_block
from torch.package.importer import sys_importer

from ...runtime.report import Report
from ..torch_compat import convert_frame

if TYPE_CHECKING:
    from .explaining import RanPiece

_INDEX = """# Compiled traces

One line for each graph that ran. `captured`: the model's graph with its taps, as dynamo captured it. `program`: the
effects of the block on it. `spliced`: both together; this graph is lowered. Graphs that Python runs (backend `eager`, or
`debug_dir(..., step=True)`) run from the `spliced` file: set breakpoints there.

{bytecode}

| trace | `with` statement | lines of the block | ends | files |
|---|---|---|---|---|
"""

_open: debug_dir | None = None


class debug_dir:  # noqa: N801 - reads as a function, like `torch.no_grad`
    """Write every graph that runs from here on to files; as a context manager, until the end of the ``with`` block.

    Args:
        path: Folder for the files. It is created if it does not exist. Files of an earlier run are overwritten.
        step: Run every graph from its file, whatever its backend, so that one can step through it.
        bytecode: Decompile the bytecode that dynamo generates, with ``depyf``. By default, this is done if ``depyf`` is installed.

    Attributes:
        path: The folder.

    Raises:
        ImportError: If ``bytecode=True`` and ``depyf`` is not installed.
        ValueError: If another directory is open.
    """

    def __init__(self, path: str | Path, *, step: bool = False, bytecode: bool | None = None) -> None:
        global _open  # noqa: PLW0603 - there is one compiler in a process, so one directory
        if _open is not None:
            raise ValueError(f"Graphs are being written to {_open.path} already; close that debug_dir first.")
        self._decompile = None if bytecode is False else _decompiler(required=bytecode is True)
        self.path: Path = Path(path).resolve()
        self.path.mkdir(parents=True, exist_ok=True)
        self._step = step
        self._lock = threading.Lock()
        self._traces: weakref.WeakKeyDictionary[Report, int] = weakref.WeakKeyDictionary()
        self._numbers: dict[Any, int] = {}
        self._graphs: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._variants: weakref.WeakKeyDictionary[Any, tuple[str, Callable[..., Any]]] = weakref.WeakKeyDictionary()
        self._started = 0
        self._index = self.path / "README.md"
        self._index.write_text(_INDEX.format(bytecode=self._about_bytecode(bytecode)), encoding="utf-8")
        self._hook = convert_frame.register_bytecode_hook(self._write_bytecode) if self._decompile is not None else None
        _open = self

    def __enter__(self) -> debug_dir:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop writing files."""
        global _open  # noqa: PLW0603
        if _open is self:
            _open = None
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _about_bytecode(self, wanted: bool | None) -> str:
        if self._decompile is not None:
            return "`bytecode_*.py`: the bytecode that dynamo generated for captured functions, decompiled by depyf."
        if wanted is False:
            return "Bytecode of dynamo is not shown, because of `bytecode=False`."
        return "Bytecode of dynamo is shown if depyf is installed: `pip install 'nnsight[debug]'`."

    def _next(self, name: str) -> int:
        self._numbers[name] = self._numbers.get(name, 0) + 1
        return self._numbers[name]

    def _write_bytecode(self, code: types.CodeType, new_code: types.CodeType) -> types.CodeType | None:
        """Decompile ``new_code``, which dynamo generated from ``code``, and write it to a file. A bytecode hook of dynamo."""
        with self._lock:
            path = self.path / f"bytecode_{self._next('bytecode')}_{re.sub(r'[^a-zA-Z0-9]', '_', code.co_name)}.py"
        try:
            text = self._decompile(new_code)  # type: ignore[misc]
        except Exception as error:
            text = f"# depyf could not decompile this: {type(error).__name__}: {error}\n"
        path.write_text(
            f"# {code.co_name}, {code.co_filename}:{code.co_firstlineno}, as dynamo made it\n{text}\n", "utf-8"
        )
        return None

    def write(self, report: Report, ran: RanPiece) -> tuple[Callable[..., Any], str | None]:
        """Write the files of ``ran``. Returns the function that runs it, and the file of that function's code, if there is one."""
        with self._lock:
            if report not in self._traces:
                self._started += 1
                self._traces[report] = self._started
            captured = self._graphs.get(ran.graph)
            if captured is None:
                captured = self._graphs[ran.graph] = f"graph_{self._next('graph')}"
                code = ran.graph.graph_module.graph.python_code("self").src.strip()
                _write_module(self.path / f"{captured}_captured.py", ran.graph.graph_module, code)
            found = self._variants.get(ran.variant)
            if found is None:
                name = f"{captured}_variant_{self._next(captured)}"
                (self.path / f"{name}_program.txt").write_text(ran.program() + "\n", encoding="utf-8")
                spliced = ran.variant.spliced
                function = _write_module(self.path / f"{name}_spliced.py", spliced.graph_module, spliced.code())
                found = self._variants[ran.variant] = (name, function)
            name, function = found
            with self._index.open("a", encoding="utf-8") as file:
                file.write(self._row(self._traces[report], report, ran, (captured, name)))
        by_python = isinstance(getattr(ran.lowered.function, "__self__", None), torch.fx.GraphModule)
        if self._step or by_python:
            return function, str(self.path / f"{name}_spliced.py")
        return ran.lowered.function, None

    def _row(self, trace: int, report: Report, ran: RanPiece, names: tuple[str, str]) -> str:
        captured, name = names
        lines = ", ".join(dict.fromkeys(ran.variant.spliced.marks.values())) or "none"
        files = [f"{captured}_captured.py", f"{name}_program.txt", f"{name}_spliced.py"]
        links = ", ".join(f"[{file.rpartition('_')[2].partition('.')[0]}]({file})" for file in files)
        return f"| {trace} | {report.where} | {lines} | {ran.ending().replace('|', '/')} | {name}: {links} |\n"


def is_open() -> bool:
    """Whether a :class:`debug_dir` is open."""
    return _open is not None


def dumped(report: Report, ran: RanPiece) -> tuple[Callable[..., Any], str | None]:
    """Return the function that runs ``ran``, and the file of its code, if there is one. Writes files if a directory is open."""
    directory = _open
    return (ran.lowered.function, None) if directory is None else directory.write(report, ran)


def _decompiler(required: bool) -> Callable[[types.CodeType], str] | None:
    try:
        with warnings.catch_warnings():  # the import leaves a file open, which is a warning
            warnings.simplefilter("ignore")
            import depyf
    except ImportError as error:
        if required:
            raise ImportError(
                "debug_dir(bytecode=True) decompiles the bytecode of dynamo with depyf, which is not installed: "
                "pip install 'nnsight[debug]'"
            ) from error
        return None
    decompile: Callable[[types.CodeType], str] = depyf.decompile
    return decompile


def _write_module(path: Path, graph_module: torch.fx.GraphModule, code: str) -> Callable[..., Any]:
    """Write a graph to a file. Returns a function that takes the graph's inputs, and runs the code of that file."""
    names = graph_module.graph.python_code("self").globals
    text = f"{_format_import_block(names, sys_importer)}\n\n\n{code}\n"
    path.write_text(text, encoding="utf-8")
    namespace: dict[str, Any] = {"__name__": path.stem, "__file__": str(path), **names}
    exec(compile(code_at(text, code), str(path), "exec"), namespace)
    forward = namespace["forward"]

    def run(*inputs: Any) -> Any:
        return forward(graph_module, *inputs)

    return run


def code_at(text: str, code: str) -> str:
    """Return ``code`` after as many empty lines as precede it in ``text``, so that line numbers agree."""
    return "\n" * text[: text.index(code)].count("\n") + code
