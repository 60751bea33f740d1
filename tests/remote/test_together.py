"""Jobs of several clients in one forward pass: each gets what it gets alone, and sees nothing of the others."""

from __future__ import annotations

import dataclasses
import functools
import gc
import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import nnsight
from nnsight import LanguageModel, NNsight
from nnsight.fx import counters
from nnsight.program.format import payload as payload_module
from nnsight.program.format.errors import ExecutionFailedError, InvalidProgramError
from nnsight.program.format.limits import Limits
from nnsight.program.format.payload import decode, decode_known, encode
from nnsight.program.format.results import decode_results
from nnsight.program.run.execution import execute_payload
from nnsight.remote.protocol import ModelKey
from nnsight.remote.server.models import engine_of
from nnsight.remote.together import execute_payloads, kind_of

from ..conftest import Rows, close, same
from .remoting import Catch, running, until

#: Seeds of prompts.
PROMPTS = [10, 11, 12]
LAYERS = 3


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    config = GPT2Config(n_layer=LAYERS, n_embd=16, n_head=2, vocab_size=64, bos_token_id=0, eos_token_id=0)
    torch.manual_seed(0)
    return LanguageModel(GPT2LMHeadModel(config).eval())


@pytest.fixture
def forwards(model: Any) -> Iterator[list[int]]:
    """The number of rows of each forward pass of the model."""
    rows: list[int] = []
    handle = model._module.register_forward_hook(lambda module, args, kwargs, out: rows.append(len(out.logits)), with_kwargs=True)
    yield rows
    handle.remove()


def ids(model: Any, *seeds: int) -> torch.Tensor:
    """Prompts of one length."""
    return torch.stack([torch.randint(1, 64, (5,), generator=torch.Generator().manual_seed(seed)) for seed in seeds])


def steering(model: Any, number: int) -> bytes:
    catch = Catch()
    torch.manual_seed(number)
    direction = torch.randn(model.config.n_embd)
    with model.trace(ids(model, PROMPTS[number % 3]), backend=catch):
        model.transformer.h[number % 2].output[:, -1] += (number + 1) * direction
        hidden = model.transformer.h[2].output.save()
        logits = model.lm_head.output[:, -1].save()
    return catch.payload


def alone(model: Any, payload: bytes) -> dict[str, Any]:
    return decode_results(execute_payload(model, payload))


def test_jobs_share_a_forward_pass_and_get_what_they_get_alone(model: Any, forwards: list[int]) -> None:
    payloads = [steering(model, number) for number in range(4)]
    assert len({kind_of(model, payload) for payload in payloads}) == 1 and kind_of(model, payloads[0]) is not None
    expected = [alone(model, payload) for payload in payloads]
    forwards.clear()
    found = [decode_results(result) for result in execute_payloads(model, payloads) if isinstance(result, bytes)]
    assert forwards == [4]
    for mine, wanted in zip(found, expected, strict=True):
        assert {name: value.shape for name, value in mine.items()} == {name: value.shape for name, value in wanted.items()}
        close(mine, wanted)
    assert not torch.allclose(found[0]["logits"], found[3]["logits"])  # the same prompt, other edits


def tensors() -> int:
    return sum(issubclass(type(found), torch.Tensor) for found in gc.get_objects())


@pytest.mark.parametrize("together", [False, True])
def test_activations_of_a_job_go_with_it(model: Any, together: bool, no_gc: None) -> None:
    """By reference counting alone: what waits for the garbage collector is memory that the next job lacks."""
    payloads = [steering(model, number) for number in range(2)]

    def run() -> None:
        if together:
            assert all(kind_of(model, payload) is not None for payload in payloads)
            execute_payloads(model, payloads)
        else:
            for payload in payloads:
                execute_payload(model, payload)

    run()  # what is remembered of a model, such as which dims of its values are those of the batch
    before = tensors()
    run()
    assert tensors() == before


