"""The losses and their options, against plain formulas, and what they keep in memory."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqxcallback import ops
from eqxcallback.ops.loss import _reference as reference

from .. import table
from ..formulas import f64
from ..table import DTYPES, normal


pytestmark = pytest.mark.any_jax_version

OPTIONS: list[dict[str, Any]] = [
    {},
    {"label_smoothing": 0.1},
    {"label_smoothing": 1.0},
    {"z_loss": 0.01},
    {"ignore_index": -1},
    {"label_smoothing": 0.2, "z_loss": 0.1, "ignore_index": 3},
]
by_options = pytest.mark.parametrize("options", OPTIONS, ids=str)


def formula(z, labels, label_smoothing=0.0, z_loss=0.0, ignore_index=None):
    """Compute the loss by the formula of its specification, with everything at once."""
    lse = jnp.log(jnp.exp(z).sum(-1))
    chosen = jnp.take_along_axis(z, labels[..., None] % z.shape[-1], -1)[..., 0]
    loss = (1 - label_smoothing) * (lse - chosen) + label_smoothing * (lse - z.mean(-1)) + z_loss * lse**2
    return loss if ignore_index is None else jnp.where(labels == ignore_index, 0.0, loss)


def logits_of(x, weight, bias=None, soft_cap=None):
    z = jnp.einsum("...i,ci->...c", x, weight, precision=jax.lax.Precision.HIGHEST)
    z = z if bias is None else z + jnp.broadcast_to(bias, z.shape)
    return z if soft_cap is None else soft_cap * jnp.tanh(z / soft_cap)


def examples(rows: tuple[int, ...] = (4,), features=5, size=7, dtype: Any = np.float32) -> Any:
    labels = np.random.default_rng(0).integers(-size, size, rows).astype(np.int32)
    labels.flat[:2] = -1, 3
    return normal(1, (*rows, features), dtype), normal(2, (size, features), dtype), labels


def of_logits(x, weight, labels, **options):
    return ops.softmax_cross_entropy(logits_of(x, weight), labels, **options)


def plain(x, weight, labels, *, bias=None, soft_cap=None, **options):
    return formula(logits_of(x, weight, bias, soft_cap), labels, **options)


def derivatives(f, labels):
    """The value, the gradient, the second derivative in reverse over reverse, and forward over reverse."""

    def scalar(x, weight):
        return jnp.sum(f(x, weight, labels) * jnp.arange(1.0, labels.size + 1).reshape(labels.shape).astype(x.dtype))

    gradient = jax.grad(scalar, (0, 1))

    def of(x, weight):
        tangents = (jnp.cos(x), jnp.sin(weight))
        square = lambda x, weight: sum(jnp.sum(jnp.sin(g)) for g in gradient(x, weight))
        return (
            f(x, weight, labels),
            gradient(x, weight),
            jax.grad(square, (0, 1))(x, weight),
            jax.jvp(gradient, (x, weight), tangents)[1],
            jax.jvp(scalar, (x, weight), tangents),
        )

    return table.quickly_compiled(of)


@by_options
@pytest.mark.parametrize("loss", [of_logits, ops.linear_cross_entropy], ids=["softmax", "linear"])
def test_values_and_derivatives(loss, options, x64):
    x, weight, labels = examples(dtype=np.float64)
    got, want = (derivatives(functools.partial(f, **options), labels)(x, weight) for f in (loss, plain))
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-10, atol=1e-10), got, want)


@pytest.mark.parametrize("size", [1, 521])  # one chunk; several, and a rest
def test_any_number_of_classes(size, x64):
    """With a bias and a soft cap, and axes of the user's own."""
    x, weight, labels = examples((2, 3), 4, size, np.float64)
    bias, cap = normal(3, (size,), np.float64), 1.5
    options = {"bias": bias, "soft_cap": cap, "label_smoothing": 0.1}
    got, want = (
        derivatives(functools.partial(f, **options), labels % size)(x, weight)
        for f in (ops.linear_cross_entropy, plain)
    )
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-9, atol=1e-9), got, want)


