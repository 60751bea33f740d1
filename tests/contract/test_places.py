"""Every place where a block can live, and every kind of Python it can be made of.

A block that only deferred means what the same lines mean in place. So the reference for constructs of the language is the
same text with a context manager that does nothing. Environments (prompts, notebooks, debuggers) are really started.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import linecache
import multiprocessing
import os
import re
import subprocess
import sys
import zipapp
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pexpect
import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell

from nnsight import NNsight, WithBlockNotFoundError
from nnsight.tracing import Tracer

from .. import ROOT
from ..tracing.test_tracing import load, make

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "dumb", "NO_COLOR": "1", "PYTHONWARNINGS": "error"}
PYENV = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"


def interpreter(version: str) -> str:
    """Return the interpreter of this version; skip the test where there is none."""
    if version == "{}.{}".format(*sys.version_info):
        return sys.executable
    for path in sorted(PYENV.glob(f"{version}.*/bin/python")):
        return str(path)
    pytest.skip(f"no Python {version} here")


#: The version that runs the tests, and, with the slow tests, all others.
every_version = pytest.mark.parametrize(
    "version",
    [
        pytest.param(version, marks=[] if version == "{}.{}".format(*sys.version_info) else [pytest.mark.slow])
        for version in ("3.11", "3.12", "3.13")
    ],
)


def python(*arguments: str, executable: str = sys.executable, fails: bool = False, **options: Any) -> str:
    """Run an interpreter; return what it printed, on both streams if it is to fail."""
    done = subprocess.run(
        [executable, *arguments], capture_output=True, text=True, env=ENVIRONMENT, check=False, timeout=120, **options
    )
    assert bool(done.returncode) == fails, done.stdout + done.stderr
    return done.stdout + done.stderr if fails else done.stdout


# -- the language -----------------------------------------------------------------------------------------------------

#: Each defines ``run(block, log)``, in which ``with block():`` is a trace or does nothing.
CONSTRUCTS = {
    "backslashes": """
def run(block, log):
    total = 1
    with \\
            block():
        value = total + \\
            2
        log.append(value)
""",
    "delete": """
def run(block, log):
    value, table = 1, {"a": 1}
    with block():
        del table["a"]
        del value
        try:
            value
        except NameError as error:
            log.append((isinstance(error, NameError), table))
""",
    "except_star": """
def run(block, log):
    with block():
        try:
            raise ExceptionGroup("g", [ValueError(1), TypeError(2)])
        except* ValueError as group:
            log.append(repr(group.exceptions))
        except* TypeError as group:
            log.append(repr(group.exceptions))
""",
    "finally_and_else": """
def run(block, log):
    for number in range(3):
        try:
            with block():
                try:
                    log.append(1 / (number - 1))
                except ZeroDivisionError:
                    log.append("zero")
                else:
                    log.append("else")
                finally:
                    log.append("finally")
        finally:
            log.append(number)
""",
    "match": """
def run(block, log):
    point = {"x": 1, "rest": [1, 2, 3]}
    with block():
        match point:
            case {"x": 0}:
                log.append("zero")
            case {"x": int(x), "rest": [first, *others]} if x:
                log.append((x, first, others))
""",
    "loops": """
def run(block, log):
    with block():
        for i in range(5):
            if i == 1:
                continue
            if i == 3:
                break
            log.append(i)
        else:
            log.append("never")
        while i:
            i -= 1
        else:
            log.append(i)
""",
    "class_in_block": """
def run(block, log):
    base, scale = object, 3
    with block():
        class Inner(base):
            factor = scale
            def __init__(self):
                super().__init__()
                self.__hidden = scale
            @property
            def value(self):
                return self.__hidden * self.factor
        log.append((Inner().value, Inner.__name__, sorted(vars(Inner()))))
""",
    "lambda_defaults_and_decorators": """
import functools
def run(block, log):
    with block():
        offset = 2
        double = lambda x, by=offset: x * by
        offset = 100
        @functools.lru_cache
        def cached(x, /, y=offset, *, z=double(2)):
            return x + y + z
        log.append((double(4), cached(1), cached(1), cached.cache_info().hits))
""",
    "comprehensions": """
