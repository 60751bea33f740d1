"""The interpreter: it runs the blocks of a program.

Each block of a run becomes a function that executes the nodes of the block in an ordinary mediator. It waits at locations, reads, writes
and skips like a block written in Python. So it works under the eager driver, under the compiled driver, and on fake tensors, where the
server checks the program. Operators come from the table only. No name or code of the client is looked up, evaluated or compiled.
"""

from __future__ import annotations

import itertools
import time
import types
from collections import Counter
from collections.abc import Callable, Iterable
from keyword import iskeyword
from typing import Any

import torch
from greenlet import GreenletExit
from torch.utils import _pytree as pytree

from ...modeling.base import NNsight
from ...runtime.errors import EarlyStopException, OutOfOrderError
from ...runtime.gradients import Gradient, differentiate
from ...runtime.interleaver import Interleaver, active_interleaver
from ...runtime.invoker import Barrier
from ...runtime.mediator import Mediator
from ...runtime.modules.interception import call_alone
from ..format.errors import ExecutionFailedError, InvalidProgramError, require
from ..format.formats import text_of
from ..format.limits import Limits
from ..format.nodes import MEMORY_FORMATS, Node
from ..format.operators import DRAWING, OPERATORS
from ..format.payload import Job, fact
from ..format.sizes import division
from ..format.trees import NONE, read_tree, references, with_references
from .draws import check_parameters, dropout
from .fake_runs import device_of
from .indices import check_indices
from .occurrences import leaf_at, tensors_at, with_leaf

#: Operators whose result is ``None`` if their argument is ``None``.
_COPIES = frozenset({"aten.detach.default", "aten._to_copy.default", "aten.clone.default"})


