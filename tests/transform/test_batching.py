"""Calls of a kernel under `vmap`: every mode, every axis, and vmaps of vmaps."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc

from .library import SAXPY


def make(batching, shared=False):
    """`x * w`. The kernel takes a `w` that lacks the outermost axes of `x`."""
    return eqxc.Op(
        "scale_rows",
        {"cpu": eqxc.NativeKernel("ScaleRows", SAXPY)},
        lambda x, w, *, shared: x * w,
        batching,
    ), {"shared": shared}


BATCHING = {
    "sequential": make("sequential", shared=True),
    "sequential_unrolled": make("sequential_unrolled", shared=True),
    "broadcast_all": make("broadcast_all"),
    "broadcast_all for each": make({"x": "broadcast_all", "w": "broadcast_all"}),
    "default of a mapping": make({"x": "broadcast_all"}, shared=True),
    "fold for one": make({"x": "broadcast_all", "w": "fold"}),
    "sequential for one": make({"x": "broadcast_all", "w": "sequential"}, shared=True),
    "reference": make("reference", shared=True),
    "reference for one": make({"x": "broadcast_all", "w": "reference"}, shared=True),
}
by_batching = pytest.mark.parametrize(("op", "options"), BATCHING.values(), ids=list(BATCHING))
SHAPE = (3,)


def values(*sizes):
    return np.arange(np.prod(sizes, dtype=int), dtype=np.float32).reshape(sizes) + 1


def along(x, axis):
    return x if axis is None else np.moveaxis(x, 0, axis)


@by_batching
@pytest.mark.parametrize(
    ("x_axis", "w_axis", "out_axis"),
    [(0, None, 0), (1, None, -1), (-2, 1, 1), (-1, 0, 0), (None, -1, -2), (0, -2, -1), (None, 0, 0)],
)
def test_every_axis(op, options, x_axis, w_axis, out_axis):
    x = along(values(2, *SHAPE), x_axis) if x_axis is not None else values(*SHAPE)
    w = along(values(2, *SHAPE), w_axis) if w_axis is not None else values(*SHAPE)

    def mapped(f):
        return jax.vmap(f, (x_axis, w_axis), out_axes=out_axis)(x, w)

    np.testing.assert_array_equal(mapped(lambda x, w: op(x, w, **options)), mapped(lambda x, w: x * w))


def check_levels(op, options, levels):
    """All axes have one size, so that one which is taken for another would fit."""
    x = values(*(3 for axes in levels if axes[0] == 0), *SHAPE)
    w = 1 / values(*(3 for axes in levels if axes[1] == 0), *SHAPE)

    def mapped(f):
        for axes in reversed(levels):
            f = jax.vmap(f, axes)
        return f(x, w)

    np.testing.assert_array_equal(mapped(lambda x, w: op(x, w, **options)), mapped(lambda x, w: x * w))


AXES = [(0, 0), (0, None), (None, 0)]


@by_batching
@pytest.mark.parametrize("levels", list(itertools.product(AXES, repeat=2)), ids=str)
def test_two_levels(op, options, levels):
    check_levels(op, options, levels)


@pytest.mark.parametrize("name", ["broadcast_all for each", "fold for one", "sequential for one", "reference for one"])
@pytest.mark.parametrize("levels", list(itertools.product(AXES, repeat=3)), ids=str)
def test_three_levels(name, levels):
    check_levels(*BATCHING[name], levels)


@by_batching
def test_axis_size_only(op, options):
    x, w = values(*SHAPE), values(*SHAPE)
    got = jax.vmap(lambda: op(x, w, **options), axis_size=4)()
    np.testing.assert_array_equal(got, np.stack([x * w] * 4))


@by_batching
def test_zero_examples(op, options):
    got = jax.vmap(lambda x, w: op(x, w, **options), (0, None))(np.zeros((0, 3), np.float32), values(3))
    assert got.shape == (0, 3)


@by_batching
def test_under_jit_and_in_control_flow(op, options):
    x, w = values(4, 3), values(3)

    def f(x, w):
        return jax.lax.scan(lambda c, _: (op(c, w, **options), None), x, length=2)[0]

    got = jax.jit(jax.vmap(f, (0, None)))(x, w)
    np.testing.assert_array_equal(got, x * w[None] ** 2)
    chosen = jax.vmap(lambda x, p: jax.lax.cond(p, lambda x: op(x, w, **options), lambda x: x, x))(x, x[:, 0] > 4)
    np.testing.assert_array_equal(chosen, np.where(x[:, :1] > 4, x * w[None], x))


@by_batching
def test_property_vmap_is_a_stack_of_calls(op, options):
    x, w = values(4, 3), values(4, 3)
    got = jax.vmap(lambda x, w: op(x, w, **options))(x, w)
    np.testing.assert_array_equal(got, np.stack([op(a, b, **options) for a, b in zip(x, w, strict=True)]))


def seen(f, *args):
    """The types of what each call of the kernel gets, and the number of loops."""
    text = jax.jit(f).lower(*args).as_text()
    lines = [line for line in text.splitlines() if "custom_call @eqxcallback_" in line]
    types = [
        line.split(" : (")[1].split(")")[0].replace("tensor<", "").replace("xf32>", "").split(", ") for line in lines
    ]
    return types, text.count("stablehlo.while")


@pytest.mark.parametrize(
    ("name", "axes", "want"),
    [
        ("sequential", (0, None), ([["3", "3"]], 1)),
        ("sequential_unrolled", (0, None), ([["3", "3"]] * 2, 0)),
        ("broadcast_all", (0, None), ([["2x3", "2x3"]], 0)),
        ("broadcast_all", (None, 0), ([["2x3", "2x3"]], 0)),
        ("broadcast_all for each", (0, None), ([["2x3", "2x3"]], 0)),
        ("fold for one", (0, None), ([["2x3", "3"]], 0)),
        ("fold for one", (0, 0), ([["2x3", "2x3"]], 0)),
        ("fold for one", (None, 0), ([["2x3", "2x3"]], 0)),
        ("sequential for one", (0, None), ([["2x3", "3"]], 0)),
        ("sequential for one", (0, 0), ([["3", "3"]], 1)),
        ("sequential for one", (None, 0), ([["3", "3"]], 1)),
        ("reference", (0, None), ([], 0)),
        ("reference for one", (0, None), ([["2x3", "3"]], 0)),
        ("reference for one", (0, 0), ([], 0)),
        ("reference for one", (None, 0), ([], 0)),
    ],
)
def test_what_the_kernel_sees(name, axes, want):
    op, options = BATCHING[name]
    x, w = (values(3) if axis is None else values(2, 3) for axis in axes)
    f = jax.vmap(lambda x, w: op(x, w, **options), axes)
    types, loops = seen(f, x, w)
    if name == "sequential_unrolled":  # one function, called twice
        types = types * (len(want[0]) // len(types))
    assert (types, loops) == want


def test_a_kernel_that_is_chosen_is_called_in_place_of_the_reference():
    op, options = BATCHING["reference for one"]
    chosen, x, w = op.using("native"), values(3), values(2, 3)
    assert seen(jax.vmap(lambda w: chosen(x, w, **options)), w) == ([["3", "3"]], 1)
    np.testing.assert_array_equal(jax.vmap(lambda w: chosen(x, w, **options))(w), x * w)


@pytest.mark.parametrize("method", ["reference", {"x": "broadcast_all", "w": "reference"}])
def test_what_a_platform_differentiates_is_mapped(method):
    """In place of the reference, where the platform has it: the kernel's own formula, in JAX."""
    kernel = eqxc.JaxKernel(lambda x, w: x * w + 1, differentiable=lambda x, w: x * w + 2)
    op = eqxc.Op("scale", {"cpu": kernel}, lambda x, w: x * w, method)
    x, w = values(3), values(2, 3)
    for f in (op, jax.jit(op)):
        np.testing.assert_array_equal(f(x, w[0]), x * w[0] + 1)
        np.testing.assert_array_equal(jax.vmap(f, (None, 0))(x, w), x * w + 2)
    exported = jax.export.export(jax.jit(jax.vmap(op, (None, 0))), platforms=("cpu", "tpu"))(x, w)
    np.testing.assert_array_equal(exported.call(x, w), x * w + 2)
    out, pull = jax.vjp(jax.vmap(op, (None, 0)), x, w)
    np.testing.assert_array_equal(out, x * w + 2)
    for got, want in zip(pull(out), (np.sum(np.asarray(out) * w, 0), np.asarray(out) * x), strict=True):
        np.testing.assert_allclose(got, want)


