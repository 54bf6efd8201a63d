"""The sum of the losses of a language model, and with it the gradients: a chunk of rows at a time has all its logits in memory,
from the product that makes them to the two that take their gradients. So nothing is multiplied twice.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ...core import Types
from ...kernel import JaxKernel
from .._jax import product
from . import _jax, _reference
from ._cross_entropy import softmax_cross_entropy
from ._jax import Way
from ._jax_gradient import Rows


# What the gradients of a sum may be in: in f16 they leave its range, before a mean would divide them.
DTYPES = (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16))


def _supports(types: Types, **options: object) -> bool | str:
    del options
    return types[0].dtype in DTYPES or f"x has to be float32 or bfloat16; it is {types[0].dtype}"


# Of the logits of some rows, without bias and soft cap: their losses, the gradient of the logits, and those of the bias and of
# the class weights.
_Losses = Callable[..., tuple[Array, Array, tuple[Array | None, Array | None]]]


def _by_kernels(
    z: Array, labels: Array, bias: Array | None, class_weights: Array | None, *, soft_cap: float | None, **options: Any
) -> tuple[Array, Array, tuple[Array | None, Array | None]]:
    def losses(z: Array, bias: Array | None, class_weights: Array | None) -> Array:
        z = _jax.capped(z, bias, soft_cap)
        return softmax_cross_entropy(z, labels, class_weights=class_weights, **options)

    each, pullback = jax.vjp(losses, z, bias, class_weights)
    d_z, *others = pullback(jnp.ones_like(each))
    return each, d_z, (*others,)


def _by_xla(
    z: Array, labels: Array, bias: Array | None, class_weights: Array | None, *, soft_cap: float | None, **options: Any
) -> tuple[Array, Array, tuple[Array | None, Array | None]]:
    """On a GPU the gradient of the logits is written once, in the dtype that it is multiplied in."""
    each, highest, total = _jax.losses_of_logits(z, labels, bias, class_weights, soft_cap=soft_cap, **options)
    rows = Rows.of(labels, jnp.ones_like(each), highest, total, z.shape[-1], class_weights, **options)
    d_z, d_class_weights = rows.gradient(_jax.capped(z, bias, soft_cap), 0, class_weights, soft_cap)
    return each, d_z, (None if bias is None else d_z.sum(0), d_class_weights)


def forward(
    way: Way, losses: _Losses, x: Array, weight: Array, labels: Array, *args: Any, **options: Any
) -> tuple[Array, tuple[Array, Array], tuple[Array | None, ...]]:
    """Compute the sum, and where the reference has zeros, what the gradients need. `vmap` gives rows of several examples: the
    gradient of a weight that they share would be one for each, and is not computed here.
    """
    if labels.ndim == 1:
        return _with_gradients(way, losses, x, weight, labels, *args, **options)
    each, highest, total = way.loss(x, weight, labels, *args, **options)
    examples = labels.shape[:-1]
    shared = [None if arg is None else jnp.zeros((*examples, *arg.shape), arg.dtype) for arg in (weight, *args)]
    return each.sum(-1), (highest, total), (jnp.zeros_like(x), *shared)


def _with_gradients(
    way: Way,
    losses: _Losses,
    x: Array,
    weight: Array,
    labels: Array,
    bias: Array | None,
    class_weights: Array | None,
    *,
    soft_cap: float | None = None,
    **options: Any,
) -> tuple[Array, tuple[Array, Array], tuple[Array | None, ...]]:
    dtype, ignored = way.dtype(x), options.get("ignore_index")

    def chunk(sums: Any, part: Any) -> tuple[Any, Any]:
        d_weight, d_others = sums
        _, x, labels = part
        if ignored is not None:  # what is ignored has no gradient, whatever is in x
            x = jnp.where((labels == ignored)[:, None], jnp.zeros_like(x), x)
        z = product("...i,ci->...c", dtype, x, weight)
        each, d_z, others = losses(z, labels, bias, class_weights, soft_cap=soft_cap, **options)
        d_x = product("...c,ci->...i", dtype, d_z, weight, x.dtype)
        # Of all rows it is not added to zeros.
        d_weight = way.of_rows(dtype, d_z, x) if d_weight is None else _added(way, d_weight, d_z, x)
        return (d_weight, jax.tree.map(jnp.add, d_others, others)), (each, d_x)

    d_others = tuple(None if arg is None else jnp.zeros_like(arg) for arg in (bias, class_weights))
    rows = way.rows(labels.shape[0], weight.shape[0], dtype)
    if rows == labels.shape[0]:
        (d_weight, d_others), (each, d_x) = chunk((None, d_others), (0, x, labels))
    else:
        sums = jnp.zeros(weight.shape, jnp.float32), d_others
        (d_weight, d_others), (each, d_x) = _reference.each_chunk(chunk, sums, rows, x, labels)
    nothing = jnp.zeros_like(each)
    return each.sum(), (nothing, nothing), (d_x, d_weight.astype(weight.dtype), *d_others)


def _added(way: Way, total: Array, d_z: Array, x: Array) -> Array:
    """Add the gradient of the weight for some rows."""
    size = total.shape[0]
    length = way.classes(size)

    def add(total: Array, first: Any, length: int) -> Array:
        part = way.of_rows(way.dtype(x), jax.lax.dynamic_slice_in_dim(d_z, first, length, 1), x)
        here = jax.lax.dynamic_slice_in_dim(total, first, length, 0)
        return jax.lax.dynamic_update_slice_in_dim(total, here + part.astype(here.dtype), first, 0)

    count, rest = divmod(size, length)
    total = jax.lax.fori_loop(0, count, lambda i, total: add(total, i * length, length), total)
    return add(total, size - rest, rest) if rest else total


def backward(way: Way, args: Any, out: Any, cotangents: Any, **options: Any) -> Any:
    """Multiply the gradients by the cotangent of the sum. Those of several examples are computed now."""
    of_sum, labels = cotangents[0], args[2]
    _, sums, gradients = out
    if labels.ndim > 1:
        of_losses = jnp.broadcast_to(of_sum[..., None], labels.shape)
        return _jax.backward(way, args, (None, *sums), (of_losses,), **options)

    def scaled(gradient: Array) -> Array:
        return (of_sum * gradient.astype(of_sum.dtype)).astype(gradient.dtype)

    d_x, d_weight, *others = jax.tree.map(scaled, gradients)
    return d_x, d_weight, None, *others


SUM = {
    "cpu": JaxKernel(_jax.exactly(functools.partial(forward, _jax.CPU, _by_kernels)), supports=_supports),
    "cuda": JaxKernel(
        functools.partial(forward, _jax.GPU, _by_xla),
        supports=_supports,
        differentiable=functools.partial(_reference.linear_cross_entropy_sum, losses=_jax.forward_of_rows),
    ),
}
SUM_BACKWARD = {
    "cpu": JaxKernel(_jax.exactly(functools.partial(backward, _jax.CPU)), supports=_supports),
    "cuda": JaxKernel(functools.partial(backward, _jax.GPU), supports=_supports),
}
