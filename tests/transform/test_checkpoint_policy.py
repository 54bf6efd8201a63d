"""`save_only_these_kernels`: what `jax.checkpoint` does not compute again."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc
from eqxcallback import nn, ops

from ..layers import Sine, runs


def squared(x):
    return jnp.square(Sine()(x)).sum()


PROGRAMS = {
    "eager": lambda of: jax.grad(of(squared)),
    "jit": lambda of: jax.jit(jax.grad(of(squared))),
    "jit inside": lambda of: jax.grad(of(jax.jit(squared))),
    "vmap inside": lambda of: jax.grad(of(lambda x: jax.vmap(squared)(x).sum())),
    "vmap of grad": lambda of: jax.vmap(jax.grad(of(squared))),
    "scan": lambda of: jax.grad(lambda x: jax.lax.scan(lambda sum, _: (sum + of(squared)(x), None), 0.0, None, 1)[0]),
    "filter_checkpoint": lambda of: jax.grad(of(squared)),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_kernel_runs_once(program):
    x = jnp.linspace(0, 1, 6).reshape(2, 3)
    checkpoint = eqx.filter_checkpoint if program == "filter_checkpoint" else jax.checkpoint
    for names, expected in ((("Sine",), 1), (("sine", "attention"), 2), ((), 2)):
        runs.clear()
        policy = eqxc.save_only_these_kernels(*names)
        gradient = PROGRAMS[program](lambda f, policy=policy: checkpoint(f, policy=policy))(x)
        np.testing.assert_allclose(gradient, np.sin(2 * np.asarray(x)), rtol=1e-5)
        # XLA for CPUs joins two calls that are alike in one program.
        assert len(runs) == (1 if program == "jit" else expected)


def calls(jaxpr):
    """The names of all calls of ops and of XLA's products."""
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "op_call":
            found.append(repr(eqn.params["call"]).partition("(")[0])
        elif eqn.primitive.name == "dot_general":
            found.append("dot_general")
        for param in eqn.params.values():
            inner = getattr(param, "jaxpr", param)
            if hasattr(inner, "eqns"):
                found += calls(inner)
    return found


def program(policy):
    linear = nn.Linear(8, 8, key=jax.random.key(0))

    def f(x, w):
        x = ops.attention(x, x, x, causal=True).reshape(-1, 8)
        return jnp.sin(jax.vmap(linear)(ops.rms_norm(x, jnp.ones(8)) @ w)).sum()

    x, w = jnp.ones((1, 5, 2, 4)), jnp.ones((8, 8))
    gradient = jax.grad(f if policy is None else jax.checkpoint(f, policy=policy), (0, 1))
    return calls(jax.make_jaxpr(gradient)(x, w).jaxpr)


def test_ops_and_products_together():
    dots = jax.checkpoint_policies.dots_saveable
    again = program(eqxc.save_only_these_kernels())
    without = program(None)
    count = {name: again.count(name) - without.count(name) for name in set(without)}
    assert count == {"attention": 1, "rms_norm": 1, "linear": 1, "linear.vjp": 0, "dot_general": 1}
    kept = program(eqxc.save_only_these_kernels("attention", "linear"))
    assert {name: kept.count(name) - without.count(name) for name in set(without)} == count | {
        "attention": 0,
        "linear": 0,
    }
    both = jax.checkpoint_policies.save_from_both_policies(
        dots, eqxc.save_only_these_kernels("attention", "linear", "rms_norm")
    )
    assert sorted(program(both)) == sorted(without)


def test_derivatives_of_what_is_kept():
    x = jnp.linspace(0.1, 1, 6).reshape(1, 3, 1, 2)

    def f(x):
        return jnp.sin(ops.attention(x, x, x)).sum()

    kept = jax.checkpoint(f, policy=eqxc.save_only_these_kernels("attention"))
    np.testing.assert_allclose(jax.grad(kept)(x), jax.grad(f)(x), rtol=1e-6)
    np.testing.assert_allclose(jax.hessian(kept)(x), jax.hessian(f)(x), rtol=1e-4, atol=1e-6)


def test_equal_policies_are_one():
    assert eqxc.save_only_these_kernels("a", "b") == eqxc.save_only_these_kernels("b", "a")
    assert hash(eqxc.save_only_these_kernels("a")) == hash(eqxc.save_only_these_kernels("a"))


@pytest.mark.parametrize("wrong", [ops.attention, Sine, None])
def test_not_a_name(wrong):
    with pytest.raises(TypeError, match=r"save_only_these_kernels: expected names of ops, .* got .* Pass a text"):
        eqxc.save_only_these_kernels("linear", wrong)
