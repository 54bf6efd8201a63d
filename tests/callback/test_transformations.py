"""`buffer_callback` inside jit, scan, while, cond, checkpoint, vmap, and nested."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc

from .kernels import add, add_one, callback_like


METHODS = ["sequential", "sequential_unrolled", "expand_dims", "broadcast_all"]
F32 = jax.ShapeDtypeStruct((), jnp.float32)


def counted(callback=add_one):
    calls = []

    def wrapper(ctx, out, *args):
        calls.append(tuple(arg.shape for arg in args))
        callback(ctx, out, *args)

    return wrapper, calls


def test_pytrees_in_and_out():
    def callback(ctx, out, a, *, b):
        out["sum"].write(np.asarray(a["x"]) + np.asarray(b[0]))
        out["parts"][0].write(a["x"])
        assert a["none"] is None
        assert isinstance(out["parts"], tuple)

    x = jnp.arange(3.0)
    result = {"sum": jax.ShapeDtypeStruct((3,), jnp.float32), "parts": (jax.ShapeDtypeStruct((3,), jnp.float32), None)}
    f = eqxc.buffer_callback(callback, result)
    for g in (f, jax.jit(f)):
        out = g({"x": x, "none": None}, b=[x])
        np.testing.assert_array_equal(out["sum"], 2 * x)
        np.testing.assert_array_equal(out["parts"][0], x)
        assert out["parts"][1] is None


def test_no_arguments_and_no_results():
    calls = []
    f = eqxc.buffer_callback(lambda ctx, out: calls.append(out), (), has_side_effect=True)
    assert f() == ()
    assert jax.jit(f)() == ()
    jax.effects_barrier()
    assert calls == [(), ()]


@pytest.mark.parametrize("has_side_effect", [False, True])
def test_control_flow(has_side_effect):
    f = callback_like(add_one, F32, has_side_effect=has_side_effect)

    def scan(x):
        return jax.lax.scan(lambda c, _: (f(c), f(c)), x, length=3)

    def while_loop(x):
        return jax.lax.while_loop(lambda x: x < 10, f, x)

    def while_condition(x):
        return jax.lax.while_loop(lambda x: f(x) < 10, lambda x: x + 1, x)

    def cond(x):
        return jax.lax.cond(x > 0, f, lambda x: x - 1, x)

    def fori_of_cond(x):
        return jax.lax.fori_loop(0, 4, lambda i, x: jax.lax.cond(i % 2 == 0, f, lambda x: 2 * x, x), x)

    x = jnp.float32(1.0)
    for jit in (lambda f: f, jax.jit):
        carry, ys = jit(scan)(x)
        np.testing.assert_array_equal(carry, 4)
        np.testing.assert_array_equal(ys, [2, 3, 4])
        np.testing.assert_array_equal(jit(while_loop)(x), 10)
        np.testing.assert_array_equal(jit(while_condition)(x), 9)
        np.testing.assert_array_equal(jit(cond)(x), 2)
        np.testing.assert_array_equal(jit(cond)(-x), -2)
        np.testing.assert_array_equal(jit(fori_of_cond)(x), 10)


@pytest.mark.parametrize("method", METHODS)
def test_vmap(method):
    f = eqxc.buffer_callback(add, jax.ShapeDtypeStruct((3,), jnp.float32), vmap_method=method)
    x = jnp.arange(6.0).reshape(2, 3)
    y = jnp.arange(3.0)
    want = np.asarray(x) + np.asarray(y)[None]
    np.testing.assert_array_equal(jax.vmap(f, (0, None))(x, y), want)
    np.testing.assert_array_equal(jax.jit(jax.vmap(f, (None, 0)))(y, x), want)
    np.testing.assert_array_equal(jax.vmap(f, (1, 1), out_axes=1)(x.T, x.T), 2 * x.T)
    np.testing.assert_array_equal(jax.vmap(f, (-1, None), out_axes=-1)(x.T, y), want.T)


@pytest.mark.parametrize("method", METHODS)
def test_nested_vmap(method):
    f = eqxc.buffer_callback(add, jax.ShapeDtypeStruct((), jnp.float32), vmap_method=method)
    x, y = jnp.arange(3.0), 10 * jnp.arange(4.0)
    outer = jax.vmap(jax.vmap(f, (None, 0)), (0, None))
    np.testing.assert_array_equal(outer(x, y), np.add.outer(x, y))
    np.testing.assert_array_equal(jax.jit(outer)(x, y), np.add.outer(x, y))


@pytest.mark.parametrize(
    ("method", "shapes"),
    [
        ("sequential", [((3,), (3,))] * 2),
        ("sequential_unrolled", [((3,), (3,))] * 2),
        ("expand_dims", [((2, 3), (1, 3))]),
        ("broadcast_all", [((2, 3), (2, 3))]),
        ("legacy_vectorized", [((2, 3), (3,))]),
    ],
)
def test_what_the_callback_sees_under_vmap(method, shapes):
    callback, calls = counted(add)
    f = eqxc.buffer_callback(callback, jax.ShapeDtypeStruct((3,), jnp.float32), vmap_method=method)
    jax.vmap(f, (0, None))(jnp.ones((2, 3)), jnp.ones(3)).block_until_ready()
    assert calls == shapes


def test_vmap_of_control_flow_and_back():
    f = callback_like(add_one, F32, vmap_method="broadcast_all")
    x = jnp.arange(4.0)
    np.testing.assert_array_equal(
        jax.vmap(lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, length=2)[0])(x), np.asarray(x) + 2
    )
    np.testing.assert_array_equal(jax.lax.map(jax.vmap(f), x.reshape(2, 2)), np.asarray(x).reshape(2, 2) + 1)
    np.testing.assert_array_equal(jax.lax.map(f, x, batch_size=2), np.asarray(x) + 1)


def test_vmap_without_a_method():
    f = callback_like(add_one, F32)
    with pytest.raises(NotImplementedError, match=r"add_one was called under `jax.vmap`, but it has no vmap_method"):
        jax.vmap(f)(jnp.zeros(2))


def test_unknown_vmap_method():
    with pytest.raises(ValueError, match=r"expected vmap_method to be one of .* got 'bogus'"):
        callback_like(add_one, F32, vmap_method="bogus")


def test_derivatives_are_refused_with_the_remedy():
    f = callback_like(add_one, F32)
    with pytest.raises(ValueError, match=r"add_one has no JVP.*jax.custom_vjp"):
        jax.grad(f)(1.0)
    with pytest.raises(ValueError, match="add_one has no JVP"):
        jax.jvp(f, (1.0,), (1.0,))
    with pytest.raises(ValueError, match="add_one has no transpose"):
        jax.linear_transpose(f, 1.0)(1.0)


def test_custom_vjp_around_it():
    double = callback_like(
        lambda ctx, out, x: out.write(np.asarray(x) * np.float32(2)), F32, vmap_method="broadcast_all"
    )
    f = jax.custom_vjp(double)
    f.defvjp(lambda x: (double(x), None), lambda _, ct: (double(ct),))
    assert jax.grad(f)(3.0) == 2.0
    np.testing.assert_array_equal(jax.vmap(jax.grad(f))(jnp.arange(3.0)), [2, 2, 2])


@pytest.mark.parametrize("has_side_effect", [False, True])
def test_checkpoint(has_side_effect):
    """JAX refuses an effectful callback here: "Effects not supported"."""
    callback, calls = counted()
    primal = callback_like(callback, F32, has_side_effect=has_side_effect)

    @jax.custom_jvp
    def f(x):
        return primal(x)

    f.defjvp(lambda primals, tangents: (f(*primals), tangents[0]))

    def loss(x):
        return jnp.sin(f(x)) * 2.0

    grad = jax.grad(jax.checkpoint(loss))(1.0)
    np.testing.assert_allclose(grad, 2 * np.cos(2.0), rtol=1e-6)
    eager_calls = len(calls)
    # Without an effect the backward pass calls it again; what has an effect is not repeated but saved.
    assert eager_calls == (1 if has_side_effect else 2)
    np.testing.assert_allclose(jax.jit(jax.grad(jax.checkpoint(loss)))(1.0), grad, rtol=1e-6)
    assert len(calls) > eager_calls


def test_effectful_inside_checkpoint_of_scan():
    seen = []
    tap = eqxc.buffer_callback(lambda ctx, out, x: seen.append(float(np.asarray(x))), (), has_side_effect=True)

    @jax.checkpoint
    def body(carry, _):
        tap(jax.lax.stop_gradient(carry))
        return jnp.sin(carry), None

    def loss(x):
        return jax.lax.scan(body, x, length=3)[0]

    grad = jax.grad(loss)(1.0)
    jax.effects_barrier()
    assert len(set(seen)) == 3
    np.testing.assert_allclose(grad, jax.grad(lambda x: jnp.sin(jnp.sin(jnp.sin(x))))(1.0), rtol=1e-6)


# What an effect means. These four rows are the table in docs/callback.md.


def run_jitted(has_side_effect, make):
    callback, calls = counted()
    f = callback_like(callback, F32, has_side_effect=has_side_effect)
    jax.block_until_ready(jax.jit(lambda x: make(f, x))(jnp.float32(0)))
    jax.effects_barrier()
    return len(calls)


@pytest.mark.parametrize(("has_side_effect", "calls"), [(False, 0), (True, 1)])
def test_an_unused_call(has_side_effect, calls):
    assert run_jitted(has_side_effect, lambda f, x: (f(x), x)[1]) == calls


@pytest.mark.parametrize(("has_side_effect", "calls"), [(False, 1), (True, 2)])
def test_two_equal_calls(has_side_effect, calls):
    assert run_jitted(has_side_effect, lambda f, x: (f(x), f(x))) == calls


@pytest.mark.parametrize(("has_side_effect", "calls"), [(False, 1), (True, 3)])
def test_a_call_that_does_not_depend_on_the_loop(has_side_effect, calls):
    def make(f, x):
        return jax.lax.fori_loop(0, 3, lambda _, y: y + f(x), x)

    # Hoisting is XLA's right, not its duty: without an effect, at most once each iteration.
    got = run_jitted(has_side_effect, make)
    assert got == 3 if has_side_effect else calls <= got <= 3


@pytest.mark.parametrize(("has_side_effect", "calls"), [(False, 0), (True, 1)])
@pytest.mark.parametrize("jit", [False, True])
def test_a_call_whose_only_output_is_empty(has_side_effect, calls, jit):
    seen = []
    f = eqxc.buffer_callback(
        lambda ctx, out, x: seen.append(1), jax.ShapeDtypeStruct((0,), jnp.float32), has_side_effect=has_side_effect
    )
    jax.block_until_ready((jax.jit(f) if jit else f)(jnp.zeros(2)))
    jax.effects_barrier()
    assert len(seen) == calls


def test_nested_jits_and_disable_jit():
    f = callback_like(add_one, F32)
    assert jax.jit(lambda x: jax.jit(f)(x) + f(x))(1.0) == 4
    with jax.disable_jit():
        assert f(1.0) == 2
        assert jax.jit(f)(1.0) == 2
        assert jax.lax.scan(lambda c, _: (f(c), None), jnp.float32(0), length=3)[0] == 3


def test_numpy_and_python_arguments():
    f = callback_like(add_one, F32)
    assert f(np.float32(1)) == 2
    assert f(1.0) == 2


def test_inside_custom_partitioning(mesh):
    """JAX's own callback crashes the process here: its list of callbacks is lost on the way."""
    from jax.experimental.custom_partitioning import custom_partitioning

    shapes = []

    def callback(ctx, out, x):
        shapes.append(x.shape)
        np.add(x, np.float32(1), out=np.asarray(out))

    def local(x):
        return callback_like(callback, x)(x)

    op = custom_partitioning(local)
    op.def_partition(
        partition=lambda mesh, args, result: (mesh, local, result.sharding, (args[0].sharding,)),
        sharding_rule="b d -> b d",
    )
    x = jax.device_put(jnp.zeros((8, 5)), jax.NamedSharding(mesh, jax.P("d")))
    y = jax.jit(op)(x)
    np.testing.assert_array_equal(y, np.ones((8, 5)))
    assert shapes == [(2, 5)] * 4


