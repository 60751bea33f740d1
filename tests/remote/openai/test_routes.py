"""OpenAI's interface on a local model: greedy answers are those of transformers under hooks, alone or in a batch, streamed or not."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests
import torch

from nnsight import demo_model
from nnsight.remote.openai.requests import checked, parse
from nnsight.remote.openai.routes import OpenAIModel, _events, _Run, openai_routes
from nnsight.remote.server.keys import Account, OpenDoor
from nnsight.remote.server.serve import in_background
from nnsight.steering.registry import Vectors

from ...conftest import Hooks
from ...serving import until

PROMPTS = ["The Eiffel Tower is in the city of", "The Colosseum is in the city of", "The", "The Louvre is in"]
CHAT = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}bot:{% endif %}"
)


@pytest.fixture(scope="module")
def model() -> Any:
    made = demo_model(dispatch=True)
    made.tokenizer.chat_template = CHAT
    return made


@pytest.fixture(scope="module")
def vectors() -> Vectors:
    generator = torch.Generator().manual_seed(3)
    made = Vectors()
    made.add("mood", {2: 6 * torch.randn(128, generator=generator), 3: 6 * torch.randn(128, generator=generator)})
    made.add("other", 9 * torch.randn(128, generator=generator))
    return made


@pytest.fixture(scope="module")
def address(model: Any, vectors: Vectors, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    door = OpenDoor(Account("anonymous", queue=40))
    routes = openai_routes({"demo": OpenAIModel(model, vectors, together=4)}, door)
    with in_background({}, tmp_path_factory.mktemp("spool"), door, more=routes) as found:
        yield found


def post(address: str, path: str = "completions", **body: Any) -> requests.Response:
    return requests.post(f"{address}/v1/{path}", json={"model": "demo", "temperature": 0, **body}, timeout=500)


def alone(model: Any, prompt: str | list[int], steer: Callable[[int, torch.Tensor], torch.Tensor] | None = None, tokens: int = 6) -> str:
    """Return what transformers makes of one prompt, steered with hooks: ``steer(layer, hidden)``."""
    ids = model.tokenizer(prompt, return_tensors="pt")["input_ids"] if isinstance(prompt, str) else torch.tensor([prompt])
    hooks = Hooks(model._module)
    for number in range(len(model._module.transformer.h) if steer is not None else 0):
        hooks.output(f"transformer.h.{number}", partial(steer, number))
    with hooks.installed():
        made = model._module.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, pad_token_id=0)
    text: str = model.tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)
    return text


def mood(vectors: Vectors, scale: float) -> Callable[[int, torch.Tensor], torch.Tensor]:
    return lambda layer, hidden: hidden + scale * vectors["mood"][layer] if layer in (2, 3) else hidden


def events(answer: requests.Response) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_a_completion_is_that_of_the_model(address: str, model: Any) -> None:
    answer = post(address, prompt=PROMPTS[0], max_tokens=6).json()
    (choice,) = answer["choices"]
    assert choice == {"index": 0, "text": alone(model, PROMPTS[0]), "logprobs": None, "finish_reason": "length"}
    length = len(model.tokenizer.encode(PROMPTS[0]))
    assert answer["usage"] == {"prompt_tokens": length, "completion_tokens": 6, "total_tokens": length + 6}
    assert (answer["object"], answer["model"]) == ("text_completion", "demo")


def test_several_prompts_of_different_lengths_are_one_batch(address: str, model: Any) -> None:
    ids = model.tokenizer.encode(PROMPTS[1])
    answer = post(address, prompt=PROMPTS, max_tokens=6, n=2).json()
    assert [choice["text"] for choice in answer["choices"]] == [alone(model, prompt) for prompt in PROMPTS for _ in range(2)]
    assert post(address, prompt=ids, max_tokens=6).json()["choices"][0]["text"] == alone(model, ids)
    assert post(address, prompt=[ids, ids[:2]], max_tokens=6).json()["choices"][1]["text"] == alone(model, ids[:2])


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_requests_that_are_steered_differently_share_batches(model: Any, vectors: Vectors, tmp_path: Path, compile: bool) -> None:
    served = demo_model(dispatch=True, compile={"backend": "aot_eager"} if compile else False)
    unit = vectors["other"][None] / vectors["other"][None].norm()

    def ablated(layer: int, hidden: torch.Tensor) -> torch.Tensor:
        return hidden - (hidden @ unit)[..., None] * unit if layer == 4 else hidden

    def both(layer: int, hidden: torch.Tensor) -> torch.Tensor:
        return hidden - (hidden @ unit)[..., None] * unit + vectors["mood"][layer] if layer in (2, 3) else hidden

    asked: list[tuple[dict[str, Any], Any]] = [
        ({}, None),
        ({"nnsight_vector": "mood"}, mood(vectors, 1.0)),
        ({"nnsight_vector": "mood", "nnsight_scale": -2.0}, mood(vectors, -2.0)),
        ({"nnsight_remove": "other", "nnsight_layers": 4}, ablated),
        ({"nnsight_vector": "mood", "nnsight_remove": "other"}, both),
        ({"nnsight_vector": "mood", "nnsight_start": 500}, None),
    ]
    cases = [(prompt, extra, steer) for prompt in PROMPTS for extra, steer in asked]
    due = [alone(model, prompt, steer) for prompt, _, steer in cases]
    found: list[Any] = [None] * len(cases)
    door = OpenDoor(Account("anonymous", queue=40))
    with in_background({}, tmp_path, door, more=openai_routes({"demo": OpenAIModel(served, vectors, together=8)}, door)) as address:

        def ask(number: int) -> None:
            prompt, extra, _ = cases[number]
            found[number] = post(address, prompt=prompt, max_tokens=6, **({"vllm_xargs": extra} if extra else {})).json()

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(cases))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [answer["choices"][0]["text"] for answer in found] == due
    assert len(set(due)) > len(PROMPTS)


def test_a_chat_and_its_stream(address: str, model: Any) -> None:
    messages = [{"role": "user", "content": "Where is the Louvre?"}]
    due = alone(model, "user: Where is the Louvre?\nbot:")
    answer = post(address, "chat/completions", messages=messages, max_completion_tokens=6).json()
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": due}
    assert answer["object"] == "chat.completion"
    streamed = events(
        post(address, "chat/completions", messages=messages, max_tokens=6, stream=True, stream_options={"include_usage": True})
    )
    assert streamed[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in streamed[:-1]) == due
    assert [event["choices"][0]["finish_reason"] for event in streamed[1:-1]][-1] == "length"
    assert streamed[-1]["usage"]["completion_tokens"] == 6
    assert {event["object"] for event in streamed} == {"chat.completion.chunk"}


def test_a_stream_of_two_answers(address: str, model: Any) -> None:
    streamed = events(post(address, prompt=PROMPTS[:2], max_tokens=6, stream=True))
    for index in range(2):
        texts = [event["choices"][0]["text"] for event in streamed if event["choices"][0]["index"] == index]
        assert "".join(texts) == alone(model, PROMPTS[index])
        assert len(texts) > 2


@pytest.mark.parametrize("fails", [False, True])
def test_an_answer_that_ends_while_an_event_is_sent_is_told_in_full(model: Any, fails: bool) -> None:
    class Manual:
        model: Any = SimpleNamespace(tokenizer=None)
        generator: Any = SimpleNamespace(submit=lambda answer: None)

        def additions(self, request: Any) -> dict[int, Any]:
            return {}

    async def streamed() -> str:
        body = parse(b'{"model": "demo", "prompt": "x", "stream": true}', chat=False)
        run = _Run(Manual(), checked(body, model.tokenizer, 128))  # type: ignore[arg-type]
        (answer,), told = run.answers, _events(run, False, {})
        answer.text = "one"
        found = [await anext(told)]
        if fails:
            answer.fail(RuntimeError())
        else:
            answer.text, answer.reason = "one two", "length"
            answer._tell()
        return "".join([*found, *[event async for event in told]])

    text = asyncio.run(asyncio.wait_for(streamed(), 20))
    if fails:
        assert "server_error" in text and "[DONE]" not in text
    else:
        choices = [json.loads(line.removeprefix("data: "))["choices"][0] for line in text.split("\n\n")[:-2]]
        assert [(choice["text"], choice["finish_reason"]) for choice in choices] == [("one", None), (" two", "length")]


def test_it_stops_at_a_text_and_at_the_end(address: str, model: Any) -> None:
    due = alone(model, PROMPTS[0], tokens=12)
    stop = due[6:9]
    for stream in (False, True):
        answer = post(address, prompt=PROMPTS[0], max_tokens=12, stop=[stop, "never"], stream=stream)
        choices = [event["choices"][0] for event in events(answer)] if stream else answer.json()["choices"]
        assert "".join(choice["text"] for choice in choices) == due[: due.index(stop)]
        assert choices[-1]["finish_reason"] == "stop"


def test_an_end_token_ends_one_answer_of_a_batch(model: Any, vectors: Vectors, tmp_path: Path) -> None:
    served = demo_model(dispatch=True)
    first = served.tokenizer.encode(alone(model, PROMPTS[0], tokens=2))
    served._module.generation_config.eos_token_id = first[1]
    door = OpenDoor()
    with in_background({}, tmp_path, door, more=openai_routes({"demo": OpenAIModel(served, vectors)}, door)) as address:
        answer = post(address, prompt=PROMPTS[:2], max_tokens=6).json()
    assert answer["choices"][0]["text"] == model.tokenizer.decode(first[:1])
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][1]["text"].startswith(alone(model, PROMPTS[1], tokens=1))


def test_a_seed_gives_the_same_draws_alone_and_in_a_batch(address: str) -> None:
    options: dict[str, Any] = {"max_tokens": 8, "temperature": 1.5, "seed": 11}
    one = post(address, prompt=PROMPTS[0], **options).json()["choices"][0]["text"]
    many = [choice["text"] for choice in post(address, prompt=[PROMPTS[0], *PROMPTS], **options).json()["choices"]]
    assert many[0] == one
    texts = {choice["text"] for choice in post(address, prompt=PROMPTS[0], n=6, **options).json()["choices"]}
    assert len(texts) > 1 and one in texts


@pytest.mark.slow
def test_draws_have_the_probabilities_of_the_model(address: str, model: Any) -> None:
    with torch.no_grad():
        logits = model._module(model.tokenizer("The", return_tensors="pt")["input_ids"]).logits[0, -1]
    for options, kept in (({"top_k": 4}, 4), ({"top_p": 0.5}, None)):
        likely = logits.softmax(-1).sort(descending=True)
        count = kept or int((likely.values.cumsum(0) < 0.5).sum()) + 1
        allowed = {model.tokenizer.decode([int(token)]) for token in likely.indices[:count]}
        drawn = [
            choice["text"]
            for seed in range(8)
            for choice in post(address, prompt="The", max_tokens=1, n=32, temperature=1.0, seed=100 * seed, **options).json()["choices"]
        ]
        assert set(drawn) <= allowed
        due = float(likely.values[0] / likely.values[:count].sum())
        share = drawn.count(model.tokenizer.decode([int(likely.indices[0])])) / len(drawn)
        assert abs(share - due) < 0.12


def test_logprobs_are_those_of_the_model(address: str, model: Any) -> None:
    ids = model.tokenizer(PROMPTS[0], return_tensors="pt")["input_ids"]
    text = alone(model, PROMPTS[0], tokens=4)
    with torch.no_grad():
        whole = model._module.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False, pad_token_id=0)
        logs = model._module(whole).logits[0, ids.shape[1] - 1 : -1].log_softmax(-1)
    due = [logs[place, token].item() for place, token in enumerate(whole[0, ids.shape[1] :].tolist())]
    for stream in (False, True):
        answer = post(address, prompt=PROMPTS[0], max_tokens=4, logprobs=3, stream=stream)
        choices = [event["choices"][0] for event in events(answer)] if stream else answer.json()["choices"]
        told = {name: [one for choice in choices for one in choice["logprobs"][name]] for name in choices[0]["logprobs"]}
        assert "".join(told["tokens"]) == text
        assert all(text[offset:].startswith(token) for offset, token in zip(told["text_offset"], told["tokens"], strict=True))
        assert told["token_logprobs"] == pytest.approx(due, abs=1e-4)
        assert [max(likely.values()) for likely in told["top_logprobs"]] == pytest.approx(logs.max(-1).values.tolist(), abs=1e-4)
        assert all(len(likely) == 3 for likely in told["top_logprobs"])
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3, "logprobs": True, "top_logprobs": 2}
    content = post(address, "chat/completions", **body).json()["choices"][0]["logprobs"]["content"]
    assert [len(one["top_logprobs"]) for one in content] == [2] * 3
    assert all(one["logprob"] == one["top_logprobs"][0]["logprob"] and bytes(one["bytes"]).decode() == one["token"] for one in content)


def test_penalties_and_biases_change_the_logits(address: str, model: Any) -> None:
    tokenizer = model.tokenizer
    first = tokenizer.encode(alone(model, "The", tokens=1))[0]
    without = post(address, prompt="The", max_tokens=1, logit_bias={str(first): -100}).json()["choices"][0]["text"]
    assert without != tokenizer.decode([first])
    assert post(address, prompt="The", max_tokens=5, logit_bias={"7": 100}).json()["choices"][0]["text"] == tokenizer.decode([7] * 5)
    ids, made = tokenizer.encode("The"), []
    for _ in range(12):
        with torch.no_grad():
            logits = model._module(torch.tensor([ids + made])).logits[0, -1]
        for token in set(made):
            logits[token] -= 1.5 + 2.0 * made.count(token)
        made.append(int(logits.argmax()))
    for extra in ([], PROMPTS):
        answer = post(address, prompt=["The", *extra], max_tokens=12, presence_penalty=1.5, frequency_penalty=2.0).json()
        assert answer["choices"][0]["text"] == tokenizer.decode(made)


@pytest.mark.parametrize(
    ("body", "code", "says"),
    [
        ({"prompt": "x", "model": "gpt-5"}, 404, "not served here. Served models: demo"),
        ({"prompt": "x", "echo": True}, 400, "`echo`: Input should be False"),
        ({"prompt": "x", "logprobs": True}, 400, "`logprobs`: Input should be a valid integer"),
        ({"prompt": "x", "top_logprobs": 2}, 400, "`top_logprobs`: Extra inputs are not permitted"),
        ({"prompt": "x", "presence_penalty": 3}, 400, "`presence_penalty`: Input should be less than or equal to 2"),
        ({"prompt": "x", "logit_bias": {"99999": 1}}, 400, "token ids of this model"),
        ({"prompt": "x", "logit_bias": {"7": "nan"}}, 400, "`logit_bias`: Input should be a valid number"),
        ({"prompt": "x", "logit_bias": [7]}, 400, "`logit_bias`: Input should be a valid dictionary"),
        ({"prompt": "x", "colour": 1}, 400, "`colour`: Extra inputs are not permitted"),
        ({"prompt": {"a": 1}}, 400, "`prompt`: Input should be a valid string"),
        ({"prompt": [[99999]]}, 400, "token ids of this model"),
        ({"prompt": "x", "max_tokens": 0}, 400, "`max_tokens`: Input should be greater than or equal to 1"),
        ({"prompt": "x", "max_tokens": 10**6}, 400, "`max_tokens`: after the prompt, there is room for"),
        ({"prompt": "x " * 2000}, 400, "prompt and answer may only have"),
        ({"prompt": "x", "temperature": "hot"}, 400, "`temperature`: Input should be a valid number"),
        ({"prompt": "x", "n": 65}, 400, "`n`: Input should be less than or equal to 64"),
        ({"prompt": ["x"] * 65}, 400, "its prompts times `n`"),
        ({"prompt": "x", "stop": [""]}, 400, "`stop`: String should have at least 1 character"),
        ({"prompt": "x", "vllm_xargs": {"nnsight_vector": "joy"}}, 400, "no vector 'joy'"),
        ({"prompt": "x", "vllm_xargs": {"nnsight_vector": "other"}}, 400, "nnsight_layers is missing"),
        ({"prompt": "x", "vllm_xargs": {"nnsight_vector": "mood", "nnsight_layers": 9}}, 400, "Layer 9 cannot be steered"),
        ({"prompt": "x", "vllm_xargs": {"nnsight_vector": "mood", "nnsight_start": -2}}, 400, "nnsight_start is a position"),
        ({"prompt": "x", "vllm_xargs": {"nnsight_vector": "mood", "nnsight_start": 2**63}}, 400, "nnsight_start is a position"),
        ({"prompt": "\ud800"}, 400, "not valid JSON"),
        ({"prompt": "x", "vllm_xargs": {"\ud800": 1}}, 400, "not valid JSON"),
        ({"prompt": "x", "nnsight_vector": "mood"}, 400, "`nnsight_vector`: Extra inputs are not permitted"),
    ],
)
def test_requests_that_are_refused(address: str, body: dict[str, Any], code: int, says: str) -> None:
    answer = post(address, **body)
    assert answer.status_code == code
    assert says in answer.json()["error"]["message"]


def test_other_refusals(address: str, model: Any, vectors: Vectors, tmp_path: Path) -> None:
    assert "not valid JSON" in requests.post(f"{address}/v1/completions", data="{", timeout=60).json()["error"]["message"]
    assert requests.post(f"{address}/v1/completions", data=b" " * (5 * 2**20), timeout=60).status_code == 413
    assert "`messages`: Field required" in post(address, "chat/completions", messages=[{"role": "user"}]).json()["error"]["message"]
    assert [served["id"] for served in requests.get(f"{address}/v1/models", timeout=60).json()["data"]] == ["demo"]
    listed = requests.get(f"{address}/v1/nnsight/vectors", timeout=60).json()["vectors"]
    assert listed == [{"model": "demo", "name": "mood", "layers": [2, 3]}, {"model": "demo", "name": "other", "layers": None}]

    class Locked:
        def admit(self, key: str | None) -> Account | None:
            return Account("me") if key == "secret" else None

    plain = demo_model(dispatch=True)
    with in_background({}, tmp_path, Locked(), more=openai_routes({"demo": OpenAIModel(plain, vectors)}, Locked())) as locked:
        assert post(locked, prompt="x").status_code == 401
        assert requests.get(f"{locked}/v1/models", timeout=60).status_code == 401
        for header in ({"Authorization": "Bearer secret"}, {"ndif-api-key": "secret"}):
            answer = requests.post(f"{locked}/v1/completions", json={"model": "demo", "prompt": "x"}, headers=header, timeout=60)
            assert answer.status_code == 200
        messages = [{"role": "user", "content": "x"}]
        body = {"model": "demo", "messages": messages}
        answer = requests.post(f"{locked}/v1/chat/completions", json=body, headers=header, timeout=60)
        assert "no chat template" in answer.json()["error"]["message"]


def test_a_batch_that_fails_fails_its_requests_alone(model: Any, vectors: Vectors, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served = OpenAIModel(demo_model(dispatch=True), vectors)
    door = OpenDoor()
    with in_background({}, tmp_path, door, more=openai_routes({"demo": served}, door)) as address:

        def broken(*args: Any) -> Any:
            raise RuntimeError("out of memory")

        monkeypatch.setattr(served.generator, "_call", broken)
        answer = post(address, prompt=PROMPTS[0])
        assert answer.status_code == 500 and "out of memory" not in answer.text
        streamed = post(address, prompt=PROMPTS[0], stream=True).text
        assert "server_error" in streamed and "[DONE]" not in streamed
        monkeypatch.undo()
        assert post(address, prompt=PROMPTS[0], max_tokens=6).json()["choices"][0]["text"] == alone(model, PROMPTS[0])


def test_directions_that_depend_on_each_other_cannot_both_be_removed(model: Any, tmp_path: Path) -> None:
    vectors, door = Vectors(), OpenDoor()
    for name, factor in (("one", 1.0), ("twice", 2.0)):
        vectors.add(name, {2: factor * torch.ones(128)})
    with in_background({}, tmp_path, door, more=openai_routes({"demo": OpenAIModel(demo_model(dispatch=True), vectors)}, door)) as address:
        answer = post(address, prompt="x", vllm_xargs={"nnsight_remove": "one,twice"})
    assert answer.status_code == 400
    assert "depend on each other" in answer.json()["error"]["message"]


def test_a_stream_that_nobody_reads_holds_no_place(model: Any, vectors: Vectors, tmp_path: Path) -> None:
    door = OpenDoor(Account("anonymous", queue=1))
    with in_background({}, tmp_path, door, more=openai_routes({"demo": OpenAIModel(demo_model(dispatch=True), vectors)}, door)) as address:
        for _ in range(3):
            body = {"model": "demo", "prompt": PROMPTS[0], "max_tokens": 4, "stream": True}
            requests.post(f"{address}/v1/completions", json=body, stream=True, timeout=60).close()
            until(lambda: post(address, prompt=PROMPTS[0], max_tokens=1).ok)  # the answer that nobody reads is being made
