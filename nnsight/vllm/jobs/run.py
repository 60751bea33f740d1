"""One run of a program on an engine.

A program is written against a batch, and each row of the batch is a request of the engine. All requests of a run are in the same steps;
:mod:`.room` ensures that. At a location, the rows are joined to a value as in transformers, ``[batch, positions, ...]``. Then the blocks of
the program go on, and their changes are written to the rows of the engine. Padding, and rows that have ended, are zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...program.format.nodes import Node
from ...program.run.interpreter import Interpreter
from ..samples import Request
from ..worker.calls import called
from ..worker.request_rows import RequestRows, ordinary
from ..worker.requests import LOGITS, SAMPLES, RequestLimits, RequestRun
from .batch import Batch
from .places import IDS, RESULT, TOKENS, MainTensors, Places, tensors_of

Here = Sequence[tuple["JobRow", RequestRows]]  # the rows of a run in a step, each with its rows of the value


class EngineInterpreter(Interpreter):
    """Interprets the blocks of a job on an engine. The value at a location is a single tensor, in place of the value of transformers."""

    run: JobRun

    def __init__(self, model: Any, job: Any, limits: Any, places: Places, device: torch.device) -> None:
        super().__init__(model, job, limits)
        self.places, self.device = places, device

    def apply(self, path: str, args: Any, kwargs: Any) -> Any:
        (hidden,) = args
        module = self.places.module(path)
        with torch.no_grad():
            made = called(self.run, path, module, (hidden.reshape(-1, hidden.shape[-1]),), {})
        made = made[0] if isinstance(made, tuple) else made
        return made.reshape(*hidden.shape[:-1], made.shape[-1])

    def weight(self, name: str) -> torch.Tensor:
        found = self.places.weight(name)
        assert found is not None
        return found.detach()

    def _leaf_in(self, value: Any, node: Node) -> Any:
        return value

    def _with_leaf(self, value: Any, node: Node, new: torch.Tensor) -> Any:
        return new


class JobRow(RequestRun):
    """The request of one row. It passes its rows of each value to the run of all rows."""

    def __init__(self, job: JobRun, number: int, limits: RequestLimits) -> None:
        super().__init__([], None, None, f"row {number}", limits)
        self.job, self.number = job, number
        self.waited: Any = job.wanted
        self.tokens: list[int] | None = None  # set when the row has ended

    @property
    def touches_model(self) -> bool:
        """True: the blocks need the values of all tokens, so the request shares no cached prefix."""
        return True

    def wants(self, location: str) -> bool:
        return self.error is None and location in self.job.wanted

    def is_waited(self, location: str) -> bool:
        return location in self.job.wanted

    def meet(self, location: str, value: Any, rows: RequestRows) -> Any:
        return self.job.arrive(self, location, value, rows) if location in self.job.wanted else value

    def conclude(self, result: Any) -> None:
        """End the row: store its tokens, and tell the run."""
        self.tokens = list(result.outputs[0].token_ids)
        self.job.ended(self)

    def fail(self, error: BaseException) -> None:
        self.job.fail(error)


class JobRun(RequestRun):
    """The blocks of a program in one run, and its rows."""

    def __init__(self, interpreter: EngineInterpreter, number: int, batch: Batch, limits: RequestLimits) -> None:
        super().__init__(interpreter.mediators(number), None, interpreter.model._tree, f"run {number}", limits)
        self.check_location, self.check_replacement = None, None  # the program has been checked before
        self._interpreter, self.places, self.batch = interpreter, interpreter.places, batch
        self._call = interpreter.job.runs[number]["call"]
        interpreter.run = self
        sites = {node["site"] for node in interpreter.job.nodes if node["run"] == number and "site" in node}
        self._all_logits = self._call == "trace" and bool(sites & {self.places.head, self.places.root, RESULT})
        self.wanted: set[str] = set()  # locations of the engine at which it has to stop
        self.rows = [JobRow(self, number, limits) for number in range(len(batch.prompts))]
        self._live = list(self.rows)
        self._at: tuple[str, int] | None = None
        self._here: list[tuple[JobRow, RequestRows]] = []
        self._hidden: torch.Tensor | None = None  # the input of the head
        self._result: Any = None
        self.finished = False

    def requests(self) -> list[Request]:
        """Return a request for each row."""
        return [
            Request({"prompt_token_ids": list(prompt)}, self.batch.sampling.clone(), row)
            for prompt, row in zip(self.batch.prompts, self.rows, strict=True)
        ]

    def start(self) -> None:
        """Start the blocks. For ``generate``, offer the prompts as first streamed tokens."""
        with ordinary():
            self.begin()
            if self.error is None and self._call == "generate":
                self._guarded(self._offer, TOKENS, 0, self.batch.ids.clone())
        self._find()

    def _find(self) -> None:
        """Update :attr:`wanted` from the locations at which blocks wait."""
        waited = [mediator.waiting[0] for mediator in self.mediators if mediator.waiting is not None]
        found = {self.places.location(site, self._call) for site in waited} - {None}
        if self._all_logits and self._result is None:
            found |= {self.places.last, LOGITS}
        self.wanted.clear()
        self.wanted.update(found)  # type: ignore[arg-type]

    # -- values --------------------------------------------------------------------------------------------------------

    def arrive(self, row: JobRow, location: str, value: Any, rows: RequestRows) -> Any:
        """Collect the rows of one request. Once all rows are there, run the blocks, and return the value with their changes."""
        if self.error is not None:
            return value
        here = location, row.steps
        if self._here and self._at != here:
            self.fail(RuntimeError("The engine did not compute the rows of a batch in one step."))
            return value
        self._at = here
        self._here.append((row, rows))
        if len(self._here) < len(self._live):
            return value
        together, self._here = self._here, []
        self.call_together = row.call_together
        value = self._guarded(self._serve, location, row.steps - 1, value, together, otherwise=value)
        self._find()
        return value

    def _serve(self, location: str, step: int, value: Any, here: Here) -> Any:
        if location == LOGITS:
            return self._serve_logits(step, value, here)
        if location == SAMPLES:
            tokens = torch.full((len(self.rows),), self.batch.pad, dtype=torch.int64)
            for row, rows in here:
                tokens[row.number] = rows.of(value).reshape(-1)[-1]
            self._offer(TOKENS, step + 1, tokens)
            return value
        main = tensors_of(location, value, self.places.module(location.rpartition(".")[0]))
        sites = self.places.sites(location)
        whole = self._together(main, here, self.places.trailing(sites[0]), step)
        for site in sites:
            whole = self._changed(site, step, whole, main, here)
        if location == self.places.last and self._all_logits:
            self._hidden = whole
        return value

    def _changed(self, site: str, step: int, whole: torch.Tensor, main: MainTensors, here: Here) -> torch.Tensor:
        """Offer ``whole`` at ``site``, write changes to the engine's tensors, and return the value as the blocks have left it."""
        version = whole._version
        left: torch.Tensor = self._offer(site, step, whole)
        if left is not whole or left._version > version:
            self._write(left, main, here, step)
        return left

    def _offer(self, site: str, occurrence: int, value: Any) -> Any:
        self.counts[site] = occurrence
        return self.handle(site, value)

    def _span(self, row: JobRow, size: int, step: int) -> slice:
        """Return the positions in the padded row of the ``size`` tokens that ``row`` has in a step."""
        start = self.batch.starts[row.number] if step == 0 else 0
        return slice(start, start + size)

    def _together(self, main: MainTensors, here: Here, trailing: torch.Size, step: int) -> torch.Tensor:
        """Join the rows to a new tensor ``[batch, positions, *trailing]``, as in transformers."""
        parts = [rows.of(main.first) for _, rows in here]
        if main.residual is not None:
            parts = [part + rows.of(main.residual) for part, (_, rows) in zip(parts, here, strict=True)]
        length = self.batch.length if step == 0 else 1
        if len(self.rows) == 1 and len(parts[0]) == length:
            return parts[0].reshape(1, length, *trailing).clone()
        whole = main.first.new_zeros(len(self.rows), length, *trailing)
        for part, (row, rows) in zip(parts, here, strict=True):
            whole[row.number, self._span(row, rows.size, step)] = part.reshape(rows.size, *trailing)
        return whole

    def _write(self, left: torch.Tensor, main: MainTensors, here: Here, step: int) -> None:
        """Write the changed value ``left`` to the rows of the engine."""
        with torch.inference_mode(main.first.is_inference()):
            for row, rows in here:
                part = rows.of(main.first)
                part.copy_(left[row.number, self._span(row, rows.size, step)].reshape(part.shape))
                if main.residual is not None:
                    rows.of(main.residual).zero_()

    # -- logits and results --------------------------------------------------------------------------------------------

    def _serve_logits(self, step: int, value: torch.Tensor, here: Here) -> torch.Tensor:
        places, head, root = self.places, self.places.head, self.places.root
        if not self._all_logits:  # only the logits of the last position, from which tokens are sampled
            logits = value.new_zeros(len(self.rows), 1, value.shape[-1])
            for row, rows in here:
                logits[row.number, 0] = rows.of(value)[0]
            version = logits._version
            left = self._offer(root, step, self._offer(head, step, logits))
            if left is not logits or left._version > version:
                with torch.inference_mode(value.is_inference()):
                    for row, rows in here:
                        rows.of(value)[0].copy_(left[row.number, 0])
            return value
        assert self._hidden is not None
        hidden, self._hidden = self._hidden, None
        made = called(self, places.head_path, places.module(places.head_path), (hidden.reshape(-1, hidden.shape[-1]),), {})
        logits = self._offer(head, step, made.reshape(*hidden.shape[:-1], made.shape[-1]))
        self._result = self._offer(root, step, places.final_logits(logits))
        return value

    def ended(self, row: JobRow) -> None:
        """Remove a row that has ended. After the last row, offer the results and end the blocks."""
        self._live.remove(row)
        if not self._live and self.error is None:
            with ordinary():
                self._guarded(self._end_blocks)
            self.finished = True

    def _end_blocks(self) -> None:
        """Offer the results, and end the blocks."""
        result = self._result
        if self._call == "generate":
            made = [torch.tensor(row.tokens or (), dtype=torch.int64) for row in self.rows]
            new = torch.nn.utils.rnn.pad_sequence(made, batch_first=True, padding_value=self.batch.pad)
            result = self._offer(IDS, 0, torch.cat([self.batch.ids, new], 1).to(self._interpreter.device))
        if self._call == "generate" or result is not None:
            self._offer(RESULT, 0, result)
        self._interpreter.finish(self)
        self.cancel()

    def _end(self, error: BaseException) -> None:
        super()._end(error)
        for row in self.rows:
            row.error = error
