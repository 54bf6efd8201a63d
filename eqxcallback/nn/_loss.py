"""Losses."""

from typing import TypedDict, Unpack

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, ArrayLike, Float, Integer, PRNGKeyArray

from .. import ops
from ..core import AnyArray, AnyInt, AnyNumber, check_loss_options, soft_cap_of
from ._linear import Linear, check_linear


class SoftmaxCrossEntropy(eqx.Module):
    """The cross-entropy of a softmax and a label, computed in f32: [`eqxcallback.ops.softmax_cross_entropy`][] with its options.

    A batch goes through `jax.vmap`: `jax.vmap(loss)(logits, labels).mean()`. With `ignore_index`, divide the sum by the number
    of labels that count, if the mean should be theirs.
    """

    label_smoothing: float = eqx.field(static=True)
    z_loss: float = eqx.field(static=True)
    ignore_index: int | None = eqx.field(static=True)
    implementation: ops.Implementation = eqx.field(static=True)

    def __init__(
        self,
        *,
        label_smoothing: AnyNumber = 0.0,
        z_loss: AnyNumber = 0.0,
        ignore_index: AnyInt | None = None,
        implementation: ops.Implementation = "auto",
    ):
        """**Arguments:**

        - `label_smoothing`: from 0 to 1: how much of a label belongs to all classes alike.
        - `z_loss`: how much the square of the logarithm of the softmax's denominator adds to the loss.
        - `ignore_index`: the label of examples whose loss and gradient are 0.
        - `implementation`: see [`eqxcallback.Op.using`][].
        """
        options = check_loss_options("SoftmaxCrossEntropy", label_smoothing, z_loss, ignore_index)
        self.label_smoothing, self.z_loss, self.ignore_index = options
        self.implementation = implementation

    @jax.named_scope("eqxcallback.nn.SoftmaxCrossEntropy")
    def __call__(
        self,
        logits: Float[AnyArray, " size"],
        label: Integer[ArrayLike, ""] | Float[ArrayLike, " size"],
        *,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, ""]:
        """**Arguments:**

        - `logits`: an array of shape `(size,)`.
        - `label`: an integer of shape `()`. A negative one counts from the end. One that is out of range gives NaN. Or floats
            of shape `(size,)`, a target for each class.
        - `key`: ignored.

        **Returns:** the loss, in f32, or in the dtype of `logits` if that is wider.
        """
        del key
        if jnp.ndim(logits) != 1:
            raise ValueError(
                f"SoftmaxCrossEntropy: expected logits of shape (size,); got {jnp.shape(logits)}. For a batch, use "
                "`jax.vmap(loss)(logits, labels)`."
            )
        return ops.softmax_cross_entropy(
            logits,
            label,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            ignore_index=self.ignore_index,
            implementation=self.implementation,
        )


class LossOptions(TypedDict, total=False):
    """The options of [`eqxcallback.nn.FusedLinearCrossEntropy`][]."""

    label_smoothing: AnyNumber
    z_loss: AnyNumber
    ignore_index: AnyInt | None
    soft_cap: AnyNumber | None
    dtype: DTypeLike | None
    implementation: ops.Implementation


