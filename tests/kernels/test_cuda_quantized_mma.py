"""Products with weights in blocks by tensor cores, on a CPU."""

import collections
import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqxcallback import ops
from eqxcallback.kernel import emulated
from eqxcallback.ops.linear import _cuda as linear_cuda, _quantized, _reference_quantized as reference

from ..ops.linear import cases
from ..ops.table import with_options
from . import kernels
from .checking import SEEDS, check, want
from .kernels import BF16, F16, results
from .test_cuda_quantized import example, weights_of


by_encoding = pytest.mark.parametrize("encoding", list(linear_cuda._STRIDE_BY_MMA))


def calls(dtype):
    for encoding in ("Q4_1", "Q8_0"):
        for shape in ((1, 256, 5), (9, 512, 32), (35, 1280, 33)):
            yield kernels.quantized_linear_mma(*example(shape, encoding, dtype), encoding=encoding)
        yield kernels.quantized_linear_swiglu_mma(*example((9, 640, 70), encoding, dtype), encoding=encoding)
    # The last of its packs of 16 bytes ends before 16.
    for shape in ((1, 256, 5), (9, 768, 33), (17, 512, 18)):
        yield kernels.quantized_linear_mma(*example(shape, "Q6_K", dtype), encoding="Q6_K")
        yield kernels.quantized_linear_swiglu_mma(*example((*shape[:2], 34), "Q6_K", dtype), encoding="Q6_K")


@by_encoding
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 16, 17, 31, 33, 64])
def test_values(rows, dtype, encoding):
    """One part of the features for some warps, none for others, several; outputs that are not whole tiles."""
    for in_features, out_features in ((256, 33), (1280, 17)) if rows < 20 else ((512, 40),):
        x, blocks = example((rows, in_features, out_features), encoding, dtype)
        (got,) = results(kernels.quantized_linear_mma(x, blocks, encoding=encoding))
        check(got, want(with_options(reference.quantized_linear, encoding=encoding), x, blocks), in_features, 4.0)


@by_encoding
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("shape", [(1, 128, 2), (8, 640, 64), (3, 1152, 66), (16, 1536, 30), (33, 512, 98)], ids=str)
def test_a_gate_has_the_bits_of_two_kernels(shape, dtype, encoding):
    """Rows of weights that are no whole tiles, of which the last is of the gate, or of up."""
    if shape[1] % 256 and encoding.endswith("_K"):
        shape = (shape[0], 768, shape[2])
    x, blocks = example(shape, encoding, dtype)
    (both,) = results(kernels.quantized_linear_mma(x, blocks, encoding=encoding))
    (want,) = results(kernels.glu(both, activation="silu"))
    (got,) = results(kernels.quantized_linear_swiglu_mma(x, blocks, encoding=encoding))
    assert got.tobytes() == want.tobytes()


# Rows of x, and if there are many of weights.
LAYOUTS = {
    (1, False): {(1, 8)},
    (8, False): {(1, 8), (1, 4)},
    (16, False): {(2, 4)},
    (33, False): {(4, 4)},
    (8, True): {(1, 4)},
    (9, True): {(2, 4)},
    (17, True): {(4, 4)},
    (33, True): {(8, 4), (4, 4)},
}


@pytest.mark.parametrize("encoding", list(linear_cuda._STRIDE_BY_MMA))
@pytest.mark.parametrize(("rows", "many"), list(LAYOUTS))
def test_layouts(rows, many, encoding, monkeypatch):
    """Some warps have fewer parts than others, or none, and some no weights. Blocks have what shared memory there is."""
    monkeypatch.setattr(linear_cuda, "_MANY_WEIGHTS", 0 if many else 1 << 30)
    for in_features, out_features in ((512, 33), (1280, 195)):
        x, blocks = example((rows, in_features, out_features), encoding, BF16)
        layout = linear_cuda._layout(x, blocks, encoding)
        assert layout in LAYOUTS[rows, many]
        assert layout.shared_bytes(x, encoding) <= 99 << 10
        (got,) = results(kernels.quantized_linear_mma(x, blocks, encoding=encoding))
        wanted = want(with_options(reference.quantized_linear, encoding=encoding), x, blocks)
        check(got, wanted, in_features, 4.0)


