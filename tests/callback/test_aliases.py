"""`input_output_aliases`: in place where it can be, a copy where somebody still needs the input, never the wrong result."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc

from .kernels import address, callback_like, scale_in_place


F32 = jax.ShapeDtypeStruct((3,), jnp.float32)


def same_memory(ctx, out, x):
    assert address(np.asarray(out)) == address(np.asarray(x))
    scale_in_place(ctx, out, x)


def test_not_donated_is_copied_and_survives():
    x = jnp.arange(3.0)
    y = callback_like(same_memory, x, input_output_aliases={0: 0})(x)
    np.testing.assert_array_equal(y, [0, 2, 4])
    np.testing.assert_array_equal(x, [0, 1, 2])
    assert address(y) != address(x)


def test_donated_is_in_place():
    f = jax.jit(callback_like(same_memory, F32, input_output_aliases={0: 0}), donate_argnums=0)
    x = jnp.arange(3.0)
    before = address(x)
    y = f(x)
    assert address(y) == before
    assert x.is_deleted()
    np.testing.assert_array_equal(y, [0, 2, 4])
    assert " copy(" not in str(f.lower(F32).compile().as_text())


def doubling_in_place():
    """An aliased doubling, and the set of the addresses that it wrote to."""
    addresses = set()

    def kernel(ctx, out, x):
        addresses.add(address(np.asarray(out)))
        scale_in_place(ctx, out, x)

    return callback_like(kernel, F32, input_output_aliases={0: 0}), addresses


def test_a_chain_of_calls_is_one_buffer():
    f, addresses = doubling_in_place()
    y = jax.jit(lambda x: f(f(f(f(x)))), donate_argnums=0)(jnp.ones(3))
    np.testing.assert_array_equal(y, np.full(3, 16.0))
    assert len(addresses) == 1


def test_a_scan_carry_is_one_buffer():
    f, addresses = doubling_in_place()

    @jax.jit
    def loop(x):
        return jax.lax.scan(lambda carry, _: (f(carry), None), x, length=5)[0]

    np.testing.assert_array_equal(loop(jnp.ones(3)), np.full(3, 32.0))
    assert len(addresses) == 1


def test_an_input_that_is_used_later_is_copied():
    f = callback_like(same_memory, F32, input_output_aliases={0: 0})

    @jax.jit
    def g(x):
        y = x + 1
        return f(y), y

    doubled, y = g(jnp.zeros(3))
    np.testing.assert_array_equal(doubled, [2, 2, 2])
    np.testing.assert_array_equal(y, [1, 1, 1])


class Cache(NamedTuple):
    keys: jax.Array | jax.ShapeDtypeStruct
    values: jax.Array | jax.ShapeDtypeStruct


def append(ctx, out, row, cache, *, scale):
    """Writes `row * scale` into the first row of both halves of a cache."""
    y, new = out
    for part in (new.keys, new.values):
        part.numpy()[0] = np.asarray(row) * np.asarray(scale)
    y.write(np.asarray(row) * np.asarray(scale))


CACHE = Cache(jax.ShapeDtypeStruct((2, 3), jnp.float32), jax.ShapeDtypeStruct((2, 3), jnp.float32))


@pytest.mark.parametrize("aliases", [{1: 1, 2: 2}, {"cache": 1}, {2: 2, 1: 1}])
def test_flat_indices_and_names_reach_into_trees(aliases):
    f = eqxc.buffer_callback(append, (F32, CACHE), input_output_aliases=aliases)
    cache = Cache(jnp.ones((2, 3)), jnp.full((2, 3), 5.0))
    y, new = f(jnp.arange(3.0), cache, scale=jnp.float32(10.0))
    np.testing.assert_array_equal(y, [0, 10, 20])
    np.testing.assert_array_equal(new.keys, [[0, 10, 20], [1, 1, 1]])
    np.testing.assert_array_equal(new.values, [[0, 10, 20], [5, 5, 5]])
    np.testing.assert_array_equal(cache.keys, np.ones((2, 3)))


def test_keywords_and_named_outputs():
    def kernel(ctx, out, x, *, state):
        out["state"].numpy()[0] = 7
        out["y"].write(x)

    f = eqxc.buffer_callback(kernel, {"state": F32, "y": F32}, input_output_aliases={"state": "state"})
    out = f(jnp.arange(3.0), state=jnp.ones(3))
    np.testing.assert_array_equal(out["state"], [7, 1, 1])
    # The flat index of a keyword argument comes after those of the positional ones.
    f = eqxc.buffer_callback(kernel, {"state": F32, "y": F32}, input_output_aliases={1: 0})
    np.testing.assert_array_equal(f(jnp.arange(3.0), state=jnp.ones(3))["state"], [7, 1, 1])


def test_index_into_nested_arguments():
    """JAX's own callback counts the arguments, not their leaves, and refuses this."""

    def kernel(ctx, out, x):
        scale_in_place(ctx, out, x[0])

    f = callback_like(kernel, F32, input_output_aliases={1: 0})
    np.testing.assert_array_equal(f((jnp.zeros(3), jnp.ones(3))), [2, 2, 2])


