"""Libraries around Equinox that run a model inside of transformations of their own: a fused model gives them the numbers of the
plain one.
"""

import functools
from typing import Any

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import lineax
import numpy as np
import optax
import optimistix
import pytest

import eqxcallback as eqxc


Y0 = jnp.array([0.3, -0.2, 0.5, 0.1])
SEVERAL = jnp.stack([Y0, 2 * Y0, -Y0])


class Field(eqx.Module):
    """A vector field, with a kernel's layer between layers of XLA's."""

    first: eqx.nn.Linear
    norm: eqx.nn.LayerNorm
    last: eqx.nn.Linear

    def __init__(self, key):
        first, last = jax.random.split(key)
        self.first, self.norm = eqx.nn.Linear(4, 32, key=first), eqx.nn.LayerNorm(32)
        self.last = eqx.nn.Linear(32, 4, key=last)

    def __call__(self, y):
        return jnp.tanh(self.last(jax.nn.gelu(self.norm(self.first(y)))))


PLAIN = Field(jax.random.key(0))
FUSED = eqxc.fuse(PLAIN).model


def test_the_norm_is_a_kernel():
    assert "external call" in str(eqxc.inspect(FUSED, Y0))


def same(function, rtol=1e-3, atol=1e-4):
    """`function` of a model, a tree of arrays."""
    got, want = (jax.tree.leaves(eqx.filter(function(model), eqx.is_array)) for model in (FUSED, PLAIN))
    assert len(got) == len(want) > 0
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)


def gradient(loss):
    """The loss and its gradient with respect to the model."""
    return eqx.filter_jit(eqx.filter_value_and_grad(loss))


def solve(model, y0, solver, **options) -> Any:
    term = diffrax.ODETerm(lambda t, y, model: model(y))
    return diffrax.diffeqsolve(term, solver, 0.0, 1.0, 0.1, y0, args=model, max_steps=32, **options).ys


IMPLICIT = diffrax.Kvaerno3(root_finder=diffrax.VeryChord(rtol=1e-5, atol=1e-6))


@pytest.mark.parametrize(
    ("solver", "adjoint"),
    [
        (diffrax.Tsit5(), diffrax.RecursiveCheckpointAdjoint()),
        (diffrax.Tsit5(), diffrax.BacksolveAdjoint()),
        (diffrax.ReversibleHeun(), diffrax.DirectAdjoint()),
        (IMPLICIT, diffrax.RecursiveCheckpointAdjoint()),
    ],
    ids=["checkpoints", "backwards in time", "all kept", "implicit"],
)
def test_gradients_of_differential_equations(solver, adjoint):
    def loss(arrays, static):
        return jnp.sum(jnp.square(solve(eqx.combine(arrays, static), Y0, solver, adjoint=adjoint)))

    def of(model):
        arrays, static = eqx.partition(model, eqx.is_inexact_array)
        return jax.jit(jax.value_and_grad(functools.partial(loss, static=static)))(arrays)

    same(of)


def test_forward_mode_and_examples():
    """`vmap` of solves, whose steps are of each example's own size."""
    adaptive = diffrax.PIDController(rtol=1e-3, atol=1e-3)
    same(
        lambda model: jax.jit(jax.vmap(lambda y: solve(model, y, diffrax.Tsit5(), stepsize_controller=adaptive)))(
            SEVERAL
        )
    )
    forward = lambda model, y: solve(model, y, diffrax.Tsit5(), adjoint=diffrax.ForwardMode())
    same(lambda model: jax.jit(lambda y: jax.jvp(lambda y: forward(model, y), (y,), (y,)))(Y0))


def test_stochastic_differential_equations():
    noise = diffrax.VirtualBrownianTree(0.0, 1.0, 1e-2, (4,), jax.random.key(1))

    def loss(model):
        drift = diffrax.ODETerm(lambda t, y, args: model(y))
        diffusion = diffrax.ControlTerm(lambda t, y, args: jnp.diag(jax.nn.sigmoid(model(y))), noise)
        terms = diffrax.MultiTerm(drift, diffusion)
        solution: Any = diffrax.diffeqsolve(terms, diffrax.Heun(), 0.0, 1.0, 0.1, Y0, max_steps=32)
        return jnp.sum(jnp.square(solution.ys))

    same(gradient(loss))


@pytest.mark.parametrize(
    "solver", [optimistix.Newton(1e-5, 1e-5), optimistix.LevenbergMarquardt(1e-5, 1e-5)], ids=["newton", "lm"]
)
def test_roots(solver):
    """Their gradients solve linear equations with the model's Jacobian."""

    def loss(model):
        root = optimistix.root_find(lambda y, model: model(y) - 2 * y + 1, solver, Y0, args=model)
        return jnp.sum(jnp.square(root.value))

    same(gradient(loss))


def test_fixed_points_and_minima():
    iteration = optimistix.FixedPointIteration(1e-6, 1e-6)

    def loss(model):
        point = optimistix.fixed_point(lambda y, model: 0.2 * model(y) + Y0, iteration, Y0, args=model)
        return jnp.sum(jnp.square(point.value))

    same(gradient(loss))

    def minimum(model):
        objective = lambda y, args: jnp.sum(jnp.square(model(y) - y)) + jnp.sum(jnp.square(y))
        return optimistix.minimise(objective, optimistix.BFGS(1e-5, 1e-5), Y0, max_steps=64).value

    same(eqx.filter_jit(minimum), atol=1e-3)


@pytest.mark.parametrize("jac", ["fwd", "bwd"])
def test_linear_equations_with_a_jacobian(jac):
    def of(model):
        operator = lineax.JacobianLinearOperator(lambda y, args: model(y) - 3 * y, Y0, jac=jac)
        by_steps = lineax.linear_solve(operator, Y0, lineax.GMRES(1e-6, 1e-6)).value
        return operator.as_matrix(), operator.T.mv(Y0), lineax.linear_solve(operator, Y0).value, by_steps

    same(eqx.filter_jit(of))


def test_an_optimizer_that_calls_the_loss():
    def step(model):
        arrays, static = eqx.partition(model, eqx.is_inexact_array)
        loss = lambda arrays: jnp.sum(jnp.square(jax.vmap(eqx.combine(arrays, static))(SEVERAL)))
        optimizer = optax.lbfgs()
        state, value_and_grad = optimizer.init(arrays), optax.value_and_grad_from_state(loss)
        for _ in range(3):
            value, grads = value_and_grad(arrays, state=state)
            updates, state = optimizer.update(grads, state, arrays, value=value, grad=grads, value_fn=loss)
            arrays = optax.apply_updates(arrays, updates)
        return loss(arrays)

    same(eqx.filter_jit(step))
