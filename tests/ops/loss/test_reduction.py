"""The sum and the mean of the fused loss: the numbers of each loss, in three products and without all logits."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqxcallback import _ext, inspect, ops
from eqxcallback.ops.loss import _jax as kernels

from .. import table
from ..table import normal
from .test_loss import MEGABYTE, OPTIONS, derivatives, examples, plain


pytestmark = pytest.mark.any_jax_version

mean = functools.partial(ops.linear_cross_entropy, reduction="mean")
total = functools.partial(ops.linear_cross_entropy, reduction="sum")


@pytest.fixture(params=[None, 4], ids=["one chunk", "chunks"])
def chunked(request, monkeypatch, xlas_bf16):
    """Chunks of rows and of classes, each with a rest."""
    if request.param is not None:
        monkeypatch.setattr(kernels, "_ROWS_OF_CACHES", request.param)
        monkeypatch.setattr(kernels, "_CLASSES", request.param)


@pytest.mark.parametrize(("classes", "rows"), [(32_000, 1024), (131_072, 256), (50_257, 512)])
def test_chunks_of_rows_are_longer_with_tiles(classes, rows, monkeypatch):
    """Then reading the weight takes longer than multiplying: up to 64 MiB of gradients of logits, or as few rows as without."""
    for isa, expected in (("avx512_amx", rows), ("avx512_bf16", 256)):
        monkeypatch.setattr(_ext, "isas_of_bf16", lambda isa=isa: {"linear_rows": isa})
        assert kernels.CPU.rows(2048, classes, jnp.bfloat16) == expected
        assert kernels.CPU.rows(2048, classes, jnp.float32) == max(expected // 2, 256)


def value_and_gradients(loss, *args):
    def scalar(*args):
        return jnp.sum(loss(*args) * 1.5)  # a cotangent that is not 1

    return table.quickly_compiled(jax.value_and_grad(scalar, tuple(range(len(args)))))(*args)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("options", [*OPTIONS, {"soft_cap": 2.0}], ids=str)
def test_the_sum_of_all(options, dtype, chunked):
    """Also with rows that have no part in it, whatever they are, and labels that are no class."""
    x, weight, labels = examples((2, 5), size=11, dtype=dtype)
    more = {"bias": normal(3, (11,)), "class_weights": np.abs(normal(4, (11,)))}
    if "ignore_index" in options:
        labels[1, 2:4] = options["ignore_index"]
        x[1, 2:4] = np.nan
    for names in ((), ("bias",), ("bias", "class_weights")):
        given = {name: more[name] for name in names}

        def loss(reduction, x, weight, given):
            return ops.linear_cross_entropy(x, weight, labels, reduction=reduction, **options, **given)

        got, want = (value_and_gradients(functools.partial(loss, how), x, weight, given) for how in ("sum", "none"))
        for one, exact in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert one.dtype == exact.dtype
            one, exact = (np.asarray(leaf, np.float32) for leaf in (one, exact))
            rounding = 2.0**-20 if dtype == jnp.float32 or one.ndim < 2 else 2.0**-7
            np.testing.assert_allclose(one, exact, rtol=rounding, atol=rounding * np.abs(exact).max())


def test_labels_that_are_no_class(chunked):
    """The sum is NaN, and the gradients are those of the other rows."""
    x, weight, labels = examples((5,))
    labels[2] = 7
    value, gradients = value_and_gradients(lambda x, weight: total(x, weight, labels), x, weight)
    assert np.isnan(value)
    others = np.delete(x, 2, 0), np.delete(labels, 2)
    _, want = value_and_gradients(lambda x, weight: total(x, weight, others[1]), others[0], weight)
    np.testing.assert_array_equal(gradients[0][2], 0)
    np.testing.assert_allclose(np.delete(gradients[0], 2, 0), want[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(gradients[1], want[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_all_derivatives(reduction):
    """In both modes and of second order, where the value's own gradients are those of a kernel."""
    x, weight, labels = examples((6,), size=9)

    def of_formula(x, weight, labels):
        losses = plain(x, weight, labels, label_smoothing=0.1, soft_cap=3.0)
        return jnp.broadcast_to(getattr(jnp, reduction)(losses), labels.shape)  # once for each label

    def ours(x, weight, labels):
        loss = ops.linear_cross_entropy(x, weight, labels, label_smoothing=0.1, soft_cap=3.0, reduction=reduction)
        return jnp.broadcast_to(loss, labels.shape)

    got, want = (derivatives(f, labels)(x, weight) for f in (ours, of_formula))
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=2e-4, atol=2e-5), got, want)