def test_jobs_have_any_number_of_rows_and_invokes(model: Any, forwards: list[int]) -> None:
    catch = Catch()
    with model.trace(backend=catch) as tracer:
        with tracer.invoke(ids(model, PROMPTS[0])):
            clean = model.transformer.h[1].output[:, -1].save()
        with tracer.invoke(ids(model, PROMPTS[1])):
            model.transformer.h[2].output[:] *= 0.5
            patched = model.lm_head.output.save()
    payloads = [catch.payload, steering(model, 0)]
    assert kind_of(model, payloads[0]) == kind_of(model, payloads[1]) is not None
    expected = [alone(model, payload) for payload in payloads]
    forwards.clear()
    close([decode_results(outcome) for outcome in execute_payloads(model, payloads)], expected)  # type: ignore[arg-type]
    assert forwards == [3]


def test_what_jobs_must_have_in_common(model: Any) -> None:
    def kind(block: Callable[[Any], None] = lambda tracer: None, *, of: Any = model, call: str = "trace", **options: Any) -> Any:
        catch = Catch()
        given = options.pop("ids", ids(model, PROMPTS[0]))
        with getattr(of, call)(given, backend=catch, **options) as tracer:
            block(tracer)
            of.lm_head.output.save()
        return kind_of(of, catch.payload)

    base = kind()
    assert base is not None
    assert kind(ids=ids(model, *PROMPTS)) == base  # the number of rows may differ
    assert kind(ids=ids(model, PROMPTS[0])[:, :4]) not in (base, None)  # their length may not
    assert kind(use_cache=False) not in (base, None)
    assert kind(lambda tracer: model.transformer.h[0].skip(model.transformer.h[0].input)) is None
    padded = torch.tensor([[0, 1, 1, 1, 1]])
    assert kind(attention_mask=padded) not in (base, None)  # a model has no mask where nothing is padded
    net = NNsight(torch.nn.Linear(2, 2))
    catch = Catch()
    with net.trace(torch.ones(1, 2), backend=catch):
        net.output.save()
    assert kind_of(net, catch.payload) is None  # nobody knows how its inputs are joined
    with pytest.raises(InvalidProgramError):
        kind_of(model, b"no payload at all")


#: Ends of sequences, to which some of the generations below come.
ENDS = [7, 18, 32, 44]
TOKENS = 6


@functools.cache
def recorded(model: Any, rows: int, strength: float) -> bytes:
    catch = Catch()
    direction = torch.randn(model.config.n_embd, generator=torch.Generator().manual_seed(1))
    with model.generate(backend=catch, max_new_tokens=TOKENS, eos_token_id=ENDS) as tracer:
        with tracer.invoke(ids(model, *range(rows))):
            hidden = nnsight.save([])
            chosen = nnsight.save([])
            for _ in tracer.iter[:TOKENS]:
                model.transformer.h[1].output[:, -1] += strength * direction
                hidden.append(model.transformer.h[2].output)
                chosen.append(model.lm_head.output[:, -1].argmax(dim=-1))
        with tracer.invoke():
            made = model.generator.output.save()
            result = tracer.result.save()
    del hidden, chosen, made, result
    return catch.payload


def generating(model: Any, *seeds: int, strength: float = 0.0, **options: Any) -> bytes:
    """A job that steers each step of a generation, and keeps what it sees on the way and in the end."""
    job = decode(recorded(model, len(seeds), strength))
    given = dict(job.runs[0]["kwargs"]["dict"])
    job.tensors[given["input_ids"]["tensor"]] = ids(model, *seeds)
    job.runs[0]["kwargs"]["dict"] = [[name, tree] for name, tree in (given | options).items()]
    return encode(job)


