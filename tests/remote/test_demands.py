"""Blocks that need values in Python get them from jobs of the program so far, and do what they do in an ordinary trace."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import nnsight
from nnsight import CONFIG
from nnsight.intervention.backends.remote import RemoteBackend
from nnsight.program.counts import counts
from nnsight.remote import ExecutionFailedError, LocalBackend, NotExpressibleError, ProgramBackend, execute_payload
from nnsight.remote.client import remote_backend
from nnsight.remote.protocol import ModelKey
from nnsight.remote.server.models import engine_of

from ..conftest import close, same
from .remoting import Accounts, Running, account, running
from .test_local import OTHER, PROMPT, quietly


@pytest.fixture
def runs(demo: Any) -> Iterator[list[int]]:
    """One entry for each run of the model's first layer."""
    found: list[int] = []
    handle = demo._module.transformer.wte.register_forward_pre_hook(lambda module, args: found.append(1))
    yield found
    handle.remove()


# -- what blocks do with values ----------------------------------------------------------------------------------------


def a_condition(model: Any, **where: Any) -> Any:
    with model.trace(PROMPT, **where) as tracer:
        hidden = model.transformer.h[0].output
        if hidden.norm() > 3:
            model.transformer.h[1].output[:] *= 1.5
        logits = model.lm_head.output.save()
    return tracer, logits


def numbers(model: Any, **where: Any) -> Any:
    seen: list[Any] = []
    with model.trace(PROMPT, **where) as tracer:
        hidden = model.transformer.h[0].output.detach()
        seen += [hidden.norm().item(), float(hidden[0, 0, 0]), int(hidden[0, 0, 1] * 100), bool(hidden.sum() > 0)]
        seen.append(model.lm_head.output[0, -1].topk(3).indices.tolist())
        seen.append([10, 20, 30][hidden[0, 0].argmax() % 3])
        seen.append(hidden[0, 0, 0] in [1.0, 2.0])
    return tracer, seen


def libraries(model: Any, **where: Any) -> Any:
    with model.trace(PROMPT, **where) as tracer:
        hidden = model.transformer.h[0].output.detach()
        length = np.linalg.norm(hidden)
        direction = torch.from_numpy(np.sort(hidden[0, -1].cpu().numpy()) * 2)
        model.transformer.h[1].output[:, -1] += direction
        singular = torch.linalg.svdvals(hidden[0]).save()
        copied = copy.deepcopy(hidden).save()
        pickled = nnsight.save(pickle.dumps(model.transformer.h[2].output[0, 0, :3].detach()))
        logits = model.lm_head.output.save()
        length = nnsight.save(float(length))
    return tracer, length, singular, copied, pickle.loads(pickled), logits


def masks(model: Any, **where: Any) -> Any:
    with model.trace(PROMPT, **where) as tracer:
        hidden = model.transformer.h[0].output
        selected = hidden[hidden > 0.1].save()
        rows = hidden[0, hidden[0, :, 0] > 0, :3].save()
        flat = torch.masked_select(hidden, hidden[:, :, :1] > 0).save()
        where = (hidden[0] > 0.5).nonzero().save()
        row = model.transformer.wte.weight[model.lm_head.output[0, -1].argmax()].save()
    return tracer, selected, rows, flat, where, row


def comparisons(model: Any, **where: Any) -> Any:
    seen: list[Any] = []
    with model.trace(PROMPT, **where) as tracer:
        first, second = model.transformer.h[0].output, model.transformer.h[1].output
        seen.append(torch.equal(first, second))
        seen.append(torch.allclose(first, first + 1e-9))
        best = max([first.norm(), second.norm()]).save()
        width = torch.zeros(2, 4)[:, : (second.norm() > 0).long() + 1].shape
        seen.append(tuple(width))
    return tracer, seen, best


