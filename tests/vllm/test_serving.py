"""The server: ``nnsight vllm serve`` as a program of its own, asked over HTTP, against transformers and the engine of this process."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from safetensors.torch import save, save_file

from nnsight import LanguageModel
from nnsight.cli import main
from nnsight.vllm import VLLM

from ..serving import serving as served
from ..serving import until
from .llama import GREEDY, HIDDEN, OPTIONS, PROMPTS, adding, generated, tokens
from .test_graph_programs import OTHER, hooked, recorded
from .test_traces import without
from .test_vectors import gguf

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("vllm_environment")]

KEY = "a-key"


def direction(seed: int) -> torch.Tensor:
    return torch.randn(HIDDEN, generator=torch.Generator().manual_seed(seed)) * 2


HAPPY = {1: direction(1), 2: direction(2)}
ANY = direction(3)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("vectors")
    (place / "happy.gguf").write_bytes(gguf({f"direction.{layer}": tensor for layer, tensor in HAPPY.items()}))
    save_file({"direction": ANY}, place / "any.safetensors")
    return {"happy": place / "happy.gguf", "any": place / "any.safetensors"}


class Server:
    """A server in a process of its own."""

    def __init__(self, address: str) -> None:
        self.address = address

    def open(self, method: str, path: str, data: bytes | None = None, key: str | None = KEY) -> requests.Response:
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        return requests.request(method, self.address + path, data=data, headers=headers, timeout=120, stream=True)

    def ask(self, method: str, path: str, body: Any = None, **options: Any) -> tuple[int, Any]:
        """Return status and answer."""
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        answer = self.open(method, path, data, **options)
        try:
            return answer.status_code, answer.json()
        except ValueError:
            return answer.status_code, answer.text

    def complete(self, prompt: Any, xargs: dict[str, Any] | None = None, **options: Any) -> tuple[int, Any]:
        body = {"model": "tiny", "prompt": prompt, "temperature": 0.0, "max_tokens": 6, "ignore_eos": True}
        body |= {"return_token_ids": True, **options}
        return self.ask("POST", "/v1/completions", body if xargs is None else {**body, "vllm_xargs": xargs})

    def tokens(self, prompt: Any, xargs: dict[str, Any] | None = None, **options: Any) -> list[int]:
        status, answer = self.complete(prompt, xargs, **options)
        assert status == 200, answer
        found: list[int] = answer["choices"][0]["token_ids"]
        return found

    def refusal(self, xargs: dict[str, Any] | None, **options: Any) -> str:
        """Return the message of a refused request."""
        status, answer = self.complete(PROMPTS[0], xargs, **options)
        assert status == 400, answer
        message: str = answer["error"]["message"]
        return message

    def metric(self, name: str) -> float:
        _, text = self.ask("GET", "/metrics")
        (line,) = [line for line in text.splitlines() if line.startswith(name + " ")]
        return float(line.split()[1])


def command(folder: Path, *options: Any) -> list[Any]:
    return ["vllm", "serve", folder, "--served-model-name", "tiny", "--edits", "model.layers.*", *options]


@contextmanager
def serving(folder: Path, log: Path, *options: Any) -> Iterator[Server]:
    """Run a server of ``folder`` that writes to ``log``."""
    given = ["--dtype", "float32", "--max-model-len", 256, "--kv-cache-memory-bytes", 64 << 20, "--host", "127.0.0.1", "--api-key", KEY]
    with served(log, *command(folder, *given, *options)) as address:
        yield Server(address)


@pytest.fixture(scope="module")
def server(
    folder: Path, reference: LanguageModel, files: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    options = ["--slots", 3, "--enable-prompt-tokens-details", "--chat-template", template]
    options += ["--vectors", *(f"{name}={path}" for name, path in files.items())]
    options += ["--programs"]
    for name in ("push", "features"):
        recorded(reference, name).save(files["happy"].parent / f"{name}.program")
        options.append(f"{name}={files['happy'].parent / name}.program")
    with serving(folder, tmp_path_factory.mktemp("server") / "log.txt", *options) as server:
        yield server


@pytest.fixture(scope="module")
def offline(folder: Path, files: dict[str, Path]) -> VLLM:
    """An engine in this process, that stops between all modules."""
    model = VLLM(folder, **OPTIONS)
    for name, path in files.items():
        model.vectors.load(path, name)
    return model


def added(vectors: dict[int, torch.Tensor], factor: float = 1.0) -> dict[int, Any]:
    """Return edits that add vectors after some layers."""
    return {layer: adding(factor * vector) for layer, vector in vectors.items()}


# -- answers ----------------------------------------------------------------------------------------------------------


def test_unsteered_answers_are_plain(server: Server, offline: VLLM, reference: LanguageModel) -> None:
    for prompt in PROMPTS:
        ids = offline.tokenizer(prompt)["input_ids"]
        assert server.tokens(prompt) == generated(reference, ids) == tokens(offline(prompt, **GREEDY))


def test_steered_answers_are_those_of_transformers_and_of_the_engine_here(
    server: Server, offline: VLLM, reference: LanguageModel
) -> None:
    ids = offline.tokenizer(PROMPTS[0])["input_ids"]
    cases: list[tuple[dict[str, Any], dict[int, Any]]] = [
        ({"vector": "happy"}, added(HAPPY)),
        ({"vector": "happy", "scale": -2.0}, added(HAPPY, -2.0)),
        ({"vector": "happy", "layers": "2"}, {2: adding(HAPPY[2])}),
        ({"vector": "any", "scale": 3, "layers": [0, 3]}, {0: adding(3 * ANY), 3: adding(3 * ANY)}),
        (
            {"vector": ["happy", "any"], "scale": [1.0, 2.0], "layers": "1-2"},
            {layer: adding(found + 2 * ANY) for layer, found in HAPPY.items()},
        ),
        ({"remove": "any", "layers": 2}, {2: lambda hidden: without(hidden, ANY[None])}),
        ({"vector": "any", "scale": 2, "layers": 2, "start": 5}, {2: adding(2 * ANY, 5)}),
    ]
    unsteered = generated(reference, ids)
    different = 0
    for chosen, edits in cases:
        found = server.tokens(PROMPTS[0], {f"nnsight_{name}": value for name, value in chosen.items()})
        with offline.trace(PROMPTS[0], **GREEDY) as tracer:
            offline.steer(**chosen)
            here = tracer.result.save()
        assert found == generated(reference, ids, edits) == tokens(here), chosen
        different += found != unsteered
    assert different >= len(cases) - 1  # a direction that is removed need not change the words


def test_programs_are_asked_for_by_name(server: Server, offline: VLLM, reference: LanguageModel) -> None:
    ids = offline.tokenizer(PROMPTS[0])["input_ids"]
    for name, given in (("push", {"alpha": 9.0}), ("push", {"alpha": 5.0, "direction": OTHER}), ("features", {"gain": 3.0}), ("push", {})):
        sent = {key: value.tolist() if isinstance(value, torch.Tensor) else value for key, value in given.items()}
        xargs = {"nnsight_program": name, **{f"nnsight_program_{key}": value for key, value in sent.items()}}
        assert server.tokens(PROMPTS[0], xargs) == generated(reference, ids, hooked(name, **given))
    both = {"nnsight_program": "features", "nnsight_vector": "any", "nnsight_layers": "2", "nnsight_scale": 2.0}
    assert server.tokens(PROMPTS[0], both) == generated(reference, ids, {**hooked("features"), 2: adding(2 * ANY)})
    assert "The programs are: push, features" in server.refusal({"nnsight_program": "pull"})
    assert "has no parameter 'beta'" in server.refusal({"nnsight_program": "push", "nnsight_program_beta": 1.0})
    assert "is a number or a tensor" in server.refusal({"nnsight_program": "push", "nnsight_program_alpha": "much"})
    assert "has shape" in server.refusal({"nnsight_program": "push", "nnsight_program_direction": [1.0, 2.0]})
    assert "is the name of a program" in server.refusal({"nnsight_program": ["push"]})
    server.refusal({"nnsight_program": "push", "nnsight_program_direction": [1.0, "much"]})
    _, listed = server.ask("GET", "/v1/nnsight/vectors")
    assert listed["programs"][0] == {"name": "push", "parameters": {"alpha": [], "direction": [HIDDEN]}}


def test_chats_streams_and_several_answers(server: Server, reference: LanguageModel, offline: VLLM) -> None:
    ids = offline.tokenizer(PROMPTS[0])["input_ids"]
    steered, unsteered = generated(reference, ids, added(HAPPY)), generated(reference, ids)
    assert steered != unsteered
    xargs = {"nnsight_vector": "happy"}
    chat = {"model": "tiny", "messages": [{"role": "user", "content": PROMPTS[0]}], "max_tokens": 6, "temperature": 0.0}
    chat |= {"ignore_eos": True, "return_token_ids": True, "add_special_tokens": False}
    for extra, expected in (({"vllm_xargs": xargs}, steered), ({}, unsteered)):
        status, answer = server.ask("POST", "/v1/chat/completions", {**chat, **extra})
        assert status == 200, answer
        assert answer["choices"][0]["token_ids"] == expected
        body = {"model": "tiny", "prompt": PROMPTS[0], "max_tokens": 6, "temperature": 0.0, "ignore_eos": True}
        body |= {"stream": True, "return_token_ids": True, **extra}
        with server.open("POST", "/v1/completions", json.dumps(body).encode()) as answer:
            events = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith(b"data: {")]
        assert [token for event in events for token in event["choices"][0]["token_ids"]] == expected
    status, answer = server.complete(PROMPTS[0], xargs, n=2, temperature=1.0, top_k=1)
    assert status == 200 and [choice["token_ids"] for choice in answer["choices"]] == [steered] * 2
    status, answer = server.complete([PROMPTS[0], PROMPTS[1]], xargs)
    other = generated(reference, offline.tokenizer(PROMPTS[1])["input_ids"], added(HAPPY))
    assert [choice["token_ids"] for choice in answer["choices"]] == [steered, other]


def test_cached_prefixes_do_not_cross_edits(server: Server, reference: LanguageModel) -> None:
    prompt = [7 + number % 400 for number in range(3, 203)]
    expected = {scale: generated(reference, prompt, added(HAPPY, scale), 3) for scale in (0.0, 1.0, 2.0)}
    cached = []
    for scale in (1.0, 0.0, 1.0, 2.0, 0.0):
        xargs = {"nnsight_vector": "happy", "nnsight_scale": scale} if scale else None
        status, answer = server.complete(prompt, xargs, max_tokens=3)
        assert status == 200 and answer["choices"][0]["token_ids"] == expected[scale]
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0)
    assert cached == [False, False, True, False, True]
    for salt in ("mine", "yours", "mine"):
        status, answer = server.complete(prompt, {"nnsight_vector": "happy"}, max_tokens=3, cache_salt=salt)
        assert status == 200 and answer["choices"][0]["token_ids"] == expected[1.0]
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0)
    assert cached[5:] == [False, False, True]  # a salt of the user's own is kept


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("xargs", "message"),
    [
        ({"nnsight_vector": "hapy"}, "There is no vector 'hapy'. Registered: happy, any"),
        ({"nnsight-entry": [1, 0]}, "nnsight-entry: unknown"),
        ({"NNsight_vector": "happy"}, "NNsight_vector: unknown"),
        ({"nnsight_vector": "happy", "nnsight_layers": "3"}, "'happy' has no direction for layer 3"),
        ({"nnsight_vector": "any", "nnsight_layers": "3-4"}, "Layer 4 cannot be steered"),
    ],
)
def test_what_cannot_be_done_is_refused(server: Server, xargs: dict[str, Any], message: str) -> None:
    before = server.metric("nnsight:refused_requests_total")
    assert message in server.refusal(xargs)
    assert message in server.refusal(xargs, stream=True)
    assert server.metric("nnsight:refused_requests_total") == before + 2


def test_what_would_be_ignored_is_refused(server: Server) -> None:
    assert "put parameters for steering into `vllm_xargs`" in server.refusal(None, nnsight_vector="happy")
    assert "Beam search cannot be steered" in server.refusal({"nnsight_vector": "happy"}, use_beam_search=True)
    status, answer = server.ask(
        "POST", "/tokenize", {"model": "tiny", "prompt": "a", "vllm_xargs": {"nnsight_vector": "happy"}}
    )
    assert status == 400 and "/tokenize cannot be steered" in answer["error"]["message"]
    assert server.complete(PROMPTS[0], {"of_others": "nnsight"})[0] == 200
    assert server.ask("POST", "/v1/completions", {"nnsight_vector": "happy"}, key=None)[0] == 401  # authentication comes first


def test_more_edits_than_there_is_room_for(server: Server, reference: LanguageModel, offline: VLLM) -> None:
    """Three streams hold the three entries; a fourth edit is refused until one has ended."""
    body = {"model": "tiny", "prompt": PROMPTS[1], "max_tokens": 240, "temperature": 0.0, "ignore_eos": True, "stream": True}
    streams = []
    try:
        for scale in (1.0, 2.0, 3.0):
            xargs = {"nnsight_vector": "happy", "nnsight_scale": scale}
            streams.append(server.open("POST", "/v1/completions", json.dumps({**body, "vllm_xargs": xargs}).encode()))
        _, answer = server.ask("GET", "/v1/nnsight/vectors")
        assert answer["entries"]["in_use"] == 3
        message = server.refusal({"nnsight_vector": "happy", "nnsight_scale": 4.0})
        assert "All 3 entries for different edits are in use" in message
    finally:
        for stream in streams:
            stream.close()
    until(lambda: server.ask("GET", "/v1/nnsight/vectors")[1]["entries"]["in_use"] == 0)
    ids = offline.tokenizer(PROMPTS[0])["input_ids"]
    expected = generated(reference, ids, added(HAPPY, 4.0))
    assert server.tokens(PROMPTS[0], {"nnsight_vector": "happy", "nnsight_scale": 4.0}) == expected


# -- vectors ----------------------------------------------------------------------------------------------------------


def test_vectors_come_and_go_at_run_time(server: Server, reference: LanguageModel, offline: VLLM) -> None:
    path, xargs = "/v1/nnsight/vectors/new", {"nnsight_vector": "new"}
    ids = offline.tokenizer(PROMPTS[0])["input_ids"]
    assert "no vector 'new'" in server.refusal(xargs)
    for sign in (1, -1):
        kept = {"layers.0": sign * direction(8), "layers.3": sign * direction(9)}
        assert server.ask("PUT", path, save(kept)) == (200, {"name": "new", "layers": [0, 3]})
        assert server.metric("nnsight:vectors_registered") == 3
        status, answer = server.ask("GET", "/v1/nnsight/vectors")
        assert status == 200 and answer["layers"] == [0, 1, 2, 3] and answer["entries"]["count"] == 3
        assert {"name": "new", "layers": [0, 3]} in answer["vectors"]
        assert {"name": "any", "layers": None} in answer["vectors"]
        before = server.metric("nnsight:steered_requests_total")
        expected = generated(reference, ids, added({0: direction(8), 3: direction(9)}, sign))
        assert server.tokens(PROMPTS[0], xargs) == expected
        assert server.metric("nnsight:steered_requests_total") == before + 1
        status, answer = server.ask("PUT", path, save(kept))
        assert status == 409 and "There is a vector 'new' already" in answer["error"]["message"]
        assert server.ask("DELETE", path) == (200, {"name": "new"})
        assert "no vector 'new'" in server.refusal(xargs)
    assert server.ask("DELETE", path)[0] == 404
    assert server.metric("nnsight:vectors_registered") == 2


@pytest.mark.parametrize(
    ("data", "status", "message"),
    [
        (b"something else", 400, "neither a safetensors file nor a GGUF file"),
        (save({"layers.1": torch.ones(HIDDEN + 1)}), 400, "has 129 channels, and the model's hidden state has 128"),
        (save({"layers.1": torch.full((HIDDEN,), float("nan"))}), 400, "'layers.1' has values that are not finite"),
        (save({"layers.1": torch.ones(1 << 19)}), 413, "bytes. No vector of this model needs that many"),
    ],
)
def test_files_that_are_refused(server: Server, data: bytes, status: int, message: str) -> None:
    found, answer = server.ask("PUT", "/v1/nnsight/vectors/wrong", data)
    assert found == status and message in answer["error"]["message"]
    assert server.ask("GET", "/v1/nnsight/vectors", key=None)[0] == 401
    assert server.ask("PUT", "/v1/nnsight/vectors/wrong", b"x", key="another")[0] == 401


@pytest.mark.parametrize("options", [["--enforce-eager"], ["--tensor-parallel-size", 2]])
def test_a_server_that_compiles_nothing_and_one_on_two_devices(
    folder: Path, reference: LanguageModel, files: dict[str, Path], tmp_path: Path, options: list[Any]
) -> None:
    with serving(folder, tmp_path / "log.txt", *options, "--vectors", f"happy={files['happy']}") as server:
        ids = [9, 10, 11, 12]
        expected = generated(reference, ids, added(HAPPY))
        assert server.tokens(ids, {"nnsight_vector": "happy"}) == expected
        assert server.tokens(ids) == generated(reference, ids) != expected


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--vectors", "happy.gguf"], "as in `--vectors happy=happy.gguf`"),
        (["--vectors", "happy=nowhere.gguf"], "No such file or directory: 'nowhere.gguf'"),
        (["--slots", "0"], "--slots has to be at least 1"),
        (["--api-server-count", "2"], "--api-server-count cannot be used with --edits"),
        (["--enable-lora"], "LoRA cannot be used with --edits"),
        (["--pipeline-parallel-size", "2"], "pipeline parallelism cannot be used with --edits"),
        (["--watermark-config", '{"key": 1}'], "model runner V2 with a watermark (`watermark_config`) is not implemented"),
    ],
)
def test_wrong_options(
    folder: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("VLLM_WORKER_MULTIPROC_METHOD", "VLLM_USE_V2_MODEL_RUNNER"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
        monkeypatch.delenv(name)
    monkeypatch.setattr("vllm.config.vllm.HAS_TRITON", "--watermark-config" in options)
    assert main([*map(str, command(folder, *options))]) == 2
    assert message in capsys.readouterr().err
