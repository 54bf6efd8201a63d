"""Linear layers over weights in GGUF blocks."""

from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Float, UInt8

from ...core import AnyArray, ShapeAndDtype, check, check_floats, check_one_of
from ...kernel import NativeKernel
from ...transform import Implementation, Op
from .._supports import KERNEL_DTYPES, floats
from . import _cuda, _jax, _numpy, _reference_quantized
from ._int8 import Activations
from ._interleaved import DEINTERLEAVED, check_groups
from ._reference_encodings import LAYOUTS


Encoding = Literal["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "Q4_1_R16", "Q8_0_R16"]
"""The layout of quantised weights, as GGUF files name it: bits of a weight, with a scale (`_0`, `"Q6_K"`) or a scale and a
minimum for each block. No file has `"Q4_1_R16"` or `"Q8_0_R16"`: see [`eqxcallback.ops.interleave_rows`][]."""
ENCODINGS = {name: layout.bytes for name, layout in LAYOUTS.items()}
"""Bytes of a block in each encoding: of 256 weights where the name ends with `_K`, and else of 32."""
_MADE = ("Q4_1", "Q8_0")
_BLOCK_SIZE = 32
# Magnitudes of weights, of a scale and a minimum in f16. A scale of Q8_0 is a 127th.
_LARGEST = {"Q4_1": 65504, "Q8_0": 127 * 65504}


def _sharding(x: ShapeAndDtype, blocks: ShapeAndDtype, *, encoding: str, **_: object) -> str:
    """Rows that lie side by side stay together."""
    return "... _, _ _ -> ... _" if encoding in DEINTERLEAVED else "... _, o _ -> ... o"


_quantized_linear = Op(
    "quantized_linear",
    kernels={
        "cpu": (NativeKernel("quantized_linear", supports=floats), _numpy.QUANTIZED_LINEAR),
        "cuda": (
            _cuda.QUANTIZED_LINEAR_OF_SEVERAL_ROWS,
            _cuda.QUANTIZED_LINEAR,
            _jax.QUANTIZED_LINEAR,
            _cuda.QUANTIZED_LINEAR_IF_CHOSEN,
            _numpy.QUANTIZED_LINEAR,
        ),
    },
    backward={"cuda": _jax.QUANTIZED_LINEAR_BACKWARD},
    reference=_reference_quantized.quantized_linear,
    vmap_method={"x": "broadcast_all", "blocks": "threads"},
    sharding=_sharding,
)


def quantized_linear(
    x: Float[AnyArray, "*batch in_features"],
    blocks: UInt8[AnyArray, "out_features bytes"],
    *,
    encoding: Encoding,
    activations: Activations = "exact",
    implementation: Implementation = "auto",
) -> Float[Array, "*batch out_features"]:
    """`x @ dequantize(blocks).T`, computed in f32. The weights are never expanded in memory.

    **Arguments:**

    - `x`: an array of shape `(*batch, in_features)`, f32, bf16 or f16, `in_features` a multiple of 32, or of 256
        for encodings whose names end with `_K`.
    - `blocks`: one row for each output feature, in the layout of a GGUF file; see [`eqxcallback.ops.dequantize`][].
    - `encoding`: see [`eqxcallback.ops.dequantize`][].
    - `activations`: `"int8"` quantizes each block of 32 of `x` to 255 levels, multiples of a 127th of its largest absolute value,
        as llama.cpp does. That makes one row times `"Q4_1"` faster on a CPU with VNNI. What it costs in quality is in
        [Linear layers](../linear.md).
    - `implementation`: `"auto"` chooses; see [`eqxcallback.Op.using`][].

    **Returns:** an array of shape `(*batch, out_features)` and the dtype of `x`.

    The derivative with respect to `x` does expand the weights; integers have none, and quantizing has that of the identity. So do
    more than eight rows on a GPU, or 64 in 16 bits, where XLA multiplies weights and `x` in the dtype of `x` with sums in f32.
    """
    x, blocks = checked_operands("quantized_linear", x, blocks, encoding, activations)
    return _quantized_linear.using(implementation)(x, blocks, encoding=encoding, activations=activations)


def checked_operands(name: str, x: AnyArray, blocks: AnyArray, encoding: str, activations: str) -> tuple[Array, Array]:
    """Check the operands of a product, and its options."""
    x, blocks = jnp.asarray(x), jnp.asarray(blocks)
    _check_blocks(name, blocks, encoding)
    check_one_of(name, "activations", activations, get_args(Activations))
    check_floats(name, x=x)
    check(x.dtype in KERNEL_DTYPES, name, "x of float32, bfloat16 or float16", x=x)
    features = blocks.shape[-1] // ENCODINGS[encoding] * LAYOUTS[encoding].weights
    fits = x.ndim > 0 and x.shape[-1] == features and blocks.ndim == 2
    expected = f"blocks of shape (out_features, bytes) for the last axis of x, {features} features"
    check(fits, name, expected, x=x, blocks=blocks)
    return x, blocks


def dequantize(blocks: UInt8[AnyArray, "*rows bytes"], *, encoding: Encoding) -> Float[Array, "*rows features"]:
    """The weights of `blocks` in f32.

    **Arguments:**

    - `blocks`: uint8, whole blocks along the last axis. A `"Q4_1"` block has 20 bytes for 32 weights: a scale `d` and a minimum
        `m` in f16, and 16 bytes with weight `i`, `d * q + m`, in the low and weight `16 + i` in the high half of byte `i`. A
        `"Q8_0"` block has 34: a scale in f16 and 32 int8.
        `"Q4_1_R16"` and `"Q8_0_R16"` have those bytes of 16 rows side by side, see [`eqxcallback.ops.interleave_rows`][].
    - `encoding`: as GGUF files name it; the values are those of the `gguf` package, bit by bit. `"Q4_0"` and `"Q5_0"` have a
        scale for each 32 weights, and `"Q5_1"` a minimum as well. Blocks whose names end with `_K` have 256 weights: `"Q4_K"` and
        `"Q5_K"` a scale and a minimum of 6 bits for each 32, and `"Q6_K"` a scale of 8 bits for each 16, times f16 of the block.
    """
    blocks = jnp.asarray(blocks)
    _check_blocks("dequantize", blocks, encoding)
    return _reference_quantized.dequantize(blocks, encoding=encoding)


def quantize(weight: Float[AnyArray, "*rows features"], *, encoding: Encoding) -> UInt8[Array, "*rows bytes"]:
    """Blocks whose weights are near `weight`: what [`eqxcallback.ops.dequantize`][] undoes.

    **Arguments:**

    - `weight`: of any floating dtype, with a multiple of 32 along its last axis.
    - `encoding`: `"Q4_1"` or `"Q8_0"`; llama.cpp makes the others. A weight is off by half a step at most: of a block of
        32, a fifteenth of the range, or a 127th of the largest absolute value. Scales and minimums are rounded to f16.

    Magnitudes up to 65504 (`"Q4_1"`) or 8319008 (`"Q8_0"`) fit. Larger ones are a `ValueError`, but in a traced `weight`, of
    which nobody knows the values: there they are clipped to what scale and minimum can be.
    """
    weight = jnp.asarray(weight)
    if encoding in DEINTERLEAVED:
        raise ValueError(
            f"quantize: expected encoding to be one of {', '.join(_MADE)}; got {encoding!r}. Pass blocks of "
            f"{DEINTERLEAVED[encoding]} to interleave_rows."
        )
    if encoding in ENCODINGS and encoding not in _MADE:
        raise ValueError(
            f"quantize: expected encoding to be one of {', '.join(_MADE)}; got {encoding!r}, which is only read. "
            "Make such weights with llama.cpp."
        )
    check_one_of("quantize", "encoding", encoding, _MADE)
    check_floats("quantize", weight=weight)
    whole = weight.ndim > 0 and weight.shape[-1] % _BLOCK_SIZE == 0
    check(whole, "quantize", f"weight with a multiple of {_BLOCK_SIZE} features ({encoding})", weight=weight)
    if not isinstance(weight, Tracer):
        _check_magnitudes(weight, encoding)
    return _reference_quantized.quantize(weight, encoding=encoding)


def _check_magnitudes(weight: Array, encoding: str) -> None:
    with jax.ensure_compile_time_eval():  # a constant of a program that is being traced
        largest = float(jnp.nanmax(jnp.abs(weight.astype(jnp.float32)), initial=0.0))
    if largest > _LARGEST[encoding]:
        raise ValueError(
            f"quantize: expected weight of magnitudes up to {_LARGEST[encoding]} ({encoding}), as scales are f16; got {largest}. "
            "Use quantize_int8, whose scales are f32."
        )


def _check_blocks(name: str, blocks: Array, encoding: str) -> None:
    check_one_of(name, "encoding", encoding, ENCODINGS)
    size = ENCODINGS[encoding]
    whole = blocks.dtype == jnp.uint8 and blocks.ndim > 0 and blocks.shape[-1] % size == 0
    check(whole, name, f"uint8 blocks with a multiple of {size} bytes in each row ({encoding})", blocks=blocks)
    if encoding in DEINTERLEAVED:
        check_groups(name, blocks, encoding)
