"""Products of bf16 and f32 by this package's own kernel: by tiles where a processor has AMX, and by vectors on others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from eqxcallback import _ext, ops
from eqxcallback.transform import product


TARGET = "eqxcallback_matrix_product"
AMD, INTEL = "AuthenticAMD", "GenuineIntel"


@pytest.fixture(autouse=True)
def is_called(monkeypatch):
    """Call the kernel on any machine, as where there are tiles."""
    monkeypatch.setattr(_ext, "isas_of_bf16", lambda: {"linear_rows": "avx512_amx"})


def normal(seed, shape, dtype=jnp.bfloat16):
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


def factors(subscripts, sizes, dtype=jnp.bfloat16):
    return [normal(i, [sizes[axis] for axis in of], dtype) for i, of in enumerate(subscripts.split("->")[0].split(","))]


def exact(subscripts, a, b):
    return np.einsum(subscripts, np.asarray(a, np.float64), np.asarray(b, np.float64))


def program(function, *args):
    return jax.jit(function).lower(*args).as_text()


# The best one, and those without tiles, whose vectors have different lengths; one of them has products of pairs of bf16.
BEST, *OTHERS = dict.fromkeys(
    (_ext.available_isas()[0], *(isa for isa in _ext.available_isas() if isa != "avx512_amx"))
)
WITHOUT_TILES = OTHERS[0] if BEST == "avx512_amx" else BEST


def on_isa(isa, function, *args):
    before = _ext.isa()
    try:
        _ext.set_isa(isa)
        return jax.block_until_ready(function(*args))
    finally:
        _ext.set_isa(before)


def with_memory(size, isa, a, b, result):
    """The kernel alone, of factors with rows, with so many bytes beside its operands."""
    results = jax.ShapeDtypeStruct((*a.shape[:2], b.shape[1]), result), jax.ShapeDtypeStruct((size,), jnp.uint8)
    attributes = {"present": np.int64(3), "a_has_columns": np.int64(0), "b_has_columns": np.int64(0)}
    return on_isa(isa, jax.jit(lambda a, b: jax.ffi.ffi_call(TARGET, results)(a, b, **attributes)[0]), a, b)


def on_processor(monkeypatch, vendor, isa):
    """Choose kernels as on another processor, none of which has tiles."""
    monkeypatch.setattr(_ext, "isas_of_bf16", dict)
    monkeypatch.setattr(_ext, "vendor", lambda: vendor)
    monkeypatch.setattr(_ext, "isa", lambda: isa)


def calls_the_kernel(subscripts, sizes, dtype):
    a, b = (jax.ShapeDtypeStruct([sizes[axis] for axis in of], dtype) for of in subscripts.split("->")[0].split(","))
    return TARGET in program(lambda a, b: product(subscripts, dtype, a, b), a, b)


def assert_f32(subscripts, out, a, b):
    """By the sizes of what is summed: nothing is further off than f32 may be."""
    size = exact(subscripts, np.abs(np.asarray(a)), np.abs(np.asarray(b)))
    assert (np.abs(np.asarray(out, np.float64) - exact(subscripts, a, b)) <= 4e-7 * size).all()


SIZES = {"a": 2, "b": 3, "m": 37, "n": 45, "k": 40, "j": 2}
OURS = ["mk,nk->mn", "mk,kn->mn", "km,nk->mn", "km,kn->mn", "mk,nk->nm", "bmk,bnk->bmn", "bkm,bkn->bnm", "bmk,nk->bmn"]
OURS += ["abmk,abnk->abmn", "jkm,jkn->mn", "mjk,njk->mn"]
XLAS = ["bmk,kbn->bmn", "kjm,jkn->mn", "mkb,nkb->mnb", "bmk,nbk->mbn"]


@pytest.mark.parametrize("isa", [BEST, *OTHERS])
@pytest.mark.parametrize("result", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("subscripts", [*OURS, *XLAS])
def test_products(subscripts, result, isa):
    a, b = factors(subscripts, SIZES)

    def call(a, b):
        return product(subscripts, jnp.bfloat16, a, b, result)

    assert (TARGET in program(call, a, b)) == (subscripts in OURS)
    out = on_isa(isa, call, a, b)
    assert out.dtype == result
    tolerance = 2 * float(jnp.finfo(result).eps)
    np.testing.assert_allclose(np.asarray(out, np.float64), exact(subscripts, a, b), rtol=tolerance, atol=1e-5)


@pytest.mark.parametrize("isa", [BEST, *OTHERS])
@pytest.mark.parametrize("subscripts", [*OURS, *XLAS])
def test_products_of_f32(subscripts, isa):
    """Nothing is lost, also where there are tiles, and each number is three of bf16."""
    a, b = factors(subscripts, SIZES | {"m": 130, "n": 140}, jnp.float32)

    def call(a, b):
        return product(subscripts, jnp.float32, a, b)

    assert (TARGET in program(call, a, b)) == (subscripts in OURS)
    out = on_isa(isa, call, a, b)
    assert out.dtype == jnp.float32
    assert_f32(subscripts, out, a, b)


@pytest.mark.parametrize("isa", [*dict.fromkeys((BEST, WITHOUT_TILES))])
@pytest.mark.parametrize("shape", [(1, 1, 32768), (300, 260, 1), (257, 33, 320), (33, 300, 3031), (600, 40, 64)])
@pytest.mark.parametrize("subscripts", ["mk,nk->mn", "mk,kn->mn", "km,nk->mn", "km,kn->mn"])
def test_sizes(subscripts, shape, isa):
    """Parts of tiles or panels, one row, several slices of what is summed, and several parts of the result, on all threads."""
    a, b = factors(subscripts, dict(zip("mnk", shape, strict=True)))
    want = exact(subscripts, a, b)
    out = on_isa(isa, lambda a, b: product(subscripts, jnp.bfloat16, a, b), a, b)
    np.testing.assert_allclose(np.asarray(out, np.float64), want, rtol=1e-5, atol=1e-6 * shape[2])


@pytest.mark.parametrize("isa", [BEST, *OTHERS])
def test_less_memory_than_it_needs(isa):
    """As a program may have that was compiled with another instruction set: it takes its own."""
    a, b = factors("bmk,bnk->bmn", SIZES)
    out = with_memory(7, isa, a, b, jnp.float32)
    np.testing.assert_allclose(out, exact("bmk,bnk->bmn", a, b), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("result", [jnp.float32, jnp.bfloat16])
def test_several_groups(result):
    """More lines of either factor than are taken at a time, and more numbers: sums have a place until all are summed."""
    a, b = factors("km,kn->mn", {"m": 2100, "n": 2060, "k": 2050})

    def call(a, b):
        return product("km,kn->mn", jnp.bfloat16, a, b, result)

    assert TARGET in program(call, a, b)
    out = np.asarray(on_isa(WITHOUT_TILES, call, a, b), np.float32)[::97]
    want = np.asarray(a, np.float32).T[::97] @ np.asarray(b, np.float32)
    np.testing.assert_allclose(out, want, rtol=2 * float(jnp.finfo(result).eps), atol=1e-3)


# The last one has more lines than are packed at a time, and more numbers.
@pytest.mark.parametrize("isa", [*dict.fromkeys((BEST, WITHOUT_TILES))])
@pytest.mark.parametrize("shape", [(128, 300, 1), (129, 257, 320), (300, 128, 4100), (128, 1500, 2050)])
@pytest.mark.parametrize("subscripts", ["mk,nk->mn", "mk,kn->mn", "km,nk->mn", "km,kn->mn", "mk,nk->nm"])
def test_sizes_of_f32(subscripts, shape, isa):
    a, b = factors(subscripts, dict(zip("mnk", shape, strict=True)), jnp.float32)

    def call(a, b):
        return product(subscripts, jnp.float32, a, b)

    assert TARGET in program(call, a, b)
    out = np.asarray(on_isa(isa, call, a, b), np.float64)
    # NumPy's product of f64 takes seconds for the largest.
    rows = slice(None) if shape[1] < 1000 else slice(0, None, 97)
    if subscripts.endswith("nm"):
        out = out.T
    a, b = (
        np.asarray(x if of[1] == "k" else x.T, np.float64) for x, of in zip((a, b), subscripts.split(","), strict=False)
    )
    want, size = a @ b[rows].T, np.abs(a) @ np.abs(b[rows]).T
    assert (np.abs(out[:, rows] - want) <= 4e-7 * size).all()


@pytest.mark.parametrize("scale", [1e-42, 1e-36, 2e-30, 1e-20, 1e20, 1e36])
def test_f32_of_any_size(scale):
    """Terms of what is small would count as zero, and products of terms of what is large would be infinite."""
    a, b = factors("mk,nk->mn", {"m": 160, "n": 150, "k": 65}, jnp.float32)
    a = a.at[40:80].multiply(jnp.float32(scale))
    out = product("mk,nk->mn", jnp.float32, a, b)
    want = np.asarray(jnp.einsum("mk,nk->mn", a, b, precision="highest"))
    finite = np.isfinite(want)
    np.testing.assert_array_equal(np.isfinite(out), finite)
    size = np.abs(np.asarray(a, np.float64)) @ np.abs(np.asarray(b, np.float64)).T
    assert (np.abs(np.asarray(out, np.float64) - want)[finite] <= (5e-7 * size + 65 * 2.0**-126)[finite]).all()


def test_f32_is_as_near_as_xlas():
    """Sums of products of terms are no further from the exact result than sums of rounded products are."""
    a, b = factors("mk,nk->mn", {"m": 256, "n": 256, "k": 768}, jnp.float32)
    want = exact("mk,nk->mn", a, b)
    ours, xlas = (
        np.sqrt(np.mean((np.asarray(out, np.float64) - want) ** 2))
        for out in (product("mk,nk->mn", jnp.float32, a, b), jnp.einsum("mk,nk->mn", a, b, precision="highest"))
    )
    assert ours <= 1.1 * xlas


@pytest.mark.parametrize(("dtype", "rows"), [(jnp.bfloat16, 35), (jnp.float32, 150)])
def test_what_is_not_finite(dtype, rows):
    """It stays in its row and column, also where tiles are filled up. Infinity times a number that bf16 has is infinite too."""
    a, b = normal(0, (rows, 33), dtype), normal(1, (rows + 5, 33), dtype)
    a, b = a.at[rows - 1, 32].set(jnp.nan), b.at[3, 32].set(jnp.inf)
    a = a.at[1, 32].set(1)
    out = np.asarray(product("mk,nk->mn", dtype, a, b))
    want = np.einsum("mk,nk->mn", np.asarray(a, np.float32), np.asarray(b, np.float32))
    np.testing.assert_array_equal(np.isfinite(out), np.isfinite(want))
    np.testing.assert_array_equal(np.isnan(out), np.isnan(want))


@pytest.mark.parametrize("shape", [(0, 40, 40), (300, 0, 300)])
def test_nothing(shape):
    m, n, k = shape
    assert product("mk,nk->mn", jnp.bfloat16, normal(0, (m, k)), normal(1, (n, k))).shape == (m, n)


@pytest.mark.parametrize("isa", [BEST, *OTHERS])
@pytest.mark.parametrize("shape", [(0, 40, 3000), (40, 0, 3000), (0, 0, 0), (40, 40, 0)])
def test_the_kernel_on_nothing(shape, isa):
    m, n, k = shape
    out = with_memory(0, isa, normal(0, (1, m, k)), normal(1, (1, n, k)), jnp.bfloat16)
    np.testing.assert_array_equal(out, jnp.zeros((1, m, n), jnp.bfloat16))


@pytest.mark.parametrize(("dtype", "rows"), [(jnp.bfloat16, 8), (jnp.float32, 127), (jnp.float16, 256)])
def test_few_numbers_and_other_dtypes_are_left_to_xla(dtype, rows):
    a, b = normal(0, (rows, rows), dtype), normal(1, (rows, rows), dtype)
    assert TARGET not in program(lambda a, b: product("mk,nk->mn", dtype, a, b), a, b)


@pytest.mark.parametrize(("dtype", "sizes"), [(jnp.bfloat16, (96, 64)), (jnp.float32, (192, 128))])
def test_a_layer_and_its_gradients(dtype, sizes):
    """All three products are ours, and none of XLA's is left."""
    x, weight, bias = normal(0, (2, 70, sizes[1]), dtype), normal(1, sizes, dtype), normal(2, sizes[:1], jnp.float32)

    def loss(x, weight, bias):
        return jnp.sin(ops.linear(x, weight, bias).astype(jnp.float32)).sum()

    gradient = jax.grad(loss, (0, 1, 2))
    text = program(gradient, x, weight, bias)
    assert "dot_general" not in text
    # Rows of bf16 themselves are the kernel `linear`, which adds the bias.
    narrow = dtype == jnp.bfloat16
    assert text.count(f"custom_call @{TARGET}") == (2 if narrow else 3)
    assert text.count("custom_call @eqxcallback_linear") == (1 if narrow else 0)
    wide = jax.grad(
        lambda x, weight, bias: jnp.sin(jnp.einsum("...i,oi->...o", x, weight) + bias[None, None]).sum(), (0, 1, 2)
    )(x.astype(jnp.float32), weight.astype(jnp.float32), bias)
    for got, want in zip(gradient(x, weight, bias), wide, strict=True):
        want = np.asarray(want, np.float32)
        np.testing.assert_allclose(
            np.asarray(got, np.float32), want, atol=(0.02 if narrow else 1e-5) * np.max(np.abs(want))
        )


