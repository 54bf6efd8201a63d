"""Linear layers whose weights stay in a few bits."""

import dataclasses
from typing import Any, Literal, get_args

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int8, PRNGKeyArray, UInt8

from .. import ops
from ..core import AnyArray, check, check_arrays, check_one_of
from ._arrays import others_of
from ._linear import check_linear


QuantizedEncoding = ops.Encoding | Literal["int8"]
_ENCODINGS = (*ops.ENCODINGS, "int8")
_MADE = ("Q4_1", "Q8_0", "int8")  # by `from_linear`; the others are read from files
_OF_BITS: dict[int, QuantizedEncoding] = {4: "Q4_1", 8: "Q8_0"}
_BITS = {"Q4_1": 4, "Q8_0": 8, "int8": 8}


class QuantizedLinear(eqx.Module):
    """A linear layer over weights of a few bits, which are decoded in the processor's registers and caches, never in memory.

    Its gradients are those of the input, the scales and the bias: integers have none. Train it with the scales frozen, or not
    at all.

    **Attributes:**

    - `blocks`: the weights: in GGUF blocks, uint8 of shape `(out_features, bytes)`, see [`eqxcallback.ops.dequantize`][]; or, for
        `"int8"`, int8 of shape `(out_features, in_features)`.
    - `encoding`: `"Q4_1"` (5 bits a weight), `"Q8_0"` (8.5 bits), `"int8"` (8 bits), another encoding of GGUF files, see
        [`eqxcallback.ops.dequantize`][], or `"Q4_1_R16"` or `"Q8_0_R16"`, see `packed`.
    - `scale`: for `"int8"`, of each output feature, in f32, of shape `(out_features,)`.
    - `bias`: of shape `(out_features,)`, or `None`.
    - `activations`: `"exact"`, or `"int8"`, which quantizes the input: see [`eqxcallback.ops.quantized_linear`][] and
        [`eqxcallback.ops.int8_linear`][].
    """

    blocks: UInt8[Array, "*layers out_features bytes"] | Int8[Array, "*layers out_features in_features"]
    encoding: QuantizedEncoding = eqx.field(static=True)
    scale: Float[Array, "*layers out_features"] | None = None
    bias: Float[Array, "*layers out_features"] | None = None
    activations: ops.Activations = eqx.field(static=True, default="exact", kw_only=True)
    implementation: ops.Implementation = eqx.field(static=True, default="auto", kw_only=True)

    def __check_init__(self) -> None:
        who = "QuantizedLinear"
        check_one_of(who, "encoding", self.encoding, _ENCODINGS)
        check_one_of(who, "activations", self.activations, get_args(ops.Activations))
        if (self.scale is None) == (self.encoding == "int8"):
            has = "a scale of shape (out_features,)" if self.encoding == "int8" else "no scale: blocks have their own"
            raise ValueError(f"{who}: expected {has} for encoding {self.encoding!r}; got scale={self.scale}.")
        per_row = {name: x for name, x in (("scale", self.scale), ("bias", self.bias)) if x is not None}
        check_arrays(who, blocks=self.blocks, **per_row)
        if self.encoding == "int8":
            dtype, size, shape = jnp.int8, 1, "(out_features, in_features)"
        else:
            dtype, size = jnp.uint8, ops.ENCODINGS[self.encoding]
            shape = f"(out_features, bytes), bytes a multiple of {size}"
        if self.encoding in ops.DEINTERLEAVED:
            shape += f", out_features a multiple of {ops.INTERLEAVED_ROWS}"
        # Layers that are stacked have more axes before these.
        fits = self.blocks.dtype == dtype and self.blocks.ndim >= 2 and self.blocks.shape[-1] % size == 0
        fits = fits and (self.encoding not in ops.DEINTERLEAVED or self.blocks.shape[-2] % ops.INTERLEAVED_ROWS == 0)
        check(fits, who, f"{jnp.dtype(dtype)} blocks of shape {shape} ({self.encoding})", blocks=self.blocks)
        for name, x in per_row.items():
            expected = f"{name} of shape (out_features,), {self.blocks.shape[:-1]}"
            check(x.shape == self.blocks.shape[:-1], who, expected, **{name: x}, blocks=self.blocks)

    @classmethod
    def from_linear(
        cls,
        linear: eqx.nn.Linear,
        bits: int | None = None,
        encoding: QuantizedEncoding | None = None,
        *,
        activations: ops.Activations = "exact",
        implementation: ops.Implementation = "auto",
    ) -> "QuantizedLinear":
        """The nearest layer to `linear`, with its very bias.

        **Arguments:**

        - `linear`: an `equinox.nn.Linear`, of sizes that are numbers.
        - `bits`: of a weight: 8, the default, or 4.
        - `encoding`: by default `"Q8_0"` for 8 bits and `"Q4_1"` for 4. They take a multiple of 32 for `in_features`;
            `"int8"` takes any.
        - `activations`: `"exact"` or `"int8"`.
        - `implementation`: see [`eqxcallback.Op.using`][].
        """
        check_linear("QuantizedLinear.from_linear", linear)
        if encoding is None:
            bits = 8 if bits is None else bits
            if bits not in _OF_BITS:
                raise ValueError(f"QuantizedLinear.from_linear: expected bits to be 4 or 8; got {bits!r}.")
            encoding = _OF_BITS[bits]
        check_one_of("QuantizedLinear.from_linear", "encoding", encoding, _MADE)
        if bits not in (None, _BITS[encoding]):
            raise ValueError(
                f"QuantizedLinear.from_linear: expected bits={_BITS[encoding]} for encoding={encoding!r}; got bits={bits!r}. "
                "Either of them is enough."
            )
        if "scalar" in (linear.in_features, linear.out_features):
            raise ValueError(
                f"QuantizedLinear.from_linear: expected a layer of numbers of features; got in_features={linear.in_features!r}, "
                f"out_features={linear.out_features!r}."
            )
        options: dict[str, Any] = {"activations": activations, "implementation": implementation}
        if encoding == "int8":
            blocks, scale = ops.quantize_int8(linear.weight)
            return cls(blocks, encoding, scale, linear.bias, **options)
        if linear.weight.shape[-1] % 32:
            raise ValueError(
                f"QuantizedLinear.from_linear: expected in_features to be a multiple of 32 for {encoding}; got "
                f'{linear.weight.shape[-1]}. Use encoding="int8", which takes any.'
            )
        blocks = ops.quantize(linear.weight, encoding=encoding)
        return cls(blocks, encoding, None, linear.bias, **options)

    def packed(self) -> "QuantizedLinear":
        """This layer in the form that a CPU multiplies fastest: of `"Q4_1"` or `"Q8_0"`, with 16 rows of weights side by side,
        `"Q4_1_R16"` or `"Q8_0_R16"`.

        The blocks are a copy of the same size, and results are the same within the rounding of sums in f32. On a GPU XLA puts the
        rows back in each call. A layer of another encoding, or whose `out_features` are not a multiple of 16, is returned as
        it is.
        """
        encoding = self.encoding
        if encoding not in ops.INTERLEAVED or self.out_features % ops.INTERLEAVED_ROWS:
            return self
        blocks = ops.interleave_rows(self.blocks, encoding=encoding)
        return dataclasses.replace(self, blocks=blocks, encoding=ops.INTERLEAVED[encoding])

    def unpacked(self) -> "QuantizedLinear":
        """This layer before `packed`, bit by bit: in an encoding of GGUF files. Others are returned as they are."""
        encoding = self.encoding
        if encoding not in ops.DEINTERLEAVED:
            return self
        blocks = ops.deinterleave_rows(self.blocks, encoding=encoding)
        return dataclasses.replace(self, blocks=blocks, encoding=ops.DEINTERLEAVED[encoding])

    @property
    def in_features(self) -> int:
        size = self.blocks.shape[-1]
        return (
            size
            if self.encoding == "int8"
            else size // ops.ENCODINGS[self.encoding] * (256 if self.encoding.endswith("_K") else 32)
        )

    @property
    def out_features(self) -> int:
        return self.blocks.shape[-2]

    @jax.named_scope("eqxcallback.nn.QuantizedLinear")
    def __call__(
        self, x: Float[AnyArray, " in_features"], *, key: PRNGKeyArray | None = None
    ) -> Float[Array, " out_features"]:
        """**Arguments:**

        - `x`: f32, bf16 or f16, of shape `(in_features,)`. A batch goes through `jax.vmap`, which is one call of the kernel.
        - `key`: ignored, as in `equinox.nn.Linear`.

        **Returns:** an array of shape `(out_features,)` and the dtype of `x`.
        """
        del key
        if self.encoding == "int8":
            assert self.scale is not None
            out = ops.int8_linear(
                x, self.blocks, self.scale, activations=self.activations, implementation=self.implementation
            )
        else:
            out = ops.quantized_linear(
                x,
                self.blocks,
                encoding=self.encoding,
                activations=self.activations,
                implementation=self.implementation,
            )
        return out if self.bias is None else out + self.bias.astype(out.dtype)

    @jax.named_scope("eqxcallback.nn.QuantizedLinear")
    def then_swiglu(self, x: Float[AnyArray, " in_features"]) -> Float[Array, " half_out_features"]:
        """[`eqxcallback.ops.swiglu`][] of this layer's output, whose first half is the gate: the beginning of a feed-forward
        block. On a GPU few rows are one launch, without a bias; see [`eqxcallback.ops.quantized_linear_swiglu`][].

        **Arguments:**

        - `x`: f32, bf16 or f16, of shape `(in_features,)`.

        **Returns:** an array of shape `(out_features / 2,)` and the dtype of `x`.
        """
        if self.encoding == "int8" or self.bias is not None or self.implementation != "auto":
            return ops.swiglu(self(x), implementation=others_of(self.implementation))
        return ops.quantized_linear_swiglu(x, self.blocks, encoding=self.encoding, activations=self.activations)

    def rows(self, index: AnyArray) -> Float[Array, "*index in_features"]:
        """The weights of some output features, in f32: the layer's use as an embedding.

        **Arguments:**

        - `index`: integers of any shape.
        """
        index = jnp.asarray(index)
        if self.encoding in ops.DEINTERLEAVED:
            count = ops.INTERLEAVED_ROWS
            groups = self.blocks.reshape(self.out_features // count, count, self.blocks.shape[-1])
            groups = ops.deinterleave_rows(jnp.take(groups, index // count, axis=0), encoding=self.encoding)
            blocks = jnp.take_along_axis(groups, (index % count)[..., None, None], axis=-2)[..., 0, :]
            return ops.dequantize(blocks, encoding=ops.DEINTERLEAVED[self.encoding])
        blocks = jnp.take(self.blocks, index, axis=0)
        if self.encoding != "int8":
            return ops.dequantize(blocks, encoding=self.encoding)
        assert self.scale is not None
        values = blocks.astype(jnp.float32)
        return values * jnp.broadcast_to(jnp.take(self.scale, index)[..., None], values.shape)
