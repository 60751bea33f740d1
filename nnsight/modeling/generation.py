"""Generation: a trace of many calls of the model, one for each token.

A trace calls the module, or here a :class:`Generation`. Locations of the model occur once for each token, and the ids that ``generate`` of
transformers makes are locations, too.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch

from ..runtime.interleaver import active_interleaver
from ..runtime.tracer import Arguments
from .static_caches import static_cache

if TYPE_CHECKING:
    from .transformers.model import TransformersModel


#: New ids of a generation that says nothing about their number.
_LENGTH = 20


class _AllMade(BaseException):
    """Ends a generation on fakes; no ``except Exception`` of a model stops it."""


def _configured(module: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a generation that say how much it makes: as given, else those of the model."""
    own = getattr(module, "generation_config", None)
    given = kwargs.get("generation_config") or own
    names = ("num_beams", "return_dict_in_generate", "num_return_sequences", "max_new_tokens", "max_length")
    found = {name: kwargs.get(name, getattr(given, name, None)) for name in names}
    return {**found, "num_beams": found["num_beams"] or 1}


def _with_static_cache(module: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a generation with the static cache that they ask for, made before the model runs (:mod:`.static_caches`)."""
    config = _configured(module, kwargs)
    instead = ("past_key_values", "cache", "generation_config", "assistant_model", "prefill_chunk_size", "custom_generate")
    ids = kwargs.get("input_ids")
    if (
        kwargs.get("cache_implementation") != "static"
        or any(kwargs.get(name) is not None for name in instead)
        or kwargs.get("use_cache") is False
        or config["num_beams"] != 1
        or getattr(module.config, "is_encoder_decoder", False)
        or ids is None
    ):
        return kwargs
    tokens = config["max_new_tokens"] or max(config["max_length"] or 0, _LENGTH)  # or fewer: a maximum may include the prompt
    # As transformers does, as long as the longest before: another length is another graph.
    others = kwargs.get("max_cache_len") or 0, getattr(module, "_previous_max_cache_length", 0)
    positions = max(ids.shape[1] + tokens - 1, *others)
    cache = static_cache(module, ids.shape[0] * (config["num_return_sequences"] or 1), positions)
    if cache is None:
        return kwargs
    module._previous_max_cache_length = positions
    name = "cache" if "cache" in inspect.signature(module.forward).parameters else "past_key_values"
    return {**{key: value for key, value in kwargs.items() if key != "cache_implementation"}, name: cache}


class Generation:
    """Calls ``generate`` of a model in a trace of a generation, and prepares its input."""

    #: Occurs once for each token.
    pace = "model.output"
    #: Occurs once for the prompt and once for each token.
    surplus = "model.generator.streamer.output"

    def __init__(self, model: TransformersModel) -> None:
        self._model = model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._generate(self._model._module, args, kwargs)

    def _generate(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        run = active_interleaver()
        is_routed = run is not None or vars(module).get("_compiled_call_impl") is not None
        if is_routed and hasattr(getattr(module, "generation_config", None), "disable_compile"):
            # With a static cache transformers would compile the model itself: past the blocks, and past what compiles it here.
            kwargs.setdefault("disable_compile", True)
            kwargs = _with_static_cache(module, kwargs)
        if run is not None and "streamer" not in kwargs and _configured(module, kwargs)["num_beams"] == 1:
            kwargs["streamer"] = Streamer()
        output = module.generate(*args, **kwargs)
        return output if run is None else run.handle("model.generator.output", output)

    def _scan_on(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Generate with ``module``, a copy on fakes, whose ids do not say when to stop: it makes as many as it may."""
        config = _configured(module, kwargs)
        if config["num_beams"] != 1 or config["return_dict_in_generate"]:
            raise ValueError(
                "A generation with `num_beams` or `return_dict_in_generate` depends on values, and is not scanned or validated. "
                "Leave these out, or scan= and validate=."
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
                raise _AllMade

        counting = module.register_forward_pre_hook(count)
        try:
            made = self._generate(module, args, kwargs)
            if not calls:
                raise ValueError(
                    f"`generate` of {type(module).__name__} looks at values before it calls the model, and is not scanned or validated. "
                    "Leave out scan= and validate=."
                )
            return made
        except _AllMade:
            made = torch.empty(rows, start + tokens, dtype=torch.int64, device=ids.device)
        finally:
            counting.remove()
        run = active_interleaver()
        return made if run is None else run.handle("model.generator.output", made)

    def _call_on(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Generate with another module in place of the model, to see how it is called."""
        kwargs = self._model._probed(module, kwargs)
        return module.generate(*args, **{name: value for name, value in kwargs.items() if name != "streamer"})

    def _prepare_input(self, *inputs: Any, **kwargs: Any) -> Arguments:
        """Return the arguments of ``generate``: it counts positions and starts decoders itself."""
        kwargs |= kwargs.pop("generate_kwargs", None) or {}
        given = set(kwargs)
        longest = {"max_length": kwargs["max_length"]} if kwargs.get("max_length") is not None else {}
        if longest and not kwargs.get("truncation"):  # of the tokenizer, too, where it truncates
            del kwargs["max_length"]
        args, prepared = self._model._prepare_input(*inputs, **kwargs)
        prepared |= longest
        self._model._without_derived(prepared, given)
        config = getattr(self._model._module, "generation_config", None)
        if getattr(config, "pad_token_id", None) is None:
            prepared.setdefault("pad_token_id", self._model._pad_id())
        return args, prepared

    def _batch(self, batched: Arguments | None, *args: Any, **kwargs: Any) -> tuple[Arguments, int]:
        return self._model._batch(batched, *args, **kwargs)


class Streamer:
    """Offers the ids that ``generate`` streams to the active run."""

    def put(self, value: torch.Tensor) -> None:
        run = active_interleaver()
        if run is not None:
            run.handle(Generation.surplus, value)

    def end(self) -> None:
        """Nothing is left to offer."""
