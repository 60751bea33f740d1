"""The choice of vLLM's model runner, and the configurations of vLLM that blocks and tables cannot run with.

The model runner is the part of a worker that knows which rows of a step belong to which request. vLLM has two model runners, and blocks and
tables run on both. V1 is used unless the environment asks for V2 (``VLLM_USE_V2_MODEL_RUNNER=1``). On most GPUs vLLM would choose V2 by
itself. But more features are untested on V2, and untested features are refused when a model is made.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

_CHOICE = "VLLM_USE_V2_MODEL_RUNNER"

#: Why blocks that use values of the model cannot run with drafts.
SPECULATIVE = (
    "a step would have draft tokens that are discarded later, so a block would see tokens that the request does not have, in steps "
    "that `tracer.iter` cannot count"
)
_WITH_TABLES = "With `edits=` alone, `speculative_config={'method': 'ngram', ...}` is available"
_ON_THE_DEVICE = (
    "Speculative decoding with the method {method!r} is not implemented: the draft model would not be steered, or only the device would "
    "know which positions the rows of a step have. With `edits=` alone, the method 'ngram' is available, with `async_scheduling=False`."
)
_OVERLAPPING = (
    "Asynchronous scheduling is not implemented for blocks that meet the model: a step begins before it is known which requests ended "
    "with the previous step, so a block would see tokens that the request does not have. Leave out `async_scheduling`. It is available "
    "with `edits=` alone."
)
_UNTESTED = "blocks and edits were not tested with it"
_REMEDY = (
    f"Leave it out, or use the model runner V1, if V1 has this feature: unset {_CHOICE}, or set it to 0. (With `watermark_config`, vLLM "
    "always uses V2.)"
)


def choose_runner() -> None:
    """Select vLLM's model runner V1 for this process, unless the environment selects a runner."""
    if not os.environ.get(_CHOICE, "").strip():
        os.environ[_CHOICE] = "0"


def check(config: Any, tables: bool) -> None:
    """Raise ``NotImplementedError`` for a configuration that blocks cannot run with, whether an option or the model itself has set it.

    ``tables`` says that the engine has only tables of edits, and no blocks. Then drafts that are looked up in the tokens of the request
    (``ngram``) are harmless: an edit belongs to positions of a request, and the cache entries of a rejected token are overwritten. Several
    devices look up the same drafts, because all have the tokens of the first device.
    """
    if config.use_v2_model_runner:
        _check_v2(config)
    if config.scheduler_config.async_scheduling and not tables:
        raise NotImplementedError(_OVERLAPPING)
    drafts = config.speculative_config
    if drafts is None:
        return
    if not tables:
        raise NotImplementedError(
            f"Speculative decoding (method {drafts.method!r}) is not implemented: {SPECULATIVE}. Leave out `speculative_config`, or "
            f"load the model that the drafts are made for. {_WITH_TABLES}."
        )
    if drafts.method != "ngram" or config.scheduler_config.async_scheduling:
        raise NotImplementedError(_ON_THE_DEVICE.format(method=drafts.method))


def _check_v2(config: Any) -> None:
    """Raise ``NotImplementedError`` for features with which blocks and tables cannot run on the model runner V2."""
    model, parallel = config.model_config, config.parallel_config
    found = {
        "HiSparse attention": (config.attention_config.hisparse_config is not None, _UNTESTED),
        "a watermark (`watermark_config`)": (getattr(config, "watermark_config", None) is not None, _UNTESTED),
        "a diffusion model": (model.is_diffusion, "a step has many tokens of a request at once, and later steps overwrite them"),
        "batch-sharded sampling": (
            parallel.enable_batch_sharded_sampling,
            "each device has the logits of different requests, and blocks run in the process of the first device",
        ),
        "speculative decoding": (config.speculative_config is not None, "V2 looks up drafts on the device; " + _UNTESTED),
        "dual batch overlap": (parallel.use_ubatching, "a step is run in two halves"),
        "context parallelism": (
            parallel.prefill_context_parallel_size > 1 or parallel.decode_context_parallel_size > 1,
            "each device has the rows of a step in a different order",
        ),
        "a model with an encoder, or for more than text": (
            model.is_encoder_decoder or model.supports_multimodal_inputs,
            "its encoder runs after the preparation of a step, where blocks would see its modules",
        ),
        "embeddings in place of a prompt": (model.enable_prompt_embeds, _UNTESTED),
        "a model with recurrent layers": (model.is_hybrid or model.is_attention_free, _UNTESTED),
        "sampling masks, or replayed tokens": (model.return_sampling_mask or model.enable_trace_replay, _UNTESTED),
        "auxiliary outputs": (config.aux_output_config.enabled, _UNTESTED),
        "a connector of key-value caches": (config.kv_transfer_config is not None, _UNTESTED),
    }
    for what, (is_there, why) in found.items():
        if is_there:
            raise NotImplementedError(f"vLLM's model runner V2 with {what} is not implemented: {why}. {_REMEDY}")


def check_drafts(options: Mapping[str, Any], tables: bool) -> None:
    """Raise ``NotImplementedError`` for options of speculative decoding that :func:`check` refuses, before vLLM loads a draft model."""
    for name in ("speculative_config", "spec_method", "spec_model", "spec_tokens"):
        if options.get(name) and not tables:
            raise NotImplementedError(f"VLLM({name}=...) is not implemented: {SPECULATIVE}. Leave it out. {_WITH_TABLES}.")
    drafts = options.get("speculative_config")
    method = options.get("spec_method") or (drafts.get("method") if isinstance(drafts, Mapping) else None)
    if method not in (None, "ngram"):
        raise NotImplementedError(_ON_THE_DEVICE.format(method=method))