def test_generations_run_together_and_each_ends_as_it_does_alone(model: Any, forwards: list[int]) -> None:
    payloads = [generating(model, seed) for seed in range(1, 6)]
    payloads += [generating(model, seed, strength=3.0) for seed in range(1, 3)]
    payloads += [generating(model, 20, 1)]
    assert len({kind_of(model, payload) for payload in payloads}) == 1 and kind_of(model, payloads[0]) is not None
    expected = [alone(model, payload) for payload in payloads]
    lengths = {result["made"].shape[1] for result in expected}
    assert len(lengths) > 2 and max(lengths) == 5 + TOKENS  # some end early, at several steps, and some do not
    forwards.clear()
    outcomes = execute_payloads(model, payloads)
    assert forwards == [9] * TOKENS
    for outcome, wanted in zip(outcomes, expected, strict=True):
        assert isinstance(outcome, bytes), outcome
        found = decode_results(outcome)
        assert len(found["hidden"]) == found["made"].shape[1] - 5
        same([found[name] for name in ("made", "result", "chosen")], [wanted[name] for name in ("made", "result", "chosen")])
        close(found["hidden"], wanted["hidden"])
    for seed, outcome in zip(range(1, 6), outcomes[:5], strict=True):
        assert isinstance(outcome, bytes)
        plain = model._module.generate(input_ids=ids(model, seed), max_new_tokens=TOKENS, eos_token_id=ENDS, pad_token_id=0)
        same(decode_results(outcome)["made"], plain)


def test_which_generations_run_alone(model: Any) -> None:
    def kind(seed: int = 1, **options: Any) -> Any:
        return kind_of(model, generating(model, seed, **options))

    base = kind()
    assert base is not None
    assert kind(2, strength=1.0) == base
    assert kind(max_new_tokens=TOKENS + 1) not in (base, None)
    assert kind(eos_token_id=3) not in (base, None)
    assert kind(repetition_penalty=1.5) not in (base, None)
    assert kind(do_sample=True) is None
    assert kind(num_beams=2) is None
    assert kind(eos_token_id=None) is None

    catch = Catch()
    with model.generate(ids(model, 1), backend=catch, max_new_tokens=2) as tracer:
        model.generator.output[:, -1] = 1
        made = tracer.result.save()
    del made
    assert kind_of(model, catch.payload) is None
    with model.generate(ids(model, 1), backend=catch, max_new_tokens=2) as tracer:
        model.generator.streamer.output[:] = 1
        made = tracer.result.save()
    del made
    assert kind_of(model, catch.payload) is None
    bad = decode(generating(model, 1))
    bad.runs[0]["kwargs"]["dict"].append(["temperature", {"str": "high"}])
    with pytest.raises(InvalidProgramError, match="temperature"):
        kind_of(model, encode(bad))