def test_against_finite_differences(x64):
    x, weight, labels = examples((3,), 4, 300, np.float64)
    f = lambda x, weight: mean(x, weight, labels, soft_cap=2.0)
    _, gradients = value_and_gradients(f, x, weight)
    for i, arg in enumerate((x, weight)):
        direction = normal(5 + i, arg.shape, np.float64)
        ends = [f(*(a + s * direction if i == j else a for j, a in enumerate((x, weight)))) for s in (1e-5, -1e-5)]
        np.testing.assert_allclose((gradients[i] * direction).sum(), 1.5 * (ends[0] - ends[1]) / 2e-5, rtol=1e-7)


def test_what_a_mean_divides_by():
    """The labels that count, or their weights; where none counts, it is 0."""
    x, weight, labels = examples((6,))
    labels[2:4] = -100
    losses = ops.linear_cross_entropy(x, weight, labels, ignore_index=-100)
    np.testing.assert_allclose(mean(x, weight, labels, ignore_index=-100), losses.sum() / 4, rtol=1e-6)
    np.testing.assert_allclose(
        mean(x, weight, labels[:2].repeat(3)),
        np.mean(ops.linear_cross_entropy(x, weight, labels[:2].repeat(3))),
        rtol=1e-6,
    )
    weights = np.abs(normal(3, (7,)))
    more: Any = {"class_weights": weights, "ignore_index": -100}
    of_labels = weights[labels[labels != -100]].sum()
    losses = ops.linear_cross_entropy(x, weight, labels, **more)
    np.testing.assert_allclose(mean(x, weight, labels, **more), losses.sum() / of_labels, rtol=1e-6)
    none = np.full_like(labels, -100)
    value, gradients = value_and_gradients(lambda x, w: mean(x, w, none, ignore_index=-100), x, weight)
    for leaf in (value, *gradients):
        np.testing.assert_array_equal(leaf, 0)
    for rows in ((0,), (2, 0)):
        assert mean(np.zeros((*rows, 5), np.float32), weight, np.zeros(rows, np.int32)) == 0


def test_a_mean_is_that_of_pytorch():
    """By its formula, with weights, smoothing and an ignored label together."""
    x, weight, labels = examples((8,))
    labels, weights = labels % 7, np.abs(normal(3, (7,)))
    labels[3] = 2
    logs = np.asarray(jax.nn.log_softmax(x @ weight.T))
    counts = labels != 2
    of_label = -weights[labels] * np.take_along_axis(logs, labels[:, None], 1)[:, 0]
    of_all = -(weights * logs).sum(1) / 7
    want = ((0.9 * of_label + 0.1 * of_all) * counts).sum() / (weights[labels] * counts).sum()
    got = mean(x, weight, labels, class_weights=weights, label_smoothing=0.1, ignore_index=2)
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_one_row_and_eager_calls():
    x, weight, labels = examples((1,))
    loss = ops.linear_cross_entropy(x, weight, labels)[0]
    np.testing.assert_allclose(mean(x[0], weight, labels[0]), loss, rtol=1e-6)
    got = jax.grad(lambda w: mean(x, w, labels))(weight)
    np.testing.assert_allclose(got, jax.grad(lambda w: ops.linear_cross_entropy(x, w, labels)[0])(weight), rtol=1e-5)


