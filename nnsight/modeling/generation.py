"""Generation: a trace of many calls of the model, one for each token.

What a trace drives is a callable: the module for :meth:`~nnsight.modeling.base.NNsight.trace`, a :class:`Generation` here. Locations of
the model occur once for each token, and the ids that ``generate`` of transformers makes are locations, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..runtime.interleaver import active_interleaver

if TYPE_CHECKING:
    from .language import LanguageModel


class Generation:
    """Calls ``generate`` of a model: what a trace of a generation drives, and how it prepares input.

    Args:
        model: The wrapped model.
    """

    def __init__(self, model: LanguageModel) -> None:
        self._model = model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = active_interleaver()
        if run is not None and "streamer" not in kwargs and kwargs.get("num_beams", 1) == 1:
            kwargs["streamer"] = Streamer()
        output = self._model._module.generate(*args, **kwargs)  # type: ignore[operator]
        return output if run is None else run.handle("model.generator.output", output)

    def _call_on(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Generate with another module in place of the model, to see how it is called."""
        return module.generate(*args, **{name: value for name, value in kwargs.items() if name != "streamer"})

    def _prepare_input(self, *inputs: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of ``generate``: it counts positions and starts decoders itself."""
        given = {"position_ids", "decoder_input_ids"} & kwargs.keys()
        args, prepared = self._model._prepare_input(*inputs, **kwargs)
        for name in {"position_ids", "decoder_input_ids"} - given:
            prepared.pop(name, None)
        config = getattr(self._model._module, "generation_config", None)
        if getattr(config, "pad_token_id", None) is None:
            prepared.setdefault("pad_token_id", self._model._pad_id())
        return args, prepared

    def _batch(
        self, batched: tuple[tuple[Any, ...], dict[str, Any]] | None, *args: Any, **kwargs: Any
    ) -> tuple[tuple[tuple[Any, ...], dict[str, Any]], int]:
        return self._model._batch(batched, *args, **kwargs)


class Streamer:
    """Offers the ids that ``generate`` streams to the active run."""

    def put(self, value: torch.Tensor) -> None:
        run = active_interleaver()
        if run is not None:
            run.handle("model.generator.streamer.output", value)

    def end(self) -> None:
        """Nothing is left to offer."""
