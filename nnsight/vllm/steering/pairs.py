"""The hidden state in the pair of tensors that a layer returns.

Many layers of vLLM return two tensors. In most models they are ``(hidden, residual)``, the next layer adds them, and the hidden state is
the *sum*. In other models the first tensor is the *whole* hidden state. There the second tensor is left over from the layer, and the next
layer ignores it.

The two look alike, so they are distinguished by what the next layer does with the pair, or the final norm after the last layer. When the
model has been loaded, it runs once on a few tokens. Each module that gets a pair is called again, on random tensors: with two tensors, with
these two swapped, and with another second or first tensor. If swapping changes nothing, the module uses the sum. If the second tensor
changes nothing, the first one is the whole. A layer for which neither holds has no ``.residual``, and no edits in the graph.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .graph_parts import is_layer

_log = logging.getLogger("nnsight.vllm")

#: What the hidden state is: the sum of the pair, or its first tensor; or this is not known.
SUM, WHOLE, UNKNOWN = "sum", "whole", "unknown"

#: Largest difference between results that count as equal, as a part of the change by another input.
_TOLERANCE = 1e-3


def form_of(module: Any, location: str) -> str:
    """Return :data:`SUM` or :data:`WHOLE` for the pairs that a layer returns. Raise ``ValueError`` if the form is not known."""
    form: str = getattr(module, "nnsight_pair", SUM)
    if form == UNKNOWN:
        raise ValueError(
            f"`{location}` is a pair, and it could not be found out how the hidden state follows from it: the next layer neither adds the "
            "two tensors nor ignores the second one. So this layer has no `.residual`, and cannot be steered. Use `.output` in a block."
        )
    return form


def find_forms(model: torch.nn.Module, run: Callable[[], Any]) -> None:
    """Find the form of the pairs of each layer of ``model``, and note it as ``nnsight_pair`` of the layer. ``run`` runs the model once."""
    layers = {path: module for path, module in model.named_modules() if is_layer(path)}
    watch = _Watch(model, layers)
    try:
        with _uncompiled(model), watch.installed(), torch.no_grad():
            run()
    except Exception as error:
        _log.warning(
            "The model failed on a few tokens, so what its layers return could not be checked. Where they return two tensors, `.residual` "
            "and steering take the hidden state to be the sum: %r",
            error,
        )
        watch.pairs.clear()
    by_class = defaultdict(set)
    for path, form in watch.found.items():
        by_class[type(layers[path])].add(form)
    for path, layer in layers.items():
        known = by_class[type(layer)]
        alike = next(iter(known)) if len(known) == 1 else UNKNOWN
        found: Any = layer
        found.nnsight_pair = watch.found.get(path, alike) if path in watch.pairs else SUM


@contextmanager
def _uncompiled(model: torch.nn.Module) -> Iterator[None]:
    """Let vLLM compile no part of ``model`` inside of this context, because compiled code does not call hooks."""
    parts: list[Any] = [module for module in model.modules() if "do_not_compile" in vars(module)]
    before = [part.do_not_compile for part in parts]
    for part in parts:
        part.do_not_compile = True
    try:
        yield
    finally:
        for part, value in zip(parts, before, strict=True):
            part.do_not_compile = value


class _Watch:
    """Watches a run of ``model``: the pairs that its ``layers`` return, and what the next module does with each of them.

    Attributes:
        pairs: The layers that return pairs, by path.
        found: The form of the pairs, by path of the layer, where it is known.
    """

    def __init__(self, model: torch.nn.Module, layers: dict[str, torch.nn.Module]) -> None:
        self._model, self._layers = model, layers
        self.pairs: dict[str, Any] = {}
        self.found: dict[str, str] = {}
        self._last: tuple[str, torch.Tensor, torch.Tensor] | None = None  # the last layer that has returned a pair, and its pair
        self._inside = 0  # the number of layers that are running

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Watch inside of this context."""
        with ExitStack() as hooks:
            for path, module in self._model.named_modules():
                hooks.callback(module.register_forward_pre_hook(self._before, with_kwargs=True).remove)
                if hasattr(module, "get_kv_cache_spec"):
                    hooks.callback(module.register_forward_hook(_zeroed).remove)
                if path in self._layers:
                    hooks.callback(module.register_forward_hook(self._after_layer(path)).remove)
            yield

    def _before(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if self._inside == 0 and self._last is not None:
            path, first, second = self._last
            given = pytree.tree_leaves((args, kwargs))
            if any(leaf is first for leaf in given):
                self._inside += 1  # the calls for the comparison are not watched
                form = _form_at(module, (args, kwargs), first, second)
                self._inside -= 1
                is_next = module in self._layers.values()
                if is_next or (form != UNKNOWN and path not in self.found):  # the next layer is the best witness
                    self.found[path] = form
        if module in self._layers.values():
            self._inside += 1

    def _after_layer(self, path: str) -> Callable[..., None]:
        def after(module: torch.nn.Module, args: Any, output: Any) -> None:
            self._inside -= 1
            if self._inside:
                return
            self._last = None
            if isinstance(output, tuple) and len(output) > 1 and all(isinstance(leaf, torch.Tensor) for leaf in output[:2]):
                self.pairs[path] = module
                self._last = path, output[0], output[1]

        return after


def _zeroed(module: torch.nn.Module, args: Any, output: Any) -> Any:
    """Return zeros as the output of attention. Without a cache, attention returns memory that it has not written to."""
    return torch.zeros_like(output) if isinstance(output, torch.Tensor) else output


def _form_at(module: Any, given: tuple[Any, Any], first: torch.Tensor, second: torch.Tensor) -> str:
    """Return the form of the pair ``(first, second)``, from what ``module`` does with it. ``given`` are its arguments."""
    if not any(leaf is second for leaf in pytree.tree_leaves(given)):
        return WHOLE
    if first.shape != second.shape or not first.is_floating_point():
        return UNKNOWN
    draw = torch.Generator().manual_seed(0)
    drawn = [torch.randn(first.shape, generator=draw).to(first) for _ in range(3)]

    def called(one: int, two: int) -> torch.Tensor:
        chosen = {id(first): drawn[one], id(second): drawn[two]}

        def replaced(leaf: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = chosen.get(id(leaf), leaf)
            return found.clone()  # the module may write to it

        args, kwargs = pytree.tree_map_only(torch.Tensor, replaced, given)
        with _same_experts():
            results = pytree.tree_leaves(module.forward(*args, **kwargs))
        tensors = [leaf for leaf in results if isinstance(leaf, torch.Tensor) and leaf.shape[:1] == first.shape[:1]]
        used = [leaf for leaf in tensors if not torch.equal(leaf, drawn[two])]  # a tensor that is only passed on says nothing
        return torch.cat([first.new_zeros(len(first), 1).float(), *(leaf.reshape(len(leaf), -1).float() for leaf in used)], -1)

    base, swapped, other_second, other_first = called(0, 1), called(1, 0), called(0, 2), called(2, 1)
    if len({result.shape for result in (base, swapped, other_second, other_first)}) > 1:
        return UNKNOWN
    by_first, by_second = _difference(base, other_first), _difference(base, other_second)
    if by_second <= _TOLERANCE * by_first:
        return WHOLE if by_first else UNKNOWN
    return SUM if _difference(base, swapped) <= _TOLERANCE * min(by_first, by_second) else UNKNOWN


def _difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the median over the rows of the largest difference. A few rows may be sent to other experts because of rounding."""
    return float((one - other).abs().amax(-1).median())


@contextmanager
def _same_experts() -> Iterator[None]:
    """Restore vLLM's number of the next layer with experts after this context, which calls a module once more."""
    context: Any = None
    with suppress(Exception):  # there is none outside of an engine
        from vllm.forward_context import get_forward_context

        context = get_forward_context()
    number = getattr(context, "moe_layer_index", None)
    try:
        yield
    finally:
        if number is not None:
            context.moe_layer_index = number
