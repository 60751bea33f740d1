"""Generation: a trace with many calls of the model, one for each token.

Such a trace calls a :class:`Generation` instead of the module. Locations of the model occur once for each token. The ids that ``generate``
of transformers streams and returns have locations, too.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from ..runtime.interleaver import active_interleaver
from ..runtime.tracer import Arguments
from .forms import CACHES
from .static_caches import static_cache

if TYPE_CHECKING:
    from .transformers.model import TransformersModel


#: Options of ``generate`` that are called with ids or scores, and those that depend on the text.
_CALLBACKS = {"streamer", "logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "stop_strings"}

#: Number of new tokens if neither the call nor the model specifies it, as in transformers.
_LENGTH = 20


class _LengthReached(BaseException):
    """Ends a generation on fake tensors; not an ``Exception``, so that no handler in a model catches it."""


def _configured(module: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the options that determine the size of the output, and whether it has a cache: the given ones, or else those of the model."""
    own = getattr(module, "generation_config", None)
    given = kwargs.get("generation_config") or own
    names = ("num_beams", "return_dict_in_generate", "num_return_sequences", "max_new_tokens", "max_length", "use_cache")
    found = {name: kwargs.get(name, getattr(given, name, None)) for name in names}
    return {**found, "num_beams": found["num_beams"] or 1}


