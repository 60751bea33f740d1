"""Values of fake tensors that the client knows, and values that it can compute from them.

A block often needs several values from one source: ``scores.tolist()`` on a fake tensor asks for each entry, and ``score > 0.5`` in a loop
makes a new tensor each time. To save jobs, the value of a view of a small tensor is found by asking for the whole tensor. Results of
operators on known numbers are computed here.

A value is valid for one state of its memory. The state changes with each in-place edit and, in memory of the model, with each visit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ..format.nodes import MEMORY_FORMATS, Node
from ..format.operators import DRAWING, OPERATORS, is_in_place, is_view
from ..format.sizes import has_unknown_size
from ..format.trees import read_tree, references

if TYPE_CHECKING:
    from .recorder import Recorder

#: Maximum number of bytes of a tensor that is fetched in place of a view of it.
_SMALL = 2**16

_COMPARISONS = frozenset(f"aten.{name}.Scalar" for name in "gt ge lt le eq ne".split())

#: Maximum length of a chain of operators that is computed here.
_DEEPEST = 100

#: The state of memory that was never edited, and that the model does not share.
_UNTOUCHED = (0, None)

Place = tuple[int, int]


class KnownValues:
    """The known values of a recording, by node and output."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._values: dict[Place, tuple[Any, torch.Tensor]] = {}
        self._edits: Counter[int] = Counter()  # number of in-place edits of each memory, by root node
        self._shared: set[int] = set()  # root nodes of memory that the block gave to the model
        self._noted = 0  # number of nodes that are counted in `_edits` and `_shared`

    def source(self, place: Place, fake: torch.Tensor) -> Place:
        """Return the place to fetch when the value of ``fake``, which is at ``place``, is needed.

        It is ``place`` itself, or the base of a view, or the tensor that a comparison compares with a number.
        """
        nodes, state = self._recorder.nodes, self._state
        self._note_edits()
        if nodes[place[0]].get("name") in _COMPARISONS:
            compared = next(references(nodes[place[0]]["args"][0]))
            known = next((known for known, found in self._recorder._refs.items() if found == compared), None)
            if known is not None and state(compared[0]) == state(place[0]) == _UNTOUCHED:
                place, fake = compared, known
        with torch._C.DisableTorchFunction():
            small = not has_unknown_size(fake) and fake.untyped_storage().nbytes() <= _SMALL
        while small and nodes[place[0]]["do"] == "op" and is_view(nodes[place[0]]["name"]):
            place = next(references(nodes[place[0]]["args"][0]))
        return place

    def keep(self, place: Place, value: torch.Tensor) -> None:
        """Store the present value at a place."""
        self._note_edits()
        self._values[place] = self._state(place[0]), value

    def find(self, place: Place) -> torch.Tensor | None:
        """Return the value at a place if it is known or can be computed from known values, else ``None``."""
        self._note_edits()
        with self._recorder.paused(), _disable_current_modes():
            return _Search(self._recorder, self._values, self._state).find(place, 0)

    def _state(self, number: int) -> Any:
        """Return the state of the memory of a node."""
        root = self._recorder._roots[number]
        own = self._recorder.nodes[root]["do"] in ("op", "const", "weight") and root not in self._shared
        return self._edits[root], None if own else self._recorder.moves

    def _note_edits(self) -> None:
        """Note the memory that new nodes edit or give to the model."""
        nodes, roots = self._recorder.nodes, self._recorder._roots
        for number in range(self._noted, len(nodes)):
            node = nodes[number]
            if is_in_place(node.get("name", "")):
                self._edits[roots[number]] += 1
            elif node["do"] in ("write", "skip", "apply"):
                self._shared |= {roots[used] for used, _ in references(node)}
        self._noted = len(nodes)


class _Search:
    """Finds values in one state of the recording."""

    def __init__(self, recorder: Recorder, values: dict[Place, tuple[Any, torch.Tensor]], state: Callable[[int], Any]) -> None:
        self._nodes, self._tensors = recorder.nodes, recorder.tensors
        self._values, self._state = values, state
        self._seen: dict[Place, torch.Tensor | None] = {}

    def find(self, place: Place, depth: int) -> torch.Tensor | None:
        if place not in self._seen:
            self._seen[place] = None
            known, node = self._values.get(place), self._nodes[place[0]]
            if known is not None and known[0] == self._state(place[0]):
                self._seen[place] = known[1]
            elif node["do"] == "const":
                self._seen[place] = self._tensors[node["tensor"]].cpu()
            elif node["do"] == "op" and depth < _DEEPEST and node["name"] not in DRAWING and not is_in_place(node["name"]):
                self._seen[place] = self._compute(place, node, depth + 1)
        return self._seen[place]

    def _compute(self, place: Place, node: Node, depth: int) -> torch.Tensor | None:
        """Compute the result of an operator on known numbers, or a view of a known value."""
        viewed = next(references(node["args"][:1]), None) if is_view(node["name"]) else None
        if viewed is None and self._state(place[0]) != _UNTOUCHED:
            return None
        found: dict[Place, torch.Tensor] = {}
        for used in references(node):
            value = self.find(used, depth) if used == viewed or self._state(used[0]) == _UNTOUCHED else None
            if value is None or (used != viewed and value.numel() != 1):  # with several numbers, rounding could depend on the layout
                return None
            found[used] = value

        def leaf(kind: str, content: Any) -> Any:
            other = {"layout": torch.strided, "device": torch.device("cpu")}.get(kind)
            return found[content[0], content[1]] if kind == "ref" else other or MEMORY_FORMATS[content]

        args, kwargs = read_tree(node["args"], leaf), {key: read_tree(item, leaf) for key, item in node.get("kwargs", {}).items()}
        try:
            made = OPERATORS[node["name"]](*args, **kwargs)
        except Exception:  # for instance, the CPU has no kernel for the dtype
            return None
        outputs = made if isinstance(made, (list, tuple)) else [made]
        for number, output in enumerate(outputs):
            self._values[place[0], number] = self._state(place[0]), output
        return outputs[place[1]] if place[1] < len(outputs) else None  # the result can have fewer tensors than on fakes
