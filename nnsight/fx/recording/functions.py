"""Tables of the torch functions that a recording treats specially.

Most calls become events of a program. These tables name the exceptions: calls that metadata answers, calls whose result is a
concrete value, and random functions, whose order matters. Functions and methods appear as ``__torch_function__`` receives them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch.utils import _pytree as pytree
from torch.utils._device import _device_constructors

from ..effects import RANDOM

#: Getters that the fake tensor answers; tensors have `names` up to torch 2.12.
METADATA = frozenset(
    getattr(torch.Tensor, name).__get__
    for name in (
        "shape dtype device ndim layout is_cuda is_meta is_quantized is_sparse itemsize "
        "nbytes names is_cpu is_nested is_xpu is_mps"
    ).split()
    if hasattr(getattr(torch.Tensor, name, None), "__get__")
)

#: Getters about gradients. Fakes do not answer them, because programs that edit a value in different ways share its fake.
ABOUT_GRADIENTS = {getattr(torch.Tensor, name).__get__: name for name in ("requires_grad", "is_leaf", "grad_fn")}

#: Methods whose result depends on strides.
ABOUT_STRIDES = frozenset({torch.Tensor.stride, torch.Tensor.is_contiguous})

#: Getters of the other attributes that a real tensor has and its fake has not.
CARRIED = {
    getattr(torch.Tensor, name).__get__: name
    for name in "grad _grad _grad_fn _base _version output_nr retains_grad grad_dtype".split()
}

#: Methods and functions that return a concrete value, or change a tensor in a way that no graph can express.
DEMANDS = frozenset(
    "__bool__ __int__ __float__ __complex__ __index__ __contains__ __repr__ __str__ __format__ __array__ __deepcopy__ "
    "__reduce_ex__ item tolist numpy data_ptr const_data_ptr mutable_data_ptr storage untyped_storage storage_type equal allclose "
    "is_nonzero requires_grad_ detach_ retain_grad backward grad computed register_hook unsqueeze_ squeeze_ transpose_ t_ swapaxes_ "
    "swapdims_ resize_ resize_as_ set_ as_strided_ share_memory_ __dlpack__ to_dlpack __set__ is_set_to".split()
)

#: Methods whose result shares the memory of the tensor.
EXPORTING = frozenset("numpy __array__ storage untyped_storage __dlpack__ to_dlpack".split())

#: Getters that a graph has as another function: as ``.data``, an edit would be hidden from functionalization.
READ_AS = {vars(torch._C.TensorBase)["data"].__get__: torch.Tensor.detach}

#: Random functions that use only the metadata of their tensor.
DRAWN_LIKE = frozenset({torch.randn_like, torch.rand_like, torch.randint_like})

#: Functions for which :meth:`CallRecorder.call` first looks for an answer without an event.
SPECIAL = frozenset({*METADATA, *ABOUT_GRADIENTS, *CARRIED, *READ_AS, *DRAWN_LIKE, torch.Tensor.__iter__})

#: Functions in which a scalar tensor in place of a Python float gives the same result, bit for bit. Their floats are inputs of the graph
#: from the first run on, so that a run with another float has the same program.
TAKES_SCALAR_TENSORS = frozenset(
    "add add_ sub sub_ subtract mul mul_ multiply div div_ divide true_divide __add__ __radd__ __iadd__ __sub__ "
    "__rsub__ __isub__ __mul__ __rmul__ __imul__ __truediv__ __rtruediv__ __itruediv__ __div__ rsub "
    "clamp clamp_ clip clip_ clamp_min clamp_min_ clamp_max clamp_max_ where masked_fill masked_fill_ fill_ "
    "gt gt_ lt lt_ ge ge_ le le_ eq eq_ ne ne_ greater less greater_equal less_equal not_equal "
    "__gt__ __lt__ __ge__ __le__ __eq__ __ne__".split()
)

#: Types of TorchScript functions. They specialize on the tensors of their first calls, so those must not be fakes.
SCRIPTED = (torch.jit.ScriptFunction, torch._C.ScriptMethod)

#: Types of arguments that are the same in an event as in the call.
PLAIN = (str, type(None), torch.dtype, torch.device, torch.memory_format, torch.layout, type(...))

#: Errors of fake tensors for calls whose result depends on values, or that fakes do not support.
UNANSWERABLE = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedFakeTensorException,
    fake_tensor.UnsupportedOperatorException,
)

#: The types of operators that take Python functions, such as ``torch.cond``. They cut the graph and run as Python on real tensors.
ControlOperator = torch._ops.HigherOrderOperator


def is_custom(function: Any) -> bool:
    """Whether ``function`` is an operator from outside torch, whose result on fakes may be wrong or missing."""
    if isinstance(function, torch._ops.OpOverload):
        return function.namespace not in ("aten", "prims")
    packet = isinstance(function, torch._ops.OpOverloadPacket)
    return packet and function._qualified_op_name.partition("::")[0] not in ("aten", "prims")


def draws(function: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether a call draws numbers from the generator that the model uses, too."""
    return getattr(function, "__name__", "") in RANDOM and kwargs.get("generator") is None