def edits_before_and_behind(model: Any, **where: Any) -> Any:
    seen: list[Any] = []
    with model.trace(PROMPT, **where) as tracer:
        hidden = model.transformer.h[0].output
        seen.append(hidden.sum().item())
        hidden[:, 0] = 0
        seen.append(hidden.detach().sum().item())
        hidden[:, 1] += seen[-1]
        model.transformer.h[1].output = model.transformer.h[1].output * 2
        seen.append(model.transformer.h[1].output.detach().sum().item())
        seen.append(hidden.detach().sum().item())
        model.transformer.h[2].skip(model.transformer.h[2].input + seen[0])
        logits = model.lm_head.output.save()
        seen.append(logits.detach().sum().item())
    return tracer, seen, logits


def weights_before_the_model_runs(model: Any, **where: Any) -> Any:
    with model.trace(PROMPT, **where) as tracer:
        scale = model.lm_head.weight.detach().norm().item()
        model.transformer.h[0].output[:] *= scale / 50
        logits = model.lm_head.output.save()
    return tracer, logits


def weights_before_a_generation(model: Any, **where: Any) -> Any:
    with model.generate(PROMPT, max_new_tokens=2, min_new_tokens=2, **where) as tracer:
        if model.lm_head.weight.norm() > 3:
            ids = tracer.result.save()
    return tracer, ids


def a_result(model: Any, **where: Any) -> Any:
    seen: list[Any] = []
    with model.trace(PROMPT, **where) as tracer:
        seen.append(tracer.result.logits.detach().sum().item())
        while seen[-1] < 0:
            seen.append(seen[-1] + 1e9)
        scaled = (tracer.result.logits * seen[-1]).save()
    return tracer, seen, scaled


def invokes(model: Any, **where: Any) -> Any:
    seen: list[Any] = []
    with model.trace(**where) as tracer:
        barrier = tracer.barrier(2)
        with tracer.invoke(PROMPT):
            seen.append(model.lm_head.weight.detach().sum().item())
            seen.append(model.transformer.h[0].output.detach().sum().item())
            model.transformer.h[1].output[:] *= 2
            clean = model.transformer.h[2].output
            barrier()
            first = model.lm_head.output.save()
        with tracer.invoke(OTHER):
            barrier()
            other = model.transformer.h[2].output
            seen.append("more" if other.sum() > clean.sum() else "less")
            other[:, -1] = clean[:, -1]
            second = model.lm_head.output.save()
        with tracer.invoke():
            both = model.lm_head.output.save()
            seen.append(both.detach().sum().item())
    return tracer, seen, first, second, both


def a_cache(model: Any, **where: Any) -> Any:
    with model.trace(PROMPT, **where) as tracer:
        cache = tracer.cache(modules=[model.transformer.h[0], model.transformer.h[2]])
        if model.transformer.h[1].output.mean() < 100:
            model.transformer.h[1].output[:] = 0
    return tracer, cache["model.transformer.h.0"].output, cache["model.transformer.h.2"].output


def steps(model: Any, **where: Any) -> Any:
    seen: list[Any] = []
    with model.generate(PROMPT, max_new_tokens=3, min_new_tokens=3, **where) as tracer:
        tokens = nnsight.save([])
        for _ in tracer.iter[:3]:
            hidden = model.transformer.h[0].output
            seen.append(hidden.detach().sum().item())
            if seen[-1] < -20:
                hidden[:] *= 1.5
            tokens.append(model.lm_head.output[0, -1].argmax())
        ids = tracer.result.save()
    return tracer, seen, tokens, ids


def a_generation_that_ends(model: Any, **where: Any) -> Any:
    seen: list[Any] = []
    with model.generate(PROMPT, max_new_tokens=30, eos_token_id=14, **where) as tracer:
        tokens = nnsight.save([])
        for step in tracer.iter[:8]:
            print("step", step)
            tokens.append(model.lm_head.output[0, -1].argmax())
            seen.append(tokens[-1].item())
        print("not reached")
    return tracer, seen, tokens