def run(block, log):
    scale, rows = 2, [[1, 2], [3]]
    with block():
        offset = 10
        log.append([x * scale + offset for row in rows for x in row if x != scale])
        log.append({x: {y for y in row} for x, row in enumerate(rows)})
        log.append(sum(x * offset for x in rows[0]))
        log.append([[scale * inner for inner in row] for row in rows])
""",
    "nested_functions_share": """
def run(block, log):
    count = 0
    with block():
        def bump():
            nonlocal count
            count += 1
            return count
        bump(); bump()
        log.append(count)
        def generate():
            for step in range(3):
                yield step
                if step:
                    return
        log.append(list(generate()))
""",
    "global_statement": """
number = 1
def run(block, log):
    with block():
        global number
        number += 1
        log.append(number)
    log.append(number > 1)
""",
    "global_of_the_function": """
number = 1
def run(block, log):
    global number
    with block():
        number = number + 1
        [number for _ in range(2)]
    log.append(number > 1)
""",
    "nonlocal_in_the_block": """
def run(block, log):
    value = 1
    def inner():
        with block():
            if True:
                nonlocal value
                value = value + 1
                log.append(value)
    inner()
""",
    "super_and_class": """
class Base:
    def name(self):
        return "base"
    @classmethod
    def made(cls):
        return cls.__name__
class Child(Base):
    def name(self, block, log):
        with block():
            log.append(super().name())
            log.append(__class__.__name__)
            with block():
                log.append(super().name() + __class__.__name__)
            log.append((lambda: __class__.__name__)())
    @classmethod
    def made(cls, block, log):
        with block():
            log.append(super().made())
def run(block, log):
    Child().name(block, log)
    Child.made(block, log)
""",
    "private_names": """
class Owner:
    __shared = 3
    def __init__(self):
        self.__value = 4
    def run(self, block, log):
        __local = 5
        with block():
            self.__value += 1
            __inner = __local + 1
            log.append((self.__value, self.__shared, Owner.__shared, __local, __inner))
def run(block, log):
    Owner().run(block, log)
""",
    "locals_exec_eval": """
def run(block, log):
    scale, unused = 3, 4
    with block():
        value = 2
        log.append(eval("value * scale + unused"))
        log.append({key: item for key, item in locals().items() if key in ("scale", "value", "unused")})
        namespace = {}
        exec("made = scale + unused", {**locals()}, namespace)
        log.append((namespace["made"], "{scale} {unused}".format(**locals()), "unused" in dir()))
""",
    "annotations": """
def run(block, log):
    with block():
        width: int = 3
        height: "int"
        def typed(x: int, y: "None" = None) -> list[int]:
            z: str = "a"
            return [x]
        log.append((width, typed.__annotations__, typed(1)))
""",
    "postponed_annotations": """
from __future__ import annotations
def run(block, log):
    with block():
        def typed(x: Undefined, y: "text" = None) -> 3:
            return x
        class Fields:
            x: AlsoUndefined
        log.append((typed.__annotations__, Fields.__annotations__))
""",
    "formats": """
def run(block, log):
    name, width = "abc", 6
    with block():
        log.append(f"{name!r:>{width}} {width=} {{}} {[n for n in name]}" "more" f"{name}")
        log.append("%s is %d%% %(" % (name, width) if False else "%s is %d%%" % (name, width))
        log.append(b"bytes" + b"\\x00" + rb"\\d")
""",
    "strings_over_lines": '''
def run(block, log):
    with block():
        text = """one
    two
with three:
"""
        log.append(text)
        "a string that is a statement"
        def documented():
            """Its docstring."""
        log.append((documented.__doc__, documented()))
''',
    "numbers_and_constants": """
def run(block, log):
    with block():
        log.append((-1, 1e400, 1e400 - 1e400 != 0, 0x10, 1_000, 2 ** 8, 3j, ..., None, not True, "a" in ("a", "b"), 5 % 3))
        assert log, "a message"
        log.append(1 if log else 2)
        log.append(1 < 2 <= 2 != 3)
        if __debug__:
            log.append("debug")
""",
    "imports": """
def run(block, log):
    with block():
        import os.path as path
        from math import sqrt, floor as down
        import collections.abc
        log.append((path.join("a", "b"), sqrt(9), down(1.5), collections.abc.Sized.__name__))
""",
    "inner_contexts": """
import contextlib
@contextlib.contextmanager
def context(log, name):
    log.append("enter " + name)
    try:
        yield name
    except KeyError:
        log.append("caught " + name)
    finally:
        log.append("exit " + name)
