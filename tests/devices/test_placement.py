"""Places of operands: split unevenly, in ways that no kernel can be, on one device of several, some here and some there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

import eqxcallback as eqxc

from .layers import LANES, Scale, mesh_of, normal, put, run, run_and_compare, spec_of, squares, twice


SIZE = 4

lanes = pytest.mark.parametrize("lane", LANES[1:3], ids=str)


def both(f):
    """The results, and the gradients of weight and x."""
    return lambda weight, x: (twice(f)(weight, x), jax.grad(squares(twice(f)), (0, 1))(weight, x))


def shapes(ran):
    return {shape for _, shape in ran.calls}


@lanes
def test_a_dimension_of_the_kernel(lane, grid):
    """It is gathered: only axes of `vmap` may be split. Those that are split beside it stay so."""
    ran = run_and_compare(both, lane, normal(SIZE), put(normal(4, 2, SIZE), grid, "a", None, "b"))
    assert shapes(ran) <= {(4, SIZE)}
    run_and_compare(both, lane, put(normal(SIZE), grid, "b"), put(normal(4, 2, SIZE), grid, "a"))
    run_and_compare(both, lane, put(normal(SIZE), grid, ("a", "b")), normal(4, 2, SIZE))


@lanes
@pytest.mark.parametrize("size", [1, 2, 3, 5, 6])
def test_sizes_that_the_mesh_does_not_divide(lane, size):
    """A constraint inside of the program splits unevenly: XLA pads the array, and kernels never see padding."""
    mesh = mesh_of(4)
    split = lambda x: jax.lax.with_sharding_constraint(x, jax.NamedSharding(mesh, jax.P("a")))

    # JAX itself has no name for uneven shards of arguments and results.
    everywhere = {"in_shardings": jax.NamedSharding(mesh, jax.P()), "out_shardings": jax.NamedSharding(mesh, jax.P())}
    padded = lambda f: lambda weight, x: both(f)(weight, split(x))
    run_and_compare(padded, lane, put(normal(SIZE), mesh), normal(size, 3, SIZE), **everywhere)


@lanes
@pytest.mark.parametrize("size", [0, 1])
def test_small_batches(lane, grid, size):
    """A batch that is smaller than the mesh, or nothing at all."""
    spec = ("a",) if size == 0 else ()
    run_and_compare(both, lane, normal(SIZE), put(normal(size, 2, SIZE), grid, *spec))
    run_and_compare(both, lane, normal(SIZE), put(normal(2, size, SIZE), grid, "a"))


@lanes
def test_a_mesh_with_an_axis_of_one(lane):
    mesh = mesh_of(1, 4)
    ran = run_and_compare(both, lane, normal(SIZE), put(normal(4, 4, SIZE), mesh, "a", "b"))
    assert ran.gathers == 0


@lanes
def test_one_device_of_many(lane):
    """Its own mesh, or no mesh: one call, there."""
    device = jax.devices()[3]
    mesh = mesh_of(1, devices=[device])
    for x in (put(normal(4, 2, SIZE), mesh, "a"), jax.device_put(normal(4, 2, SIZE), device)):
        ran = run_and_compare(both, lane, normal(SIZE), x)
        assert ran.gathers == ran.sums == 0
        assert sum(ran.calls.values()) in (0, 3)  # forward is called for the results, and for the gradients
        assert jax.tree.leaves(ran.values)[0].devices() == {device}


@lanes
def test_some_devices_of_many(lane):
    """Two programs of one text, on disjoint devices, and in another order of them."""
    devices = np.array(jax.devices()[:4])
    for chosen in (devices[:2], devices[2:], devices[[3, 1]], devices[[2, 0, 3, 1]]):
        mesh = Mesh(chosen, ("a",), axis_types=(AxisType.Auto,))
        ran = run_and_compare(both, lane, normal(SIZE), put(normal(4, 2, SIZE), mesh, "a"))
        assert ran.gathers == 0
        assert jax.tree.leaves(ran.values)[0].devices() == set(chosen)


@lanes
def test_operands_here_and_there(lane, grid):
    """Split ones with others that are whole, of NumPy, on no device yet, or constants of the program."""
    x = put(normal(4, 2, SIZE), grid, "a")
    for weight in (normal(SIZE), jnp.asarray(normal(SIZE)), put(normal(SIZE), grid)):
        assert run_and_compare(both, lane, weight, x).gathers == 0
        ran = run_and_compare(lambda f, weight=weight: lambda x: both(f)(weight, x), lane, x)
        assert ran.gathers == 0
    run_and_compare(lambda f: lambda weight: both(f)(weight, x), lane, normal(SIZE))  # nothing is split but a constant


@lanes
def test_operands_that_are_split_differently(lane, grid):
    """One axis of `vmap`, by one axis of the mesh here and the other there; and two axes by the same one."""
    table = lambda f: jax.vmap(jax.vmap(f, (None, 0)), (0, None))
    run_and_compare(jax.vmap, lane, put(normal(4, SIZE), grid, "b"), put(normal(4, SIZE), grid, "a"))
    run_and_compare(jax.vmap, lane, put(normal(4, SIZE), grid, ("a", "b")), put(normal(4, SIZE), grid, "a"))
    same = put(normal(4, SIZE), grid, "a"), put(normal(6, SIZE), grid, "a")
    run_and_compare(table, lane, *same)
    run_and_compare(lambda f: jax.grad(squares(table(f)), (0, 1)), lane, *same)


@lanes
def test_results_decide_where_operands_do_not(lane, grid):
    split = lambda x: jax.lax.with_sharding_constraint(x, jax.NamedSharding(grid, jax.P("a", "b")))
    ran = run_and_compare(lambda f: lambda w, x: split(twice(f)(w, x)), lane, normal(SIZE), normal(4, 4, SIZE))
    assert shapes(ran) <= {(4, SIZE)}
    assert spec_of(ran.values) == jax.P("a", "b")


@lanes
@pytest.mark.parametrize(
    ("shape", "spec"),
    [((8, SIZE), ("a",)), ((8, SIZE), (("a", "b"),)), ((2, 8, SIZE), ("b", "a")), ((16, SIZE), ("a",))],
    ids=str,
)
def test_axes_that_are_reshaped(lane, shape, spec):
    """A split batch becomes microbatches: then XLA splits by a part of an axis of the mesh."""
    mesh = mesh_of(4) if spec == ("a",) else mesh_of(2, 2)
    x = put(normal(*shape), mesh, *spec)
    ran = run_and_compare(lambda f: lambda w, x: both(f)(w, x.reshape(2, -1, SIZE)), lane, normal(SIZE), x)
    assert shapes(ran) <= {(x.size // SIZE // 4, SIZE)}
    run_and_compare(lambda f: lambda w, x: both(f)(w, x.reshape(4, -1, SIZE)), lane, normal(SIZE), x)


@lanes
def test_microbatches(lane):
    def loss(f):
        def of_all(weight, x):
            step = lambda total, part: (total + squares(jax.vmap(f, (None, 0)))(weight, part), None)
            return jax.lax.scan(step, jnp.float32(0), x.reshape(2, 4, SIZE))[0]

        return jax.value_and_grad(of_all, (0, 1))

    run_and_compare(loss, lane, normal(SIZE), put(normal(8, SIZE), mesh_of(4), "a"))
    mapped = lambda f: lambda w, x: jax.lax.map(lambda x: f(w, x), x, batch_size=4)
    run_and_compare(mapped, lane, normal(SIZE), put(normal(8, SIZE), mesh_of(4), "a"))


def test_numbers(grid):
    """A kernel of numbers alone: the axes of `vmap` are all that can be split."""
    ran = run(jax.vmap(lambda x: Scale(jnp.float32(2))(x)), put(normal(4), grid, "a"))
    assert ran.calls == {("forward", (2,)): 4}
    np.testing.assert_allclose(ran.values, np.tanh(2 * normal(4)), rtol=1e-6)


def test_double_precision(grid, x64):
    weight, x = normal(SIZE).astype(np.float64), put(normal(4, 2, SIZE).astype(np.float64), grid, "a")
    ran = run_and_compare(both, LANES[1], weight, x)
    assert jax.tree.leaves(ran.values)[0].dtype == np.float64
    assert ran.gathers == 0


def test_keys(grid):
    """A typed key is two words for a kernel; its axes are split like others."""

    class Words(eqxc.Layer):
        vmap_method = "fold"

        def kernel(self, ctx, out, key, x):
            words = np.asarray(key)
            out.write(np.asarray(x) + (words[..., 1:] >> 8).astype(np.float32))

        def reference(self, key, x):
            return x + (jax.random.key_data(key)[1:] >> 8).astype(jnp.float32)

    layer, keys = Words(), jax.random.split(jax.random.key(0), 4)
    x = put(normal(4, SIZE), grid, "a")
    want = jax.vmap(layer.reference)(keys, normal(4, SIZE))
    for place in (keys, jax.device_put(keys, jax.NamedSharding(grid, jax.P("a")))):
        np.testing.assert_allclose(run(jax.vmap(layer), place, x).values, want, rtol=1e-6)