class Interpreter:
    """Runs a checked job on a loaded model, and holds its values.

    Attributes:
        values: The result of each node, as a tuple of tensors.
        generator: Generator for random operators; ``None`` for the generator of the process.
        on_log: Called with each line that the program prints, or ``None``.
        check_write: Called with each tensor of the model before a node writes to it; see :func:`guard`.
        differentiates: Whether the program has a backward pass, so that the run needs autograd.
        mediator: The class of the blocks.
    """

    mediator: type[Mediator] = Mediator

    def __init__(self, model: NNsight, job: Job, limits: Limits) -> None:
        self.model, self.job, self.limits, self.device = model, job, limits, device_of(model._module)
        self.constants = job.tensors
        self._deadline = time.monotonic() + limits.seconds
        self.values: dict[int, tuple[Any, ...]] = {}
        self.generator: torch.Generator | None = None
        self.on_log: Callable[[str], None] | None = None
        self.check_write = guard(model._tree.paths)
        self._used, uses = fact(job, "uses", lambda: _uses(job))
        self._uses = Counter(uses)
        self.differentiates = any(node["do"] == "backward" for node in job.nodes)
        self._copied: dict[int, tuple[torch.Tensor, int, torch.Tensor]] = {}
        self._waiting: dict[Mediator, Node] = {}
        self._barriers: dict[tuple[int, int], Barrier] = {}

    def place_constants(self) -> None:
        """Move the constants to the device of the model."""
        self.constants = {name: tensor.to(self.device) for name, tensor in self.constants.items()}

    # -- the model ---------------------------------------------------------------------------------------------------

    def apply(self, path: str, args: Any, kwargs: Any) -> Any:
        """Apply the module at ``path``."""
        module = self.model._tree.module_at(path)
        assert module is not None
        return call_alone(module, args, kwargs)

    def weight(self, name: str) -> torch.Tensor:
        """Return the parameter or buffer ``name``."""
        path, _, attribute = name.rpartition(".")
        found: torch.Tensor = getattr(self.model._module.get_submodule(path), attribute)
        return found if torch.is_grad_enabled() else found.detach()

    def done(self, node: Node, arguments: Any, result: Any) -> None:
        """Called with the arguments and the result of each ``op`` and ``apply`` node. Subclasses override it."""

    # -- blocks ------------------------------------------------------------------------------------------------------

    def mediators(self, run: int) -> list[Mediator]:
        """Return the blocks of a run."""
        blocks: list[list[tuple[int, Node]]] = [[] for _ in range(self.job.runs[run]["blocks"])]
        for number, node in enumerate(self.job.nodes):
            if node["run"] == run:
                blocks[node["block"]].append((number, node))
        self._mediators = [
            self.mediator(lambda nodes=nodes: self.run_nodes(nodes), None, f"block {number}")  # type: ignore[misc]
            for number, nodes in enumerate(blocks)
        ]
        return self._mediators

    def finish(self, interleaver: Interleaver) -> None:
        """End the blocks after the model has returned. A block that still waits in a loop is complete.

        Raises:
            ExecutionFailedError: If a block still waits outside of a loop.
        """
        for mediator in self._mediators:
            node = self._waiting.get(mediator)
            if mediator.waiting is None:
                continue
            if node is not None and node.get("loop"):
                mediator.throw(GreenletExit())
                continue
            location, occurrence = mediator.waiting
            calls = interleaver.counts.get(location, 0)
            raise ExecutionFailedError(
                f"`{location}.i{occurrence}` was not reached{_line(node)}: the model passed there {calls} times."
            )

    def saved(self, leaf: Callable[[torch.Tensor], Any]) -> dict[str, Any]:
        """Return the trees of the saved values by name. ``leaf(tensor)`` returns the tree of a tensor."""

        def found(node: int, output: int) -> Any:
            made = self.values.get(node)
            if made is None:
                return {"absent": "never computed"}
            if output < len(made) and made[output] is None:  # such as an attention mask that the model does not use
                return {"absent": NONE}
            return leaf(self._output(made, node, output))

        saves: dict[str, Any] = with_references(self.job.saves, found)
        return saves

    def check_time(self) -> None:
        """Raise an :class:`ExecutionFailedError` if the job has taken too long."""
        if time.monotonic() > self._deadline:
            raise ExecutionFailedError(f"The job took longer than {self.limits.seconds:g} seconds.")

    def run_nodes(self, nodes: list[tuple[int, Node]]) -> None:
        """Execute nodes in the block that is running."""
        pending = iter(nodes)
        for number, node in pending:
            along: list[tuple[int, Node]] = []
            if node["do"] == "backward":
                along = list(itertools.takewhile(lambda item: item[1]["do"] != "end", pending))
            try:
                self.check_time()
                self._do(number, node, along)
            except (EarlyStopException, GreenletExit):
                raise
            except (ExecutionFailedError, InvalidProgramError) as error:
                raise type(error)(f"{_what(node)}{_line(node)}: {error}") from error
            except OutOfOrderError as error:
                raise ExecutionFailedError(f"{_what(node)}{_line(node)}: {error}") from error
            except Exception as error:
                raise ExecutionFailedError(f"{_what(node)}{_line(node)} failed: {error}") from error

    def _do(self, number: int, node: Node, along: list[tuple[int, Node]]) -> None:
        if node.get("no_grad") and torch.is_grad_enabled():
            with torch.no_grad():
                self._do(number, node, along)
            return
        run: Any = active_interleaver()
        mediator = run.current
        match node["do"]:
            case "const":
                self._keep(number, (self.constants[node["tensor"]],))
            case "weight":
                self._keep(number, (self.weight(node["name"]),))
            case "read":
                leaf = self._leaf(mediator, node)
                self._keep(number, (leaf.clone() if node.get("copy") and isinstance(leaf, torch.Tensor) else leaf,))
            case "write":
                self._write(mediator, node)
            case "skip":
                self._waiting[mediator] = node
                mediator.skip(_place(node), self._read(node["value"]))
            case "op":
                self._operate(number, node)
            case "apply":
                args, kwargs = self._read(node["args"]), self._read(node["kwargs"])
                made = tensors_at(self.apply(node["module"], args, kwargs))
                made = [item.clone() if node.get("copy") and isinstance(item, torch.Tensor) else item for item in made]
                self.done(node, (args, kwargs), made)
                self._keep(number, tuple(made))
            case "barrier":
                known = self._barriers.get((node["run"], node["id"]))
                if known is None or known.participants != node["of"]:
                    trace: Any = types.SimpleNamespace(opens_invokes=False)
                    known = self._barriers[node["run"], node["id"]] = Barrier(trace, node["of"])
                known()
            case "stop":
                raise EarlyStopException
            case "size":
                self._compare(self._read(node["value"]), node["dim"], node["size"])
            case "log":
                self._log(node["text"])
            case "requires_grad":
                self._require_grad(node)
            case "backward":
                self._differentiate(node, along)
            case "grad":
                self._keep(number, (Gradient(self._differentiable(node["wrt"])).grad,))
            case "set_grad":
                Gradient(self._differentiable(node["wrt"])).grad = self._read(node["value"])
        for used, count in self._used[number].items():
            self._uses[used] -= count
            if self._uses[used] <= 0:
                self.values.pop(used, None)

    # -- nodes -------------------------------------------------------------------------------------------------------

    def _leaf(self, mediator: Any, node: Node) -> Any:
        self._waiting[mediator] = node
        return self._leaf_in(mediator.request(_place(node)), node)

    def _leaf_in(self, value: Any, node: Node) -> Any:
        """Return the leaf that a node names in the value at its location."""
        return leaf_at(value, node)

    def _with_leaf(self, value: Any, node: Node, new: torch.Tensor) -> Any:
        """Return the value with ``new`` in place of the leaf that a node names."""
        return with_leaf(value, node, new)

    def _write(self, mediator: Any, node: Node) -> None:
        old, new = self._leaf(mediator, node), self._read(node["value"])
        if not isinstance(old, torch.Tensor):
            raise InvalidProgramError("there is no tensor to write to")
        if node.get("in_place"):
            with torch._C.DisableTorchFunction():  # this comparison is not a read of sizes by the program
                fits = new.shape == old.shape and new.dtype == old.dtype
            if not fits:
                raise InvalidProgramError("an in-place write has another shape or dtype than the tensor")
            self.check_write(old)
            old.copy_(new)
            source, output = node["value"]["ref"]
            if output == 0 and self.job.nodes[source]["do"] == "read" and source in self.values:
                self.values[source] = (old,)  # from here on, the value follows edits by the model
                if self.differentiates:
                    self._copied[source] = old, old._version, new
        else:
            mediator.swap(_place(node), self._with_leaf(mediator.request(_place(node)), node, new))

    def _operate(self, number: int, node: Node) -> None:
        operator, first = OPERATORS[node["name"]], (node["args"] or [None])[:1]
        if node["name"] in _COPIES and type(first[0]) is dict and self.values.get(first[0]["ref"][0]) == (None,):
            self._keep(number, (None,))  # a cache of activations keeps the `None` of an unused attention mask
            return
        args = self._read(node["args"])
        kwargs = {key: self._read(value) for key, value in node.get("kwargs", {}).items()}
        check_indices(operator, args, kwargs)
        divided, most = division(node["name"], args, kwargs), self.limits.items
        require(divided is None or divided[1] <= most, f"it has more results than the limit, {most}")
        if iskeyword(operator._overloadname):  # the generated code of a graph cannot contain `random_.from`
            operator = operator.overloadpacket
        result = self._draw(node["name"], operator, args, kwargs) if node["name"] in DRAWING else operator(*args, **kwargs)
        if node.get("copy"):
            result = pytree.tree_map(torch.clone, result)
        self.done(node, (args, kwargs), result)
        self._keep(number, tuple(result) if isinstance(result, (list, tuple)) else (result,))

    def _draw(self, name: str, operator: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Call a random operator with the generator of this run."""
        check_parameters(name, args[1] if name == "aten.bernoulli_.Tensor" else args[0])
        if name != "aten.native_dropout.default":
            return operator(*args, **kwargs, generator=self.generator)
        if self.generator is None or args[2] is False:
            return operator(*args, **kwargs)
        return dropout(args[0], args[1], self.generator)

    @staticmethod
    def _compare(tensor: torch.Tensor, dim: int, size: int) -> None:
        """Raise an error unless a size is the same as in the recording."""
        found = tensor.shape[dim] if dim < tensor.dim() else None
        if found != size:
            raise InvalidProgramError(
                f"the block, or a function of torch that it called, looked at dimension {dim} of this value, which was {size} when the "
                f"program was recorded and is {found} here, and the program depends on it. Record it for inputs of this size, or write it "
                "without that size, as in `hidden[:, -1]` and `hidden.mean(1)`"
            )

    def _log(self, pieces: list[Any]) -> None:
        values = {piece["value"]["ref"][0]: self._read(piece["value"]) for piece in pieces if type(piece) is dict}
        if self.on_log is not None:
            self.on_log(text_of(pieces, lambda reference: values[reference["ref"][0]]))

    # -- gradients ---------------------------------------------------------------------------------------------------

    def _require_grad(self, node: Node) -> None:
        source, output = node["value"]["ref"]
        tensor = self._lookup(source, output)
        if self.job.nodes[source]["do"] == "const":  # only this run uses the new object
            self.values[source] = (tensor.detach().requires_grad_(),)
        elif not tensor.requires_grad:
            self.check_write(tensor)  # the flag of a tensor that outlives the run must not change
            tensor.requires_grad_()

    def _differentiate(self, node: Node, along: list[tuple[int, Node]]) -> None:
        asked = []
        for source, output in (item["wrt"]["ref"] for _, item in along if "wrt" in item):
            if source in self.values:
                asked.append(self._differentiable({"ref": [source, output]}))
            elif self.job.nodes[source]["do"] == "weight":  # the node of this weight is in the block of the pass
                asked.append(self.weight(self.job.nodes[source]["name"]))
        differentiate(
            self._lookup(*node["value"]["ref"]),
            asked,
            lambda: self.run_nodes(along),
            self._read(node.get("gradient")),
            retain_graph=node.get("retain_graph"),
            create_graph=node.get("create_graph", False),
        )

    def _differentiable(self, reference: dict[str, Any]) -> torch.Tensor:
        """Return the tensor to which all gradients of a value flow.

        If the block edited a value of the model, it did so in a copy. Values that the block computed from the copy do not depend on the
        model's tensor, so the result is the copy, unless the model edited its tensor afterwards.
        """
        source, output = reference["ref"]
        old, version, copied = self._copied.get(source, (None, 0, None))
        if old is not None and copied is not None and output == 0 and old._version == version:
            return copied
        return self._lookup(source, output)

    def _keep(self, number: int, made: tuple[Any, ...]) -> None:
        if self._uses[number]:
            self.values[number] = made

    def _read(self, tree: Any) -> Any:
        """Return the value of a checked tree, or of a checked argument of an operator."""
        return read_tree(tree, self._leaf_of)

    def _leaf_of(self, kind: str, content: Any) -> Any:
        match kind:
            case "ref":
                return self._lookup(*content)
            case "layout":
                return torch.strided
            case "device":
                return self.device
        return MEMORY_FORMATS[content]

    def _lookup(self, node: int, output: int) -> Any:
        made = self.values.get(node)
        if made is None:
            raise InvalidProgramError(f"Node {node} is used before it has run.")
        return self._output(made, node, output)

    @staticmethod
    def _output(made: tuple[Any, ...], node: int, output: int) -> torch.Tensor:
        if output >= len(made) or not isinstance(made[output], torch.Tensor):
            raise InvalidProgramError(f"Node {node} has no tensor number {output}.")
        return made[output]


def guard(modules: Iterable[torch.nn.Module]) -> Callable[[torch.Tensor], None]:
    """Return a function that raises an :class:`InvalidProgramError` for a tensor in the memory of a weight of ``modules``."""
    kept: set[int] = set()

    def check(tensor: torch.Tensor) -> None:
        if type(tensor) is not torch.Tensor:  # a compiled run, which the rehearsal has checked
            return
        if not kept:
            for module in modules:
                for weight in (*module._parameters.values(), *module._buffers.values()):
                    if weight is not None:
                        kept.add(weight.untyped_storage()._cdata)
        written = tensor.untyped_storage()._cdata in kept
        require(not written, "The program would write to memory of the model that outlives the run.")

    return check


def _place(node: Node) -> str:
    return f"{node['site']}.i{node['at']}"


def _what(node: Node) -> str:
    return {"op": f"`{node.get('name')}`", "apply": f"`{node.get('module')}(...)`"}.get(
        node["do"], f"{node['do']} `{node['site']}`" if "site" in node else node["do"]
    )


def _line(node: Node | None) -> str:
    return "" if node is None or "line" not in node else f", line {node['line']}"


def _uses(job: Job) -> tuple[list[Counter[int]], Counter[int]]:
    """Return, for each node, how often it uses each result, and how often nodes and saved values together use each result."""
    used = [Counter(node for node, _ in references(user)) for user in job.nodes]
    uses = Counter(node for node, _ in references(job.saves))
    for counts in used:
        uses.update(counts)
    return used, uses
