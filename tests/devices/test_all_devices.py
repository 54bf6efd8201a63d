"""All eight devices, on two axes of a mesh that both split operands."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from .layers import LANES, ScaleBackward, assert_close, mesh_of, normal, put, run, spec_of, squares, twice


X, WEIGHT = normal(8, 4, 3), normal(3)


@pytest.fixture(params=[AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def mesh(request):
    return mesh_of(4, 2, kind=request.param)


@pytest.mark.parametrize("lane", LANES, ids=str)
def test_forward(lane, mesh):
    with jax.set_mesh(mesh):
        ran = run(twice(lane.call), WEIGHT, put(X, mesh, "a", "b"))
        assert spec_of(ran.values) == jax.P("a", "b")
    assert ran.gathers == ran.sums == 0
    assert_close(ran.values, twice(lane.reference)(WEIGHT, X))
    assert ran.calls in ({}, {("forward", (4, 3)): 8})  # kernels in C++ record none


@pytest.mark.parametrize("lane", LANES, ids=str)
def test_gradients(lane, mesh):
    gradient = jax.grad(squares(twice(lane.call)), (0, 1))
    with jax.set_mesh(mesh):
        ran = run(gradient, WEIGHT, put(X, mesh, "a", "b"))
    assert ran.gathers == 0
    assert_close(ran.values, jax.grad(squares(twice(lane.reference)), (0, 1))(WEIGHT, X), rtol=1e-4)
    if lane.name == "python-backward":
        assert ran.sums == 1
        assert ran.calls == {("backward", (4, 3)): 8, ("forward", (4, 3)): 8}


def test_a_training_step_in_shard_map():
    mesh = mesh_of(4, 2)
    layer = ScaleBackward(jnp.asarray(WEIGHT))

    def step(layer, x):
        gradient = jax.grad(lambda layer: squares(jax.vmap(jax.vmap(layer)))(x))(layer)
        return jax.tree.map(lambda w, g: w - 0.1 * g, layer, gradient)

    in_specs = (jax.P(), jax.P("a", "b"))
    mapped = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=in_specs, out_specs=jax.P()))
    got = mapped(layer, put(X, mesh, "a", "b"))
    want = jax.grad(lambda w: squares(lambda x: jnp.tanh(x * w[None, None]))(X))(WEIGHT)
    np.testing.assert_allclose(got.weight, WEIGHT - 0.1 * want, rtol=1e-4)
