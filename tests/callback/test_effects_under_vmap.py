"""Effects in control flow under `vmap`. As with JAX's own callbacks, a batched predicate makes both branches run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc


ONE_BY_ONE = ["sequential", "sequential_unrolled"]
AT_ONCE = ["expand_dims", "broadcast_all", "legacy_vectorized"]


def tap_into(seen, name, method):
    """An effect that notes what it sees."""

    def note(ctx, out, x):
        seen.append((name, np.array(x).tolist()))

    return eqxc.buffer_callback(note, (), has_side_effect=True, vmap_method=method)


def branches(seen, method):
    def branch(name):
        return lambda x: (tap_into(seen, name, method)(x), x)[1]

    return branch("yes"), branch("no")


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("method", ONE_BY_ONE + AT_ONCE)
def test_cond_runs_both_branches(method, jit):
    seen = []

    def f(x):
        return jax.lax.cond(x > 0, *branches(seen, method), x)

    mapped = jax.vmap(f)
    y = (jax.jit(mapped) if jit else mapped)(jnp.array([1.0, -2.0]))
    jax.effects_barrier()
    np.testing.assert_array_equal(y, [1, -2])
    whole = [[1.0, -2.0]] if method in AT_ONCE else [1.0, -2.0]
    assert sorted(seen, key=str) == sorted([(name, x) for name in ("no", "yes") for x in whole], key=str)


@pytest.mark.parametrize("method", ONE_BY_ONE + AT_ONCE)
def test_cond_runs_one_branch_if_its_predicate_is_not_mapped(method):
    seen = []
    x = jnp.array([1.0, -2.0])
    jax.vmap(lambda p, x: jax.lax.cond(p, *branches(seen, method), x), (None, 0))(True, x)
    jax.effects_barrier()
    assert {name for name, _ in seen} == {"yes"}


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("method", ONE_BY_ONE + AT_ONCE)
def test_while_runs_for_finished_examples_too(method, jit):
    seen = []
    tap = tap_into(seen, "body", method)

    def f(n):
        return jax.lax.while_loop(lambda i: i < n, lambda i: (tap(i), i + 1)[1], jnp.int32(0))

    mapped = jax.vmap(f)
    y = (jax.jit(mapped) if jit else mapped)(jnp.array([1, 3]))
    jax.effects_barrier()
    np.testing.assert_array_equal(y, [1, 3])
    steps = [[0, 0], [1, 1], [1, 2]]  # the first example waits at 1
    values = steps if method in AT_ONCE else [x for step in steps for x in step]
    assert [x for _, x in seen] == values