def kernel(ctx, out, x, y):
    raise AssertionError("never called")


X, Y = jnp.zeros(3), jnp.zeros(4)


@pytest.mark.parametrize(
    ("aliases", "error", "match"),
    [
        ([(0, 0)], TypeError, "expected input_output_aliases to be a mapping; got list"),
        ({1.0: 0}, TypeError, r"expected each input in input_output_aliases to be a flat index \(int\) or a name"),
        ({0: 1.0}, TypeError, "expected each output .* got 1.0 of type float"),
        ({True: 0}, TypeError, "got True of type bool"),
        ({-1: 0}, ValueError, "expected non-negative indices .* got the input -1"),
        ({0: -1}, ValueError, "expected non-negative indices .* got the output -1"),
    ],
)
def test_refused_at_construction(aliases, error, match):
    with pytest.raises(error, match=match):
        eqxc.buffer_callback(kernel, (F32, F32), input_output_aliases=aliases)


@pytest.mark.parametrize(
    ("aliases", "match"),
    [
        ({2: 0}, r"has the input 2, but there are 2 flat inputs \(0: x, 1: y\)"),
        ({0: 2}, r"has the output 2, but there are 2 flat outputs \(0: result_shape_dtypes\[0\]"),
        ({"1": 0}, r"has the input '1', which is not the name of an array among the inputs \(names: x, y\)"),
        ({0: "z"}, "has the output 'z', which is not the name of an array among the outputs"),
        ({0: 0, "x": 1}, "uses the input x twice"),
        ({0: 0, 1: 0}, r"uses the output result_shape_dtypes\[0\] twice"),
        ({1: 0}, r"input y of type float32\[4\], output result_shape_dtypes\[0\] of type float32\[3\]"),
    ],
)
def test_refused_when_called(aliases, match):
    f = eqxc.buffer_callback(kernel, (F32, F32), input_output_aliases=aliases)
    with pytest.raises(ValueError, match=match):
        f(X, Y)
    with pytest.raises(ValueError, match=match):
        jax.jit(f)(X, Y)


def test_a_name_that_covers_too_many_leaves():
    f = eqxc.buffer_callback(kernel, (F32, F32), input_output_aliases={"x": 1})
    with pytest.raises(ValueError, match=r"pairs x\[1\] with an output past the last one"):
        f((X, X), Y)


def test_dtypes_must_agree():
    f = eqxc.buffer_callback(kernel, F32, input_output_aliases={0: 0})
    with pytest.raises(ValueError, match=r"input x of type int32\[3\]"):
        f(jnp.zeros(3, jnp.int32), Y)


def test_none_leaves_are_no_arguments():
    def kernel(ctx, out, nothing, x):
        assert nothing is None
        scale_in_place(ctx, out, x)

    f = callback_like(kernel, F32, input_output_aliases={0: 0})
    np.testing.assert_array_equal(f(None, jnp.ones(3)), [2, 2, 2])


@pytest.mark.parametrize("method", ["sequential", "sequential_unrolled", "expand_dims", "broadcast_all"])
@pytest.mark.parametrize("batched", ["state", "x", "both"])
def test_under_vmap(method, batched):
    """An aliased operand that is not mapped is broadcast: JAX's own callback ends in an MLIR error."""

    def accumulate(ctx, out, state, x):
        array = np.asarray(out)
        array += np.asarray(x)

    f = eqxc.buffer_callback(accumulate, F32, vmap_method=method, input_output_aliases={0: 0})
    state, x = jnp.arange(3.0), jnp.ones(3)
    states, xs = jnp.arange(6.0).reshape(2, 3), jnp.array([[1.0, 1, 1], [10, 10, 10]])
    args = (states if batched != "x" else state, xs if batched != "state" else x)
    axes = (0 if batched != "x" else None, 0 if batched != "state" else None)
    want = jax.vmap(lambda s, x: s + x, axes)(*args)
    np.testing.assert_array_equal(jax.vmap(f, axes)(*args), want)
    np.testing.assert_array_equal(jax.jit(jax.vmap(f, axes))(*args), want)
    np.testing.assert_array_equal(states, np.arange(6.0).reshape(2, 3))
