"""Several inputs in one forward pass: each invoke sees and changes its own rows, and a row is what it is alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from nnsight import LanguageModel, NNsight, demo_model, fx
from nnsight.runtime.errors import ReplacementShapeError

from ..conftest import Hooks, Rows, agree, assert_no_instrumentation, both, same


class Pair(torch.nn.Module):
    """Returns a tuple: something with rows, something without, and no tensor."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        return x * 2, torch.arange(7.0), None


class Small(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.pair = Pair()
        self.last = torch.nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, steps, _ = self.pair(self.first(x))
        return self.last(y + steps.mean())


@pytest.fixture
def small() -> Rows:
    torch.manual_seed(0)
    return Rows(Small(), compile={"backend": "eager"})


@pytest.fixture
def b() -> torch.Tensor:
    return torch.randn(3, 4)


# -- rows of a plain model ------------------------------------------------------------------------------------------


def test_each_invoke_reads_its_own_rows(small: Rows, a: torch.Tensor, b: torch.Tensor) -> None:
    hooked = Hooks(small._module)
    hooked.output("first", hooked.keep("first"))
    out = hooked(torch.cat([a, b]))
    first = hooked.seen["first"]

    def run(compile: bool) -> tuple[Any, Any]:
        with small.trace(compile=compile) as tracer:
            with tracer.invoke(a):
                one = [small.first.input, small.first.output, small.output].save()
            with tracer.invoke(b):
                two = [small.first.input, small.first.output, small.output].save()
        return (one, two), tracer

    agree(run, ([a, first[:2], out[:2]], [b, first[2:], out[2:]]))
    torch.testing.assert_close(out[:2], small._module(a))
    torch.testing.assert_close(out[2:], small._module(b))


def test_edits_stay_in_their_rows(small: Rows, a: torch.Tensor, b: torch.Tensor) -> None:
    def edit(h: torch.Tensor) -> torch.Tensor:
        h = h.clone()
        h[:2, 0] = 5.0
        h[2:] = h[2:] * 3.0
        return h

    expected = Hooks(small._module).output("first", edit)(torch.cat([a, b]))

    def run(compile: bool) -> tuple[Any, Any]:
        with small.trace(compile=compile) as tracer:
            with tracer.invoke(a):
                small.first.output[:, 0] = 5.0  # in place
                one = small.output.save()
            with tracer.invoke(b):
                small.first.output = small.first.output * 3.0  # a replacement
                two = small.output.save()
        return (one, two), tracer

    agree(run, (expected[:2], expected[2:]))


def test_arguments_are_replaced_row_by_row(small: Rows, a: torch.Tensor, b: torch.Tensor) -> None:
    expected = small._module(torch.cat([a, b * 0.5]))

    def run(compile: bool) -> tuple[Any, Any]:
        with small.trace(compile=compile) as tracer:
            with tracer.invoke(a):
                one = small.output.save()
            with tracer.invoke(b):
                small.input = small.input * 0.5
                two = small.output.save()
        return (one, two), tracer

    agree(run, (expected[:2], expected[2:]))


def test_tuples_are_narrowed_inside_and_replaced_row_by_row(small: Rows, a: torch.Tensor, b: torch.Tensor) -> None:
    def edit(value: Any) -> Any:
        return torch.cat([value[0][:2] - 1.0, value[0][2:]]), *value[1:]

    hooked = Hooks(small._module)
    hooked.output("pair", hooked.keep("steps", lambda value: value[1])).output("pair", edit)
    expected = hooked(torch.cat([a, b]))

    def run(compile: bool) -> tuple[Any, Any]:
        with small.trace(compile=compile) as tracer:
            with tracer.invoke(a):
                rows, steps, nothing = small.pair.output
                small.pair.output = (rows - 1.0, steps, nothing)
                one = small.output.save()
            with tracer.invoke(b):
                shared = small.pair.output[1].save()
                two = small.output.save()
        return (one, two, shared), tracer

    agree(run, (expected[:2], expected[2:], hooked.seen["steps"]))


def test_an_empty_invoke_sees_all_rows_as_the_earlier_ones_left_them(
    small: Rows, a: torch.Tensor, b: torch.Tensor
) -> None:
    kept = Hooks(small._module)
    kept.output("first", kept.keep("before"))
    kept(torch.cat([a, b]))
    before = kept.seen["before"]
    edited = torch.cat([before[:2] * 2.0, before[2:]])
    expected = Hooks(small._module).output("first", lambda h: edited + 1.0)(torch.cat([a, b]))

    def run(compile: bool) -> tuple[Any, Any]:
        with small.trace(compile=compile) as tracer:
            with tracer.invoke(a):
                small.first.output = small.first.output * 2.0
            with tracer.invoke(b):
                two = small.output.save()
            with tracer.invoke():
                whole = small.first.output.clone().save()
                small.first.output += 1.0
            with tracer.invoke():
                again = small.first.output.save()
                out = small.output.save()
        return (two, whole, again, out), tracer

    agree(run, (expected[2:], edited, edited + 1.0, expected))


def test_one_invoke_with_input_has_the_whole_batch(small: Rows, a: torch.Tensor) -> None:
    plain = NNsight(small._module, compile={"backend": "eager"})
    expected = Hooks(small._module).output("first", lambda h: h * 2.0)(a)

    def run(compile: bool) -> tuple[Any, Any]:
        with plain.trace(compile=compile) as tracer:
            with tracer.invoke(a):
                plain.first.output = plain.first.output * 2.0
                one = plain.output.save()
            with tracer.invoke():
                first = plain.first.output.save()
            with tracer.invoke():
                all_of_it = plain.output.save()
        return (one, first, all_of_it), tracer

    agree(run, (expected, small._module.first(a) * 2.0, expected))


@both
def test_other_values_in_the_same_shapes_need_no_new_work(small: Rows, compile: bool) -> None:
    def run(a: torch.Tensor, b: torch.Tensor, vector: torch.Tensor) -> None:
        expected = Hooks(small._module).output("first", lambda h: torch.cat([h[:2], h[2:] + vector]))(torch.cat([a, b]))
        with small.trace(compile=compile) as tracer:
            with tracer.invoke(a):
                one = small.output.save()
            with tracer.invoke(b):
                small.first.output = small.first.output + vector
                two = small.output.save()
        assert torch.equal(torch.cat([one, two]), expected)

    run(torch.randn(2, 4), torch.randn(3, 4), torch.randn(4))
    fx.counters.reset()
    for _ in range(3):
        run(torch.randn(2, 4), torch.randn(3, 4), torch.randn(4))
    assert fx.counters.captures == fx.counters.recordings == fx.counters.compiles == 0


@both
def test_sizes_of_invokes_may_vary(small: Rows, compile: bool) -> None:
    for rows in [(1, 2), (2, 3), (3, 3), (4, 1), (2, 3), (1, 1, 1), (5, 2, 3)]:
        inputs = [torch.randn(size, 4) for size in rows]
        outs: list[Any] = []
        seen: list[Any] = []
        with small.trace(compile=compile) as tracer:
            for x in inputs:
                with tracer.invoke(x):
                    seen.append(small.first.output)
                    outs.append(small.output)
        whole = torch.cat(inputs)
        same(torch.cat(seen), small._module.first(whole))
        same(torch.cat(outs), small._module(whole))
        assert [out.shape[0] for out in outs] == list(rows)


@both
@pytest.mark.parametrize(
    ("replacement", "error"),
    [
        (lambda h: h[:1], ReplacementShapeError),
        (lambda h: torch.cat([h, h]), ReplacementShapeError),
        (lambda h: h[:, :3], ReplacementShapeError),
        (lambda h: (h,), (ReplacementShapeError, ValueError)),
        (lambda h: 3.0, (ReplacementShapeError, TypeError)),
    ],
    ids=["fewer rows", "more rows", "narrower", "tuple", "number"],
)
def test_a_replacement_that_does_not_fit_the_rows_is_refused(
    small: Rows, a: torch.Tensor, b: torch.Tensor, compile: bool, replacement: Any, error: Any
) -> None:
    with pytest.raises(error, match=r"`model\.first\.output`"):
        with small.trace(compile=compile) as tracer:
            with tracer.invoke(a):
                small.first.output = replacement(small.first.output)
            with tracer.invoke(b):
                small.output.save()
    assert_no_instrumentation(small._module)
    with small.trace(a, compile=compile):
        out = small.output.save()
    same(out, small._module(a))


# -- prompts ----------------------------------------------------------------------------------------------------------

LONG = "The Colosseum is in the city of"
MIDDLE = "The Eiffel Tower is in"
SHORT = "The"


@pytest.fixture(scope="module")
def demo() -> LanguageModel:
    """A random model with the tokenizer of the demo."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2, n_embd=32, n_head=2, n_positions=64, vocab_size=1024, initializer_range=0.2,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    module = transformers.GPT2LMHeadModel(config).eval()
    return LanguageModel(module, demo_model().tokenizer, compile={"backend": "eager"})


def alone(model: LanguageModel, prompt: Any, **kwargs: Any) -> torch.Tensor:
    """Logits of one prompt, by the module itself and without padding."""
    ids = torch.tensor([model.tokenizer(prompt)["input_ids"]])
    return model._module(input_ids=ids, **kwargs).logits


def padded(model: LanguageModel, *prompts: str) -> dict[str, torch.Tensor]:
    """Left-padded batch with positions, made without this package."""
    rows = [model.tokenizer(prompt)["input_ids"] for prompt in prompts]
    width = max(len(row) for row in rows)
    ids = torch.tensor([[model.tokenizer.pad_token_id] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}


def test_prompts_of_several_lengths_are_what_they_are_alone(demo: LanguageModel) -> None:
    whole = demo._module(**padded(demo, SHORT, LONG, MIDDLE)).logits

    def run(compile: bool) -> tuple[Any, Any]:
        with demo.trace(compile=compile) as tracer:
            with tracer.invoke(SHORT):
                short = demo.lm_head.output.save()
            with tracer.invoke([LONG, MIDDLE]):
                two = demo.lm_head.output.save()
            with tracer.invoke():
                everything = demo.lm_head.output.save()
        return (short, two, everything), tracer

    agree(run, (whole[:1], whole[1:], whole))
    for row, prompt in enumerate([SHORT, LONG, MIDDLE]):
        logits = alone(demo, prompt)
        torch.testing.assert_close(whole[row : row + 1, -logits.shape[1] :], logits, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_an_edit_of_one_prompt_is_that_edit_alone_and_leaves_the_other(demo: LanguageModel) -> None:
    path = "transformer.h.1"

    def edit(h: torch.Tensor) -> torch.Tensor:
        h = h.clone()
        h[:, -1] *= -2.0
        return h

    ids = torch.tensor([demo.tokenizer(MIDDLE)["input_ids"]])
    edited = Hooks(demo._module).output(path, edit)(input_ids=ids).logits

    def run(compile: bool) -> tuple[torch.Tensor, torch.Tensor]:
        with demo.trace(compile=compile) as tracer:
            with tracer.invoke(LONG):
                untouched = demo.lm_head.output.save()
            with tracer.invoke(MIDDLE):
                demo.get(path).output[:, -1] *= -2.0
                changed = demo.lm_head.output[:, -1].save()
        return untouched, changed

    plain = demo._module(**padded(demo, LONG, MIDDLE)).logits
    for compile in (False, True):
        untouched, changed = run(compile)
        assert torch.equal(untouched, plain[:1])
        torch.testing.assert_close(changed, edited[:, -1], rtol=1e-4, atol=1e-4)
        assert (changed - plain[1:, -1]).abs().max() > 0.01


MIXED: dict[str, Callable[[Any], tuple[Any, Any]]] = {
    "text and 2-D ids": lambda tokenizer: (LONG, torch.tensor([tokenizer(SHORT)["input_ids"]])),
    "list of ids and text": lambda tokenizer: (tokenizer(LONG)["input_ids"], SHORT),
    "encoding and text": lambda tokenizer: (tokenizer(LONG, return_tensors="pt"), SHORT),
    "array and list of texts": lambda tokenizer: (tokenizer(LONG, return_tensors="np")["input_ids"], [SHORT]),
    "dict and 1-D ids": lambda tokenizer: ({"input_ids": LONG}, torch.tensor(tokenizer(SHORT)["input_ids"])),
}


class Positions(torch.nn.Module):
    """Adds the same embedding to each row: the output of ``table`` has all rows in the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.table = Repeated()
        self.last = torch.nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(x + self.table(x))


class Repeated(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.arange(4.0).expand(len(x), -1)


@pytest.mark.parametrize("size", [1, 2])
@both
def test_rows_in_the_same_memory_are_edited_one_by_one(size: int, compile: bool) -> None:
    model = Rows(Positions(), compile={"backend": "eager"})
    x, y, z = torch.randn(3, size, 4).unbind()
    with model.trace(compile=compile) as tracer:
        with tracer.invoke(x):
            model.table.output[:, 0] += 10.0
            one = model.output.save()
        with tracer.invoke(y):
            seen = model.table.output.save()
            two = model.output.save()
        with tracer.invoke(z):
            model.table.output.zero_()
            three = model.output.save()
    last = model._module.last
    plain = torch.arange(4.0)
    same(seen, plain.expand(size, -1))
    for found, expected in ((one, x + torch.tensor([10.0, 1.0, 2.0, 3.0])), (two, y + plain), (three, z)):
        torch.testing.assert_close(found, last(expected))


@pytest.mark.parametrize("kinds", MIXED)
@both
def test_forms_of_input_mix(demo: LanguageModel, kinds: str, compile: bool) -> None:
    one, two = MIXED[kinds](demo.tokenizer)
    with demo.trace(compile=compile) as tracer:
        with tracer.invoke(one):
            long = demo.lm_head.output[:, -1].save()
        with tracer.invoke(two):
            short = demo.lm_head.output[:, -1].save()
    expected = demo._module(**padded(demo, LONG, SHORT)).logits[:, -1]
    same(torch.cat([long, short]), expected)


@both
def test_an_invoke_may_have_its_input_by_name(demo: LanguageModel, compile: bool) -> None:
    ids = torch.tensor([demo.tokenizer(SHORT)["input_ids"]])
    with demo.trace(compile=compile) as tracer:
        with tracer.invoke(LONG):
            pass
        with tracer.invoke(input_ids=ids):
            short = demo.lm_head.output[:, -1].save()
    same(short, demo._module(**padded(demo, LONG, SHORT)).logits[1:, -1])