@pytest.mark.parametrize(
    ("outer", "inner", "want"),
    [
        ((0, None), (0, None), ["2x5x3", "3"]),
        ((0, None), (0, 0), ["2x5x3", "5x3"]),
        ((0, 0), (0, None), ["2x5x3", "2x5x3"]),  # the inner axis lies inside
        ((None, 0), (0, None), ["2x5x3", "2x5x3"]),
        ((0, None), (None, 0), ["2x5x3", "5x3"]),
    ],
)
def test_fold_for_one_in_nested_vmaps_has_the_innermost_axes(outer, inner, want):
    op, options = BATCHING["fold for one"]
    arguments = []
    for index in (0, 1):
        sizes = [size for size, axes in ((2, outer), (5, inner)) if axes[index] == 0]
        arguments.append(values(*sizes, 3))
    f = jax.vmap(jax.vmap(lambda x, w: op(x, w, **options), inner), outer)
    assert seen(f, *arguments) == ([want], 0)


def test_sequential_for_one_in_nested_vmaps_is_batched_where_it_can_be():
    """The outer vmap maps what is sequential: it calls for each example, with the inner vmap's batch."""
    op, options = BATCHING["sequential for one"]
    f = jax.vmap(jax.vmap(lambda x, w: op(x, w, **options), (0, None)), (0, 0))
    assert seen(f, values(2, 5, 3), values(2, 3)) == ([["5x3", "3"]], 1)