def run(block, log):
    with context(log, "a"), block(), context(log, "b") as b, context(log, b + "c") as c:
        log.append((b, c))
        with (
            context(log, "d"),
            context(log, "e") as e,
        ):
            raise KeyError(e)
    with (context(log, "f")), (block()):
        log.append("last")
""",
    "several_traces_in_one_header": """
def run(block, log):
    with block() as one, block() as two, block():
        log.append("in three")
        with block(), block():
            log.append("in five")
""",
    "headers_over_lines": """
def run(block, log):
    with (
        block(
            # a comment
        ) as tracer,
    ):

        # comments and blank lines

        log.append("here")
    with block(
    ): # after the header
        log.append("there")
""",
    "on_the_line_of_the_header": """
def run(block, log):
    with block(): log.append("é"); x = 1; log.append([x for x in (x, 2)])
    with block(
    ): log.append(
        'on two lines')
    with block() as one, block(): log.append("in two")
    with block(), block() as two:
        with block(): x = "inner"; log.append(x)
        for x in range(2):
            with block(): log.append(x)
        with block(): pass
        def f():
            with block(): log.append("in a function")
        f()
        with block(): lambda: 0; type("class", (), {}); log.append("last")
    try:
        with block(): log.append("before"); 1 / 0; log.append("never")
    except ZeroDivisionError as error: log.append(error.__traceback__.tb_lineno)
""",
    "nested": """
def run(block, log):
    outer = 1
    with block():
        middle = outer + 1
        for step in range(2):
            with block():
                inner = middle + step
                log.append((outer, middle, inner))
        log.append(inner)
""",
    "in_a_lambda_called_inside": """
def run(block, log):
    def traced(value):
        with block():
            log.append(value)
    with block():
        call = lambda value: traced(value + 1)
        [call(number) for number in range(2)]
""",
    "generator": """
def run(block, log):
    def numbers():
        total = 0
        try:
            for number in range(3):
                with block():
                    log.append(total + number)
                total += yield number
        finally:
            with block():
                log.append("closed")
    generator = numbers()
    next(generator)
    generator.send(10)
    generator.close()
""",
    "contextmanager": """
import contextlib
def run(block, log):
    @contextlib.contextmanager
    def around(name):
        with block():
            log.append("before " + name)
        yield
        with block():
            log.append("after " + name)
    with around("x"):
        log.append("in place")
    @around("y")
    def decorated():
        log.append("called")
    decorated()
""",
    "class_body": """
def run(block, log):
    scale = 2
    class Body:
        factor = 3
        with block():
            log.append(factor * scale)
            log.append([factor_ * scale for factor_ in (1, 2)])
    log.append("factor" in vars(Body))
""",
    "unicode_names": """
def run(block, log):
    größe, 变量 = 2, "é😀"
    with block():
        größe = größe + 1; s = "ü" + 变量; log.append((größe, s, f"{变量}{größe}"))
""",
    "tabs": "def run(block, log):\n\tvalue = 1\n\twith block():\n\t\tif value:\n\t\t\tlog.append(value)\n",
    "form_feed": "def run(block, log):\n    value = 1\n\f\n    with block():\n        log.append(value)\n",
    "long_body": "def run(block, log):\n    with block():\n"
    + "".join(f"        v{i} = {i}\n" for i in range(400))
    + "        log.append(v0 + v399)\n",
}


class Deferred(Tracer):
    """A trace without a model; counts what it ran, so that a body run in place would show."""

    runs = 0

    def execute(self, function: Callable[[], None]) -> None:
        Deferred.runs += 1
        function()


CONSTRUCTS["what_python_adds"] = """
def run(block, log):
    with block():
        class Inner:
            def method(self):
                super().__init__()
                self.attribute = 1
            name = "last"
        try:
            raise KeyError
        except KeyError as error:
            log.append(repr(error))
            message = error
        names = ["-c", "%s and %s"
                 % (Inner.name, 3)]
        log.append(names)
