"""Losses of logits."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .. import kernels, reference
from ..op import Op
from ._checks import check, check_floats, integers, run


_softmax_cross_entropy = Op(
    "softmax_cross_entropy",
    kernels={"cuda": kernels.CROSS_ENTROPY},
    reference=reference.softmax_cross_entropy,
    batching={"logits": "batched", "labels": "batched"},
    backward={"cuda": kernels.CROSS_ENTROPY_BACKWARD},
)


def softmax_cross_entropy(logits: Float[Array, "*batch size"], labels: Int[Array, "*batch"]) -> Float[Array, "*batch"]:
    r"""$\log \sum_i e^{z_i} - z_\mathrm{label}$ of logits $z$ over the last axis, computed in f32.

    **Arguments:**

    - `logits`: an array of shape `(*batch, size)`. On a GPU f32, bf16 and f16 run the kernel; everything else the reference.
    - `labels`: integers of shape `batch`. A negative one counts from the end. One that is out of range gives NaN.

    **Returns:** an array of shape `batch`, in f32, or in the dtype of `logits` if that is wider.
    """
    name = "softmax_cross_entropy"
    logits = jnp.asarray(logits)
    check_floats(name, logits=logits)
    check(logits.ndim > 0, name, "logits with at least one axis", logits=logits)
    return run(_softmax_cross_entropy, logits, integers(name, "labels", labels, logits.shape[:-1]))
