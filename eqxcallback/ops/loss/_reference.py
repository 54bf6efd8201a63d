"""Cross-entropy of a softmax."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt16

from .._precision import wide


def softmax_cross_entropy(
    logits: Float[Array, "*batch size"],
    labels: Int[Array, "*batch"],
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int | None = None,
) -> Float[Array, "*batch"]:
    logits = logits.astype(wide(logits.dtype))
    ignored = jnp.zeros(labels.shape, bool) if ignore_index is None else labels == ignore_index
    if ignore_index is not None:  # what is ignored has no gradient, whatever its logits are
        logits = jnp.where(ignored[..., None], 0.0, logits)
    logs = jax.nn.log_softmax(logits, axis=-1)
    # A negative label counts from the end, and one that is out of range gives NaN.
    loss = -jnp.take_along_axis(logs, labels[..., None], axis=-1, mode="fill")[..., 0]
    if label_smoothing:
        loss = (1 - label_smoothing) * loss - label_smoothing * jnp.mean(logs, axis=-1)
    if z_loss:
        loss = loss + z_loss * jnp.square(jax.nn.logsumexp(logits, axis=-1))
    return loss if ignore_index is None else jnp.where(ignored, 0.0, loss)


# Classes of a chunk. It does not depend on the number of rows, of which `vmap` tells nothing.
_CHUNK = 256


def linear_cross_entropy(*args: Any, **options: Any) -> Float[Array, "*batch"]:
    return linear_cross_entropy_with_sums(*args, **options)[0]


def _wide_product(
    x: Float[Array, "*batch in_features"], weight: Float[Array, "chunk in_features"]
) -> Float[Array, "*batch chunk"]:
    return jnp.einsum("...i,ci->...c", x, weight.astype(x.dtype), precision=jax.lax.Precision.HIGHEST)


def add_up(
    sums: Any, z: Array, first: Array, index: Array, weighted: Callable[[Array], Array] | None
) -> tuple[Array, Array, Array, Array]:
    """Add the logits of a chunk of classes to the sums over others.

    **Arguments:**

    - `sums`: of each row the highest logit, the sum of the exponentials of what logits are below it, the label's logit, and the
        sum of all logits, each times the weight of its class.
    - `first`: the first of these classes.
    - `index`: the label of each row.
    - `weighted`: a function that multiplies logits by the weights of their classes, or `None` if nobody needs their sum.
    """
    highest, total, chosen, every = sums
    # The result does not depend on what is subtracted: so it needs no derivative.
    higher = jax.lax.stop_gradient(jnp.maximum(highest, jnp.max(z, axis=-1)))
    shift = finite(higher)
    total = total * jnp.exp(highest - shift) + jnp.sum(jnp.exp(z - shift[..., None]), axis=-1)
    here = first + jax.lax.broadcasted_iota(jnp.int32, z.shape, z.ndim - 1) == index[..., None]
    chosen = chosen + jnp.sum(jnp.where(here, z, 0.0), axis=-1)
    return higher, total, chosen, every if weighted is None else every + jnp.sum(weighted(z), axis=-1)


def linear_cross_entropy_with_sums(
    x: Float[Array, "*batch in_features"],
    weight: Float[Array, "size in_features"] | UInt16[Array, "size in_features"],
    labels: Int[Array, "*batch"],
    bias: Float[Array, " size"] | None = None,
    class_weights: Float[Array, " size"] | None = None,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int | None = None,
    soft_cap: float | None = None,
    product: Callable[[Array, Array], Array] = _wide_product,
    length: int | None = None,
    add_up: Callable[..., tuple[Array, Array, Array, Array]] = add_up,
) -> tuple[Float[Array, "*batch"], Float[Array, "*batch"], Float[Array, "*batch"]]:
    """The loss, and what the softmax of the logits is made of: the highest one, or 0 for none, and the sum of the exponentials of
    what they are below it. In chunks of classes, and not of rows, `vmap` is one pass over the weight for
    all rows, the gradient of the weight is written a chunk at a time, and that of `x` is the only sum. `product`, which may
    take numbers as their bits, the `length` of a chunk and `add_up` are for others than the definition.
    """
    dtype, size = wide(x.dtype), weight.shape[0]
    ignored = jnp.zeros(labels.shape, bool) if ignore_index is None else labels == ignore_index
    if ignore_index is not None:  # what is ignored has no gradient, whatever is in x
        x = jnp.where(ignored[..., None], jnp.zeros_like(x), x)
    x = x.astype(dtype)
    index = jnp.where(labels < 0, labels + size, labels)

    @jax.checkpoint  # a chunk's logits are computed again for each derivative,
    @jax.checkpoint  # and for those of the first derivative, which drops one of the two
    def add(sums: Any, chunk: Any) -> Any:
        first, weight, bias, class_weights = chunk
        z = product(x, weight)
        if bias is not None:
            z = z + jnp.broadcast_to(bias.astype(dtype), z.shape)
        if soft_cap is not None:
            z = soft_cap * jnp.tanh(z / soft_cap)

        def weighted(z: Array) -> Array:
            return z if class_weights is None else z * jnp.broadcast_to(class_weights, z.shape)

        return add_up(sums, z, first, index, weighted if label_smoothing else None)

    # What a scan carries has one type: in a `shard_map`, the first sums vary over the axes of all operands, as the next ones do.
    operands = (operand for operand in (x, weight, labels, bias, class_weights) if operand is not None)
    zeros = sum((jnp.zeros_like(operand, dtype, ()) for operand in operands), jnp.zeros(labels.shape, dtype))
    sums = (zeros - jnp.inf, zeros, zeros, zeros)
    length = chunk_length(size) if length is None else length
    sums, _ = each_chunk(lambda sums, chunk: (add(sums, chunk), None), sums, length, weight, bias, class_weights)
    highest, total, chosen, every = sums
    shift, log_total = finite(highest), jnp.log(total)
    loss, weights = log_total - (chosen - shift), 1.0
    if class_weights is not None:
        loss, weights = loss * class_weights.at[labels].get(mode="fill", fill_value=0.0), jnp.mean(class_weights)
    if label_smoothing:
        loss = (1 - label_smoothing) * loss + label_smoothing * (weights * log_total - (every / size - weights * shift))
    if z_loss:
        loss = loss + z_loss * jnp.square(log_total + shift)
    loss = jnp.where((index >= 0) & (index < size), loss, jnp.nan)
    return loss if ignore_index is None else jnp.where(ignored, 0.0, loss), shift, total


def linear_cross_entropy_sum(
    x: Float[Array, "rows in_features"],
    weight: Float[Array, "size in_features"],
    labels: Int[Array, " rows"],
    bias: Float[Array, " size"] | None = None,
    class_weights: Float[Array, " size"] | None = None,
    *,
    losses: Callable[..., tuple[Array, Array, Array]] = linear_cross_entropy_with_sums,
    **options: Any,
) -> Any:
    """The sum of the losses, and zeros in the places of what kernels keep for its gradients: what the softmax of each row is made
    of, and the gradients of the operands. `losses` is for others than the definition.
    """
    each, *sums = losses(x, weight, labels, bias, class_weights, **options)
    gradients = [None if arg is None else jnp.zeros_like(arg) for arg in (x, weight, bias, class_weights)]
    return each.sum(), tuple(map(jnp.zeros_like, sums)), tuple(gradients)


def each_chunk(step: Callable[..., Any], carry: Any, length: int, *arrays: Any) -> tuple[Any, Any]:
    """`carry, result = step(carry, (first, *chunks))` for each chunk of so many rows, of which `first` is the first one. The
    results are one after the other. Arrays may be `None`.
    """
    size = arrays[0].shape[0]
    if size == length:  # a loop of one step, which XLA unrolls late, has no kernel for products of bf16 on a CPU
        return step(carry, (jnp.int32(0), *arrays))
    count = size // length
    whole = count * length
    starts = length * jnp.arange(count, dtype=jnp.int32)
    chunks = (starts, *(_split(array, count, length) for array in arrays))
    carry, results = jax.lax.scan(step, carry, chunks)
    results = jax.tree.map(lambda result: result.reshape(whole, *result.shape[2:]), results)
    if whole < size:
        rest = (None if array is None else array[whole:] for array in arrays)
        carry, last = step(carry, (jnp.int32(whole), *rest))
        results = jax.tree.map(lambda result, more: jnp.concatenate([result, more]), results, last)
    return carry, results


def chunk_length(size: int, near: int = _CHUNK) -> int:
    """Return how many classes are a chunk, by default one of the definition. A length that divides the size copies no weight.
    XLA rounds products of a multiple of 8 columns half as much as others on CPUs, which shows where logits are in the hundreds.
    """
    lengths = sorted(
        range(near // 2, 2 * near + 1), key=lambda length: (length % 8 != 0, length > near, abs(length - near))
    )
    return next((length for length in lengths if size % length == 0 and size), min(near, max(size, 1)))


def _split(array: Array | None, count: int, length: int) -> Array | None:
    return None if array is None else array[: count * length].reshape(count, length, *array.shape[1:])


def finite(highest: Array) -> Array:
    return jnp.where(highest == -jnp.inf, 0.0, highest)