def test_arrays_of_one_argument_go_together():
    op = eqxc.Op(
        "scale_rows",
        {"cpu": eqxc.NativeKernel("SumAndDifference", SAXPY)},
        lambda pair: (pair[0] + pair[1], pair[0] - pair[1]),
        {"pair": "fold"},
    )
    for axes in ((0, None), (None, 0), (0, 0)):
        x, y = (values(3) if axis is None else values(2, 3) for axis in axes)
        got = jax.vmap(lambda x, y: op((x, y)), axes)(x, y)
        want = jax.vmap(lambda x, y: (x + y, x - y), axes)(x, y)
        np.testing.assert_array_equal(got, want)
        assert seen(jax.vmap(lambda x, y: op((x, y)), axes), x, y) == ([["2x3", "2x3"]], 0)


@pytest.mark.parametrize("batching", ["sequential", "broadcast_all", {"x": "fold", "y": "fold"}, {"x": "sequential"}])
@pytest.mark.parametrize("axes", [(0, 0), (0, None), (None, 0)])
def test_what_is_overwritten_is_always_batched(batching, axes):
    kernel = eqxc.NativeKernel("AddInPlace", SAXPY, aliases={"x": 0})
    op = eqxc.Op("add_in_place", {"cpu": kernel}, lambda x, y: x + y, batching)
    x, y = (values(3) if axis is None else values(2, 3) for axis in axes)
    if batching == {"x": "fold", "y": "fold"}:
        batching_of_y = eqxc.Op(
            "add_in_place", {"cpu": kernel}, lambda x, y: x + y, {"x": "fold", "y": "broadcast_all"}
        )
        op = batching_of_y  # the kernel takes a `y` of the shape of `x`
    got = jax.jit(jax.vmap(op, axes))(x, y)
    np.testing.assert_array_equal(got, jax.vmap(jnp.add, axes)(x, y))
    np.testing.assert_array_equal(x, values(*x.shape))