def _without_callbacks(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the options for a generation on fake tensors: without the user's functions and objects that get its ids or scores.

    Stop strings are left out, too: transformers keeps tensors for them in a global cache, and would keep fake ones.
    """
    found = {name: value for name, value in kwargs.items() if name not in _CALLBACKS}
    if getattr(found.get("generation_config"), "stop_strings", None) is not None:
        config = found["generation_config"] = copy.copy(found["generation_config"])
        config.stop_strings = None
    return found


def _with_static_cache(module: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return ``kwargs`` with a cache that is made now, if they request a static cache (:mod:`.static_caches`)."""
    config = _configured(module, kwargs)
    instead = ("past_key_values", "cache", "generation_config", "assistant_model", "prefill_chunk_size", "custom_generate")
    ids = kwargs.get("input_ids")
    if (
        kwargs.get("cache_implementation") != "static"
        or any(kwargs.get(name) is not None for name in instead)
        or config["use_cache"] is False  # of the call, or of the model: MPT
        or config["num_beams"] != 1
        or getattr(module.config, "is_encoder_decoder", False)
        or ids is None
    ):
        return kwargs
    tokens = config["max_new_tokens"] or max(config["max_length"] or 0, _LENGTH)  # an upper bound: `max_length` includes the prompt
    # Like transformers, never shorter than the longest cache before: another length needs another graph.
    others = kwargs.get("max_cache_len") or 0, getattr(module, "_previous_max_cache_length", 0)
    positions = max(ids.shape[1] + tokens - 1, *others)
    cache = static_cache(module, ids.shape[0] * (config["num_return_sequences"] or 1), positions)
    if cache is None:
        return kwargs
    module._previous_max_cache_length = positions
    name = "cache" if "cache" in inspect.signature(module.forward).parameters else "past_key_values"
    return {**{key: value for key, value in kwargs.items() if key != "cache_implementation"}, name: cache}


class Generation:
    """Calls ``generate`` of a model in a trace, and prepares its input."""

    #: The location that occurs once for each token.
    pace = "model.output"
    #: The location that occurs once for the prompt and once for each token.
    surplus = "model.generator.streamer.output"

    def __init__(self, model: TransformersModel) -> None:
        self._model = model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._generate(self._model._module, args, kwargs)

    def _generate(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        run = active_interleaver()
        is_routed = run is not None or vars(module).get("_compiled_call_impl") is not None
        if is_routed and hasattr(getattr(module, "generation_config", None), "disable_compile"):
            # With a static cache, transformers would compile the model itself, without the blocks and not as configured here.
            kwargs.setdefault("disable_compile", True)
            kwargs = _with_static_cache(module, kwargs)
        if run is not None and _configured(module, kwargs)["num_beams"] == 1:
            kwargs["streamer"] = Streamer(kwargs.get("streamer"))
        output = module.generate(*args, **kwargs)
        return output if run is None else run.handle("model.generator.output", output)

    def _scan_on(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Generate with ``module``, a fake copy. Fake ids cannot end a generation early, so it makes the maximal number of tokens."""
        config, kwargs = _configured(module, kwargs), _without_callbacks(kwargs)
        if config["num_beams"] != 1 or config["return_dict_in_generate"]:
            raise ValueError(
                "A generation with `num_beams` or `return_dict_in_generate` depends on values, so it cannot be scanned or validated. "
                "Leave out these options, or scan= and validate=."
            )
        names = ("input_ids", "inputs_embeds", module.main_input_name)
        ids: Any = next(kwargs[name] for name in names if kwargs.get(name) is not None)
        rows = ids.shape[0] * (config["num_return_sequences"] or 1)
        start = 1 if getattr(module.config, "is_encoder_decoder", False) else ids.shape[1]
        tokens = config["max_new_tokens"] or (max(config["max_length"] - start, 1) if config["max_length"] else _LENGTH)
        calls = 0

        def count(*_: Any) -> None:
            nonlocal calls
            calls += 1
            if calls > tokens:
                raise _LengthReached

        counting = module.register_forward_pre_hook(count)
        try:
            made = self._generate(module, args, kwargs)
            if not calls:
                raise ValueError(
                    f"`generate` of {type(module).__name__} reads values before it calls the model, so it cannot be scanned or validated. "
                    "Leave out scan= and validate=."
                )
            return made
        except _LengthReached:
            made = torch.empty(rows, start + tokens, dtype=torch.int64, device=ids.device)
        finally:
            counting.remove()
        run = active_interleaver()
        return made if run is None else run.handle("model.generator.output", made)

    def _call_on(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Generate with ``module``, a fake copy of the model, for the probe."""
        return module.generate(*args, **_without_callbacks(self._model._probed(module, kwargs)))

    def _prepare_input(self, *inputs: Any, **kwargs: Any) -> Arguments:
        """Return the arguments of ``generate``, without positions and decoder ids, which it makes itself.

        The prompts include the tokens of a given cache, so the mask of the prompts covers the cache.
        """
        kwargs |= kwargs.pop("generate_kwargs", None) or {}
        given = {name for part in (kwargs, *inputs) if isinstance(part, Mapping) for name in part}
        caches = {name: kwargs.pop(name) for name in CACHES & kwargs.keys()}
        longest = {"max_length": kwargs["max_length"]} if kwargs.get("max_length") is not None else {}
        if longest and not kwargs.get("truncation"):  # with `truncation`, it limits the prompt, too
            del kwargs["max_length"]
        args, prepared = self._model._prepare_input(*inputs, **kwargs)
        prepared |= {**longest, **caches}
        self._model._without_derived(prepared, given)
        configs = (kwargs.get("generation_config"), getattr(self._model._module, "generation_config", None))
        if all(getattr(config, "pad_token_id", None) is None for config in configs):
            prepared.setdefault("pad_token_id", self._model._pad_id())
        return args, prepared

    def _batch(self, batched: Arguments | None, *args: Any, **kwargs: Any) -> tuple[Arguments, int]:
        return self._model._batch(batched, *args, **kwargs)


class Streamer:
    """A streamer for ``generate`` that offers the ids to the active run, and passes them on to ``given``, a streamer of the user."""

    def __init__(self, given: Any = None) -> None:
        self._given = given

    def put(self, value: torch.Tensor) -> None:
        run = active_interleaver()
        if run is not None:
            value = run.handle(Generation.surplus, value)
        if self._given is not None:
            self._given.put(value)

    def end(self) -> None:
        """End the streamer of the user: ``generate`` calls this at the end."""
        if self._given is not None:
            self._given.end()