def gradients(model: Any, **where: Any) -> Any:
    seen: list[Any] = []
    with model.trace(PROMPT, **where) as tracer:
        hidden = model.transformer.h[1].output
        seen.append(hidden.detach().norm().item())
        loss = model.lm_head.output[0, -1].max()
        with loss.backward():
            gradient = hidden.grad
            seen.append(gradient.norm().item())
            if gradient.norm() > 0:
                hidden.grad = gradient * 2
            kept = gradient.clone().save()
        seen.append(loss.detach().item())
        attribution = (hidden * gradient).sum(-1).save()
    return tracer, seen, kept, attribution


def several_passes(model: Any, **where: Any) -> Any:
    seen: list[Any] = []
    with model.trace(PROMPT, **where) as tracer:
        hidden, logits = model.transformer.h[1].output, model.lm_head.output[0, -1]
        with logits.max().backward(retain_graph=True):
            first = hidden.grad
        seen.append(first.norm().item())
        with logits.min().backward():
            second = hidden.grad
            seen.append(second[0, 0, :4].tolist())
        difference = (second - first).save()
        seen.append(difference.norm().item())
    return tracer, seen, difference


def the_text_of_a_generation(model: Any, **where: Any) -> Any:
    seen: list[Any] = []
    with model.generate(PROMPT, max_new_tokens=30, eos_token_id=14, **where) as tracer:
        ids = tracer.result
        seen += [model.tokenizer.decode(ids[0]), ids.tolist()]
    return tracer, seen


def values_in_inference_mode(model: Any, **where: Any) -> Any:
    seen: list[Any] = []
    with model.trace(PROMPT, **where) as tracer, torch.inference_mode():
        hidden = model.transformer.h[1].output
        seen += [hidden.sum().item(), torch.linalg.svdvals(hidden[0]).tolist()]
    return tracer, seen


def prints(model: Any, **where: Any) -> Any:
    with model.trace(PROMPT, **where) as tracer:
        print("before")
        hidden = model.transformer.h[0].output.detach()
        print("hidden", hidden.mean())
        print(f"{hidden.mean().item():.3f}", round(hidden.sum().item(), 2), end="")
        print(" ... after", hidden.shape)
        print("list", [round(value, 3) for value in hidden[0, 0, :3].tolist()])
        print("logits", model.lm_head.output.detach().mean())
        logits = model.lm_head.output.save()
    return tracer, logits


def a_session(model: Any, **where: Any) -> Any:
    seen: list[Any] = []
    with model.session(**where):
        with model.trace(PROMPT):
            hidden = model.transformer.h[1].output.detach()
            seen.append(hidden.sum().item())
        seen += [hidden.shape[-1], hidden.mean().item()]
        print("between", hidden[0, 0, 0])
        with model.trace(OTHER):
            if hidden[0, 0, 0] > seen[-1]:
                seen.append("larger")
            model.transformer.h[1].output[:, -1] = hidden[:, -1]
            seen.append(model.lm_head.output.detach().sum().item())
            logits = model.lm_head.output.save()
    return None, seen, logits


def training(model: Any, **where: Any) -> Any:
    torch.manual_seed(0)
    width = model.config.n_embd
    down, up = (torch.nn.Parameter(torch.randn(size) * 0.1) for size in ((width, 2), (2, width)))
    optimizer = torch.optim.Adam([down, up], lr=0.05)
    losses: list[Any] = []
    with model.session(**where):
        for _ in range(3):
            with model.trace(PROMPT):
                hidden = model.transformer.h[1].output
                model.transformer.h[1].output = hidden + (hidden @ down) @ up
                loss = -model.lm_head.output[0, -1].log_softmax(-1)[19]
                with loss.backward():
                    of_up, of_down = up.grad.save(), down.grad.save()
                loss = loss.detach().save()
            up.grad, down.grad = of_up, of_down
            optimizer.step()
            losses.append(loss.item())
    assert losses[2] < losses[0]
    return None, losses, down.detach(), up.detach()


