"""A product with quantised weights and the gate after it, of two families: the beginning of a feed-forward block."""

from jaxtyping import Array, Float, UInt8

from ..core import AnyArray, check
from ..kernel import JaxKernel
from ..transform import Implementation, Op
from .glu import swiglu
from .linear import Activations, Encoding, _cuda, quantized_linear
from .linear._quantized import checked_operands


def _of_two(
    x: AnyArray,
    blocks: AnyArray,
    *,
    encoding: Encoding,
    activations: Activations,
    implementation: Implementation = "auto",
) -> Array:
    both = quantized_linear(x, blocks, encoding=encoding, activations=activations, implementation=implementation)
    return swiglu(both, implementation=implementation)


# Called without derivatives and maps, as every kernel; as the reference it has those of both ops, with their kernels.
_OF_TWO = JaxKernel(_of_two)
_quantized_linear_swiglu = Op(
    "quantized_linear_swiglu",
    kernels={
        "cpu": _OF_TWO,
        "cuda": (_cuda.QUANTIZED_LINEAR_SWIGLU_OF_SEVERAL_ROWS, _cuda.QUANTIZED_LINEAR_SWIGLU, _OF_TWO),
    },
    reference=_of_two,
    vmap_method={"x": "broadcast_all", "blocks": "reference"},
    sharding="... _, _ _ -> ... _",
)


def quantized_linear_swiglu(
    x: Float[AnyArray, "*batch in_features"],
    blocks: UInt8[AnyArray, "two_out_features bytes"],
    *,
    encoding: Encoding,
    activations: Activations = "exact",
    implementation: Implementation = "auto",
) -> Float[Array, "*batch out_features"]:
    """[`eqxcallback.ops.swiglu`][] of [`eqxcallback.ops.quantized_linear`][], with the values of the two calls. On a GPU up to
    eight rows are one launch in the encodings of files, and in 16 bits up to 64 in `"Q4_1"`, `"Q8_0"`, `"Q4_K"` and `"Q5_K"`.

    **Arguments:**

    - `x`: an array of shape `(*batch, in_features)`, f32, bf16 or f16.
    - `blocks`: of shape `(2 * out_features, bytes)`, the rows of the gate first.
    - `encoding`, `activations`: as in [`eqxcallback.ops.quantized_linear`][].
    - `implementation`: `"auto"` chooses. Another one is that of both ops, in two calls; see [`eqxcallback.Op.using`][].

    **Returns:** an array of shape `(*batch, out_features)` and the dtype of `x`.
    """
    name = "quantized_linear_swiglu"
    x, blocks = checked_operands(name, x, blocks, encoding, activations)
    check(blocks.shape[0] % 2 == 0, name, "an even number of rows of blocks, half of them of the gate", blocks=blocks)
    if implementation != "auto":
        return _of_two(x, blocks, encoding=encoding, activations=activations, implementation=implementation)
    return _quantized_linear_swiglu(x, blocks, encoding=encoding, activations=activations)
