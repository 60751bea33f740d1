"""The engine client of vLLM's server, which steers the requests that ask for it.

All endpoints of the server call one method, ``generate``, so requests are checked there. A mistake raises an error at once, before any part
of an answer is sent, and the server answers with the status 400. A valid request goes on with the number of its table entry in place of the
user's parameters, and with a salt that separates its cached prefixes from those of other edits.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

import torch
from prometheus_client import Counter, Gauge
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine.async_llm import AsyncLLM

from ...steering.choices import PREFIX, Choice, start_of
from ...steering.registry import Vectors
from ..steering.entries import ENTRY, Entries, Lease
from ..steering.graph_programs import GraphProgram
from ..steering.tables import Steering, edits_of, salt_of, steering_of
from ..worker.engine_taps import Layout
from ..worker.residual import places_of
from ..worker.worker import packed

Edits = Mapping[str, Steering]

_STEERED = Counter("nnsight:steered_requests", "Steered requests that were sent to the engine.")
_REFUSED = Counter("nnsight:refused_requests", "Requests that could not be steered as they asked, and were refused.")
_VECTORS = Gauge("nnsight:vectors_registered", "Vectors that requests can name.")

#: Parameter of a request for the name of a program. With an underscore and a name behind it: parameter of that program.
_PROGRAM = PREFIX + "program"

#: Size of the cache of edits. Requests with cached edits compute nothing.
_CACHED_EDITS = 128


def is_ours(name: Any) -> bool:
    """Whether a request parameter with this name is for steering."""
    return isinstance(name, str) and name.lower().startswith("nnsight")


def refused(message: str) -> VLLMValidationError:
    """Return the error with which a request is refused, and count it."""
    _REFUSED.inc()
    return VLLMValidationError(message, parameter="vllm_xargs")


class SteeringClient(AsyncLLM):  # type: ignore[misc] # without vLLM, mypy does not know its base
    """An engine client that steers the requests that ask for it. Call :meth:`prepare` first."""

    async def prepare(self, vectors: Vectors, programs: Mapping[str, GraphProgram]) -> None:
        """Ask the engine for the locations of its tables. Requests can then use ``vectors``, and the ``programs`` of the engine's graph.

        Raises:
            ValueError: If a layer with tables has no number, or if two have the same number.
        """
        self.programs = programs
        layout = Layout.described(self.vllm_config.additional_config["nnsight"])
        self.vectors = vectors
        self.places = places_of((await self.collective_rpc("nnsight_locations"))[0])
        full = f"All {layout.slots} entries for different edits are in use by other requests. Try again when one of them has ended, or "
        self.entries = Entries(layout.slots, full + "start the server with more --slots.")
        self._rank = layout.rank
        self._writing = asyncio.Lock()
        self.salted_edits = functools.lru_cache(_CACHED_EDITS)(self._salted_edits)
        _VECTORS.set_function(lambda: len(vectors))

    def _salted_edits(self, choice: Choice) -> tuple[str, Edits]:
        edits = steering_of(choice, self.vectors, self.places, self.vllm_config.model_config.get_hidden_size(), self._rank)
        return salt_of(edits), edits

    def edits_of(self, parameters: Mapping[str, Any]) -> tuple[str, Edits, int] | None:
        """Return salt, edits and first position for the parameters of a request, or ``None`` if it asks for no edit. Raise
        ``VLLMValidationError`` for wrong parameters."""
        ours = {name: value for name, value in parameters.items() if is_ours(name)}
        if not ours:
            return None
        of_program = {name: ours.pop(name) for name in list(ours) if name.startswith(_PROGRAM)}
        try:
            if not of_program:
                choice = Choice.of(ours, PREFIX)
                return *self.salted_edits(choice), choice.start
            start = start_of(ours, PREFIX)
            edits = self._program_edits(of_program, start)
            if ours.keys() - {PREFIX + "start"}:
                for location, steering in self.salted_edits(Choice.of(ours, PREFIX))[1].items():
                    edits[location] = steering.plus(edits[location]) if location in edits else steering
            return salt_of(edits), edits, start
        except ValueError as error:
            raise refused(str(error)) from error

    def _program_edits(self, asked: Mapping[str, Any], start: int) -> dict[str, Steering]:
        """Return the edits for the parameters ``nnsight_program...`` of a request."""
        given = {name.removeprefix(_PROGRAM + "_"): value for name, value in asked.items() if name != _PROGRAM}
        name = asked.get(_PROGRAM)
        if not isinstance(name, str) or name not in self.programs:
            known = ", ".join(self.programs) or "none"
            raise ValueError(f"{_PROGRAM} is the name of a program of this server, not {name!r}. The programs are: {known}.")
        try:
            tensors = {key: torch.tensor(value) if isinstance(value, list) else value for key, value in given.items()}
            return edits_of(self.programs[name], tensors, start, self.vllm_config.model_config.get_hidden_size())
        except TypeError as error:
            raise ValueError(str(error)) from error

    def generate(self, prompt: Any, sampling_params: Any, request_id: str, **options: Any) -> AsyncGenerator[Any, None]:
        """Send a request to the engine, steered if it asks for it. Raise ``VLLMValidationError`` if that is not possible."""
        found = self.edits_of(sampling_params.extra_args or {})
        if found is None:
            return super().generate(prompt, sampling_params, request_id, **options)
        salt, edits, start = found
        prompt = _salted(prompt, salt)
        try:
            lease = self.entries.take(salt)
        except ValueError as error:
            raise refused(str(error)) from error
        sampling_params = sampling_params.clone()
        others = {name: value for name, value in sampling_params.extra_args.items() if not is_ours(name)}
        sampling_params.extra_args = {**others, ENTRY: (lease.entry.slot, start)}
        return self._steered(lease, edits, super().generate(prompt, sampling_params, request_id, **options))

    async def _steered(self, lease: Lease, edits: Edits, outputs: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
        entry = lease.entry
        try:
            async with self._writing:
                if not entry.written:
                    asked = {location: found.parts for location, found in edits.items()}
                    await self.collective_rpc("nnsight_write", args=(entry.slot, packed(asked)))
                    entry.written = True
            _STEERED.inc()
            async with aclosing(outputs):  # aborts a dropped request in the engine before its entry is released
                async for output in outputs:
                    yield output
        finally:
            lease.release()


def _salted(prompt: Any, salt: str) -> dict[str, Any]:
    """Return ``prompt`` with a salt for its cached prefixes, made from ``salt`` and the prompt's own salt."""
    if isinstance(prompt, str):
        prompt = {"prompt": prompt}
    if not isinstance(prompt, dict) or prompt.get("type") == "enc_dec":
        raise refused(f"A prompt of this kind cannot be steered ({type(prompt).__name__}).")
    own = prompt.get("cache_salt")
    return {**prompt, "cache_salt": salt if own is None else hashlib.sha256(f"{salt}\n{own}".encode()).hexdigest()}
