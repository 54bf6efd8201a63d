"""Plain `jit` on split operands: each device calls the kernel for its own part, under every transformation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqxcallback import ops

from .layers import LANES, Lane, Scale, normal, put, run_and_compare, spec_of, squares, tanh, twice


SIZE = 3

# One of Python with all its kernels, and one of C++.
two_lanes = pytest.mark.parametrize("lane", LANES[1:3], ids=str)


@pytest.fixture
def weight():
    return normal(SIZE)


def only(ran, shape, per_device=1, backward=0):
    """Each device called the kernel on a part of this shape, so often."""
    want = {("forward", shape): 4 * per_device, ("backward", shape): 4 * backward}
    return ran.calls in ({}, {key: count for key, count in want.items() if count})


@pytest.mark.parametrize(
    ("spec", "shape"),
    [
        (("a",), (8, SIZE)),
        ((None, "b"), (8, SIZE)),
        (("a", "b"), (4, SIZE)),
        (("b", "a"), (4, SIZE)),
        ((("a", "b"),), (4, SIZE)),
        ((("b", "a"),), (4, SIZE)),
        ((None, ("a", "b")), (4, SIZE)),
        ((), (16, SIZE)),
    ],
    ids=str,
)
def test_forward(lane, grid, weight, spec, shape):
    ran = run_and_compare(twice, lane, weight, put(normal(4, 4, SIZE), grid, *spec))
    # The native kernel has all operands with all axes, and records nothing.
    assert only(ran, shape)
    assert ran.gathers == ran.sums == 0
    assert spec_of(ran.values) == jax.P(*spec)


@pytest.mark.parametrize("spec", [("a",), ("a", "b")], ids=str)
def test_gradients(lane, grid, weight, spec):
    x = put(normal(4, 4, SIZE), grid, *spec)
    shape = (16 // 2 ** len(spec), SIZE)
    ran = run_and_compare(lambda f: jax.grad(squares(twice(f)), (0, 1)), lane, weight, x)
    assert ran.gathers == 0
    # A backward kernel sums over all axes at once; XLA by itself sums over one mesh axis after the other.
    assert ran.sums == (1 if lane.name in ("package", "python-backward") else len(spec))
    assert only(ran, shape, backward=max(lane.per_gradient - 1, 0))
    assert spec_of(ran.values[0]) == jax.P()
    assert spec_of(ran.values[1]) == jax.P(*spec)
    of_x = run_and_compare(lambda f: jax.grad(squares(twice(f)), 1), lane, weight, x)
    assert of_x.gathers == of_x.sums == 0
    of_weight = run_and_compare(lambda f: jax.grad(squares(twice(f))), lane, weight, x)
    assert of_weight.gathers == 0


@pytest.mark.parametrize("name", ["layer_norm", "swiglu"])
def test_gradients_of_one_type_that_are_asked_for_one_by_one(grid, name):
    """Their calls differ in nothing but which of its results is read."""
    x = put(normal(4, 4, SIZE), grid, "a")
    others = [normal(SIZE), 2 * normal(SIZE)] if name == "layer_norm" else [put(2 * normal(4, 4, SIZE), grid, "a")]
    axes = (0, *(0 if other.ndim > 1 else None for other in others))

    def loss(f, *args):
        return (jax.vmap(jax.vmap(f, axes), axes)(*args) ** 2).sum()

    op = getattr(ops, name)
    one_by_one = lambda *args: [jax.grad(functools.partial(loss, op), i)(*args) for i in range(len(args))]
    plain = functools.partial(loss, functools.partial(op, implementation="reference"))
    want = jax.grad(plain, range(1 + len(others)))(x, *others)
    for got, expected in zip(jax.jit(one_by_one)(x, *others), want, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


def test_vmap_of_grad(lane, grid, weight):
    """The gradients of each example stay where the example is."""
    per_example = lambda f: jax.vmap(jax.grad(squares(jax.vmap(f, (None, 0))), (0, 1)), (None, 0))
    ran = run_and_compare(per_example, lane, weight, put(normal(4, 4, SIZE), grid, "a"))
    assert ran.gathers == ran.sums == 0
    assert [spec_of(value) for value in ran.values] == [jax.P("a"), jax.P("a")]


def test_an_ensemble(lane, grid):
    """Each weight, split as well, with its own examples."""
    step = lambda f: jax.vmap(jax.grad(squares(jax.vmap(f, (None, 0))), (0, 1)))
    ran = run_and_compare(step, lane, put(normal(4, SIZE), grid, "a"), put(normal(4, 6, SIZE), grid, "a"))
    # The package's kernel takes one weight, so it is called for each, and JAX gathers what is scanned over.
    assert ran.gathers == 0 or lane.name == "package"


@two_lanes
@pytest.mark.parametrize("arguments", [0, 1, (0, 1)])
def test_operands_that_have_one_axis_each(lane, grid, arguments):
    """Every weight with every x; weights are split by one axis of the mesh, examples by the other."""
    table = lambda f: jax.vmap(jax.vmap(f, (None, 0)), (0, None))
    weights, x = put(normal(4, SIZE), grid, "a"), put(normal(6, SIZE), grid, "b")
    ran = run_and_compare(table, lane, weights, x)
    assert only(ran, (6, SIZE))
    assert ran.gathers == ran.sums == 0
    assert spec_of(ran.values) == jax.P("a", "b")
    gradients = run_and_compare(lambda f: jax.grad(squares(table(f)), arguments), lane, weights, x)
    assert gradients.gathers == 0


@two_lanes
@pytest.mark.parametrize(
    "derivative",
    [
        lambda f: lambda w, x: jax.jvp(f, (w, x), (w, x)),
        lambda f: jax.hessian(squares(f)),
        lambda f: jax.jacfwd(squares(f)),
        lambda f: lambda w, x: jax.jvp(jax.grad(squares(f), 1), (w, x), (w, x)),
        lambda f: jax.grad(squares(jax.grad(squares(f), 1)), (0, 1)),
        lambda f: jax.value_and_grad(squares(f), (0, 1)),
        lambda f: lambda w, x: jax.linearize(f, w, x)[1](w, x),
    ],
    ids=["jvp", "hessian", "jacfwd", "forward-over-reverse", "reverse-over-reverse", "value_and_grad", "linearize"],
)
def test_derivatives(lane, grid, weight, derivative):
    x = put(normal(4, 4, SIZE), grid, "a", "b")
    ran = run_and_compare(lambda f: derivative(twice(f)), lane, weight, x)
    assert ran.gathers == 0


def loop(f, w, x):
    return jax.lax.scan(lambda c, _: (f(w, c), None), x, None, length=3)[0]


PROGRAMS = {
    "scan": lambda f: lambda w, x: loop(f, w, x),
    "grad of scan": lambda f: jax.grad(lambda w, x: loop(f, w, x).sum(), (0, 1)),
    "while": lambda f: lambda w, x: jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, f(w, c[1])), (0, x))[1],
    "fori with a traced bound": lambda f: lambda w, x: jax.lax.fori_loop(0, jnp.int32(3), lambda _, c: f(w, c), x),
    "remat": lambda f: jax.grad(jax.checkpoint(squares(f)), (0, 1)),
    "cond": lambda f: lambda w, x: jax.lax.cond(x.sum() > 1e3, f, lambda w, x: f(w, f(w, x)), w, x),
    "grad of cond": lambda f: jax.grad(
        lambda w, x: jax.lax.cond(x.sum() > 1e3, f, lambda w, x: f(w, f(w, x)), w, x).sum(), (0, 1)
    ),
    "jit in jit": lambda f: lambda w, x: jax.jit(f)(w, x) + jax.jit(f)(w, x),
}


@two_lanes
@pytest.mark.parametrize("program", PROGRAMS)
def test_control_flow(lane, grid, weight, program):
    x = put(normal(4, 4, SIZE), grid, "a", "b")
    ran = run_and_compare(lambda f: PROGRAMS[program](twice(f)), lane, weight, x)
    assert ran.gathers == 0
    if program in ("scan", "while", "fori with a traced bound"):
        assert only(ran, (4, SIZE), per_device=3)
        assert ran.sums == 0


@two_lanes
def test_scan_over_the_split_axis(lane, grid, weight):
    """JAX gathers what is scanned over; the rest stays split."""
    x = put(normal(4, 4, SIZE), grid, "a", "b")
    rows = lambda f: lambda w, x: jax.lax.scan(lambda c, row: (c + f(w, row[None]).sum(), f(w, row[None])[0]), 0.0, x)
    run_and_compare(lambda f: rows(twice(f)), lane, weight, x)


def test_a_batching_rule_of_its_own(grid, weight):
    """The calls that the rule makes are split."""

    class Twice(Scale):
        def batch(self, axis_size, in_axes, args):
            return jax.vmap(Scale(self.weight))(args[0]), 0

    lane = Lane("own", lambda w, x: Twice(w)(x), tanh)
    ran = run_and_compare(lambda f: jax.vmap(f, (None, 0)), lane, weight, put(normal(4, SIZE), grid, "a"))
    assert only(ran, (2, SIZE))
    assert ran.gathers == 0
    run_and_compare(
        lambda f: jax.grad(squares(twice(f)), (0, 1)), lane, weight, put(normal(4, 4, SIZE), grid, "a", "b")
    )
