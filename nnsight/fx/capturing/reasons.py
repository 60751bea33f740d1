"""Why a model is captured again, in words.

Dynamo captures a call if a *guard* of each earlier capture fails, such as ``GLOBAL_STATE changed: grad_mode`` or
``tensor 'kwargs['input_ids']' size mismatch at index 1. expected 3, actual 12``. This module translates such a guard into a statement about
the call: "gradients are enabled now", "another length of prompt: 3 -> 12". The reason is the failing guard of the nearest capture, in which
most guards hold before one fails. A guard of an unknown kind is shown as dynamo writes it, shortened.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ...runtime.modules.interception import INTERCEPTED_METHOD
from ...runtime.report import Capture

#: Arguments whose first two dimensions are rows and tokens, in the models of transformers.
_TOKENS = frozenset(
    "input_ids attention_mask position_ids token_type_ids inputs_embeds labels decoder_input_ids decoder_attention_mask".split()
)

#: The remedy for each kind of reason.
REMEDIES = {
    "torch": "Run all traces with gradients, or all under `torch.no_grad()`.",
    "model": "Do not change the model between traces: keep its train or eval mode, hooks and attributes.",
    "arguments": "Give the same arguments in all calls.",
    "type": "Give tensors of one dtype, on one device.",
    "value": "Give the same value in all calls, or a tensor: numbers, strings and flags are constants of a capture.",
    "cache": "Give a key-value cache of one kind: always empty, or always with tokens in it.",
    "size": "Make sizes symbolic from the start with `model.compile(dynamic=True)`, or pad inputs to a few fixed sizes.",
}

_SIZE = re.compile(r"tensor '(.+)' (size|stride) mismatch at index (\d+)\. expected (-?\d+), actual (-?\d+)")
_TENSOR = re.compile(r"tensor '(.+)' (dtype|rank|requires_grad|dispatch key set|Tensor device index) mismatch\. (.*)")
_TYPE = re.compile(r"expected type of '(.+)' to be a tensor type,(?: but found (.*))?")
_COUNT = re.compile(r"len\((args|kwargs)\) == (\d+)|not (args|kwargs)$")
_MISSING = re.compile(r"KeyError on kwargs\['(\w+)'\]")
_IN_CONDITION = re.compile(r"([A-Za-z_][\w.]*(?:\[[^\]]*\]|\.\w+)*)\.(?:size\(\)\[(\d+)\]|shape\[(\d+)\])")
_VALUE = re.compile(r"(.+?) (==|!=|is not|is) (.+)")
_CHECKED = re.compile(r"___(?:dict_version|check_\w+)\((.+?), ")  # a guard on the type or the identity of an object
_ARGUMENT = re.compile(r"kwargs\['(\w+)'\](.*)|args\[(\d+)\](.*)")
_CHILD = re.compile(r"\._modules\['([^']+)'\]")
_PLAIN = (bool, int, float, str, type(None))
_CACHE = re.compile(r"(past_key_values|cache_params|cache)\b")  # names of the same argument in different models and releases
_LONGEST = 120


class Situation(NamedTuple):
    """A call that is about to be captured.

    Attributes:
        variables: The arguments, by name, of the function that dynamo compiles.
        parameters: Names of the parameters of the model's ``forward``, in order.
        known: For each earlier captured call, the names of its arguments; the latest call comes last.
    """

    variables: Mapping[str, Any]
    parameters: Sequence[str] = ()
    known: Sequence[frozenset[str]] = ()

    def given(self) -> frozenset[str]:
        """Return the names of the arguments of this call."""
        positions = range(len(self.variables.get("args", ())))
        return frozenset((*(self.name(f"args[{number}]") for number in positions), *self.variables.get("kwargs", ())))

    def name(self, source: str) -> str:
        """Return the user's name for a value that dynamo names ``source``."""
        found = _ARGUMENT.fullmatch(source)
        if found is None:
            return _CHILD.sub(r".\1", source).replace("the_model", "model", 1)
        if found[1]:
            return found[1] + found[2]
        number = int(found[3])
        first = self.parameters[number] if number < len(self.parameters) else f"argument {number}"
        return first + found[4]

    def value(self, source: str) -> Any:
        """Return the value of ``source`` in this call, or ``source`` itself if there is no such value."""
        try:
            return eval(source, {}, dict(self.variables))
        except Exception:  # the user's code may compute an attribute, and fail
            return source


def reason_of(guards: Sequence[str], situation: Situation) -> Capture:
    """Return why a call is captured again. ``guards`` are the failing guards of the earlier captures, the nearest capture first."""
    found = [_translated(guard, situation) for guard in guards]
    if situation.given() in situation.known:  # a capture with the same arguments is nearer than any with other arguments
        found = [capture for capture in found if capture.kind != "arguments"] or found
    return found[0] if found else Capture("no capture fits", "unknown")


def _translated(guard: str, situation: Situation) -> Capture:
    for translate in (_state, _size, _tensor, _arguments, _condition, _value):
        capture = translate(guard, situation)
        if capture is not None:
            return capture
    return Capture(f"a condition of torch: {_shortened(guard)}", "unknown", guard)


