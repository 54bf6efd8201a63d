"""JAX's functions for a GPU where no kernel of ours runs, here on the CPU: the functions, not what XLA makes of them there."""

import dataclasses
import importlib
import pkgutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc
from eqxcallback import ops
from eqxcallback.kernel import JaxKernel
from eqxcallback.ops.attention import _jax as attention_kernels
from eqxcallback.ops.loss import _jax as loss_kernels

from . import table
from .attention import options
from .families import ROWS
from .table import DTYPES, floating, normal, wide


F64 = np.dtype(np.float64)


def of_jax(kernels: Any) -> tuple[JaxKernel, ...]:
    return tuple(kernel for kernel in kernels.get("cuda", ()) if isinstance(kernel, JaxKernel))


# The module, and the name in it, of each op of a family that has some. What is called for an op of two families is theirs.
OPS = [
    (module, name, op)
    for info in pkgutil.walk_packages(ops.__path__, f"{ops.__name__}.")
    if "._quantized_linear_swiglu" not in info.name
    for module in [importlib.import_module(info.name)]
    for name, op in vars(module).items()
    if isinstance(op, eqxc.Op) and of_jax(op.kernels)
]
NAMES = {op.name for _, _, op in OPS}


def tuples(kernels: Any) -> Any:
    return {
        platform: declared if isinstance(declared, tuple) else (declared,)
        for platform, declared in (kernels or {}).items()
    }


@pytest.fixture(autouse=True)
def only_jax(monkeypatch):
    """The ops have these kernels alone, on the CPU."""
    for module, name, op in OPS:
        kernels, backward = of_jax(op.kernels), of_jax(tuples(op.backward))
        fields = {"kernels": {"cpu": kernels}, "backward": {"cpu": backward} if backward else None}
        monkeypatch.setattr(module, name, dataclasses.replace(op, **fields))
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture
def x64_for_f64(dtype):
    with jax.enable_x64(dtype == F64):
        yield


_ROUNDING = {F64: 2.0**-40, DTYPES[0]: 2.0**-19, DTYPES[1]: 2.0**-6, DTYPES[2]: 2.0**-9}


def is_near(got, want, dtype):
    """Weights of a softmax, and cotangents, are rounded to the dtype before they are multiplied."""
    for one, exact in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        kind = np.promote_types(one.dtype, np.float32)
        assert (one.dtype == F64) == (exact.dtype == F64)
        exact = np.asarray(exact, kind)
        rounding = max(_ROUNDING[np.dtype(dtype)], _ROUNDING[np.dtype(one.dtype)])
        scale = max(float(np.max(np.abs(exact), initial=0, where=np.isfinite(exact))), 1e-3)
        np.testing.assert_allclose(np.asarray(one, kind), exact, rtol=rounding, atol=rounding * scale)


def rows_with(*tags: str) -> list[Any]:
    """Return the rows of these ops. Rows for kernels in Python are theirs as well."""
    return [row for row in ROWS if row.tags & set(tags) and row.name.replace(" ", "-").split("-")[0] in NAMES]


def with_dtypes(rows: list[Any]) -> Any:
    """Rows for kernels in Python have all of `DTYPES`, and others f32. All but those of blocks have f64 too."""
    pairs = [
        (row, dtype)
        for row in rows
        for dtype in (*(DTYPES if "python" in row.tags else DTYPES[:1]), F64)
        if dtype != F64 or not row.name.startswith("quantized")
    ]
    return pytest.mark.parametrize(("row", "dtype"), pairs, ids=[f"{row}-{dtype}" for row, dtype in pairs])


def case_of(row, dtype):
    """Some rows make f32 alone. Their numbers in f64 are others than of f32, to which nothing may round them."""
    if dtype != F64:
        return row(dtype)
    case = row(DTYPES[0])
    args = (x.astype(F64) * (1 + 1e-9) if x.dtype == DTYPES[0] else x for x in case.args)
    return dataclasses.replace(case, args=tuple(args))


def runs(function, args):
    """It is a JAX function that runs."""
    lanes = [call.lane for call in eqxc.inspect(function, *args).calls]
    assert set(lanes) == {"jax"}, lanes


@pytest.mark.usefixtures("x64_for_f64")
@with_dtypes(rows_with("mapped", "python"))
def test_results(row, dtype):
    case = case_of(row, dtype)
    if all(np.size(arg) for arg in case.args):
        runs(case.op, case.args)
    want = table.quickly_compiled(case.reference)(*case.wide())
    # Not `case.op` itself: JAX would run the program that another test has made of it, or it ours.
    is_near(table.quickly_compiled(lambda *args: case.op(*args))(*case.args), want, dtype)


def loss_of(function):
    """With cotangents that do not depend on the results. What is not finite counts nothing."""

    def loss(*args):
        leaves = [leaf.astype(jnp.float32) for leaf in jax.tree.leaves(function(*args))]
        weights = [jnp.cos(jnp.arange(leaf.size, dtype=jnp.float32)).reshape(leaf.shape) for leaf in leaves]
        return sum(jnp.sum(jnp.where(jnp.isfinite(x), x * w, 0)) for x, w in zip(leaves, weights, strict=True))

    return loss