"""


@pytest.mark.parametrize("newline", ["\n", "\r\n"], ids=["lf", "crlf"])
@pytest.mark.parametrize("name", CONSTRUCTS)
def test_a_block_means_what_it_means_in_place(tmp_path: Path, name: str, newline: str) -> None:
    module = load(tmp_path / f"place_{name}.py", CONSTRUCTS[name].replace("\n", newline))
    deferred: list[Any] = []
    in_place: list[Any] = []
    before = Deferred.runs
    module.run(Deferred, deferred)
    assert Deferred.runs > before
    reference = load(tmp_path / f"reference_{name}.py", CONSTRUCTS[name].replace("\n", newline))
    reference.run(contextlib.nullcontext, in_place)
    assert deferred, "the block ran"
    assert repr(deferred) == repr(in_place)


@pytest.mark.parametrize("encoding", ["latin-1", "utf-8-sig", "cp1252"])
def test_encodings(tmp_path: Path, encoding: str) -> None:
    cookie = "" if encoding == "utf-8-sig" else f"# -*- coding: {encoding} -*-\n"
    text = cookie + "def run(block, log):\n    è = 'ü'\n    with block(): # ä\n        é = è + 'ö'; log.append(é)\n"
    log: list[str] = []
    load(tmp_path / f"encoded_{encoding.replace('-', '_')}.py", text.encode(encoding)).run(Deferred, log)
    assert log == ["üö"]


@pytest.mark.parametrize(
    "line", ["await log", "async for _ in log: pass", "async with log: pass", "[x async for x in log]"]
)
def test_a_block_cannot_wait_for_an_event_loop(tmp_path: Path, line: str) -> None:
    text = f"async def run(block, log):\n    with block():\n        {line}\n"
    with pytest.raises(SyntaxError, match="`await`") as raised:
        asyncio.run(load(tmp_path / "waits.py", text).run(Deferred, []))
    assert (raised.value.lineno, raised.value.filename) == (3, str(tmp_path / "waits.py"))


def test_without_columns_in_the_code(tmp_path: Path) -> None:
    """``-X no_debug_ranges`` leaves lines only."""
    script = tmp_path / "lines.py"
    script.write_text(
        "from nnsight.tracing import Tracer\nwith Tracer():\n    a = [1].save()\n    with Tracer():\n        b = [2].save()\n"
        "print(a, b)\n"
    )
    assert python("-X", "no_debug_ranges", str(script)) == "[1] [2]\n"


# -- text that is another than the code -------------------------------------------------------------------------------

EDITS = {
    "name": ("a + b", "a + c"),
    "operator": ("a + b", "a - b"),
    "constant": ("items[5]", "items[6]"),
    "string": ("'key'", "'yek'"),
    "attribute": ("b.real", "b.imag"),
    "comparison": ("a < b", "a > b"),
    "nested function": ("x * 2", "x * 3"),
    "lines": ("    with", "\n    with"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_a_file_edited_after_it_was_loaded(tmp_path: Path, edit: str) -> None:
    """Also where the text has the same shape as before: other lines than those that were loaded are never run."""
    text = (
        "def run(block, a, b, c, items):\n    with block():\n        v = (a + b, items[5], items['key'], b.real, a < b)\n"
        "        f = lambda x: x * 2\n        items['result'] = (v, f(a))\n"
    )
    path = tmp_path / "changed.py"
    module = load(path, text)
    before, after = EDITS[edit]
    assert text.count(before) == 1
    path.write_text(text.replace(before, after))
    os.utime(path, (1, 1))
    linecache.checkcache(str(path))
    items = {5: 5, 6: 6, "key": 7}
    with pytest.raises(WithBlockNotFoundError, match="edited after it was loaded"):
        module.run(Deferred, 1, 2, 3, items)
    assert "result" not in items
    path.write_text(text)
    linecache.checkcache(str(path))
    module.run(Deferred, 1, 2, 3, items)
    assert items["result"] == ((3, 5, 7, 2, True), 2)


# -- async, threads, processes ----------------------------------------------------------------------------------------


def traced(model: NNsight, number: int) -> torch.Tensor:
    x = torch.full((1, 2), float(number))
    with model.trace(x):
        model[0].output += number
        value = model.output.save()
    return value


def by_hand(model: NNsight, number: int) -> torch.Tensor:
    first, relu, last = model._module
    return last(relu(first(torch.full((1, 2), float(number))) + number))


def test_concurrent_tasks_of_one_loop() -> None:
    model = make()

    async def task(number: int) -> torch.Tensor:
        await asyncio.sleep(0)
        x = torch.full((1, 2), float(number))
        with model.trace(x):
            model[0].output += number
            value = model.output.save()
        await asyncio.sleep(0)
        return value

    async def run() -> list[torch.Tensor]:
        return await asyncio.gather(*(task(number) for number in range(8)))

    for number, value in enumerate(asyncio.run(run())):
        assert torch.equal(value, by_hand(model, number))


def _process(number: int, results: Any) -> None:
    torch.set_num_threads(1)
    results.put((number, traced(make(), number).tolist()))


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_processes(method: str) -> None:
    context = multiprocessing.get_context(method)
    results = context.SimpleQueue()
    process = context.Process(target=_process, args=(3, results))
    process.start()
    number, value = results.get()
    process.join()
    assert (number, value) == (3, by_hand(make(), 3).tolist())


# -- code without a file ----------------------------------------------------------------------------------------------

SCRIPT = """\
from nnsight.tracing import Tracer
outer = 1
with Tracer():
    a = [outer, 'ü'].save()
    with Tracer():
        b = [a[0] + 1].save()