def test_against_finite_differences(x64):
    x, weight, labels = examples((3,), 4, 300, np.float64)
    loss = lambda x, w: ops.linear_cross_entropy(x, w, labels, soft_cap=2.0, z_loss=0.1).sum()
    f, gradients = table.quickly_compiled(loss), table.quickly_compiled(jax.grad(loss, (0, 1)))(x, weight)
    for i, arg in enumerate((x, weight)):
        direction = normal(5 + i, arg.shape, np.float64)
        step = 1e-5 * direction
        ends = [f(x + step, weight), f(x - step, weight)] if i == 0 else [f(x, weight + step), f(x, weight - step)]
        difference = (ends[0] - ends[1]) / 2e-5
        np.testing.assert_allclose((gradients[i] * direction).sum(), difference, rtol=1e-7)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_sixteen_bits(dtype):
    """The operands are rounded, and the loss is not."""
    x, weight, labels = examples((3,), 40, 300, dtype)
    f = lambda x, w: ops.linear_cross_entropy(x, w, labels, label_smoothing=0.1)
    loss, gradients = table.quickly_compiled(
        lambda x, w: (f(x, w), jax.grad(lambda *args: f(*args).sum(), (0, 1))(x, w))
    )(x, weight)
    assert (loss.dtype, *(g.dtype for g in gradients)) == (jnp.float32, dtype, dtype)
    exact = [np.asarray(array, np.float32) for array in (x, weight)]
    want, wanted = jax.value_and_grad(lambda x, w: plain(x, w, labels, label_smoothing=0.1).sum(), (0, 1))(*exact)
    np.testing.assert_allclose(loss.sum(), want, rtol=1e-5)
    for got, expected in zip(gradients, wanted, strict=True):
        # The gradients of logits are rounded to bf16 before they are multiplied.
        atol = 2.0**-9 * np.abs(expected).max() if dtype == jnp.bfloat16 else 1e-3
        np.testing.assert_allclose(got.astype(jnp.float32), expected, rtol=2.0**-7, atol=atol)


# What is special.


def both(logits, labels, **options):
    """Yield the values and the gradients of logits, for logits and for an identity times them."""
    z, eye = jnp.asarray(logits, jnp.float32), jnp.eye(np.shape(logits)[-1])
    labels = jnp.asarray(labels, jnp.int32)
    for f in (
        ops.softmax_cross_entropy,
        lambda z, labels, **options: ops.linear_cross_entropy(z, eye, labels, **options),
    ):
        yield f(z, labels, **options), jax.grad(lambda z: f(z, labels, **options).sum())(z)  # noqa: B023


def test_large_logits():
    for loss, gradient in both([[1e4, -1e4, 0], [1e30, -1e30, 0], [-1e4, -1e4, -1e4]], [1, 0, 2], label_smoothing=0.5):
        third = np.log(3)
        np.testing.assert_allclose(loss, [1.5e4, 5e29, third], rtol=1e-6, atol=1e-3)
        np.testing.assert_allclose(gradient[0], [1 - 0.5 / 3, -0.5 - 0.5 / 3, -0.5 / 3], atol=1e-6)


def test_logits_that_are_impossible():
    """-inf is not a class: a loss of it is infinite, and beside it nothing changes."""
    z = jnp.array([[0.0, -np.inf, 1.0], [0.0, -np.inf, 1.0]])
    loss = ops.softmax_cross_entropy(z, jnp.array([0, 1]), z_loss=0.1)
    np.testing.assert_allclose(loss[0], np.log(1 + np.e) + 0.1 * np.log(1 + np.e) ** 2, rtol=1e-6)
    assert loss[1] == np.inf
    gradient = jax.grad(lambda z: ops.softmax_cross_entropy(z, jnp.array([0, 0]), z_loss=0.1).sum())(z)
    assert np.isfinite(gradient).all()
    assert (gradient[:, 1] == 0).all()
    bias = jnp.array([0.0, -np.inf, 1.0])  # as a linear layer has it
    f = lambda x, b: ops.linear_cross_entropy(x, jnp.zeros((3, 2)), jnp.array([0, 1]), bias=b)
    np.testing.assert_allclose(f(jnp.ones((2, 2)), bias), [np.log(1 + np.e), np.inf], rtol=1e-6)
    assert np.isfinite(jax.grad(lambda x: f(x, bias)[0])(jnp.ones((2, 2)))).all()


