"""Configurations of vLLM that blocks and tables cannot run with, refused when a model is made.

vLLM has two model runners, the part of a worker that knows which rows of a step belong to which request. Blocks and tables run on
both. V1 is used unless the environment asks for V2 (``VLLM_USE_V2_MODEL_RUNNER=1``). On most GPUs vLLM would choose V2 by itself, but
more features are untested there, and an untested feature is refused.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

_CHOICE = "VLLM_USE_V2_MODEL_RUNNER"

#: Why blocks that meet the model cannot have drafts of several tokens, some of which are thrown away again.
SPECULATIVE = (
    "a step would have tokens that are thrown away again, so a block would meet tokens that the request does not have, in steps "
    "that `tracer.iter` cannot count"
)
_WITH_TABLES = "With `edits=` alone, `speculative_config={'method': 'ngram', ...}` can be had"
_ON_THE_DEVICE = (
    "Speculative decoding with the method {method!r} is not implemented: the draft model would not be steered, or which positions the "
    "rows of a step have would be known on the device only. With `edits=` alone, the method 'ngram' can be had, with "
    "`async_scheduling=False`."
)
_OVERLAPPING = (
    "Asynchronous scheduling is not implemented for blocks that meet the model: a step begins before it is known which requests ended "
    "with the last one, so a block would meet tokens that the request does not have. Leave out `async_scheduling`; with `edits=` alone, it "
    "can be had."
)
_UNTESTED = "blocks and edits were not tested with it"
_REMEDY = (
    f"Leave it out, or use the model runner V1, if vLLM has it there: unset {_CHOICE}, or set it to 0. (`watermark_config` makes "
    "vLLM use V2 whatever is set.)"
)


def choose_runner() -> None:
    """Ask vLLM for the model runner V1, for this process from now on, unless the environment says which one."""
    if not os.environ.get(_CHOICE, "").strip():
        os.environ[_CHOICE] = "0"


def check(config: Any, tables: bool) -> None:
    """Raise for a configuration of vLLM that blocks cannot run with, whether an option or the model itself has set it.

    With tables of edits alone (``tables``), drafts that are looked up in the tokens of the request (``ngram``) do no harm: an edit belongs
    to positions of a request, and the cache entries of a rejected token are written over. Several devices look up the same drafts, because
    all have the tokens of the first.
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
    """Raise for features of vLLM's model runner V2 that blocks and tables cannot run with, and that V1 lacks or has in another way."""
    model, parallel = config.model_config, config.parallel_config
    found = {
        "HiSparse attention": (config.attention_config.hisparse_config is not None, _UNTESTED),
        "a watermark (`watermark_config`)": (getattr(config, "watermark_config", None) is not None, _UNTESTED),
        "a diffusion model": (model.is_diffusion, "a step has many tokens of a request at once, which are written over in later steps"),
        "batch-sharded sampling": (
            parallel.enable_batch_sharded_sampling,
            "each device has the logits of other requests, and blocks run where the first device is",
        ),
        "speculative decoding": (config.speculative_config is not None, "drafts are looked up on the device there; " + _UNTESTED),
        "dual batch overlap": (parallel.use_ubatching, "a step is run in two halves"),
        "context parallelism": (
            parallel.prefill_context_parallel_size > 1 or parallel.decode_context_parallel_size > 1,
            "rows of a step are in another order on each device",
        ),
        "a model with an encoder, or for more than text": (
            model.is_encoder_decoder or model.supports_multimodal_inputs,
            "its encoder runs between the preparation of a step and the model, where blocks would meet it",
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
    """Raise for options that ask for speculative decoding where :func:`check` would, before vLLM loads a draft model for them."""
    for name in ("speculative_config", "spec_method", "spec_model", "spec_tokens"):
        if options.get(name) and not tables:
            raise NotImplementedError(f"VLLM({name}=...) is not implemented: {SPECULATIVE}. Leave it out. {_WITH_TABLES}.")
    drafts = options.get("speculative_config")
    method = options.get("spec_method") or (drafts.get("method") if isinstance(drafts, Mapping) else None)
    if method not in (None, "ngram"):
        raise NotImplementedError(_ON_THE_DEVICE.format(method=method))