@by_encoding
def test_digits_and_sums_are_not_rounded(encoding):
    """Every digit, times 1 for one feature at a time. Q6_K has products of scales of 16 as well."""
    x = np.zeros((64, 256), F16)
    x[np.arange(64), np.arange(64) * 4 % 256 + np.arange(64) // 16] = 1
    rng = np.random.default_rng(1)
    _, _, at, halves = cases.UNPACKED.get(encoding, (32, 0, 0, 2 if encoding == "Q4_1" else 1))
    blocks = rng.integers(0, 256, (32, 256 // weights_of(encoding), ops.ENCODINGS[encoding]), np.uint8)
    blocks[..., at : at + 2 * halves] = np.array([1, 3][:halves], np.float16).view(np.uint8)
    if encoding == "Q6_K":  # results of which bf16 has every bit
        blocks[..., 192:208] = rng.choice(np.array([1, 2, 4, 255, 254], np.uint8), (32, 1, 16))
    flat = blocks.reshape(32, -1)
    weights = reference.dequantize(jnp.asarray(flat), encoding=encoding)
    exact = np.asarray(x, np.float64) @ np.asarray(weights, np.float64).T
    for dtype in (F16, BF16):
        (got,) = results(kernels.quantized_linear_mma(x.astype(dtype), flat, encoding=encoding))
        np.testing.assert_array_equal(got.astype(np.float64), exact.astype(dtype).astype(np.float64))


@pytest.mark.parametrize("blocks_of_row", [1, 2, 3, 5])
def test_blocks_that_begin_anywhere(blocks_of_row):
    """Blocks of 210 bytes begin at all even addresses modulo 16. The scale of another row, which is NaN, is not read."""
    x, blocks = example((5, 256 * blocks_of_row, 18), "Q6_K", BF16)
    parts = blocks.reshape(18, -1, 210)
    for kernel, wrong in ((kernels.quantized_linear_mma, 8), (kernels.quantized_linear_swiglu_mma, 17)):
        broken = parts.copy()
        broken[wrong, :, 208:] = 0xFF
        (got,) = results(kernel(x, broken.reshape(18, -1), encoding="Q6_K"))
        np.testing.assert_array_equal(np.isnan(got.astype(np.float32)).any(axis=0), np.arange(got.shape[1]) == 8)
    (got,) = results(kernels.quantized_linear_mma(x, blocks, encoding="Q6_K"))
    check(got, want(with_options(reference.quantized_linear, encoding="Q6_K"), x, blocks), x.shape[1], 4.0)


@by_encoding
def test_the_order_of_threads_does_not_matter(encoding):
    call = kernels.quantized_linear_mma(*example((11, 1536, 40), encoding, BF16), encoding=encoding)
    assert len({results(call, seed)[0].tobytes() for seed in SEEDS}) == 1


@by_encoding
def test_under_vmap(encoding):
    """As programs call it: the rows of all examples are one call, or in too many the reference."""
    kernels = {"cpu": emulated(linear_cuda.QUANTIZED_LINEAR_MMA)}
    op = dataclasses.replace(_quantized._quantized_linear, kernels=kernels, backward=None)
    for rows in (3, 17):
        x, blocks = example((4 * rows, 256, 9), encoding, BF16)

        def apply(x, blocks=blocks):
            return op(x, blocks, encoding=encoding, activations="exact")

        got = jax.jit(jax.vmap(apply))(jnp.asarray(x).reshape(4, rows, 256))
        wanted = want(with_options(reference.quantized_linear, encoding=encoding), x, blocks)
        check(np.asarray(got).reshape(wanted.shape), wanted, 256, 4.0)


@by_encoding
@pytest.mark.parametrize("shape", [(0, 256, 3), (2, 0, 3), (2, 256, 0)], ids=str)
def test_nothing_to_multiply(shape, encoding):
    (got,) = results(kernels.quantized_linear_mma(*example(shape, encoding, BF16), encoding=encoding))
    np.testing.assert_array_equal(got.astype(np.float32), np.zeros((shape[0], shape[2])))


@by_encoding
def test_not_finite(encoding):
    for value in (np.nan, np.inf):
        x, blocks = example((9, 256, 11), encoding, BF16)
        x[2, 40] = value
        at = cases.UNPACKED[encoding][2] if encoding in cases.UNPACKED else 0
        parts = blocks.reshape(11, -1, ops.ENCODINGS[encoding])
        parts[4, -1, at : at + 2] = np.array([value], np.float16).view(np.uint8)
        (got,) = results(kernels.quantized_linear_mma(x, blocks, encoding=encoding))
        wanted = want(with_options(reference.quantized_linear, encoding=encoding), x, blocks)
        np.testing.assert_array_equal(np.isfinite(got.astype(np.float32)), np.isfinite(wanted))


def test_what_it_does_not_take():
    def said(rows, features, dtype, **options):
        x, blocks = jax.ShapeDtypeStruct((rows, features), dtype), jax.ShapeDtypeStruct((5, 160), jnp.uint8)
        types = SimpleNamespace(x=x, blocks=blocks)
        return linear_cuda.QUANTIZED_LINEAR_MMA.supports(types, encoding="Q4_1", **options)

    assert said(64, 256, jnp.bfloat16) is True
    assert said(1, 768, jnp.float16) is True
    assert said(1, 384, jnp.float16) is True
    assert said(1, 288, jnp.float16) == "in_features have to be a multiple of 128; they are 288"
    assert said(65, 256, jnp.float16) == "x can have at most 64 rows; it has 65"
    assert said(1, 256, jnp.float32) == "tensor cores multiply bfloat16 and float16; x is float32"
    assert said(1, 256, jnp.float16, activations="int8") == "it has no int8 activations"


def test_it_runs_where_it_is_the_faster_one(monkeypatch):
    """With a gate or without."""
    types = collections.namedtuple("types", ("x", "blocks"))

    def said(kernel, rows, encoding, features=256, columns=160):
        x, blocks = jax.ShapeDtypeStruct((rows, features), jnp.bfloat16), jax.ShapeDtypeStruct((32, columns), jnp.uint8)
        return kernel.supports(types(x, blocks), encoding=encoding, activations="exact")

    several, gated = linear_cuda.QUANTIZED_LINEAR_OF_SEVERAL_ROWS, linear_cuda.QUANTIZED_LINEAR_SWIGLU_OF_SEVERAL_ROWS
    monkeypatch.setenv("EQXCALLBACK_CUDA_ARCH", "sm_80")
    for encoding in linear_cuda._STRIDE_BY_MMA:
        least = 2 if encoding in ("Q4_1", "Q4_K") else 3
        assert said(several, least, encoding) is said(several, 64, encoding) is True
        assert said(gated, least, encoding) is said(gated, 64, encoding) is True
        for kernel in (several, gated):
            assert said(kernel, least - 1, encoding) == f"x has to have {least} rows or more; it has {least - 1}"
    assert said(several, 65, "Q4_1") == "x can have at most 64 rows; it has 65"
    assert said(linear_cuda.QUANTIZED_LINEAR_SWIGLU, 8, "Q4_K", columns=144) is True
    monkeypatch.setenv("EQXCALLBACK_CUDA_ARCH", "sm_75")
    assert said(several, 8, "Q4_1") == "the architecture has to be sm_80 or newer; it is sm_75"
    assert said(gated, 8, "Q4_1") == "the architecture has to be sm_80 or newer; it is sm_75"


@pytest.mark.compilers
@pytest.mark.parametrize(("rows", "features", "is_by_mma"), [(1, 256, False), (3, 256, True), (3, 288, False)])
def test_the_kernel_of_a_program(rows, features, is_by_mma, monkeypatch):
    monkeypatch.setenv("EQXCALLBACK_CUDA_ARCH", "compute_80")
    x = jax.ShapeDtypeStruct((rows, features), jnp.bfloat16)
    blocks = jax.ShapeDtypeStruct((32, features // 32 * 20), jnp.uint8)
    program = jax.jit(lambda x, blocks: ops.quantized_linear(x, blocks, encoding="Q4_1"))
    text = program.trace(x, blocks).lower(lowering_platforms=("cuda",)).as_text()
    assert ("quantized_linear_mma" in text) == is_by_mma
