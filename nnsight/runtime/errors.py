"""Errors and warnings of a run, and the messages that explain requests and replacements that failed."""

from __future__ import annotations

from typing import Any


class MissedProviderError(ValueError):
    """The run did not offer a location after a block had requested it."""


class OutOfOrderError(MissedProviderError):
    """A block requested a location that the model had already passed, or never reached."""


class EarlyStopException(Exception):
    """Raised by ``tracer.stop()``: ends the run, and is not reported as an error."""


class SkipException(Exception):
    """Raised by a block that has just read the input of a module: the block ends, and the module returns ``value`` without running."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.value = value


class UncompiledWarning(UserWarning):
    """A call of a compiled model, or a part of the call, ran uncompiled. Its results are correct, but it is slower."""


class NNsightDeprecationWarning(FutureWarning):
    """A use of this package is deprecated; the message names its replacement."""


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
        f"operations, so the occurrences of this one were not counted. Mention it earlier: write `….source.{operation.split('.')[0]}` "
        "at the top of the block or before the trace."
    )


def uncaptured_message(location: str) -> str:
    """Explain a request for an operation that has no tap in the captured graph of a compiled model."""
    function, _, operation = location.rpartition(".source.")
    return (
        f"`{location}` is not in the captured graph: this compiled trace was under way when the block first mentioned the "
        f"operations of `{function}`. They are known from now on, so run the trace again; or write "
        f"`….source.{operation.split('.')[0]}` in the block itself or before the trace."
    )


def loop_ended_message(location: str, occurrence: int) -> str:
    """Explain that a loop over occurrences ended because the model had finished."""
    return (
        f"The loop ended at `{location}.i{occurrence}`, which was never reached: the model had finished. The effects of the "
        "loop so far are kept. The rest of this step and the code after the loop were not run. Bound the loop, as in "
        "`tracer.iter[:3]`, or put the code after it into an invoke of its own."
    )


def never_reached_message(location: str, occurrence: int, calls: int, visited: str | None, stopped: bool = False) -> str:
    """Explain a request that was still waiting when the model had finished, after ``calls`` occurrences of its location."""
    if location.startswith("barrier("):
        cause = "the barrier was never reached by every block, and it opens only when all of them have called it"
    elif location.endswith(".grad"):
        cause = (
            "the backward pass had passed this tensor, or does not reach it. Gradients come in the reverse order of the "
            "forward pass: read those of later layers first"
        )
    elif stopped:
        cause = "another block had called tracer.stop(), which ends the run of all blocks, before the model reached it"
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
    """A block replaced a tensor of the model by a tensor of another shape, and the model cannot continue with it.

    Compiled traces raise it at the replacement, because the captured graph is for the model's shapes. Eager traces
    raise it when the model fails after such a replacement; the model's own error is its ``__cause__``.
    """


def replacement_message(location: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> str:
    """Explain a replacement whose shape differs from that of the model's value."""
    return f"The replacement of `{location}` has shape {shape}, but the model has {expected} there."


def structure_message(location: str, found: Any, expected: Any) -> str:
    """Explain a replacement whose structure ``found`` (a pytree spec) differs from the structure ``expected`` of the model's value."""
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