@pytest.mark.parametrize("axes", [(0, None, 0), (None, 0, None), (0, 0, 0), (0, None, None), (None, None, 0)], ids=str)
def test_maps(axes, chunked):
    """Gradients of a map, and a map of gradients."""
    args = examples((5,))
    args = [np.stack([a, np.roll(a, 1, 0), a[::-1]]) if axis == 0 else a for a, axis in zip(args, axes, strict=True)]

    def of(f):
        def losses(x, weight, labels):
            return jax.vmap(lambda *one: jnp.sum(f(*one)), axes)(x, weight, labels)

        def weighted(x, weight):
            return jnp.vdot(losses(x, weight, args[2]), jnp.arange(1.0, 4.0))

        each = jax.vmap(jax.grad(lambda *one: jnp.sum(f(*one)), (0, 1)), axes)
        return lambda x, weight: (jax.value_and_grad(weighted, (0, 1))(x, weight), each(x, weight, args[2]))

    got, want = (table.quickly_compiled(of(f))(*args[:2]) for f in (total, ops.linear_cross_entropy))
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-5), got, want)


def test_loops_checkpoints_and_devices(mesh):
    x, weight, labels = examples((8, 5))
    f = lambda x, labels, weight: total(x, weight, labels)

    def in_loop(weight):
        return jax.lax.scan(lambda sum, part: (sum + f(*part, weight), None), 0.0, (x, labels))[0]

    def again(weight):
        return jax.checkpoint(f)(x, labels, weight)

    def on_devices(weight):
        spec = jax.sharding.PartitionSpec("d")
        on_each = jax.shard_map(
            lambda x, labels, weight: jax.lax.psum(f(x, labels, weight), "d"),
            mesh=mesh,
            in_specs=(spec, spec, jax.sharding.PartitionSpec()),
            out_specs=jax.sharding.PartitionSpec(),
        )
        return on_each(x, labels, weight)

    value, (want,) = value_and_gradients(lambda w: ops.linear_cross_entropy(x, w, labels), weight)
    for g in (in_loop, again, on_devices):
        got, (gradient,) = value_and_gradients(g, weight)
        np.testing.assert_allclose(got, value, rtol=1e-5)
        np.testing.assert_allclose(gradient, want, rtol=1e-5, atol=1e-5)


# Products and memory.


ROWS, CLASSES, FEATURES = 1024, 32_000, 64


def megabytes_of(function, dtype):
    types = (
        jax.ShapeDtypeStruct((ROWS, FEATURES), dtype),
        jax.ShapeDtypeStruct((CLASSES, FEATURES), dtype),
        jax.ShapeDtypeStruct((ROWS,), jnp.int32),
    )
    compiled: Any = jax.jit(function).lower(*types).compile()
    return compiled.memory_analysis().temp_size_in_bytes / MEGABYTE


@pytest.mark.compiled_code
@pytest.mark.usefixtures("xlas_bf16")
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_nothing_of_all_logits_is_in_memory(dtype):
    """They would be 125 MB. There are the logits of 256 rows, their gradients, and copies of a weight of 16 bits."""
    weight = CLASSES * FEATURES * 4 / MEGABYTE
    copies = 0 if dtype == jnp.float32 else 2 * weight
    assert megabytes_of(jax.value_and_grad(mean, (0, 1)), dtype) < 70 + copies
    # XLA removes what has no gradient.
    assert megabytes_of(mean, dtype) < 40 + copies
    assert megabytes_of(jax.grad(mean), dtype) < 70 + copies


@pytest.mark.compiled_code
def test_a_shared_weight_has_no_gradient_for_each_example():
    def of_each(x, weight, labels):
        x, labels = x.reshape(16, -1, FEATURES), labels.reshape(16, -1)
        return jax.vmap(mean, (0, None, 0))(x, weight, labels).mean()

    assert megabytes_of(jax.value_and_grad(of_each, (0, 1)), jnp.float32) < 20  # of each there would be 8


def test_its_kernel_runs():
    x, weight, labels = examples((5,))
    calls = inspect(jax.value_and_grad(mean, (0, 1)), x, weight, labels).calls
    assert {(call.op, call.lane) for call in calls} == {
        ("linear_cross_entropy", "jax"),
        ("softmax_cross_entropy", "native"),
    }
