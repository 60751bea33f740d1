"""``tracer.program`` of a trace that was not recorded: its block runs once more, on fakes, at the first look."""

from __future__ import annotations

import collections
import fractions
import gc
import re
import weakref
from typing import Any

import pytest
import torch
import transformers

from nnsight import LanguageModel, NNsight
from nnsight.remote import NotExpressibleError

from ..conftest import Hooks
from .test_bound import stack

AOT = {"backend": "aot_eager"}


@pytest.mark.parametrize("how", ["eager", "compiled", "replayed", "local"])
def test_the_program_is_the_one_that_a_recording_makes(how: str) -> None:
    """Same meaning, same hash, same inputs; and it runs on another length."""
    net, x = stack(), torch.randn(3, 6)
    direction, alpha = torch.randn(6), 2.0
    model = NNsight(net, compile=False if how == "eager" else AOT)

    def trace(**options: Any) -> Any:
        with model.trace(x, **options) as tracer:
            model[1].output[:] += alpha * direction
            out = model[3].output.save()
        return tracer

    tracer = trace(remote="local") if how == "local" else trace()
    if how == "replayed":
        tracer = trace()
        assert tracer.report.replayed
    recorded = trace(remote="program").program
    assert tracer.program == recorded
    assert hash(tracer.program) == hash(recorded)
    assert sorted(tracer.program.inputs) == ["alpha", "direction"]
    assert tracer.program is tracer.program
    y = torch.randn(5, 6)
    found = tracer.program.bind(model, inputs=["alpha"])(y, alpha=0.5)["out"]
    torch.testing.assert_close(found, Hooks(net).output("1", lambda value: value + 0.5 * direction)(y))


def test_the_values_are_those_of_the_trace_and_not_of_the_first_look() -> None:
    model, x, alpha = NNsight(stack()), torch.randn(3, 6), 2.0
    vectors = [torch.ones(6)]
    first = vectors[0]
    with model.trace(x) as tracer:
        model[1].output[:] += alpha * vectors[0]
        out = model[3].output.save()
    expected, out = out, None
    alpha, vectors[0] = 7.0, torch.zeros(6)
    torch.testing.assert_close(tracer.program.run(model, x)["out"], expected)
    assert out is None
    assert alpha == 7.0
    assert first is not vectors[0]


Scales = collections.namedtuple("Scales", "first second")


@pytest.mark.parametrize(
    "scales",
    [
        [2.0, 3.0],
        {3.0},
        bytearray(b"\x02\x03"),
        collections.deque([2.0, 3.0], maxlen=2),
        collections.OrderedDict(a=3.0),
        collections.Counter(a=3),
        collections.defaultdict(float, a=3.0),
        Scales([2.0, 3.0], fractions.Fraction(1, 2)),
    ],
    ids=lambda scales: type(scales).__name__,
)
def test_a_container_has_the_content_that_it_had_before_the_block(scales: Any) -> None:
    net, x = stack(), torch.randn(3, 6)
    model = NNsight(net)
    with model.trace(x) as tracer:
        held = scales.first if isinstance(scales, Scales) else scales
        factor = float(held.pop("a") if isinstance(held, dict) else held.pop())
        model[1].output = model[1].output * factor + (scales["b"] if isinstance(scales, collections.defaultdict) else 0.0)
        out = model[3].output.save()
    torch.testing.assert_close(out, Hooks(net).output("1", lambda h: h * 3.0)(x))
    torch.testing.assert_close(tracer.program.run(model, x)["out"], out)


def test_nothing_outside_changes(capsys: pytest.CaptureFixture[str]) -> None:
    """The block has copies of variables and containers, and what it prints is part of the program."""
    model, x = NNsight(stack(), compile=AOT), torch.randn(3, 6)
    seen: list[Any] = []
    counts = {"runs": 0}
    known = {1}
    with model.trace(x) as tracer:
        seen.append(model[1].output.save())
        counts["runs"] += 1
        known.add(2 + len(known))
        print("mean", model[2].output.mean())
        x = model[3].output.save()
    printed = capsys.readouterr().out
    before = x
    program = tracer.program
    assert capsys.readouterr().out == "" != printed
    assert (len(seen), counts, known) == (1, {"runs": 1}, {1, 3})
    assert x is before
    assert "log" in str(program)