def test_operands_that_vary_over_different_axes():
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    f = eqxc.buffer_callback(add, jax.ShapeDtypeStruct((2,), jnp.float32))
    specs = (jax.P("a"), jax.P("b"))
    mapped = jax.shard_map(lambda x, y: f(x, y)[None, None], mesh=mesh, in_specs=specs, out_specs=jax.P("a", "b"))
    x, y = jnp.arange(4.0), 10 * jnp.arange(4.0)
    want = np.asarray(x).reshape(2, 1, 2) + np.asarray(y).reshape(1, 2, 2)
    np.testing.assert_array_equal(jax.jit(mapped)(x, y), want)


@pytest.mark.parametrize("jit", [False, True])
def test_under_an_explicit_mesh(jit):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    f = callback_like(add_one, jax.ShapeDtypeStruct((8,), jnp.float32))
    with jax.set_mesh(mesh):
        np.testing.assert_array_equal((jax.jit(f) if jit else f)(jnp.zeros(8)), np.ones(8))


def test_varying_axes_are_kept_under_shard_map(mesh):
    f = callback_like(add_one, jax.ShapeDtypeStruct((2,), jnp.float32))
    x = jnp.arange(8.0)
    mapped = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=jax.P("d"), out_specs=jax.P("d")))
    np.testing.assert_array_equal(mapped(x), np.arange(8.0) + 1)
    with pytest.raises(ValueError, match="out_specs"):  # the results differ between devices
        jax.jit(jax.shard_map(f, mesh=mesh, in_specs=jax.P("d"), out_specs=jax.P()))(x)
