"""Errors of a run: a block waited for something the model did not offer."""

from __future__ import annotations

from typing import Any


class MissedProviderError(ValueError):
    """A location was requested that the run did not offer after the request."""


class OutOfOrderError(MissedProviderError):
    """A location was requested after the model had passed it, or was never reached at all."""


class EarlyStopException(Exception):
    """Raised in a block by ``tracer.stop()``; ends the run without being an error."""


class SkipException(Exception):
    """Raised in a block that stands at the input of a module: ends the block, and the module returns ``value`` unrun."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.value = value


class UncompiledWarning(UserWarning):
    """A call of a compiled model, or a part of it, ran uncompiled. Its results are right, and take longer."""


class NNsightDeprecationWarning(FutureWarning):
    """The category for uses of this package that are to be written in another way."""


def passed_message(location: str, occurrence: int, visited: str | None) -> str:
    """Explain a request for a location that the run has already passed."""
    here = f" The block last stopped at `{visited}`." if visited else ""
    return (
        f"Value was missed for {location}.i{occurrence}: the model already ran past this point when the block "
        f"asked for it.{here} Within a block, read locations in the order in which the model runs them; "
        "move this line up, before the later location."
    )


def uncounted_message(location: str) -> str:
    """Explain a request for an operation that was not intercepted when the run passed it."""
    function, _, operation = location.rpartition(".source.")
    return (
        f"`{location}` cannot be served in this run: `{function}` had already run when the block first mentioned its "
        f"operations, and how often it passed this one is not known. Mention it before: write `….source.{operation.split('.')[0]}` "
        "at the top of the block or before the trace."
    )


def uncaptured_message(location: str) -> str:
    """Explain a request for an operation that a compiled model was captured without."""
    function, _, operation = location.rpartition(".source.")
    return (
        f"`{location}` is not in the captured graph: this compiled trace was under way when the block first mentioned the "
        f"operations of `{function}`. They are known from now on, so run the trace again; or write "
        f"`….source.{operation.split('.')[0]}` in the block itself or before the trace."
    )


def loop_ended_message(location: str, occurrence: int) -> str:
    """Say that a loop over occurrences has ended where the model had."""
    return (
        f"The loop ended at `{location}.i{occurrence}`, which was never reached: the model had finished. The effects of the "
        "loop so far are kept. The rest of this step and the code after the loop were not run. Bound the loop, as in "
        "`tracer.iter[:3]`, or put the code after it into an invoke of its own."
    )


def never_reached_message(location: str, occurrence: int, calls: int, visited: str | None, stopped: bool = False) -> str:
    """Explain a request that still waited when the model had finished, after ``calls`` occurrences of its location."""
    if location.startswith("barrier("):
        cause = "it was never reached by every block that takes part, and all of them have to call it"
    elif location.endswith(".grad"):
        cause = (
            "the backward pass had passed this tensor, or does not reach it. Gradients come in the reverse order of the "
            "forward pass: read those of later layers first"
        )
    elif stopped:
        cause = "another block had called tracer.stop(), which ends the run of all blocks, before the model came there"
    elif calls:
        cause = f"it occurred only {calls} time{'s' * (calls > 1)} in this run"
    else:
        cause = (
            "it never occurred in this run. Either the forward pass does not call this module (a container such as "
            "ModuleList, a branch that was not taken, a module inside one that was skipped, or a module whose "
            "parameters are used directly), or it ran before the block asked"
        )
    here = f" The block last stopped at `{visited}`." if visited else ""
    return f"Execution complete but `{location}.i{occurrence}` was not provided: {cause}.{here}"


class ReplacementShapeError(ValueError, RuntimeError):
    """A block replaced a tensor of the model by one of another shape, and the model cannot go on with it.

    Compiled traces raise it at the replacement, because the captured graph is for the model's shapes. Eager traces
    raise it when the model fails after such a replacement; the model's own error is the cause.
    """


def replacement_message(location: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> str:
    """Explain a replacement of another shape."""
    return f"The replacement of `{location}` has shape {shape}, but the model has {expected} there."


def structure_message(location: str, found: Any, expected: Any) -> str:
    """Explain a replacement of another structure, given that of its tree and that of the model's value."""
    place = ""
    while (found.type, found.context, found.num_children) == (expected.type, expected.context, expected.num_children):
        keys = expected.context if isinstance(expected.context, list) else range(expected.num_children)
        pairs = zip(keys, found.children(), expected.children(), strict=False)
        key, found, expected = next((pair for pair in pairs if pair[1] != pair[2]), (None, found, expected))
        if key is None:
            break
        place += f"[{key!r}]"
    there = f" at `{place}`" if place else ""
    return (
        f"The replacement of `{location}` has another structure than the model's value there: {_structure(found)} instead of "
        f"{_structure(expected)}{there}."
    )


def _structure(tree: Any) -> str:
    if tree.is_leaf():
        return "a single value"
    keys = ", ".join(map(repr, tree.context)) if isinstance(tree.context, list) else ""
    return f"a {tree.type.__name__} " + (f"with {keys}" if keys else f"of {tree.num_children}")
