"""Rotary position embedding."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Integer

from ...core import AnyArray, AnyNumber, check, check_floats, integer
from ...kernel import NativeKernel
from ...transform import Implementation, Op
from .._precision import wide
from .._supports import floats
from . import _cuda, _numpy, _reference


_NATIVE = NativeKernel("rotary_embedding", supports=floats)
# Tables are constants of most models, and their gradients half of the work.
_NATIVE_BACKWARD = NativeKernel("rotary_embedding_backward", attributes=("needs_grad",), supports=floats)
_rotary_embedding = Op(
    "rotary_embedding",
    kernels={
        "cpu": (_NATIVE, _numpy.ROTARY_EMBEDDING),
        "cuda": (_cuda.ROTARY_EMBEDDING, _numpy.ROTARY_EMBEDDING),
    },
    reference=lambda x, table: _reference.rotary_embedding(x, table[0], table[1]),
    vmap_method={"x": "broadcast_all", "table": "fold"},
    backward={"cpu": _NATIVE_BACKWARD, "cuda": _cuda.ROTARY_EMBEDDING_BACKWARD},
    backward_reads_results=False,
    backward_ignores=lambda wanted: () if "table" in wanted else ("x",),
    sharding="... rows heads _, ... rows _, ... rows _ -> ... rows heads _",
)


def rotary_table(
    positions: Integer[AnyArray, "*rows"],
    head_size: int,
    *,
    theta: AnyNumber = 10_000.0,
    factors: Float[AnyArray, " half"] | Sequence[float] | None = None,
    dtype: DTypeLike = jnp.float32,
) -> tuple[Float[Array, "*rows half"], Float[Array, "*rows half"]]:
    r"""Cosine and sine of the angles $p \, \theta^{-2i / d} / f_i$, for [`eqxcallback.ops.rotary_embedding`][].

    **Arguments:**

    - `positions`: $p$, integers of any shape.
    - `head_size`: $d$, even.
    - `theta`: the base of the wave lengths.
    - `factors`: $f_i$, which make waves longer, as Llama 3 does for long texts: `head_size / 2` numbers, by default 1.
    - `dtype`: of the table, and of what it is computed in: f32, or f64 with `jax_enable_x64`.

    **Returns:** two arrays of shape `(*positions.shape, head_size / 2)`.
    """
    name = "rotary_table"
    if not jax.export.is_symbolic_dim(head_size):
        head_size = integer(name, "head_size to be an even number", head_size, least=0)
    check(head_size % 2 == 0, name, "an even head_size", head_size=head_size)
    if jnp.dtype(dtype) not in (jnp.float32, jnp.float64):
        raise ValueError(f"{name}: expected dtype to be float32 or float64; got {jnp.dtype(dtype)}.")
    positions = jnp.asarray(positions)
    check(jnp.issubdtype(positions.dtype, jnp.integer), name, "positions to be integers", positions=positions)
    frequencies = theta ** (-jnp.arange(0, head_size, 2, dtype=dtype) / head_size)
    if factors is not None:
        factors = jnp.asarray(factors, dtype)
        check(factors.shape == frequencies.shape, name, "factors of shape (head_size / 2,)", factors=factors)
        frequencies = frequencies / factors
    angles = jnp.expand_dims(positions, -1).astype(dtype)
    angles = angles * jnp.expand_dims(frequencies, range(angles.ndim - 1))
    return jnp.cos(angles), jnp.sin(angles)


def rotary_embedding(
    x: Float[AnyArray, "*batch rows heads size"],
    cos: Float[AnyArray, "... rows half"],
    sin: Float[AnyArray, "... rows half"],
    *,
    implementation: Implementation = "auto",
) -> Float[Array, "*batch rows heads size"]:
    """Rotates the halves of each head by angles that depend on the row's position.

    Element `i` and element `size / 2 + i` are a pair, as in Llama and GPT-NeoX; GPT-J and the files of llama.cpp pair
    neighbours.

    **Arguments:**

    - `x`: queries or keys, of shape `(*batch, rows, heads, size)`. f32, bf16 and f16 run the kernel, other dtypes the reference.
    - `cos`, `sin`: of [`eqxcallback.ops.rotary_table`][], of shape `(*batch, rows, size / 2)`, or `(rows, size / 2)` for all of
        the batch.
    - `implementation`: `"auto"` chooses; see [`eqxcallback.Op.using`][].

    **Returns:** an array of the shape and dtype of `x`.

    ??? cite

        [RoFormer: Enhanced Transformer with Rotary Position Embedding](https://arxiv.org/abs/2104.09864)
    """
    x, cos, sin = jnp.asarray(x), jnp.asarray(cos), jnp.asarray(sin)
    name = "rotary_embedding"
    check_floats(name, x=x)
    check(x.ndim >= 3 and x.shape[-1] % 2 == 0, name, "x of shape (*batch, rows, heads, size), size even", x=x)
    table = table_for(name, x, cos, sin)
    function: Any = _rotary_embedding.using(implementation)
    # To the kernel an operand without axes has the innermost ones of the batch. Here they are those that the tables lack,
    # which it is told if they are mapped.
    for _ in range(x.ndim - 1 - cos.ndim):
        function = jax.vmap(function, in_axes=(0, None))
    return function(x, table)


def table_for(name: str, x: Array, cos: Array, sin: Array) -> tuple[Array, Array]:
    """Both as the kernels take them for `x`."""
    check_floats(name, cos=cos, sin=sin)
    rows, half = x.shape[-3], x.shape[-1] // 2
    shapes = ((rows, half), (*x.shape[:-2], half))
    check(
        cos.shape in shapes and sin.shape == cos.shape,
        name,
        f"cos and sin of one of the shapes {shapes}",
        cos=cos,
        sin=sin,
    )
    dtype = wide(x.dtype)
    return cos.astype(dtype), sin.astype(dtype)
