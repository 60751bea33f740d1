"""Roots of trees of envoys: of any class, under any path, with further names."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from nnsight import Envoy, NNsight
from nnsight.intervention.envoy import traceable
from nnsight.tracing.backend import ExecutionBackend

from ..conftest import both, close


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.rest = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(4, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rest(self.first(x))

    def doubled(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self(x)


X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


class Marked(Envoy):
    @property
    def twice(self) -> torch.Tensor:
        return self.output * 2


@pytest.mark.parametrize("kind", [Envoy, NNsight])
def test_a_root_has_a_path_further_names_and_classes(kind: Any) -> None:
    net = Net().eval()
    root = kind(net, path="net", rename={"first": "start", "rest": "tail"}, envoys={torch.nn.Sequential: Marked, "tail.1": Marked})
    assert (root.path, root.start.path, root.tail[1].path) == ("net", "net.first", "net.rest.1")
    with root.trace(X):
        hidden = root.start.output.save()
        root.tail[0].output[:] += 1
        last = root.rest[1].twice.save()
        twice = root.tail.twice.save()
    close(hidden, net.first(X))
    close(twice, 2 * net.rest[1](net.first(X).relu() + 1))
    close(last, twice)
    positional = kind(net, "net", None, {"first": "start"}, Marked, None)
    assert positional.start.path == "net.first" and isinstance(positional.rest[0], Marked)


def test_wrappers_under_several_paths_have_runs_of_their_own() -> None:
    net = Net().eval()
    one, other, plain = NNsight(net, path="one"), NNsight(net, path="other"), NNsight(net)
    for root in (one, other, plain, one):
        with root.trace(X) as tracer:
            cache = tracer.cache()
            out = root.output.save()
        close(out, net(X))
        assert cache.keys()[0].startswith(f"{root.path}.")
        close(cache[f"{root.path}.first"].output, net.first(X))


@pytest.mark.parametrize("mode", ["compiled", "as data", "copied", "pickled"])
def test_the_path_goes_along(mode: str) -> None:
    net = Net().eval()
    root = NNsight(net, path="net", rename={"rest": "tail"}, compile={"backend": "eager"} if mode == "compiled" else False)
    where = {"remote": "local"} if mode == "as data" else {}
    if mode == "copied":
        root = copy.deepcopy(root)
    if mode == "pickled":
        root = pickle.loads(pickle.dumps(root))
    with root.trace(X, **where) as tracer:
        root.first.output[:] = 1.0
        out = root.tail.output.save()
    assert root.tail.path == "net.rest" and (mode != "compiled" or tracer.report.mode == "compiled")
    close(out, net.rest(torch.ones(3, 4)))
    with root.edit() as edited:
        edited.first.output[:] = 0.0
    close(edited(X), net.rest(torch.zeros(3, 4)))


class Reading(Envoy):
    """A class of envoys of somebody's own, with a method to trace."""

    def __init__(self, module: torch.nn.Module, *args: Any, scale: float = 2.0, **kwargs: Any) -> None:
        super().__init__(module, *args, **kwargs)
        self.scale = scale

    @traceable
    def read(self, x: torch.Tensor) -> torch.Tensor:
        return self._module(x) * self.scale


@both
@pytest.mark.parametrize("kind", [Envoy, Reading])
def test_a_root_of_any_class_is_one_like_nnsight(kind: Any, compile: bool) -> None:
    net = Net().eval()
    root = kind(net, "net", compile={"backend": "eager"} if compile else False)
    assert isinstance(root, NNsight) and type(root).__name__ == ("NNsight" if kind is Envoy else "Reading")
    assert root.first.parent is root and root.rest[0].root is root and root.parent is None
    for known in (root, pickle.loads(pickle.dumps(root)), copy.deepcopy(root)):
        assert isinstance(known, kind)
        with known.trace(X) as tracer:
            known.first.output[:] = 1.0
            out = known.output.save()
        assert tracer.report.mode == ("compiled" if compile else "eager")
        close(out, net.rest(torch.ones(3, 4)))
        with known.doubled(X) as tracer:
            hidden = known.first.output.save()
        close(hidden, net.first(X))
    with root.edit(inplace=True):
        root.first.output[:] = 0.0
    close(root(X), net.rest(torch.zeros(3, 4)))


@both
def test_a_traceable_method_of_a_root_of_any_class(compile: bool) -> None:
    net = Net().eval()
    root = Reading(net, compile={"backend": "eager"} if compile else False)
    with root.read(X) as tracer:
        root.first.output[:] = 1.0
        result = tracer.result.save()
    close(result, 2 * net.rest(torch.ones(3, 4)))
    close(root.read(X), 2 * net(X))


@both
def test_an_edit_is_given_to_a_backend(compile: bool) -> None:
    class Counted(ExecutionBackend):
        calls = 0

        def __call__(self, tracer: Any) -> None:
            Counted.calls += 1
            super().__call__(tracer)

    net = Net().eval()
    root = NNsight(net, compile={"backend": "eager"} if compile else False)
    for envoy in (root, root.rest):
        with envoy.edit(backend=Counted()) as edited:
            root.rest[0].output[:] = 1.0
        with edited.trace(X) as tracer:
            out = tracer.result.save()
        close(out, net.rest[1](torch.ones(3, 4)))
    assert Counted.calls == 2


@pytest.mark.parametrize("kind", [Envoy, NNsight])
def test_modules_below_a_root_may_have_any_name(kind: Any) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(4, 4))
    net.add_module("my-part", torch.nn.ReLU())
    root = kind(net)
    with root.trace(X):
        out = root.get("my-part").output.save()
    close(out, net(X))


def test_errors_name_the_path() -> None:
    root = NNsight(Net(), path="net")
    with pytest.raises(ValueError, match=r"`net\.first\.output`"):
        root.first.output  # noqa: B018


def test_arguments_of_roots_are_checked() -> None:
    for kind in (Envoy, NNsight):
        for wrong, says in (
            ({"path": ""}, "path= must be a dotted name"),
            ({"path": "a b"}, "path= must be a dotted name"),
            ({"interleaver": object()}, "each run has an interleaver of its own"),
            ({"parent": Envoy(Net())}, "set it as an attribute"),
        ):
            with pytest.raises(TypeError, match=says):
                kind(Net(), **wrong)
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        Envoy("gpt2")  # type: ignore[arg-type]


def test_a_method_of_the_module_runs_by_its_name() -> None:
    net = Net().eval()
    for compiled in (False, {"backend": "eager"}):
        root = NNsight(net, compile=compiled)
        with root.trace(X, fn="doubled") as tracer:
            root.first.output[:] = 1.0
            out = root.output.save()
            result = tracer.result.save()
        close(out, net.rest(torch.ones(3, 4)))
        close(result, 2 * out)
    with pytest.raises(AttributeError, match=r"trace\(fn='tripled'\): Net has no method"):
        root.trace(X, fn="tripled")


def test_a_copy_of_an_envoy_is_one() -> None:
    model = NNsight(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    assert type(copy.copy(model[0])) is type(model[0]) is Envoy
    assert type(copy.copy(model)) is NNsight
