"""Vectors from files and tensors, the choices of requests, and the entries of tables; no vLLM is needed."""

from __future__ import annotations

import gc
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFWriter
from safetensors.torch import save, save_file

from nnsight.steering import SteeringVector
from nnsight.steering.choices import PREFIX, Choice
from nnsight.steering.formats import parse_vector
from nnsight.steering.registry import Vectors
from nnsight.vllm.steering.entries import Entries
from nnsight.vllm.steering.tables import TABLES, steering_of, tables_part
from nnsight.vllm.worker.residual import places_of

from .llama import computed

HIDDEN = 4
PLACES = {number: f"model.layers.{number}.output" for number in range(2, 6)}


def directions(*layers: int, seed: int = 0) -> dict[int, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {layer: torch.randn(HIDDEN, generator=generator) for layer in layers}


_CODES = {torch.float32: 0, torch.float16: 1, torch.float64: 28, torch.bfloat16: 30}


def gguf(tensors: dict[str, torch.Tensor], architecture: str = "controlvector", version: int = 3, **extra: Any) -> bytes:
    """Return the content of a GGUF file, written from its specification."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    pairs = [text("general.architecture") + struct.pack("<I", 8) + text(architecture)]
    pairs.append(text("controlvector.layer_count") + struct.pack("<II", 4, 3))
    pairs.append(text("a.list") + struct.pack("<IIQ", 9, 5, 2) + struct.pack("<ii", 7, -7))
    pairs.append(text("a.flag") + struct.pack("<IB", 7, 1))
    alignment = extra.get("alignment", 32)
    if alignment != 32:
        pairs.append(text("general.alignment") + struct.pack("<II", 4, alignment))
    infos, data = b"", b""
    for key, tensor in tensors.items():
        shape = list(tensor.shape)[::-1]
        code = extra.get("code", _CODES.get(tensor.dtype, 0))
        infos += text(key) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, code, len(data))
        data += bytes(tensor.contiguous().view(torch.uint8).reshape(-1).tolist())
        data += bytes(-len(data) % alignment)
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(pairs)) + b"".join(pairs) + infos
    return head + bytes(-len(head) % alignment) + data


# -- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["{}", "direction.{}", "layer.{}", "model.layers.{}", "happy.{}"])
def test_safetensors_have_a_direction_for_each_layer(form: str) -> None:
    kept = directions(11, 3)
    found = parse_vector(save({form.format(layer): tensor for layer, tensor in kept.items()}), "file")
    assert list(found) == [3, 11]
    assert all(torch.equal(found[layer], kept[layer]) for layer in kept)


def test_several_vectors_in_a_file_are_told_by_their_names(tmp_path: Path) -> None:
    """One with a direction for each of some layers, and one that is for any layer, in another dtype."""
    happy, sad = directions(3, 4), torch.ones(HIDDEN, dtype=torch.bfloat16)
    path = tmp_path / "moods.safetensors"
    save_file({"happy.3": happy[3], "happy.4": happy[4], "sad": sad}, path)
    vectors = Vectors()
    assert [vectors.load(path, "happy"), vectors.load(path, "sad")] == ["happy", "sad"]
    assert vectors.layers("happy") == [3, 4] and vectors.layers("sad") is None
    assert torch.equal(vectors.direction("happy", 4, HIDDEN), happy[4])
    assert torch.equal(vectors.direction("sad", 9, HIDDEN), sad.float())
    with pytest.raises(ValueError, match=r"moods.safetensors: the file has several vectors, 'happy', 'sad', and none"):
        vectors.load(path)


@pytest.mark.parametrize("dtype", list(_CODES))
@pytest.mark.parametrize("alignment", [32, 64])
def test_gguf_control_vectors(dtype: torch.dtype, alignment: int) -> None:
    kept = {layer: tensor.to(dtype) for layer, tensor in directions(1, 2, 10).items()}
    data = gguf({f"direction.{layer}": tensor for layer, tensor in kept.items()}, alignment=alignment)
    found = parse_vector(data, "file")
    assert list(found) == [1, 2, 10]
    assert all(torch.equal(found[layer], kept[layer].float()) for layer in kept)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "file: neither a safetensors file nor a GGUF file"),
        (b"not a file at all, but long enough", "neither a safetensors file"),
        (save({"direction.1": torch.ones(4)})[:-3], "neither a safetensors file"),
        (save({}), "file: the file has no tensors"),
        (save({"direction.1": torch.ones(2, 4)}), r"file: 'direction.1' has shape \(2, 4\)"),
        (save({"3": torch.ones(4), "03": torch.zeros(4)}), "file: the keys '0?3' and '0?3' are both for layer 3"),
        (save({"direction.1": torch.ones(0)}), r"file: 'direction.1' has shape \(0,\)"),
        (save({"direction.1": torch.ones(4, dtype=torch.int64)}), "file: 'direction.1' has dtype torch.int64"),
        (save({"direction.1": torch.tensor([1.0, float("nan")])}), "file: 'direction.1' has values that are not finite"),
        (gguf({"direction.1": torch.tensor([1.0, float("inf")])}), "file: 'direction.1' has values that are not finite"),
        (gguf({"direction.1": torch.ones(4)})[:-17], "ends before its content"),
        (gguf({"direction.1": torch.ones(4)})[:40], "ends before its content"),
        (gguf({"direction.1": torch.ones(4)}, architecture="llama"), "of the architecture 'llama', not a control vector"),
        (gguf({"direction.1": torch.ones(4)}, version=1), "GGUF version 1"),
        (gguf({"direction.1": torch.ones(4)}, code=8), r"'direction.1' is quantized \(GGML type 8\)"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 2**60), "ends before its content"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**62), "ends before its content"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"a", 9, 0, 2**62), "ends before its content"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"a", 9, 0, 2**18) + bytes(2**18), "more than 100000 values"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"a", 9) + struct.pack("<IQ", 9, 1) * 2000, "as a control vector"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"\xff", 0) + bytes(9), "as a control vector: 'utf-8' codec"),
        (gguf({"direction.1": torch.ones(0)}), "'direction.1' has shape"),
    ],
)  # fmt: skip
def test_files_that_are_not_right(data: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_vector(data, "file")


def test_offsets_are_checked_before_they_are_added() -> None:
    data = gguf({"direction.1": torch.ones(4)})
    info = data.index(b"direction.1") + len("direction.1") + struct.calcsize("<IQI")
    assert data[info : info + 8] == bytes(8)
    for offset in (2**64 - 32, 2**63, len(data)):
        with pytest.raises(ValueError, match="ends before its content"):
            parse_vector(data[:info] + struct.pack("<Q", offset) + data[info + 8 :], "file")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_files_of_the_gguf_package_are_read(tmp_path: Path, dtype: torch.dtype) -> None:
    kept = {layer: tensor.to(dtype) for layer, tensor in directions(1, 2, 10).items()}
    writer = GGUFWriter(tmp_path / "happy.gguf", "controlvector")  # as repeng does it
    writer.add_string("controlvector.model_hint", "llama")
    writer.add_uint32("controlvector.layer_count", len(kept))
    for layer, tensor in kept.items():
        writer.add_tensor(f"direction.{layer}", tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    vectors = Vectors()
    assert vectors.load(tmp_path / "happy.gguf") == "happy" and vectors.layers("happy") == [1, 2, 10]
    assert all(torch.equal(vectors["happy"][layer], kept[layer].float()) for layer in kept)


def test_without_the_gguf_package_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert list(parse_vector(save({"direction.1": torch.ones(4)}), "file")) == [1]
    with pytest.raises(ImportError, match="happy.gguf is a GGUF file, .* `pip install gguf`"):
        parse_vector(gguf({"direction.1": torch.ones(4)}), "happy.gguf")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"nowhere.gguf"):
        Vectors().load(tmp_path / "nowhere.gguf")


# -- names ------------------------------------------------------------------------------------------------------------


def test_vectors_are_registered_and_removed() -> None:
    vectors = Vectors(HIDDEN)
    given = directions(3)
    vectors.add("happy", given)
    given[3].fill_(0)
    assert vectors.direction("happy", 3, HIDDEN).abs().sum() > 0  # a copy
    assert "happy" in vectors and list(vectors) == ["happy"] and len(vectors) == 1
    assert repr(vectors) == "happy: layers 3"
    with pytest.raises(ValueError, match="There is a vector 'happy' already"):
        vectors.add("happy", torch.ones(HIDDEN))
    with pytest.raises(ValueError, match="'happy' has no direction for layer 4, only for layers 3"):
        vectors.direction("happy", 4, HIDDEN)
    vectors.remove("happy")
    assert "happy" not in vectors
    with pytest.raises(ValueError, match="no vector 'happy'. Registered: none"):
        vectors.direction("happy", 3, HIDDEN)
    for access in (vectors.remove, vectors.__getitem__):
        with pytest.raises(KeyError, match="no vector 'happy'"):
            access("happy")


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("a b", torch.ones(HIDDEN), ValueError, "no name for a vector"),
        ("a,b", torch.ones(HIDDEN), ValueError, "no name for a vector"),
        ("", torch.ones(HIDDEN), ValueError, "no name for a vector"),
        ("x", torch.ones(5), ValueError, "vector 'x': a direction has 5 channels, and the model's hidden state has 4"),
        ("x", {1: torch.ones(4), 2: torch.ones(5)}, ValueError, "different sizes, .4, 5."),
        ("x", {}, ValueError, "no directions"),
        ("x", {"1": torch.ones(4)}, TypeError, "layers are numbers"),
        ("x", {-1: torch.ones(4)}, TypeError, "layers are numbers"),
        ("x", [1.0, 2.0], TypeError, "is a list, and a direction is a tensor"),
        ("x", {7: torch.full((4,), float("nan"))}, ValueError, "vector 'x', layer 7 has values that are not finite"),
    ],
)
def test_wrong_vectors(name: str, value: Any, error: type[Exception], message: str) -> None:
    vectors = Vectors(HIDDEN)
    with pytest.raises(error, match=message):
        vectors.add(name, value)
    assert not len(vectors)


@pytest.mark.parametrize("value", [torch.ones(5), {3: torch.ones(5)}])
def test_a_size_that_was_not_known_is_checked_later(value: Any) -> None:
    vectors = Vectors()
    vectors.add("happy", value)
    for check in (lambda: vectors.direction("happy", 3, HIDDEN), lambda: vectors.fit(HIDDEN)):
        with pytest.raises(ValueError, match="'happy': a direction has 5 channels, and the model's hidden state has 4"):
            check()
    vectors.fit(5)


# -- choices ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def vectors() -> Vectors:
    made = Vectors(HIDDEN)
    made.add("happy", directions(2, 3))
    made.add("sad", directions(2, 3, seed=1))
    made.add("late", directions(5, seed=2))
    made.add("any", directions(0, seed=3)[0])
    return made


def chosen(registered: Vectors, /, **parameters: Any) -> dict[str, Any]:
    given = {PREFIX + name: value for name, value in parameters.items()}
    return steering_of(Choice.of(given, PREFIX), registered, PLACES, HIDDEN, 1)


def test_a_choice_is_a_sum_at_each_layer(vectors: Vectors) -> None:
    happy, sad = vectors["happy"], vectors["sad"]
    found = chosen(vectors, vector=["happy", "sad"], scale=[2.0, -1], start=3)
    assert list(found) == [PLACES[2], PLACES[3]]
    for layer in (2, 3):
        torch.testing.assert_close(found[PLACES[layer]].add, 2 * happy[layer] - sad[layer])
        assert found[PLACES[layer]].start == 3
    assert Choice.of({"vector": "happy, sad", "scale": 2.0}).add == (("happy", 2.0), ("sad", 2.0))
    assert Choice.of({"vector": "happy"}).add == (("happy", 1.0),)


def test_a_choice_removes(vectors: Vectors) -> None:
    found = chosen(vectors, remove="any", layers=4)[PLACES[4]]
    direction = vectors["any"][None]
    hidden = torch.randn(3, HIDDEN)
    expected = hidden - (hidden @ direction)[:, None] * direction / direction.dot(direction)
    torch.testing.assert_close(computed(tables_part(1, HIDDEN, torch.float32), hidden, found.parts[TABLES]), expected)


@pytest.mark.parametrize(
    ("value", "expected"),
    [("3", (3,)), ("2,3", (2, 3)), ("4-6,2", (2, 4, 5, 6)), ([3, 2], (2, 3)), (4, (4,)), ([2, "4-5"], (2, 4, 5))],
)
def test_forms_of_layers(value: Any, expected: tuple[int, ...]) -> None:
    assert Choice.of({"vector": "any", "layers": value}).layers == expected


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({}, "nnsight_vector or nnsight_remove is missing"),
        ({"vectors": "happy"}, "nnsight_vectors: unknown. The parameters are nnsight_vector, nnsight_scale"),
        ({"slot": 3, "vector": "happy"}, "nnsight_slot: unknown"),
        ({"vector": "hapy"}, "no vector 'hapy'. Registered: happy, sad, late, any"),
        ({"vector": ""}, "nnsight_vector is the name"),
        ({"vector": []}, "nnsight_vector is the name"),
        ({"vector": 3}, "nnsight_vector is the name"),
        ({"vector": "happy,,sad"}, "nnsight_vector is the name"),
        ({"vector": "happy", "scale": "4"}, "nnsight_scale is a finite number"),
        ({"vector": "happy", "scale": float("nan")}, "nnsight_scale is a finite number"),
        ({"vector": "happy", "scale": float("inf")}, "nnsight_scale is a finite number"),
        ({"vector": "happy", "scale": 10**400}, "nnsight_scale is too large"),
        ({"vector": "happy", "scale": 1e39}, "not finite"),
        ({"vector": "happy", "scale": [1, 2]}, "2 numbers for 1 vectors"),
        ({"remove": "happy", "scale": 2}, "nnsight_scale is for nnsight_vector"),
        ({"remove": "happy,happy"}, "twice"),
        ({"remove": "happy,sad"}, "nnsight_remove has 2 vectors, and there is room for 1"),
        ({"vector": "happy", "layers": "x"}, "nnsight_layers is a number"),
        ({"vector": "happy", "layers": "3-"}, "nnsight_layers is a number"),
        ({"vector": "happy", "layers": 2.5}, "nnsight_layers is a number"),
        ({"vector": "happy", "layers": -1}, "nnsight_layers is a number"),
        ({"vector": "happy", "layers": "0-99999999999"}, "nnsight_layers is a number"),
        ({"vector": "happy", "layers": "5-3"}, "nnsight_layers is a number"),
        ({"vector": "happy", "layers": "2,5-3"}, "nnsight_layers is a number"),
        ({"vector": "happy", "layers": []}, "names no layer"),
        ({"vector": "happy", "layers": "2,2"}, "or one twice"),
        ({"vector": "happy", "layers": "4"}, "'happy' has no direction for layer 4, only for layers 2, 3"),
        ({"vector": "any", "layers": "1,2,6"}, "Layer 1, 6 cannot be steered: there are tables for 2, 3, 4, 5"),
        ({"vector": "any"}, "nnsight_layers is missing: 'any' is for any layer"),
        ({"vector": "happy,late"}, "have different layers: choose layers with nnsight_layers"),
        ({"vector": "happy", "start": -1}, "nnsight_start is a position"),
        ({"vector": "happy", "start": "2"}, "nnsight_start is a position"),
    ],
)
def test_wrong_choices(vectors: Vectors, parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        chosen(vectors, **parameters)


def test_numbers_of_layers() -> None:
    assert places_of(["model.h.1.output", "model.h.10.mlp.output"]) == {1: "model.h.1.output", 10: "model.h.10.mlp.output"}
    for locations in (["model.norm.output"], ["model.h.1.output", "model.h.1.mlp.output"]):
        with pytest.raises(ValueError, match="cannot be addressed by a layer number"):
            places_of(locations)


# -- entries of the tables --------------------------------------------------------------------------------------------


def test_requests_that_are_steered_alike_share_an_entry() -> None:
    made = Entries(2, "all are in use")
    first, second, other = made.take("a"), made.take("a"), made.take("b")
    assert first.entry is second.entry and {first.entry.slot, other.entry.slot} == {1, 2} and made.in_use == 2
    first.entry.written = True
    first.release()
    first.release()
    with pytest.raises(ValueError, match="all are in use"):
        made.take("c")
    second.release()
    again = made.take("a")
    assert again.entry.written  # its parameters are still there
    again.release()
    other.release()
    third = made.take("c")
    assert third.entry.slot == other.entry.slot  # the one that was used longest ago makes room
    assert not third.entry.written and made.in_use == 1


def test_a_request_that_is_dropped_gives_its_entry_back() -> None:
    made = Entries(1, "all are in use")
    lease = made.take("a")
    assert made.in_use == 1
    del lease
    gc.collect()
    assert made.in_use == 0


def test_a_steering_vector_is_taken_as_it_is_and_from_its_files(tmp_path: Path) -> None:
    made = SteeringVector({2: torch.randn(8), 5: torch.randn(8)}, "transformer.h", {2: 1.0}, {"method": "mean"})
    vectors = Vectors(8)
    vectors.add("itself", made)
    vectors.load(made.save(tmp_path / "tensors.safetensors"))
    vectors.load(made.save(tmp_path / "llama.gguf"))
    for name in ("itself", "tensors", "llama"):
        assert vectors.layers(name) == [2, 5]
        assert all(torch.equal(vectors[name][layer], direction) for layer, direction in made.items())
