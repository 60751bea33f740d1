"""Values that a block needs while it is recorded.

A block is recorded on fake tensors, which have no values. Where its Python needs a value (a condition, ``.item()``, an array), the
recording is *cut*: the program so far, with a ``stop`` at the present position of the block, is sent as a job that returns the value. The
block continues with the value, and the results that it computes from it are constants of the rest of the program. The whole program runs
last. So the model runs once for each cut, and once more.

The server keeps nothing between the jobs of a recording, so each job begins with the first node. All jobs have the same seed, and a job
contains all random operators of the earlier jobs, so they draw the same numbers. It does not repeat lines that earlier jobs have printed.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from greenlet import GreenletExit
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from ...fx.recording.functions import edits_in_place
from ...runtime.errors import loop_ended_message
from ...runtime.report import Break
from ...shared_changes import SharedChange
from ..counts import counts
from ..format.errors import ExecutionFailedError, NotExpressibleError
from ..format.operators import DRAWING
from ..format.payload import Job, encode
from ..format.results import decode_results
from ..format.sizes import has_unknown_size
from .known_values import KnownValues, Place
from .pruning import pruned
from .refusals import here, position, shown, why_demand

if TYPE_CHECKING:
    from .recorder import Recorder

#: Functions that need values and can run on a copy. Other functions that need values would show or change memory of another process.
VALUES = frozenset(
    "__bool__ __int__ __float__ __complex__ __index__ __contains__ __array__ __deepcopy__ __reduce_ex__ item tolist numpy equal allclose "
    "is_nonzero".split()
)

#: The original method of fake tensors, which asks for each entry by itself.
_tolist = FakeTensor.tolist


def _tolist_at_once(fake: FakeTensor) -> Any:
    if torch._C._is_torch_function_mode_enabled():
        return torch.overrides.handle_torch_function(_tolist, (fake,), fake)
    return _tolist(fake)


#: While active, the ``tolist`` of a fake tensor is one call for the recorder.
tolist_as_one_call = SharedChange(
    lambda: setattr(FakeTensor, "tolist", _tolist_at_once), lambda _: setattr(FakeTensor, "tolist", _tolist)
)


class NoOperatorError(NotExpressibleError):
    """Programs cannot contain ``operator``."""

    def __init__(self, message: str, operator: Any) -> None:
        super().__init__(here(message))
        self.reason, self.operator = message, operator


#: Errors of functions on fake tensors that need values.
NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException, NoOperatorError)

_EDITED = "does not reach the model. `.clone()` it first, or edit the value itself in the block of a trace."


class Cuts:
    """Gets the values that a block needs, by sending jobs.

    Args:
        recorder: Records the block.
        send: Runs a payload and returns its results. Without it, needs for values are refused.
        limit: Maximum number of jobs in one recording.

    Attributes:
        forced: Nodes that draw random numbers and were part of a job. All later jobs contain them.
        printed: Nodes whose lines earlier jobs have printed.
    """

    def __init__(self, recorder: Recorder, send: Callable[[bytes], bytes] | None, limit: int) -> None:
        self._recorder, self._send, self._limit = recorder, send, limit
        self._made = 0
        self._known = KnownValues(recorder)
        self._lent: list[tuple[torch.Tensor, int, str]] = []  # values that share memory with results, their versions, and errors
        self.forced: set[int] = set()
        self.printed: set[int] = set()

    def call(
        self, name: str, function: Callable[..., Any], args: Any, kwargs: Any, refusal: str, also: Iterable[torch.Tensor] = ()
    ) -> Any:
        """Call a function on values in place of fake tensors, and return its real result.

        Args:
            name: Name of the function.
            function: Called with ``args`` and ``kwargs``.
            args: Nested arguments.
            kwargs: Nested arguments by name.
            refusal: Message of the error if no job can be sent.
            also: Fake tensors whose values are fetched, too, if a job is sent.
        """
        weights = self._recorder.model.weights
        leaves, structure = pytree.tree_flatten((args, kwargs))
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, FakeTensor) or id(leaf) in weights]
        fakes = [self._recorder.substitute(leaves[place]) for place in places]
        values = self.values_of(fakes, name, refusal, also)
        with self._recorder.paused(), _disable_current_modes():
            with torch.inference_mode(False):  # inference tensors have no versions
                values = [_laid_out_as(fake, value) for fake, value in zip(fakes, values, strict=True)]
            versions = [value._version for value in values]
            for place, value in zip(places, values, strict=True):
                leaves[place] = value
            given = [leaf for place, leaf in enumerate(leaves) if place not in places]
            args, kwargs = pytree.tree_unflatten(leaves, structure)
            result = function(*args, **kwargs)
            made = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            memory = {leaf.untyped_storage()._cdata for leaf in made}
        call = shown(name)
        message = here(f"The result of {call[0].lower()}{call[1:]} was edited in place, which {_EDITED}")
        for value, version in zip(values, versions, strict=True):
            if value.untyped_storage()._cdata in memory:
                self._lent.append((value, version, message))
        if [value._version for value in values] != versions:
            raise NotExpressibleError(here(f"{shown(name)} edits a value in place, which {_EDITED}"))
        if any(leaf.is_floating_point() for leaf in made) and not all(map(self._is_detached, fakes)):
            gradients = self._recorder.gradients
            requires_grad = any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in given)
            lose = gradients.lose if requires_grad else gradients.lose_before
            lose(f"{shown(name)} before was done with values, which autograd does not follow")
        if type(result).__module__ == "numpy" and hasattr(result, "setflags"):
            result.setflags(write=False)  # a write to the array would not reach the model
        return result

    def recover(
        self, name: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception, refusal: str = ""
    ) -> Any:
        """Call a function on values, because it raised ``error`` on fakes. An index by a mask is recorded as an index by integers."""
        refusal = refusal or (error.reason if isinstance(error, NoOperatorError) else why_demand(name))
        if name == "masked_select" and not kwargs:
            name, args = "__getitem__", tuple(torch.broadcast_tensors(*args))
        if name == "__getitem__":
            index = _places_of_masks(args[1], lambda mask: self.values_of([mask], name, refusal)[0])
            if index is not None:
                return args[0][tuple(map(self._recorder._argument, index))]
        operator = getattr(error, "operator", None)
        shows = operator is not None and any(item.alias_info is not None for item in operator._schema.arguments)
        if shows or edits_in_place(function):  # the real result would not share memory with the model's tensor
            raise NotExpressibleError(here(refusal)) from error
        return self.call(name, function, args, kwargs, refusal)

    def check(self) -> None:
        """Raise an error if the block has edited a value through a result that shares memory with it."""
        for value, version, message in self._lent:
            if value._version != version:
                raise NotExpressibleError(message)

    def values_of(self, fakes: Sequence[torch.Tensor], name: str, refusal: str, also: Iterable[torch.Tensor] = ()) -> list[torch.Tensor]:
        """Return the values of fake tensors, which function ``name`` needs. The arguments are those of :meth:`call`."""
        self.check()
        sources: dict[Place, None] = {}
        for fake in fakes:
            if self._find(fake) is None:
                sources[self._source(fake)] = None
        if sources:
            sources |= {self._source(fake): None for fake in also if self._find(fake) is None}
            if self._send is None or not self._limit:
                raise NotExpressibleError(here(refusal))
            if self._made == self._limit:
                raise NotExpressibleError(
                    here(
                        f"This trace or session asks for values more than {self._limit} times, and the model runs each time. Ask for "
                        "several values at once, as in `torch.stack(values).tolist()`, or raise the limit: `CONFIG.API.CUTS = ...`."
                    )
                )
            self._made += 1
            for source, value in zip(sources, self._fetch(list(sources), name), strict=True):
                if value is not None:
                    self._known.keep(source, value)
        found = [value for fake in fakes if (value := self._find(fake)) is not None]
        if len(found) < len(fakes):
            why = "the generation had ended before, or the model had no tensor there"
            raise ExecutionFailedError(here(f"{shown(name)} needs a value that was not computed: {why}."))
        return found

    def _place(self, fake: torch.Tensor) -> Place:
        node, output = self._recorder.reference(fake)["ref"]
        return node, output

    def _find(self, fake: torch.Tensor) -> torch.Tensor | None:
        return self._known.find(self._place(fake))

    def _source(self, fake: torch.Tensor) -> Place:
        return self._known.source(self._place(fake), fake)

    def _is_detached(self, fake: torch.Tensor) -> bool:
        node = self._recorder.nodes[self._place(fake)[0]]
        return not fake.is_floating_point() or node.get("name") == "aten.detach.default"

    # -- a job -----------------------------------------------------------------------------------------------------------

    def _fetch(self, places: list[Place], name: str) -> list[torch.Tensor | None]:
        """Run the program so far, and return the values of ``places``. Function ``name`` needs them."""
        recorder, send = self._recorder, self._send
        visit = next((visit for visit in reversed(recorder._visits) if visit.block == recorder.block), None)
        location = "the end of the trace" if recorder.block is None else "the start" if visit is None else f"{visit.site}.i{visit.at}"
        recorder.report.breaks.append(Break(location, f"{shown(name)} needs a value", *position()))
        counts["cuts"] += 1
        with recorder.paused():
            job, printed = self._job(places)
            payload = recorder.seeded(job)
        assert send is not None
        found = _in_own_thread(lambda: decode_results(send(encode(payload))))
        self.printed |= printed
        recorder.prints.catch_up()
        if len(found) < len(places) and recorder.block is not None:  # the generation has ended, which ends the loop of the block
            ended = ("model.input", 0) if visit is None else (visit.site, visit.at)
            warnings.warn_explicit(loop_ended_message(*ended), UserWarning, *position())
            raise GreenletExit
        return [found.get(f"value{number}") for number in range(len(places))]

    def _job(self, places: list[Place]) -> tuple[Job, set[int]]:
        """Return a job that returns the values of ``places``, and the nodes whose lines it prints."""
        recorder = self._recorder
        runs, nodes = recorder.with_blocks()
        roots = list(recorder._roots)
        references = [{"ref": list(place)} for place in places]
        self.forced |= {number for number, node in enumerate(nodes) if node.get("name") in DRAWING}
        printed = {number for number, node in enumerate(nodes) if node["do"] == "log"}
        first = len(nodes)

        def add(do: str, **content: Any) -> None:
            nodes.append({"do": do, "run": len(runs) - 1, "block": recorder.block, "line": position()[1], **content})
            roots.append(len(nodes) - 1)

        if recorder.block is not None:
            visit = next((visit for visit in reversed(recorder._visits) if visit.block == recorder.block), None)
            if visit is not None and visit.places and not recorder.gradients.running:
                add("read", **visit.place(0))  # makes the block wait for this location before it stops
            copied = [len(nodes) + place for place in range(len(references))]
            for reference in references:
                add("op", name="aten.clone.default", args=[reference])
            references = [{"ref": [number, 0]} for number in copied]
            if recorder.gradients.running:
                add("end")
            add("stop")
        forced = self.forced | set(range(first, len(nodes)))
        trees = {f"value{number}": reference for number, reference in enumerate(references)}
        job, _ = pruned(runs, nodes, roots, trees, recorder.tensors, forced, self.printed)
        return job, printed


def _places_of_masks(index: Any, value_of: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return an index with integers in place of masks that are fake tensors; ``None`` if there is no such mask."""
    items = index if isinstance(index, tuple) else (index,)
    made: list[Any] = []
    for item in items:
        if isinstance(item, FakeTensor) and item.dtype in (torch.bool, torch.uint8) and item.dim():
            value = value_of(item)
            with _disable_current_modes():
                made += value.nonzero(as_tuple=True)
        else:
            made.append(item)
    return None if all(any(item is other for other in items) for item in made) else tuple(made)


def _laid_out_as(fake: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return a copy of a value with the strides of its fake tensor. Rounding in later operations may depend on the strides."""
    with torch._C.DisableTorchFunction():
        sizes, strides = tuple(fake.size()), fake.stride()
    if has_unknown_size(fake) or sizes != tuple(value.shape) or 0 in strides:
        return value.clone()
    return torch.empty_strided(sizes, strides, dtype=value.dtype).copy_(value)


def _in_own_thread(function: Callable[[], Any]) -> Any:
    """Return the result of ``function``, called in a new thread. There, no run and no mode of the recording is active."""
    found: list[Any] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            found.append(function())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="nnsight-demand", daemon=True)
    thread.start()
    thread.join()
    if failed:
        raise failed.pop()
    return found.pop()
