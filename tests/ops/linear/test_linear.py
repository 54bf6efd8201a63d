"""Products and tables: kernels and formulas in f64."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqxcallback import _ext, ops
from eqxcallback.ops.linear import _reference as linear_reference
from eqxcallback.transform import product

from .. import table
from ..formulas import f64, near
from ..table import BATCHES, DTYPES, normal


pytestmark = pytest.mark.any_jax_version

NATIVE = table.with_options(ops.linear, implementation="native")


@pytest.mark.parametrize("batch", [(), (2,), (3, 7), (0,)])
@pytest.mark.parametrize(("in_features", "out_features"), [(1, 1), (64, 17), (37, 30), (0, 3), (65, 0)])
def test_linear(batch, in_features, out_features, isa):
    calls = []
    for dtype in DTYPES:
        x, weight = normal(1, (*batch, in_features), dtype), normal(2, (out_features, in_features), dtype, 0.1)
        for bias in ((), (normal(3, (out_features,)),)):
            calls.append(table.Call(NATIVE, linear_reference.linear, (x, weight, *bias), in_features))
    table.check_calls(calls)


@pytest.mark.parametrize("rows", [*range(1, 15), 32, 33])
def test_each_number_of_rows(rows, isa):
    """Tiles have 1 to 6 rows, and as many each as the others, or one more. More than 32 rows are a product of matrices."""
    operands = [(normal(1, (rows, 70), dtype), normal(2, (23, 70), dtype, 0.1)) for dtype in DTYPES]
    table.check_calls(table.Call(NATIVE, linear_reference.linear, args, 70) for args in operands)


@pytest.mark.parametrize("batch", [(), (6,)])
def test_linear_on_many_threads(batch, isa):
    operands = [
        (normal(1, (*batch, 1000), dtype), normal(2, (3001, 1000), dtype, 0.1), normal(3, (3001,))) for dtype in DTYPES
    ]
    table.check_calls(table.Call(NATIVE, linear_reference.linear, args, 1000) for args in operands)


def test_many_long_rows(isa):
    """Summed in stages, and the bias is added once."""
    operands = [
        (normal(1, (2, 50, 2100), dtype), normal(2, (70, 2100), dtype, 0.1), normal(3, (70,))) for dtype in DTYPES
    ]
    table.check_calls(table.Call(NATIVE, linear_reference.linear, args, 2100) for args in operands)


@pytest.mark.parametrize(
    ("rows", "dtype", "out_features", "calls"),
    [
        *[(1, DTYPES[1], 5, 1), (16, DTYPES[2], 5, 1), (17, DTYPES[1], 5, 0)],
        *[(1, DTYPES[0], 512, 0), (2, DTYPES[0], 512, 1), (16, DTYPES[0], 512, 1), (17, DTYPES[0], 512, 0)],
        (2, DTYPES[0], 5, 0),
        *[
            (rows, dtype, (1 << 19) // 33 // dtype.itemsize + more, calls)
            for rows, more, calls in [(32, 1, 1), (32, 0, 0), (33, 1, 0)]
            for dtype in DTYPES[:2]
        ],
    ],
)
@pytest.mark.usefixtures("xlas_bf16")
def test_few_rows_are_for_the_kernel(rows, dtype, out_features, calls):
    x, weight = normal(1, (rows, 33), dtype), normal(2, (out_features, 33), dtype)
    for f in (ops.linear, jax.vmap(ops.linear, (0, None))):
        assert jax.jit(f).lower(x, weight).as_text().count("custom_call @eqxcallback_linear") == calls


@pytest.mark.parametrize("batch", [(), (1,), (3,), (2, 33), (0,)])
@pytest.mark.parametrize(("in_features", "out_features"), [(1, 1), (64, 17), (37, 30), (0, 3), (65, 0)])
def test_int8_linear(batch, in_features, out_features, isa):
    weight: Any = np.random.default_rng(1).integers(-128, 128, (out_features, in_features), np.int8)
    scale = normal(2, (out_features,), scale=0.01)
    operands = [(normal(3, (*batch, in_features), dtype), weight, scale) for dtype in DTYPES]
    table.check_calls(table.Call(ops.int8_linear, linear_reference.int8_linear, args, in_features) for args in operands)


@pytest.mark.parametrize("batch", [(), (33,)])
def test_int8_linear_on_many_threads(batch, isa):
    weight: Any = np.random.default_rng(1).integers(-128, 128, (3001, 1000), np.int8)
    scale = normal(2, (3001,), scale=0.01)
    operands = [(normal(3, (*batch, 1000), dtype), weight, scale) for dtype in DTYPES]
    table.check_calls(table.Call(ops.int8_linear, linear_reference.int8_linear, args, 1000) for args in operands)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("bias", [None, jnp.float32, jnp.bfloat16])
def test_linear_is_its_formula(dtype, batch, bias):
    x, weight = normal(1, (*batch, 7), dtype), normal(2, (5, 7), dtype)
    added = None if bias is None else normal(3, (5,), bias)
    wide, matrix, vector = f64(x, weight, 0 if added is None else added)
    near(ops.linear(x, weight, added), wide @ matrix.T + vector, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("batch", "size", "out"), [((), 0, 3), ((2,), 3, 0), ((0,), 3, 2), ((), 0, 0)])
def test_linear_without_elements(batch, size, out, dtype):
    args = jnp.ones((*batch, size), dtype), jnp.ones((out, size), dtype), jnp.ones(out, dtype)
    got, gradients = jax.vjp(ops.linear, *args)
    np.testing.assert_array_equal(got, np.full((*batch, out), size + 1.0))
    for gradient, arg in zip(gradients(got), args, strict=True):
        assert (gradient.shape, gradient.dtype) == (arg.shape, arg.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [3, 17, 32])
def test_derivatives_of_linear(rows, dtype):
    """Derivatives of first and second order, of any of the operands."""
    x, weight, bias = normal(1, (rows, 7), dtype), normal(2, (5, 7), dtype), normal(3, (5,))

    def loss(product):
        return lambda *args: jnp.sum(jnp.sin(product(*args).astype(jnp.float32)))

    def plain(x, weight, bias):
        wide = jnp.matmul(x.astype(jnp.float32), weight.astype(jnp.float32).T)
        return (wide + jnp.broadcast_to(bias, wide.shape)).astype(x.dtype)

    def derivatives(product):
        gradient = jax.grad(loss(product), (0, 1, 2))
        tangents = tuple(jnp.ones_like(jnp.asarray(array)) for array in (x, weight, bias))
        return gradient(x, weight, bias), jax.jvp(gradient, (x, weight, bias), tangents)[1]

    got, want = jax.jit(lambda: [derivatives(product) for product in (ops.linear, plain)])()
    tolerance = 1e-5 if dtype == jnp.float32 else 8 * float(jnp.finfo(dtype).eps)
    for g, w in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        assert g.dtype == w.dtype
        g, w = f64(g, w)
        np.testing.assert_allclose(g, w, rtol=tolerance, atol=tolerance * np.max(np.abs(w)))


@pytest.mark.parametrize("batch", [(1,), (19,), (2, 16), (3, 2, 5), (0,)], ids=str)
@pytest.mark.parametrize("mapped", [None, 0])
def test_gradients_of_bf16(batch, mapped):
    """Any number of rows, of one weight and of an ensemble, each sum rounded once."""
    x, weight, bias = normal(1, (*batch, 6), jnp.bfloat16), normal(2, (5, 6), jnp.bfloat16), normal(3, (5,))
    cotangent = normal(4, (*batch, 5), jnp.bfloat16)

    def gradients(x, weight, bias):
        return jax.vjp(ops.linear, x, weight, bias)[1](jnp.asarray(cotangent))

    if mapped is None:
        got = jax.jit(gradients)(x, weight, bias)
    else:
        weights = jnp.stack([jnp.asarray(weight), jnp.zeros_like(weight)])
        got = (gradient[0] for gradient in jax.jit(jax.vmap(gradients, (None, 0, None)))(x, weights, bias))
    rows, matrix, vector = f64(x, weight, cotangent)
    flat = (rows.reshape(-1, 6), vector.reshape(-1, 5))
    wants = (vector @ matrix, flat[1].T @ flat[0], flat[1].sum(0))
    for gradient, want, dtype in zip(got, wants, (jnp.bfloat16, jnp.bfloat16, jnp.float32), strict=True):
        assert gradient.dtype == dtype
        near(gradient, want, dtype)


@pytest.mark.parametrize("index", [0, [[3, -1], [-4, 2]], [], [7, -9, 2**31 - 1]], ids=str)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8, jnp.complex64])
def test_embedding(index, dtype):
    table = jnp.asarray(np.arange(12).reshape(4, 3), dtype)
    index = jnp.asarray(index, jnp.int32)
    got = ops.embedding(index, table)
    assert got.dtype == dtype
    np.testing.assert_array_equal(got, table[index])


@pytest.mark.parametrize("dtype", DTYPES)
def test_derivatives_of_embedding(dtype):
    table, tangent = normal(1, (4, 3), dtype), normal(2, (4, 3), dtype)
    index = jnp.array([1, 3, 1, -3, 9])
    out, out_dot = jax.jvp(lambda table: ops.embedding(index, table), (table,), (tangent,))
    np.testing.assert_array_equal(out, table[np.array([1, 3, 1, 1, 3])])
    np.testing.assert_array_equal(out_dot, tangent[np.array([1, 3, 1, 1, 3])])
    gradient = jax.grad(lambda table: ops.embedding(index, table).astype(jnp.float32).sum())(table)
    # As in `jax.numpy`, the index that is out of range gives no gradient.
    np.testing.assert_array_equal(gradient.astype(jnp.float32), np.array([0, 3, 0, 1])[:, None] * np.ones(3))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("maps", [0, 1, 2])
@pytest.mark.parametrize("rows", [50, 1200])
def test_gradients_of_a_table(rows, dtype, maps):
    """Also of rows that are read often, as one index alone, and where an index is out of range; of more indices than rows too."""
    index = np.random.default_rng(0).integers(-60, 60, (3, 200))
    index[:, :20] += np.where(index[:, :20] < 0, -rows, rows)
    table, cotangents = normal(1, (rows, 8), dtype), normal(2, (3, 200, 8), dtype)
    read = ops.embedding
    for _ in range(maps):
        read = jax.vmap(read, (0, None))
    gradient = jax.jit(jax.grad(lambda table: jnp.vdot(read(index, table), cotangents, precision="highest")))(table)
    want = np.zeros((rows + 1, 8))
    np.add.at(want, np.where((index >= -rows) & (index < rows), index % rows, rows), f64(cotangents)[0])
    assert gradient.dtype == dtype
    near(gradient, want[:rows], dtype)


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_gradients_of_a_narrow_table_need_no_wide_one(dtype):
    table, index = normal(1, (1000, 8), dtype), jnp.arange(7)
    gradient = jax.grad(lambda table: ops.embedding(index, table).astype(jnp.float32).sum())
    text = jax.jit(gradient).lower(table).compile().as_text() or ""
    assert "[1000,8]" in text
    assert "f32[1000,8]" not in text


def test_an_ensemble_transposes_no_weights():
    """Mapped weights and one x: the product needs them as they are."""
    members = jax.vmap(ops.linear, (None, 0))
    x, weights = normal(1, (3, 5)), normal(2, (8, 6, 5))
    text = jax.jit(members).lower(x, weights).compile().as_text() or ""
    assert "f32[48,5]" in text  # all members are one matrix
    assert not [shape for shape in ("f32[5,48]", "f32[5,8,6]") if shape in text]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [2, 16, 64])
def test_an_ensemble_is_no_loop(rows, dtype):
    """Neither of kernels: XLA would copy the weights of each member. Its product is one, of all."""
    x, weights, bias = normal(1, (8, rows, 128), dtype), normal(2, (8, 160, 128), dtype, 0.1), normal(3, (8, 160))
    members = jax.vmap(ops.linear)
    loss = jax.grad(lambda *args: members(*args).astype(jnp.float32).sum(), (0, 1, 2))
    for function in (members, loss):
        assert "stablehlo.while" not in jax.jit(function).lower(x, weights, bias).as_text()
    near(members(x, weights, bias), np.einsum("eri,eoi->ero", *f64(x, weights)) + f64(bias)[0][:, None], dtype)
    index = jnp.arange(24).reshape(8, 3)
    tables = jax.vmap(ops.embedding)
    assert "stablehlo.while" not in jax.jit(tables).lower(index, weights).as_text()
    np.testing.assert_array_equal(tables(index, weights), jnp.take_along_axis(weights, index[..., None], 1))


SHARED, OWN = (None, 0), (0, 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("axes", "x_shape", "formula"),
    [
        ([SHARED], (3, 5), "si,eoi->eso"),
        ([SHARED], (2, 3, 5), "bsi,eoi->ebso"),
        ([OWN], (8, 3, 5), "esi,eoi->eso"),
        ([(0, None), SHARED], (2, 3, 5), "bsi,eoi->ebso"),
        ([SHARED, (0, None)], (2, 3, 5), "bsi,eoi->beso"),
        ([OWN, (0, None)], (2, 8, 3, 5), "besi,eoi->beso"),
    ],
    ids=str,
)
def test_maps_of_weights(axes, x_shape, formula, dtype):
    """In any order, the innermost first, with derivatives."""
    x, weights = normal(1, x_shape, dtype), normal(2, (8, 6, 5), dtype)
    function = ops.linear
    for in_axes in axes:
        function = jax.vmap(function, in_axes)
    out, pull = jax.vjp(function, x, weights)
    wide = f64(x, weights)
    near(out, np.einsum(formula, *wide), dtype)
    cotangent = jnp.cos(out)
    terms, want = formula.split("->")
    x_axes, weight_axes = terms.split(",")
    got_x, got_weights = pull(cotangent)
    (wide_cotangent,) = f64(cotangent)
    tolerance = 1e-5 if dtype == jnp.float32 else 8 * float(jnp.finfo(dtype).eps)
    for got, operands, result in (
        (got_x, (wide_cotangent, wide[1]), f"{want},{weight_axes}->{x_axes}"),
        (got_weights, (wide_cotangent, wide[0]), f"{want},{x_axes}->{weight_axes}"),
    ):
        assert got.dtype == dtype
        gradient = np.einsum(result, *operands)
        np.testing.assert_allclose(*f64(got, gradient), rtol=tolerance, atol=tolerance * np.max(np.abs(gradient)))


def products_of(dtype, platform):
    """The types of the operands of the products of a layer's gradients, many rows."""
    x, weight = jax.ShapeDtypeStruct((64, 32), dtype), jax.ShapeDtypeStruct((48, 32), dtype)
    loss = jax.grad(lambda x, weight: ops.linear(x, weight).astype(jnp.float32).sum(), (0, 1))
    text = jax.jit(loss).trace(x, weight).lower(lowering_platforms=(platform,)).as_text()
    lines = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    return {kind for line in lines for kind in re.findall(r"x([a-z]+\d+)>", line.split(" : ", 1)[1].split(" -> ")[0])}


@pytest.mark.parametrize(("isa", "widened"), [("another", True), ("best", False)])
def test_bf16_is_multiplied_in_f32_where_that_is_faster(isa, widened, monkeypatch):
    """As the machine has measured it, with operands that are rounded all the same; on a CPU alone, and no other dtype."""
    monkeypatch.setattr(_ext, "isa", lambda: "best")
    monkeypatch.setattr(_ext, "isas_of_bf16", lambda: {"linear_rows": isa})
    assert products_of(jnp.bfloat16, "cpu") == ({"f32"} if widened else {"bf16"})
    assert products_of(jnp.bfloat16, "cuda") == {"bf16"}
    assert products_of(jnp.float16, "cpu") == {"f16"}
    x, weight = (normal(i, shape, np.float32) for i, shape in enumerate([(64, 32), (48, 32)]))
    rows_times = functools.partial(product, "ri,oi->ro", jnp.bfloat16)
    rounded = [np.asarray(jnp.asarray(a, jnp.bfloat16), np.float64) for a in (x, weight)]
    for call in (rows_times, jax.jit(rows_times)):
        np.testing.assert_allclose(call(x, weight), rounded[0] @ rounded[1].T, rtol=1e-6, atol=1e-5)