def function(value):
    with Tracer():
        c = [value].save()
    return c
print(a[0], b, function(3))
"""
PRINTED = "1 [2] [3]\n"


@every_version
@pytest.mark.parametrize("options", [["-c"], ["-bWignore", "-X", "dev", "-Ec"]], ids=" ".join)
def test_python_c(version: str, options: list[str]) -> None:
    assert python(*options, SCRIPT, "-c", "more", executable=interpreter(version)) == PRINTED


def test_the_argument_of_c_without_a_blank() -> None:
    assert python(f"-bc{SCRIPT}", "more") == PRINTED


@every_version
def test_standard_input_from_a_file(version: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    for arguments in ([], ["-"]):
        with (tmp_path / "script.py").open() as stdin:
            assert python(*arguments, executable=interpreter(version), stdin=stdin) == PRINTED


@every_version
def test_standard_input_from_a_pipe_is_gone(version: str) -> None:
    text = python("-", executable=interpreter(version), input=SCRIPT, fails=True)
    assert "WithBlockNotFoundError: The source of the block at <stdin>:3 cannot be read" in text
    assert "put the block into a file" in text


@every_version
def test_modules_scripts_and_archives(version: str, tmp_path: Path) -> None:
    executable = interpreter(version)
    package = tmp_path / "application"
    package.mkdir()
    (package / "__main__.py").write_text(SCRIPT)
    (package / "library.py").write_text(SCRIPT)
    zipapp.create_archive(package, tmp_path / "application.pyz")
    assert python("-m", "application", executable=executable, cwd=tmp_path) == PRINTED
    assert python("-m", "application.library", executable=executable, cwd=tmp_path) == PRINTED
    assert python(str(package / "library.py"), executable=executable) == PRINTED
    assert python("library.py", executable=executable, cwd=package) == PRINTED
    assert python(str(package), executable=executable) == PRINTED
    assert python(str(tmp_path / "application.pyz"), executable=executable) == PRINTED
    importing = f"import sys; sys.path.insert(0, {str(tmp_path / 'application.pyz')!r}); import library"
    assert python("-c", importing, executable=executable) == PRINTED
    assert python("-c", "import runpy; runpy.run_module('application')", executable=executable, cwd=tmp_path) == PRINTED


def test_a_string_somebody_still_holds(capsys: pytest.CaptureFixture[str]) -> None:
    """``exec`` of a variable works; so do the functions it defines, once a block of it was entered from there."""
    source = SCRIPT
    exec(compile(source, "<generated>", "exec"), {})
    assert capsys.readouterr().out == PRINTED


def test_a_string_nobody_holds() -> None:
    with pytest.raises(WithBlockNotFoundError, match="<generated>:1 cannot be read.*`linecache`"):
        exec(compile("with Tracer():\n    a = 1\n", "<generated>", "exec"), {"Tracer": Tracer})


def test_another_string_than_the_one_that_runs() -> None:
    """Texts that happen to be around are compared with the code, not trusted."""
    decoy = "with Tracer():\n    log.append(1)\n"
    log: list[int] = []
    with pytest.raises(WithBlockNotFoundError, match="cannot be read"):
        exec(compile(decoy.replace("1", "2"), "<generated>", "exec"), {"Tracer": Tracer, "log": log})
    assert not log


# -- prompts ----------------------------------------------------------------------------------------------------------

DIALOGUE = [
    ("from nnsight.tracing import Tracer", ""),
    ("with Tracer():\n    y = ['a'].save()\n    y = ['a'].save()\n", ""),
    ("def f(value):\n    with Tracer():\n        v = [value, 'ü'].save()\n    return v\n", ""),
    ("with Tracer():\n    y = ['b'].save()\n    with Tracer():\n        z = [y[0] + '!'].save()\n", ""),
    ("for i in range(2):\n    with Tracer():\n        w = [i].save()\n    print('step', w)\n", "step [1]"),
    ("print(y, z, f(1))", "['b'] ['b!'] [1, 'ü']"),
    ("input('name? ')\nPeter", "Peter"),
    ("with Tracer():\n    a = 1\n    1 / 0\n", "ZeroDivisionError: division by zero"),
    ("with Tracer():\n    a = [f(2)].save()\n", ""),
    ("print(a)", "[[2, 'ü']]"),
    ("with Tracer(): c = ['c'].save(); d = c + ['d']; d.save()\n", ""),
    ("print(c, d)", "['c'] ['c', 'd']"),
]


def converse(child: Any, first: str, more: str) -> None:
    """Enter statements at a prompt and look at the answers."""
    prompts = [rf"(?:^|\n){prompt}" for prompt in (first, more, r"name\? ")]
    child.expect(prompts)
    for statement, answer in DIALOGUE:
        for line in statement.split("\n"):
            child.sendline(line)
            child.expect(prompts)
        assert answer in child.before, statement


@every_version
@pytest.mark.parametrize("start", ["", "-i script"])
def test_the_prompt_of_python(version: str, start: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import nnsight\n")
    arguments = ["-i", str(tmp_path / "script.py")] if start else []
    environment = {**ENVIRONMENT, "PYTHON_HISTORY": str(tmp_path / "history"), "HOME": str(tmp_path)}
    environment["PYTHONWARNINGS"] = "default"
    child = pexpect.spawn(interpreter(version), arguments, env=environment, encoding="utf8", timeout=30)
    converse(child, ">>> ", r"\.\.\. ")
    child.sendcontrol("c")
    child.expect_exact("KeyboardInterrupt")
    child.expect_exact(">>> ")
    child.sendline("f(9)")
    child.expect_exact("[9, 'ü']")
    child.sendline("raise SystemExit(7)")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 7


@every_version
def test_a_console_of_the_code_module(version: str, tmp_path: Path) -> None:
    script = "import code\nfrom nnsight.tracing import Tracer\ncode.interact('', local={'Tracer': Tracer})\n"
    lines = SCRIPT.replace("def function", "\ndef function").replace("print(", "\nprint(")
    (tmp_path / "console.py").write_text(script)
    assert PRINTED in python(str(tmp_path / "console.py"), executable=interpreter(version), input=lines)


def test_the_prompt_of_ipython(tmp_path: Path) -> None:
    environment = {**ENVIRONMENT, "IPYTHONDIR": str(tmp_path), "HOME": str(tmp_path), "PYTHONWARNINGS": "default"}
    arguments = ["-m", "IPython", "--simple-prompt", "--no-banner", "--no-confirm-exit", "--colors=NoColor"]
    child = pexpect.spawn(sys.executable, arguments, env=environment, encoding="utf8", timeout=60)
    converse(child, r"In \[\d+\]: ", r" +\.\.\.: ")
    child.sendline("exit")
    child.expect(pexpect.EOF)
    child.close()


@pytest.fixture
def shell(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path_factory.mktemp("ipython")))
    linecache_check = linecache.checkcache
    shell = InteractiveShell()
    shell.user_ns["Tracer"] = Tracer
    yield shell
    shell.history_manager.end_session()
    linecache.checkcache = linecache_check


def cell(shell: InteractiveShell, text: str) -> Any:
    result = shell.run_cell(text, store_history=True)
    result.raise_error()
    return result.result


def test_cells(shell: InteractiveShell) -> None:
    cell(shell, "x = 1\nwith Tracer():\n    y = [x].save()")
    assert shell.user_ns["y"] == [1]
    cell(shell, "x = 1\nwith Tracer():\n    y = [x + 1].save()")  # the cell edited and run again: the same lines
    assert shell.user_ns["y"] == [2]
    cell(shell, "x = 5\nwith Tracer():\n    y = [x].save()")
    cell(shell, "x = 1\nwith Tracer():\n    y = [x].save()")  # a cell as it was before
    assert shell.user_ns["y"] == [1]


def test_functions_of_earlier_cells(shell: InteractiveShell) -> None:
    cell(shell, "def f(v):\n    with Tracer():\n        y = [v, 'first'].save()\n    return y")
    cell(shell, "g = f\ndef f(v):\n    with Tracer():\n        y = [v, 'other'].save()\n    return y")
    assert cell(shell, "with Tracer():\n    both = [f(1), g(2)].save()\nboth") == [[1, "other"], [2, "first"]]


@pytest.mark.parametrize("magic", ["%%time", "%%timeit -n 1 -r 1", "%%capture out", "%%prun -q"])
def test_cell_magics(shell: InteractiveShell, magic: str) -> None:
    cell(shell, "log = []")
    cell(shell, f"{magic}\nlog.append('before')\nwith Tracer():\n    log.append('in')\nlog.append('after')")
    assert shell.user_ns["log"] == ["before", "in", "after"]


def test_cells_that_wait_and_cells_with_commands(shell: InteractiveShell) -> None:
    assert cell(shell, "import asyncio\nawait asyncio.sleep(0)\nwith Tracer():\n    y = [1].save()\ny") == [1]
    assert cell(shell, "!true\nlisted = !echo a\nwith Tracer():\n    y = [2].save()\ny") == [2]


def test_a_script_run_by_ipython(shell: InteractiveShell, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    cell(shell, f"%run {tmp_path / 'script.py'}")
    assert capsys.readouterr().out == PRINTED


def test_the_traceback_of_a_cell_shows_its_lines(shell: InteractiveShell, capsys: pytest.CaptureFixture[str]) -> None:
    shell.run_cell("def helper():\n    return 1 / 0\nwith Tracer():\n    value = 3\n    helper()  # this line\n")
    shown = re.sub("\x1b\\[[0-9;]*m", "", capsys.readouterr().out)
    assert "----> 5     helper()  # this line" in shown
    assert "----> 2     return 1 / 0" in shown
    assert "nnsight/tracing" not in shown


# -- debuggers, coverage, test runners --------------------------------------------------------------------------------

DEBUGGED = """\
from nnsight.tracing import Tracer
def main():
    outer = 'outer value'
    with Tracer():
        inner = 'inner value'
        {stop}
        later = inner + '!'
        print(later)
    print('end')
