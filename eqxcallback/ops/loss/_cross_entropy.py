"""Losses of logits."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Int

from ...core import check, check_floats, check_loss_options, integers
from ...kernel import NativeKernel
from ...transform import Implementation, Op
from .._supports import floats
from . import _cuda, _numpy, _reference


_softmax_cross_entropy = Op(
    "softmax_cross_entropy",
    kernels={
        "cpu": (NativeKernel("softmax_cross_entropy", supports=floats), _numpy.CROSS_ENTROPY),
        "cuda": (_cuda.CROSS_ENTROPY, _numpy.CROSS_ENTROPY),
    },
    reference=_reference.softmax_cross_entropy,
    vmap_method={"logits": "broadcast_all", "labels": "broadcast_all"},
    backward={
        "cpu": NativeKernel("softmax_cross_entropy_backward", supports=floats),
        "cuda": _cuda.CROSS_ENTROPY_BACKWARD,
    },
)


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
    return _softmax_cross_entropy.using(implementation)(logits, labels, **options)


def loss_options(name: str, label_smoothing: float, z_loss: float, ignore_index: int | None) -> dict[str, Any]:
    """The options that are not the default."""
    label_smoothing, z_loss, ignore_index = check_loss_options(name, label_smoothing, z_loss, ignore_index)
    options = {"label_smoothing": label_smoothing, "z_loss": z_loss}
    given: dict[str, Any] = {key: value for key, value in options.items() if value}
    return given if ignore_index is None else {**given, "ignore_index": ignore_index}