def test_derivatives_in_both_modes():
    a, b = normal(0, (40, 48), jnp.float32), normal(1, (56, 48), jnp.float32)

    def f(a, b):
        return product("mk,nk->mn", jnp.bfloat16, a, b)

    (da, db), cotangent = (
        (normal(2, a.shape, jnp.float32), normal(3, b.shape, jnp.float32)),
        normal(4, (40, 56), jnp.float32),
    )
    _, tangent = jax.jvp(f, (a, b), (da, db))
    pulled = jax.vjp(f, a, b)[1](cotangent)
    left = float(jnp.vdot(cotangent, tangent))
    right = float(sum(jnp.vdot(x, y) for x, y in zip(pulled, (da, db), strict=True)))
    np.testing.assert_allclose(left, right, rtol=0.02, atol=5)
    mapped = jax.vmap(f, (0, None))(jnp.stack([a, da]), b)
    np.testing.assert_allclose(mapped[1], f(da, b), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize(
    ("vendor", "isa", "dtype", "fewest"),
    [
        (INTEL, "avx512", jnp.bfloat16, 16),
        (INTEL, "avx512", jnp.float32, 128),
        (INTEL, "avx512_bf16", jnp.bfloat16, 16),
        (INTEL, "avx512_bf16", jnp.float32, 128),
        (INTEL, "avx2", jnp.bfloat16, None),
        (INTEL, "avx2", jnp.float32, None),
        (AMD, "avx512_bf16", jnp.bfloat16, 16),
        (AMD, "avx512_bf16", jnp.float32, 128),
        (AMD, "avx512", jnp.bfloat16, None),
        (AMD, "avx512", jnp.float32, 128),
        (AMD, "avx2", jnp.float32, None),
        ("another", "avx512", jnp.float32, None),
        ("", "neon", jnp.bfloat16, None),
    ],
)
def test_without_tiles_it_is_called_where_it_was_measured_to_be_faster(vendor, isa, dtype, fewest, monkeypatch):
    on_processor(monkeypatch, vendor, isa)
    for rows in (15, 16, 127, 128):
        is_called = calls_the_kernel("km,nk->mn", {"m": rows, "n": 300, "k": 64}, dtype)
        assert is_called == (fewest is not None and rows >= fewest)


@pytest.mark.parametrize(
    ("dtype", "subscripts", "sizes", "vendors"),
    [
        (jnp.float32, "mk,nk->mn", (512, 768, 64), set()),
        (jnp.float32, "mk,kn->mn", (512, 768, 64), set()),
        (jnp.float32, "km,kn->mn", (512, 768, 64), {AMD, INTEL}),
        (jnp.float32, "km,kn->mn", (127, 768, 64), set()),
        (jnp.float32, "mk,nk->mn", (1024, 1023, 64), set()),
        (jnp.float32, "mk,nk->mn", (1024, 1024, 64), {INTEL}),
        (jnp.float32, "mk,nk->mn", (2048, 2047, 64), {INTEL}),
        (jnp.float32, "mk,nk->mn", (2048, 2048, 64), {AMD, INTEL}),
        (jnp.bfloat16, "mk,nk->mn", (768, 95, 64), set()),
        (jnp.bfloat16, "mk,kn->mn", (768, 95, 64), set()),
        (jnp.bfloat16, "mk,nk->mn", (768, 96, 64), {AMD, INTEL}),
        (jnp.bfloat16, "mk,nk->mn", (96, 95, 64), {AMD, INTEL}),
        (jnp.bfloat16, "km,kn->mn", (768, 16, 64), {AMD, INTEL}),
        (jnp.bfloat16, "km,kn->mn", (768, 15, 64), set()),
    ],
)
def test_xla_reads_the_left_factor_along_its_rows_as_fast(dtype, subscripts, sizes, vendors, monkeypatch):
    """Unless there is a lot to write, or little to multiply."""
    for vendor in (AMD, INTEL):
        on_processor(monkeypatch, vendor, "avx512_bf16")
        is_called = calls_the_kernel(subscripts, dict(zip("mnk", sizes, strict=True)), dtype)
        assert is_called == (vendor in vendors)


@pytest.mark.parametrize("rows", [64, 130])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("vendor", [AMD, INTEL])
def test_a_layer_of_many_rows(vendor, dtype, rows, monkeypatch):
    """In bf16 it is one kernel where its product would be one, which adds the bias and rounds: XLA would write sums of f32."""
    on_processor(monkeypatch, vendor, "avx512_bf16")
    x, weight, bias = normal(0, (rows, 130), dtype), normal(1, (140, 130), dtype), normal(2, (140,), jnp.float32)
    text = program(ops.linear, x, weight, bias)
    narrow = dtype == jnp.bfloat16
    assert text.count("custom_call @eqxcallback_linear") == narrow
    assert text.count("dot_general") == (not narrow)


def test_an_exported_program_has_xlas():
    """Other machines may run it, with other versions of this package."""
    a, b = normal(0, (64, 64)), normal(1, (64, 64))
    exported = jax.export.export(jax.jit(lambda a, b: product("mk,nk->mn", jnp.bfloat16, a, b)))(a, b)
    assert TARGET not in exported.mlir_module()
    np.testing.assert_allclose(exported.call(a, b), product("mk,nk->mn", jnp.bfloat16, a, b), rtol=1e-5, atol=1e-5)


def test_sizes_that_are_not_known_yet():
    (size,) = jax.export.symbolic_shape("n")
    a, b = jax.ShapeDtypeStruct((size, 64), jnp.bfloat16), normal(1, (64, 64))
    exported = jax.export.export(jax.jit(lambda a: product("mk,nk->mn", jnp.bfloat16, a, b)))(a)
    assert exported.call(normal(0, (70, 64))).shape == (70, 64)


@pytest.mark.parametrize("rows", ["n", "n + 64"])
@pytest.mark.parametrize("isa", ["avx512_bf16", "avx512_amx"])
def test_a_layer_whose_rows_are_not_known_yet(isa, rows, monkeypatch):
    """Some are known to be many all the same."""
    on_processor(monkeypatch, INTEL, isa)
    monkeypatch.setattr(_ext, "isas_of_bf16", lambda: {"linear_rows": isa})
    (size,) = jax.export.symbolic_shape(rows)
    x, weight, bias = jax.ShapeDtypeStruct((size, 64), jnp.bfloat16), normal(1, (96, 64)), normal(2, (96,), jnp.float32)
    exported = jax.export.export(jax.jit(lambda x: ops.linear(x, weight, bias)))(x)
    few = normal(0, (70, 64))
    want = exact("mk,nk->mn", few, weight) + np.asarray(bias)
    np.testing.assert_allclose(np.asarray(exported.call(few), np.float64), want, rtol=0.01, atol=0.01)


def test_several_devices_split_it(mesh):
    """XLA splits its own products, and gathers the operands of a call."""
    a = jax.device_put(normal(0, (64, 64)), NamedSharding(mesh, PartitionSpec("d")))
    b = jax.device_put(normal(1, (64, 64)), NamedSharding(mesh, PartitionSpec()))
    f = jax.jit(lambda a, b: product("mk,nk->mn", jnp.bfloat16, a, b))
    text = str(f.lower(a, b).compile().as_text())
    assert TARGET not in text
    assert "all-gather" not in text
    alone = f(np.asarray(a), np.asarray(b))
    np.testing.assert_allclose(f(a, b), alone, rtol=1e-5, atol=1e-5)
    parts = jax.jit(
        jax.shard_map(
            lambda a, b: product("mk,nk->mn", jnp.bfloat16, a, b),
            mesh=mesh,
            in_specs=(PartitionSpec("d"), PartitionSpec()),
            out_specs=PartitionSpec("d"),
        )
    )
    assert TARGET in parts.lower(a, b).as_text()
    np.testing.assert_allclose(parts(a, b), alone, rtol=1e-5, atol=1e-5)
