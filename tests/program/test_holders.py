"""Tensors that a recorded block puts into objects of the user are the results, wherever they are."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch

import nnsight

from ..conftest import same

PROMPT = "Q: where is it?\nA:"


@dataclasses.dataclass
class Pair:
    first: Any = None
    rest: Any = dataclasses.field(default_factory=list)


class Slots:
    __slots__ = ("value",)


class Named(dict[str, Any]):
    pass


def put_in_attribute(pair: Any, value: torch.Tensor) -> None:
    pair.first = value
    pair.rest.append(value * 2)


#: How a holder is made, how a block fills it, and how the values are read afterwards.
HOLDERS: dict[str, tuple[Callable[[], Any], Callable[[Any, Any], None], Callable[[Any], Any]]] = {
    "a key that is a tuple": (dict, lambda held, value: held.__setitem__((0, 1), value), lambda held: held[0, 1]),
    "a key with a line break": (dict, lambda held, value: held.__setitem__(PROMPT, value), lambda held: held[PROMPT]),
    "a long key": (dict, lambda held, value: held.__setitem__("x" * 300, value), lambda held: held["x" * 300]),
    "defaultdict": (lambda: defaultdict(list), lambda held, value: held[3].append(value), lambda held: held[3][0]),
    "OrderedDict": (OrderedDict, lambda held, value: held.__setitem__("a", value), lambda held: held["a"]),
    "a subclass of dict": (Named, lambda held, value: held.__setitem__("a", value), lambda held: held["a"]),
    "deque": (deque, lambda held, value: held.append(value), lambda held: held[0]),
    "set": (set, lambda held, value: held.add(value), lambda held: next(iter(held))),
    "attributes": (Pair, put_in_attribute, lambda held: (held.first, held.rest)),
    "slots": (Slots, lambda held, value: setattr(held, "value", value), lambda held: held.value),
    "objects in a list": (list, lambda held, value: held.append(Pair(value)), lambda held: held[0].first),
    "list": (list, lambda held, value: held.append(value), lambda held: held[0]),
}


@pytest.fixture(scope="module")
def model() -> Any:
    return nnsight.demo_model()


@pytest.mark.parametrize("is_saved", [True, False], ids=["saved", "not saved"])
@pytest.mark.parametrize("where", [{"remote": "local"}, {"program": True}], ids=str)
@pytest.mark.parametrize("name", HOLDERS)
def test_values_in_objects_of_the_user(name: str, where: dict[str, Any], is_saved: bool, model: Any) -> None:
    make, put, read = HOLDERS[name]

    def run(**where: Any) -> Any:
        held = make()
        with torch.no_grad(), model.trace(PROMPT, **where):
            hidden = model.transformer.h[1].output
            hidden[:, -1] = 0
            put(held, hidden.save() if is_saved else hidden)
            put_elsewhere = model.lm_head.output[0, -1].save()
        return read(held), put_elsewhere, hidden if is_saved else None

    for _ in range(2):
        found = run(**where)
        same(found, run())
        assert not any(isinstance(leaf, torch._subclasses.FakeTensor) for leaf in torch.utils._pytree.tree_leaves(found))
    if is_saved and isinstance(found[0], torch.Tensor):
        assert found[0] is found[2], "the holder and the variable have one object"


def test_gradients_of_a_held_value(model: Any) -> None:
    """A program that runs here has results with gradients, also in an object of the user."""
    pair, factor = Pair(), torch.tensor(2.0, requires_grad=True)
    with model.trace(PROMPT, program=True):
        put_in_attribute(pair, model.transformer.h[1].output * factor)
        loss = model.lm_head.output.sum().save()
    assert loss.requires_grad
    (found,) = torch.autograd.grad(pair.first.sum(), factor)
    with model.trace(PROMPT):
        hidden = model.transformer.h[1].output.save()
    torch.testing.assert_close(found, hidden.sum())


@pytest.mark.parametrize("where", [{"remote": "local"}, {"program": True}], ids=str)
def test_values_without_names_take_no_name_of_the_user(where: dict[str, Any], model: Any) -> None:
    pair = Pair()
    with torch.no_grad(), model.trace(PROMPT, **where) as tracer:
        put_in_attribute(pair, model.transformer.h[1].output)
        _held = model.lm_head.output.save()
    with torch.no_grad(), model.trace(PROMPT):
        hidden, logits = model.transformer.h[1].output.save(), model.lm_head.output.save()
    same((pair.first, pair.rest[0], _held), (hidden, hidden * 2, logits))
    assert "save _held" in str(tracer.program) and str(tracer.program).count("\nsave ") == 1
