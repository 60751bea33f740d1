"""Exported edits, imported into models of their own and compared with a forward pass edited by hand."""

from __future__ import annotations

import copy
import gc
import json
import math
import pickle
import runpy
import subprocess
import sys
import textwrap
import traceback
import types
import weakref
from pathlib import Path
from typing import Any

import numpy
import pytest
import safetensors
import safetensors.torch
import torch
from torch.nn.functional import gelu

import nnsight
from nnsight import NNsight

from .. import ROOT
from ..conftest import both

X = torch.linspace(-1, 1, 12).view(2, 6)


class Net(torch.nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(layers))
        self.register_buffer("scale", torch.full((6,), 3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def build(seed: int = 0, layers: int = 2) -> NNsight:
    torch.manual_seed(seed)
    wrapped = NNsight(Net(layers))
    wrapped._make_driver({"backend": "eager"})
    return wrapped


@pytest.fixture
def model() -> NNsight:
    return build()


@pytest.fixture
def other() -> NNsight:
    """A model of the same kind, with other weights."""
    return build(seed=1)


def by_hand(model: NNsight, *edits: Any) -> torch.Tensor:
    """Run the model by plain torch hooks that replace what its layers return."""
    handles = [
        layer.register_forward_hook(lambda _, __, out, edit=edit: edit(out.clone()))
        for layer, edit in zip(model._module.layers, edits, strict=False)
    ]
    try:
        return model._module(X)
    finally:
        for handle in handles:
            handle.remove()


def output(model: NNsight, compile: bool = False) -> torch.Tensor:
    with model.trace(X, compile=compile) as tracer:
        found = model.output.save()
    assert tracer.report.mode == ("compiled" if compile else "eager")
    return found


def double(value: torch.Tensor) -> torch.Tensor:
    """A helper that can be imported."""
    return value * 2


WRITTEN = 0


# -- export and import ------------------------------------------------------------------------------------------------


@both
def test_an_imported_edit_acts_as_the_original(model: NNsight, other: NNsight, tmp_path: Path, compile: bool) -> None:
    direction = torch.linspace(-2, 2, 6)
    factor = 3.0
    with model.edit() as edited:
        model.layers[0].output = model.layers[0].output * factor + direction
    file = edited.export_edits(tmp_path / "steer.safetensors")
    other.import_edits(file)
    expected = by_hand(other, lambda v: v * 3.0 + direction)
    assert not torch.equal(expected, by_hand(other))
    assert torch.equal(output(other, compile), expected)
    assert torch.equal(output(edited, compile), by_hand(model, lambda v: v * 3.0 + direction))


@both
def test_several_edits_keep_their_order_and_come_after_those_there(
    model: NNsight, other: NNsight, tmp_path: Path, compile: bool
) -> None:
    with model.edit(inplace=True):
        model.layers[0].output = model.layers[0].output * 2
    with model.edit(inplace=True):
        model.layers[0].output = model.layers[0].output - 1
    with other.edit(inplace=True):
        other.layers[0].output = other.layers[0].output + 5
    other.import_edits(model.export_edits(export_dir=tmp_path))
    assert torch.equal(output(other, compile), by_hand(other, lambda v: (v + 5) * 2 - 1))
    other.clear_edits()
    assert torch.equal(output(other, compile), by_hand(other))


@pytest.mark.slow
def test_another_process_imports_what_a_script_exported(tmp_path: Path) -> None:
    """The script's own names are globals there; none of them exists here."""
    script = tmp_path / "make_edit.py"
    script.write_text(
        textwrap.dedent(
            """
            import math
            import torch
            from nnsight import NNsight
            from tests.modeling.test_edit_files import Net

            model = NNsight(Net())
            vector = torch.arange(6.0)
            settings = {"power": 2, "bound": math.inf}

            with model.edit() as edited:
                hidden = model.layers[0].output
                bounded = torch.clamp(hidden, max=settings["bound"])
                edited.layers[0].output = math.sqrt(4.0) * bounded + vector ** settings["power"]

            edited.export_edits("arange", export_dir="exports", variant="squared")
            """
        )
    )
    root = ROOT
    command = [sys.executable, str(script)]
    subprocess.run(command, check=True, cwd=tmp_path, env={"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"})
    file = tmp_path / "exports" / "arange" / "squared.safetensors"
    assert file.is_file()
    importing = build(seed=3)
    importing.import_edits("arange", export_dir=tmp_path / "exports", variant="squared")
    expected = by_hand(importing, lambda v: 2.0 * v + torch.arange(6.0) ** 2)
    for compile in (False, True):
        assert torch.equal(output(importing, compile), expected)


@both
def test_an_imported_edit_can_be_exported_again(model: NNsight, other: NNsight, tmp_path: Path, compile: bool) -> None:
    shift = torch.ones(6)
    with model.edit() as edited:
        model.layers[1].output = model.layers[1].output + shift
    first = edited.export_edits(tmp_path / "first.safetensors")
    model.import_edits(first)
    second = model.export_edits(tmp_path / "second.safetensors")
    assert first.read_bytes() == second.read_bytes()
    other.import_edits(second)
    expected = torch.relu(other._module.layers[1](by_hand(build(1, layers=1))) + 1)
    assert torch.equal(output(other, compile), expected)


@both
def test_blocks_functions_and_loops_inside_an_edit(
    model: NNsight, other: NNsight, tmp_path: Path, compile: bool
) -> None:
    scales = [2.0, 3.0]
    with model.edit() as edited:

        def scaled(value: torch.Tensor, by: float) -> torch.Tensor:
            return value * by + scales[1]

        for layer, by in zip(model.layers, scales, strict=True):
            with torch.no_grad():
                layer.output = sum([scaled(layer.output, by), *[1.0 for _ in scales]])
        text = """
  not indented
"""
        assert len(text) == 16
    other.import_edits(edited.export_edits(tmp_path / "inner.safetensors"))
    expected = by_hand(other, lambda v: v * 2.0 + 3.0 + 2, lambda v: v * 3.0 + 3.0 + 2)
    assert torch.equal(output(other, compile), expected)


def test_an_edit_that_assigns_a_global_is_refused(model: NNsight, tmp_path: Path) -> None:
    global WRITTEN
    with model.edit() as edited:
        WRITTEN = 1
    with pytest.raises(TypeError, match=r"The edit at .* assigns a global or calls `super\(\)`: it cannot be exported"):
        edited.export_edits(tmp_path / "globals.safetensors")


# -- values -----------------------------------------------------------------------------------------------------------


def through_a_file(model: NNsight, other: NNsight, file: Path, value: Any) -> Any:
    """Return what a variable of an edit holds once the edit was exported and imported."""
    with model.edit() as edited:
        value  # noqa: B018
    other.clear_edits()
    other.import_edits(edited.export_edits(file))
    (edit,) = other._edits
    return dict(edit.scope.items()).get("value", "the model" if "value" in edit.roots else "missing")


PLAIN = [
    None,
    True,
    -7,
    2**70,
    0.1,
    -0.0,
    math.inf,
    3 - 2j,
    complex(0.0, -math.inf),
    "ü \udc80 \n",
    [1, [2.5, "x"], (3,)],
    {"a": 1, 2: [None], (1, "k"): {"deep": True}},
    {1, 2, "three"},
    frozenset({4}),
    slice(1, None, 2),
    range(2, 9, 3),
    torch.Size([2, 3]),
    torch.bfloat16,
    torch.device("cuda:1"),
    torch,
    math,
    math.sqrt,
    torch.relu,
    gelu,
    numpy.exp,
    len,
    dict,
    double,
    Net,
    torch.nn.Linear,
]


@pytest.mark.parametrize("value", PLAIN, ids=lambda value: type(value).__name__)
def test_plain_values(model: NNsight, other: NNsight, tmp_path: Path, value: Any) -> None:
    found = through_a_file(model, other, tmp_path / "value.safetensors", value)
    assert type(found) is type(value)
    assert found == value
    assert isinstance(value, (set, frozenset, int)) or repr(found) == repr(value)
    if isinstance(value, (types.FunctionType, type, types.ModuleType)):
        assert found is value


TENSORS = {
    "float32": torch.randn(2, 3),
    "bfloat16": torch.randn(4).bfloat16(),
    "float8": torch.tensor([1.0, -2.0]).to(torch.float8_e4m3fn),
    "complex64": torch.randn(3, dtype=torch.complex64),
    "conjugated": torch.randn(3, dtype=torch.complex64).conj(),
    "bool": torch.tensor([True, False]),
    "uint8": torch.arange(4, dtype=torch.uint8),
    "empty": torch.empty(0, 3),
    "scalar": torch.tensor(2.5),
    "transposed": torch.randn(3, 4).t(),
    "a column": torch.randn(3, 4)[:, 1],
    "expanded": torch.randn(1, 4).expand(3, 4),
    "with gradient": torch.randn(3, requires_grad=True),
    "parameter": torch.nn.Parameter(torch.randn(3)),
    "frozen parameter": torch.nn.Parameter(torch.randn(3), requires_grad=False),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors(model: NNsight, other: NNsight, tmp_path: Path, name: str) -> None:
    value = TENSORS[name]
    found = through_a_file(model, other, tmp_path / "value.safetensors", value)
    assert type(found) is torch.Tensor
    assert (found.dtype, found.shape, found.requires_grad) == (value.dtype, value.shape, value.requires_grad)
    assert found.is_leaf
    assert torch.equal(
        found.view(torch.uint8) if name == "float8" else found, value.view(torch.uint8) if name == "float8" else value
    )
    assert found.data_ptr() != value.data_ptr() or found.numel() == 0


def test_shared_objects_stay_shared(model: NNsight, other: NNsight, tmp_path: Path) -> None:
    vector, names = torch.arange(6.0), ["a"]
    value = {"vector": vector, "same": vector, "tail": vector[2:], "names": names, "again": names}
    found = through_a_file(model, other, tmp_path / "value.safetensors", value)
    assert found["vector"] is found["same"]
    assert found["names"] is found["again"]
    assert found["tail"].tolist() == [2, 3, 4, 5]
    found["vector"][4] = 50.0
    assert vector.tolist() == [0, 1, 2, 3, 4, 5]
    assert found["tail"].tolist() == [2, 3, 4, 5]  # tensors are written one by one


def test_two_edits_share_a_tensor(model: NNsight, other: NNsight, tmp_path: Path) -> None:
    vector = torch.ones(6)
    with model.edit(inplace=True):
        vector += 1
    with model.edit(inplace=True):
        model.layers[0].output = model.layers[0].output + vector
    other.import_edits(model.export_edits(tmp_path / "shared.safetensors"))
    for expected in (2.0, 3.0):
        assert torch.equal(output(other), by_hand(other, lambda v, expected=expected: v + expected))
    assert vector.tolist() == [1.0] * 6


def test_parts_of_the_model_become_those_of_the_importing_model(model: NNsight, other: NNsight, tmp_path: Path) -> None:
    module = model._module
    value = [model.layers[1], module.layers[0], module.layers[1].weight, module.scale, model.layers]
    found = through_a_file(model, other, tmp_path / "value.safetensors", value)
    assert found[0] is other.layers[1]
    assert found[1] is other._module.layers[0]
    assert found[2] is other._module.layers[1].weight
    assert found[3] is other._module.scale
    assert found[4] is other.layers
    assert through_a_file(model, other, tmp_path / "value.safetensors", model) == "the model"
    assert safetensors.torch.load_file(tmp_path / "value.safetensors") == {}


def test_names_that_the_block_binds_first_are_not_written(model: NNsight, other: NNsight, tmp_path: Path) -> None:
    """Outside they hold objects that cannot be written."""
    hidden = step = part = helper = lambda: None
    with model.edit() as edited:
        hidden, (part, *_) = model.layers[0].output, [1.0]
        for step in range(2):
            part += step

        def helper(value: torch.Tensor) -> torch.Tensor:
            return value + part

        edited.layers[0].output = helper(hidden)
    other.import_edits(edited.export_edits(tmp_path / "bound.safetensors"))
    assert torch.equal(output(other), by_hand(other, lambda v: v + 2))


def test_the_file_is_a_safetensors_file_with_the_text_of_the_block(model: NNsight, tmp_path: Path) -> None:
    direction = torch.arange(6.0)
    with model.edit() as edited:
        model.layers[0].output += direction  # steer
    file = edited.export_edits(tmp_path / "file.safetensors")
    with safetensors.safe_open(file, framework="pt") as opened:
        (name,) = opened.keys()
        assert torch.equal(opened.get_tensor(name), direction)
        content = json.loads(opened.metadata()["nnsight edits"])
    (edit,) = content["edits"]
    assert edit["source"]["filename"] == __file__
    assert "model.layers[0].output += direction  # steer\n" in edit["source"]["text"]
    assert edit["locations"] == ["model.layers[0]", "model.layers"]


# -- where files are --------------------------------------------------------------------------------------------------


def test_the_default_file_is_in_the_cache_folder_of_the_user(
    model: NNsight, other: NNsight, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with model.edit() as edited:
        model.layers[0].output[:] = 0
    assert edited.export_edits() == tmp_path / "nnsight" / "edits" / "Net" / "__default__.safetensors"
    other.import_edits()
    assert torch.equal(output(other), by_hand(other, torch.zeros_like))


def test_names_with_slashes_stay_below_the_folder(model: NNsight, tmp_path: Path) -> None:
    with model.edit(inplace=True):
        model.layers[0].output[:] = 0
    assert model.export_edits("maker/net", tmp_path, "a/b") == tmp_path / "maker--net" / "a--b.safetensors"
    assert model.export_edits("../up", tmp_path).parent == tmp_path / "..--up"
    with pytest.raises(ValueError, match="make no file name"):
        model.export_edits("..", tmp_path)


def test_a_failed_export_leaves_the_old_file(model: NNsight, tmp_path: Path) -> None:
    with model.edit() as edited:
        model.layers[0].output[:] = 0
    file = edited.export_edits(tmp_path / "edits.safetensors")
    before = file.read_bytes()
    broken = object()
    with edited.edit() as worse:
        broken  # noqa: B018
    with pytest.raises(TypeError):
        worse.export_edits(file)
    assert file.read_bytes() == before
    assert list(tmp_path.iterdir()) == [file]


# -- misuse -----------------------------------------------------------------------------------------------------------


def local_function() -> Any:
    def inside() -> None: ...

    return inside


def cyclic() -> list[Any]:
    items: list[Any] = [1]
    items.append(items)
    return items


REFUSED = {
    "a lambda": (lambda: lambda v: v, r"`value`, `.*<lambda>`, which cannot be imported.*Define it inside the block"),
    "a local function": (local_function, r"`value`, `local_function.<locals>.inside`, which.*Define it inside"),
    "an object": (object, r"`value`, an object of type builtins.object"),
    "bytes": (lambda: b"x", r"`value`, an object of type builtins.bytes"),
    "an array": (lambda: numpy.arange(3.0), r"`value`, an object of type numpy.ndarray"),
    "in a container": (lambda: {"a": [1, object()]}, r"`value`, which holds an object of type"),
    "a module": (lambda: torch.nn.Linear(2, 2), r"an object of type torch.nn.modules.linear.Linear"),
    "another model": (lambda: build().layers[0], r"the module `model.layers.0` of another model"),
    "a cycle": (cyclic, r"`value`, which holds a container that contains itself"),
    "sparse": (lambda: torch.eye(2).to_sparse(), r"a tensor that safetensors cannot hold"),
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), r"a tensor that safetensors.*qint8"),
    "complex128": (lambda: torch.ones(2, dtype=torch.complex128), r"a tensor that safetensors cannot hold.*complex128"),
    "meta": (lambda: torch.empty(2, device="meta"), r"a tensor that safetensors cannot hold.*meta tensor"),
    "computed": (lambda: torch.ones(2, requires_grad=True) * 2, r"computed with gradients.*use `.detach\(\)`"),
}


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:.*quantiz.*")
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_written_is_named(model: NNsight, tmp_path: Path, name: str) -> None:
    make, message = REFUSED[name]
    value = make()
    with model.edit() as edited:
        value  # noqa: B018
    with pytest.raises(TypeError, match=rf"The edit at .*test_edit_files.py:\d+ uses .*{message}"):
        edited.export_edits(tmp_path / "refused.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_not_there(model: NNsight, tmp_path: Path) -> None:
    with model.edit() as edited:
        model.layers[0].output[:] = 0
    edited.export_edits("net", tmp_path, variant="zero")
    with pytest.raises(FileNotFoundError, match="no exported edits at .*These variants exist: zero"):
        model.import_edits("net", tmp_path)
    with pytest.raises(FileNotFoundError, match="no exported edits at"):
        model.import_edits(tmp_path / "nowhere" / "x.safetensors")


def test_a_file_and_a_folder_contradict_each_other(model: NNsight, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is the path of a file"):
        model.import_edits("x.safetensors", export_dir=tmp_path)


@pytest.fixture
def exported(model: NNsight, tmp_path: Path) -> Path:
    direction = torch.ones(6)
    with model.edit() as edited:
        model.layers[1].output = double(model.layers[1].output) + direction
    return edited.export_edits(tmp_path / "edits.safetensors")


def test_damaged_files_import_nothing(exported: Path, other: NNsight) -> None:
    data = exported.read_bytes()
    for cut in (0, 5, 8, 100, len(data) // 2, len(data) - 1):
        exported.write_bytes(data[:cut])
        with pytest.raises(ValueError, match="Cannot import the edits in"):
            other.import_edits(exported)
    exported.write_bytes(b"\xff" * 200)
    with pytest.raises(ValueError, match="not a file of exported edits"):
        other.import_edits(exported)
    safetensors.torch.save_file({"w": torch.ones(2)}, exported)
    with pytest.raises(ValueError, match="not a file of exported edits"):
        other.import_edits(exported)
    assert other._edits == []


def rewrite(file: Path, change: Any) -> None:
    """Change the content of an edit file."""
    with safetensors.safe_open(file, framework="pt") as opened:
        content = json.loads(opened.metadata()["nnsight edits"])
    tensors = safetensors.torch.load_file(file)
    change(content)
    safetensors.torch.save_file(tensors, file, {"nnsight edits": json.dumps(content)})


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.pop("edits"),
        lambda content: content["edits"][0]["source"].pop("text"),
        lambda content: content["edits"][0]["source"].update(item=7),
        lambda content: content["edits"][0]["variables"].update(direction={"at": 99}),
        lambda content: content["values"].append({"surprise": []}),
        lambda content: content["values"].append({"list": [{"at": 99}]}),
        lambda content: content["values"].append({"module": "forward.__func__"}),
        lambda content: content["values"].append({"import": ["os"]}),
        lambda content: content["values"].append({"tensor": {"name": "x", "device": "cpu", "requires_grad": False}}),
        lambda content: content.update(values=None),
        lambda content: content.update(version=99),
    ],
)
def test_contents_that_make_no_sense(exported: Path, other: NNsight, change: Any) -> None:
    with other.edit(inplace=True):
        other.layers[0].output[:] = 0
    rewrite(exported, change)
    with pytest.raises(ValueError, match="Cannot import the edits in"):
        other.import_edits(exported)
    assert len(other._edits) == 1


def test_text_that_this_python_cannot_compile(exported: Path, other: NNsight) -> None:
    def change(content: Any) -> None:
        content["edits"][0]["source"]["text"] += "        a = b ?? c\n"

    rewrite(exported, change)
    with pytest.raises(ValueError, match=r"cannot be compiled by Python 3\."):
        other.import_edits(exported)


def test_importing_runs_nothing_of_the_text(exported: Path, other: NNsight) -> None:
    """The header, with what is around it, is never run; the body runs in traces."""

    def change(content: Any) -> None:
        source = content["edits"][0]["source"]
        source["text"] = source["text"].replace("model.edit()", "missing()").replace("as edited:", "as edited:\n        boom()\n", 1)
        source["class_name"] = "A(missing()):\n    missing()\nclass B"

    rewrite(exported, change)
    other.import_edits(exported)
    assert len(other._edits) == 1
    with pytest.raises(NameError, match="boom"):
        output(other)


def test_a_helper_that_cannot_be_imported(exported: Path, other: NNsight) -> None:
    def change(content: Any) -> None:
        (row,) = [row["import"] for row in content["values"] if "import" in row]
        row[0] = "a_package_that_is_not_there"

    rewrite(exported, change)
    with pytest.raises(ImportError, match=r"`a_package_that_is_not_there.double`, which cannot be imported here"):
        other.import_edits(exported)
    assert other._edits == []


def test_a_model_without_the_module_of_a_location(exported: Path) -> None:
    small = build(layers=1)
    with pytest.raises(ValueError, match=r"uses `model.layers\[1\]`, which this model \(Net\) does not have"):
        small.import_edits(exported)
    assert small._edits == []


def test_a_model_without_the_module_in_a_variable(model: NNsight, tmp_path: Path) -> None:
    layer = model.layers[1]
    with model.edit() as edited:
        layer.output[:] = 0
    file = edited.export_edits(tmp_path / "layer.safetensors")
    with pytest.raises(ValueError, match=r"part `model.layers.1`, which this model does not have"):
        build(layers=1).import_edits(file)


def test_weights_that_are_not_loaded(model: NNsight, tmp_path: Path) -> None:
    weight = model.layers[1].weight
    with model.edit() as edited:
        model.layers[0].output = model.layers[0].output @ weight
    file = edited.export_edits(tmp_path / "weight.safetensors")
    with pytest.raises(ValueError, match=r"weights of `model.layers.1.weight`, which are not loaded"):
        NNsight(Net().to("meta")).import_edits(file)


@both
def test_tracebacks_show_the_lines_of_the_imported_block(
    model: NNsight, other: NNsight, tmp_path: Path, compile: bool
) -> None:
    zero = 0
    with model.edit() as edited:
        hidden = model.layers[0].output
        hidden / (1 // zero)
    file = edited.export_edits(tmp_path / "wrong.safetensors")
    with pytest.raises(ZeroDivisionError) as raised:
        output(edited)
    original = traceback.extract_tb(raised.value.__traceback__)[-1]
    other.import_edits(file)
    with pytest.raises(ZeroDivisionError) as raised:
        output(other, compile)
    last = traceback.extract_tb(raised.value.__traceback__)[-1]
    assert (last.line, last.lineno) == ("hidden / (1 // zero)", original.lineno)
    assert last.filename.startswith("<edit ")
    assert __file__ in last.filename


# -- copies of models with edits --------------------------------------------------------------------------------------


@both
def test_a_pickled_model_keeps_its_edits(model: NNsight, compile: bool) -> None:
    direction = torch.linspace(0, 1, 6)
    with model.edit(inplace=True) as edited:
        edited.layers[0].output = model.layers[0].output @ model.layers[1].weight + direction
    expected = output(model)
    loaded = pickle.loads(pickle.dumps(model))
    assert loaded._module is not model._module
    weight = loaded._module.layers[1].weight
    assert torch.equal(output(loaded, compile), expected)
    assert torch.equal(expected, by_hand(loaded, lambda v: v @ weight + direction))
    with torch.no_grad():
        weight.zero_()
    assert torch.equal(output(loaded, compile), by_hand(loaded, lambda v: v * 0 + direction))


def test_pickling_names_the_variable_that_stands_in_the_way(model: NNsight) -> None:
    steer = lambda value: value * 2  # noqa: E731
    with model.edit(inplace=True):
        model.layers[0].output = steer(model.layers[0].output)
    with pytest.raises(TypeError, match=r"The edit at .* uses `steer`, `.*<lambda>`, which cannot"):
        pickle.dumps(model)
    model.clear_edits()
    assert torch.equal(output(pickle.loads(pickle.dumps(model))), by_hand(model))


@both
def test_a_deep_copy_has_edits_of_its_own_parts(compile: bool) -> None:
    def copied() -> NNsight:
        model = build()
        layer = model.layers[0]
        with model.edit(inplace=True) as same:
            layer.output = same.layers[0].output @ model.layers[1].weight
        return copy.deepcopy(model)

    found = copied()
    gc.collect()
    with torch.no_grad():
        found._module.layers[1].weight.mul_(2)
    weight = found._module.layers[1].weight
    assert torch.equal(output(found, compile), by_hand(found, lambda v: v @ weight))


def test_a_deep_copy_moves_parts_in_containers_and_in_globals(tmp_path: Path) -> None:
    script = tmp_path / "edits.py"
    script.write_text(
        textwrap.dedent(
            """
            from tests.modeling.test_edit_files import build

            model = build()
            parts = {"first": [model.layers[0]], "others": (model.layers,)}
            with model.edit() as edited:
                parts["first"][0].output = parts["others"][0][0].output @ model.layers[1].weight

            def within():
                held = [model.layers[0]]
                with model.edit() as edited:
                    held[0].output = held[0].output * 2
                return edited
            """
        )
    )
    names = runpy.run_path(str(script))
    found = copy.deepcopy(names["edited"])
    weight = found._module.layers[1].weight
    with torch.no_grad():
        weight.mul_(2)
    assert torch.equal(output(found, False), by_hand(found, lambda v: v @ weight))
    found = copy.deepcopy(names["within"]())
    assert torch.equal(output(found, False), by_hand(found, lambda v: v * 2))


def test_imported_edits_do_not_keep_their_model_alive(model: NNsight, tmp_path: Path, no_gc: None) -> None:
    with model.edit() as edited:
        model.layers[0].output = edited.layers[0].output * 2
    importing = build()
    importing.import_edits(edited.export_edits(tmp_path / "edits.safetensors"))
    output(importing)
    reference = weakref.ref(importing)
    del importing
    assert reference() is None


# -- language models --------------------------------------------------------------------------------------------------


def test_edits_of_a_language_model(tmp_path: Path, hooks: Any) -> None:
    demo = nnsight.demo_model()
    with demo.edit() as edited:
        demo.transformer.h[1].mlp.output[:] = 0
    file = edited.export_edits(export_dir=tmp_path)
    assert file.parent.parent == tmp_path
    importing = nnsight.demo_model()
    importing.import_edits(export_dir=tmp_path)
    prompt = "The Eiffel Tower is in the city of"
    with importing.trace(prompt):
        logits = importing.lm_head.output.save()
    prepared = importing.tokenizer(prompt, return_tensors="pt")
    expected = hooks(importing._module).output("transformer.h.1.mlp", torch.zeros_like)(**prepared).logits
    assert torch.equal(logits, expected)
