"""What a block can reach besides the model, and everything one can see after a run."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from .sizes import WIDTH


@dataclass
class World:
    """Tensors and numbers from outside, and containers that a block fills.

    Attributes:
        vector, matrix, scalar, noise: Tensors; ``noise`` has the shape of the first input's hidden states.
        total, counts: Tensors that blocks add to.
        number: A float.
        probe: A module that is no part of the model.
        kept, table, box: A list, a dict and an object to keep tensors in.
        log: A list for what is no tensor.
    """

    vector: torch.Tensor
    matrix: torch.Tensor
    scalar: torch.Tensor
    noise: torch.Tensor
    total: torch.Tensor
    counts: torch.Tensor
    number: float
    probe: torch.nn.Module
    kept: list[Any] = field(default_factory=list)
    table: dict[str, Any] = field(default_factory=dict)
    box: types.SimpleNamespace = field(default_factory=types.SimpleNamespace)
    log: list[Any] = field(default_factory=list)

    @contextlib.contextmanager
    def dropping(self) -> Iterator[None]:
        """Note errors because of values, and drop them."""
        try:
            yield
        except (IndexError, torch.linalg.LinAlgError) as error:
            self.log.append(type(error).__name__)

    @staticmethod
    def make(batch: int, length: int, seed: int) -> World:
        """Return a world; other seeds have other values of the same kinds."""
        with torch.random.fork_rng():
            torch.manual_seed(100 + seed)
            return World(
                vector=torch.randn(WIDTH),
                matrix=torch.randn(WIDTH, WIDTH),
                scalar=torch.randn(()),
                noise=torch.randn(batch, length, WIDTH),
                total=torch.zeros(WIDTH),
                counts=torch.zeros((), dtype=torch.int64),
                number=(0.5, -1.5, 2.0)[seed % 3],
                probe=torch.nn.Linear(WIDTH, WIDTH),
            )


@dataclass
class Outcome:
    """What one can see after a run.

    Attributes:
        error: What was raised.
        log: Values that are no tensors; they exist whether or not there was an error.
        values: Everything else, by name: result, inputs, externals, containers, buffers, gradients, cache.
    """

    error: Exception | None
    log: list[Any]
    values: dict[str, Any]


def _is_forbidden(error: Exception | None) -> bool:
    """Whether autograd refused to go back through an edit in place."""
    return isinstance(error, RuntimeError) and "modified by an inplace operation" in str(error)


def _is_forbidden_edit(error: Exception | None) -> bool:
    """Whether autograd refused an edit in place: of a leaf, or of one of several views."""
    return isinstance(error, RuntimeError) and any(words in str(error) for words in ("modified inplace", "leaf Variable that"))


def differences(found: Outcome, expected: Outcome, exact: bool, sharing: bool, partial: bool, flags: bool) -> list[str]:
    """Return what differs, one line each.

    Args:
        found: From the package.
        expected: From the reference.
        exact: Whether tensors have to agree bit by bit.
        sharing: Whether the same tensors have to share memory.
        partial: Whether the run was compiled, in which what autograd forbids may be found out later.
        flags: Whether tensors have to agree on whether they require gradients.
    """
    if _is_forbidden(expected.error) and "does not flow" in str(found.error):
        return []  # a block asks for gradients one by one, so it may find another mistake first
    flows_not = str(expected.error) == "no gradient"
    if partial and "cannot be computed" in str(found.error) and (expected.error is None or flows_not or _is_forbidden(expected.error)):
        return []  # no border is possible where an edit shares memory with something else
    late = ("the backward pass had passed this tensor", "Value was missed for <tensor")
    asked_late = any(words in str(found.error) for words in late)
    forbidden = _is_forbidden(expected.error) or (partial and _is_forbidden_edit(expected.error))  # which may be found out later
    if asked_late and (expected.error is None or flows_not or forbidden):
        return []  # blocks ask in reverse order of their statements; what is read at an input may be older than that
    if type(found.error) is not type(expected.error):
        return [f"raised {found.error!r} instead of {expected.error!r}"]
    lines: list[str] = []
    if partial and expected.error is not None:
        # What autograd forbids is not known before the graph runs, so the block may have gone on.
        found.log = found.log[: len(expected.log)] if isinstance(expected.error, RuntimeError) else found.log
    _compare("log", found.log, expected.log, exact, lines)
    if _is_forbidden(expected.error) or (partial and _is_forbidden_edit(expected.error)):
        return lines  # how far a backward pass came, and so which gradients were seen, is its own matter
    for name in expected.values:
        differing: list[str] = []
        _compare(name, found.values[name], expected.values[name], exact, differing)
        lines += differing if flags else [line for line in differing if ".requires_grad is " not in line]
    if sharing and not lines:
        mine, wanted = _groups(found.values), _groups(expected.values)
        if mine != wanted:
            lines.append(f"memory is shared by {mine} instead of {wanted}")
    return lines


def _compare(where: str, found: Any, expected: Any, exact: bool, lines: list[str]) -> None:
    if isinstance(expected, torch.Tensor):
        if type(found) is not torch.Tensor:
            lines.append(f"{where} is a {type(found).__name__}")
            return
        tolerance = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 1e-3, "atol": 1e-4}
        try:
            torch.testing.assert_close(found, expected, equal_nan=True, **tolerance)
        except AssertionError as error:
            lines.append(f"{where}: {str(error).splitlines()[0]} {found.tolist()} instead of {expected.tolist()}")
        except RuntimeError as error:  # autograd does not let it be used
            lines.append(f"{where} cannot be used: {error.__cause__ or error}")
            return
        if found.requires_grad != expected.requires_grad:
            lines.append(f"{where}.requires_grad is {found.requires_grad}")
        return
    if type(found) is not type(expected):
        lines.append(f"{where} is {found!r} instead of {expected!r}")
    elif isinstance(expected, dict):
        if list(found) != list(expected):
            lines.append(f"{where} has keys {list(found)} instead of {list(expected)}")
            return
        for key in expected:
            _compare(f"{where}[{key!r}]", found[key], expected[key], exact, lines)
    elif isinstance(expected, (list, tuple)):
        if len(found) != len(expected):
            lines.append(f"{where} has {len(found)} items instead of {len(expected)}")
        for number, (one, other) in enumerate(zip(found, expected, strict=False)):
            _compare(f"{where}[{number}]", one, other, exact, lines)
    elif found != expected and not _as_good(found, expected, exact):
        lines.append(f"{where} is {found!r} instead of {expected!r}")


def _as_good(found: Any, expected: Any, exact: bool) -> bool:
    """Whether two unequal values are both not a number, or numbers that are close enough."""
    if not isinstance(expected, float):
        return False
    return (found != found and expected != expected) or (not exact and abs(found - expected) < 0.02)


def _groups(values: dict[str, Any]) -> list[list[int]]:
    """Return which of the tensors, by number, share their memory."""
    flat = [leaf for leaf in torch.utils._pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    found: dict[int, list[int]] = {}
    for number, tensor in enumerate(flat):
        if tensor.numel():
            found.setdefault(tensor.untyped_storage()._cdata, []).append(number)
    return sorted(group for group in found.values() if len(group) > 1)
