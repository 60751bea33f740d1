"""Payloads that mean harm: each is refused with a reason, quickly, and the model is what it was."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import pickle
import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from nnsight import NNsight
from nnsight.remote import (
    ExecutionFailedError,
    InvalidProgramError,
    Job,
    Limits,
    decode,
    decode_results,
    encode,
    execute_payload,
    validate,
)


class Net(nn.Module):
    """Has what a program might want to write to: weights, a buffer, an activation in place, and an output that is a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.first = nn.Linear(4, 4)
        self.relu = nn.ReLU(inplace=True)
        self.norm = nn.BatchNorm1d(4)
        self.tied = Tied()
        self.register_buffer("scale", torch.ones(4))

    def forward(self, ids: torch.Tensor, flag: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.relu(self.first(self.embed(ids)))
        return hidden * self.scale, self.tied(hidden)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.weight


torch.manual_seed(0)
MODEL = NNsight(Net())
IDS = torch.tensor([[1, 2, 3]])
LIMITS = Limits(
    payload_bytes=2**20,
    header_bytes=2**18,
    nodes=300,
    items=20_000,
    tensor_bytes=2**26,
    total_bytes=2**28,
    flops=10**9,
    result_bytes=2**20,
)


def ref(node: int, output: int = 0) -> dict[str, Any]:
    return {"ref": [node, output]}


def node(do: str, **content: Any) -> dict[str, Any]:
    return {"do": do, "run": 0, "block": 0, **content}


def read(site: str = "model.first.output", **content: Any) -> dict[str, Any]:
    return node("read", **{"site": site, "at": 0, "leaf": 0, **content})


def op(name: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    return node("op", name=name, args=list(args), **({"kwargs": kwargs} if kwargs else {}))


def job(*nodes: Any, saves: Any = None, run: dict[str, Any] | None = None, **tensors: torch.Tensor) -> Job:
    first = {"call": "trace", "args": {"list": [{"tensor": "ids"}]}, "kwargs": {"dict": []}, "blocks": 1, **(run or {})}
    return Job([first], list(nodes), {"x": ref(len(nodes) - 1)} if saves is None else saves, {"ids": IDS, **tensors})


def sent(*nodes: Any, **more: Any) -> bytes:
    """Return the payload of :func:`job`."""
    return encode(job(*nodes, **more))


def computed(*nodes: Any, **more: Any) -> bytes:
    """Return the payload of a program that reads a value, and does more."""
    return sent(read(), *nodes, **more)


def content(*nodes: Any, **changes: Any) -> bytes:
    """Return a payload whose JSON has ``changes``; ``...`` takes a key out."""
    made = job(*(nodes or [read()]))
    found = {**made.content(), **changes}
    return container({key: value for key, value in found.items() if value is not ...}, made.tensors)


def container(found: Any, tensors: dict[str, torch.Tensor] | None = None, text: str | None = None) -> bytes:
    from safetensors.torch import save

    return save({"ids": IDS} if tensors is None else tensors, {"nnsight": json.dumps(found) if text is None else text})


def raw(header: Any, data: bytes = b"", text: bytes | None = None, size: int | None = None) -> bytes:
    """Return a safetensors file with any header."""
    written = json.dumps(header).encode() if text is None else text
    return struct.pack("<Q", len(written) if size is None else size) + written + data


def run(**changes: Any) -> bytes:
    return computed(run=changes)


def header(**entry: Any) -> bytes:
    """Return a container whose tensor is described by ``entry``."""
    tensor = {"dtype": "I64", "shape": [1, 3], "data_offsets": [0, 24], **entry}
    described = {key: value for key, value in tensor.items() if value is not ...}
    return raw({"ids": described, "__metadata__": {"nnsight": json.dumps(job(read()).content())}}, bytes(24))


METADATA = {"nnsight": json.dumps(job(read()).content())}
ENTRY = {"dtype": "I64", "shape": [1, 3], "data_offsets": [0, 24]}


def torch_file() -> bytes:
    buffer = io.BytesIO()
    torch.save({"x": IDS}, buffer)
    return buffer.getvalue()


CONTAINERS: dict[str, Callable[[], Any]] = {
    "empty": lambda: b"",
    "seven bytes": lambda: b"1234567",
    "no header": lambda: struct.pack("<Q", 100),
    "header longer than the file": lambda: raw({}, size=2**20),
    "header of the largest size": lambda: raw({}, size=2**64 - 1),
    "a pickle": lambda: pickle.dumps({"a": 1}),
    "a pickle that calls": lambda: b"cos\nsystem\n(S'touch /tmp/hacked'\ntR.",
    "a file of torch": torch_file,
    "text": lambda: "payload",
    "none": lambda: None,
    "not JSON": lambda: raw(None, text=b"{"),
    "not UTF-8": lambda: raw(None, text=b'{"\xff\xfe": 1}'),
    "a list": lambda: raw([]),
    "a number": lambda: raw(1),
    "no metadata": lambda: raw({"ids": ENTRY}, bytes(24)),
    "metadata is a list": lambda: raw({"__metadata__": []}),
    "metadata of another kind": lambda: raw({"__metadata__": {"format": "pt"}}),
    "more metadata": lambda: raw({"ids": ENTRY, "__metadata__": {**METADATA, "more": "x"}}, bytes(24)),
    "metadata is no text": lambda: raw({"__metadata__": {"nnsight": 1}}),
    "a key twice": lambda: raw(None, bytes(24), text=b'{"a": 1, "a": 2}'),
    "NaN": lambda: raw(None, text=b'{"a": NaN}'),
    "Infinity": lambda: raw(None, text=b'{"a": -Infinity}'),
    "a float out of range": lambda: raw(None, text=b'{"a": 1e999}'),
    "an integer of 5000 digits": lambda: raw(None, text=b'{"a": ' + b"9" * 5000 + b"}"),
    "nested 100000 times": lambda: raw(None, text=b"[" * 100_000 + b"]" * 100_000),
    "objects nested 20000 times": lambda: raw(None, text=b'{"a":' * 20_000 + b"1" + b"}" * 20_000),
    "job nested 20000 times": lambda: container(None, text="[" * 20_000 + "]" * 20_000),
    "job is not JSON": lambda: container(None, text="import os"),
    "job has a key twice": lambda: container(None, text='{"version": 1, "version": 1}'),
    "job has NaN": lambda: container(None, text='{"version": NaN}'),
    "trailing bytes": lambda: sent(read()) + b"x",
    "truncated": lambda: sent(read())[:-1],
    "type unknown": lambda: header(dtype="F8_E5M2"),
    "type complex": lambda: header(dtype="C64"),
    "type lower case": lambda: header(dtype="i64"),
    "type a number": lambda: header(dtype=1),
    "type missing": lambda: header(dtype=...),
    "offsets missing": lambda: header(data_offsets=...),
    "one more key": lambda: header(more=1),
    "shape a number": lambda: header(shape=3),
    "shape negative": lambda: header(shape=[-1, -3]),
    "shape of booleans": lambda: header(shape=[True, 3]),
    "shape of floats": lambda: header(shape=[1.0, 3]),
    "shape that overflows": lambda: header(shape=[2**32, 2**32, 2**32]),
    "shape beyond integers": lambda: header(shape=[2**63, 3]),
    "shape whose product wraps to fit": lambda: header(shape=[2**61, 8, 3]),
    "shape of 100 dimensions": lambda: header(shape=[1] * 99 + [3]),
    "shape of text": lambda: header(shape=["3"]),
    "shape too large": lambda: header(shape=[1, 4]),
    "offsets reversed": lambda: header(data_offsets=[24, 0]),
    "offsets negative": lambda: header(data_offsets=[-24, 0]),
    "offsets beyond the file": lambda: header(data_offsets=[2**40, 2**40 + 24]),
    "offsets of booleans": lambda: header(data_offsets=[False, 24]),
    "three offsets": lambda: header(data_offsets=[0, 24, 24]),
    "tensors that overlap": lambda: raw({"ids": ENTRY, "b": ENTRY, "__metadata__": METADATA}, bytes(24)),
    "tensors with a hole": lambda: raw({"ids": {**ENTRY, "data_offsets": [8, 32]}, "__metadata__": METADATA}, bytes(32)),
    "tensor with an odd name": lambda: raw({"i\nds": ENTRY, "__metadata__": METADATA}, bytes(24)),
    "tensor with a long name": lambda: raw({"i" * 10_000: ENTRY, "__metadata__": METADATA}, bytes(24)),
    "tensor that is a list": lambda: raw({"ids": [], "__metadata__": METADATA}, bytes(24)),
    "payload over the limit": lambda: computed(node("const", tensor="c"), c=torch.zeros(2**19)),
    "header over the limit": lambda: container(None, text=" " * 2**19 + "{}"),
}

JOBS: dict[str, Callable[[], Any]] = {
    **{
        f"version {version!r}": lambda version=version: content(version=version)
        for version in (0, 2, -1, "1", 1.0, True, None, [1], 10**18)
    },
    **{f"without {key}": lambda key=key: content(**{key: ...}) for key in ("version", "operators", "runs", "nodes", "saves")},
    "more": lambda: content(code="import os"),
    "operators a list": lambda: content(operators=["aten.add.Tensor"]),
    "operators odd": lambda: content(operators="../../etc"),
    "operators long": lambda: content(operators="a" * 1000),
    "job a list": lambda: container([]),
    "job null": lambda: container(None),
    "runs empty": lambda: content(runs=[]),
    "runs an object": lambda: content(runs={}),
    "runs too many": lambda: content(runs=[job(read()).runs[0]] * 1000),
    "run null": lambda: content(runs=[None]),
    "run with more": lambda: run(hook="x"),
    **{f"call {call!r}": lambda call=call: run(call=call) for call in ("__call__", "eval", "forward", "", None, ["trace"], "generate")},
    **{f"blocks {count!r}": lambda count=count: run(blocks=count) for count in (-1, 10**9, True, 1.0, None, "1")},
    "args null": lambda: run(args=None),
    "args a tuple": lambda: run(args={"tuple": [{"tensor": "ids"}]}),
    "args with text": lambda: run(args={"list": [{"str": "prompt"}]}),
    "args with a reference": lambda: run(args={"list": [ref(0)]}),
    "args with a tensor that is not there": lambda: run(args={"list": [{"tensor": "other"}]}),
    "args nested deep": lambda: run(args=nested(40, {"tensor": "ids"})),
    "args too many": lambda: run(args={"list": [{"tensor": "ids"}] * 9}),
    "no input": lambda: encode(Job([{**job().runs[0], "args": {"list": []}}], [read()], {"x": ref(0)})),
    "input of another type": lambda: computed(ids=torch.tensor([[0.5]])),
    **{
        f"argument {name!r}": lambda name=name: run(kwargs={"dict": [[name, True]]})
        for name in ("self", "__class__", "flag; import os", "", "flög", "unknown", "0", "fn", "remote", 1)
    },
    "an argument twice": lambda: run(kwargs={"dict": [["flag", True], ["flag", False]]}),
    "a tensor that nothing uses": lambda: computed(spare=torch.ones(3)),
}


def nested(depth: int, inner: Any) -> Any:
    for _ in range(depth):
        inner = {"list": [inner]}
    return inner


SITES = [
    "",
    "output",
    "model",
    "model.first",
    "model.first.weight",
    "model.first.weight.data.output",
    "model..output",
    "model.first.output.",
    ".output",
    "model.__class__.output",
    "model.first.__init__.__globals__.output",
    "model.first.forward.output",
    "model.first.source.torch_0.output",
    "model.first.source.F_linear_0.source.x_0.output",
    "model.first.source.__import___0.output",
    "model.relu.source.F_relu_0.source.nothing_0.output",
    "model.source.hidden_0.source.x_0.output",
    "model.source.self_first_0.source.F_linear_0.output",
    "model.source.nothing_0.source.x_0.output",
    "model.nothing.output",
    "other.first.output",
    "model.first.output\n",
    "model.first.output\x00",
    "model.f\u0131rst.output",
    "model.first.output.i0",
    "model/first.output",
    "../model.output",
    "model.first.output; import os",
    "m" * 300 + ".output",
    "model.generator.output",
    None,
    1,
    ["model.first.output"],
]

NODES: dict[str, Callable[[], Any]] = {
    "nodes an object": lambda: content(nodes={}),
    "nodes null": lambda: content(nodes=None),
    "node null": lambda: sent(None),
    "node a list": lambda: sent(["read"]),
    "node empty": lambda: sent({}),
    "too many nodes": lambda: sent(*[read()] * 1000),
    **{f"kind {do!r}": lambda do=do: sent(node(do)) for do in ("exec", "__class__", "import", "", None, 1, ["op"])},
    **{f"site {number}": lambda site=site: sent(read(site)) for number, site in enumerate(SITES)},
    **{f"at {at!r}": lambda at=at: sent(read(at=at)) for at in (-1, 5, 2**31, 2**70, True, 0.0, None, "0")},
    **{f"leaf {leaf!r}": lambda leaf=leaf: sent(read(leaf=leaf)) for leaf in (-1, 3, 10**6, 2**63, True, 0.5, None)},
    **{f"run {number!r}": lambda number=number: sent(read(run=number)) for number in (-1, 1, True, None, 0.0)},
    **{f"block {number!r}": lambda number=number: sent(read(block=number)) for number in (-1, 1, True, None)},
    **{f"line {line!r}": lambda line=line: sent(read(line=line)) for line in (-1, "1", 1.5, True, 2**40)},
    "copy a number": lambda: sent(read(copy=1)),
    "loop text": lambda: sent(read(loop="yes")),
    "inside no cache": lambda: sent(read(inside=0)),
    "more keys": lambda: sent(read(code="x")),
    "fewer keys": lambda: sent({"do": "read", "run": 0, "block": 0, "site": "model.output"}),
    "constant that is not there": lambda: sent(node("const", tensor="c")),
    "constant without name": lambda: sent(node("const", tensor=["ids"])),
    "weight that is not there": lambda: sent(node("weight", name="first.secret")),
    "weight by a dunder": lambda: sent(node("weight", name="__dict__.first")),
    "weight with an index": lambda: sent(node("weight", name="first.weight[0]")),
    "module that is not there": lambda: computed(node("apply", module="model.x", args={"list": []}, kwargs={"dict": []})),
    "module's method": lambda: computed(node("apply", module="model.first.register_buffer", args={"list": [ref(0)]}, kwargs={"dict": []})),
    "module with wrong arguments": lambda: computed(node("apply", module="model.first", args={"list": []}, kwargs={"dict": []})),
    "module with an argument called self": lambda: computed(
        node("apply", module="model.first", args={"list": [ref(0)]}, kwargs={"dict": [["self", ref(0)]]})
    ),
    "module with text": lambda: computed(node("apply", module="model.first", args={"list": [{"str": "x"}]}, kwargs={"dict": []})),
    "size of another tensor": lambda: computed(node("size", value=ref(0), dim=1, size=10**6), saves={}),
    "size of no dimension": lambda: computed(node("size", value=ref(0), dim=99, size=1), saves={}),
    "size of a dimension from the end": lambda: computed(node("size", value=ref(0), dim=-1, size=1), saves={}),
    "size that is no number": lambda: computed(node("size", value=ref(0), dim=0, size="1"), saves={}),
    "size below zero": lambda: computed(node("size", value=ref(0), dim=0, size=-1), saves={}),
    "size of nothing": lambda: computed(node("size", value=3, dim=0, size=1), saves={}),
    "size of what comes later": lambda: computed(node("size", value=ref(2), dim=0, size=1), read(), saves={}),
    "size as a value": lambda: computed(node("size", value=ref(0), dim=0, size=1)),
    "barrier of none": lambda: computed(node("barrier", id=0, of=0)),
    "barrier of many": lambda: computed(node("barrier", id=0, of=10**6)),
    "barrier that nobody opens": lambda: computed(node("barrier", id=0, of=2), read("model.output"), run={"blocks": 2}),
    "skip at an output": lambda: computed(node("skip", site="model.first.output", at=0, value=ref(0))),
    "skip of the past": lambda: computed(node("skip", site="model.embed.input", at=0, value=ref(0))),
    "skip with text": lambda: computed(node("skip", site="model.relu.input", at=0, value={"str": "x"})),
    "locations in the wrong order": lambda: sent(read("model.output"), read("model.first.output")),
    "stop with more": lambda: computed(node("stop", value=1)),
}

DENIED = """
aten.empty.memory_format aten.empty_like.default aten.new_empty.default aten.empty_strided.default aten.empty_permuted.default
aten.as_strided.default aten.as_strided_.default aten.as_strided_copy.default aten._reshape_alias.default aten.set_.source_Tensor
aten.set_.source_Storage aten.resize_.default aten.resize_as_.default aten.from_file.default aten.rand.default aten.rand_like.default
aten.randn.default aten.randint.low aten.randperm.default
aten.dropout.default aten.combinations.default aten.nonzero_numpy.default aten._unique.default aten.histogramdd.default
aten._local_scalar_dense.default aten.item.default aten.equal.default aten.add.out aten.mm.out
aten.copy.out aten.add aten.add.default add torch.add aten.__class__.default aten.add.__class__ aten.add.Tensor.__call__ os.system
builtins.eval.default prims.add.default prim.print.default aten.data.default aten.set_data.default aten.requires_grad_.default
aten.record_stream.default aten.pin_memory.default aten.is_pinned.default aten.linalg_svd.default aten.linalg_inv.default
aten.linalg_multi_dot.default aten.one_hot.default aten._to_cpu.default aten.sparse_coo_tensor.size aten.to_sparse.default
aten._foobar.baz aten.sym_size.int
aten.view.dtype aten.masked_scatter.default aten.unique_dim_consecutive.default aten._assert_async.msg aten._print.default
inductor.resize_storage_bytes_.default
c10d.broadcast_.default quantized.add.default aten.quantize_per_tensor.default aten.swap.default aten.detach_.default aten.squeeze_.dim
""".split()


def applied(*args: Any, name: str = "aten.add.Tensor", **kwargs: Any) -> bytes:
    return computed(op(name, *args, **kwargs))


X = ref(0)
ARGUMENTS: dict[str, Callable[[], Any]] = {
    "missing": lambda: applied(X),
    "too many": lambda: applied(X, X, X, X),
    "unknown": lambda: applied(X, X, beta=1),
    "dunder": lambda: applied(X, X, __class__=1),
    "out": lambda: applied(X, X, out=X),
    "twice": lambda: applied(X, X, other=X),
    "args an object": lambda: computed(node("op", name="aten.relu.default", args={"self": X})),
    "kwargs a list": lambda: computed(node("op", name="aten.relu.default", args=[X], kwargs=[])),
    "text for a tensor": lambda: applied(X, "x"),
    "null for a tensor": lambda: applied(X, None),
    "list for a tensor": lambda: applied(X, [X]),
    "number too large": lambda: applied(X, 2**63),
    "number too small": lambda: applied(X, -(2**64)),
    "number of 30 digits": lambda: applied(X, 10**30),
    "float for an integer": lambda: applied(X, 0.0, 1, name="aten.select.int"),
    "boolean for an integer": lambda: applied(X, True, 1, name="aten.select.int"),
    "text for an integer": lambda: applied(X, "0", 1, name="aten.select.int"),
    "integer for a boolean": lambda: applied(X, [0], 1, name="aten.sum.dim_IntList"),
    "text for a list": lambda: applied(X, "01", name="aten.permute.default"),
    "nested lists": lambda: applied(X, [[0], [1]], name="aten.permute.default"),
    "list nested 1000 times": lambda: computed(node("op", name="aten.permute.default", args=[X, plain_nested(900)])),
    "infinity without its form": lambda: container(None, text=json.dumps(job(read(), op("aten.add.Scalar", X, 1e400)).content())),
    "float of an odd kind": lambda: applied(X, {"float": "1e5"}, name="aten.add.Scalar"),
    "float that is code": lambda: applied(X, {"float": "__import__('os')"}, name="aten.add.Scalar"),
    "symbolic size": lambda: applied(X, ["s0"], name="aten.view.default"),
    "expression": lambda: applied(X, [{"expr": "2**64"}], name="aten.view.default"),
    "rounding mode": lambda: applied(X, X, name="aten.div.Tensor_mode", rounding_mode={"str": "up"}),
    "rounding mode as text": lambda: applied(X, X, name="aten.div.Tensor_mode", rounding_mode="floor"),
    "rounding mode of code": lambda: applied(X, X, name="aten.div.Tensor_mode", rounding_mode={"str": "floor'); import os; ('"}),
    "approximation": lambda: applied(X, name="aten.gelu.default", approximate={"str": "TANH"}),
    "type object": lambda: applied(X, name="aten._to_copy.default", dtype={"dtype": "object"}),
    "type complex": lambda: applied(X, name="aten._to_copy.default", dtype={"dtype": "complex64"}),
    "type by number": lambda: applied(X, name="aten._to_copy.default", dtype=6),
    "type quantized": lambda: applied(X, name="aten._to_copy.default", dtype={"dtype": "quint8"}),
    "type a dunder": lambda: applied(X, name="aten._to_copy.default", dtype={"dtype": "__name__"}),
    "device of its own": lambda: applied(X, name="aten._to_copy.default", device={"device": "cuda:0"}),
    "device as text": lambda: applied(X, name="aten._to_copy.default", device="cpu"),
    "layout": lambda: applied(X, name="aten._to_copy.default", layout={"layout": "sparse_coo"}),
    "memory format": lambda: applied(X, name="aten.clone.default", memory_format={"memory_format": "channels_last_3d"}),
    "dropout": lambda: applied(X, X, X, None, 0.5, name="aten.scaled_dot_product_attention.default"),
    "an equation that is code": lambda: einsum("__import__('os')", X, X),
    "an equation of any length": lambda: einsum(",".join("a" * 200), *[X] * 200),
    "an equation that does not fit": lambda: einsum("ab,bc->ac", X, X),
    "an equation of one tensor": lambda: einsum("abc->cba", X),
    "an equation of none": lambda: einsum(","),
    "a path outside of the tensors": lambda: einsum("abc,abc,abc->a", X, X, X, path=[0, 9, 0, 1]),
    "a path before the tensors": lambda: einsum("abc,abc,abc->a", X, X, X, path=[-5, 1, 0, 1]),
    "a path that is too short": lambda: einsum("abc,abc,abc->a", X, X, X, path=[0]),
    "a copy that is no boolean": lambda: computed({**op("aten.relu.default", X), "copy": "x"}),
    "an interpolation that does not exist": lambda: applied(X, 0.5, interpolation={"str": "__class__"}, name="aten.quantile.scalar"),
    "itself": lambda: applied(X, ref(1)),
    "the future": lambda: applied(X, ref(2)),
    "a cycle": lambda: sent(op("aten.relu.default", ref(1)), op("aten.relu.default", ref(0))),
    "a negative node": lambda: applied(X, ref(-1)),
    "a negative output": lambda: applied(X, ref(0, -1)),
    "an output that is not there": lambda: applied(X, ref(0, 5)),
    "an output of a huge number": lambda: applied(X, ref(0, 2**62)),
    "a node that makes nothing": lambda: computed(node("stop"), op("aten.relu.default", ref(1))),
    "a reference of three": lambda: applied(X, {"ref": [0, 0, 0]}),
    "a reference of one": lambda: applied(X, {"ref": [0]}),
    "a reference of booleans": lambda: applied(X, {"ref": [False, 0]}),
    "a reference by text": lambda: applied(X, {"ref": "0"}),
    "two forms": lambda: applied(X, {"ref": [0, 0], "float": "inf"}),
    "a tensor of the container": lambda: applied(X, {"tensor": "ids"}),
    "name a list": lambda: computed(node("op", name=["aten.relu.default"], args=[X])),
    "name null": lambda: computed(node("op", name=None, args=[X])),
}


def einsum(equation: str, *tensors: Any, **kwargs: Any) -> bytes:
    return applied({"str": equation}, list(tensors), name="aten.einsum.default", **kwargs)


def plain_nested(depth: int) -> Any:
    made: Any = 0
    for _ in range(depth):
        made = [made]
    return made


WEIGHT = node("weight", name="first.weight")
CONST = node("const", tensor="c")


def views(start: Any, *names: tuple[Any, ...], then: str = "aten.zero_.default", output: int = 0) -> bytes:
    """Return a payload that edits a view of a view of ``start`` in place."""
    nodes = [start]
    for name, *args in names:
        nodes.append(op(name, ref(len(nodes) - 1), *args))
    nodes.append(op(then, ref(len(nodes) - 1, output)))
    tensors = {"c": torch.ones(4, 4)} if start is CONST else {}
    return sent(*nodes, **tensors)


def module(name: str, *args: Any, **content: Any) -> dict[str, Any]:
    return node("apply", module=f"model.{name}", args={"list": list(args)}, kwargs={"dict": []}, **content)


def write(value: Any, site: str = "model.first.output", **content: Any) -> dict[str, Any]:
    return node("write", **{"site": site, "at": 0, "leaf": 0, "value": value, **content})


ALIASES: dict[str, Callable[[], Any]] = {
    "a weight": lambda: views(WEIGHT),
    "a constant": lambda: views(CONST),
    "an activation": lambda: views(read()),
    "an input": lambda: views(read("model.embed.input")),
    "a view of a weight": lambda: views(WEIGHT, ("aten.select.int", 0, 0)),
    "a transposed weight": lambda: views(WEIGHT, ("aten.t.default",)),
    "a detached weight": lambda: views(WEIGHT, ("aten.detach.default",)),
    "an alias of a weight": lambda: views(WEIGHT, ("aten.alias.default",)),
    "an unsafe view of a weight": lambda: views(WEIGHT, ("aten._unsafe_view.default", [16])),
    "an expanded weight": lambda: views(WEIGHT, ("aten.unsqueeze.default", 0), ("aten.expand.default", [1, 4, 4])),
    "a slice of a view of a weight": lambda: views(WEIGHT, ("aten.view.default", [16]), ("aten.slice.Tensor", 0, 0, 2)),
    "a diagonal of a weight": lambda: views(WEIGHT, ("aten.diagonal.default",)),
    "an unfolded weight": lambda: views(WEIGHT, ("aten.unfold.default", 0, 2, 1)),
    "a squeezed weight": lambda: views(WEIGHT, ("aten.squeeze.default",)),
    "a permuted weight": lambda: views(WEIGHT, ("aten.permute.default", [1, 0])),
    "a part of a split weight": lambda: views(WEIGHT, ("aten.split.Tensor", 2), output=1),
    "a row of an unbound weight": lambda: views(WEIGHT, ("aten.unbind.int",), output=2),
    "a part of a weight of given sizes": lambda: views(WEIGHT, ("aten.split_with_sizes.default", [1, 3]), output=1),
    "a reshaped weight": lambda: views(WEIGHT, ("aten.reshape.default", [-1])),
    "a flattened weight": lambda: views(WEIGHT, ("aten.flatten.using_ints",)),
    "an unflattened weight": lambda: views(WEIGHT, ("aten.unflatten.int", 0, [2, 2])),
    "a contiguous weight": lambda: views(WEIGHT, ("aten.contiguous.default",)),
    "a chunk of a weight": lambda: views(WEIGHT, ("aten.chunk.default", 2), output=1),
    "a broadcast weight": lambda: views(WEIGHT, ("aten.broadcast_to.default", [1, 4, 4])),
    "a weight with moved dimensions": lambda: views(WEIGHT, ("aten.movedim.int", 0, 1), ("aten.narrow.default", 0, 0, 1)),
    "a reshaped activation": lambda: views(read(), ("aten.reshape.default", [-1])),
    "a view of an activation": lambda: views(read(), ("aten.select.int", 0, 0)),
    "a view of a constant": lambda: views(CONST, ("aten.t.default",)),
    "copying into a weight": lambda: sent(WEIGHT, op("aten.zeros_like.default", ref(0)), op("aten.copy_.default", ref(0), ref(1))),
    "adding to a weight": lambda: sent(WEIGHT, op("aten.add_.Tensor", ref(0), 1)),
    "scattering into a weight": lambda: sent(
            WEIGHT, node("const", tensor="c"), op("aten.index_put_.default", ref(0), [ref(1)], 0.0), c=torch.tensor([0])
        ),
    "a number in place": lambda: computed(op("aten.add_.Tensor", 1, X)),
    "a module that edits a weight": lambda: sent(WEIGHT, module("relu", ref(0))),
    "a module that edits an activation": lambda: computed(module("relu", X)),
    "a module that edits a view of a weight": lambda: sent(WEIGHT, op("aten.select.int", ref(0), 0, 0), module("relu", ref(1))),
    "a module that keeps statistics": lambda: computed(op("aten.select.int", X, 0, 0), module("norm", ref(1))),
    "what a module returns": lambda: computed(module("first", X), op("aten.zero_.default", ref(1))),
    "a weight that a module returns": lambda: computed(module("tied", X), op("aten.zero_.default", ref(1))),
    "an output that is a weight": lambda: sent(
        read("model.tied.output", copy=True), write(ref(0), "model.tied.output", in_place=True), saves={}
    ),
    "a result that is a weight": lambda: sent(read("result", leaf=1, copy=True), write(ref(0), "result", leaf=1, in_place=True), saves={}),
    "another shape in place": lambda: computed(op("aten.select.int", X, 0, 0), write(ref(1), in_place=True), saves={}),
    "another type in place": lambda: computed(
        op("aten._to_copy.default", X, dtype={"dtype": "float64"}), write(ref(1), in_place=True), saves={}
    ),
    "an activation of a shape that the model cannot use": lambda: computed(
        op("aten.new_zeros.default", X, [7]), write(ref(1), "model.embed.output"), saves={}
    ),
    "a number instead of an activation": lambda: computed(write(1), saves={}),
    "an activation that is over": lambda: sent(read("model.relu.output"), write(ref(0), "model.first.output"), saves={}),
}


SIZES: dict[str, Callable[[], Any]] = {
    "a product that does not fit": lambda: computed(WEIGHT, op("aten.mm.default", ref(1), X)),
    "a sum that does not fit": lambda: computed(op("aten.new_zeros.default", X, [7]), op("aten.add.Tensor", X, ref(1))),
    "a view that does not fit": lambda: computed(op("aten.view.default", X, [5])),
    "a view with two guesses": lambda: computed(op("aten.view.default", X, [-1, -1])),
    "a dimension that is not there": lambda: computed(op("aten.select.int", X, 9, 0)),
    "an entry that is not there": lambda: computed(op("aten.select.int", X, 2, 4)),
    "an entry before the first": lambda: computed(op("aten.select.int", X, 2, -5)),
    "a step of none": lambda: computed(op("aten.slice.Tensor", X, 0, 0, 1, 0)),
    "a step backwards": lambda: computed(op("aten.slice.Tensor", X, 0, 0, 1, -1)),
    "parts of no size": lambda: computed(op("aten.split.Tensor", X, 0)),
    "parts of negative size": lambda: computed(op("aten.split_with_sizes.default", X, [5, -1], 2)),
    "more than there are": lambda: computed(op("aten.topk.default", X, 5)),
    "less than none": lambda: computed(op("aten.topk.default", X, -1)),
    "negative sizes": lambda: computed(op("aten.zeros.default", [-1])),
    "a large tensor": lambda: computed(op("aten.zeros.default", [2**40])),
    "a size that overflows": lambda: computed(op("aten.zeros.default", [2**62, 2**62])),
    "a size that overflows by types": lambda: computed(op("aten.full.default", [2**62], 1.0)),
    "a large tensor like another": lambda: computed(op("aten.new_full.default", X, [2**20, 2**20], 1.0)),
    "a large broadcast": lambda: computed(
        op("aten.zeros.default", [2**20, 1]),
        op("aten.zeros.default", [1, 2**20]),
        op("aten.add.Tensor", ref(1), ref(2)),
    ),
    "a large expansion, copied": lambda: computed(op("aten.expand.default", X, [2**24, 3, 4]), op("aten.clone.default", ref(1))),
    "a large expansion, summed": lambda: computed(op("aten.expand.default", X, [2**50, 3, 4]), op("aten.sum.default", ref(1))),
    "a repetition": lambda: computed(op("aten.repeat.default", X, [2**30, 1, 1])),
    "a repetition of entries": lambda: computed(op("aten.repeat_interleave.self_int", X, 2**40)),
    "tiles": lambda: computed(op("aten.tile.default", X, [2**40])),
    "an outer product": lambda: computed(op("aten.arange.default", 2**20), op("aten.outer.default", ref(1), ref(1))),
    "a large copy by reshaping": lambda: computed(
        op("aten.broadcast_to.default", X, [2**40, 3, 4]), op("aten.reshape.default", ref(1), [-1])
    ),
    "a large product on the way to a number": lambda: computed(
        op("aten.ones.default", [2**14]), op("aten.einsum.default", {"str": "a,b,ab->"}, [ref(1), ref(1), ref(2)]),
    ),
    "a product that is large on the way": lambda: computed(
        op("aten.ones.default", [2**14]), op("aten.einsum.default", {"str": "a,b,c->"}, [ref(1), ref(1), ref(1)], path=[0, 1, 0, 1]),
        op("aten.einsum.default", {"str": "a,b,c->abc"}, [ref(1), ref(1), ref(1)]), op("aten.sum.default", ref(3)),
    ),
    "much work in a composite": lambda: computed(op("aten.ones.default", [8, 1000, 1000]), op("aten.matmul.default", ref(1), ref(1))),
    "many parts": lambda: computed(op("aten.tensor_split.sections", X, sections=2**40)),
    "many rows": lambda: computed(op("aten.zeros.default", [2**23]), op("aten.unbind.int", ref(1))),
    "many parts of one entry": lambda: computed(op("aten.zeros.default", [2**23]), op("aten.split.Tensor", ref(1), 1)),
    "a long range": lambda: computed(op("aten.arange.default", 10**15)),
    "an endless range": lambda: computed(op("aten.arange.start_step", 0, 10, 0)),
    "a range to infinity": lambda: computed(op("aten.arange.default", {"float": "inf"})),
    "a range to nowhere": lambda: computed(op("aten.arange.default", {"float": "nan"})),
    "a large identity": lambda: computed(op("aten.eye.default", 10**6)),
    "a negative identity": lambda: computed(op("aten.eye.default", -5)),
    "many steps": lambda: computed(op("aten.linspace.default", 0, 1, 2**50)),
    "padding": lambda: computed(op("aten.constant_pad_nd.default", X, [2**40, 0])),
    "negative padding": lambda: computed(op("aten.constant_pad_nd.default", X, [-100, 0])),
    "many bins": lambda: computed(op("aten.histc.default", X, 2**40)),
    "a diagonal in a plane": lambda: computed(op("aten.arange.default", 2**20), op("aten.diag_embed.default", ref(1))),
    "doubling": lambda: computed(*[op("aten.cat.default", [ref(n), ref(n)]) for n in range(60)]),
    "doubling by indices": lambda: computed(*[op("aten.repeat.default", ref(n), [1, 1, 1024]) for n in range(6)]),
    "many large tensors": lambda: computed(*[op("aten.zeros.default", [2**23])] * 50),
    "much work": lambda: computed(op("aten.zeros.default", [4000, 4000]), *[op("aten.mm.default", ref(1), ref(1)) for _ in range(3)]),
    "much work in parts": lambda: computed(
        op("aten.zeros.default", [64, 1000, 200]),
        op("aten.zeros.default", [64, 200, 1000]),
        op("aten.bmm.default", ref(1), ref(2)),
    ),
    "a large result": lambda: computed(op("aten.zeros.default", [2**19])),
    "a mask that may select more than a result may have": lambda: computed(
        op("aten.ones.default", [2**19]), op("aten.gt.Scalar", ref(1), 5), op("aten.index.Tensor", ref(1), [ref(2)])
    ),
    "masks for too many dimensions": lambda: computed(op("aten.gt.Scalar", X, 0), op("aten.index.Tensor", X, [ref(1)] * 3)),
    "places of places": lambda: computed(op("aten.nonzero.default", X), *[op("aten.nonzero.default", ref(n + 1)) for n in range(50)]),
    "places of many": lambda: computed(op("aten.ones.default", [2**20, 1, 1, 1, 1]), op("aten.nonzero.default", ref(1))),
    "places of an edit": lambda: computed(
        op("aten.zeros.default", [2**20, 1, 1, 1, 1, 1, 1, 1]), op("aten.gt.Scalar", ref(1), 0),
        *[op("aten.index_put_.default", ref(1), [ref(2)], 0.0) for _ in range(5)],
    ),
    "places on the way": lambda: computed(
        op("aten.ones.default", [2**20, 1, 1, 1, 1, 1, 1, 1, 1]), op("aten.gt.Scalar", ref(1), 0),
        *[op("aten.index.Tensor", ref(1), [ref(2)]) for _ in range(4)],
    ),
    "a product with all places": lambda: computed(
        op("aten.ones.default", [2**14]), op("aten.nonzero.default", ref(1)), op("aten.mul.Tensor", ref(1), ref(2))
    ),
    "a large selection": lambda: computed(
        op("aten.zeros.default", [2**20, 1]), op("aten.zeros.default", [1, 2**20]), op("aten.gt.Scalar", ref(2), 0),
        op("aten.masked_select.default", ref(1), ref(3)),
    ),
    "repeats of any size": lambda: computed(CONST, op("aten.repeat_interleave.Tensor", ref(1), output_size=2**40), c=torch.tensor([1])),
    "many counts": lambda: computed(CONST, op("aten.bincount.default", ref(1), None, 2**40), c=torch.tensor([1])),
    "unique rows of no dimension": lambda: computed(op("aten.unique_dim.default", X, 9)),
    "indices of floats": lambda: computed(op("aten.index.Tensor", X, [X])),
    "indices of NaN": lambda: computed(CONST, op("aten.index.Tensor", X, [ref(1)]), c=torch.tensor([float("nan")])),
    "gathering by floats": lambda: computed(op("aten.gather.default", X, 0, X)),
    "embedding by floats": lambda: computed(WEIGHT, op("aten.embedding.default", ref(1), X)),
    "scattering by floats": lambda: computed(op("aten.scatter.value", X, 0, X, 1.0)),
    "selecting by floats": lambda: computed(WEIGHT, op("aten.index_select.default", X, 0, ref(1))),
    "too many indices": lambda: computed(CONST, op("aten.index.Tensor", X, [ref(1)] * 9), c=torch.tensor([0])),
    "types that do not mix": lambda: computed(
        op("aten._to_copy.default", X, dtype={"dtype": "float64"}), WEIGHT, op("aten.mm.default", ref(2), ref(1))
    ),
    "a list of nothing": lambda: computed(op("aten.cat.default", [])),
    "a stack of nothing": lambda: computed(op("aten.stack.default", [])),
}

BAD = torch.tensor([0, 99])
INDICES: dict[str, Callable[[], Any]] = {
    "index": lambda: computed(CONST, op("aten.index.Tensor", X, [ref(1)]), c=BAD),
    "index below": lambda: computed(CONST, op("aten.index.Tensor", X, [None, ref(1)]), c=-BAD),
    "index of the largest number": lambda: computed(CONST, op("aten.index.Tensor", X, [ref(1)]), c=torch.tensor([2**62])),
    "index of int32": lambda: computed(CONST, op("aten.index.Tensor", X, [ref(1)]), c=BAD.int()),
    "index_select": lambda: computed(CONST, op("aten.index_select.default", X, 2, ref(1)), c=BAD),
    "index_select below": lambda: computed(CONST, op("aten.index_select.default", X, 2, ref(1)), c=-BAD),
    "gather": lambda: computed(CONST, op("aten.gather.default", X, 2, ref(1)), c=torch.full((1, 3, 4), 4)),
    "gather below": lambda: computed(CONST, op("aten.gather.default", X, 2, ref(1)), c=torch.full((1, 3, 4), -1)),
    "embedding": lambda: computed(CONST, WEIGHT, op("aten.embedding.default", ref(2), ref(1)), c=BAD),
    "embedding below": lambda: computed(CONST, WEIGHT, op("aten.embedding.default", ref(2), ref(1)), c=torch.tensor([-1])),
    "scatter": lambda: computed(CONST, op("aten.scatter.value", X, 1, ref(1), 1.0), c=torch.full((1, 3, 4), 3)),
    "scatter_add": lambda: computed(CONST, op("aten.scatter_add.default", X, 1, ref(1), X), c=torch.full((1, 3, 4), 3)),
    "index_put": lambda: computed(CONST, op("aten.index_put.default", X, [ref(1)], 1.0), c=BAD),
    "index_add": lambda: computed(CONST, op("aten.index_add.default", X, 0, ref(1), X), c=torch.tensor([7])),
    "index_copy": lambda: computed(CONST, op("aten.index_copy.default", X, 0, ref(1), X), c=torch.tensor([-9])),
    "index_fill": lambda: computed(CONST, op("aten.index_fill.int_Scalar", X, 0, ref(1), 1.0), c=BAD),
    "take": lambda: computed(CONST, op("aten.take.default", X, ref(1)), c=BAD),
    "take_along_dim": lambda: computed(CONST, op("aten.take_along_dim.default", X, ref(1), 2), c=torch.full((1, 3, 4), 4)),
    "cross_entropy": lambda: computed(
        CONST, op("aten.select.int", X, 0, 0), op("aten.cross_entropy_loss.default", ref(2), ref(1)), c=torch.tensor([0, 1, 9])
    ),
    "nll_loss": lambda: computed(
        CONST,
        op("aten.select.int", X, 0, 0),
        op("aten.nll_loss_forward.default", ref(2), ref(1), None, 1, -100),
        c=torch.tensor([0, 1, 9]),
    ),
}

SAVES: dict[str, Callable[[], Any]] = {
    **{
        f"name {name!r}": lambda name=name: computed(saves={name: ref(0)})
        for name in ("", "__class__", "__builtins__", "a b", "1a", "a.b", "a;b", "x\n", "a" * 300, "a-b", "é è", "class", "import")
    },
    "a list": lambda: computed(saves=[ref(0)]),
    "the future": lambda: computed(saves={"x": ref(1)}),
    "a negative node": lambda: computed(saves={"x": ref(-1)}),
    "another output": lambda: computed(saves={"x": ref(0, 1)}),
    "a tensor of the container": lambda: computed(saves={"x": {"tensor": "ids"}}),
    "a value of no kind": lambda: computed(saves={"x": {"object": "os"}}),
    "two kinds": lambda: computed(saves={"x": {"list": [], "tuple": []}}),
    "text alone": lambda: computed(saves={"x": "text"}),
    "long text": lambda: computed(saves={"x": {"str": "x" * 10_000}}),
    "text with control characters": lambda: computed(saves={"x": {"str": "\x1b[2J"}}),
    "a key twice": lambda: computed(saves={"x": {"dict": [["a", 1], ["a", 2]]}}),
    "a key of a key": lambda: computed(saves={"x": {"dict": [[["a"], 1]]}}),
    "a dict of objects": lambda: computed(saves={"x": {"dict": {"a": 1}}}),
    "nested deep": lambda: computed(saves={"x": nested(30, ref(0))}),
    "many items": lambda: computed(saves={"x": {"list": [0] * 30_000}}),
    "what made nothing": lambda: computed(node("stop"), saves={"x": ref(1)}),
}

CASES = {
    **{f"container: {name}": make for name, make in CONTAINERS.items()},
    **{f"job: {name}": make for name, make in JOBS.items()},
    **{f"node: {name}": make for name, make in NODES.items()},
    **{f"operator: {name}": lambda name=name: applied(X, name=name) for name in DENIED},
    **{f"argument: {name}": make for name, make in ARGUMENTS.items()},
    **{f"memory: {name}": make for name, make in ALIASES.items()},
    **{f"size: {name}": make for name, make in SIZES.items()},
    **{f"index: {name}": make for name, make in INDICES.items()},
    **{f"save: {name}": make for name, make in SAVES.items()},
}


@pytest.fixture(autouse=True)
def model_is_unchanged() -> Iterator[None]:
    before = copy.deepcopy(MODEL._module.state_dict())
    yield
    after = MODEL._module.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_there_are_many() -> None:
    assert len(CASES) >= 200


@pytest.mark.parametrize("name", CASES)
def test_a_hostile_payload_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def called(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the model itself was run")

    payload = CASES[name]()
    monkeypatch.setattr("nnsight.program.run.execution.execute", called)
    with pytest.raises(InvalidProgramError) as refused:
        execute_payload(MODEL, payload, LIMITS)
    assert len(str(refused.value)) > 10


def test_the_payload_that_the_hostile_ones_are_made_of_is_accepted() -> None:
    results = decode_results(execute_payload(MODEL, computed(op("aten.mul.Tensor", X, 2.0)), LIMITS))
    hidden = MODEL._module.first(MODEL._module.embed(IDS))
    assert torch.equal(results["x"], hidden.detach() * 2.0)


@pytest.mark.parametrize("inference", [False, True])
def test_a_composite_operator_costs_what_its_parts_cost(inference: bool) -> None:
    made = op("aten.ones.default", [8, 100, 100])
    with torch.inference_mode(inference):
        whole = validate(decode(computed(made, op("aten.matmul.default", ref(1), ref(1)))), MODEL, LIMITS)
        parts = validate(decode(computed(made, op("aten.bmm.default", ref(1), ref(1)))), MODEL, LIMITS)
        nodes = op("aten.ones.default", [1000]), op("aten.outer.default", ref(1), ref(1))
        three = op("aten.einsum.default", {"str": "a,b,ab->"}, [ref(1), ref(1), ref(2)])
        summed = validate(decode(computed(*nodes, three)), MODEL, LIMITS)
    assert whole.flops >= parts.flops > 2 * 8 * 100**3
    assert whole.tensor_bytes >= parts.tensor_bytes >= 2 * 8 * 100**2 * 4
    assert summed.tensor_bytes > 2 * 1000**2 * 4  # the product, and what the equation makes on the way


def test_a_bad_index_that_is_computed_fails_before_it_is_used() -> None:
    payload = computed(
        op("aten.argmax.default", X), op("aten.add.Scalar", ref(1), 10**6), op("aten.unsqueeze.default", ref(2), 0),
        op("aten.index_select.default", X, 2, ref(3)),
    )  # fmt: skip
    with pytest.raises(ExecutionFailedError, match=r"index_select.*points outside"):
        execute_payload(MODEL, payload, LIMITS)


@pytest.mark.parametrize("q", [2.0, -0.5, float("nan")])
def test_a_quantile_is_that_of_a_fraction(q: float) -> None:
    payload = computed(CONST, op("aten.quantile.default", X, ref(1)), c=torch.tensor([0.5, q]))
    with pytest.raises(ExecutionFailedError, match="between 0 and 1"):
        execute_payload(MODEL, payload, LIMITS)


@pytest.mark.parametrize(
    ("name", "kwargs", "values", "reason"),
    [
        ("repeat_interleave.Tensor", {}, [2**40], "the result would have size"),
        ("repeat_interleave.Tensor", {}, [2**62] * 4, "the result would have size"),  # whose sum is zero in 64 bits
        ("repeat_interleave.Tensor", {}, [2**15] * 4, "the result would have size 131072"),
        ("repeat_interleave.Tensor", {"output_size": 1}, [5, 5], "the result would have size 10"),
        ("repeat_interleave.Tensor", {"output_size": 20}, [5, 5], "the result would have size 10"),
        ("repeat_interleave.Tensor", {}, [-5, 5], "negative"),
        ("bincount.default", {}, [2**40], "the result would have size"),
        ("bincount.default", {}, [-1], "non-negative"),
    ],
)
def test_a_result_is_not_larger_than_was_counted(name: str, kwargs: Any, values: list[int], reason: str) -> None:
    payload = computed(CONST, op(f"aten.{name}", ref(1), **kwargs), c=torch.tensor(values))
    with pytest.raises(ExecutionFailedError, match=reason):
        execute_payload(MODEL, payload, LIMITS)


def test_what_only_a_kernel_refuses_fails() -> None:
    with pytest.raises(ExecutionFailedError, match="bitwise_not"):
        execute_payload(MODEL, computed(op("aten.bitwise_not.default", X)), LIMITS)


def test_a_job_that_takes_too_long_is_ended() -> None:
    payload = computed(op("aten.relu.default", X))
    with pytest.raises((InvalidProgramError, ExecutionFailedError), match="longer than"):
        execute_payload(MODEL, payload, Limits(seconds=0.0))


def test_results_that_mean_harm_are_refused() -> None:
    for results in (b"", pickle.dumps([1]), raw({"__metadata__": METADATA}), container({"version": 1, "saves": {"x": {"tensor": "y"}}})):
        with pytest.raises(InvalidProgramError):
            decode_results(results)


# -- fuzzing ---------------------------------------------------------------------------------------------------------

VALID = [
    job(read(), op("aten.mul.Tensor", X, 2.0), op("aten.select.int", ref(1), 1, -1), saves={"x": {"list": [ref(2), 1]}}),
    job(read(copy=True), op("aten.select.int", X, 2, 0), op("aten.zero_.default", ref(1)), write(X, in_place=True), read("result")),
    job(read(), CONST, op("aten.index_select.default", X, 2, ref(1)), write(X), c=torch.tensor([0, 3]), saves={"x": ref(2)}),
    job(read(), module("first", X), WEIGHT, op("aten.linear.default", ref(1), ref(2)), node("stop")),
]
INTERESTING = [
    None, True, False, 0, 1, -1, 2, 2**31, 2**63 - 1, 2**63, 0.5, -0.0, 1e308, "", "x", "__class__", "result", "aten.add_.Tensor",
    "model.output", [], {}, [[]], {"ref": [0, 0]}, {"ref": [1, 1]}, {"float": "nan"}, {"str": "x"}, {"tensor": "ids"},
]  # fmt: skip


def places(value: Any) -> list[tuple[Any, Any]]:
    """Return container and key of everything in JSON."""
    found: list[tuple[Any, Any]] = []
    items = enumerate(value) if isinstance(value, list) else value.items() if isinstance(value, dict) else ()
    for key, item in list(items):
        found.append((value, key))
        found.extend(places(item))
    return found


def attempt(payload: bytes) -> None:
    with contextlib.suppress(InvalidProgramError, ExecutionFailedError):
        decode_results(execute_payload(MODEL, payload, LIMITS))


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
@given(st.integers(0, len(VALID) - 1), st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 3)), max_size=4))
def test_mutated_json_runs_or_is_refused(number: int, changes: list[tuple[int, int, int]]) -> None:
    made = copy.deepcopy(VALID[number].content())
    for where, what, how in changes:
        spots = places(made)
        if not spots:
            break
        inside, key = spots[where % len(spots)]
        other, other_key = spots[what % len(spots)]
        if how == 0:
            inside[key] = copy.deepcopy(INTERESTING[what % len(INTERESTING)])
        elif how == 1:
            del inside[key]
        elif how == 2:
            inside[key] = copy.deepcopy(other[other_key])
        elif isinstance(inside, list):
            inside.insert(key, copy.deepcopy(other[other_key]))
    attempt(container(made, VALID[number].tensors))


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
@given(st.integers(0, len(VALID) - 1), st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=6))
def test_mutated_bytes_run_or_are_refused(number: int, changes: list[tuple[int, int]]) -> None:
    payload = bytearray(encode(VALID[number]))
    for where, byte in changes:
        payload[where % len(payload)] = byte
    attempt(bytes(payload))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.binary(max_size=200))
def test_any_bytes_are_refused(payload: bytes) -> None:
    with pytest.raises(InvalidProgramError):
        decode(payload)
