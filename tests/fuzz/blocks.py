"""Random blocks: for each of a few passages of a model, in order, some statements about the value there.

A *passage* is one occurrence of a location. A block is kept as data: actors (the invokes of a trace, or the edit before it), each
with segments, each with a passage and its statements. Statements are Python text in which three words are open, because the
program and the reference write them differently: ``AT`` is the value at the passage, ``SKIP`` skips the module there, and
``EARLY`` is a location that has gone by.

Statements are drawn from tables of templates. In a template ``T`` stands for a tensor in reach, ``V`` for another one, ``P`` for a
part of one, and ``N`` for a new name; all but ``P`` have the shape ``[batch, length, WIDTH]``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from hypothesis import strategies as st

from .nets import WIDTH, Net, OpsByHand, Spec, build, make_input

Draw = Callable[[Any], Any]


@dataclass(frozen=True)
class Place:
    """A tensor in the value at a passage.

    Attributes:
        access: Expression of the tensor; ``H`` is the value.
        rebuild: Expression of the value with ``E`` in place of the tensor.
    """

    access: str
    rebuild: str


@dataclass(frozen=True)
class Passage:
    """One occurrence of a location.

    Attributes:
        path: Of the module, or of an operation (``body.0.source.torch_tanh_0``).
        key: ``input`` or ``output``.
        occurrence: How often the location was passed before.
        places: Tensors in the value: the result, or the pair of arguments.
        first: Tensors in the first argument, if it is an input.
        whole: Expression of a result of this structure, with ``E`` for each tensor.
        floating: Whether the tensors are hidden states, and not ids.
    """

    path: str
    key: str
    occurrence: int
    places: tuple[Place, ...]
    first: tuple[Place, ...]
    whole: str
    floating: bool = True


def places_in(value: Any, access: str = "H", rebuild: str = "E") -> list[Place]:
    """Return where the tensors of ``value`` are: hidden states and ids."""
    if isinstance(value, torch.Tensor):
        usable = value.shape[-1] == WIDTH or not value.is_floating_point()
        return [Place(access, rebuild)] if usable else []
    found = []
    if isinstance(value, (tuple, list)):
        opening, closing = "()" if isinstance(value, tuple) else "[]"
        for index, item in enumerate(value):
            around = f"{opening}*{access}[:{index}], E, *{access}[{index + 1}:]{closing}"
            found += places_in(item, f"{access}[{index}]", _put(rebuild, around))
    if isinstance(value, dict):
        for key, item in value.items():
            found += places_in(item, f"{access}[{key!r}]", _put(rebuild, f"{{**{access}, {key!r}: E}}"))
    return found


def _put(template: str, expression: str) -> str:
    return re.sub(r"\bE\b", lambda _: expression, template)


def whole_of(value: Any) -> str:
    """Return an expression of a value of this structure, with ``E`` for each tensor."""
    if isinstance(value, torch.Tensor):
        return "E"
    if isinstance(value, tuple):
        return "(" + "".join(whole_of(item) + ", " for item in value) + ")"
    if isinstance(value, list):
        return "[" + ", ".join(whole_of(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {whole_of(item)}" for key, item in value.items()) + "}"
    return repr(value)


@lru_cache(maxsize=256)
def passages_of(spec: Spec, ids: bool, returns: str) -> tuple[Passage, ...]:
    """Return the passages of a model in the order in which a call meets them."""
    net = build(spec, ids, returns, by_hand=True)
    found: list[Passage] = []
    counts: dict[tuple[str, str], int] = {}

    def visit(path: str, key: str, value: Any) -> Any:
        occurrence = counts[path, key] = counts.get((path, key), -1) + 1
        first = ()
        if key == "input":
            args, kwargs = value
            first = tuple(places_in(args[0] if args else next(iter(kwargs.values()))))
        tensors = [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
        floating = all(leaf.is_floating_point() for leaf in tensors)
        found.append(Passage(path, key, occurrence, tuple(places_in(value)), first, whole_of(value), floating))
        return value

    with watched(net, visit), torch.no_grad():
        net(make_input(ids, 2, 3, 0))
    return tuple(found)


class watched:  # noqa: N801 - reads as a word
    """Calls ``visit(path, key, value)`` at each input and output of the modules and operations of a model, and uses what it returns.

    Plain torch hooks; operations are those of :class:`~tests.fuzz.nets.OpsByHand`.
    """

    def __init__(self, net: Net, visit: Callable[[str, str, Any], Any]) -> None:
        self.net, self.visit = net, visit

    def __enter__(self) -> None:
        self.handles: list[Any] = []
        for path, module in self.net.named_modules():

            def before(_: Any, args: Any, kwargs: Any, path: str = path) -> Any:
                return self.visit(path, "input", (args, kwargs))

            def after(_: Any, args: Any, out: Any, path: str = path) -> Any:
                return self.visit(path, "output", out)

            self.handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            self.handles.append(module.register_forward_hook(after))
            if isinstance(module, OpsByHand):
                module.watch = lambda name, key, value, path=path: self.visit(f"{path}.source.{name}", key, value)

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()
        for module in self.net.modules():
            if isinstance(module, OpsByHand):
                module.watch = None


# -- statements -------------------------------------------------------------------------------------------------------

#: What can be kept and noted.
READS = """
w.kept.append(T)
w.kept.append(T.clone())
w.kept.append(T[:, :])
w.kept.append(T[:, -1].T)
w.table["last"] = T * 2.0
w.table.setdefault("all", []).append((T, {"half": T / 2}))
w.box.value = T
w.log.append((tuple(T.shape), T.dtype, T.dim(), len(T)))
w.log.append((T.requires_grad, T.is_contiguous(), isinstance(T, torch.Tensor)))
w.total += T.detach().mean((0, 1))
w.counts += (T.detach() > 0).sum().long()
w.kept.append(T.argmax(-1))
w.kept.append(T.detach().sum())
N = T.clone().save()
""".strip().splitlines()

#: Expressions of the same shape.
EXPRESSIONS = """
T * 2.0
T
T.clone()
T + 1
T * w.number
T + w.vector
V
T - V
T @ w.matrix
w.number - T
T + w.total
T * w.scalar
torch.softmax(T, dim=-1)
torch.where(T > 0, T, w.vector * w.number)
torch.cat([T[..., 2:], T[..., :2]], dim=-1)
torch.zeros_like(T).scatter(-1, T.topk(2, dim=-1).indices, 1.0)
T.flip(1)
T.detach()
w.probe(T)
T.mean(1, keepdim=True) + T
T.cumsum(1)
T.transpose(1, 2).contiguous().transpose(1, 2)
torch.einsum("bld,de->ble", T, w.matrix)
T.double().float()
T.sort(-1).values
torch.stack(list(T.unbind(1)), 1)
T[:, torch.arange(T.shape[1] - 1, -1, -1)]
T / T.shape[1]
T - T[:, : T.shape[1] // 2].sum(1, keepdim=True)
T.expand_as(V)
T.view(T.shape[0], -1).view_as(T)
T - (T @ (w.vector / 2.0))[..., None] * w.vector
torch.lerp(T, V, 0.25)
T.masked_fill(T > 1.0, 0.0)
T.to(torch.float32)
T[:]
torch.nn.functional.layer_norm(T, (T.shape[-1],), w.vector)
(T > V).float()
T.pow(2).clamp(max=3.0)
T * torch.ones(T.shape[0], 1, 1)
torch.maximum(T, w.vector)
sum([T, V, w.vector])
T.index_select(2, w.counts.new_tensor([3, 2, 1, 0]))
torch.baddbmm(T, T, w.matrix.expand(T.shape[0], -1, -1))
""".strip().splitlines()

#: Expressions of a part that shares its memory with the tensor.
PARTS = """
T[:, 1:]
T[:, -1]
T[0]
T[..., :2]
T.transpose(0, 1)
T.mT[:, 1]
T.chunk(2, dim=-1)[1]
T.reshape(-1, T.shape[-1])
T.detach()[:, 0]
T.unbind(0)[0]
P[..., :1]
P.unsqueeze(0)
P[-1]
T.view(-1)
T.diagonal(dim1=1, dim2=2)
""".strip().splitlines()

#: Edits in place.
EDITS = """
T[:, -1] = 0
T += w.vector
T *= w.number
T[:, 1:] += 1.0
T[..., 0] = w.number
T[:] = V * 0.5
T[:] = w.vector
T.mul_(2).clamp_(-5, 5)
T[T > 0.5] = 0.25
T[0] += w.vector
T[:, 1:].transpose(1, 2)[:, 0] += w.number
T.add_(V, alpha=2)
T.copy_(V.flip(-1))
T.masked_fill_(T < 0, 0.0)
T.zero_()
T[:, [0, -1]] = 1.0
T -= V.mean()
T[:, ::2, 1:3] /= 2
T[0, 0, 0] = w.scalar
T.select(1, 0).fill_(3.0)
T[:, 0], T[:, -1] = T[:, -1].clone(), T[:, 0].clone()
P += w.number
P.mul_(0.5)
P[...] = 0.75
P -= P.mean()
w.vector *= 1.5
w.vector[0] = 1.0
w.vector[1:].add_(1.0)
w.total[:] = T.detach()[0, 0]
w.counts += 1
w.matrix.T[0] = w.vector
if w.kept and w.kept[-1].is_floating_point(): w.kept[-1].add_(1.0)
with torch.no_grad(): T.mul_(w.number)
""".strip().splitlines()

#: Statements that need a value, so that a compiled graph is cut.
CUTS = """
w.log.append(round(T.detach().sum().item(), 2))
N = T + 1.0 if T.sum() > 0 else T - 1.0
if (T > 0).all(): w.log.append("positive")
w.log.append(int(T.detach()[0, 0].argmax()))
N = T * float(T.detach().mean() > 0)
w.log.append(T[T > 0].numel())
w.log.append(torch.equal(T, V))
w.log.append((T.detach() > 0).tolist())
w.log.append(bool(w.total.sum() > 0) if T is V else T.detach().numpy().shape)
for _ in range(int((T > 0).sum()) % 3): T.add_(1.0)
""".strip().splitlines()

#: Mistakes.
MISTAKES = """
T + torch.ones(9)
T @ torch.ones(9, 9)
T[:, 99]
T.view(7, 7, 7)
raise KeyError("mine")
AT.no_such_name
model.no_such_module
EARLY
torch.cat([T, torch.ones(2)])
T.no_such_method()
1 / 0
w.kept.append(undefined_name)
assert T is None
""".strip().splitlines()


@dataclass(frozen=True)
class Segment:
    """What an actor does at a passage.

    Attributes:
        passage: Where.
        name: What the value is called.
        inputs: Whether all arguments are read, rather than the first.
        statements: What is done.
        early: A passage that has gone by, if a statement asks for one.
    """

    passage: Passage
    name: str
    inputs: bool
    statements: tuple[str, ...]
    early: Passage | None = None


@dataclass(frozen=True)
class Actor:
    """One invoke of a trace, or the edit before it.

    Attributes:
        kind: ``trace`` for a trace with its input, ``invoke``, ``all`` for an invoke without input, ``edit``.
        segments: What it does, in the order of the passages.
    """

    kind: str
    segments: tuple[Segment, ...]


@dataclass(frozen=True)
class BlockPlan:
    """A block as data.

    Attributes:
        actors: The edit, if any, then the invokes.
        stops: Whether the trace is stopped at the end of the last segment.
        caches: Whether a cache is kept.
        gradients: Names of tensors whose gradient is read in a backward pass at the end, in forward order.
        scales: Whether these gradients are doubled on the way.
        cuts: Whether a statement may need a value.
    """

    actors: tuple[Actor, ...]
    stops: bool = False
    caches: bool = False
    gradients: tuple[str, ...] = ()
    scales: bool = False
    cuts: bool = False

    @property
    def saved(self) -> list[str]:
        """Names that are saved."""
        statements = [line for actor in self.actors for segment in actor.segments for line in segment.statements]
        return [line.split(" = ")[0] for line in statements if line.endswith(".save()")]

    @property
    def rows(self) -> int:
        """Number of inputs it takes."""
        return sum(actor.kind in ("trace", "invoke") for actor in self.actors)


class _Author:
    """Draws the statements of one actor."""

    def __init__(self, draw: Draw, prefix: str, cutting: bool, noise: bool, may_save: bool) -> None:
        self.may_save = may_save
        self.draw, self.prefix, self.cutting = draw, prefix, cutting
        self.full: list[str] = ["w.noise"] if noise else []
        self.parts: list[str] = []
        self.count = 0
        self.cuts = False

    def fresh(self, letter: str) -> str:
        self.count += 1
        return f"{letter}{self.prefix}{self.count}"

    def fill(self, template: str, here: str, new: str = "") -> str:
        """Put names into a template."""
        found = template
        if re.search(r"\bP\b", template):
            part = self.draw(st.sampled_from(self.parts)) if self.parts else f"{here}[:, 1:]"
            found = re.sub(r"\bP\b", part, found)
        if re.search(r"\bV\b", template):
            found = re.sub(r"\bV\b", self.draw(st.sampled_from([here, *self.full])), found)
        if re.search(r"\bT\b", template):
            target = self.draw(st.sampled_from([here, here, *self.full[-3:]]))
            found = re.sub(r"(?<!\.)\bT\b", target, found)
        return re.sub(r"\bN\b", new, found)

    def expression(self, here: str) -> str:
        return self.fill(self.draw(st.sampled_from(EXPRESSIONS)), here)

    def statement(self, here: str, place: Place, value: str, writable: bool) -> list[str]:
        kinds = ["read", "edit", "write", "new", "part", "fill", *(["cut"] if self.cutting else [])]
        kind = self.draw(st.sampled_from(kinds))
        if kind == "read":
            line = self.fill(self.draw(st.sampled_from(READS)), here, self.fresh("s"))
            return [line if self.may_save else line.removesuffix(".save()")]
        if kind == "edit":
            template = self.draw(st.sampled_from(EDITS))
            if template.startswith("P "):  # `a[1:] += 1` with no name for the part would be an assignment to the tensor
                if not self.parts:
                    return [f"{here} += 1.0"]
            return [self.fill(template, here)]
        if kind in ("write", "fill"):
            if not writable:
                return [f"w.log.append(tuple({here}.shape))"]
            if kind == "fill" and "{**H" in place.rebuild and place.access.count("[") == 1 and ".input" not in value:
                return [f"{place.access.replace('H', value)} = {self.expression(here)}"]
            made = self.fresh("n")
            again = [f"w.kept.append({place.access.replace('H', 'AT')})"] if kind == "fill" else []
            filled = _put(place.rebuild, made).replace("H", value)
            lines = [f"{made} = {self.expression(here)}", f"AT = {filled}", *again]
            self.full.append(made)
            return lines
        if kind == "new":
            made = self.fresh("v")
            lines = [f"{made} = {self.expression(here)}"]
            self.full.append(made)
            return lines
        if kind == "part":
            made = self.fresh("p")
            lines = [f"{made} = {self.fill(self.draw(st.sampled_from(PARTS)), here)}"]
            self.parts.append(made)
            return lines
        self.cuts = True
        made = self.fresh("c")
        lines = [self.fill(self.draw(st.sampled_from(CUTS)), here, made)]
        if lines[0].startswith(made):
            self.full.append(made)
        return lines


def _segment(author: _Author, passage: Passage, number: int, mark: bool) -> tuple[Segment, str]:
    """Draw what happens at a passage; return it and the name of the tensor there."""
    draw = author.draw
    inputs = passage.key == "input" and draw(st.booleans())
    places = passage.first if passage.key == "input" and not inputs else passage.places
    value = f"h{author.prefix}{number}"
    place = draw(st.sampled_from(places))
    tensor = value
    statements: list[str] = []
    if place.access != "H":
        tensor = f"t{author.prefix}{number}"
        statements.append(f"{tensor} = {place.access.replace('H', value)}")
    if not passage.floating:
        statements.append(draw(st.sampled_from([f"w.kept.append({tensor})", f"w.log.append(tuple({tensor}.shape))"])))
        if draw(st.booleans()):
            filled = _put(place.rebuild, f"{tensor}.flip(1)").replace("H", value)
            statements.append(f"AT = {filled}")
        return Segment(passage, value, inputs, tuple(statements)), ""
    if mark:
        statements.append(f"{tensor}.requires_grad_()")
        author.cuts = True
    for _ in range(draw(st.integers(1, 3))):
        statements += author.statement(tensor, place, value, True)
    author.full.append(tensor)
    return Segment(passage, value, inputs, tuple(statements)), tensor


@st.composite
def blocks(draw: Draw, passages: tuple[Passage, ...], grad: bool) -> BlockPlan:
    """Draw a block for a model with these passages."""
    form = draw(st.sampled_from(["trace", "trace", "trace", "invokes", "edit"]))
    cutting = draw(st.sampled_from([False, False, True]))
    if form == "invokes":
        kinds = draw(st.sampled_from([["invoke"], ["invoke", "invoke"], ["invoke", "all"], ["invoke", "all", "invoke"]]))
    else:
        kinds = ["edit", "trace"] if form == "edit" else ["trace"]
    end = draw(st.sampled_from(["", "", "", "", "stop", "skip", "mistake", "gradient" if grad else ""]))
    actors, cuts, gradients = [], False, []
    for position, kind in enumerate(kinds):
        author = _Author(draw, "abc"[position], cutting and kind != "edit", kind == "trace", kind != "edit")
        able = [
            number
            for number, passage in enumerate(passages)
            if (passage.first if passage.key == "input" else passage.places)
            and (kind != "edit" or passage.occurrence == 0)
        ]
        chosen = sorted(draw(st.lists(st.sampled_from(able), min_size=kind == "trace", max_size=4, unique=True)))
        segments: list[Segment] = []
        last = position == len(kinds) - 1
        for order, number in enumerate(chosen):
            passage = passages[number]
            mark = end == "gradient" and kinds == ["trace"] and passage.floating
            segment, tensor = _segment(author, passage, order, mark)
            segments.append(segment)
            if mark and tensor:
                gradients.append(tensor)
            if end == "skip" and kinds == ["trace"] and _can_skip(passages, number, segment):
                segments[-1], after = _skipping(author, passages, number, segment, tensor)
                segments += [
                    _segment(author, passages[later], order + 1 + more, False)[0]
                    for more, later in enumerate(later for later in chosen if later in after)
                ]
                break
        if end == "mistake" and last and segments:
            segments[-1] = _mistaken(author, passages, chosen, segments[-1])
        actors.append(Actor(kind, tuple(segments)))
        cuts = cuts or author.cuts
    return BlockPlan(
        tuple(actors),
        stops=end == "stop" and kinds == ["trace"],
        caches=kinds == ["trace"] and end == "" and draw(st.sampled_from([False, False, False, True])),
        gradients=tuple(gradients),
        scales=bool(gradients) and draw(st.booleans()),
        cuts=cuts or bool(gradients),
    )


def _can_skip(passages: tuple[Passage, ...], number: int, segment: Segment) -> bool:
    passage = passages[number]
    return passage.key == "input" and passage.floating and ".source." not in passage.path


def _skipping(
    author: _Author, passages: tuple[Passage, ...], number: int, segment: Segment, tensor: str
) -> tuple[Segment, set[int]]:
    """Let the module at passage ``number`` be skipped; return the segment, and the passages that keep their numbers."""
    here = passages[number]
    until = next(
        later
        for later in range(number, len(passages))
        if (passages[later].path, passages[later].key, passages[later].occurrence) == (here.path, "output", here.occurrence)
    )
    inside = {passage.path for passage in passages[number + 1 : until]}
    after = {later for later in range(until, len(passages)) if passages[later].path not in inside}
    value = _put(passages[until].whole, "made")
    made = author.fresh("n")
    lines = (f"{made} = {author.expression(tensor)}", f"SKIP({value.replace('made', made)})")
    return Segment(segment.passage, segment.name, segment.inputs, (*segment.statements, *lines)), after


def _mistaken(author: _Author, passages: tuple[Passage, ...], chosen: list[int], segment: Segment) -> Segment:
    template = author.draw(st.sampled_from(MISTAKES))
    early = None
    if template == "EARLY":
        if not chosen[-1]:
            template = "1 / 0"
        else:
            early = passages[author.draw(st.integers(0, chosen[-1] - 1))]
            if early.occurrence or (early.path, early.key) == (segment.passage.path, segment.passage.key):
                template, early = "1 / 0", None
    here = author.full[-1] if author.full else segment.name
    wrong = re.sub(r"\bT\b", here, template)
    return Segment(segment.passage, segment.name, segment.inputs, (*segment.statements, wrong), early)


__all__ = ["WIDTH", "Actor", "BlockPlan", "Passage", "Segment", "blocks", "passages_of", "watched"]