#: Blocks, with the number of jobs for values that they take, and how many of these run the model.
BLOCKS: dict[Callable[..., Any], tuple[int, int]] = {
    a_condition: (1, 1),
    numbers: (8, 8),
    libraries: (3, 3),
    masks: (1, 1),
    comparisons: (4, 4),
    edits_before_and_behind: (5, 5),
    weights_before_the_model_runs: (1, 0),
    weights_before_a_generation: (1, 0),
    a_result: (1, 1),
    invokes: (4, 3),
    a_cache: (1, 1),
    steps: (3, 6),
    a_generation_that_ends: (3, 5),
    gradients: (4, 4),
    several_passes: (3, 3),
    the_text_of_a_generation: (1, 2),
    values_in_inference_mode: (2, 2),
    prints: (3, 3),
    a_session: (4, 5),
    training: (3, 6),
}


#: Blocks of many jobs, or of many steps.
LONG = {a_generation_that_ends, several_passes, steps, the_text_of_a_generation, training}


@pytest.mark.parametrize("block", [pytest.param(block, marks=[pytest.mark.slow] * (block in LONG), id=block.__name__) for block in BLOCKS])
def test_a_block_gets_the_values_that_it_has_in_an_ordinary_trace(
    demo: Any, here: Running, runs: list[int], block: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    _, *expected = quietly(block, demo)
    alone, text = len(runs), capsys.readouterr().out.replace(", grad_fn=<MeanBackward0>", "")
    cuts, of_cuts = BLOCKS[block]
    for where in ("local", True):
        counts.clear()
        runs.clear()
        jobs = len(here.gateway.jobs)
        tracer, *found = quietly(block, demo, remote=where)
        same(found, expected)
        assert capsys.readouterr().out == text
        assert counts["cuts"] == cuts and len(runs) == of_cuts + alone
        assert len(here.gateway.jobs) - jobs == (0 if where == "local" else cuts + 1)
        if tracer is not None:
            breaks = tracer.report.breaks
            assert len(breaks) == cuts == str(tracer.report).count("cut at")
            assert all(entry.filename == __file__ for entry in breaks)


# -- draws -------------------------------------------------------------------------------------------------------------


def drawn(model: Any, **where: Any) -> Any:
    torch.manual_seed(3)
    with model.trace(PROMPT, **where):
        chances = model.transformer.h[0].output.detach().sigmoid()
        unused = torch.bernoulli(chances)
        first = torch.bernoulli(chances).save()
        count = nnsight.save(int(first.sum()))
        second = torch.bernoulli(chances).save()
        other = nnsight.save(int(second.sum()))
    return first, second, (count, other)


def sampled(model: Any, **where: Any) -> Any:
    torch.manual_seed(5)
    seen: list[float] = []
    with model.generate(PROMPT, max_new_tokens=4, min_new_tokens=4, do_sample=True, **where) as tracer:
        for _ in tracer.iter[:4]:
            total = model.transformer.h[0].output.sum()
            seen.append(total.item())
        ids = tracer.result.save()
    return seen, ids


def test_all_jobs_of_a_trace_draw_the_same_numbers(demo: Any, here: Running) -> None:
    first, second, counted = drawn(demo, remote="local")
    assert counted == (int(first.sum()), int(second.sum())) and not torch.equal(first, second)
    same(drawn(demo, remote=True), (first, second, counted))
    seen, ids = quietly(sampled, demo, remote="local")
    with torch.no_grad(), demo.trace(ids[:, :-1]):  # what was demanded belongs to the tokens that were returned
        hidden = demo.transformer.h[0].output[0].save()
    prompt = ids.shape[1] - 4
    close(torch.stack([hidden[:prompt].sum(), *hidden[prompt:].sum(-1)]), torch.tensor(seen))
    same(quietly(sampled, demo, remote=True), (seen, ids))


# -- errors ------------------------------------------------------------------------------------------------------------


def test_an_exception_of_the_block_is_raised_at_its_line(demo: Any, here: Running, capsys: pytest.CaptureFixture[str]) -> None:
    def block(**where: Any) -> None:
        with demo.trace(PROMPT, **where):
            hidden = demo.transformer.h[0].output.detach()
            print("mean", hidden.mean())
            norm = hidden.norm().item()
            print("norm", norm)
            assert norm < 1, f"norm {norm:.3f}"
            logits = demo.lm_head.output.save()

    text = None
    for where in ({}, {"remote": "local"}, {"remote": True}):
        jobs = len(here.gateway.jobs)
        with pytest.raises(AssertionError, match="norm 76.916") as raised:
            block(**where)
        assert raised.traceback[-1].path.name == "test_demands.py" and "assert norm < 1" in str(raised.traceback[-1].statement)
        found = capsys.readouterr().out
        text = text or found
        assert found == text
        assert len(here.gateway.jobs) - jobs == (where.get("remote") is True)


def test_a_failure_of_a_job_for_a_value_has_the_users_line(demo: Any) -> None:
    with pytest.raises(ExecutionFailedError, match=r"line \d+ of .*test_demands.py failed.*points outside") as raised:
        with demo.trace(PROMPT, remote="local"):
            place = demo.transformer.h[0].output.argmax().unsqueeze(0) + 100_000
            value = demo.transformer.wte.weight.index_select(0, place).sum().item()
    assert "index_select(0, place)" in str(raised.value)


def test_cuts_are_limited(demo: Any, monkeypatch: pytest.MonkeyPatch, here: Running) -> None:
    def block(many: int, **where: Any) -> list[float]:
        seen = []
        with demo.trace(PROMPT, **where):
            for layer in demo.transformer.h[:many]:
                total = layer.output.sum()
                seen.append(total.item())
        return seen

    assert len(block(2, backend=LocalBackend(demo, cuts=2))) == 2
    with pytest.raises(NotExpressibleError, match=rf"{__file__}:\d+: This trace or session asks for values more than 1 times"):
        block(2, backend=LocalBackend(demo, cuts=1))
    jobs = len(here.gateway.jobs)
    monkeypatch.setenv("NNSIGHT_API_CUTS", "0")
    for where in ({"remote": "local"}, {"remote": True}):
        with pytest.raises(NotExpressibleError, match="`item` needs values, and they are where the model runs"):
            block(1, **where)
    assert len(here.gateway.jobs) == jobs
    assert len(block(1, backend=RemoteBackend(cuts=1))) == 1
    monkeypatch.setenv("NNSIGHT_API_CUTS", "some")
    with pytest.warns(nnsight.config.ConfigWarning, match="natural numbers"):
        assert CONFIG.API.CUTS == 16


def test_a_demand_is_waited_for_though_the_trace_is_not(demo: Any, here: Running) -> None:
    jobs = len(here.gateway.jobs)
    with demo.trace(PROMPT, remote=True, blocking=False) as tracer:
        factor = nnsight.save(demo.transformer.h[0].output.norm().item())
        logits = (demo.lm_head.output * factor).save()
    results = tracer.backend.wait()
    assert len(here.gateway.jobs) - jobs == 2
    with demo.trace(PROMPT):
        expected = demo.lm_head.output.save()
    torch.testing.assert_close(results["logits"], expected.detach() * factor)
    with pytest.raises(NotExpressibleError, match="earlier job"):
        with demo.trace(PROMPT, backend=RemoteBackend(job_id=tracer.backend.job_id)):
            factor = demo.transformer.h[0].output.norm().item()


def test_a_value_that_was_never_computed_is_an_error(demo: Any) -> None:
    with pytest.raises(ExecutionFailedError, match=rf"{__file__}:\d+: `item` needs a value that was not computed: the generation had"):
        with demo.session(remote="local"):
            with demo.generate(PROMPT, max_new_tokens=30, eos_token_id=14) as tracer:
                tokens = [demo.lm_head.output[0, -1].argmax() for _ in tracer.iter[:8]]
            kept = nnsight.save([token.item() for token in tokens])


@pytest.mark.slow
def test_a_value_comes_without_saved_ones_that_were_never_computed(demo: Any) -> None:
    with demo.session(remote="local"):
        with demo.generate(PROMPT, max_new_tokens=30, eos_token_id=14) as tracer:
            tokens = nnsight.save([demo.lm_head.output[0, -1].argmax() for _ in tracer.iter[:8]])
        first = nnsight.save(tokens[0].item())
    assert first == tokens[0] and len(tokens) == 2


def test_a_trace_that_stops_before_the_model_runs_is_sent(demo: Any, runs: list[int]) -> None:
    with demo.trace(PROMPT, remote="local") as tracer:
        norm = demo.lm_head.weight.norm().save()
        tracer.stop()
    assert norm == demo._module.lm_head.weight.norm() and not runs


@pytest.mark.slow
def test_a_compiled_model_gives_values(demo: Any) -> None:
    compiled = nnsight.demo_model()
    compiled.compile(backend="eager")
    for block in (a_condition, edits_before_and_behind, invokes, gradients):
        _, *expected = block(demo)
        _, *found = block(compiled, remote="local")
        same(found, expected)


def test_an_edit_of_the_model_gets_values(demo: Any) -> None:
    with demo.edit() as edited:
        if edited.transformer.h[0].output.norm() > 3:
            edited.transformer.h[1].output[:] *= 2
    _, logits = a_condition(edited, remote="local")
    same(logits, a_condition(edited)[1])
    assert not torch.equal(logits, a_condition(demo)[1])


def test_where_values_cannot_be_had_a_demand_is_refused(demo: Any) -> None:
    class OnlySubmits(ProgramBackend):
        def submit(self, recorded: Any) -> None:
            raise AssertionError

    for where in ({"remote": "program"}, {"backend": OnlySubmits()}):
        with pytest.raises(NotExpressibleError, match=rf"{__file__}:\d+: `item` needs values"):
            with demo.trace(PROMPT, **where):
                demo.transformer.h[0].output.norm().item()
    refused: dict[str, Callable[[torch.Tensor], Any]] = {
        "`untyped_storage` needs values": lambda hidden: hidden.untyped_storage(),
        "gives uninitialised memory": lambda hidden: hidden.new_empty(3),
        "views of arbitrary memory": lambda hidden: hidden.as_strided((2,), (1,)),
        "A condition on a tensor needs values": torch.func.grad(lambda x: x.sum() if x.sum() > 0 else x.mean()),
        "`resize` needs values": lambda hidden: hidden.clone().resize_(3),
    }
    for message, block in refused.items():
        with pytest.raises(NotExpressibleError, match=message), demo.trace(PROMPT, remote="local"):
            block(demo.transformer.h[0].output)


def test_what_is_edited_here_and_would_not_reach_the_model_is_refused(demo: Any) -> None:
    with pytest.raises(ValueError, match="read-only"), demo.trace(PROMPT, remote="local"):
        demo.transformer.h[0].output.detach().numpy()[:] = 0
    with pytest.raises(NotExpressibleError, match=r":\d+: The result of `getitem` was edited in place"):
        with demo.session(remote="local"):
            with demo.trace(PROMPT):
                hidden = demo.transformer.h[0].output
            row = hidden[0]
            row *= 2
            with demo.trace(PROMPT):
                demo.transformer.h[0].output[:] = hidden
    with pytest.raises(NotExpressibleError, match=r":\d+: Between the traces of a session"):
        with demo.session(remote="local"):
            with demo.trace(PROMPT):
                hidden = demo.transformer.h[0].output
            torch.nn.init.normal_(hidden)


def test_a_pass_behind_a_value_that_autograd_does_not_follow_is_refused(demo: Any) -> None:
    def block(detached: bool) -> None:
        with demo.trace(PROMPT, remote="local"):
            hidden = demo.transformer.h[0].output
            values = torch.linalg.svdvals(hidden.detach() if detached else hidden)
            with (demo.lm_head.output.max() + values.sum()).backward():
                gradient = hidden.grad.save()

    block(detached=True)
    with pytest.raises(NotExpressibleError, match="`linalg_svdvals` before was done with values, which autograd does not follow"):
        block(detached=False)


def test_gradients_flow_through_a_selection(demo: Any) -> None:
    def block(**where: Any) -> torch.Tensor:
        with demo.trace(PROMPT, **where):
            hidden = demo.transformer.h[0].output
            with hidden[hidden > 0.5].sum().backward():
                gradient = hidden.grad.save()
        return gradient

    same(block(remote="local"), block())


# -- what is asked for -------------------------------------------------------------------------------------------------


def test_a_value_is_asked_for_once_and_anew_after_an_edit(demo: Any) -> None:
    counts.clear()
    with demo.trace(PROMPT, remote="local"):
        hidden = demo.transformer.h[0].output
        norm = hidden.norm()
        seen = nnsight.save([norm.item(), float(norm), norm.item() if norm > 3 else 0])
        scores = demo.transformer.h[1].output[0, 0].softmax(-1)
        above = nnsight.save([score.item() for score in scores if score > 0.01])
        again = nnsight.save(norm.item())
        assert counts["cuts"] == 2
        scores[0] = 5
        last = nnsight.save(scores[0].item())
        assert counts["cuts"] == 3
    assert seen == [again] * 3 and above and last == 5


def test_only_what_the_value_needs_is_sent(demo: Any) -> None:
    sent = []

    class Sent(ProgramBackend):
        def send(self, payload: bytes) -> bytes:
            sent.append(nnsight.remote.decode(payload))
            return execute_payload(demo, payload)

    secret = torch.full((7, 11), 3.0)
    with demo.trace(PROMPT, backend=Sent()):
        hidden = demo.transformer.h[0].output
        other = (hidden.sum() * secret).save()
        if hidden.mean() > 100:
            raise AssertionError
    job, whole = sent
    assert [node["do"] for node in job.nodes] == ["read", "op", "op", "read", "op", "stop"]
    assert all(tensor.shape != secret.shape for tensor in job.tensors.values())
    assert any(tensor.shape == secret.shape for tensor in whole.tensors.values()) and not any(node["do"] == "stop" for node in whole.nodes)


def test_a_lazy_model_gets_values_from_elsewhere(demo: Any, here: Running) -> None:
    client = nnsight.LanguageModel("nnsight/demo")
    with client.trace(PROMPT, remote=True):
        norm = nnsight.save(client.transformer.h[0].output.norm().item() + client.lm_head.weight.norm().item())
    assert not client.dispatched
    with torch.no_grad(), demo.trace(PROMPT):
        expected = nnsight.save(demo.transformer.h[0].output.norm().item() + demo.lm_head.weight.norm().item())
    assert norm == expected


def test_each_job_is_counted_against_the_quota(demo: Any, tmp_path: Any) -> None:
    door = Accounts(a=account("alice"))
    with running(engine_of(demo), tmp_path / "jobs", door=door, key=ModelKey("nnsight/demo")) as guarded:
        with demo.trace(PROMPT, backend=RemoteBackend("nnsight/demo", host=guarded.url, api_key="a")):
            norm = nnsight.save(demo.transformer.h[0].output.norm().item())
        assert len(guarded.gateway.jobs) == 2 and norm > 0
        remote_backend.client_of(guarded.url, "a").close()
