"""Programs of remote clients in an engine: the same traces on a model of transformers, in this process."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import nnsight
from nnsight import CONFIG, LanguageModel
from nnsight.program.format.errors import ExecutionFailedError, InvalidProgramError
from nnsight.program.format.results import decode_results
from nnsight.program.run.engine import TimeLimitError
from nnsight.remote.client.backend import ProgramBackend
from nnsight.remote.protocol import ModelKey
from nnsight.remote.server.engine import ThreadEngine
from nnsight.remote.server.models import engine_of
from nnsight.remote.server.serve import in_background
from nnsight.vllm import VLLM
from nnsight.vllm.jobs.engine import FallbackEngine, JobEngine

from ..program.test_differential import SAVES, STATEMENTS, function_of
from ..serving import serving
from .llama import HIDDEN, OPTIONS, PROMPTS

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.usefixtures("vllm_environment"),
    pytest.mark.filterwarnings("ignore:`torch.distributed.all_gather_into_tensor` is deprecated"),
]

DIRECTION = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(3))
#: Random programs that share the engine.
CASES = int(os.environ.get("NNSIGHT_PROGRAM_CASES", "16"))
TAPS = ["model.layers.*", "model.layers.*.mlp", "model.layers.*.self_attn", "model.layers.*.input", "model.norm"]

Block = Callable[..., dict[str, Any]]


def same(found: Any, expected: Any) -> None:
    """Assert that nested values are equal, up to rounding."""
    if isinstance(expected, torch.Tensor):
        assert found.shape == expected.shape and found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * max(expected.abs().max().item(), 0.1))
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        same(list(found.values()), list(expected.values()))
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            same(one, other)
    else:
        assert found == expected


class Clients:
    """A client of a server with an engine, and the same model here."""

    def __init__(self, folder: Path, reference: LanguageModel, engine: Any) -> None:
        self.reference, self.engine, self.client = reference, engine, LanguageModel(folder, dtype="float32")

    def both(self, block: Block, *args: Any) -> None:
        """Assert that a block gives the same remotely as here."""
        same(block(self.client, *args, remote=True), block(self.reference, *args))


@contextlib.contextmanager
def served(folder: Path, reference: LanguageModel, engine: Any, spool: Path) -> Iterator[Clients]:
    """Serve ``engine`` while the context is open."""
    host = CONFIG.API.HOST
    with in_background({ModelKey(str(folder), "main"): engine}, spool) as url:
        CONFIG.API.HOST = url
        try:
            yield Clients(folder, reference, engine)
        finally:
            CONFIG.API.HOST = host


@pytest.fixture(scope="module", params=["between modules", "compiled", "two devices"])
def clients(
    request: pytest.FixtureRequest, folder: Path, reference: LanguageModel, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Clients]:
    gc.collect()  # an engine with several devices has the process for itself
    chosen = {"between modules": {}, "compiled": {"taps": TAPS}, "two devices": {"tensor_parallel_size": 2}}[request.param]
    engine = JobEngine(VLLM(folder, **chosen, **OPTIONS), LanguageModel(folder, dtype="float32"))
    with served(folder, reference, engine, tmp_path_factory.mktemp("jobs")) as clients:
        yield clients
    del engine, clients
    gc.collect()


# -- blocks ------------------------------------------------------------------------------------------------------------


def reads_and_edits(model: Any, **kwargs: Any) -> dict[str, Any]:
    with model.trace(PROMPTS[0], **kwargs):
        model.model.layers[0].output[:, -2:] += DIRECTION
        taken = model.model.layers[1].input.save()
        inside = model.model.layers[1].mlp.output.save()
        attention = model.model.layers[2].self_attn.output[0].save()
        model.model.layers[2].mlp.output = model.model.layers[2].mlp.output * 0.5
        normed = model.model.norm.output.save()
        states = model.model.output.last_hidden_state.save()
        head = model.lm_head.output.save()
        logits = model.output.logits.save()
    return {"taken": taken, "inside": inside, "attention": attention, "normed": normed, "states": states, "head": head, "logits": logits}


def edits_inputs(model: Any, **kwargs: Any) -> dict[str, Any]:
    with model.trace(PROMPTS[1], **kwargs):
        model.model.layers[2].input = model.model.layers[2].input - DIRECTION
        model.model.layers[3].input[:, 0] = 0
        logits = model.lm_head.output.save()
    return {"logits": logits}


def edits_the_last_state(model: Any, **kwargs: Any) -> dict[str, Any]:
    with model.trace(PROMPTS[1], **kwargs) as tracer:
        model.model.norm.output[:, -1] = DIRECTION
        model.lm_head.output[..., :7] = 0
        logits = tracer.result.logits.save()
    return {"logits": logits}


def several_prompts(model: Any, **kwargs: Any) -> dict[str, Any]:
    with model.trace(**kwargs) as tracer:
        with tracer.invoke(PROMPTS[0]):
            patch = model.model.layers[1].output[:, -1]
            first = model.lm_head.output[:, -1].save()
        with tracer.invoke(PROMPTS[1:]):
            hidden = model.model.layers[2].output
            hidden[:, -1] = patch
            chosen = model.model.layers[3].output[:, -1].save()
            last = model.lm_head.output[:, -1].save()
        with tracer.invoke():
            everybody = model.model.layers[3].output[:, -1].mean(0).save()
    return {"first": first, "chosen": chosen, "last": last, "everybody": everybody}


def a_logit_lens(model: Any, **kwargs: Any) -> dict[str, Any]:
    with model.trace(PROMPTS[2], **kwargs):
        looks = [model.lm_head(model.model.norm(layer.output)).argmax(-1) for layer in model.model.layers]
        looks.append(model.model.norm.weight * 2)
        nnsight.save(looks)
    return {"looks": looks}


def a_head_by_its_weight(model: Any, **kwargs: Any) -> dict[str, Any]:
    with model.trace(PROMPTS[2], **kwargs):
        rows = (model.model.layers[3].output @ model.lm_head.weight.T).save()
    return {"rows": rows}


def generates(model: Any, **kwargs: Any) -> dict[str, Any]:
    with model.generate(PROMPTS[0], max_new_tokens=7, **kwargs) as tracer:
        steps = list().save()  # noqa: C408 - documented
        for step in tracer.iter[:7]:
            model.model.layers[1].output[:, -1] += DIRECTION * step
            steps.append(model.lm_head.output[:, -1].argmax(-1))
        ids = tracer.result.save()
    return {"steps": list(steps), "ids": ids}


def generates_several(model: Any, **kwargs: Any) -> dict[str, Any]:
    with model.generate(max_new_tokens=6, **kwargs) as tracer:
        with tracer.invoke(PROMPTS[:2]):
            for _ in tracer.iter[:6]:
                model.model.layers[2].output *= 1.1
        with tracer.invoke(PROMPTS[2]):
            for step in tracer.iter[:3]:
                model.lm_head.output[:, -1, 40 + step] += 100
        with tracer.invoke():
            ids = model.generator.output.save()
    return {"ids": ids}


def streams(model: Any, **kwargs: Any) -> dict[str, Any]:
    with model.generate(PROMPTS[1], max_new_tokens=4, **kwargs) as tracer:
        seen = list().save()  # noqa: C408
        for _ in tracer.iter[:5]:
            seen.append(model.generator.streamer.output)
    return {"seen": list(seen)}


def ends_where_a_token_says(model: Any, **kwargs: Any) -> dict[str, Any]:
    """One row ends early: the token that ends it is made to be the second."""
    with model.generate(PROMPTS[:2], max_new_tokens=6, eos_token_id=77, **kwargs) as tracer:
        for step in tracer.iter[:2]:
            if step == 1:
                model.lm_head.output[0, -1, 77] += 1000
        ids = tracer.result.save()
    return {"ids": ids}


def a_session(model: Any, **kwargs: Any) -> dict[str, Any]:
    with model.session(**kwargs):
        with model.trace(PROMPTS[0]):
            hidden = model.model.layers[1].output[:, -1]
        with model.generate(PROMPTS[1], max_new_tokens=3) as tracer:
            model.model.layers[1].output[:, -1] = hidden
            ids = tracer.result.save()
    return {"ids": ids}


def stops(model: Any, **kwargs: Any) -> dict[str, Any]:
    with model.generate(PROMPTS[0], max_new_tokens=20, **kwargs) as tracer:
        for step in tracer.iter[:20]:
            hidden = model.model.layers[2].output[:, -1].save()
            if step == 2:
                tracer.stop()
    return {"hidden": hidden}


def keeps_a_cache(model: Any, **kwargs: Any) -> dict[str, Any]:
    with model.trace(PROMPTS[0], **kwargs) as tracer:
        cache = tracer.cache(modules=[model.model.layers[0], model.model.layers[3]])
    return {name: cache[name].output for name in cache.keys()}  # noqa: SIM118 - documented


BLOCKS: list[Block] = [
    reads_and_edits,
    edits_inputs,
    edits_the_last_state,
    several_prompts,
    a_logit_lens,
    generates,
    generates_several,
    streams,
    ends_where_a_token_says,
    a_session,
    stops,
    keeps_a_cache,
]


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.__name__)
def test_a_block_gives_what_it_gives_on_transformers(clients: Clients, block: Block) -> None:
    clients.both(block)


def test_a_weight_is_used_if_it_is_whole(clients: Clients, request: pytest.FixtureRequest) -> None:
    if "two devices" in request.node.name:
        with pytest.raises(InvalidProgramError, match=r"it does not have `lm_head\.weight` in the form of transformers"):
            clients.both(a_head_by_its_weight)
    else:
        clients.both(a_head_by_its_weight)


def test_clients_share_steps_and_are_not_mixed_up(clients: Clients) -> None:
    draw = random.Random(5)

    def steered(model: Any, strength: float, layer: int, prompts: list[str], new: int, **kwargs: Any) -> dict[str, Any]:
        with model.generate(prompts, max_new_tokens=new, **kwargs) as tracer:
            for _ in tracer.iter[:new]:
                model.model.layers[layer].output[:, -1] += strength * DIRECTION
            ids = tracer.result.save()
        return {"ids": ids}

    def asked(_: int) -> tuple[Any, ...]:
        prompts = draw.sample(PROMPTS, draw.randint(1, 3))
        return draw.uniform(-3, 3), draw.randrange(4), prompts, draw.choice([3, 8])

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(clients.both, steered, *asked(number)) for number in range(20)]:
            done.result()
    assert not clients.engine._engine.pending and not clients.engine._engine._runner.bookkeeping.runs


def drawn(draw: random.Random) -> Block:
    """Return a random block at random layers."""
    lines = []
    for number, layer in enumerate(sorted(draw.sample(range(4), draw.randint(1, 3)))):
        at = f"m.model.layers[{layer}]{draw.choice(['', '.mlp'])}.output"
        lines += [f"h = {at}", *(line.format(at=at, width=HIDDEN) for line in draw.sample(STATEMENTS, draw.randint(1, 2)))]
        lines.append(draw.choice(SAVES).format(at=at, n=number))
    text = "\n".join([*lines, "logits = m.lm_head.output.save()"])
    saved = [name for name in ("kept0", "kept1", "kept2", "logits") if f"{name} =" in text]
    run = function_of(text, "m.trace(x, **W['where'])", "{" + ", ".join(f"'{name}': {name}" for name in saved) + "}")
    matrix, prompt = torch.randn(HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(2)) * 0.1, draw.choice(PROMPTS)
    values = {"alpha": draw.uniform(0.5, 2), "scale": 1.5, "vector": DIRECTION, "matrix": matrix, "unit": DIRECTION / DIRECTION.norm()}
    return lambda model, **kwargs: run(model, prompt, {**values, "where": kwargs})


def test_random_programs_share_steps(clients: Clients) -> None:
    draw = random.Random(7)
    blocks = [drawn(draw) for _ in range(CASES)]
    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(clients.both, block) for block in blocks]:
            done.result()


def test_samples_are_reproducible(clients: Clients) -> None:
    def sampled() -> list[int]:
        torch.manual_seed(11)
        with clients.client.generate(PROMPTS[0], max_new_tokens=12, do_sample=True, temperature=1.5, remote=True) as tracer:
            ids = tracer.result.save()
        return ids[0].tolist()

    assert sampled() == sampled()


def test_lines_are_printed_as_they_come(clients: Clients, capsys: pytest.CaptureFixture[str]) -> None:
    with clients.client.generate(PROMPTS[1], max_new_tokens=3, remote=True) as tracer:
        for step in tracer.iter[:3]:
            print("step", step, model_norm(clients.client))
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines() if "step" in line] == ["0", "1", "2"]


def model_norm(model: Any) -> torch.Tensor:
    return model.model.layers[0].output[:, -1].norm()


# -- refusals ----------------------------------------------------------------------------------------------------------


def gradients(model: Any, **kwargs: Any) -> dict[str, Any]:
    with model.trace(PROMPTS[0], **kwargs):
        hidden = model.model.layers[1].output
        with model.lm_head.output.sum().backward():
            gradient = hidden.grad.save()
    return {"gradient": gradient}


def looks_inside(model: Any) -> Any:
    return model.model.layers[1].self_attn.source.attention_interface_0.output[0]


def reads_activations(model: Any) -> Any:
    return model.model.layers[1].mlp.act_fn.output


def reads_queries(model: Any) -> Any:
    return model.model.layers[1].self_attn.q_proj.output


def skips(model: Any) -> Any:
    hidden = model.model.layers[0].output
    model.model.layers[1].skip(hidden)
    return hidden


def edits_where_the_residual_is_added(model: Any) -> Any:
    model.model.layers[1].post_attention_layernorm.input[:] = 0
    return model.model.layers[1].output


REFUSED = {
    looks_inside: "attention_interface_0",
    reads_activations: "act_fn",
    reads_queries: "q_proj",
    skips: "skips a module",
    edits_where_the_residual_is_added: "residual stream|not tapped",
}


@pytest.mark.parametrize("block", REFUSED, ids=lambda block: block.__name__)
def test_what_an_engine_cannot_do_is_refused_by_name(clients: Clients, block: Callable[[Any], None]) -> None:
    with pytest.raises(InvalidProgramError, match=f"line .*a vLLM engine cannot run it, because .*({REFUSED[block]})"):
        with clients.client.trace(PROMPTS[0], remote=True):
            found = nnsight.save(block(clients.client))
    clients.both(edits_inputs)


def test_gradients_are_refused(clients: Clients) -> None:
    with pytest.raises(InvalidProgramError, match="line .*backward pass"):
        gradients(clients.client, remote=True)


@pytest.mark.parametrize(
    ("options", "named"), [({"num_beams": 2}, "num_beams=2"), ({"max_new_tokens": 2000}, "tokens"), ({"typical_p": 0.3}, "typical_p")]
)
def test_generations_that_an_engine_has_not_are_refused(clients: Clients, options: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidProgramError, match=named):
        with clients.client.generate(PROMPTS[0], remote=True, **{"max_new_tokens": 3, **options}) as tracer:
            tracer.result.save()


@pytest.mark.parametrize("token", [-1, 1 << 20])
def test_tokens_that_the_model_has_not_are_refused(clients: Clients, token: int) -> None:
    """Before they are sent to vLLM, whose error would be a fault of the server."""
    with pytest.raises(InvalidProgramError, match=f"no token {token}"):
        with clients.client.trace(torch.tensor([[5, token, 6]]), remote=True):
            clients.client.model.layers[1].output.mean().save()


def test_a_program_that_fails_ends_alone(clients: Clients) -> None:
    ended = threading.Event()

    def fails() -> None:
        with pytest.raises(ExecutionFailedError, match="line"):
            with clients.client.trace(PROMPTS[0], remote=True):
                hidden = clients.client.model.layers[1].output[0]
                row = (hidden[0, :1] * 0).to(torch.int64) + 5000
                found = hidden.index_select(0, row).save()
        ended.set()

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(fails), *(pool.submit(clients.both, generates) for _ in range(3))]:
            done.result()
    assert ended.is_set() and clients.engine.healthy


def test_what_an_engine_refuses_runs_on_the_other(
    folder: Path, reference: LanguageModel, clients: Clients, tmp_path: Path
) -> None:
    other = engine_of(LanguageModel(folder, dtype="float32", dispatch=True))
    with served(folder, reference, FallbackEngine(clients.engine, other), tmp_path) as both:
        both.both(gradients)
        both.both(generates)


class Recorded(ProgramBackend):
    """Keeps the payload of a block, and runs nothing."""

    def submit(self, recorded: Any) -> None:
        self.payload = recorded.payload()


def recorded(clients: Clients, new: int, layer: int, fails: bool = False) -> bytes:
    """Return the payload of a generation."""
    backend, model = Recorded(), clients.client
    with model.generate(PROMPTS[layer % 3], max_new_tokens=new, backend=backend) as tracer:
        hidden = model.model.layers[layer].output
        if fails:
            row = (hidden[0, :1, 0] * 0).to(torch.int64) + 5000
            found = hidden[0].index_select(0, row).save()
        hidden[:, -1] += DIRECTION
        ids = tracer.result.save()
    return backend.payload


def test_many_jobs_leave_nothing(clients: Clients) -> None:
    """Good ones, failing ones, and ones that are ended at any time: each has its own outcome, and the engine is empty."""
    engine = JobEngine(clients.engine._model, clients.engine._structure)
    good = [recorded(clients, new, layer) for new in (3, 9) for layer in range(4)]
    bad = recorded(clients, 4, 1, fails=True)

    async def run(number: int, payload: bytes, draw: random.Random) -> Any:
        given = [payload]
        running = asyncio.ensure_future(engine.execute(given, 60, [print]))
        await asyncio.sleep(draw.uniform(0, 0.2))
        if number % 7 == 3:
            engine.interrupt(given)
        try:
            return (await running)[0]
        except (ExecutionFailedError, TimeLimitError) as error:
            return error

    async def run_all(payloads: list[bytes]) -> list[Any]:
        draw = random.Random(3)
        return await asyncio.gather(*(run(number, payload, draw) for number, payload in enumerate(payloads)))

    async def alone() -> dict[bytes, torch.Tensor]:
        return {payload: decode_results((await engine.execute([payload], 60, [print]))[0])["ids"] for payload in good}

    due = asyncio.run(alone())
    order = [*good * 30, *[bad] * 30]
    random.Random(4).shuffle(order)
    outcomes = asyncio.run(run_all(order))
    ended = 0
    for number, (payload, outcome) in enumerate(zip(order, outcomes, strict=True)):
        if isinstance(outcome, TimeLimitError):
            assert number % 7 == 3
            ended += 1
        elif payload is bad:
            assert isinstance(outcome, ExecutionFailedError) and "line" in str(outcome)
        else:
            assert torch.equal(decode_results(outcome)["ids"], due[payload])
    assert ended and not engine._engine.pending and not engine._engine._runner.bookkeeping.runs
    assert not engine._room._inside and not engine._room._waiting and engine.healthy


def test_ending_a_job_that_waits_for_the_other_engine_ends_no_other(clients: Clients) -> None:
    begun, go = threading.Event(), threading.Event()

    def slow(payloads: Any, logs: Any) -> list[Any]:
        begun.set()
        assert go.wait(20)
        return [b"done"]

    backend, model = Recorded(), clients.client
    with model.trace(PROMPTS[0], backend=backend):
        hidden = model.model.layers[1].output
        with model.lm_head.output.sum().backward():
            gradient = hidden.grad.save()

    async def run() -> list[Any]:
        both = FallbackEngine(clients.engine, ThreadEngine(slow))
        given = [[backend.payload], [backend.payload]]
        jobs = [asyncio.ensure_future(both.execute(one, 20, [print])) for one in given]
        await asyncio.to_thread(begun.wait, 20)
        both.interrupt(given[1])
        go.set()
        return await asyncio.gather(*jobs, return_exceptions=True)

    first, second = asyncio.run(run())
    assert first == [b"done"] and isinstance(second, TimeLimitError)


@pytest.mark.parametrize("more", [["--engine", "vllm,local"], ["--engine", "vllm", "--ray"]], ids=["both engines", "Ray"])
def test_the_command_serves(folder: Path, reference: LanguageModel, tmp_path: Path, more: list[str]) -> None:
    options = ["--dtype", "float32", "--vllm-options", json.dumps({name: OPTIONS[name] for name in OPTIONS if name != "dtype"})]
    with serving(tmp_path / "log", "serve", folder, "--spool", tmp_path / "jobs", *options, *more) as address:
        client = LanguageModel(folder, dtype="float32")
        same(generates(client, remote=address), generates(reference))
        if "vllm,local" in more:
            same(gradients(client, remote=address), gradients(reference))