def test_invokes_generations_and_gradients(model: Any) -> None:
    direction = torch.randn(model.config.n_embd)
    with model.trace() as tracer:
        with tracer.invoke("Hello"):
            model.transformer.h[1].output[:] += direction
            one = model.lm_head.output.save()
        with tracer.invoke("Hello there"):
            two = model.lm_head.output.save()
    assert tracer.program.to_json().count("narrow") == 3
    assert (one.shape[0], two.shape[0]) == (1, 1)
    with model.generate("Hello", max_new_tokens=3, do_sample=False) as tracer:
        for _ in tracer.iter[:3]:
            model.transformer.h[1].output[:, -1] += direction
        tokens = tracer.result.save()
    assert torch.equal(tracer.program.run(model, "Hello", max_new_tokens=3, do_sample=False)["tokens"], tokens)
    with model.trace("Hello") as tracer:
        hidden = model.transformer.h[1].output
        with model.lm_head.output.sum().backward():
            gradient = hidden.grad.save()
    torch.testing.assert_close(tracer.program.run(model, "Hello")["gradient"], gradient)
    assert "grad (wrt=%0)" in str(tracer.program)


def test_a_trace_keeps_nothing_alive() -> None:
    """A lost input is replaced by one like it; a lost variable is named."""
    model = NNsight(stack())

    def run(needed: torch.Tensor | None) -> Any:
        x = torch.randn(3, 6)
        held = [torch.ones(6)]
        with model.trace(x) as tracer:
            model[1].output[:] += held[0] if needed is None else needed
            out = model[3].output.save()
        return tracer, weakref.ref(x), weakref.ref(held[0]), weakref.ref(out)

    gc.disable()
    try:
        kept = torch.ones(6)
        tracer, *others = run(kept)
        assert [other() for other in others] == [None] * 3
        with pytest.raises(NotExpressibleError, match=r"test_later_programs.py:\d+: .*`held` no longer exists.*program=True"):
            _ = tracer.program
    finally:
        gc.enable()
    vector = torch.ones(6)
    with model.trace(torch.randn(3, 6)) as tracer:
        model[1].output[:] += vector
        out = model[3].output.save()
    assert list(tracer.program.inputs) == ["vector"]
    assert tracer.program.run(model, torch.zeros(2, 6))["out"].shape == (2, out.shape[1])


def test_what_has_no_program_is_refused() -> None:
    model, x = NNsight(stack()), torch.randn(3, 6)
    with model.trace(x) as tracer:
        with pytest.raises(ValueError, match="after its block"):
            _ = tracer.program
        if model[1].output.sum() > -1e9:
            out = model[2].output.save()
    program, line = tracer.program, r"test_later_programs.py:\d+: A condition on a tensor needs a value at `model.1.output.i0`"
    assert [hole.location for hole in program.holes] == ["model.1.output.i0"]
    assert "model.2.output" in str(program)
    for text in (str(program), program.to_python()):
        assert re.match(f"(# )?hole .*{line}", text)
    uses = lambda: program.save("x"), lambda: program.run(model, x), lambda: model.apply(program), lambda: program.then(program)
    for use in uses:
        with pytest.raises(NotExpressibleError, match=line):
            use()
    assert out.shape[0] == 3
    with torch.no_grad(), model.trace(torch.randn(3, 6)) as tracer:  # this input is gone, and so is its value
        if model[1].output.sum() > -1e9:
            out = model[2].output.save()
    with pytest.raises(NotExpressibleError, match=r"test_later_programs.py:\d+: A condition on a tensor needs values"):
        _ = tracer.program
    with model.trace(x, fn=model._module) as tracer:
        model[1].output.save()
    with pytest.raises(NotExpressibleError, match="only a trace of"):
        _ = tracer.program
    tracer = model.trace(x)
    with pytest.raises(ValueError, match="it has not run yet"):
        _ = tracer.program
    with tracer:
        out = model[1].output.save()
    assert "model.1.output" in str(tracer.program)
    assert out.shape[0] == 3


@pytest.mark.slow
def test_a_program_of_a_compiled_stock_model_at_module_level() -> None:
    """As in a notebook, where variables are globals."""
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 32, "vocab_size": 50}
    torch.manual_seed(0)
    net = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).eval()
    cells: dict[str, Any] = {"model": LanguageModel(net, compile=AOT), "ids": torch.arange(5)[None], "v": torch.ones(16), "torch": torch}
    code = "with model.trace(ids) as tracer:\n    model.transformer.h[0].output[:, -1] += v\n    logits = model.lm_head.output.save()\n"
    _cell(cells, code)
    _cell(cells, code)
    assert list(cells["tracer"].program.inputs) == ["v"]
    found = cells["tracer"].program.run(cells["model"], cells["ids"])["logits"]
    torch.testing.assert_close(found, cells["logits"])


def _cell(variables: dict[str, Any], code: str) -> None:
    import linecache

    name = f"<cell {len(linecache.cache)}>"
    linecache.cache[name] = (len(code), None, code.splitlines(True), name)
    exec(compile(code, name, "exec"), variables)