@pytest.mark.usefixtures("x64_for_f64")
@with_dtypes(rows_with("mapped", "derived", "python derived"))
def test_gradients(row, dtype):
    case = case_of(row, dtype)
    numbers = floating(case.args)
    gradients = jax.grad(loss_of(case.op), numbers)
    runs(gradients, case.args)
    want = table.quickly_compiled(jax.grad(loss_of(case.reference), numbers))(*case.wide())
    is_near(table.quickly_compiled(gradients)(*case.args), want, dtype)


@pytest.mark.usefixtures("x64_for_f64")
@with_dtypes(rows_with("derived"))
def test_other_derivatives(row, dtype):
    """Forward mode, and forward over reverse, alone and mapped. In 16 bits, a tangent is rounded as cotangents are."""
    case = case_of(row, dtype)
    numbers = floating(case.args)
    upstream = normal(9, case.want().shape, np.promote_types(dtype, np.float32))

    def of(function):
        def loss(*args):
            return jnp.sum(upstream * jnp.sin(function(*args).astype(upstream.dtype)))

        def both(*args):
            tangents = tuple(
                normal(i, x.shape, x.dtype) if i in numbers else np.zeros(x.shape, jax.dtypes.float0)
                for i, x in enumerate(args)
            )
            return jax.jvp(function, args, tangents)[1], jax.jvp(jax.grad(loss, numbers), args, tangents)[1]

        return lambda *args: (both(*args), jax.vmap(both)(*(jnp.stack([x, x]) for x in args)))

    got, want = (table.quickly_compiled(of(function))(*case.args) for function in (case.op, case.reference))
    is_near(got, want, dtype)


@pytest.mark.parametrize("row", rows_with("mapped"), ids=str)
def test_maps(row):
    """Maps of each operand, of all, and one in the other."""
    case = row(DTYPES[0])

    def stacked(x: Any, size: int) -> Any:
        return np.stack([np.roll(x, i, -1) if x.ndim and x.dtype in DTYPES else x for i in range(size)])

    count = len(case.args)
    every = [[i == j for j in range(count)] for i in range(count)] + [[True] * count]
    for mapped in every:
        args = [stacked(x, 3) if is_mapped else x for x, is_mapped in zip(case.args, mapped, strict=True)]
        axes = [0 if is_mapped else None for is_mapped in mapped]
        got, want = (table.quickly_compiled(jax.vmap(f, axes))(*args) for f in (case.op, case.reference))
        is_near(got, want, np.float32)
    first = [0 if i == 0 else None for i in range(count)]
    args = [stacked(stacked(case.args[0], 3), 2), *(stacked(x, 2) for x in case.args[1:])]
    got, want = (table.quickly_compiled(jax.vmap(jax.vmap(f, first)))(*args) for f in (case.op, case.reference))
    is_near(got, want, np.float32)


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (ops.attention_with_lse, [(0, 2, 4), (3, 2, 4), (3, 2, 4)]),
        (ops.attention_with_lse, [(3, 2, 4), (0, 2, 4), (0, 2, 4)]),
        (lambda x, weight: ops.linear_cross_entropy(x, weight, jnp.zeros(x.shape[0], int)), [(0, 4), (5, 4)]),
    ],
    ids=["no queries", "no keys", "no rows"],
)
def test_without_elements(function, shapes):
    args = [normal(i, shape) for i, shape in enumerate(shapes)]
    got, gradients = value_and_gradients(function, tuple(range(len(args))))(*args)
    for leaf in jax.tree.leaves((got, gradients)):
        assert not np.any(np.isfinite(leaf) & (np.asarray(leaf) != 0))
    assert [gradient.shape for gradient in gradients] == shapes


def value_and_gradients(function, numbers):
    return lambda *args: (function(*args), jax.grad(loss_of(function), numbers)(*args))


@pytest.mark.any_jax_version
@pytest.mark.parametrize(
    ("name", "dtype", "logits"),
    # These kernels take what those in Triton do not: tests/triton/test_options.py has all of them.
    [
        *((name, DTYPES[0], 1) for name in options.NAMES[::2]),
        ("all", DTYPES[0], 1),
        ("all", DTYPES[1], 1),
        ("all", DTYPES[1], 2**28),
        *((name, F64, logits) for name in ("causal window", "all") for logits in (1, 2**28)),
    ],
    ids=str,
)
@pytest.mark.usefixtures("x64_for_f64")
def test_every_option_of_attention(name, dtype, logits, monkeypatch):
    """With the log-sum-exp, and the gradients of all operands that have one."""
    queries, keys, heads = 130, 70, 4
    chosen = options.options(queries, keys, heads)[name]
    arrays = {key: value for key, value in chosen.items() if key in ("bias", "alibi_slopes")}
    static = {key: value for key, value in chosen.items() if key not in arrays}
    q, k, v = options.inputs(queries, keys, heads, 2, 16, dtype)
    monkeypatch.setattr(attention_kernels, "_LOGITS", logits)

    def attend(implementation):
        def f(q, k, v, arrays):
            return ops.attention_with_lse(q, k, v, **arrays, **static, implementation=implementation)

        return value_and_gradients(f, (0, 1, 2, 3))

    runs(attend("jax"), (q, k, v, arrays))
    got = table.quickly_compiled(attend("jax"))(q, k, v, arrays)
    is_near(got, table.quickly_compiled(attend("reference"))(*map(wide, (q, k, v)), arrays), dtype)


