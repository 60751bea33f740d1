"""Which blocks are a loop over the steps of a generation, and do the same at each."""

from __future__ import annotations

import ast

import pytest

from nnsight.tracing.loops import is_same_at_each_step, step_loop


def judged(text: str) -> bool | None:
    """Whether the block ``text`` does the same at each step; ``None`` if it is no loop over steps alone."""
    loop = step_loop(ast.parse(text).body)
    return None if loop is None else is_same_at_each_step(loop)


@pytest.mark.parametrize(
    "body",
    [
        "m.h[1].output[:, -1] += v",
        "m.h[1].output = m.h[0].output + v",
        "h = m.h[1].output\n    h[:] = h * 2",
        "for layer in m.h: layer.output = layer.output + v",
        "h = m.h[1].output\n    if h.shape[0] > 1: h[:] = 0",
        "total = sum([x.mean() for x in parts])\n    m.h[1].output[:] += total",
        "with torch.no_grad():\n        h = m.h[1].output\n        h += v",
    ],
)
@pytest.mark.parametrize(
    "loop", ["for _ in tracer.iter[:]:", "for step in tracer.iter[0:]:", "with tracer.iter[:]:", "with tracer.all() as s:"]
)
def test_a_body_without_the_step_is_the_same_at_each(loop: str, body: str) -> None:
    assert judged(f"{loop}\n    {body}") is True


@pytest.mark.parametrize(
    "block",
    [
        "for step in tracer.iter[:]:\n    m.h[step].output[:] = 0",
        "for step in tracer.iter[:3]:\n    m.h[0].output[:] = 0",
        "for step in tracer.iter[1:]:\n    m.h[0].output[:] = 0",
        "for step in tracer.iter[::2]:\n    m.h[0].output[:] = 0",
        "for _ in tracer.iter[:]:\n    count += 1\n    m.h[0].output[:] = count",
        "for _ in tracer.iter[:]:\n    m.h[0].output[:] = last\n    last = m.h[1].output",
        "for _ in tracer.iter[:]:\n    if first: h = m.h[0].output\n    h[:] = 0",
        "for _ in tracer.iter[:]:\n    for x in (): h = m.h[0].output\n    h[:] = 0",
        "for _ in tracer.iter[:]:\n    for x in m.h[0].output.nonzero(): pass\n    m.h[1].output[:] = x",
        "for _ in tracer.iter[:]:\n    for x in m.h[0].output.nonzero(): pass\n    else: m.h[1].output[:] = x",
        "for _ in tracer.iter[:]:\n    m.h[0].output[:] = sum([x for x in parts]) + x\n    x = m.h[1].output",
        "for _ in tracer.iter[:]:\n    m.h[0].output[:] = sum([x for x in x])\n    x = m.h[1].output",
        "for _ in tracer.iter[:]:\n    m.h[0].output[:] = 0\n    tracer.stop()",
        "for _ in tracer.iter[:]:\n    m.h[0].next().output[:] = 0",
        "for _ in tracer.iter[:]:\n    try: m.h[0].output[:] = 0\n    finally: pass",
        "for _ in tracer.iter[:]:\n    if m.h[0].output.sum() > 0: break",
        "for _ in tracer.iter[:]:\n    m.generator.output",
        "for _ in tracer.iter[:]:\n    state.count += 1\n    m.h[0].output[:] = state.count",
        "for _ in tracer.iter[:]:\n    m.h[0].output[:] = next(values)",
    ],
)
def test_a_body_that_may_tell_steps_apart_is_not(block: str) -> None:
    assert judged(block) is False


@pytest.mark.parametrize(
    "block",
    [
        "m.h[0].output[:] = 0",
        "for x in range(3): pass",
        "x = 1\nfor _ in tracer.iter[:]: pass",
        "for _ in tracer.iter[:]: pass\nelse: x = 1",
    ],
)
def test_other_blocks_are_no_loop_over_steps(block: str) -> None:
    assert judged(block) is None