class FusedLinearCrossEntropy(eqx.Module):
    """The last linear layer of a classifier or a language model and its loss, in one: logits are never in memory all at once.
    See [`eqxcallback.ops.linear_cross_entropy`][].

    A batch goes through `jax.vmap`, which reads the weight once for all of it.

    !!! example

        ```python
        loss = eqxcallback.nn.FusedLinearCrossEntropy(512, 32_000, ignore_index=-1, key=key)
        losses = jax.vmap(loss)(hidden, labels)  # of shapes (tokens, 512), (tokens,)
        ```

    With a weight that it shares with an embedding, the layer is one of `equinox.nn.Shared`, as any other. The mean of a batch, as
    [`eqxcallback.ops.linear_cross_entropy`][] computes it with `reduction="mean"`, takes three products in place of four.
    """

    weight: Float[Array, "num_classes in_features"]
    bias: Float[Array, " num_classes"] | None
    in_features: int = eqx.field(static=True)
    num_classes: int = eqx.field(static=True)
    use_bias: bool = eqx.field(static=True)
    label_smoothing: float = eqx.field(static=True)
    z_loss: float = eqx.field(static=True)
    ignore_index: int | None = eqx.field(static=True)
    soft_cap: float | None = eqx.field(static=True)
    implementation: ops.Implementation = eqx.field(static=True)

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        use_bias: bool = False,
        *,
        label_smoothing: AnyNumber = 0.0,
        z_loss: AnyNumber = 0.0,
        ignore_index: AnyInt | None = None,
        soft_cap: AnyNumber | None = None,
        dtype: DTypeLike | None = None,
        key: PRNGKeyArray,
        implementation: ops.Implementation = "auto",
    ):
        """**Arguments:**

        - `in_features`: the size of the input.
        - `num_classes`: how many logits there would be.
        - `use_bias`: whether they have a bias.
        - `label_smoothing`, `z_loss`, `ignore_index`: as of [`eqxcallback.nn.SoftmaxCrossEntropy`][].
        - `soft_cap`: `c`, which makes `c * tanh(z / c)` of each logit `z`.
        - `dtype`: of the weight and the bias; by default JAX's default float.
        - `key`: initialises them, as `equinox.nn.Linear` does.
        - `implementation`: see [`eqxcallback.Op.using`][].
        """
        who = "FusedLinearCrossEntropy"
        options = check_loss_options(who, label_smoothing, z_loss, ignore_index)
        linear = Linear(in_features, num_classes, use_bias, dtype, key=key)
        self.weight, self.bias = linear.weight, linear.bias
        self.in_features, self.num_classes, self.use_bias = in_features, num_classes, use_bias
        self.label_smoothing, self.z_loss, self.ignore_index = options
        self.soft_cap, self.implementation = soft_cap_of(who, soft_cap), implementation

    @classmethod
    def from_linear(cls, linear: eqx.nn.Linear, **options: Unpack[LossOptions]) -> "FusedLinearCrossEntropy":
        """The loss of the logits of `linear`, with its very arrays.

        **Arguments:**

        - `linear`: an `equinox.nn.Linear`.
        - `options`: those of the constructor, from `label_smoothing` on.
        """
        check_linear("FusedLinearCrossEntropy.from_linear", linear)
        num_classes, in_features = linear.weight.shape
        new = eqx.filter_eval_shape(
            cls, in_features, num_classes, linear.bias is not None, key=jax.random.key(0), **options
        )
        new = eqx.tree_at(lambda layer: layer.weight, new, linear.weight)
        return new if linear.bias is None else eqx.tree_at(lambda layer: layer.bias, new, linear.bias)

    @jax.named_scope("eqxcallback.nn.FusedLinearCrossEntropy")
    def __call__(
        self, x: Float[AnyArray, " in_features"], label: Integer[ArrayLike, ""], *, key: PRNGKeyArray | None = None
    ) -> Float[Array, ""]:
        """**Arguments:**

        - `x`: an array of shape `(in_features,)`.
        - `label`: an integer of shape `()`. A negative one counts from the end. One that is out of range gives NaN.
        - `key`: ignored.

        **Returns:** the loss, in f32, or in the dtype of `x` if that is wider.
        """
        del key
        if jnp.shape(x) != self.weight.shape[1:]:
            raise ValueError(
                f"FusedLinearCrossEntropy: expected x of shape {self.weight.shape[1:]}; got {jnp.shape(x)}. For a batch, use "
                "`jax.vmap(loss)(x, labels)`."
            )
        dtype = jnp.result_type(x, self.weight)
        return ops.linear_cross_entropy(
            jnp.asarray(x, dtype),
            self.weight.astype(dtype),
            label,
            bias=self.bias,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            ignore_index=self.ignore_index,
            soft_cap=self.soft_cap,
            implementation=self.implementation,
        )
