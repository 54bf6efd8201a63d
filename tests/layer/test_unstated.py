"""`vmap` of a kernel that was written for one example: right where no method is stated, and a hint says how to be faster."""

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc
from eqxcallback.core import _warnings

from .layers import values


ROWS = values(5, 3)
calls: list[str] = []


class Cumsum(eqxc.Layer):
    """The cumulative sum of one example alone: with a leading axis, both kernels compute something else."""

    def kernel(self, ctx, out, x):
        calls.append("forward")
        np.asarray(out)[...] = np.cumsum(x).reshape(x.shape)

    def reference(self, x):
        return jnp.cumsum(x)

    def backward(self, ctx, grads, args, out, cotangents):
        calls.append("backward")
        np.asarray(grads[1])[...] = np.cumsum(np.asarray(cotangents)[::-1])[::-1]


class Stated(Cumsum):
    vmap_method = "sequential"


class Inherits(Stated):
    pass


def body(ctx, out, x):
    np.asarray(out)[...] = np.cumsum(x).reshape(x.shape)


OP = eqxc.Op("cumsum", {"cpu": eqxc.PythonKernel(body)}, lambda x: jnp.cumsum(x))


@pytest.fixture(autouse=True)
def nothing_was_said():
    _warnings._warn.cache_clear()
    calls.clear()


@pytest.mark.filterwarnings("ignore::eqxcallback.PerformanceWarning")
@pytest.mark.parametrize("subject", [Cumsum(), OP], ids=["layer", "op"])
@pytest.mark.parametrize(
    "transform",
    [
        jax.vmap,
        lambda f: jax.jit(jax.vmap(f, in_axes=1)),
        lambda f: lambda rows: jax.vmap(jax.vmap(f))(jnp.stack([rows, 2 * rows])),
        lambda f: lambda rows: jax.vmap(lambda i: f(rows[0] * i))(jnp.arange(2.0)),
        lambda f: jax.vmap(jax.grad(lambda x: (f(x) ** 2).sum())),
        lambda f: jax.grad(lambda rows: (jax.vmap(f)(rows) ** 2).sum()),
        lambda f: lambda rows: jax.jacrev(f)(rows[0]),
        lambda f: lambda rows: jax.vmap(jax.jacrev(f))(rows),
        lambda f: lambda rows: jax.vmap(jax.linearize(f, rows[0])[1])(rows),
        lambda f: lambda rows: jax.vmap(jax.vjp(f, rows[0])[1])(rows),
    ],
)
def test_kernels_of_one_example(subject, transform):
    np.testing.assert_allclose(transform(subject)(ROWS), transform(jnp.cumsum)(ROWS), rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore::eqxcallback.PerformanceWarning")
def test_the_backward_kernel_is_called_for_each_example_too():
    jax.block_until_ready(jax.grad(lambda rows: jax.vmap(Cumsum())(rows).sum())(ROWS))
    assert sorted(calls) == 5 * ["backward"] + 5 * ["forward"]


@pytest.mark.parametrize(("subject", "name"), [(Cumsum(), "Layer Cumsum"), (OP, r"Op\(cumsum\)")], ids=["layer", "op"])
def test_the_hint_is_said_once_where_the_map_is(subject, name):
    def several():
        for _ in range(2):
            jax.vmap(subject)(ROWS)
        jax.jit(jax.grad(lambda rows: jax.vmap(subject)(rows).sum()))(ROWS)

    text = rf'{name}: jax\.vmap calls .* vmap_method = "fold" is one call'
    with pytest.warns(eqxc.PerformanceWarning, match=text) as caught:
        several()
    assert [warning.filename for warning in caught] == [__file__]


def test_a_filter_that_makes_it_an_error_does_so_each_time():
    for _ in range(2):
        with pytest.raises(eqxc.PerformanceWarning):
            jax.vmap(Cumsum())(ROWS)


def test_no_hint_where_a_method_is_stated_or_no_map_is():
    for layer in (Stated(), Inherits()):
        jax.vmap(layer)(ROWS)
        jax.grad(lambda rows, layer=layer: jax.vmap(layer)(rows).sum())(ROWS)
    jax.lax.map(Cumsum(), ROWS)
    jax.vmap(lambda x: Cumsum()(ROWS[0]) + x)(ROWS)  # the operand is not mapped


@pytest.mark.parametrize("method", ["sequential", {}, {"x": "sequential"}])
def test_an_op_that_states_what_another_one_does_not(method):
    """They are equal but for that, and what is made for one must not be used for the other."""
    assert OP.vmap_method == "sequential"
    with pytest.warns(eqxc.PerformanceWarning):
        jax.vmap(OP)(ROWS)
    _warnings._warn.cache_clear()
    stated = dataclasses.replace(OP, vmap_method=method)
    assert stated != OP
    jax.vmap(stated)(ROWS)
    with pytest.raises(eqxc.PerformanceWarning):
        jax.vmap(OP.using("python"))(ROWS)


def test_an_own_rule_needs_no_method():
    class Rows(Cumsum):
        def batch(self, axis_size, in_axes, args):
            return jnp.cumsum(args[0], axis=1), 0

    jax.vmap(Rows())(ROWS)


def test_inspect_says_it_of_the_call():
    (call,) = eqxc.inspect(jax.vmap(jax.vmap(Cumsum())), values(2, 5, 3)).calls
    assert (call.times, call.operands) == (10, ("float32[3]",))
    assert call.hint == 'vmap calls it for each of 10 examples, as no vmap_method is stated: "fold" would be one call'
    assert call.hint in str(eqxc.inspect(jax.vmap(jax.vmap(Cumsum())), values(2, 5, 3)))
    forward, backward = eqxc.inspect(jax.grad(lambda rows: jax.vmap(Cumsum())(rows).sum()), ROWS).calls
    assert "each of 5 examples" in forward.hint
    assert "each of 5 examples" in backward.hint
    for silent in (jax.vmap(Stated()), Cumsum(), lambda rows: jax.lax.map(Cumsum(), rows)):
        assert all(call.hint == "" for call in eqxc.inspect(silent, ROWS).calls)


def test_check_says_that_it_is_right():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert eqxc.testing.check(Cumsum(), ROWS[0], only=("vmap of all", "nested vmap", "grad of vmap")).passed


def test_the_callback_has_no_default():
    callback = eqxc.buffer_callback(body, jax.ShapeDtypeStruct((3,), jnp.float32))
    with pytest.raises(NotImplementedError, match="vmap_method"):
        jax.vmap(callback)(ROWS)
