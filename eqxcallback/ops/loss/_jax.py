"""The loss of a language model as large products, and its gradients, for which the logits are computed once more. What of them
is in memory is a chunk of classes, and of the loss on a GPU a chunk of rows.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array

from ...core import Size
from ...kernel import JaxKernel
from ...transform import has_tiles
from .._jax import product, product_of_rows
from .._precision import wide
from .._supports import floats, floats_or_f64
from . import _reference
from ._jax_gradient import Rows


# Logits that are in memory at the same time on a GPU: 1 GiB of them in f32. Of f64 half as many are.
_LOGITS = 2**28

# Rows of a chunk on a CPU. With fewer, the gradient of the weight is read and written more often, and near so many classes at a
# time: all would be another array of its size.
_ROWS_OF_CACHES, _CLASSES = 256, 640

# Rows of a chunk where there are very many classes: a product of so many takes five times what it takes to read the weight.
_ROWS = 1024

# Bytes of gradients of logits that are in memory at the same time on a CPU with tiles, beside the logits: for few rows there,
# reading and arranging the weight takes as long as multiplying.
_BYTES_OF_TILES = 2**26


class Way(NamedTuple):
    """The way in which one platform computes the loss: what a CPU and a GPU do differently.

    **Attributes:**

    - `dtype`: of what is multiplied, for `x`.
    - `length`: how many classes are a chunk, for `x` and their number.
    - `loss`: the loss and its sums, for the operands and options of the op.
    - `rows`: how many rows are a chunk where all their logits are in memory, for the number of rows and of classes, and `dtype`.
    - `classes`: how many classes of these a gradient is computed for at a time, for their number.
    - `of_rows`: a function of a dtype, rows and other rows, that sums up the products of their numbers.
    - `sliced`: what a loop takes slices of, and makes of slices.
    """

    dtype: Callable[[Array], DTypeLike]
    length: Callable[[Array, int], int]
    loss: Callable[..., tuple[Array, Array, Array]]
    rows: Callable[[Size, int, DTypeLike], int]
    classes: Callable[[int], int]
    of_rows: Callable[[DTypeLike, Array, Array], Array]
    sliced: Callable[[Array], Array]


def _in_chunks(count: Size, most: int) -> int:
    """Return the length of a chunk: all if they are at most so many. Else it is a multiple of 8, without which XLA copies
    operands of products into aligned rows, and chunks have one size, if there is such a size: a rest costs more copies.
    """
    fewest = -(-count // max(most, 1))
    if fewest <= 1:
        return max(count, 1)
    even = (count // chunks for chunks in range(fewest, 2 * fewest + 1) if count % (8 * chunks) == 0)
    return next(even, min(max(count // fewest // 8 * 8, 8), count))


def _logits(dtype: DTypeLike) -> int:
    return _LOGITS * 4 // wide(dtype).itemsize


def _large(x: Array, size: int) -> int:
    return _in_chunks(size, _logits(x.dtype) // max(math.prod(x.shape[:-1]), 1))


def _small(x: Array, size: int) -> int:
    return _reference.chunk_length(size)


def _large_rows(count: Size, size: int, dtype: DTypeLike) -> int:
    return _in_chunks(count, max(_logits(dtype) // max(size, 1), _ROWS))


def _small_rows(count: Size, size: int, dtype: DTypeLike) -> int:
    most = min(_BYTES_OF_TILES // (jnp.dtype(dtype).itemsize * max(size, 1)), _ROWS) if has_tiles() else 0
    return _in_chunks(count, max(most, _ROWS_OF_CACHES))


def _all_classes(size: int) -> int:
    return max(size, 1)


def _small_classes(size: int) -> int:
    return _reference.chunk_length(size, _CLASSES)


def _narrow(x: Array) -> DTypeLike:
    return x.dtype


def _narrow_bf16(x: Array) -> DTypeLike:
    return x.dtype if x.dtype == jnp.bfloat16 else jnp.float32


def _in_any_order(dtype: DTypeLike, a: Array, b: Array) -> Array:
    # XLA on a GPU sums up in f32 and rounds once. Of a result in f32, it makes a product that cannot write where the gradient is.
    return jnp.einsum("...c,...i->ci", a.astype(dtype), b.astype(dtype), preferred_element_type=dtype)


def _bits(array: Array) -> Array:
    """Numbers of 16 bits as integers, for a loop. XLA on a CPU reads and writes slices of bf16 and f16 as f32: it has a copy of
    all of the array in f32, and where it writes, converts all of it for each slice.
    """
    return jax.lax.bitcast_convert_type(array, jnp.uint16) if array.dtype.itemsize == 2 else array


def _from_bits(array: Array, dtype: DTypeLike) -> Array:
    return jax.lax.bitcast_convert_type(array, dtype) if array.dtype != dtype else array


def _as_it_is(array: Array) -> Array:
    return array


def forward_of_classes(x: Array, weight: Array, *args: Any, **options: Any) -> tuple[Array, Array, Array]:
    """Compute the loss on a CPU, from chunks of classes that fit into its caches."""
    dtype, length = _narrow_bf16(x), _small(x, weight.shape[0])

    def logits(x: Array, bits: Array) -> Array:
        return product("...i,ci->...c", dtype, x, _from_bits(bits, weight.dtype))

    return _reference.linear_cross_entropy_with_sums(x, _bits(weight), *args, **options, product=logits, length=length)


def forward_of_rows(
    x: Array,
    weight: Array,
    labels: Array,
    *args: Any,
    add_up: Callable[..., Any] = _reference.add_up,
    **options: Any,
) -> tuple[Array, Array, Array]:
    """Compute the loss on a GPU, from chunks of rows: XLA copies a chunk of classes out of the weight before it multiplies. Only
    where there are so many classes that rows would be few, each chunk of rows is in chunks of classes.
    """
    rows, size = math.prod(labels.shape), weight.shape[0]

    def chunk(carry: None, part: tuple[Array, Array, Array]) -> tuple[None, tuple[Array, Array, Array]]:
        _, x, labels = part
        return carry, _reference.linear_cross_entropy_with_sums(
            *(x, weight, labels, *args),
            **options,
            product=functools.partial(product, "...i,ci->...c", weight.dtype),
            length=_large(x, size),
            add_up=add_up,
        )

    _, results = _reference.each_chunk(
        chunk, None, _large_rows(rows, size, x.dtype), x.reshape(rows, x.shape[-1]), labels.reshape(rows)
    )
    return jax.tree.map(lambda result: result.reshape(labels.shape), results)


def losses_of_logits(z: Array, labels: Array, *args: Any, **options: Any) -> tuple[Array, Array, Array]:
    """Compute the loss on a GPU from the products of all rows and classes."""
    size = z.shape[-1]
    x, weight = jnp.zeros((*labels.shape, 0), z.dtype), jnp.zeros((size, 0), z.dtype)  # of no features
    return _reference.linear_cross_entropy_with_sums(
        *(x, weight, labels, *args),
        **options,
        product=lambda *_: z,
        length=max(size, 1),
        add_up=_in_one_pass,
    )


def _in_one_pass(
    sums: Any, z: Array, first: Array, index: Array, weighted: Callable[[Array], Array] | None
) -> tuple[Array, Array, Array, Array]:
    """Add up as the definition does, by one reduction: XLA reads the logits for the highest one, and again for the sum."""
    highest, total, chosen, every = sums
    more = () if weighted is None else (weighted(z),)
    zeros = (0.0,) * (1 + len(more))
    of_chunk = jax.lax.reduce((z, jnp.ones_like(z), *more), (-jnp.inf, *zeros), _join, (z.ndim - 1,))
    higher, total, *of_every = _join((highest, total, *((every,) if more else ())), of_chunk)
    # Nothing counts where all are -inf, and inf is not below itself.
    total = total * jnp.exp(higher - _reference.finite(higher))
    place = jnp.clip(index - first, 0, z.shape[-1] - 1)
    of_label = jnp.take_along_axis(z, place[..., None], -1, mode="promise_in_bounds")[..., 0]
    return higher, total, chosen + jnp.where(first + place == index, of_label, 0.0), of_every[0] if more else every


def _join(a: Any, b: Any) -> Any:
    """Join the highest logits, the sums of the exponentials of what logits are below them, and other sums, of two sets."""
    (highest_a, total_a, *more_a), (highest_b, total_b, *more_b) = a, b
    highest = jnp.maximum(highest_a, highest_b)
    # From a finite number: two of -inf have no difference.
    ratio = jnp.exp(jnp.minimum(highest_a, highest_b) - jnp.maximum(highest, jnp.finfo(highest.dtype).min))
    total = jnp.where(highest_a >= highest_b, total_a + total_b * ratio, total_a * ratio + total_b)
    return highest, total, *(one + other for one, other in zip(more_a, more_b, strict=True))


def exactly(function: Callable[..., object]) -> Callable[..., Any]:
    """Make a function for a CPU, which has instructions for products of bf16. Other products are in f32, as in the definition,
    whatever `jax.default_matmul_precision` says.
    """

    def call(*args: object, **options: object) -> Any:
        with jax.default_matmul_precision("highest"):
            return function(*args, **options)

    return call


CPU = Way(
    dtype=_narrow_bf16,
    length=_small,
    loss=forward_of_classes,
    rows=_small_rows,
    classes=_small_classes,
    of_rows=product_of_rows,
    sliced=_bits,
)
GPU = Way(
    dtype=_narrow,
    length=_large,
    loss=functools.partial(forward_of_rows, add_up=_in_one_pass),
    rows=_large_rows,
    classes=_all_classes,
    of_rows=_in_any_order,
    sliced=_as_it_is,
)


def capped(z: Array, bias: Array | None, soft_cap: float | None) -> Array:
    """Return the logits of products."""
    z = z if bias is None else z + jnp.broadcast_to(bias, z.shape)
    return z if soft_cap is None else soft_cap * jnp.tanh(z / soft_cap)


def backward(way: Way, args: Any, out: Any, cotangents: Any, *, soft_cap: float | None = None, **options: Any) -> Any:
    """Compute the gradients. Callers see the loss alone: the other results have no cotangent."""
    x, weight, labels, bias, class_weights = args
    (_, highest, total), (of_loss, *_) = out, cotangents
    dtype, size = way.dtype(x), weight.shape[0]
    rows = Rows.of(labels, of_loss, highest, total, size, class_weights, **options)
    x = rows.counted(x)

    def chunk(d_x: Array, part: Any) -> tuple[Array, Any]:
        first, bits, bias, class_weights = part
        some = _from_bits(bits, weight.dtype)
        z = capped(product("...i,ci->...c", dtype, x, some), bias, soft_cap)
        d_z, d_class_weights = rows.gradient(z, first, class_weights, soft_cap)
        d_some = way.of_rows(dtype, d_z, x).astype(weight.dtype)
        d_bias = None if bias is None else d_z.sum(range(labels.ndim)).astype(bias.dtype)
        return d_x + product("...c,ci->...i", dtype, d_z, some), (way.sliced(d_some), d_bias, d_class_weights)

    d_x = jnp.zeros(x.shape, wide(x.dtype))
    d_x, gradients = _reference.each_chunk(chunk, d_x, way.length(x, size), way.sliced(weight), bias, class_weights)
    d_weight, d_bias, d_class_weights = gradients
    return rows.counted(d_x).astype(x.dtype), _from_bits(d_weight, weight.dtype), None, d_bias, d_class_weights


LINEAR_CROSS_ENTROPY = {
    "cpu": JaxKernel(exactly(CPU.loss), supports=floats),
    "cuda": JaxKernel(GPU.loss, supports=floats_or_f64, differentiable=forward_of_rows),
}
LINEAR_CROSS_ENTROPY_BACKWARD = {
    "cpu": JaxKernel(exactly(functools.partial(backward, CPU)), supports=floats),
    "cuda": JaxKernel(functools.partial(backward, GPU), supports=floats_or_f64),
}
