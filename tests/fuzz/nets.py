"""Random models for the fuzzer: small modules that nest, and a builder from a description to a model.

Every part maps ``[batch, length, WIDTH]`` to the same shape, so any part can stand in any other. What parts return to
*their parent* varies: a tensor, a tuple, a dict, a view, their own argument.

A description (``Spec``) is a nest of tuples: ``("linear",)``, ``("residual", child)``, ``("branch", left, right)`` or
``("sequence", child, ...)``. The same description and seed give the same weights. ``("llama",)`` and the other names of
:data:`~tests.fuzz.stock.DECODERS` stand for whole language models, which are no parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st

from .sizes import VOCABULARY, WIDTH
from .stock import BREAKING_STOCK, DECODERS, STOCK, Language

Spec = Any


def scaled(x: torch.Tensor, by: float) -> torch.Tensor:
    return x * by


class Residual(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


class Branch(torch.nn.Module):
    """Two ways, in a ``ModuleDict``."""

    def __init__(self, left: torch.nn.Module, right: torch.nn.Module) -> None:
        super().__init__()
        self.ways = torch.nn.ModuleDict({"left": left, "right": right})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ways["left"](x) * torch.sigmoid(self.ways["right"](x))


class Pair(torch.nn.Module):
    """Returns a tuple."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        return self.inner(x), x * 0.5, None


class Unpair(torch.nn.Module):
    """Uses both parts of a tuple, all by keyword."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.pair = Pair(inner)
        self.gate = Gate()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, _ = self.pair(x)
        return self.gate(x=first, by=second)


class Gate(torch.nn.Module):
    def forward(self, x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        return x * by + x


class Named(torch.nn.Module):
    """Returns a dict with a nested list."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor, factor: float = 1.0) -> dict[str, Any]:
        y = self.inner(x)
        return {"hidden": y * factor, "more": [y, 3]}


class Unnamed(torch.nn.Module):
    """Uses a dict, and passes one argument by position and one by keyword."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.named = Named(inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.named(x, factor=0.5)
        return found["hidden"] + found["more"][0] / found["more"][1]


class Twice(torch.nn.Module):
    """Calls one module two times."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.inner(x))


class Shared(torch.nn.Module):
    """Has one module at two paths."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.parts = torch.nn.ModuleList([inner, torch.nn.Tanh(), inner])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x)
        return x


class InPlace(torch.nn.Module):
    """Changes its own intermediate result."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x) * 1.0
        y[:, 0] += 1.0
        y[:, 1:].mul_(0.5)
        return y


class EditsArgument(torch.nn.Module):
    """Gives a child a tensor that the child changes in place, and uses it afterwards."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.doubler = Doubler()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x).clone()
        z = self.doubler(y)
        return y + z


class Doubler(torch.nn.Module):
    """Changes its argument and returns it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2.0)


class Ops(torch.nn.Module):
    """Has operations that blocks name behind ``.source``."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = scaled(x, 2.0)
        y = torch.tanh(y)
        y = self.inner(y)
        return torch.add(y, x)


class OpsByHand(Ops):
    """:class:`Ops` with its operations written out as calls that can be watched, for the reference.

    Attributes:
        watch: Called with the name of an operation, ``"input"`` or ``"output"``, and the value; returns the value.
    """

    watch: Callable[[str, str, Any], Any] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self._call("scaled_0", scaled, x, 2.0)
        y = self._call("torch_tanh_0", torch.tanh, y)
        y = self.inner(y)
        return self._call("torch_add_0", torch.add, y, x)

    def _call(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        if self.watch is None:
            return function(*args)
        args, kwargs = self.watch(name, "input", (args, {}))
        return self.watch(name, "output", function(*args, **kwargs))


class Running(torch.nn.Module):
    """Updates buffers in its forward."""

    calls: torch.Tensor
    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.mean.mul_(0.5).add_(x.detach().mean((0, 1)), alpha=0.5)
        return x - self.mean


class Attention(torch.nn.Module):
    """Mixes positions."""

    def __init__(self) -> None:
        super().__init__()
        self.project = torch.nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        keys, values = self.project(x).chunk(2, dim=-1)
        return torch.nn.functional.scaled_dot_product_attention(x, keys, values)


class Looks(torch.nn.Module):
    """Returns a view of its argument."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, :]


class Disabled(torch.nn.Module):
    """Is none of dynamo's business: it breaks the graph around itself, and runs as Python."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    @torch.compiler.disable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + 1.0


@torch.compiler.disable
def say(text: str) -> None:
    print(text)


class Says(torch.nn.Module):
    """Breaks the graph in the middle, by a call that dynamo must not trace, and has a side effect there."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.last = torch.nn.Tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        say(f"model: {tuple(y.shape)}")
        return self.last(y)


