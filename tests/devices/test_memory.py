"""Results that overwrite an operand: on each device in its own part, in place where the operand was donated."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc

from ..transform.library import SAXPY
from .layers import mesh_of, normal, put, run, squares


class Accumulate(eqxc.Layer):
    """With a rule for its own dimension."""

    vmap_method = "fold"

    input_output_aliases = {"total": 0}  # noqa: RUF012
    sharding = "d, d -> d"

    def kernel(self, ctx, out, total, x):
        array = np.asarray(out)
        array += np.asarray(x)

    def reference(self, total, x):
        return total + x


def add(ctx, out, x, y):
    array = np.asarray(out)
    array += np.asarray(y)


def op_of(kernel):
    return eqxc.Op("add", {"cpu": kernel}, lambda x, y: x + y, vmap_method="fold", sharding="d, d -> d")


KERNELS = {
    "layer": Accumulate(),
    "native": op_of(eqxc.NativeKernel("AddInPlace", SAXPY, aliases={"x": 0})),
    "python": op_of(eqxc.PythonKernel(add, aliases={"x": 0})),
}


@pytest.fixture(params=KERNELS)
def kernel(request):
    return jax.vmap(jax.vmap(KERNELS[request.param]))


def made(x, mesh, *spec):
    """An array that is XLA's own: what lies in NumPy's memory cannot be donated."""
    return jax.jit(lambda x: x + 0, out_shardings=jax.NamedSharding(mesh, jax.P(*spec)))(x)


def addresses(array):
    """Sorted by device."""
    shards = sorted(array.addressable_shards, key=lambda shard: shard.device.id)
    return [shard.data.unsafe_buffer_pointer() for shard in shards]


X, Y = normal(4, 2, 16), normal(4, 2, 16) + 1


@pytest.mark.parametrize(
    "spec", [(), ("a",), ("a", "b"), (("a", "b"),), (None, "b"), (None, None, "a"), ("a", None, "b")], ids=str
)
def test_in_place_on_each_device(kernel, grid, spec):
    x, y = made(X, grid, *spec), put(Y, grid, *spec)
    before = addresses(x)
    result = jax.block_until_ready(jax.jit(kernel, donate_argnums=0)(x, y))
    np.testing.assert_allclose(result, X + Y, rtol=1e-6)
    assert addresses(result) == before
    assert x.is_deleted()


def test_what_is_not_donated_is_kept(kernel, grid):
    for spec in ((), ("a",), ("a", "b")):
        x, y = made(X, grid, *spec), put(Y, grid, *spec)
        result = jax.block_until_ready(jax.jit(kernel)(x, y))
        np.testing.assert_allclose(result, X + Y, rtol=1e-6)
        np.testing.assert_array_equal(x, X)
        assert not set(addresses(result)) & set(addresses(x))
        twice = jax.jit(lambda x, y: (kernel(x, y), kernel(x, 2 * y), x))(x, y)
        for got, want in zip(twice, (X + Y, X + 2 * Y, X), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-6)


def test_a_loop(kernel, grid):
    x = made(X, grid, "a", "b")
    loop = lambda x, y: jax.lax.fori_loop(0, 5, lambda _, c: kernel(c, y), x)
    np.testing.assert_allclose(jax.jit(loop, donate_argnums=0)(x, put(Y, grid, "a", "b")), X + 5 * Y, rtol=1e-5)


def test_a_shared_operand_that_is_overwritten(grid):
    """Each example has its own copy of it."""
    function = jax.vmap(KERNELS["layer"], (None, 0))
    np.testing.assert_allclose(run(function, X[0, 0], put(Y[:, 0], grid, "a")).values, X[0, :1] + Y[:, 0], rtol=1e-6)


def test_donated_and_gathered(grid):
    """A dimension that may not be split."""

    class Whole(Accumulate):
        sharding = None

    x, y = made(X, grid, "a", None, "b"), put(Y, grid, "a", None, "b")
    result = jax.jit(lambda x, y: jax.vmap(jax.vmap(Whole()))(x, y), donate_argnums=0)
    np.testing.assert_allclose(result(x, y), X + Y, rtol=1e-6)


def test_inside_shard_map(kernel):
    mesh = mesh_of(2, 2)
    x = made(X, mesh, "a", "b")
    before = addresses(x)
    specs = jax.P("a", "b")
    mapped = jax.shard_map(kernel, mesh=mesh, in_specs=specs, out_specs=specs)
    result = jax.block_until_ready(jax.jit(mapped, donate_argnums=0)(x, put(Y, mesh, "a", "b")))
    assert addresses(result) == before
    np.testing.assert_allclose(result, X + Y, rtol=1e-6)


def test_on_an_explicit_mesh(kernel, explicit):
    with jax.set_mesh(explicit):
        x = made(X, explicit, "a", "b")
        before = addresses(x)
        result = jax.block_until_ready(jax.jit(kernel, donate_argnums=0)(x, put(Y, explicit, "a", "b")))
        assert addresses(result) == before
        np.testing.assert_allclose(result, X + Y, rtol=1e-6)


def test_gradients(kernel, grid):
    """Gradients of an operand that is overwritten: the cotangent is that of a sum."""
    got = run(jax.grad(squares(kernel), (0, 1)), put(X, grid, "a", "b"), put(Y, grid, "a", "b"))
    assert got.gathers == got.sums == 0
    for gradient in got.values:
        np.testing.assert_allclose(gradient, 2 * (X + Y), rtol=1e-6)


def test_a_buffer_callback_inside_shard_map():
    mesh = mesh_of(4)
    x = made(X, mesh, "a")
    before = addresses(x)
    f = eqxc.buffer_callback(add, jax.ShapeDtypeStruct((1, 2, 16), jnp.float32), input_output_aliases={"x": 0})
    mapped = jax.shard_map(f, mesh=mesh, in_specs=jax.P("a"), out_specs=jax.P("a"))
    result = jax.block_until_ready(jax.jit(mapped, donate_argnums=0)(x, put(Y, mesh, "a")))
    assert addresses(result) == before
    np.testing.assert_allclose(result, X + Y, rtol=1e-6)