def test_the_options_of_the_model_that_runs_decide(model: Any, forwards: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway may know a model without weights and its own options; what it calls alike is looked at once more."""
    payloads = [generating(model, seed) for seed in (1, 2)]
    expected = [alone(model, payload) for payload in payloads]
    monkeypatch.setattr(model._module.generation_config, "max_time", 60.0)
    assert kind_of(model, payloads[0]) is None
    forwards.clear()
    close([decode_results(result) for result in execute_payloads(model, payloads)], expected)  # type: ignore[arg-type]
    assert set(forwards) == {1}


class Shares(torch.nn.Module):
    """Hands on a tensor that was computed of all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.nn.Identity()
        self.scale = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean(x.mean(0))
        return self.scale(x)


def sharing(model: Any, x: torch.Tensor, mean: bool) -> bytes:
    catch = Catch()
    with model.trace(x, backend=catch):
        if mean:
            seen = model.mean.output.save()
        model.scale.input[:, 0] += 1.0
        out = model.scale.output.save()
    return catch.payload


def test_what_is_computed_of_all_rows_is_not_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Rows(Shares())
    rows: list[int] = []
    model._module.register_forward_hook(lambda module, args, out: rows.append(len(out)))
    secret, own = torch.full((1, 4), 1000.0), torch.ones(2, 4)

    payloads = [sharing(model, secret, False), sharing(model, own, True)]
    assert kind_of(model, payloads[0]) == kind_of(model, payloads[1])
    rows.clear()
    first, second = (decode_results(result) for result in execute_payloads(model, payloads) if isinstance(result, bytes))
    assert rows[-2:] == [1, 2]  # in the end, each ran alone
    same(second["seen"], torch.ones(4))
    close(second["out"], model._module.scale(own + torch.tensor([1.0, 0, 0, 0])).detach())
    rows.clear()
    both = execute_payloads(model, [payloads[0], sharing(model, own, False)])
    assert rows == [3] and all(isinstance(result, bytes) for result in both)


class Repeats(torch.nn.Module):
    """Hands on a tensor whose rows are all in the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Identity()
        self.scale = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table = torch.arange(4.0).expand(len(x), -1)
        return self.scale(x + self.table(table) + table)


def test_a_job_edits_its_own_rows_where_all_rows_are_in_the_same_memory() -> None:
    model = Rows(Repeats())

    def job(x: torch.Tensor, edits: bool) -> bytes:
        catch = Catch()
        with model.trace(x, backend=catch):
            if edits:
                model.table.output[:, 0] += 100.0
            out = model.scale.output.save()
        return catch.payload

    x, y = torch.randn(2, 1, 4).unbind()
    payloads = [job(x, True), job(y, False)]
    assert kind_of(model, payloads[0]) == kind_of(model, payloads[1])
    first, second = (decode_results(result)["out"] for result in execute_payloads(model, payloads) if isinstance(result, bytes))
    plain, scale = torch.arange(4.0), model._module.scale
    close(first, scale(x + 2 * (plain + torch.tensor([100.0, 0, 0, 0]))).detach())  # the edit reaches both uses, as in a run alone
    close(second, scale(y + 2 * plain).detach())


def test_one_program_that_fails_fails_alone(model: Any, forwards: list[int]) -> None:
    catch = Catch()
    with model.trace(ids(model, PROMPTS[0]), backend=catch):
        rows = model.lm_head.output[0, :, 0].argmax().reshape(1) + 1000
        picked = model.transformer.wte.weight.index_select(0, rows).save()
    good = [steering(model, 0), steering(model, 1)]
    expected = [alone(model, payload) for payload in good]
    first, bad, second, malformed = execute_payloads(model, [good[0], catch.payload, good[1], b"nothing"])
    assert isinstance(bad, ExecutionFailedError) and "outside of its tensor" in str(bad)
    assert isinstance(malformed, InvalidProgramError)
    assert isinstance(first, bytes) and isinstance(second, bytes)
    same([decode_results(first), decode_results(second)], expected)  # bit by bit: they ran alone


def test_jobs_with_one_header_share_what_it_says(model: Any) -> None:
    job = decode(steering(model, 1))
    other = {name: -tensor if tensor.is_floating_point() else tensor for name, tensor in job.tensors.items()}
    payloads = [encode(job), encode(dataclasses.replace(job, tensors=other))]
    first, second = (decode_known(payload) for payload in payloads)
    assert first.nodes is second.nodes and first.facts is second.facts
    assert any(not torch.equal(first.tensors[name], second.tensors[name]) for name in first.tensors)
    assert decode(payloads[1]).content() == second.content() and decode(payloads[1]).nodes is not second.nodes
    for payload in payloads:  # one after the other, which finds out what is known of the header only once
        torch.testing.assert_close(alone(model, payload)["logits"], decode_results(execute_payloads(model, [payload])[0])["logits"])  # type: ignore[arg-type]
    assert not torch.equal(alone(model, payloads[0])["logits"], alone(model, payloads[1])["logits"])


def test_a_known_header_lets_no_other_payload_in(model: Any) -> None:
    payload = steering(model, 0)
    decode_known(payload)
    for changed in (payload[:-1], payload + b"\0", payload[:9]):
        with pytest.raises(InvalidProgramError):
            decode_known(changed)
    for limits in (Limits(payload_bytes=len(payload) - 1), Limits(nodes=1)):
        with pytest.raises(InvalidProgramError, match="the limit is"):
            decode_known(payload, limits)


def test_known_headers_take_no_more_room_than_they_may(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payload_module, "_known", OrderedDict())
    monkeypatch.setattr(payload_module, "_KEPT_BYTES", 4000)
    for number in range(6):
        decode_known(steering(model, number))
    assert 0 < sum(len(header) for header, _ in payload_module._known) <= 4000
    monkeypatch.setattr(payload_module, "_LONGEST", 10)
    before = list(payload_module._known)
    decode_known(steering(model, 7))
    assert list(payload_module._known) == before


def test_limits_hold_for_the_group_and_for_each(model: Any, forwards: list[int]) -> None:
    payloads = [steering(model, number) for number in range(3)]
    assert all(isinstance(result, bytes) for result in execute_payloads(model, payloads, Limits(rows=2)))
    assert forwards[-3:] == [1, 1, 1]
    outcomes = execute_payloads(model, payloads, Limits(result_bytes=10))
    assert all(isinstance(outcome, (ExecutionFailedError, InvalidProgramError)) for outcome in outcomes)


def held_back(engine: Any) -> tuple[threading.Event, threading.Event]:
    """Let jobs that run alone wait; returns what is set when one has started, and what is to be set for it to go on."""
    started, gate = threading.Event(), threading.Event()
    run = engine._run

    def held(payload: bytes, log: Any) -> bytes:
        started.set()
        assert gate.wait(20)
        return run(payload, log)

    engine._run = held
    return started, gate


def test_a_server_runs_waiting_jobs_together(tmp_path: Path, forwards: list[int], model: Any) -> None:
    engine = engine_of(model)
    payloads = [steering(model, number) for number in range(5)]
    expected = [alone(model, payload) for payload in payloads]
    started, gate = held_back(engine)
    with running(engine, tmp_path, key=ModelKey("nnsight/demo")) as server:
        jobs = [server.submit(payloads[0], model_key="nnsight/demo")]
        until(started.is_set)
        jobs += [server.submit(payload, model_key="nnsight/demo") for payload in payloads[1:]]
        forwards.clear()
        gate.set()
        ended = [server.finished(job) for job in jobs]
        assert [message["meta"]["together"] for message in ended] == [1, 4, 4, 4, 4]
        assert forwards == [1, 4]
        for job, wanted in zip(jobs, expected, strict=True):
            close(decode_results(server.get(f"/result/{job}").content), wanted)


# -- compiled models -----------------------------------------------------------------------------------------------------------------


class Stack(torch.nn.Module):
    """A small model that is captured in no time, with the names of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.h = torch.nn.ModuleList([torch.nn.Linear(16, 16) for _ in range(LAYERS)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.h:
            x = torch.tanh(layer(x))
        return x


@pytest.fixture(scope="module")
def stack() -> Any:
    torch.manual_seed(0)
    return Rows(Stack().eval())


@pytest.fixture(scope="module")
def compiled(stack: Any) -> Any:
    return Rows(stack._module, compile={"backend": "eager"})


def patching(model: Any, seed: int, rows: int = 1, layer: int = 1, shape: int = 5, prints: bool = False) -> bytes:
    """A program that reads, computes with values and tensors of its own, edits and saves: the same for all seeds."""
    catch = Catch()
    generator = torch.Generator().manual_seed(seed)
    direction, mask = torch.randn(16, generator=generator), torch.rand(16, generator=generator) > 0.5
    language = hasattr(model, "tokenizer")
    given = torch.randint(1, 64, (rows, shape), generator=generator) if language else torch.randn(rows, shape, 16, generator=generator)
    layers = model.transformer.h if language else model.h
    with model.trace(given, backend=catch):
        early = layers[0].output
        layers[layer].output[:, -1] += torch.where(mask, direction, early[:, 0])
        layers[2].output = layers[2].output * 0.5
        last = (model.lm_head if language else model).output[:, -1].save()
        if prints:
            print("seen", last.shape, last.argmax())
        mean = early.mean(-1).save()
    return catch.payload


def counted(function: Callable[[], Any]) -> tuple[Any, dict[str, int]]:
    """Return what a function returns, and what the compiler did meanwhile."""
    names = ("captures", "recordings", "splices", "compiles", "loads", "breaks")
    before = {name: getattr(counters, name) for name in names}
    result = function()
    return result, {name: getattr(counters, name) - count for name, count in before.items()}


def run_group(model: Any, payloads: list[bytes]) -> tuple[list[dict[str, Any]], list[str]]:
    assert len({kind_of(model, payload) for payload in payloads}) == 1 and kind_of(model, payloads[0]) is not None
    printed: list[str] = []
    logs = [lambda line, number=number: printed.append(f"{number}: {line}") for number in range(len(payloads))]
    outcomes = execute_payloads(model, payloads, logs=logs)
    return [decode_results(outcome) for outcome in outcomes if isinstance(outcome, bytes)], printed


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_equal_programs_share_a_pass_of_a_compiled_model(stack: Any, model: Any, backend: str) -> None:
    plain = model if backend == "inductor" else stack
    compiled = type(plain)(plain._module, compile={"backend": backend})
    seeds = itertools.count(100)

    def group(size: int) -> dict[str, int]:
        payloads = [patching(plain, next(seeds)) for _ in range(size)]
        expected = [alone(plain, payload) for payload in payloads]
        (found, _), done = counted(lambda: run_group(compiled, payloads))
        close(found, expected)
        return done

    first = [group(size)["recordings"] for size in (2, 4, 2)]
    assert first in ([1, 1, 0], [1, 1, 1])  # the first graph may be for its number of rows only, the next is for any
    for size in (2, 3, 4):  # other data, and numbers that are filled up: nothing is recorded or compiled anew
        assert not any(group(size).values())


def test_what_jobs_of_a_compiled_model_print_is_their_own(stack: Any, compiled: Any) -> None:
    payloads = [patching(stack, seed, prints=True) for seed in range(3)]
    expected = [alone(stack, payload) for payload in payloads]
    found, printed = run_group(compiled, payloads)
    close(found, expected)
    assert printed == [f"{number}: seen torch.Size([1, 16]) {wanted['last'].argmax()!s}" for number, wanted in enumerate(expected)]


def test_which_jobs_of_a_compiled_model_share_a_pass(stack: Any, compiled: Any, model: Any) -> None:
    base = kind_of(compiled, patching(stack, 1))
    assert base is not None and base == kind_of(compiled, patching(stack, 2))
    for other in ({"rows": 2}, {"layer": 0}, {"shape": 4}):
        assert kind_of(compiled, patching(stack, 3, **other)) not in (base, None)
    generates = LanguageModel(model._module, compile={"backend": "eager"})
    assert kind_of(generates, generating(model, 1)) is None  # some would end before others


def test_what_a_compiled_model_computes_of_all_rows_is_not_handed_out() -> None:
    model = Rows(Shares(), compile={"backend": "eager"})

    inputs = [torch.full((2, 4), 1000.0), torch.ones(2, 4), torch.zeros(2, 4)]
    for _ in range(2):
        for mean, size in itertools.product((True, False), (2, 3)):
            found, _ = run_group(model, [sharing(model, x, mean) for x in inputs[:size]])
            for x, values in zip(inputs, found, strict=False):
                if mean:
                    close(values["seen"], x.mean(0))
                close(values["out"], model._module.scale(x + torch.tensor([1.0, 0, 0, 0])).detach())
