"""What a remote block prints is what an ordinary block prints, in its order, wherever the model is."""

from __future__ import annotations

import asyncio
import io
import re
import sys
import threading
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch

import nnsight
from nnsight import CONFIG, NNsight
from nnsight.remote import InvalidProgramError, Limits, LocalBackend, NotExpressibleError, encode, execute_payload
from nnsight.remote.protocol import ModelKey
from nnsight.remote.server.engine import ThreadEngine
from nnsight.remote.server.models import engine_of

from .remoting import Catch, Running, until
from .test_hostile import LIMITS, MODEL, job, node, op, read, ref
from .test_local import OTHER, PROMPT


def show(tensor: torch.Tensor) -> None:
    """A helper that prints, far from the block."""
    print("helper:", tensor.mean())


def values(model: Any, **where: Any) -> None:
    with model.trace(PROMPT, **where):
        print("before")
        hidden = model.transformer.h[0].output
        print(hidden, hidden.shape, sep=" | ")
        print("between")
        print(f"mean {hidden.mean():.3f}, {hidden.abs().max():>10.2e}, {hidden[0, 0, 0]}, {hidden.argmax():d}")
        show(model.transformer.h[1].output)
        print([hidden[0, 0, :2], 3], {"token": model.lm_head.output[0, -1].argmax()})
        print("two", "lines\nin one", end="!\n")
        print()
        sys.stdout.write(f"{hidden.dtype} {hidden.sum() > 0}\n")
        print("after %s" % hidden[0, 0, 0], end=".")  # noqa: UP031 - one of the ways


def an_edit_behind(model: Any, **where: Any) -> None:
    with model.trace(PROMPT, **where):
        hidden = model.transformer.h[0].output
        text = f"{hidden.mean():.4f}"
        hidden[:] = 0
        print(text, hidden.mean())


def several_blocks(model: Any, **where: Any) -> None:
    with model.trace(**where) as tracer:
        with tracer.invoke(PROMPT):
            print("one", model.transformer.h[1].output.mean())
        with tracer.invoke(OTHER):
            print("two", model.transformer.h[0].output.mean())
            print("three")


def steps(model: Any, **where: Any) -> None:
    with model.generate(PROMPT, max_new_tokens=3, **where) as tracer:
        for step in tracer.iter[:3]:
            print("step", step, model.lm_head.output[0, -1].argmax())


def a_pass(model: Any, **where: Any) -> None:
    with model.trace(PROMPT, **where):
        hidden = model.transformer.h[0].output
        with model.lm_head.output[:, -1].logsumexp(-1).sum().backward():
            print("gradient", hidden.grad.norm())


def a_stop(model: Any, **where: Any) -> None:
    with model.trace(PROMPT, **where) as tracer:
        print("stop at", model.transformer.h[0].output.mean(), end="")
        tracer.stop()


def numbers(text: str) -> tuple[str, list[float]]:
    """Return a text without what autograd adds to it, and its numbers."""
    text = re.sub(r",\s*(grad_fn=<\w+>|requires_grad=True)", "", text)
    found = [float(number) for number in re.findall(r"-?\d+\.\d+(?:e[+-]\d+)?", text)]
    return re.sub(r"\s+", " ", re.sub(r"-?\d+\.\d+(?:e[+-]\d+)?", "#", text)).strip(), found


