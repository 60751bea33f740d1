"""An import changes nothing in torch, and after a run all is as before: the functions and classes of all its modules, and their methods."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tokenize
from pathlib import Path
from typing import Any

import pytest

import nnsight

from . import ROOT

#: What both programs begin with: attributes of the modules of torch that are loaded, and of their classes.
BEGIN = """
import ast, importlib.util, json, pathlib, sys, warnings

warnings.simplefilter("ignore")

def attributes():
    found = {}
    for name, module in list(sys.modules.items()):
        if module is None or name.partition(".")[0] != "torch":
            continue
        for key, value in list(vars(module).items()):
            found[f"{name}.{key}"] = value
            if isinstance(value, type) and value.__module__.partition(".")[0] == "torch":
                found.update({f"{value.__module__}.{value.__qualname__}.{name}": own for name, own in vars(value).items()})
    return found

def is_ours(value):
    function = getattr(value, "__func__", getattr(value, "func", value))
    return str(getattr(function, "__module__", "")).partition(".")[0] == "nnsight"

def is_code(value):
    return callable(value) or isinstance(value, (classmethod, staticmethod, property))

def changes(before):
    after = attributes()
    for name, value in after.items():
        old = before.get(name)
        if value is not old and (is_code(old) or is_ours(value)):
            yield name
    yield from (name for name in before if name not in after)
"""

#: The modules that the package imports from elsewhere come first: they may change each other.
IMPORTS = """
folder = pathlib.Path(importlib.util.find_spec("nnsight").origin).parent
files = [path for path in sorted(folder.rglob("*.py")) if "vllm" not in path.parts and path.stem != "__main__"]

def from_elsewhere():
    for path in files:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Import):
                yield from (name.name for name in node.names)
            elif isinstance(node, ast.ImportFrom) and not node.level:
                yield node.module
                yield from (f"{node.module}.{name.name}" for name in node.names)

def load(name):
    try:
        importlib.import_module(name)
    except ImportError:  # an extra, or a name that is no module
        pass

for name in sorted({*from_elsewhere()}):
    load(name)
before = attributes()
for path in files:
    parts = path.relative_to(folder.parent).with_suffix("").parts
    load(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
assert "nnsight.fx.inlining" in sys.modules and "nnsight.program.record.recorder" in sys.modules
print(json.dumps(sorted(changes(before))))
"""

#: Torch changes itself when something is compiled for the first time.
RUNS = """
import contextlib, threading
import torch
from nnsight import NNsight, fx

def replaced_meanwhile():
    return "__getattribute__" in vars(torch.autograd.function.FunctionMeta)

class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2
    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2

def net():
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4))

def run(model, wrong=None):
    with model.trace(torch.ones(2, 4)):
        hidden = model[0].output
        seen.append(replaced_meanwhile())
        hidden += 1.0
        if wrong == "block":
            raise KeyError("a mistake")
        if wrong == "shape":
            model[1].output = hidden[:, :3]
        model[1].output = Doubled.apply(torch.compile(torch.sin, backend="eager")(hidden))
        out = model.output.save()
        if wrong == "value":
            print(out.sum().item())
        with out.sum().backward():
            gradient = hidden.grad.save()
    return out

def failing(model, wrong):
    with contextlib.suppress(KeyError, ValueError, RuntimeError):
        run(model, wrong)
        assert wrong is None, wrong

seen = []
torch.compile(net(), backend=sys.argv[1])(torch.ones(2, 4)).sum().backward()
model = NNsight(net(), compile={"backend": sys.argv[1]})
strict = NNsight(net(), compile={"backend": sys.argv[1], "fullgraph": True})
before = attributes()
for _ in range(2):
    run(model)
    for wrong in ("block", "shape"):
        failing(model, wrong)
    failing(strict, "value")
    with contextlib.suppress(RuntimeError):
        model(torch.ones(2, 5))
        assert False, "the model failed"
    threads = [threading.Thread(target=run, args=(model,)) for _ in range(3)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
with model.edit() as edited:
    edited[0].output += 1.0
torch.compile(lambda x: edited(x) + 1, backend="eager", fullgraph=True)(torch.ones(2, 4))
assert seen and all(seen), "recordings need the replaced functions"
assert fx.counters.captures and fx.counters.recordings
print(json.dumps(sorted(changes(before))))
"""


#: Gradients of the rows of invokes can be asked for after the trace.
INVOKES = """
import torch
from nnsight import NNsight

class Rows(NNsight):
    def _batch(self, batched, x):
        return ((x if batched is None else torch.cat([batched[0][0], x]),), {}), len(x)

def run():
    with model.trace() as tracer:
        for _ in range(2):
            with tracer.invoke(torch.ones(2, 4)):
                hidden = model[0].output

model = Rows(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)))
with torch.no_grad():
    run()  # imports what torch needs for fake tensors
before = attributes()
run()
print(json.dumps(sorted(changes(before))))
"""


def changed_by(folder: Path, program: str, *arguments: str) -> Any:
    """Return the names of what a program has changed in torch, run by an interpreter of its own."""
    (folder / "program.py").write_text(BEGIN + program)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
    command = [sys.executable, str(folder / "program.py"), *arguments]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return json.loads(ran.stdout.splitlines()[-1])


def test_imports_change_nothing(tmp_path: Path) -> None:
    assert changed_by(tmp_path, IMPORTS) == []


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_after_traces_all_is_as_before(tmp_path: Path, backend: str) -> None:
    assert changed_by(tmp_path, RUNS, backend) == []


def test_what_invokes_with_gradients_change(tmp_path: Path) -> None:
    changed = changed_by(tmp_path, INVOKES)
    assert {name.rpartition(".")[2] for name in changed} == {"_engine_run_backward", "register_hook", "retain_grad"}, changed


def test_private_parts_of_the_compiler_are_named_in_one_place() -> None:
    """Two modules have reasons of their own: Inductor takes long to import, and eager traces do without dynamo."""
    package = Path(nnsight.__file__).parent
    allowed = {package / "fx" / "torch_compat.py", package / "fx" / "lowering" / "backends.py", package / "runtime" / "uncompiled.py"}
    private = re.compile(r"torch\._(dynamo|functorch|inductor|guards)")

    def code(path: Path) -> str:
        with path.open("rb") as file:
            return "".join(part.string for part in tokenize.tokenize(file.readline) if part.type not in (tokenize.STRING, tokenize.COMMENT))

    files = [path for path in package.rglob("*.py") if "vllm" not in path.parts and path not in allowed]
    assert [path.name for path in files if private.search(code(path))] == []
