"""The parts of the vLLM backend that need no vLLM: rows of a flat batch, runs of requests, parameters of edits, prompts."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import pickle
import resource
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nnsight.runtime.errors import ReplacementShapeError
from nnsight.runtime.interleaver import active_interleaver
from nnsight.runtime.invoker import Barrier
from nnsight.runtime.mediator import Mediator
from nnsight.vllm import VLLM
from nnsight.vllm.prompts import prompt_of
from nnsight.vllm.stack_room import with_room
from nnsight.vllm.steering.entries import ENTRY
from nnsight.vllm.steering.graph_parts import add_part, edited, write
from nnsight.vllm.steering.tables import RowSlots, Steering, tables_part
from nnsight.vllm.worker.bookkeeping import Bookkeeping, Span
from nnsight.vllm.worker.engine_taps import Layout, at_side, tapped_modules
from nnsight.vllm.worker.kept_values import KeptValues
from nnsight.vllm.worker.ranks import ABANDON, WORK, Leader, SingleRank
from nnsight.vllm.worker.request_rows import RequestRows, RowView, ordinary
from nnsight.vllm.worker.requests import SAMPLES, RequestLimits, RequestRun
from nnsight.vllm.worker.runner import check
from nnsight.vllm.worker.spread import Spread, Spreads
from nnsight.vllm.worker.steps import EngineStep, Part

HIDDEN = 4


def requested(location: str) -> Any:
    """Ask for a location, in a block."""
    run = active_interleaver()
    assert run is not None and run.current is not None
    return run.current.request(location)


def run_of(*blocks: Callable[[], Any]) -> RequestRun:
    run = RequestRun([Mediator(block) for block in blocks], None, None, "request", RequestLimits(HIDDEN))
    run.begin()
    return run


def part(run: RequestRun, start: int, size: int, total: int, row: int = 0, requests: int = 1, ends: bool = True) -> Part:
    """Return ``size`` rows of ``total`` for a run, which is at ``row`` of ``requests``."""
    return Part(run, RequestRows(start, size, total), RequestRows(row, 1, requests), ends)


# -- without vLLM -----------------------------------------------------------------------------------------------------


def test_without_vllm_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "vllm" else find(name, *rest))
    with pytest.raises(ImportError, match=r"nnsight\[vllm\]"):
        VLLM("nnsight/demo")


def test_importing_the_class_imports_no_vllm() -> None:
    code = "import sys; from nnsight.vllm import VLLM; print('vllm' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


# -- rows -------------------------------------------------------------------------------------------------------------


def test_rows_are_copies_and_go_back() -> None:
    with torch.inference_mode():
        whole = (torch.arange(24.0).reshape(6, 4), torch.zeros(6, 4), "text")
        before = whole[0].clone()
        with ordinary():
            view = RowView(RequestRows(1, 2, 6), "x", whole)
        hidden, zeros, text = view.value
        assert torch.equal(hidden, before[1:3]) and text == "text" and not hidden.is_inference()
        with torch.inference_mode(False):
            hidden += 1
        left = view.put_back((hidden, torch.ones(2, 4), text))
    assert left[0] is whole[0]
    expected = before.clone()
    expected[1:3] += 1
    assert torch.equal(whole[0], expected)
    assert left[1] is not whole[1] and torch.equal(whole[1], torch.zeros(6, 4))
    assert left[1].sum(1).tolist() == [0, 4, 4, 0, 0, 0]


def test_reading_writes_nothing() -> None:
    """Copies of tensors of inference mode have another version than other copies."""
    for mode in (False, True):
        with torch.inference_mode(mode):
            whole = (torch.ones(3, 2), torch.ones(5), None)
        view = RowView(RequestRows(0, 1, 3), "x", whole)
        with torch.inference_mode(mode):
            assert view.put_back(view.value) is whole


def test_what_has_no_rows_cannot_be_changed() -> None:
    view = RowView(RequestRows(0, 1, 3), "x", {"table": torch.ones(5)})
    with pytest.raises(ReplacementShapeError, match="has no rows of its own"):
        view.put_back({"table": torch.zeros(5)})


@pytest.mark.parametrize(
    ("new", "message"),
    [(torch.ones(1, 2, 4), r"\(1, 2, 4\) in place of this request's \(2, 4\)"), ([torch.ones(2, 4)], "structure")],
)
def test_replacements_have_to_fit(new: Any, message: str) -> None:
    with pytest.raises(ReplacementShapeError, match=message):
        RowView(RequestRows(0, 2, 3), "x", torch.zeros(3, 4)).put_back(new)


# -- runs and steps ---------------------------------------------------------------------------------------------------


def test_each_request_counts_its_own_occurrences() -> None:
    seen: dict[str, list[list[float]]] = {"first": [], "second": []}
    first, second = (run_of(endless(found)) for found in seen.values())
    alone = EngineStep([part(first, 0, 2, 2)])
    together = EngineStep([part(first, 0, 1, 3, 0, 2), part(second, 1, 2, 3, 1, 2)])
    alone.meet("layer.output", torch.ones(2, 4))
    together.meet("layer.output", torch.arange(3.0)[:, None])
    together.counts["other.output"] = 1
    assert seen == {"first": [[1, 1], [0]], "second": [[1, 2]]}
    assert first.counts == {"layer.output": 2, "other.output": 1}
    assert second.counts == {"layer.output": 1, "other.output": 1}
    assert "layer.output" in together.waited
    first.cancel()
    second.cancel()


# -- operations of the graph ------------------------------------------------------------------------------------------


def test_a_barrier_does_not_wait_for_a_request_that_has_ended() -> None:
    """Requests need not share steps, so one can end while its block waits for the other."""
    barrier = Barrier(SimpleNamespace(opens_invokes=False), 2)  # type: ignore[arg-type]
    met: list[int] = []

    def block(number: int) -> None:
        requested("model.layer.output")
        barrier()
        met.append(number)

    runs = [run_of(functools.partial(block, number)) for number in range(3)]
    for number, run in enumerate(runs):
        with ordinary():
            run.meet("model.layer.output", torch.zeros(1, HIDDEN), RequestRows(0, 1, 1))
        run.run_ready()
        if not number:
            run.cancel()
    assert sorted(met) == [1, 2] and all(run.error is None for run in runs)


def test_tokens_outside_of_the_vocabulary_are_refused() -> None:
    def block() -> None:
        requested(SAMPLES)[:] = 7
        requested("model.layer.output")

    for vocabulary, fits in ((8, True), (7, False)):
        limits = RequestLimits(HIDDEN, vocabulary=vocabulary)
        run = RequestRun([Mediator(block)], None, None, "request", limits)
        run.begin()
        ids = torch.zeros(2, 1, dtype=torch.int64)
        with ordinary():
            left = run.meet(SAMPLES, ids, RequestRows(0, 1, 2))
        assert left.flatten().tolist() == [7 if fits else 0, 0]
        assert fits or (isinstance(run.error, ValueError) and "0 to 6" in str(run.error))


def test_operations_keep_what_they_say_to_torch() -> None:
    pair = [torch.randn(3, 4), torch.randn(3)]
    torch.library.opcheck(torch.ops.nnsight.capture.default, (pair, torch.zeros(1), "(0, 1)", "model.layer.output"))
    torch.library.opcheck(torch.ops.nnsight.handoff.default, (pair, "(0, 1)", "model.layer.output"))


# -- edits as parameters ----------------------------------------------------------------------------------------------


def test_tables_do_what_each_rows_edit_says() -> None:
    generator = torch.Generator().manual_seed(0)
    vector, plane, factor = torch.randn(4, generator=generator), torch.randn(2, 4, generator=generator), torch.rand(4)
    hidden, residual = torch.randn(5, 4, generator=generator), torch.randn(5, 4, generator=generator)
    module = torch.nn.Identity()
    rows = torch.zeros(8, dtype=torch.int64)
    module.nnsight_rows, module.nnsight_calls, module.nnsight_parts, module.nnsight_returns_parts = rows, [], [], True
    module.nnsight_batched = False
    add_part(module, tables_part(2, 4, torch.float32), 2, {})
    everything, addition = Steering.of(4, vector, factor, plane, 0), Steering.of(4, 2.0, None, None, 0)
    for slot, steering in ((1, addition), (2, addition), (1, everything)):
        write(module, slot, steering.parts)
    rows[1], rows[2], rows[4] = 1, 2, 1
    found, kept = edited(module, (hidden, residual))
    projector = torch.eye(4) - plane.T @ torch.linalg.inv(plane @ plane.T) @ plane
    expected = (hidden + residual) @ projector * factor + vector
    assert kept is residual
    assert torch.equal(found[[0, 3]], hidden[[0, 3]])
    torch.testing.assert_close((found + residual)[[1, 4]], expected[[1, 4]])
    torch.testing.assert_close((found + residual)[2], (hidden + residual)[2] + 2)
    assert not module.state_dict()
    write(module, 1, {})
    assert torch.equal(edited(module, (hidden, residual))[0][[0, 1, 3, 4]], hidden[[0, 1, 3, 4]])


def test_digests_tell_edits_apart() -> None:
    edits = [
        Steering.of(4, 1.0, None, None, 0),
        Steering.of(4, 1.0, None, None, 3),
        Steering.of(4, 2.0, None, None, 0),
        Steering.of(4, None, 2.0, None, 0),
        Steering.of(4, None, None, torch.eye(4)[0], 0),
    ]
    assert len({edit.digest for edit in edits}) == len(edits)
    assert edits[0].digest == Steering.of(4, torch.ones(4), None, None, 0).digest


# -- several devices --------------------------------------------------------------------------------------------------


def test_parts_of_merged_layers_come_together() -> None:
    """Four devices with two heads of two channels each for queries, and two key-value heads, which two neighbours share each."""
    query, key = torch.arange(16.0).expand(3, 16), 100 + torch.arange(4.0).expand(3, 4)
    parts = [
        torch.cat([query[:, 4 * rank : 4 * rank + 4], key[:, rank // 2 * 2 : rank // 2 * 2 + 2]], -1) for rank in range(4)
    ]
    spread = Spread(((4, 1), (2, 2)))
    whole = spread.join(parts)
    assert spread.width == 6 and torch.equal(whole, torch.cat([query, key], -1))
    assert all(torch.equal(spread.part(whole * 2, rank, 4), parts[rank] * 2) for rank in range(4))


class Connected:
    """A connection to a follower that keeps what is said."""

    def __init__(self) -> None:
        self.said: list[Any] = []

    def send_bytes(self, data: bytes) -> None:
        self.said.append(pickle.loads(data))


def test_the_leader_tells_what_comes_next() -> None:
    """Where a block waits, what it wants, and when it has left the step."""

    def block() -> None:
        requested("model.a.output")
        requested("model.b.output").mul_(2)
        raise KeyboardInterrupt

    run = run_of(block)
    follower = Connected()
    leader = Leader([follower], SimulatedGroup(), Spreads(torch.nn.Identity()))  # type: ignore[arg-type]
    leader.attended = True
    runner = SimpleNamespace(tree=SimpleNamespace(sources=frozenset({"model.a"})))
    step = leader.step(runner, [part(run, 0, 1, 1)])
    assert step is not None and follower.said == [(False, {"model.a.output"}, frozenset({"model.a"}))]
    step.meet("model.a.output", torch.ones(1, 2))
    assert follower.said[1:] == [WORK, ([], {"model.b.output"}, frozenset({"model.a"}))]
    with pytest.raises(KeyboardInterrupt):
        step.meet("model.b.output", torch.ones(1, 2))
    assert follower.said[3:] == [WORK, ABANDON]
    assert leader.step(runner, []) is None and follower.said[-1] is None
    run.cancel()


class SimulatedGroup:
    """Two devices that have the same; or what they are asked about in turn, as given."""

    devices, rank = 2, 0

    def __init__(self, *alike: bool) -> None:
        self._alike = list(alike)

    def alike(self, tensors: Any) -> bool:
        return self._alike.pop(0) if self._alike else True

    def closed(self) -> Any:
        return contextlib.nullcontext()


# -- the bookkeeping of steps -----------------------------------------------------------------------------------------


class Batches:
    """Steps of a runner, which is simulated; ``worked_out`` counts those whose rows were worked out anew."""

    def __init__(self, tapped: Any = None) -> None:
        self.link = SingleRank()
        self.batched = False
        self.tapped = tapped
        self.bookkeeping = Bookkeeping(self)
        self.worked_out = 0

    def schedule(self, finished: str = "", **entries: tuple[int, int]) -> None:
        """Tell the bookkeeping of new requests with entries of tables, and of one that has finished."""
        new = [
            SimpleNamespace(req_id=name, sampling_params=SimpleNamespace(extra_args={ENTRY: entry})) for name, entry in entries.items()
        ]
        self.bookkeeping.follow(SimpleNamespace(finished_req_ids={finished}, scheduled_new_reqs=new))

    def step(self, *requests: tuple[str, int, int], padded: int = 0, ends: bool = True) -> EngineStep | None:
        """Make a step with (request, position, size) for each request."""
        names, positions = [name for name, *_ in requests], [position for _, position, _ in requests]
        total = sum(size for *_, size in requests)

        def spans(wanted: Any) -> list[Span]:
            self.worked_out += 1
            starts = [sum(size for *_, size in requests[:row]) for row in range(len(requests))]
            given = zip(requests, starts, strict=True)
            return [Span(n, row, start, s, p, ends) for row, ((n, p, s), start) in enumerate(given) if n in wanted]

        return self.bookkeeping.step(total + padded, names, positions, total, spans)


def endless(seen: list[list[float]]) -> Callable[[], None]:
    """Return a block that notes what it sees at each token."""

    def block() -> None:
        while True:
            seen.append(requested("layer.output")[:, 0].tolist())
            active_interleaver().current.advance(1)  # type: ignore[union-attr]

    return block


def test_rows_of_a_step_like_the_one_before_are_not_worked_out_again() -> None:
    """And blocks see their rows in each: whoever comes, leaves, or changes places with another one."""
    first, second = [], []  # type: ignore[var-annotated]
    runs = {"a": run_of(endless(first)), "b": run_of(endless(second))}
    batches = Batches()
    for name, run in runs.items():
        batches.bookkeeping.add(name, run)
    steps: list[tuple[tuple[str, int, int], ...]] = [
        (("a", 0, 2), ("b", 0, 1)),  # prompts
        (("a", 2, 1), ("b", 1, 1)),
        (("a", 3, 1), ("b", 2, 1)),  # like the one before
        (("a", 4, 1), ("b", 3, 1)),  # likewise
        (("b", 4, 1), ("a", 5, 1)),  # in another order
        (("b", 5, 1), ("a", 6, 1)),  # likewise
        (("plain", 0, 1), ("b", 6, 1), ("a", 7, 1)),  # with somebody else
    ]
    worked_out = []
    for requests in steps:
        step = batches.step(*requests)
        assert step is not None
        size = sum(count for *_, count in requests)
        step.meet("layer.output", torch.arange(float(size))[:, None])
        step.rows_are_requests()
        worked_out.append(batches.worked_out)
    assert worked_out == [1, 2, 2, 2, 3, 3, 4]
    assert first == [[0, 1], [0], [0], [0], [1], [1], [2]]
    assert second == [[2], [1], [1], [1], [0], [0], [1]]
    assert [(run.steps, run.seen, run.position) for run in runs.values()] == [(7, 8, 7), (7, 7, 6)]
    batches.bookkeeping.remove("a")
    step = batches.step(("plain", 1, 1), ("b", 7, 1), ("a", 8, 1))
    assert step is not None and [part.run for part in step.parts] == [runs["b"]]
    for run in runs.values():
        run.cancel()


def test_a_repeated_position_is_not_taken_for_the_next_one() -> None:
    """After a preemption a request comes again from its beginning, which a block cannot do."""
    run = run_of(endless([]))
    batches = Batches()
    batches.bookkeeping.add("a", run)
    for position in range(3):
        step = batches.step(("a", position, 1))
        assert step is not None
        step.meet("layer.output", torch.ones(1, 1))
    assert batches.worked_out == 1
    assert batches.step(("a", 0, 1)) is None and "cannot run twice" in str(run.failed)


def test_a_part_of_a_prompt_of_one_token_is_not_taken_for_a_token_that_was_sampled() -> None:
    run = run_of(endless([]))
    batches = Batches(SimpleNamespace(locations=[], rows=RowSlots(torch.zeros(8, dtype=torch.int64))))
    batches.bookkeeping.add("a", run)
    for position, ends in enumerate([False, False, True, True]):
        step = batches.step(("a", position, 1), ends=ends)
        assert step is not None and (not step.parts, bool(step.kept)) == (not ends, not ends)
    assert run.steps == 2
    run.cancel()


def test_rows_of_tables_follow_the_batch() -> None:
    """The slots of a step like the one before are there already; rows that pad it have none, nor those before the first position."""
    looked_at = torch.zeros(8, dtype=torch.int64)
    batches = Batches(SimpleNamespace(locations=[], rows=RowSlots(looked_at)))
    batches.schedule(a=(2, 0), b=(3, 6))
    found = []
    for position in range(4, 8):
        assert batches.step(("a", position, 1), ("b", position, 1), padded=2) is None
        found.append(looked_at[:4].tolist())
    assert found == [[2, 0, 0, 0], [2, 0, 0, 0], [2, 3, 0, 0], [2, 3, 0, 0]] and batches.worked_out == 3
    batches.schedule()
    batches.step(("a", 8, 1), ("b", 8, 1), padded=2)
    assert batches.worked_out == 3
    batches.schedule(finished="a")
    batches.step(("b", 9, 1), padded=2)
    assert looked_at.tolist()[:4] == [3, 0, 0, 0] and batches.bookkeeping.has_work
    batches.schedule(finished="b")
    assert batches.bookkeeping.has_work  # a row is to be cleared yet
    batches.step(("c", 10, 1))
    assert not looked_at.any() and not batches.bookkeeping.has_work


def test_calls_with_room_need_no_memory_of_the_system() -> None:
    """However deep the caller is: without room there are depths at which each call takes a page from the system and gives it back."""

    def leaf() -> int:
        return sys._getframe().f_lineno

    def pages_of(calls: int) -> int:
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        for _ in range(calls):
            leaf()
        return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before

    def worst(depth: int) -> int:
        return max(pages_of(100), worst(depth - 1) if depth else 0)

    assert with_room(worst, 300) < 100


# -- what users pass --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("text", {"prompt": "text"}),
        (["text"], {"prompt": "text"}),
        ([1, 2], {"prompt_token_ids": [1, 2]}),
        (torch.tensor([[1, 2]]), {"prompt_token_ids": [1, 2]}),
        ({"prompt": "text", "cache_salt": "mine"}, {"prompt": "text", "cache_salt": "mine"}),
    ],
)
def test_forms_of_prompts(prompt: Any, expected: dict[str, Any]) -> None:
    assert prompt_of((prompt,)) == expected


def test_patterns_of_taps() -> None:
    model = torch.nn.ModuleDict({"h": torch.nn.ModuleList(torch.nn.Sequential(torch.nn.ReLU()) for _ in range(2))})
    assert list(tapped_modules(model, ["h.*"])) == ["h.0", "h.1"]
    assert list(tapped_modules(model, ["h.1.0"])) == ["h.1.0"]
    with pytest.raises(ValueError, match="no module 'h.7'"):
        tapped_modules(model, ["h.7"])
    layout = Layout(("h.*", "h.1.inputs", "h.0.output"), ("ln",), ("h.0",), 3, 2)
    assert (at_side(layout.taps, "input"), at_side(layout.taps, "output")) == (["h.1"], ["h.*", "h.0"])
    assert Layout.described(layout.description) == layout


def test_buffers_of_captures_stay_where_they_are() -> None:
    """A graph that is replayed writes to the addresses that it was recorded with."""
    captures, mark = KeptValues(), torch.zeros(1)
    torch.ops.nnsight.capture([torch.ones(8, 2)], mark, "0", "h.output")
    assert captures._buffers == {}  # nobody reads
    with captures.filling():
        torch.ops.nnsight.capture([torch.ones(8, 2), torch.zeros(8)], mark, "(0, (1, None))", "h.output")
        (form, buffers) = captures._buffers["h.output"]
        torch.ops.nnsight.capture([torch.full((3, 2), 2.0), torch.ones(3)], mark, "(0, (1, None))", "h.output")
    assert [found.data_ptr() for found in captures._buffers["h.output"][1]] == [found.data_ptr() for found in buffers]
    seen: list[Any] = []
    run = run_of(lambda: seen.append(requested("h.output")))
    step = EngineStep([part(run, 1, 2, 3)])
    captures.hand_out(step, 3)
    assert run.error is None, run.error
    ((first, (second, nothing)),) = seen
    assert torch.equal(first, torch.full((2, 2), 2.0)) and torch.equal(second, torch.ones(2)) and nothing is None
    assert buffers[0][3:].eq(1).all()  # what is behind the step is not shown


def test_each_step_copies_its_rows_from_memory_of_its_own() -> None:
    """A device copies when it comes to it: here when all steps have been prepared."""
    looked_at = torch.zeros(8, dtype=torch.int64)
    later: list[Callable[[], Any]] = []

    class Device:
        device = looked_at.device

        def __getitem__(self, part: slice) -> Any:
            return SimpleNamespace(copy_=lambda given, non_blocking: later.append(lambda: looked_at[part].copy_(given)))

    rows = RowSlots(Device())  # type: ignore[arg-type]
    rows.fill([(1, 3, 2), (5, 6, 1)])
    rows.fill([(0, 2, 3)])
    rows.fill([])
    seen = []
    for copy in later:
        copy()
        seen.append(looked_at.tolist())
    assert seen == [[0, 2, 2, 0, 0, 1, 0, 0], [3, 3, 0, 0, 0, 0, 0, 0], [0] * 8]


# -- features of the model runner V2 ------------------------------------------------------------------------------------


FEATURES = [
    ("attention_config.hisparse_config", object(), "HiSparse attention"),
    ("watermark_config", object(), "a watermark"),
    ("model_config.is_diffusion", True, "a diffusion model .*later steps overwrite them"),
    ("parallel_config.enable_batch_sharded_sampling", True, "batch-sharded sampling .*logits of different requests"),
    ("speculative_config", SimpleNamespace(method="ngram"), "speculative decoding .*looks up drafts on the device"),
    ("parallel_config.use_ubatching", True, "dual batch overlap .*in two halves"),
    ("parallel_config.prefill_context_parallel_size", 2, "context parallelism .*a different order"),
    ("parallel_config.decode_context_parallel_size", 2, "context parallelism .*a different order"),
    ("model_config.is_encoder_decoder", True, "a model with an encoder"),
    ("model_config.supports_multimodal_inputs", True, "for more than text .*its encoder runs after"),
    ("model_config.enable_prompt_embeds", True, "embeddings in place of a prompt"),
    ("model_config.is_hybrid", True, "a model with recurrent layers"),
    ("model_config.is_attention_free", True, "a model with recurrent layers"),
    ("model_config.return_sampling_mask", True, "sampling masks"),
    ("model_config.enable_trace_replay", True, "replayed tokens"),
    ("aux_output_config.enabled", True, "auxiliary outputs"),
    ("kv_transfer_config", object(), "a connector of key-value caches"),
]


def configuration(**changed: Any) -> Any:
    """Return a configuration for V2 with no feature of the list but those that were ``changed``, by path."""
    config = SimpleNamespace(use_v2_model_runner=True)
    sizes = {path: 1 for path, *_ in FEATURES if path.endswith("_size")}
    for path, value in {**{path: None for path, *_ in FEATURES}, **sizes, "scheduler_config.async_scheduling": False, **changed}.items():
        *parents, name = path.split(".")
        for parent in parents:
            config.__dict__.setdefault(parent, SimpleNamespace())
        setattr(getattr(config, parents[0]) if parents else config, name, value)
    return config


@pytest.mark.parametrize(("path", "value", "message"), FEATURES)
def test_what_the_second_runner_has_and_blocks_cannot_run_with(path: str, value: Any, message: str) -> None:
    check(configuration(), tables=False)
    with pytest.raises(NotImplementedError, match=f"model runner V2 with .*{message}.*unset VLLM_USE_V2_MODEL_RUNNER"):
        check(configuration(**{path: value}), tables=False)


@pytest.mark.parametrize("v2", [False, True])
def test_steps_of_tables_may_overlap_and_those_of_blocks_may_not(v2: bool) -> None:
    config = configuration(**{"use_v2_model_runner": v2, "scheduler_config.async_scheduling": True})
    check(config, tables=True)
    with pytest.raises(NotImplementedError, match="Asynchronous scheduling .*tokens that the request does not have"):
        check(config, tables=False)