@pytest.mark.parametrize("example", [values, an_edit_behind, several_blocks, steps, a_pass, a_stop], ids=lambda example: example.__name__)
def test_a_block_prints_what_it_prints_here(model: Any, example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    example(model)
    here, expected = numbers(capsys.readouterr().out)
    example(model, remote="local")
    there, found = numbers(capsys.readouterr().out)
    assert (there == here and "#" in here) or (example is steps and there == here)
    assert found == pytest.approx(expected, abs=1e-4)


def test_lines_before_the_first_value_are_shown_while_the_block_is_recorded(model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    kept = Catch()
    with model.trace(PROMPT, backend=kept):
        print("first")
        print("asked", end="? ", flush=True)
        print(model.transformer.h[0].output.mean())
        print("last")
    assert capsys.readouterr().out == "first\nasked? "
    lines: list[str] = []
    execute_payload(model, kept.payload, log=lines.append)
    assert len(lines) == 2 and lines[0].startswith("tensor(") and lines[1] == "last"
    assert [n["do"] for n in kept.recorded.job.nodes].count("log") == 2


@pytest.mark.parametrize("where", [{"remote": "local"}, {"program": True}], ids=str)
def test_lines_are_shown_if_the_block_raises_an_error(where: Any, model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """No run of the model reaches them, so the values are missing."""
    with pytest.raises(KeyError), model.trace(PROMPT, **where):
        print("mean:", model.transformer.h[0].output.mean())
        print("then")
        print("no end", end="")
        raise KeyError
    assert capsys.readouterr().out == "mean: <value>\nthen\nno end"


def test_other_threads_and_streams_print_as_ever(model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    stream = sys.stdout

    def elsewhere() -> None:
        print("thread")

    with model.trace(PROMPT, remote="local"):
        print(model.transformer.h[0].output.mean())
        worker = threading.Thread(target=elsewhere)
        worker.start()
        worker.join()
        with redirect_stdout(io.StringIO()) as buffer:
            print("kept")
        print("stderr", file=sys.stderr)
        inside = nnsight.save(buffer.getvalue())
    assert sys.stdout is stream and inside == "kept\n"
    found = capsys.readouterr()
    assert found.out.splitlines()[0] == "thread" and found.out.splitlines()[1].startswith("tensor(")
    assert found.err.endswith("stderr\n")


def test_text_that_is_not_printed_is_refused(model: Any) -> None:
    with pytest.raises(NotExpressibleError, match=r"test_printing.py:\d+: Formatting a tensor needs values"):
        with model.trace(PROMPT, remote="local"):
            title = nnsight.save(f"{model.transformer.h[0].output.mean():.2f}")
    with pytest.raises(NotExpressibleError, match="Printing a tensor needs values"):
        with model.trace(PROMPT, remote="local"):
            if "nan" in str(model.transformer.h[0].output.mean()):
                pass
    with pytest.raises(NotExpressibleError, match="Formatting"):
        with model.trace(PROMPT, remote="local"), redirect_stdout(io.StringIO()):
            print(f"{model.transformer.h[0].output.mean()}")


def test_formats_are_checked_where_they_are_used(model: Any) -> None:
    for spec, error in ((".2z", ValueError), (">1000", NotExpressibleError), ("d", ValueError)):
        with pytest.raises(error), model.trace(PROMPT, remote="local"):
            print(format(model.transformer.h[0].output.mean(), spec))
    with pytest.raises(TypeError, match="unsupported format string"), model.trace(PROMPT, remote="local"):
        print(f"{model.transformer.h[0].output:.2f}")


def test_values_are_not_there_between_the_traces_of_a_session(model: Any) -> None:
    def printed(hidden: torch.Tensor, loss: torch.Tensor) -> None:
        print(hidden)

    def computed(hidden: torch.Tensor, loss: torch.Tensor) -> None:
        hidden.mean()

    def edited(hidden: torch.Tensor, loss: torch.Tensor) -> None:
        hidden[:] = 0

    def differentiated(hidden: torch.Tensor, loss: torch.Tensor) -> None:
        with loss.backward():
            gradient = hidden.grad

    for use in (printed, computed, edited, differentiated):
        with pytest.raises(NotExpressibleError, match=r":\d+: Between the traces of a session"):
            with model.session(backend=LocalBackend(model, cuts=0)):
                with model.trace(PROMPT):
                    hidden = model.transformer.h[0].output
                    loss = model.lm_head.output.sum()
                use(hidden, loss)
    with model.session(remote="local"):
        with model.trace(PROMPT):
            hidden = model.transformer.h[0].output
        width = nnsight.save(hidden.shape[-1] + hidden.dim())
        with model.trace(OTHER):
            model.transformer.h[0].output[:] = hidden[:, : model.transformer.h[0].output.shape[1]].mean()
            logits = model.lm_head.output.save()
    assert width == model.config.n_embd + 3 and logits.shape[0] == 1


# -- servers ---------------------------------------------------------------------------------------------------------


def test_a_server_sends_what_is_printed(demo: Any, here: Running, capsys: pytest.CaptureFixture[str]) -> None:
    a_pass(demo)
    text, expected = numbers(capsys.readouterr().out)
    a_pass(demo, remote=True)
    found = numbers(capsys.readouterr().out)
    assert found[0] == text and found[1] == pytest.approx(expected, abs=1e-4)
    with demo.trace(PROMPT, remote=True, blocking=False) as tracer:
        print("later", demo.transformer.h[0].output.mean())
    tracer.backend.wait()
    assert capsys.readouterr().out.startswith("later tensor(")
    with demo.trace(PROMPT, remote=True, blocking=False) as tracer:
        print("polled", demo.lm_head.output.mean())
    until(tracer.backend)
    assert capsys.readouterr().out.startswith("polled tensor(")
    tracer.backend.wait()
    assert not capsys.readouterr().out


# -- limits and harm -------------------------------------------------------------------------------------------------


def log(*pieces: Any) -> dict[str, Any]:
    return node("log", text=list(pieces))


def value(number: int = 0, **more: Any) -> dict[str, Any]:
    return {"value": ref(number), **more}


HOSTILE = {
    "text alone": [read(), node("log", text="x")],
    "nothing": [read(), node("log", text=None)],
    "a number": [read(), log(1)],
    "long text": [read(), log("x" * 20_000)],
    "a tree": [read(), log({"str": "x"})],
    "a reference without value": [read(), log(ref(0))],
    "more keys": [read(), log(value(code="x"))],
    "of a list": [read(), log({"value": {"list": [ref(0)]}})],
    "of null": [read(), log({"value": None})],
    "of what comes later": [read(), log(value(5))],
    "of what prints": [read(), log("x"), log(value(1))],
    "an output that is not there": [read(), log({"value": ref(0, 3)})],
    **{
        f"format {spec!r}": [read(), op("aten.sum.default", ref(0)), log(value(1, format=spec))]
        for spec in (">1000000000", ".999f", "{}", "0{", 5, None, "!r", "%Y", ".2f" * 10, "s")
    },
    "more lines than may be": [read(), *[log("x")] * 200],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_log_is_refused(name: str) -> None:
    limits = Limits(**{**vars(LIMITS), "logs": 100})
    payload = encode(job(*HOSTILE[name], saves={"x": ref(0)}))
    with pytest.raises(InvalidProgramError):
        execute_payload(MODEL, payload, limits, log=pytest.fail)


def test_long_text_is_cut(model: Any) -> None:
    many = [read(), op("aten.ones.default", [6] * 9), log("wide: ", value(1)), *[log("x" * 1000)] * 20]
    lines: list[str] = []
    limits = Limits(**{**vars(LIMITS), "log_characters": 5000, "tensor_bytes": 2**30, "total_bytes": 2**30, "flops": 10**10})
    execute_payload(MODEL, encode(job(*many, saves={"x": ref(0)})), limits, log=lines.append)
    assert lines[0] == "wide: tensor of shape (6, 6, 6, 6, 6, 6, 6, 6, 6), torch.float32"
    assert sum(map(len, lines[:-1])) == 5000 and "left out" in lines[-1]


def test_an_engine_tells_nobody_when_its_loop_has_ended() -> None:
    def run(payloads: Any, logs: Any) -> list[Any]:
        kept.extend(logs)
        return list(payloads)

    kept: list[Any] = []
    engine = ThreadEngine(run)
    heard: list[str] = []
    assert asyncio.run(engine.execute([b"x"], 5.0, [heard.append])) == [b"x"]
    kept[0]("late")
    engine.close()
    assert heard == []


def test_a_model_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    net = NNsight(torch.nn.Linear(2, 2))
    with torch.no_grad():
        net._module.weight.fill_(1.0)
    with net.trace(torch.ones(1, 2), remote="local"):
        print(net.weight, net.output[0, :1] * 0)
    assert capsys.readouterr().out == "Parameter containing:\ntensor([[1., 1.],\n        [1., 1.]]) tensor([0.])\n"
