"""Inside of `shard_map` each device calls kernels itself: values, gradients, and what JAX knows of who has what."""

from typing import Any

import jax
import numpy as np
import pytest

import eqxcallback as eqxc

from .layers import LANES, assert_close, normal, put, run, run_and_compare, squares, tanh, twice


SIZE = 3

lanes = pytest.mark.parametrize("lane", LANES[1:3], ids=str)
vma = pytest.mark.parametrize("check_vma", [True, False])


@pytest.fixture
def operands(grid):
    return normal(SIZE), put(normal(4, 4, SIZE), grid, "a")


def mapped(f, mesh, spec: Any = "a", out: Any = None, **options):
    """Over weight, which all devices have, and x, which is split."""
    spec = jax.P(spec) if isinstance(spec, str) else jax.P(*spec)
    return jax.shard_map(f, mesh=mesh, in_specs=(jax.P(), spec), out_specs=spec if out is None else out, **options)


@lanes
@vma
@pytest.mark.parametrize("spec", [("a",), ("a", "b"), (("a", "b"),)], ids=str)
def test_values_and_gradients(lane, grid, operands, check_vma, spec):
    function = lambda f: mapped(twice(f), grid, spec, check_vma=check_vma)
    ran = run_and_compare(function, lane, *operands)
    parts = 2 if spec == ("a",) else 4
    assert ran.calls in ({}, {("forward", (16 // parts, SIZE)): 4})
    ran = run_and_compare(lambda f: jax.grad(squares(function(f)), (0, 1)), lane, *operands)
    assert ran.gathers == 0


@lanes
@vma
@pytest.mark.parametrize("program", ["scan", "grad of scan", "remat", "jvp", "hessian", "psum", "grad of psum"])
def test_programs(lane, grid, operands, check_vma, program):
    def loop(f):
        return lambda w, x: jax.lax.scan(lambda c, _: (twice(f)(w, c), None), x, None, length=3)[0]

    def total(f):
        return lambda w, x: jax.lax.psum(squares(twice(f))(w, x), "a")

    def over(function, **options):
        return mapped(function, grid, check_vma=check_vma, **options)

    function = {
        "scan": lambda f: over(loop(f)),
        "grad of scan": lambda f: jax.grad(squares(over(loop(f))), (0, 1)),
        "remat": lambda f: jax.grad(squares(over(jax.checkpoint(twice(f)))), (0, 1)),
        "jvp": lambda f: lambda w, x: jax.jvp(over(twice(f)), (w, x), (w, x)),
        "hessian": lambda f: jax.hessian(squares(over(twice(f)))),
        "psum": lambda f: over(total(f), out=jax.P()),
        "grad of psum": lambda f: jax.grad(over(total(f), out=jax.P()), (0, 1)),
    }[program]
    run_and_compare(function, lane, *operands)


@lanes
@pytest.mark.parametrize("derivative", ["grad", "reverse-over-reverse", "hessian", "grad of psum", "jvp"])
def test_derivatives_taken_inside(lane, grid, operands, derivative):
    """The gradient of what all devices share is the sum over all of them, once."""
    out = jax.P(), jax.P("a")
    step, out = {
        "grad": (lambda f: jax.grad(squares(f), (0, 1)), out),
        "reverse-over-reverse": (lambda f: jax.grad(squares(jax.grad(squares(f), 1)), (0, 1)), out),
        "hessian": (lambda f: jax.hessian(squares(f)), jax.P()),
        "grad of psum": (lambda f: jax.grad(lambda w, x: jax.lax.psum(squares(f)(w, x), "a"), (0, 1)), out),
        # The direction is the same on all devices, and the result is not.
        "jvp": (lambda f: lambda w, x: jax.jvp(lambda w: f(w, x), (w,), (w,)), jax.P("a")),
    }[derivative]
    function = lambda f: mapped(step(twice(f)), grid, out=out)
    ran = run_and_compare(function, lane, *operands)
    want = jax.jit(function(lane.reference))(*operands)
    assert_close(ran.values, want)
    if derivative in ("grad", "grad of psum"):
        assert ran.sums == 1


@lanes
def test_who_has_what(lane, grid):
    """Results vary as the operands do, all of them: those that are the same everywhere may be declared so, others not."""
    weight, x = normal(SIZE), normal(4, 4, SIZE)
    same = lambda f: jax.shard_map(twice(f), mesh=grid, in_specs=(jax.P(), jax.P()), out_specs=jax.P())
    run_and_compare(same, lane, weight, x)
    gradients = lambda f: jax.shard_map(
        jax.grad(squares(twice(f)), (0, 1)), mesh=grid, in_specs=(jax.P(), jax.P()), out_specs=jax.P()
    )
    run_and_compare(gradients, lane, weight, x)
    for spec in ("a", ("a", "b")):
        with pytest.raises(ValueError, match="out_specs"):
            jax.jit(mapped(twice(lane.call), grid, spec, out=jax.P()))(weight, x)
    with pytest.raises(ValueError, match="out_specs"):
        jax.jit(mapped(jax.grad(squares(twice(lane.call)), 1), grid, out=jax.P()))(weight, x)
    # Weights that differ, with the same examples.
    other = lambda f: jax.shard_map(
        lambda w, x: jax.grad(squares(twice(f)), (0, 1))(w[0], x)[1],
        mesh=grid,
        in_specs=(jax.P("a"), jax.P()),
        out_specs=jax.P(),
    )
    args = normal(2, SIZE), x
    assert_close(run(other(lane.call), *args).values, jax.jit(other(lane.reference))(*args))


@lanes
@vma
def test_some_axes_of_the_mesh(lane, grid, check_vma):
    """The others are XLA's. What is split over them is gathered, which is a limit, and right."""
    weight, x = normal(SIZE), put(normal(4, 4, SIZE), grid, "a", "b")
    function = lambda f: mapped(twice(f), grid, axis_names={"a"}, check_vma=check_vma)
    ran = run_and_compare(function, lane, weight, x)
    assert ran.calls in ({}, {("forward", (8, SIZE)): 4})
    run_and_compare(lambda f: jax.grad(squares(function(f)), (0, 1)), lane, weight, x)
    inner = lambda f: (
        lambda w, x: jax.shard_map(
            twice(f),
            in_specs=(jax.P(), jax.P(None, "b")),
            out_specs=jax.P(None, "b"),
            axis_names={"b"},
            check_vma=check_vma,
        )(w, x)
    )
    nested = lambda f: mapped(inner(f), grid, axis_names={"a"}, check_vma=check_vma)
    assert run_and_compare(nested, lane, weight, x).gathers == 0


@lanes
@pytest.mark.filterwarnings("ignore:.with mesh.*:DeprecationWarning")
def test_some_axes_of_a_mesh_that_is_in_use(lane, grid):
    """`with mesh:` is an older way to say so, by which JAX finds a mesh whose axes are not all XLA's."""
    weight, x = normal(SIZE), put(normal(4, 4, SIZE), grid, "a", "b")
    function = lambda f: jax.value_and_grad(squares(mapped(twice(f), grid, axis_names={"a"})), (0, 1))
    want = jax.jit(function(lane.reference))(weight, x)
    with grid:
        got = run(function(lane.call), weight, x)
        assert run(twice(lane.call), weight, x).gathers == 0
    assert_close(got.values, want)
    with jax.set_mesh(grid):
        assert_close(run(function(lane.call), weight, x).values, want)


@lanes
def test_vmap_of_shard_map(lane, grid):
    weight, x = normal(SIZE), put(normal(2, 4, 2, SIZE), grid, None, "a")
    function = lambda f: jax.vmap(mapped(twice(f), grid), (None, 0))
    run_and_compare(function, lane, weight, x)
    run_and_compare(lambda f: jax.grad(squares(function(f)), (0, 1)), lane, weight, x)


@lanes
@vma
def test_without_jit(lane, grid, operands, check_vma):
    function = lambda f: mapped(twice(f), grid, check_vma=check_vma)
    weight, x = operands
    assert_close(function(lane.call)(*operands), twice(lane.reference)(weight, np.asarray(x)))
    want = jax.grad(squares(twice(lane.reference)))(weight, np.asarray(x))
    assert_close(jax.grad(squares(function(lane.call)))(*operands), want)


@lanes
def test_pmap(lane):
    weight, x = normal(SIZE), normal(4, 4, SIZE)
    rows = jax.vmap(lane.call, (None, 0))
    plain = jax.vmap(lane.reference, (None, 0))
    assert_close(jax.pmap(lambda x: rows(weight, x))(x), twice(lane.reference)(weight, x))
    loss = lambda f: jax.grad(lambda w, x: squares(f)(w, x))
    got = jax.pmap(lambda x: jax.lax.psum(loss(rows)(weight, x), "i"), axis_name="i")(x)
    assert_close(got[0], sum(loss(plain)(weight, part) for part in x), rtol=1e-4)


def test_a_callback_with_a_derivative_of_its_own(grid):
    """`buffer_callback` has none; the one around it is the user's, and sums over what is shared."""

    def forward(ctx, out, weight, x):
        out.write(np.tanh(np.asarray(x) * np.asarray(weight)))

    def backward(ctx, out, weight, x, y, cotangent):
        inner = (1 - np.asarray(y) ** 2) * np.asarray(cotangent)
        out[0].write((inner * np.asarray(x)).sum(0))
        out[1].write(inner * np.asarray(weight))

    @jax.custom_vjp
    def scale(weight, x):
        return eqxc.buffer_callback(forward, jax.ShapeDtypeStruct(x.shape, x.dtype))(weight, x)

    def residuals(weight, x):
        y = scale(weight, x)
        return y, (weight, x, y)

    def pullback(saved, cotangent):
        types = jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype), saved[:2])
        of_weight, of_x = eqxc.buffer_callback(backward, types)(*saved, cotangent)
        return jax.lax.psum(of_weight, "a"), of_x

    scale.defvjp(residuals, pullback)
    weight, x = normal(SIZE), put(normal(4, SIZE), grid, "a")
    inside = jax.shard_map(
        jax.grad(squares(scale), (0, 1)), mesh=grid, in_specs=(jax.P(), jax.P("a")), out_specs=(jax.P(), jax.P("a"))
    )
    want = jax.grad(squares(jax.vmap(tanh, (None, 0))), (0, 1))(weight, normal(4, SIZE))
    assert_close(run(inside, weight, x).values, want)