@pytest.mark.any_jax_version
@pytest.mark.parametrize(
    ("chosen", "dtype", "logits"),
    [
        ({}, DTYPES[0], 2**28),
        ({"label_smoothing": 0.1}, DTYPES[0], 18 * 70),
        ({"z_loss": 0.01}, DTYPES[0], 18 * 70),
        ({"ignore_index": 3}, DTYPES[0], 2**28),
        ({"soft_cap": 2.0}, DTYPES[0], 2**28),
        ({"label_smoothing": 0.2, "z_loss": 0.02, "ignore_index": 0, "soft_cap": 3.0}, DTYPES[1], 18 * 70),
        *(
            ({"label_smoothing": 0.2, "z_loss": 0.02, "ignore_index": 0, "soft_cap": 3.0}, F64, logits)
            for logits in (18 * 70, 2**28)
        ),
    ],
    ids=str,
)
@pytest.mark.usefixtures("x64_for_f64")
@pytest.mark.parametrize("given", [(), ("bias",), ("bias", "class_weights")], ids=str)
def test_every_option_of_the_linear_loss(given, chosen, dtype, logits, monkeypatch):
    x, weight, labels = normal(1, (2, 9, 8), dtype), normal(2, (300, 8), dtype), np.arange(18).reshape(2, 9) % 7 - 3
    labels[1, 2], x[0, 6] = 300, 3 * x[0, 6]  # no class; some logits are large
    if "ignore_index" in chosen:
        x[labels == chosen["ignore_index"]] = np.nan  # what is ignored is not read
    more = {"bias": normal(3, (300,)), "class_weights": np.abs(normal(4, (300,)))}
    more = {name: more[name] for name in given}
    monkeypatch.setattr(loss_kernels, "_LOGITS", logits)
    monkeypatch.setattr(loss_kernels, "_ROWS", 8)  # then there are chunks of rows, and a rest

    def loss(implementation):
        def f(x, weight, more):
            return ops.linear_cross_entropy(x, weight, labels, **more, **chosen, implementation=implementation)

        return value_and_gradients(f, (0, 1, 2))

    runs(loss("jax"), (x, weight, more))
    got = table.quickly_compiled(loss("jax"))(x, weight, more)
    is_near(got, table.quickly_compiled(loss("reference"))(wide(x), wide(weight), more), dtype)


@pytest.mark.parametrize("logits", [2**28, 5 * 70])
def test_special_logits_of_the_linear_loss(logits, monkeypatch):
    """Hidden classes, a whole chunk among them; rows that are hidden, are NaN, or have one inf; labels that are hidden."""
    monkeypatch.setattr(loss_kernels, "_LOGITS", logits)
    monkeypatch.setattr(loss_kernels, "_ROWS", 5)
    x, weight, bias = normal(1, (9, 3)), np.abs(normal(2, (300, 3))), normal(3, (300,))
    labels = np.arange(9) * 30
    bias[60:140] = -np.inf
    weight[200, 0] = -1.0
    x[5, 1], x[6], x[7, 0] = -np.inf, np.nan, -np.inf  # row 7 has inf at class 200 alone

    def loss(implementation, rows=slice(None)):
        def f(x, weight, bias):
            return ops.linear_cross_entropy(x, weight, labels[rows], bias=bias, implementation=implementation)

        return f

    got, want = (table.quickly_compiled(loss(which))(x, weight, bias) for which in ("jax", "reference"))
    assert np.isfinite(want).tolist() == [True] * 2 + [False] * 6 + [True]
    assert np.isposinf(want[2:5]).all()  # their labels are hidden
    np.testing.assert_allclose(got, want, rtol=1e-5)
    # Classes that are hidden have no gradient.
    args = x[:2], weight, bias
    gradients = (jax.grad(loss_of(loss(which, slice(2))), (0, 1, 2)) for which in ("jax", "reference"))
    got, want = (table.quickly_compiled(gradient)(*args) for gradient in gradients)
    assert not np.any(want[1][60:140])
    is_near(got, want, np.float32)


@pytest.mark.parametrize(
    ("count", "most", "length"),
    [
        (128_256, 32_768, 32_064),  # four of one size
        (151_936, 32_768, 18_992),  # a fifth is not a whole number, an eighth is
        (50_257, 32_768, 25_128),  # there is always a rest
        (50_257, 65_536, 50_257),
        (300, 3, 8),
        (0, 5, 1),
    ],
)
def test_lengths_of_chunks(count, most, length):
    assert loss_kernels._in_chunks(count, most) == length
