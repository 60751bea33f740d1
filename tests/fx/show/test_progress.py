"""A wait of more than two seconds is explained by a line, and leaves nothing behind."""

from __future__ import annotations

import io
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from nnsight import CONFIG, NNsight
from nnsight.fx import progress

X = torch.ones(2, 4)


class Shown:
    """The lines that were shown."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.made = self.closed = 0
        self.changed = threading.Condition()

    def wait_for(self, text: str) -> bool:
        with self.changed:
            return self.changed.wait_for(lambda: any(text in line for line in self.lines), timeout=60)


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Iterator[Shown]:
    """Bars, at once and without a terminal. No thread is left when the test is over."""
    found = Shown()

    class Bar:
        disable = False

        def __init__(self, leave: bool, bar_format: str) -> None:
            assert not leave
            self.start_t, self.bar_format = 0.0, bar_format
            found.made += 1

        def refresh(self) -> None:
            with found.changed:
                found.lines.append(self.bar_format)
                found.changed.notify_all()

        def close(self) -> None:
            found.closed += 1

    monkeypatch.setattr(progress, "_Bar", Bar)
    monkeypatch.setattr(progress, "DELAY", 0.0)
    monkeypatch.setattr(progress, "_INTERVAL", 0.001)
    CONFIG.APP.PROGRESS = True
    yield found
    assert "nnsight-progress" not in [thread.name for thread in threading.enumerate()]


def layers(count: int) -> torch.nn.Sequential:
    def layer() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.LayerNorm(4), torch.nn.Linear(4, 4), torch.nn.ReLU())

    return torch.nn.Sequential(torch.nn.Linear(4, 4), *(layer() for _ in range(count)), torch.nn.Linear(4, 2))


def waiting(condition: Callable[[], Any]) -> Callable[..., Any]:
    """Return a backend that lowers when ``condition`` has been met."""

    def backend(graph_module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        condition()
        return graph_module.forward

    return backend


def traced(model: NNsight) -> torch.Tensor:
    with model.trace(X):
        model[0].output *= 2
        out = model.output.save()
    return out


def test_regions_that_are_lowered_are_counted(shown: Shown) -> None:
    net = layers(3).eval()
    backend = waiting(lambda: shown.wait_for("lowering"))
    model = NNsight(net, compile={"backend": backend, "regions": True})
    out = traced(model)
    torch.testing.assert_close(out, net[1:](net[0](X) * 2))
    lines = [line for line in shown.lines if line.startswith("nnsight: lowering Sequential, ")]
    assert lines and ", 0 steps done, " not in lines[0], "the capture is one"
    assert all("compile(regions=False, background=True)" in line for line in lines)
    assert shown.closed == shown.made >= 1


def test_a_capture_is_shown(shown: Shown) -> None:
    class Slow(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return slow(x)

    met = []

    @torch.library.custom_op("nnsight_tests::slow_to_capture", mutates_args=())
    def slow(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    @slow.register_fake
    def fake(x: torch.Tensor) -> torch.Tensor:
        met.append(shown.wait_for("nnsight: capturing Slow"))
        met.append(not any("compile(" in line for line in shown.lines))
        return torch.empty_like(x)

    model = NNsight(Slow(), compile={"backend": "eager"})
    with model.trace(X):
        out = model.output.save()
    assert all(met[:2]) and torch.equal(out, X + 1)


@pytest.mark.parametrize("way", ["option", "logger", "thread"])
def test_it_can_be_switched_off(shown: Shown, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    monkeypatch.setattr(progress._Call, "draw", lambda *given: started.append(given))
    if way == "option":
        CONFIG.APP.PROGRESS = False
    if way == "logger":
        monkeypatch.setattr(logging.getLogger("nnsight.fx"), "level", logging.ERROR)
        logging.getLogger("nnsight.fx").manager._clear_cache()  # type: ignore[attr-defined]
    model = NNsight(layers(2), compile={"backend": "eager"})
    if way == "thread":
        thread = threading.Thread(target=traced, args=(model,))
        thread.start()
        thread.join()
    else:
        traced(model)
    logging.getLogger("nnsight.fx").manager._clear_cache()  # type: ignore[attr-defined]
    assert started == []


def test_a_failure_leaves_nothing(shown: Shown) -> None:
    with pytest.raises(KeyError), progress.call("m"), progress.step("lowering"):
        assert shown.wait_for("nnsight: lowering m, 0 steps done")
        raise KeyError
    assert progress._outermost is None


def test_a_stream_that_cannot_be_written_to_disturbs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "DELAY", 0.0)
    monkeypatch.setattr(progress, "_INTERVAL", 0.001)
    tried = threading.Event()

    def fail(**_: Any) -> None:
        tried.set()
        raise ValueError("closed")

    monkeypatch.setattr(progress, "_Bar", fail)
    CONFIG.APP.PROGRESS = True
    with progress.step("lowering"):
        assert tried.wait(60)
    assert threading.active_count() == len(threading.enumerate())


class Terminal(io.StringIO):
    """A stream on a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_nothing_is_written_to_a_file(monkeypatch: pytest.MonkeyPatch, stream: type[io.StringIO]) -> None:
    monkeypatch.setattr("sys.stderr", stream())
    assert progress._Bar(leave=False).disable is (stream is not Terminal)


def test_the_line_as_tqdm_writes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "DELAY", 0.0)
    monkeypatch.setattr(progress, "_INTERVAL", 0.001)
    CONFIG.APP.PROGRESS = True
    written = Terminal()
    monkeypatch.setattr("sys.stderr", written)
    before = set(threading.enumerate())
    with progress.call("GPT2LMHeadModel", "`hint`"), progress.step("lowering"):
        deadline = time.monotonic() + 10
        while "done" not in written.getvalue() and time.monotonic() < deadline:  # TQDM_DISABLE=1 keeps the line from being written
            time.sleep(0.001)
    assert "nnsight: lowering GPT2LMHeadModel, 0 steps done, 00:0" in written.getvalue()
    assert "`hint`" in written.getvalue()
    assert set(threading.enumerate()) <= before