class Chooses(torch.nn.Module):
    """Goes one way or another by the values it has."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.other = torch.nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        if y.detach().sum() > 0.01:
            return self.other(y) * 0.5
        return self.other(y) + 0.5


class Net(torch.nn.Module):
    """Embedding (unless the input is hidden states), body and head; returns a tensor, a tuple or a dict."""

    def __init__(self, body: torch.nn.Module, ids: bool, returns: str) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, WIDTH) if ids else None
        self.body = body
        self.head = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.returns = returns

    def forward(self, x: torch.Tensor) -> Any:
        hidden = x if self.embed is None else self.embed(x)
        hidden = self.body(hidden)
        logits = self.head(hidden)
        if self.returns == "tuple":
            return logits, hidden
        return {"logits": logits, "hidden": hidden} if self.returns == "dict" else logits


LEAVES: dict[str, Callable[[], torch.nn.Module]] = {
    "linear": lambda: torch.nn.Linear(WIDTH, WIDTH),
    "tanh": torch.nn.Tanh,
    "norm": lambda: torch.nn.LayerNorm(WIDTH),
    "identity": torch.nn.Identity,
    "dropout": lambda: torch.nn.Dropout(0.5),
    "running": Running,
    "attention": Attention,
    "looks": Looks,
    "relu": lambda: torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(inplace=True)),
}
WRAPPERS: dict[str, Callable[[torch.nn.Module], torch.nn.Module]] = {
    "residual": Residual,
    "unpair": Unpair,
    "unnamed": Unnamed,
    "twice": Twice,
    "shared": Shared,
    "inplace": InPlace,
    "edits": EditsArgument,
    "ops": Ops,
}

#: Parts that break the graph.
BREAKING: dict[str, Callable[[torch.nn.Module], torch.nn.Module]] = {
    "disabled": Disabled,
    "says": Says,
    "chooses": Chooses,
}

#: Parts without others in them: so many more of the first kind that about two models of five have one of the second.
leaves = st.sampled_from([(name,) for name in [*LEAVES] * 4 + [*STOCK]])

specs = st.recursive(
    leaves,
    lambda children: st.one_of(
        st.tuples(st.sampled_from(list(WRAPPERS)), children),
        st.tuples(st.just("branch"), children, children),
        st.lists(children, min_size=1, max_size=3).map(lambda parts: ("sequence", *parts)),
    ),
    max_leaves=5,
)

#: Whole language models.
decoders = st.sampled_from([(name,) for name in DECODERS])


@st.composite
def stock_specs(draw: Any) -> Spec:
    """Draw a model that has a stock part, perhaps between others."""
    part = (draw(st.sampled_from([*STOCK])),)
    around = draw(st.sampled_from(["", *WRAPPERS, "branch", "sequence"]))
    if around == "branch":
        part = (around, part, draw(specs))
    elif around == "sequence":
        part = (around, draw(specs), part, draw(leaves))
    elif around:
        part = (around, part)
    return part


@st.composite
def broken_specs(draw: Any, stock: bool = False) -> Spec:
    """Draw a model with one part that breaks its graph, between others; with ``stock`` a stock part is in it."""
    small = st.recursive(
        st.sampled_from([(name,) for name in STOCK]) if stock else leaves,
        lambda children: st.tuples(st.sampled_from(list(WRAPPERS)), children),
        max_leaves=2,
    )
    breaking = (draw(st.sampled_from(list(BREAKING))), draw(small))
    around = draw(st.sampled_from(["", "residual", "twice"]))
    middle = (around, breaking) if around else breaking
    parts = [*draw(st.lists(small, max_size=1)), middle, *draw(st.lists(small, max_size=1))]
    return ("sequence", *parts)


def is_broken(spec: Spec) -> bool:
    """Whether the model breaks its graph."""
    kind, *children = spec
    return kind in BREAKING or kind in BREAKING_STOCK or any(is_broken(child) for child in children)


def chooses(spec: Spec) -> bool:
    """Whether the way that the model takes depends on values."""
    kind, *children = spec
    return kind == "chooses" or any(chooses(child) for child in children)


def _part(spec: Spec, by_hand: bool) -> torch.nn.Module:
    kind, *children = spec
    if not children:
        return {**LEAVES, **STOCK}[kind]()
    parts = [_part(child, by_hand) for child in children]
    if kind == "sequence":
        return torch.nn.Sequential(*parts)
    if kind == "branch":
        return Branch(*parts)
    if kind == "ops" and by_hand:
        return OpsByHand(*parts)
    return {**WRAPPERS, **BREAKING}[kind](*parts)


def build(spec: Spec, ids: bool = False, returns: str = "tensor", by_hand: bool = False) -> torch.nn.Module:
    """Return the model described by ``spec``, in evaluation mode, with seeded weights.

    Args:
        spec: The body, or the decoder.
        ids: Whether the input is token ids rather than hidden states.
        returns: ``tensor``, ``tuple`` or ``dict``; a decoder returns its cache in the last two.
        by_hand: Whether operations can be watched without the package, for the reference.
    """
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if spec[0] in DECODERS:
            return Language(DECODERS[spec[0]](), returns).eval()
        return Net(_part(spec, by_hand), ids, returns).eval()


def make_input(ids: bool, batch: int, length: int, seed: int) -> torch.Tensor:
    """Return an input of the given sizes."""
    generator = torch.Generator().manual_seed(seed)
    if ids:
        return torch.randint(0, VOCABULARY, (batch, length), generator=generator)
    return torch.randn(batch, length, WIDTH, generator=generator)