def on_default_device(function: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of a call with the default device, which is a mode of the block: the graph runs without it."""
    device = torch.get_default_device()
    if device.type == "cpu" or kwargs.get("device") is not None or function not in _device_constructors():
        return kwargs
    return {**kwargs, "device": device}


def edits_in_place(function: Any) -> bool:
    return _is_name_of_edit(getattr(function, "__name__", ""))


@functools.lru_cache(maxsize=4096)
def _is_name_of_edit(name: str) -> bool:
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in ("__invert__", "__index__", "__int__"))
    return name.partition(".")[0].endswith("_")  # the name of an operator includes its overload, as in `add_.Tensor`


def is_numpy_scalar(value: Any) -> bool:
    return type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0 and not hasattr(value, "__len__")


def has_tensor(result: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(result))


def path_step(step: Any) -> Any:
    """Return a step of a pytree path as an index, a key or an attribute name."""
    for name in ("idx", "key", "name"):
        if hasattr(step, name):
            return getattr(step, name)
    raise TypeError(f"A call returned a container whose items pytree reaches by an unknown kind of step: {step!r}.")


def as_python(operator: ControlOperator) -> Callable[..., Any]:
    """Return a Python function that has the effect of ``operator`` on real tensors."""
    if operator.name() == "flex_attention":  # dynamo expects its arguments in another form
        return operator
    known: dict[str, Callable[..., Any]] = {"cond": _cond, "while_loop": _while_loop, "scan": _scan}
    return known.get(operator.name(), functools.partial(_compiled, operator))


def _cond(condition: Any, when_true: Callable[..., Any], when_false: Callable[..., Any], operands: Any = ()) -> Any:
    return (when_true if condition else when_false)(*operands)


def _while_loop(goes_on: Callable[..., Any], step: Callable[..., Any], carried: Any, additional: Any = ()) -> Any:
    while goes_on(*carried, *additional):
        carried = step(*carried, *additional)
    return tuple(item.clone() if isinstance(item, torch.Tensor) else item for item in carried)


def _scan(
    combine: Callable[..., Any], initial: Sequence[Any], rows: Sequence[Any], additional_inputs: Any = ()
) -> tuple[Any, ...]:
    carried, given = tuple(initial), []
    for row in zip(*rows, strict=True):
        found = tuple(combine(*carried, *row, *additional_inputs))
        carried = found[: len(carried)]
        given.append(found[len(carried) :])
    return (*carried, *(torch.stack(items) for items in zip(*given, strict=True)))


def _compiled(operator: ControlOperator, *args: Any, **kwargs: Any) -> Any:
    """Call an operator inside ``torch.compile``, as torch does, so that tensors in closures of its functions become arguments."""
    return torch.compile(lambda *args: operator(*args, **kwargs), backend="eager", fullgraph=True)(*args)


# Replacements for calls that need a value, in error messages after "Instead, use".
_BRANCH = "`torch.where(condition, a, b)`"
_NUMBER = "the tensor itself: arithmetic, comparisons, indexing and `torch.where` accept it"
_SHOWN = "`.save()`, and show the value after the block"
_OUTSIDE = "torch functions, or `.save()` and the other library after the block"
_SELECT = "a result of a fixed size: `torch.where(mask, x, 0)`, `masked_fill`, `topk`"
_COMPARED = "`(a == b).all()` or `torch.isclose(a, b).all()`, which stay tensors"
_AFTERWARDS = "`.save()`, and do this after the block"

#: Names of calls that start or prepare a backward pass.
ABOUT_BACKWARD = frozenset("backward grad register_hook retain_grad requires_grad_ grad_fn computed".split())

#: The replacement for each call that needs a value, by its name.
_INSTEAD = {
    **dict.fromkeys(("__bool__", "is_nonzero", "__contains__"), _BRANCH),
    **dict.fromkeys("__int__ __float__ __complex__ __index__ item tolist".split(), _NUMBER),
    **dict.fromkeys("__repr__ __str__ __format__".split(), _SHOWN),
    **dict.fromkeys("numpy __array__ __dlpack__ to_dlpack data_ptr storage untyped_storage".split(), _OUTSIDE),
    **dict.fromkeys("__getitem__ nonzero masked_select unique unique_consecutive repeat_interleave where".split(), _SELECT),
    **dict.fromkeys("equal allclose".split(), _COMPARED),
    **dict.fromkeys("__deepcopy__ __reduce_ex__".split(), "`.clone()`, or " + _AFTERWARDS),
    **dict.fromkeys(ABOUT_BACKWARD, "`with loss.backward():`"),
}

#: The user's name for internal functions: an operator that ``torch.func`` makes of ``item``, and the first call of a backward pass.
_METHODS = {"_local_scalar_dense": "item", "computed": "backward"}


def name_of(function: Any) -> str:
    """Return the name under which a user calls ``function``."""
    name = str(getattr(function, "__name__", None) or getattr(function, "name", function)).partition(".")[0]
    return _METHODS.get(name, name)


def instead_of(name: str) -> str:
    """Return the text that names a replacement for a call of ``name``, which needs a value."""
    return _INSTEAD.get(name, f"tensor operations such as `torch.where`, or {_AFTERWARDS}")
