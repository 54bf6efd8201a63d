"""Losses of logits."""

from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, ArrayLike, Float, Integer

from ...core import AnyArray, AnyInt, AnyNumber, check, check_floats, check_loss_options, integers
from ...kernel import NativeKernel
from ...transform import Implementation, Op
from .._precision import wide
from .._supports import floats
from . import _cuda, _numpy, _reference
from ._reference_targets import cross_entropy_of_targets, targets_of_labels, weighted_targets


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
    sharding="... _, ... -> ...",
)
# No kernel for CPUs: what XLA makes of it there is one pass.
_of_targets = Op(
    "softmax_cross_entropy",
    kernels={"cuda": _cuda.OF_TARGETS},
    reference=cross_entropy_of_targets,
    vmap_method={"logits": "broadcast_all", "targets": "broadcast_all"},
    backward={"cuda": _cuda.OF_TARGETS_BACKWARD},
    backward_reads_results=False,
    sharding="... _, ... _ -> ...",
)


def softmax_cross_entropy(
    logits: Float[AnyArray, "*batch size"],
    labels: Integer[ArrayLike, "*batch"] | Float[ArrayLike, "*batch size"],
    *,
    class_weights: Float[ArrayLike, " size"] | None = None,
    label_smoothing: AnyNumber = 0.0,
    z_loss: AnyNumber = 0.0,
    ignore_index: AnyInt | None = None,
    implementation: Implementation = "auto",
) -> Float[Array, "*batch"]:
    r"""$(1 - \alpha) (l - z_\mathrm{label}) + \alpha (l - \frac{1}{n} \sum_i z_i) + \beta l^2$ of logits $z$ over the last axis,
    where $l = \log \sum_i e^{z_i}$, computed in f32. With a target $t_i$ for each class it is $\sum_i t_i (l - z_i) + \beta l^2$.

    **Arguments:**

    - `logits`: an array of shape `(*batch, size)`. f32, bf16 and f16 run the kernel, other dtypes the reference.
    - `labels`: integers of shape `batch`. A negative one counts from the end. One that is out of range gives NaN. Or the
        targets $t$, floats of the shape of `logits`, as of a teacher or a mixture of examples; on a CPU they run the reference.
    - `class_weights`: $w$, of shape `(size,)`, by which the part of each class is multiplied, as in PyTorch: of a label's loss
        it is $w_\mathrm{label}$. With `label_smoothing` or `z_loss`, which has no weight, they become targets. PyTorch's mean
        divides by the sum of the weights of the labels.
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
    options = loss_options(name, label_smoothing, z_loss, ignore_index)
    ignore_index = options.get("ignore_index")
    weights = None if class_weights is None else weights_of(name, class_weights, logits.shape[-1], logits.dtype)
    if jnp.issubdtype(jnp.result_type(labels), jnp.floating):
        targets = _targets(name, logits, jnp.asarray(labels), weights, **options)
        return _of_targets.using(implementation)(logits, targets, z_loss=options.get("z_loss", 0.0))
    labels = integers(name, "labels", labels, logits.shape[:-1])
    if weights is None:
        return _softmax_cross_entropy.using(implementation)(logits, labels, **options)
    ignored = False if ignore_index is None else labels == ignore_index
    if "label_smoothing" not in options and "z_loss" not in options:
        # An ignored label may have no weight of its own, and has no part in the gradient of any.
        of_labels = jnp.where(ignored, 0.0, weights.at[labels].get(mode="fill"))
        return of_labels * _softmax_cross_entropy.using(implementation)(logits, labels, **options)
    if ignore_index is not None:  # what is ignored has no gradient, whatever its logits are
        logits = jnp.where(labels[..., None] == ignore_index, jnp.zeros_like(logits), logits)
    targets = targets_of_labels(labels, weights, options.get("label_smoothing", 0.0))
    loss = _of_targets.using(implementation)(logits, targets, z_loss=options.get("z_loss", 0.0))
    return jnp.where(ignored, 0.0, loss)


def weights_of(name: str, class_weights: ArrayLike, size: int, dtype: DTypeLike) -> Array:
    """Check class weights, and return them as the loss needs them."""
    weights = jnp.asarray(class_weights)
    fits = weights.shape == (size,) and jnp.issubdtype(weights.dtype, jnp.floating)
    check(fits, name, f"class_weights of shape ({size},) and a floating dtype", class_weights=weights)
    return weights.astype(wide(dtype))


def _targets(
    name: str,
    logits: Array,
    targets: Array,
    weights: Array | None,
    *,
    label_smoothing: float = 0.0,
    ignore_index: int | None = None,
    **_: object,
) -> Array:
    check(targets.shape == logits.shape, name, "targets of the shape of logits", logits=logits, targets=targets)
    if ignore_index is not None:
        raise ValueError(
            f"{name}: expected no ignore_index with targets; got {ignore_index!r}. A row of zeros has no loss."
        )
    return weighted_targets(targets.astype(wide(logits.dtype)), weights, label_smoothing)


def loss_options(
    name: str, label_smoothing: AnyNumber, z_loss: AnyNumber, ignore_index: AnyInt | None
) -> dict[str, Any]:
    """The options that are not the default."""
    label_smoothing, z_loss, ignore_index = check_loss_options(name, label_smoothing, z_loss, ignore_index)
    options = {"label_smoothing": label_smoothing, "z_loss": z_loss}
    given: dict[str, Any] = {key: value for key, value in options.items() if value}
    return given if ignore_index is None else {**given, "ignore_index": ignore_index}