main()
"""


@every_version
def test_a_breakpoint_in_a_block(version: str, tmp_path: Path) -> None:
    script = tmp_path / "debugged.py"
    script.write_text(DEBUGGED.format(stop="breakpoint()"))
    commands = "n\np inner, outer\nn\np later\nw\nc\n"
    shown = python(str(script), executable=interpreter(version), input=commands)
    assert "-> later = inner + '!'" in shown
    assert "('inner value', 'outer value')" in shown
    assert "'inner value!'" in shown
    assert "-> print(later)" in shown
    assert shown.endswith("end\n")


@every_version
def test_stepping_over_and_into_a_block(version: str, tmp_path: Path) -> None:
    script = tmp_path / "stepped.py"
    script.write_text(DEBUGGED.format(stop="pass"))
    over = python("-m", "pdb", str(script), executable=interpreter(version), input="b 3\nc\nn\nn\nn\nc\nq\n")
    assert "-> with Tracer():" in over
    assert "-> print('end')" in over
    into = python("-m", "pdb", str(script), executable=interpreter(version), input="b 7\nc\np inner\nn\nc\nq\n")
    assert "-> later = inner + '!'" in into
    assert "'inner value'" in into
    assert "-> print(later)" in into


COVERED = """\
from nnsight.tracing import Tracer
def main(fail):
    with Tracer():
        a = [1].save()
        if fail:
            1 / 0
        a.append(2)
    return a
