"""The loss of a language model: the output layer and the cross-entropy of its logits, in one."""

import functools
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Integer

from ...core import AnyArray, AnyInt, AnyNumber, check, check_floats, integers, soft_cap_of
from ...transform import Implementation, Op
from .._precision import wide
from . import _jax, _jax_sum, _numpy, _reference
from ._cross_entropy import loss_options, weights_of


_linear_cross_entropy = Op(
    "linear_cross_entropy",
    kernels={platform: (kernel, _numpy.LINEAR_CROSS_ENTROPY) for platform, kernel in _jax.LINEAR_CROSS_ENTROPY.items()},
    reference=_reference.linear_cross_entropy_with_sums,
    vmap_method={"x": "broadcast_all", "labels": "broadcast_all"},
    backward=_jax.LINEAR_CROSS_ENTROPY_BACKWARD,
    sharding="... _, _ _, ..., _, _ -> ..., ..., ...",
)
_sum_with_gradients = Op(
    "linear_cross_entropy",
    kernels=_jax_sum.SUM,
    reference=_reference.linear_cross_entropy_sum,
    vmap_method={"x": "broadcast_all", "labels": "broadcast_all"},
    backward=_jax_sum.SUM_BACKWARD,
)

Reduction = Literal["none", "mean", "sum"]


def linear_cross_entropy(
    x: Float[AnyArray, "*batch in_features"],
    weight: Float[AnyArray, "size in_features"],
    labels: Integer[ArrayLike, "*batch"],
    *,
    bias: Float[AnyArray, " size"] | None = None,
    class_weights: Float[ArrayLike, " size"] | None = None,
    label_smoothing: AnyNumber = 0.0,
    z_loss: AnyNumber = 0.0,
    ignore_index: AnyInt | None = None,
    soft_cap: AnyNumber | None = None,
    reduction: Reduction = "none",
    implementation: Implementation = "auto",
) -> Float[Array, "*batch"] | Float[Array, ""]:
    r"""[`eqxcallback.ops.softmax_cross_entropy`][] of the logits $x W^T + b$, which are never in memory all at once, computed in
    f32. Products of bf16 are summed in f32; for those of a gradient, the gradients of the logits are rounded to bf16.

    Some logits at a time are computed, and what the loss needs of them is added up: those of a few hundred classes on a CPU, and
    up to 1 GiB on a GPU. Each derivative, the second one as well, does so again: a gradient costs four products in place of
    three. Beside the gradients and these logits, memory has a few numbers for each row.

    A mean or a sum costs three: its gradients are computed with its value, from all logits of 256 rows at a time on a CPU, and
    wait in memory, in the dtypes of their operands, for what they are multiplied by. Under `vmap`, where a weight that is shared
    would have a gradient for each example, in f16 and in f64, they are computed as those of the losses are. Rows that are split
    between devices are gathered for it; those of the losses are not.

    **Arguments:**

    - `x`: an array of shape `(*batch, in_features)`.
    - `weight`: $W$, of shape `(size, in_features)` and the dtype of `x`: a row for each class, as `equinox.nn.Linear` and
        `equinox.nn.Embedding` have it.
    - `labels`: integers of shape `batch`. A negative one counts from the end. One that is out of range gives NaN. A target for
        each class would be as large as the logits: pass these to [`eqxcallback.ops.softmax_cross_entropy`][].
    - `bias`: $b$, of shape `(size,)`.
    - `class_weights`: of shape `(size,)`, as in [`eqxcallback.ops.softmax_cross_entropy`][].
    - `label_smoothing`, `z_loss`, `ignore_index`: as in [`eqxcallback.ops.softmax_cross_entropy`][].
    - `soft_cap`: $c$, which makes $c \tanh(z / c)$ of each logit $z$.
    - `reduction`: `"none"` is the loss of each row, `"sum"` the sum over all, and `"mean"` that divided by the number of labels
        that are not ignored, or, as in PyTorch, by the sum of their class weights; 0 if there are none.
    - `implementation`: `"auto"` chooses; see [`eqxcallback.Op.using`][].

    **Returns:** an array of shape `batch`, or of shape `()`, in f32, or in the dtype of `x` if that is wider.

    **Limitations:** a `weight` that no length near 256 divides, from 128 to 512, is copied. So is one of 16 bits
    on a CPU, for the time of the call.
    """
    name = "linear_cross_entropy"
    x, weight = jnp.asarray(x), jnp.asarray(weight)
    check_floats(name, x=x, weight=weight)
    fits = x.ndim > 0 and weight.ndim == 2 and weight.shape[-1] == x.shape[-1]
    check(fits, name, "weight of shape (size, in_features) for the last axis of x", x=x, weight=weight)
    cap = soft_cap_of(name, soft_cap)
    options = loss_options(name, label_smoothing, z_loss, ignore_index)
    ignore_index = options.get("ignore_index")
    options |= {} if cap is None else {"soft_cap": cap}
    if reduction not in get_args(Reduction):
        raise ValueError(f"{name}: expected reduction to be one of {get_args(Reduction)}; got {reduction!r}.")
    labels = integers(name, "labels", labels, x.shape[:-1])
    if bias is not None:
        bias = jnp.asarray(bias)
        check_floats(name, bias=bias)
        check(bias.shape == weight.shape[:1], name, "bias of shape (size,)", bias=bias, weight=weight)
        bias = bias.astype(wide(x.dtype))
    weights = None if class_weights is None else weights_of(name, class_weights, weight.shape[0], x.dtype)
    args = x, weight, labels, bias, weights
    if reduction == "none":
        return _linear_cross_entropy.using(implementation)(*args, **options)[0]
    if implementation in ("auto", "jax") and x.dtype in _jax_sum.DTYPES:
        total = _sum(*args, op=_sum_with_gradients.using(implementation), **options)
    else:
        total = _linear_cross_entropy.using(implementation)(*args, **options)[0].sum()
    if reduction == "sum":
        return total
    counts = jnp.ones(labels.shape, bool) if ignore_index is None else labels != ignore_index
    of_labels = 1.0 if weights is None else weights.at[labels].get(mode="fill", fill_value=0.0)
    count = jnp.sum(jnp.where(counts, of_labels, 0.0), dtype=total.dtype)
    return total / jnp.where(count == 0, 1.0, count)


@functools.partial(jax.jit, static_argnames=("op", "label_smoothing", "z_loss", "ignore_index", "soft_cap"))
def _sum(x: Array, weight: Array, labels: Array, *args: Array | None, op: Op, **options: Any) -> Array:
    """A program of its own, from which XLA removes the gradients if nobody needs them."""
    return op(x.reshape(labels.size, x.shape[-1]), weight, labels.reshape(-1), *args, **options)[0]