def test_labels_that_are_out_of_range():
    for loss, _ in both(np.zeros((4, 3)), [3, -4, -3, 2]):
        np.testing.assert_array_equal(np.isnan(loss), [True, True, False, False])


def test_ignored_rows_have_no_gradient():
    """Also where their logits are not numbers, and where the label is not a class."""
    z = [[1.0, 2, 3], [np.nan, np.inf, -np.inf], [0, 0, 0]]
    (loss, gradient), _ = both(z, [0, -100, -100], ignore_index=-100, z_loss=0.1, label_smoothing=0.1)
    assert np.isfinite(loss).all()
    assert (np.asarray(loss[1:]) == 0).all()
    assert (np.asarray(gradient[1:]) == 0).all()
    assert (np.asarray(gradient[0]) != 0).all()
    _, weight, labels = examples()
    x = jnp.full((4, 5), jnp.nan)
    f = lambda x, w: ops.linear_cross_entropy(x, w, jnp.full_like(labels, -100), ignore_index=-100).sum()
    for leaf in jax.tree.leaves((f(x, weight), jax.grad(f, (0, 1))(x, weight))):
        assert (np.asarray(leaf) == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [2, 10, 257, 300, 1024])
def test_rows_in_columns(size, dtype):
    """They come transposed, which XLA makes part of a product wherever it finds one."""
    x, weight, labels = normal(1, (16, 4), dtype), normal(2, (size, 16), dtype), np.arange(4, dtype=np.int32) % size
    options: list[dict[str, Any]] = [{}, {"reduction": "mean"}]
    for more in options:
        of_rows = lambda x, more=more: ops.linear_cross_entropy(x, weight, labels, **more).sum()
        got = jax.jit(jax.value_and_grad(lambda x, f=of_rows: f(x.T)))(x)
        want = jax.value_and_grad(of_rows)(jnp.asarray(np.ascontiguousarray(x.T)))
        tolerance = 1e-5 if dtype == jnp.float32 else 2 * float(jnp.finfo(dtype).eps)
        np.testing.assert_allclose(got[0], want[0], rtol=tolerance)
        np.testing.assert_allclose(f64(got[1].T), f64(want[1]), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("rows", [(0,), (2, 0)])
def test_no_rows(rows):
    x, weight, labels = jnp.zeros((*rows, 5)), jnp.ones((7, 5)), jnp.zeros(rows, jnp.int32)
    for f in (of_logits, ops.linear_cross_entropy):
        assert f(x, weight, labels, label_smoothing=0.1).shape == rows
        gradient = jax.grad(lambda w: f(x, w, labels).sum())(weight)  # noqa: B023
        np.testing.assert_array_equal(gradient, jnp.zeros((7, 5)))


def test_no_classes():
    x, weight, labels = jnp.zeros((3, 5)), jnp.ones((0, 5)), jnp.zeros(3, jnp.int32)
    assert np.isnan(ops.linear_cross_entropy(x, weight, labels)).all()


# Memory.


TOKENS, CLASSES, FEATURES = 4096, 32_000, 64
MEGABYTE = 2**20


def loss_of_all(x, weight, labels):
    return ops.linear_cross_entropy(x, weight, labels).mean()


def loss_of_each(x, weight, labels):
    return jax.vmap(ops.linear_cross_entropy, (0, None, 0))(x, weight, labels).mean()


def second(x, weight, labels):
    """Reverse over reverse, which has a third of its memory for gradients."""
    gradient = jax.grad(loss_of_all, (0, 1))
    return jax.grad(lambda *args: sum(jnp.sum(jnp.sin(g)) for g in gradient(*args, labels)), (0, 1))(x, weight)


@pytest.mark.parametrize(
    ("f", "megabytes"),
    [
        (loss_of_all, 10),
        (loss_of_each, 10),
        (jax.value_and_grad(loss_of_all, (0, 1)), 12),
        (jax.value_and_grad(loss_of_each, (0, 1)), 12),
        (second, 70),
    ],
    ids=["value", "value of vmap", "gradient", "gradient of vmap", "second"],
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.usefixtures("xlas_bf16")  # else this machine may multiply bf16 in f32, and have operands so
def test_logits_are_never_in_memory(f, megabytes, dtype):
    """They would be 500 MB. Nor is a weight of 16 bits in f32, but for second derivatives; of itself there is one copy."""
    types = (
        jax.ShapeDtypeStruct((TOKENS, FEATURES), dtype),
        jax.ShapeDtypeStruct((CLASSES, FEATURES), dtype),
        jax.ShapeDtypeStruct((TOKENS,), jnp.int32),
    )
    program: Any = jax.jit(f).lower(*types).compile()
    copy = 0 if dtype == jnp.float32 else CLASSES * FEATURES * 2
    assert program.memory_analysis().temp_size_in_bytes < megabytes * MEGABYTE + copy
    text = program.as_text()
    if dtype != jnp.float32 and f is not second:
        assert f"f32[{CLASSES}," not in text
        assert f"f32[{CLASSES // 256},256" not in text
    assert f"{TOKENS},{CLASSES}" not in text
    assert f"{CLASSES},{TOKENS}" not in text


@pytest.mark.parametrize("varying", range(4))
def test_one_operand_differs_between_devices(varying, mesh):
    """Several chunks of classes: the sums vary over the axes of all operands from the first one on."""
    operands = (*examples((4,), size=700), normal(3, (700,)))
    some = jax.tree.map(lambda x: np.stack([x, x[::-1], 2 * x, x]), operands[varying])

    def loss(one):
        x, weight, labels, bias = (*operands[:varying], one, *operands[varying + 1 :])
        return ops.linear_cross_entropy(x, weight, labels % 700, bias=bias)

    spec = jax.sharding.PartitionSpec("d")
    on_each = jax.shard_map(lambda one: loss(one[0])[None], mesh=mesh, in_specs=spec, out_specs=spec)
    np.testing.assert_allclose(jax.jit(on_each)(some), [loss(one) for one in some], rtol=1e-5)


def test_a_batch_reads_the_weight_once():
    """Under `vmap` there is one loop, over the chunks of the weight, and no product of a single row."""
    x, weight, labels = examples((64,), 8, 1024)
    jaxpr = jax.make_jaxpr(jax.vmap(reference.linear_cross_entropy, (0, None, 0)))(x, weight, labels)
    scans = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan"]
    assert [scan.params["length"] for scan in scans] == [4]
    assert "f32[64,256]" in str(scans[0]) or "f32[256,64]" in str(scans[0])


@pytest.mark.parametrize("size", [4096, 5000])
def test_gradients_of_high_logits_are_as_near_as_those_of_plain_jax(size):
    """Logits are up to 400, where a rounding is seen in the softmax."""

    def plain(x, weight, labels):
        return -jnp.take_along_axis(jax.nn.log_softmax(logits_of(x, weight)), labels[:, None], 1).sum()

    def fused(x, weight, labels):
        return ops.linear_cross_entropy(x, weight, labels).sum()

    errors = {plain: [], fused: []}
    for seed in range(6):
        random = np.random.default_rng(seed)
        x, weight = 10 * random.standard_normal((32, 64)), random.standard_normal((size, 64))
        x, weight = x.astype(np.float32), weight.astype(np.float32)
        labels = random.integers(0, size, 32)
        logits = x.astype(np.float64) @ weight.T.astype(np.float64)
        of_logits = np.exp(logits - logits.max(-1, keepdims=True))
        of_logits /= of_logits.sum(-1, keepdims=True)
        of_logits[np.arange(32), labels] -= 1
        exact = of_logits @ weight
        for function, seen in errors.items():
            seen.append(
                np.linalg.norm(np.asarray(gradient_at(function)(x, weight, labels)) - exact) / np.linalg.norm(exact)
            )
    assert np.mean(errors[fused]) < 1.2 * np.mean(errors[plain])


@functools.cache
def gradient_at(function):
    return jax.jit(jax.grad(function))