def _state(guard: str, situation: Situation) -> Capture | None:
    """Translate a guard on torch's state: grad mode, autocast and other settings."""
    _, found, names = guard.partition("GLOBAL_STATE changed: ")
    if not found:
        return None
    said = []
    for name in names.split():
        if name == "grad_mode":
            said.append(f"gradients are {'enabled' if torch.is_grad_enabled() else 'disabled'} now")
        elif name.startswith("autocast"):
            device = name[len("autocast(") :].partition(")")[0] if "(" in name else "cpu"
            said.append(f"autocast is {'on' if torch.is_autocast_enabled(device) else 'off'} now")
        else:
            said.append(f"torch's {name} has changed")
    return Capture(", ".join(dict.fromkeys(said)), "torch", guard)


def _size(guard: str, situation: Situation) -> Capture | None:
    found = _SIZE.search(guard)
    if found is None:
        return None
    source, what, dimension, before, now = found[1], found[2], int(found[3]), int(found[4]), int(found[5])
    if what == "stride":
        return Capture(f"the strides of `{situation.name(source)}` have changed", "type", guard)
    return Capture(_size_in_words(situation.name(source), dimension, before, now), "size", guard)


def _size_in_words(name: str, dimension: int, before: int | None, now: int) -> str:
    change = f"{now}" if before is None else f"{before} -> {now}"
    if name in _TOKENS and dimension < 2:
        if now == 1:
            return "a batch of 1" if dimension == 0 else "a prompt of 1 token"
        return f"another {'batch' if dimension == 0 else 'length of prompt'}: {change}"
    if _CACHE.match(name):
        return f"another size of the key-value cache: {change}"
    if now == 1:
        return f"a size of 1 of `{name}` in dimension {dimension}"
    return f"another size of `{name}` in dimension {dimension}: {change}"


def _tensor(guard: str, situation: Situation) -> Capture | None:
    found, other = _TENSOR.search(guard), _TYPE.search(guard)
    if found is not None:
        return Capture(f"`{situation.name(found[1])}` has another {found[2]} now: {_shortened(found[3])}", "type", guard)
    return other and Capture(f"`{situation.name(other[1])}` is of another type now", "type", guard)


def _arguments(guard: str, situation: Situation) -> Capture | None:
    """Translate a guard on the number or the names of the arguments."""
    missing = _MISSING.search(guard)
    if missing is None and _COUNT.fullmatch(guard) is None:
        return None
    given = situation.given()
    nearest = min(reversed(situation.known), key=lambda known: len(known ^ given), default=frozenset[str]())
    changes = [f"`{name}` is given now" for name in sorted(given - nearest)]
    changes += [f"`{name}` is not given now" for name in sorted(nearest - given)]
    if not changes:
        changes.append(f"`{missing[1]}` is not given now" if missing else "arguments are passed differently: by position or by name")
    return Capture(", ".join(changes), "arguments", guard)


def _condition(guard: str, situation: Situation) -> Capture | None:
    """Translate a condition on symbolic sizes."""
    if not any(sign in guard for sign in ("<", ">", "==", "!=", "Eq(", "Ne(", "Mod(", "%")):
        return None
    for found in _IN_CONDITION.finditer(guard):
        dimension = int(found[2] or found[3])
        tensor = situation.value(found[1])
        if isinstance(tensor, torch.Tensor) and dimension < tensor.dim():
            said = _size_in_words(situation.name(found[1]), dimension, None, int(tensor.shape[dimension]))
            held = "" if tensor.shape[dimension] == 1 else f", for which `{_shortened(guard)}` does not hold"
            return Capture(f"{said}{held}", "size", guard)
    return None


def _value(guard: str, situation: Situation) -> Capture | None:
    """Translate a guard on an argument that is not a tensor, on a part of it, or on an attribute of the model."""
    found, checked = _VALUE.fullmatch(guard), _CHECKED.match(guard)
    if found is None and checked is None:
        return None
    source, before = (found[1], found[3]) if found else (checked[1], None)  # type: ignore[index]
    if f".{INTERCEPTED_METHOD}." in f"{source}.":  # after a graph break, it distinguishes modules of one class
        return Capture("another module of the same class, after a graph break", "break", guard)
    name, value = situation.name(source), situation.value(source)
    if name.endswith(".training"):
        module = name.removesuffix(".training")
        module = "the model" if module == "model" else f"`{module}`"
        return Capture(f"{module} is in {'train' if value is True else 'eval'} mode now", "model", guard)
    if _CACHE.match(name):
        if name.endswith("is_initialized"):
            return Capture(f"the key-value cache is {'not empty' if value is True else 'empty'} now", "cache", guard)
        return Capture("the key-value cache has changed", "cache", guard)
    kind = "value" if _ARGUMENT.fullmatch(source) else "model"
    if not isinstance(value, _PLAIN) or (isinstance(value, str) and value == source):
        return Capture(f"`{name}` has changed", kind, guard)
    change = "" if before is None else f", not {_shortened(before)}"
    return Capture(f"`{name}` is {_shortened(repr(value))} now{change}", kind, guard)


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
