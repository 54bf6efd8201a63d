"""`jax.Ref` arguments: arrays that a kernel changes in place, eagerly, under transformations, and without a copy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc


class Accumulate(eqxc.Layer):
    """Adds `x * weight` to `total`, and returns twice the sum."""

    weight: jax.Array
    vmap_method = "fold"

    def kernel(self, ctx, out, x, total):
        array = np.asarray(total)
        array += np.asarray(x) * np.asarray(self.weight)
        out.write(array * np.float32(2))

    def reference(self, x, total):
        total[...] = total[...] + x * self.weight
        return total[...] * 2


X = jnp.arange(3.0) + 1
LAYER = Accumulate(jnp.asarray([1.0, 2.0, 3.0]))


def eager(f):
    total = jax.new_ref(jnp.zeros(3))
    return f(X, total), f(X, total), total[...]


def jitted(f):
    total = jax.new_ref(jnp.zeros(3))
    return jax.jit(f)(X, total), jax.jit(f)(X, total), total[...]


def made_inside(f):
    def run(x):
        total = jax.new_ref(jnp.zeros(3))
        return f(x, total) + f(x, total), total[...]

    return jax.jit(run)(X)


def scan(f):
    total = jax.new_ref(jnp.zeros(3))

    @jax.jit
    def run(xs, total):
        return jax.lax.scan(lambda carry, x: (carry, f(x, total)), None, xs)[1]

    return run(jnp.stack([X, 2 * X]), total), total[...]


def loss(f):
    def of(x):
        total = jax.new_ref(jnp.ones(3))
        y = f(f(x, total), total)
        return (y * total[...]).sum()

    return of


def vmap(f):
    total = jax.new_ref(jnp.zeros((2, 3)))
    return jax.vmap(f)(jnp.stack([X, 2 * X]), total), total[...]


@pytest.mark.parametrize(
    "use",
    [
        eager,
        jitted,
        made_inside,
        scan,
        vmap,
        lambda f: jax.grad(loss(f))(X),
        lambda f: jax.jit(jax.grad(loss(f)))(X),
        lambda f: jax.jvp(loss(f), (X,), (X,)),
        lambda f: jax.vmap(jax.grad(loss(f)))(jnp.stack([X, 2 * X])),
    ],
    ids=["eager", "jit", "made inside", "scan", "vmap", "grad", "jit of grad", "jvp", "vmap of grad"],
)
def test_a_ref_is_what_it_is_for_the_reference(use):
    got = use(lambda x, total: LAYER(x, total))
    expected = use(lambda x, total: LAYER.reference(x, total))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


@pytest.mark.parametrize(
    "of",
    [
        lambda f: jax.linearize(f, X),
        lambda f: jax.jvp(f, (X,), (X,)),
        lambda f: jax.grad(lambda x: f(x).sum())(X),
        lambda f: jax.jit(jax.grad(lambda x: f(x).sum()))(X),
    ],
    ids=["linearize", "jvp", "grad", "jit of grad"],
)
def test_a_ref_from_outside_takes_no_differentiated_value(of):
    """As for the reference. It has no tangent to write."""
    total = jax.new_ref(jnp.zeros(3))
    for function in (LAYER, LAYER.reference):
        with pytest.raises(Exception, match="differentiated value on a non-differentiated array reference"):
            of(lambda x, function=function: function(x, total))


def test_nothing_is_copied():
    layer = Accumulate(jnp.ones(4096))
    total = jax.new_ref(jnp.zeros(4096))
    text = jax.jit(lambda x, total: layer(x, total)).lower(jnp.ones(4096), total).compile().as_text()
    assert text is not None
    assert text.count("custom-call(") == 1
    assert "copy" not in text


def test_a_ref_twice_is_refused():
    class Two(eqxc.Layer):
        vmap_method = "fold"

        def kernel(self, ctx, out, a, b):
            pass

        def out_type(self, a, b):
            return ()

    total = jax.new_ref(X)
    with pytest.raises(
        ValueError, match=r"Two: expected each jax\.Ref once among the arguments of a call; got one twice"
    ):
        Two()(total, total)


def test_a_ref_and_an_array_are_two_programs():
    class Last(eqxc.Layer):
        vmap_method = "fold"

        def kernel(self, ctx, out, x):
            out.write(np.full(x.shape, x.writeable, np.float32))

        def out_type(self, x):
            return jax.ShapeDtypeStruct(x.shape, x.dtype)

    assert Last()(X)[0] == 0
    assert Last()(jax.new_ref(X))[0] == 1
    assert Last()(X)[0] == 0


def test_without_a_reference_there_is_no_derivative():
    """A backward kernel takes no Refs: it would not help."""

    class Last(eqxc.Layer):
        def kernel(self, ctx, out, x, total):
            out.write(x)

        def out_type(self, x, total):
            return jax.ShapeDtypeStruct(x.shape, x.dtype)

        def backward(self, ctx, grads, args, out, cotangents):
            pass

    with pytest.raises(ValueError, match=r"Define `reference` \(pure JAX\) in the layer\."):
        jax.grad(lambda x: Last()(x, jax.new_ref(X)).sum())(X)


def test_a_view_of_a_ref_is_refused():
    def run(total):
        with pytest.raises(
            TypeError, match=r"^Accumulate: expected total to be an array or a whole jax\.Ref; got a view of a jax\.Ref"
        ):
            LAYER(X, total.at[1])
        with pytest.raises(TypeError, match=r"^Accumulate: expected self\.weight to be an array or a whole jax\.Ref"):
            Accumulate(total.at[1])(X, X)

    jax.jit(run)(jax.new_ref(jnp.zeros((2, 3))))