main(False)
try:
    main(True)
except ZeroDivisionError:
    print('caught')
"""


@pytest.mark.parametrize("core", ["ctrace", "pytrace"])
def test_coverage_sees_the_lines_of_blocks(core: str, tmp_path: Path) -> None:
    (tmp_path / "covered.py").write_text(COVERED)
    environment = {**ENVIRONMENT, "COVERAGE_CORE": core}
    for command in (["run", "--include=covered.py", "covered.py"], ["json", "-q", "-o", "report.json"]):
        done = subprocess.run(
            [sys.executable, "-m", "coverage", *command],
            cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())["files"]["covered.py"]
    assert report["missing_lines"] == []


MONITORED = """\
import sys
lines = []
tool = sys.monitoring.DEBUGGER_ID
sys.monitoring.use_tool_id(tool, "lines")
def line(code, number):
    if code.co_filename == __file__:
        lines.append(number)
sys.monitoring.register_callback(tool, sys.monitoring.events.LINE, line)
sys.monitoring.set_events(tool, sys.monitoring.events.LINE)
"""


@pytest.mark.parametrize("version", ["3.12", "3.13"])
def test_monitoring_sees_the_lines_of_blocks(version: str, tmp_path: Path) -> None:
    """As coverage does by default on newer versions."""
    script = tmp_path / "monitored.py"
    script.write_text(MONITORED + COVERED + "sys.monitoring.set_events(tool, 0)\nprint(sorted(set(lines)))\n")
    seen = python(str(script), executable=interpreter(version))
    offset = MONITORED.count("\n")
    numbers = set(json.loads(seen.splitlines()[1]))
    assert seen.startswith("caught\n")
    assert {number + offset for number in (3, 4, 5, 6, 7, 8)} <= numbers


REWRITTEN = """\
import pytest
from nnsight.tracing import Tracer
def test_passes():
    value = 3
    with Tracer():
        assert value == 3, "as expected"
        kept = [value].save()
        with Tracer():
            assert len(kept) == 1
    assert kept == [3]
