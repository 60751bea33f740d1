"""Programs in the graph of a compiled engine: those of plain hooks on transformers, request by request."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nnsight import LanguageModel, Program
from nnsight.vllm import VLLM
from nnsight.vllm.steering.graph_parts import GraphPart
from nnsight.vllm.steering.graph_programs import GraphProgram

from .llama import GREEDY, HIDDEN, OPTIONS, PROMPTS, Edits, close, generated, plain, states, tokens

FEATURES = 16
_draw = torch.Generator().manual_seed(5)
ENCODER, DECODER = (torch.randn(*shape, generator=_draw) / 4 for shape in ((HIDDEN, FEATURES), (FEATURES, HIDDEN)))
DIRECTION, OTHER = torch.randn(2, HIDDEN, generator=_draw)


def recorded(reference: LanguageModel, name: str) -> Program:
    """Return a program that is recorded on the model of transformers."""
    direction, alpha, bound, gain, encoder, decoder = DIRECTION, 2.0, torch.tensor(2.0), torch.ones(FEATURES), ENCODER, DECODER
    layers = reference.model.layers
    if name == "push":
        with reference.trace("A", remote="program") as tracer:
            layers[2].output[:] += alpha * direction / direction.norm()
    elif name == "gated":  # a value of one layer is used at a later one
        with reference.trace("A", remote="program") as tracer:
            along = (layers[0].output @ direction).unsqueeze(-1) / direction.norm()
            hidden = layers[2].output
            layers[2].output = torch.where(along > 0, hidden + alpha * along * direction, hidden)
            reference.model.norm.output.save()
    elif name == "features":  # inside of layers, and at two of them
        with reference.trace("A", remote="program") as tracer:
            for layer in layers[1:3]:
                layer.mlp.output += (torch.relu(layer.mlp.output @ encoder) * gain) @ decoder
    else:
        assert name == "clamped"
        with reference.trace("A", remote="program") as tracer:
            layers[3].output = layers[3].output.clamp(-bound, bound)
    return tracer.program


def hooked(name: str, alpha: float = 2.0, direction: torch.Tensor = DIRECTION, gain: float = 1.0, bound: float = 2.0) -> Edits:
    """Return the same as hooks."""
    kept: list[torch.Tensor] = []

    def gate(hidden: torch.Tensor) -> torch.Tensor:
        along = kept.pop()
        return torch.where(along > 0, hidden + alpha * along * direction, hidden)

    def decoded(hidden: torch.Tensor) -> torch.Tensor:
        return hidden + (torch.relu(hidden @ ENCODER) * gain) @ DECODER

    edits: dict[str, Any] = {
        "push": {2: lambda hidden: hidden + alpha * direction / direction.norm()},
        "gated": {0: lambda hidden: kept.append((hidden @ direction).unsqueeze(-1) / direction.norm()), 2: gate},
        "features": {f"model.layers.{layer}.mlp": decoded for layer in (1, 2)},
        "clamped": {3: lambda hidden: hidden.clamp(-bound, bound)},
    }
    return edits[name]


NAMES = ("push", "gated", "features", "clamped")

#: Parameters that requests give, with their names in `hooked`.
GIVEN: dict[str, list[dict[str, Any]]] = {
    "push": [{}, {"alpha": 9.0}, {"alpha": 5.0, "direction": OTHER}],
    "gated": [{}, {"alpha": 1.5}, {"direction": OTHER}],
    "features": [{}, {"gain": 3.0}],
    "clamped": [{}, {"bound": 0.5}],
}

# -- without vLLM -----------------------------------------------------------------------------------------------------


def parts_of(program: GraphProgram, dtype: torch.dtype = torch.float32) -> dict[str, GraphPart]:
    widths = {f"model.{path}.output": HIDDEN for path in program.modules}
    return program.parts(widths, dtype, torch.device("cpu"))


@pytest.mark.skipif(torch.__version__ < "2.13", reason="the torch of vLLM 0.32; vmap of 2.11 traces no matrix product of unknown size")
@pytest.mark.parametrize("name", NAMES)
def test_parts_do_what_hooks_do(reference: LanguageModel, name: str) -> None:
    """For any number of rows, each with parameters of its own."""
    program = GraphProgram.of(name, recorded(reference, name))
    parts = parts_of(program)
    for given in GIVEN[name]:
        asked = program.parameters(given)
        for rows in (1, 2, 9):
            kept: dict[str, torch.Tensor] = {}
            edits = {(f"model.layers.{place}" if isinstance(place, int) else place): edit for place, edit in hooked(name, **given).items()}
            for location, part in parts.items():
                hidden = torch.randn(rows, HIDDEN)
                values = [asked[key].expand(rows, *asked[key].shape) for key in part.parameters]
                before = hidden.clone()
                new, *more = part(hidden, *values, *(kept[key] for key in part.takes))
                kept |= dict(zip(part.gives or (), more, strict=True))
                expected = edits[location.removeprefix("model.").removesuffix(".output")](before[None])
                torch.testing.assert_close(new, before if expected is None else expected[0])
                assert torch.equal(hidden, before)


def test_programs_are_equal_if_they_do_the_same(reference: LanguageModel) -> None:
    digests = {name: GraphProgram.of("mine", recorded(reference, name)).digest for name in NAMES}
    assert len({*digests.values()}) == len(NAMES)
    again = GraphProgram.of("mine", recorded(reference, "push"))
    assert again.digest == digests["push"]
    assert list(GraphProgram.of("mine", (recorded(reference, "push"), ["alpha"])).defaults) == ["alpha"]


def test_numbers_keep_their_precision_beside_other_dtypes(reference: LanguageModel) -> None:
    [part] = parts_of(GraphProgram.of("push", recorded(reference, "push")), torch.bfloat16).values()
    assert {name: value.dtype for name, value in part.defaults.items()} == {"alpha": torch.float32, "direction": torch.bfloat16}
    hidden = torch.randn(3, HIDDEN, dtype=torch.bfloat16)
    given = [part.defaults[name].expand(3, *part.defaults[name].shape) for name in part.parameters]
    [new] = part(hidden, *given)
    assert new.dtype == torch.bfloat16 and not torch.equal(new, hidden)


def test_programs_that_cannot_be_in_a_graph(reference: LanguageModel) -> None:
    """Are refused with their line, and what to do."""
    layers, direction = reference.model.layers, DIRECTION

    def refused(program: Any, message: str, error: type[Exception] = ValueError) -> None:
        with pytest.raises(error, match=message):
            parts_of(GraphProgram.of("mine", program))

    def program_of(edit: Callable[[], None]) -> Program:
        with reference.trace("A block of several tokens", remote="program") as tracer:
            edit()
        return tracer.program

    def last() -> None:
        layers[1].output[:, -1] += direction

    def average() -> None:
        layers[1].output = layers[1].output - layers[1].output.mean(1, keepdim=True)

    def drawn() -> None:
        layers[1].output = layers[1].output + torch.randn_like(layers[1].output)

    def called() -> None:
        layers[1].output = reference.model.norm(layers[1].output)

    def weighed() -> None:
        layers[1].output = layers[1].output * reference.model.norm.weight

    def given() -> None:
        layers[1].input[:] += direction

    def nothing() -> None:
        layers[1].output.save()

    def viewed() -> None:
        hidden = layers[1].output
        layers[1].output = hidden.view(*hidden.shape[:-1], 4, -1).flip(-2).flatten(-2)

    def skipped() -> None:
        layers[1].skip(layers[1].input)

    refused(program_of(last), r"line \d+ looks at several positions.*Use taps and a block")
    refused(program_of(average), "looks at several positions")
    refused(program_of(drawn), "random numbers")
    refused(program_of(called), r"line \d+ has a call of a module")
    refused(program_of(weighed), "a weight of the model")
    refused(program_of(given), r"is at `model.model.layers.1.input`, and only outputs")
    refused(program_of(nothing), "it edits nothing")
    refused(program_of(viewed), r"looks at the number of prompts or of positions\. `hidden\.unflatten")
    refused(program_of(skipped), "only outputs|a skip")
    refused((recorded(reference, "push"), ["gamma"]), r"has no parameter 'gamma': the inputs are: alpha, direction", TypeError)
    refused((recorded(reference, "push"), ["scale"]), r"no parameter 'scale': steer\(\) has an argument of this name", TypeError)
    refused("not there.safetensors", "No such file", FileNotFoundError)
    refused(last, "programs= is a dict of programs", TypeError)
    with pytest.raises(ValueError, match="'a-b' is no name for a program"):
        GraphProgram.of("a-b", recorded(reference, "push"))
    limit = 2.0

    def limited() -> None:
        layers[1].output = layers[1].output.clamp(max=limit)

    program = GraphProgram.of("limited", program_of(limited))
    with pytest.raises(ValueError, match=r"no parameter 'limit': no call of torch .*Its parameters: none"):
        program.parameters({"limit": 3.0})


# -- in engines -------------------------------------------------------------------------------------------------------

in_engines = [pytest.mark.vllm, pytest.mark.usefixtures("vllm_environment")]


@pytest.fixture(scope="module", params=["compiled", "uncompiled", "tapped"])
def model(folder: Path, reference: LanguageModel, tmp_path_factory: pytest.TempPathFactory, request: Any) -> VLLM:
    """Engines with all programs, one of them in a file; the last with tables and taps, too."""
    file = tmp_path_factory.mktemp("programs") / "push.safetensors"
    recorded(reference, "push").save(file)
    programs = {"push": file, "features": (recorded(reference, "features"), ["gain"])}
    programs |= {name: recorded(reference, name) for name in ("gated", "clamped")}
    more: dict[str, dict[str, Any]] = {
        "compiled": {},
        "uncompiled": {"enforce_eager": True},
        "tapped": {"taps": ["model.layers.2"], "edits": ["model.layers.2", "model.layers.3"]},
    }
    return VLLM(folder, **OPTIONS, programs=programs, **more[request.param])


@pytest.mark.vllm
@pytest.mark.parametrize("name", NAMES)
def test_requests_are_steered_as_by_hooks(model: VLLM, reference: LanguageModel, name: str) -> None:
    for given in GIVEN[name]:
        with model.trace(PROMPTS[0], **GREEDY) as tracer:
            model.steer(name, **given)
            result = tracer.result.save()
        assert tokens(result) == generated(reference, result.prompt_token_ids, hooked(name, **given)), given
        assert tracer.report.tiers == ["in the compiled model, as parameters"]
    assert tokens(model(PROMPTS[0], **GREEDY)) == generated(reference, result.prompt_token_ids)


def check_mixed_batch(model: VLLM, reference: LanguageModel, seed: int, count: int, asked: Callable[[str], Any]) -> dict[bool, str]:
    """Send requests of random lengths, with random programs and parameters, and without, in one batch; compare each with hooks.

    ``asked`` returns what ``steer`` gets for the name of a program. Returns where requests ran, by whether they have a program.
    """
    draw = random.Random(seed)
    chosen, results = [], {}
    with model.trace(**GREEDY) as tracer:
        for number in range(count):
            name = draw.choice([None, *NAMES])
            given = draw.choice(GIVEN[name]) if name else {}
            ids, length = [draw.randrange(2, 512) for _ in range(draw.randrange(1, 30))], draw.randrange(1, 6)
            chosen.append((name, given, ids, length))
            with tracer.invoke({"prompt_token_ids": ids}, max_tokens=length):
                if name:
                    model.steer(asked(name), **given)
                results[number] = tracer.result
    for number, (name, given, ids, length) in enumerate(chosen):
        expected = generated(reference, ids, hooked(name, **given) if name else None, length)
        assert tokens(results[number]) == expected, (number, name, given)
    return {bool(name): tier for (name, *_), tier in zip(chosen, tracer.report.tiers, strict=True)}


@pytest.mark.vllm
def test_a_mixed_batch_of_programs(model: VLLM, reference: LanguageModel) -> None:
    check_mixed_batch(model, reference, seed=0, count=32, asked=str)


@pytest.mark.vllm
def test_programs_begin_at_a_position(model: VLLM, reference: LanguageModel) -> None:
    push = hooked("push", alpha=9.0)[2]
    with model.trace(PROMPTS[0], **GREEDY) as tracer:
        model.steer("push", alpha=9.0, start=4)
        result = tracer.result.save()

    def later(hidden: torch.Tensor) -> torch.Tensor:
        return torch.cat([hidden[:, :4], push(hidden[:, 4:])], 1)

    assert tokens(result) == generated(reference, result.prompt_token_ids, {2: later})


@pytest.mark.vllm
def test_two_programs_and_edits_in_one_request(model: VLLM, reference: LanguageModel, vector: torch.Tensor) -> None:
    """At different modules, and at one: there programs run in the order of the engine, behind the tables."""
    with model.trace(PROMPTS[0], **GREEDY) as tracer:
        model.steer("clamped", bound=0.5)
        model.steer("push", alpha=9.0)
        result = tracer.result.save()
    both = {**hooked("clamped", bound=0.5), **hooked("push", alpha=9.0)}
    assert tokens(result) == generated(reference, result.prompt_token_ids, both)


# -- programs of requests, where the engine stops -----------------------------------------------------------------------


@pytest.fixture(scope="module", params=["everywhere", "taps"])
def stopping(folder: Path, request: Any) -> VLLM:
    """Engines without programs: one that stops between all modules, and one that stops at taps."""
    taps = {"taps": ["model.layers.*", "model.layers.*.mlp"]} if request.param == "taps" else {}
    return VLLM(folder, **OPTIONS, **taps)


@pytest.mark.vllm
def test_programs_of_requests_run_without_python(stopping: VLLM, reference: LanguageModel) -> None:
    """Requests of a batch bring programs, with parameters of their own."""
    programs = {name: recorded(reference, name) for name in NAMES}
    tiers = check_mixed_batch(stopping, reference, seed=1, count=24, asked=programs.__getitem__)
    assert tiers[True].endswith(", as programs") and tiers[False] == "beside"


@pytest.mark.vllm
def test_requests_with_one_program_are_one_call(stopping: VLLM, reference: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    run = GraphPart.__call__

    def counted(self: GraphPart, hidden: torch.Tensor, *given: torch.Tensor) -> Any:
        calls.append(len(hidden))
        return run(self, hidden, *given)

    monkeypatch.setattr(GraphPart, "__call__", counted)
    program = recorded(reference, "push")
    with stopping.trace(**{**GREEDY, "max_tokens": 3}) as tracer:
        for alpha in (1.0, 4.0, 9.0):
            with tracer.invoke({"prompt_token_ids": [5, 6, 7]}):
                stopping.steer(program, alpha=alpha, start=1)
    assert calls == [6, 3, 3]


@pytest.mark.vllm
def test_a_block_sees_what_programs_have_left(stopping: VLLM, reference: LanguageModel) -> None:
    """Several programs of one request run in the order of its block, and its reads come behind them."""
    push, clamped = recorded(reference, "push"), recorded(reference, "clamped")
    with stopping.trace(PROMPTS[0], **GREEDY) as tracer:
        stopping.steer(push, alpha=9.0)
        stopping.steer(push, alpha=-4.0)
        stopping.steer(clamped, bound=0.5)
        seen = stopping.model.layers[2].residual.save()
        last = stopping.model.layers[3].residual.save()
        result = tracer.result.save()
    edits = {**hooked("push", alpha=5.0), **hooked("clamped", bound=0.5)}
    expected = states(reference, result.prompt_token_ids, edits)
    close(seen, expected[2])
    torch.testing.assert_close(last, expected[3], rtol=0.0, atol=1e-4)
    assert tokens(result) == generated(reference, result.prompt_token_ids, edits)


@pytest.mark.vllm
def test_prefixes_of_requests_with_programs_are_their_own(stopping: VLLM, reference: LanguageModel) -> None:
    ids, push = [7 + number % 400 for number in range(40)], recorded(reference, "push")
    for alpha in (9.0, None, 9.0, 4.0, None):
        with stopping.trace({"prompt_token_ids": ids}, **GREEDY) as tracer:
            if alpha is not None:
                stopping.steer(push, alpha=alpha)
            result = tracer.result.save()
        assert tokens(result) == generated(reference, ids, None if alpha is None else hooked("push", alpha=alpha))


@pytest.mark.vllm
def test_a_compiled_engine_stops_at_its_taps_only(model: VLLM, reference: LanguageModel) -> None:
    with pytest.raises(ValueError, match=r"`model.model.layers.1.mlp.output` is not tapped.*programs="):
        with model.trace(PROMPTS[0], **GREEDY):
            model.steer(recorded(reference, "features"))


@pytest.mark.vllm
def test_mistakes_are_errors_at_their_line(model: VLLM, reference: LanguageModel) -> None:
    def refused(error: type[Exception], message: str, *names: Any, **given: Any) -> None:
        with pytest.raises(error, match=message), model.trace(PROMPTS[0], **GREEDY):
            model.steer(*names, **given)

    refused(ValueError, r"steer\('push'\) has no parameter 'beta': no call.*Its parameters: alpha, direction", "push", beta=1.0)
    refused(ValueError, "has shape", "push", direction=torch.zeros(3))
    refused(ValueError, "not finite", "push", alpha=float("nan"))
    refused(TypeError, "a program has `start` and its parameters only", "push", scale=2.0)
    refused(TypeError, r"'pushed' is no program. The programs are: push", "pushed", alpha=2.0)
    with pytest.raises(ValueError, match="stands at the top of the block"), model.trace(PROMPTS[0], **GREEDY):
        model.logits.output  # noqa: B018
        model.steer("push")
    model.vectors.add("push", DIRECTION)
    refused(ValueError, "a vector and a program have this name", "push")
    model.vectors.remove("push")
    assert tokens(model(PROMPTS[0], **GREEDY)) == plain(model, [PROMPTS[0]])[0]
