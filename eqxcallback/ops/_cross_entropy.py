"""Losses of logits."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Int

from .. import _checks, kernels, reference
from .._checks import check, check_floats, integers
from ..kernel import NativeKernel
from ..kernels import host
from ..op import Implementation, Op
from ._run import on_cpus, run


_softmax_cross_entropy = Op(
    "softmax_cross_entropy",
    kernels={"cpu": NativeKernel("softmax_cross_entropy"), "cuda": kernels.CROSS_ENTROPY},
    reference=reference.softmax_cross_entropy,
    batching={"logits": "batched", "labels": "batched"},
    backward={"cpu": NativeKernel("softmax_cross_entropy_backward"), "cuda": kernels.CROSS_ENTROPY_BACKWARD},
    alternatives={"cpu": (host.CROSS_ENTROPY,), "cuda": (host.CROSS_ENTROPY,)},
)
# With options, which the kernel for GPUs does not have.
_any_softmax_cross_entropy = on_cpus(_softmax_cross_entropy)


def softmax_cross_entropy(
    logits: Float[Array, "*batch size"],
    labels: Int[ArrayLike, "*batch"],
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int | None = None,
    implementation: Implementation = "auto",
) -> Float[Array, "*batch"]:
    r"""$(1 - \alpha) (l - z_\mathrm{label}) + \alpha (l - \frac{1}{n} \sum_i z_i) + \beta l^2$ of logits $z$ over the last axis,
    where $l = \log \sum_i e^{z_i}$, computed in f32.

    **Arguments:**

    - `logits`: an array of shape `(*batch, size)`. f32, bf16 and f16 run the kernel, on a GPU without the options; everything
        else the reference.
    - `labels`: integers of shape `batch`. A negative one counts from the end. One that is out of range gives NaN.
    - `label_smoothing`: $\alpha$, from 0 to 1: how much of a label belongs to all classes alike.
    - `z_loss`: $\beta$, which keeps $l$ near 0.
    - `ignore_index`: the label of rows whose loss and gradient are 0.
    - `implementation`: `"auto"` chooses; see [`eqxcallback.Op.using`][].

    **Returns:** an array of shape `batch`, in f32, or in the dtype of `logits` if that is wider.
    """
    name = "softmax_cross_entropy"
    logits = jnp.asarray(logits)
    check_floats(name, logits=logits)
    check(logits.ndim > 0, name, "logits with at least one axis", logits=logits)
    labels = integers(name, "labels", labels, logits.shape[:-1])
    options = loss_options(name, label_smoothing, z_loss, ignore_index)
    op = _any_softmax_cross_entropy if options else _softmax_cross_entropy
    return run(op, logits, labels, implementation=implementation, **options)


def loss_options(name: str, label_smoothing: float, z_loss: float, ignore_index: int | None) -> dict[str, Any]:
    """Those that say something."""
    label_smoothing, z_loss, ignore_index = _checks.loss_options(name, label_smoothing, z_loss, ignore_index)
    options = {"label_smoothing": label_smoothing, "z_loss": z_loss}
    given: dict[str, Any] = {key: value for key, value in options.items() if value}
    return given if ignore_index is None else {**given, "ignore_index": ignore_index}
