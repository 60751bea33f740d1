"""The operators that programs may use: a fixed table of names.

The name of an operator is looked up only in this table. The table deliberately lacks operators that give uninitialised memory (``empty``,
``resize_``) or views of arbitrary memory (``as_strided``, ``set_``), read files, draw from the global random number generator, or give
values to Python (``_local_scalar_dense``). It also lacks ``out=`` variants, and decompositions whose cost cannot be counted. Each string
argument has a list of allowed values.

Composite operators, such as ``matmul`` and ``reshape``, are in the table if torch decomposes them differently for different sizes. A node
of the composite operator is right for all sizes. Composite operators decompose into allowed operators. They return new memory unless they
are listed as views, and such a view may be a copy.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Container
from typing import Any

import torch

_POINTWISE = """
abs.default acos.default acosh.default asin.default asinh.default atan.default atan2.default atanh.default ceil.default
cos.default cosh.default deg2rad.default digamma.default erf.default erfc.default erfinv.default exp.default exp2.default
expm1.default floor.default frac.default hypot.default i0.default lgamma.default log.default log10.default log1p.default
log2.default logit.default logaddexp.default logaddexp2.default neg.default nan_to_num.default rad2deg.default
reciprocal.default round.default round.decimals rsqrt.default sgn.default sigmoid.default sign.default signbit.default
sin.default sinc.default sinh.default sqrt.default tan.default tanh.default trunc.default
add.Tensor add.Scalar sub.Tensor sub.Scalar rsub.Tensor rsub.Scalar mul.Tensor mul.Scalar div.Tensor div.Scalar
div.Tensor_mode div.Scalar_mode floor_divide.default floor_divide.Scalar fmod.Tensor fmod.Scalar remainder.Tensor
remainder.Scalar remainder.Scalar_Tensor pow.Tensor_Tensor pow.Tensor_Scalar pow.Scalar lerp.Scalar lerp.Tensor
addcmul.default addcdiv.default maximum.default minimum.default fmax.default fmin.default clamp.default clamp.Tensor
clamp_min.default clamp_min.Tensor clamp_max.default clamp_max.Tensor xlogy.Tensor xlogy.Scalar_Other copysign.Tensor
copysign.Scalar special_log_ndtr.default special_xlog1py.default special_entr.default
eq.Tensor eq.Scalar ne.Tensor ne.Scalar lt.Tensor lt.Scalar le.Tensor le.Scalar gt.Tensor gt.Scalar ge.Tensor ge.Scalar
isinf.default isnan.default isin.Tensor_Tensor
logical_and.default logical_or.default logical_xor.default logical_not.default bitwise_and.Tensor bitwise_and.Scalar
bitwise_or.Tensor bitwise_or.Scalar bitwise_xor.Tensor bitwise_xor.Scalar bitwise_not.default
bitwise_left_shift.Tensor bitwise_left_shift.Tensor_Scalar bitwise_right_shift.Tensor bitwise_right_shift.Tensor_Scalar
where.self masked_fill.Scalar masked_fill.Tensor heaviside.default
celu.default elu.default gelu.default glu.default hardsigmoid.default hardswish.default hardtanh.default
leaky_relu.default log_sigmoid_forward.default mish.default relu.default silu.default softplus.default
softshrink.default hardshrink.default threshold.default _prelu_kernel.default
"""

_REDUCTIONS = """
sum.default sum.dim_IntList mean.default mean.dim prod.default prod.dim_int nansum.default amax.default amin.default
aminmax.default max.default max.dim min.default min.dim argmax.default argmin.default all.default all.dim all.dims
any.default any.dim any.dims var.correction var_mean.correction std.correction std_mean.correction norm.Scalar
norm.ScalarOpt_dim norm.ScalarOpt_dim_dtype linalg_vector_norm.default logsumexp.default median.default median.dim
nanmedian.default nanmedian.dim mode.default kthvalue.default count_nonzero.default count_nonzero.dim_IntList
cumsum.default cumprod.default cummax.default cummin.default logcumsumexp.default _softmax.default _log_softmax.default
sort.default sort.stable topk.default dist.default histc.default
"""

_LINEAR_ALGEBRA = """
mm.default bmm.default addmm.default baddbmm.default addbmm.default mv.default addmv.default dot.default vdot.default
addr.default linear.default scaled_dot_product_attention.default convolution.default native_layer_norm.default
native_group_norm.default _cdist_forward.default linalg_cross.default trace.default
nll_loss_forward.default mse_loss.default smooth_l1_loss.default huber_loss.default binary_cross_entropy.default
binary_cross_entropy_with_logits.default avg_pool2d.default max_pool2d_with_indices.default
_adaptive_avg_pool2d.default constant_pad_nd.default
"""

_INDEXING = """
index.Tensor index_select.default gather.default embedding.default scatter.src scatter.value scatter_add.default
scatter.reduce scatter.value_reduce scatter_reduce.two index_put.default index_add.default index_copy.default
index_fill.int_Scalar index_fill.int_Tensor take.default tril.default triu.default
slice_scatter.default select_scatter.default diagonal_scatter.default searchsorted.Tensor searchsorted.Scalar
bucketize.Tensor nonzero.default masked_select.default _unique2.default unique_dim.default unique_consecutive.default
bincount.default repeat_interleave.Tensor
"""

_SHAPES = """
clone.default _to_copy.default cat.default stack.default flip.default roll.default repeat.default
rot90.default diag_embed.default zeros_like.default ones_like.default full_like.default new_zeros.default new_ones.default
new_full.default zeros.default ones.default full.default arange.default arange.start arange.start_step eye.default eye.m
linspace.default scalar_tensor.default lift_fresh_copy.default
"""

_VIEWS = """
alias.default detach.default view.default _unsafe_view.default expand.default
permute.default transpose.int t.default squeeze.default squeeze.dim squeeze.dims unsqueeze.default slice.Tensor select.int
diagonal.default unfold.default unbind.int split.Tensor split_with_sizes.default
"""

_COMPOSITE = """
matmul.default einsum.default tensordot.default inner.default outer.default kron.default linalg_vecdot.default
layer_norm.default rms_norm.default group_norm.default softmax.int log_softmax.int
cosine_similarity.default pairwise_distance.default cdist.default linalg_norm.default cross_entropy_loss.default
nll_loss_nd.default tile.default repeat_interleave.self_int diff.default quantile.default quantile.scalar
nanquantile.default nanquantile.scalar take_along_dim.default diag.default
conv1d.default conv2d.default
"""

_COMPOSITE_VIEWS = """
reshape.default reshape_as.default view_as.default flatten.using_ints unflatten.int ravel.default contiguous.default
expand_as.default broadcast_to.default chunk.default tensor_split.sections movedim.int movedim.intlist narrow.default
linalg_diagonal.default
"""

_IN_PLACE = """
abs_.default add_.Tensor add_.Scalar sub_.Tensor sub_.Scalar mul_.Tensor mul_.Scalar div_.Tensor div_.Scalar
div_.Tensor_mode pow_.Scalar pow_.Tensor addcmul_.default addcdiv_.default lerp_.Scalar lerp_.Tensor clamp_.default
clamp_.Tensor clamp_min_.default clamp_min_.Tensor clamp_max_.default clamp_max_.Tensor
copy_.default fill_.Scalar fill_.Tensor zero_.default neg_.default
exp_.default log_.default sqrt_.default rsqrt_.default reciprocal_.default sigmoid_.default tanh_.default relu_.default
sin_.default cos_.default floor_.default ceil_.default round_.default trunc_.default sign_.default erf_.default
masked_fill_.Scalar masked_fill_.Tensor index_put_.default index_add_.default index_copy_.default
index_fill_.int_Scalar index_fill_.int_Tensor scatter_.src scatter_.value scatter_add_.default scatter_reduce_.two
tril_.default triu_.default logical_not_.default logical_and_.default logical_or_.default bitwise_and_.Tensor
bitwise_or_.Tensor bitwise_xor_.Tensor remainder_.Scalar remainder_.Tensor floor_divide_.Scalar floor_divide_.Tensor
addmm_.default baddbmm_.default silu_.default gelu_.default leaky_relu_.default hardtanh_.default
nan_to_num_.default eq_.Scalar ne_.Scalar lt_.Scalar le_.Scalar gt_.Scalar ge_.Scalar
"""

_DRAWING = """
bernoulli.default bernoulli.p multinomial.default poisson.default
normal.Tensor_float normal.float_Tensor normal.Tensor_Tensor
bernoulli_.float bernoulli_.Tensor normal_.default uniform_.default exponential_.default cauchy_.default geometric_.default
log_normal_.default random_.default random_.from random_.to native_dropout.default
"""

_VIEWS += _COMPOSITE_VIEWS
_NAMES = " ".join((_POINTWISE, _REDUCTIONS, _LINEAR_ALGEBRA, _INDEXING, _SHAPES, _COMPOSITE, _VIEWS, _IN_PLACE, _DRAWING)).split()


def _find(name: str) -> Any:
    packet, overload = name.split(".")
    return getattr(getattr(torch.ops.aten, packet, None), overload, None)


#: Operator by name, such as ``aten.add.Tensor``. Names that the installed version of torch lacks are left out.
OPERATORS: dict[str, torch._ops.OpOverload] = {
    f"aten.{name}": found for name in sorted(_NAMES) if (found := _find(name)) is not None
}

#: Name by operator.
NAMES = {operator: name for name, operator in OPERATORS.items()}

_SCHEMAS = "\n".join(str(operator._schema) for operator in OPERATORS.values())
#: Hash of the table, which servers report. A server that has all operators of a program runs it even if the hashes differ.
OPERATORS_HASH = hashlib.sha256(_SCHEMAS.encode()).hexdigest()[:16]


class _Equations(Container[str]):
    """The equations of ``einsum``, such as ``btd,de->bte``."""

    def __contains__(self, text: object) -> bool:
        return isinstance(text, str) and re.fullmatch(r"[A-Za-z,. ]{1,200}(->[A-Za-z. ]{0,60})?", text, re.ASCII) is not None


_INTERPOLATIONS = frozenset({"linear", "lower", "higher", "midpoint", "nearest"})

#: The allowed values of each string argument, by operator (without overload) and argument.
STRINGS: dict[tuple[str, str], Container[str]] = {
    ("einsum", "equation"): _Equations(),
    ("quantile", "interpolation"): _INTERPOLATIONS,
    ("nanquantile", "interpolation"): _INTERPOLATIONS,
    ("div", "rounding_mode"): frozenset({"trunc", "floor"}),
    ("div_", "rounding_mode"): frozenset({"trunc", "floor"}),
    ("gelu", "approximate"): frozenset({"none", "tanh"}),
    ("gelu_", "approximate"): frozenset({"none", "tanh"}),
    ("scatter", "reduce"): frozenset({"add", "multiply"}),
    ("scatter_reduce", "reduce"): frozenset({"sum", "prod", "mean", "amax", "amin"}),
    ("scatter_reduce_", "reduce"): frozenset({"sum", "prod", "mean", "amax", "amin"}),
    ("searchsorted", "side"): frozenset({"left", "right"}),
}

_VIEW_NAMES = frozenset(f"aten.{name}" for name in _VIEWS.split())
_IN_PLACE_NAMES = frozenset(f"aten.{name}" for name in (_IN_PLACE + _DRAWING).split() if name.split(".")[0].endswith("_"))

#: Names of the operators that draw random numbers. The interpreter passes them a generator; programs cannot.
DRAWING = frozenset(f"aten.{name}" for name in _DRAWING.split())


@functools.cache
def is_composite(operator: Any) -> bool:
    """Whether torch decomposes the operator into other operators."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "CompositeImplicitAutograd")


def is_view(name: str) -> bool:
    """Whether a result of the operator may share memory with its first argument."""
    return name in _VIEW_NAMES


def is_in_place(name: str) -> bool:
    """Whether the operator writes to its first argument, and returns it."""
    return name in _IN_PLACE_NAMES