def test_fails():
    values = [1, 2, 3]
    with Tracer():
        assert sum(values) == 7
"""


def test_assertions_that_pytest_has_rewritten(tmp_path: Path) -> None:
    (tmp_path / "test_rewritten.py").write_text(REWRITTEN)
    shown = python("-m", "pytest", "-q", "-p", "no:cacheprovider", "test_rewritten.py", fails=True, cwd=tmp_path)
    assert "1 failed, 1 passed" in shown
    assert ">       assert sum(values) == 7" in shown
    assert "E       assert 6 == 7" in shown
    assert "E        +  where 6 = sum([1, 2, 3])" in shown
    assert "nnsight/tracing" not in shown


# -- other interpreters -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [pytest.param("3.12", marks=pytest.mark.slow), "3.13"])
def test_the_language_on_other_versions(version: str, tmp_path: Path) -> None:
    """This layer imports no torch, so bare interpreters can run it."""
    executable = interpreter(version)
    script = tmp_path / "other.py"
    script.write_text(
        "import contextlib, json, sys, importlib.util\n"
        "from nnsight.tracing import Tracer\n"
        "def load(name, text):\n"
        f"    path = {str(tmp_path)!r} + '/other_' + name + '.py'\n"
        "    open(path, 'w', encoding='utf8').write(text)\n"
        "    spec = importlib.util.spec_from_file_location(name, path)\n"
        "    module = importlib.util.module_from_spec(spec)\n"
        "    spec.loader.exec_module(module)\n"
        "    return module\n"
        "for name, text in json.load(sys.stdin).items():\n"
        "    deferred, reference = [], []\n"
        "    load(name, text).run(Tracer, deferred)\n"
        "    load('reference_' + name, text).run(contextlib.nullcontext, reference)\n"
        "    assert deferred and repr(deferred) == repr(reference), (name, deferred, reference)\n"
        "assert 'torch' not in sys.modules\n"
        "print('done')\n"
    )
    newer = {
        "type_parameters": "def run(block, log):\n    with block():\n        type Pair[T] = tuple[T, T]\n"
        "        def first[T](pair: Pair[T]) -> T:\n            return pair[0]\n"
        '        log.append((first((1, 2)), Pair.__name__, f"{\'a\' + f"{1}"}"))\n',
        "inlined_comprehension": "def run(block, log):\n    x = 5\n    with block():\n"
        "        log.append(([x for x in range(3)], x, [lambda: y for y in range(2)][0]()))\n",
    }
    assert python(str(script), executable=executable, input=json.dumps(CONSTRUCTS | newer)) == "done\n"
