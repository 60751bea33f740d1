"""Random traces of several invokes, which share values and wait for each other at barriers.

The other modules of this folder draw blocks for one order of events. Here the order is what is tested: up to three invokes act at the
same locations, in one forward pass or in the steps of a generation, and barriers let one invoke wait for another. The eager trace is
the reference for the compiled one, for programs, and for a server.
"""

from __future__ import annotations

import linecache
import random
from collections.abc import Callable
from typing import Any

import torch

import nnsight

PROMPTS = {
    "A": "The Eiffel Tower is in the city of",
    "B": "The Colosseum is in the city of",
    "C": "A quick brown fox",
}

#: Locations of a model with the modules of GPT-2, in the order of the forward pass.
LOCATIONS = (
    "transformer.wte.output",
    "transformer.h[0].input",
    "transformer.h[0].mlp.output",
    "transformer.h[0].output",
    "transformer.h[1].attn.c_proj.input",
    "transformer.h[1].output",
    "transformer.h[2].output",
    "lm_head.output",
)

#: What an invoke does at a location ``AT``. ``NAME`` is the invoke's own, ``OTHER`` is the name of any invoke.
STATEMENTS = (
    "kept['NAME', len(kept)] = AT.sum().save()",
    "kept['NAME', len(kept)] = AT[:, -1].clone().save()",
    "held.values.append(AT[:, 0] * 2)",
    "AT[:, -1] = 2.0",
    "AT[:, :2] *= 1.5",
    "AT = AT * 0.5 + 1",
    "AT.mul_(2.0)",
    "own = AT; own[:, 0] += 1.0",
    "shared['NAME'] = AT[:, -1].mean()",
    "AT[:, -1] += shared.get('OTHER', 0.5)",
    "AT[:, -1] = shared.get('OTHER', 0.5) + AT[:, 0]",
    "log.append(('NAME', AT.shape[-1]))",
)

#: A statement that needs a value: the graph is cut, a server sends the value, and ``program=True`` refuses the block.
DEMAND = "if float(AT.detach().mean()) > 0: log.append('NAME')"


class Held:
    """An object of the user that a block fills."""

    def __init__(self) -> None:
        self.values: list[Any] = []


def _body(
    draw: random.Random, name: str, barriers: list[tuple[int, int]], statements: tuple[str, ...], differentiates: bool
) -> list[str]:
    """Return the lines of one invoke. ``barriers`` are numbers of barriers, with the index of the location before which they are.

    With ``differentiates``, a backward pass follows, whose block keeps the gradients of some values, and may edit one of them.
    """
    lines, watched = [], []
    for index, location in enumerate(LOCATIONS):
        if differentiates and draw.random() < 0.3:
            watched.append(f"watched_{name}_{index}")
            lines.append(f"{watched[-1]} = model.{location}")
        if draw.random() < 0.4:
            for statement in draw.choices(statements, k=draw.choice([1, 1, 2])):
                text = statement.replace("AT", f"model.{location}").replace("NAME", name)
                lines.append(text.replace("OTHER", draw.choice("ABC")))
        lines += [f"barrier_{number}()" for number, at in barriers if at == index and draw.random() < 0.9]
    if watched:
        loss = draw.choice(["", f" + {watched[0]}.cos().sum()", f" + {watched[-1]}[:, -1].sum()"])
        lines.append(f"with (model.lm_head.output.sin().sum(){loss}).backward(retain_graph=True):")
        for tensor in reversed(watched):
            edit = draw.choice(["", f"{tensor}.grad[:, -1] *= 2; "])
            lines.append(f"    {edit}kept[{tensor!r}] = {tensor}.grad.clone().save()")
    return lines or ["pass"]


def program(seed: int, differentiates: bool = False) -> str:
    """Return the text of a function ``run(model, **options)``: one trace, or one generation, with three invokes."""
    draw = random.Random(seed)
    statements = STATEMENTS + draw.choice([(), (), (DEMAND,)])
    steps = 0 if differentiates else draw.choice([0, 0, 2, 3])
    barriers = [(number, draw.randrange(len(LOCATIONS))) for number in range(draw.choice([0, 1, 2, 3]))]
    invokes = [("A", "A"), ("B", draw.choice(["B", "[B, C]"])), ("C", draw.choice(["", "C", ""]))]
    draw.shuffle(invokes)
    bodies = [(arguments, _body(draw, name, barriers, statements, differentiates)) for name, arguments in invokes]
    start = f"generate(min_new_tokens={steps}, max_new_tokens={steps}, do_sample=False, **options)" if steps else "trace(**options)"
    loop = f"for step in tracer.iter[:{draw.choice([1, steps])}]:"
    lines = [f"with model.{start} as tracer:"]
    for number, _ in barriers:
        waiting = sum(f"barrier_{number}()" in body for _, body in bodies)
        lines.append(f"    barrier_{number} = tracer.barrier({max(1, waiting)})")
    for arguments, body in bodies:
        lines.append(f"    with tracer.invoke({arguments}):")
        if steps:
            lines.append("        " + loop)
        lines += [("            " if steps else "        ") + line for line in body]
    text = ["def run(model, **options):", "    kept, held, shared, log = {}, Held(), {}, []"]
    text += ["    " + line for line in lines]
    return "\n".join([*text, "    return kept, held.values, log", ""])


def compiled(seed: int, differentiates: bool = False) -> Callable[..., Any]:
    """Return the function of :func:`program`, whose text tracebacks and traces can find."""
    text, file = program(seed, differentiates), f"<invokes {seed}{' with gradients' * differentiates}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    names: dict[str, Any] = {"Held": Held, **PROMPTS}
    exec(compile(text, file, "exec"), names)
    run: Callable[..., Any] = names["run"]
    return run


def observe(run: Callable[..., Any], model: Any, **options: Any) -> tuple[Any, str | None]:
    """Return what a run leaves, and the class of its error."""
    torch.manual_seed(0)
    try:
        kept, held, log = run(model, **options)
    except Exception as error:
        return None, type(error).__name__
    kept = {name: value.detach() for name, value in kept.items()}
    return (kept, [value.detach() for value in held], log), None


def models() -> dict[str, Any]:
    """Return the models that are compared: the eager one, and compiled ones."""
    return {
        "eager": nnsight.demo_model(),
        "compiled": nnsight.demo_model(compile={"backend": "eager"}),
        "compiled by AOTAutograd": nnsight.demo_model(compile={"backend": "aot_eager"}),
    }


#: The forms of a trace: which of :func:`models` runs it, and the arguments of the trace.
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "compiled": ("compiled", {}),
    "compiled by AOTAutograd": ("compiled by AOTAutograd", {}),
    "program": ("eager", {"program": True}),
    "server": ("eager", {"remote": "local"}),
}
