"""Values that a block demands while it is recorded.

A block is recorded on fakes, which have no values. Where its Python needs one (a condition, ``.item()``, an array), the recording is *cut*:
the program so far, up to a ``stop`` where the block stands, is sent as a job that returns the value. The block goes on with the value, and
what it makes of it is a constant of the rest of the program. The program as a whole runs last. So the model runs once for each cut, and once more.

Nothing is held where the model runs, so each job begins with the first node. All jobs of a recording have one seed, and every operator that
draws is part of each later job, so they draw the same numbers. Lines that a job has printed are not part of later ones.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from greenlet import GreenletExit
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from ...fx.recording.functions import edits_in_place
from ...runtime.errors import loop_ended_message
from ...runtime.report import Break
from ..counts import counts
from ..format.errors import NotExpressibleError
from ..format.nodes import Node
from ..format.operators import DRAWING, is_in_place
from ..format.payload import Job, encode
from ..format.results import decode_results
from ..format.trees import references
from .pruning import pruned
from .refusals import here, position, shown

if TYPE_CHECKING:
    from .recorder import Recorder

#: Functions of a tensor that give Python a value. Others of the demanding ones would show or change memory that is elsewhere.
VALUES = frozenset(
    "__bool__ __int__ __float__ __complex__ __index__ __contains__ __array__ __deepcopy__ __reduce_ex__ item tolist numpy equal allclose "
    "is_nonzero".split()
)


class Cuts:
    """Gets the values that a block demands.

    Args:
        recorder: Records the block.
        send: Runs a payload and returns its results; without it, demands are refused.
        limit: How many jobs may be sent for values in one recording.

    Attributes:
        forced: Nodes that draw and were part of a job, so that they are part of all later ones.
        printed: Nodes whose lines have been shown.
    """

    def __init__(self, recorder: Recorder, send: Callable[[bytes], bytes] | None, limit: int) -> None:
        self._recorder, self._send, self._limit = recorder, send, limit
        self._made = 0
        self._known: Any = WeakIdKeyDictionary()  # fake -> (state of its memory, value)
        self.forced: set[int] = set()
        self.printed: set[int] = set()

    def call(
        self, name: str, function: Callable[..., Any], args: Any, kwargs: Any, refusal: str, also: Iterable[torch.Tensor] = ()
    ) -> Any:
        """Call a function on values in place of fakes; what it returns is real.

        Args:
            name: Of the function.
            function: Called with ``args`` and ``kwargs``.
            args: Nested arguments.
            kwargs: Likewise, by name.
            refusal: Why it is refused, if values cannot be asked for.
            also: Fakes whose values come along if a job is sent.
        """
        weights = self._recorder.model.weights
        leaves, structure = pytree.tree_flatten((args, kwargs))
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, FakeTensor) or id(leaf) in weights]
        fakes = [self._recorder.substitute(leaves[place]) for place in places]
        for place, value in zip(places, self.values_of(fakes, name, refusal, also), strict=True):
            leaves[place] = value
        args, kwargs = pytree.tree_unflatten(leaves, structure)
        with self._recorder.paused(), _disable_current_modes():
            result = function(*args, **kwargs)
        made = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if any(leaf.is_floating_point() for leaf in made) and not all(map(self._is_detached, fakes)):
            self._recorder.gradients.lose(f"{shown(name)} before was done with values, which autograd does not follow")
        if type(result).__module__ == "numpy" and hasattr(result, "setflags"):
            result.setflags(write=False)  # writing to it would change nothing in the model
        return result

    def values_of(self, fakes: Sequence[torch.Tensor], name: str, refusal: str, also: Iterable[torch.Tensor] = ()) -> list[torch.Tensor]:
        """Return the values of fakes, which function ``name`` demands; see :meth:`call`."""
        states = {id(fake): self._state(fake) for fake in (*fakes, *also)}
        wanted = {id(fake): fake for fake in (*fakes, *also) if self._known.get(fake, (None,))[0] != states[id(fake)]}
        if any(id(fake) in wanted for fake in fakes):
            if self._send is None or not self._limit:
                raise NotExpressibleError(here(refusal))
            self._check_limit()
            for fake, value in zip(wanted.values(), self._fetch(list(wanted.values()), name), strict=True):
                self._known[fake] = states[id(fake)], value
        return [self._known[fake][1] for fake in fakes]

    def _check_limit(self) -> None:
        self._made += 1
        if self._made > self._limit:
            raise NotExpressibleError(
                here(
                    f"This trace or session needs values for more than {self._limit} times, and each time the model runs anew. Ask for "
                    "several at once, as in `torch.stack(values).tolist()`, or raise the limit: `CONFIG.API.CUTS = ...`."
                )
            )

    def _state(self, fake: torch.Tensor) -> Any:
        """Return something that differs if the values of a known fake may: the edits of its memory so far, also by the model."""
        recorder = self._recorder
        root = recorder._roots[recorder.reference(fake)["ref"][0]]
        nodes = enumerate(recorder.nodes)
        edits = [number for number, node in nodes if recorder._roots[number] == root and is_in_place(node.get("name", ""))]
        return len(edits), recorder.moves if self._may_change(root) else None

    def _may_change(self, root: int) -> bool:
        """Whether the model, or a pass, may edit the memory of a node."""
        recorder = self._recorder
        if recorder.nodes[root]["do"] not in ("op", "const", "weight"):
            return True
        given = (node for node in recorder.nodes if node["do"] in ("write", "skip", "apply"))
        return any(recorder._roots[number] == root for node in given for number, _ in references(node))

    def _is_detached(self, fake: torch.Tensor) -> bool:
        node = self._recorder.nodes[self._recorder._refs[fake][0]]
        return not fake.is_floating_point() or node.get("name") == "aten.detach.default"

    # -- a job -----------------------------------------------------------------------------------------------------------

    def _fetch(self, fakes: list[torch.Tensor], name: str) -> list[torch.Tensor]:
        """Run the program so far; return the values of fakes."""
        recorder, send = self._recorder, self._send
        visit = next((visit for visit in reversed(recorder._visits) if visit.block == recorder.block), None)
        location = "the end of the trace" if recorder.block is None else "the start" if visit is None else f"{visit.site}.i{visit.at}"
        recorder.report.breaks.append(Break(location, f"{shown(name)} needs a value", *position()))
        counts["cuts"] += 1
        with recorder.paused():
            job, printed = self._job(fakes)
            payload = recorder.seeded(job)
        assert send is not None
        found = _apart(lambda: decode_results(send(encode(payload))))
        self.printed |= printed
        recorder.prints.catch_up()
        values: list[torch.Tensor] = found.get("values", [])
        if len(values) < len(fakes):  # a generation has ended before, and with it the loop of the block
            ended = ("model.input", 0) if visit is None else (visit.site, visit.at)
            warnings.warn_explicit(loop_ended_message(*ended), UserWarning, *position())
            raise GreenletExit
        return values

    def _job(self, fakes: list[torch.Tensor]) -> tuple[Job, set[int]]:
        """Return a job that returns the values of fakes, and the nodes whose lines it prints."""
        recorder = self._recorder
        runs, nodes = recorder.with_blocks()
        roots = list(recorder._roots)
        references = [recorder.reference(fake) for fake in fakes]
        self.forced |= {number for number, node in enumerate(nodes) if node.get("name") in DRAWING}
        printed = {number for number, node in enumerate(nodes) if node["do"] == "log"}
        first = len(nodes)

        def add(do: str, **content: Any) -> None:
            nodes.append({"do": do, "run": len(runs) - 1, "block": recorder.block, "line": position()[1], **content})
            roots.append(len(nodes) - 1)

        if recorder.block is not None:
            visit = next((visit for visit in reversed(recorder._visits) if visit.block == recorder.block), None)
            if visit is not None and visit.places and not recorder.gradients.running:
                add("read", **visit.place(0))  # the block has to be there, too, when it stops
            copied = [len(nodes) + place for place in range(len(references))]
            for reference in references:
                add("op", name="aten.clone.default", args=[reference])
            references = [{"ref": [number, 0]} for number in copied]
            if recorder.gradients.running:
                add("end")
            add("stop")
        forced = self.forced | set(range(first, len(nodes)))
        job, _ = pruned(runs, nodes, roots, {"values": {"list": references}}, recorder.tensors, forced, self.printed)
        return job, printed


def is_refused(function: Any, operator: Any) -> bool:
    """Whether a function without an operator in programs cannot be done with values instead: it edits, or shows memory of, a tensor."""
    shows = operator is not None and any(item.alias_info is not None for item in operator._schema.arguments)
    return shows or edits_in_place(function)


def places_of_masks(index: Any, value_of: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return an index with integers in place of masks that are fakes; ``None`` if it has none."""
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


def _apart(function: Callable[[], Any]) -> Any:
    """Return what ``function`` returns in a thread of its own, where no mode of the recording and no run is active."""
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
