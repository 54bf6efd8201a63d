"""References and rules that use `jax.new_ref` themselves: derivatives are those of what they compute."""

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc

from .derivatives import DERIVATIVES


W, X = jnp.asarray([1.0, -2.0, 0.5]), jnp.asarray([1.0, 2.0, 3.0])


def plain(w, x):
    return 3 * w * x * x


def reference(w, x):
    total = jax.new_ref(jnp.zeros_like(x))
    for _ in range(3):
        total[...] += w * x * x
    return total[...]


def kernel(ctx, out, w, x):
    out.write(3 * np.asarray(w) * np.asarray(x) ** 2)


class ByReference(eqxc.Layer):
    vmap_method = "fold"

    def kernel(self, ctx, out, w, x):
        kernel(ctx, out, w, x)

    def reference(self, w, x):
        return reference(w, x)


class ByRule(ByReference):
    def reference(self, w, x):
        return plain(w, x)

    def jvp(self, args, tangents):
        directions = [jnp.zeros_like(x) if t is None else t for t, x in zip(tangents, args, strict=True)]
        (w, x), (dw, dx) = args, directions
        total = jax.new_ref(jnp.zeros_like(x))
        for _ in range(3):
            total[...] += dw * x * x
            total[...] += 2 * w * x * dx
        return total[...]


class WithoutKernel(eqxc.Layer):
    vmap_method = "fold"
    kernels: ClassVar = {"cuda": "on_gpu"}

    def on_gpu(self, ctx, out, w, x):
        kernel(ctx, out, w, x)

    def reference(self, w, x):
        return reference(w, x)


FUNCTIONS = {
    "reference": ByReference(),
    "jvp": ByRule(),
    "no kernel": WithoutKernel(),
    "op": eqxc.Op("cubic", {"cpu": eqxc.PythonKernel(kernel)}, reference, vmap_method="fold"),
    "differentiable": eqxc.Op(
        "cubic", {"cpu": eqxc.JaxKernel(plain, differentiable=reference)}, plain, vmap_method="broadcast_all"
    ),
}
NAMES = (
    "linearize",
    "grad of both",
    "grad of the argument",
    "jvp",
    "vmap of grad",
    "grad of vmap",
    "scan",
    "jvp of grad",
    "hessian",
    "reverse over reverse",
    "checkpoint",
    "cond",
    "transposed",
)


@pytest.mark.parametrize("of", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("transform", NAMES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_derivatives(name, transform, of):
    got = of(DERIVATIVES[transform](FUNCTIONS[name]))(W, X)
    want = of(DERIVATIVES[transform](plain))(W, X)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_rules_inside_of_it_stay():
    """Only the Refs go: a function with a derivative of its own keeps it, and effects remain."""

    @jax.custom_jvp
    def identity(x):
        return x

    identity.defjvp(lambda primals, tangents: (primals[0], 5 * tangents[0]))
    seen = []

    class Noted(eqxc.Layer):
        vmap_method = "fold"

        def kernel(self, ctx, out, x):
            out.write(x)

        def reference(self, x):
            copy = jax.new_ref(jnp.zeros_like(x))
            jax.debug.callback(lambda x: seen.append(float(x[0])), x)
            copy[...] = identity(x)
            return copy[...]

    np.testing.assert_array_equal(jax.grad(lambda x: Noted()(x).sum())(X), [5, 5, 5])
    jax.effects_barrier()
    assert set(seen) == {1.0}


def test_a_reference_without_refs_is_traced_once():
    calls = []

    class Counted(eqxc.Layer):
        vmap_method = "fold"

        def kernel(self, ctx, out, x):
            out.write(2 * np.asarray(x))

        def reference(self, x):
            calls.append(1)
            return 2 * x

    jax.eval_shape(Counted(), X)
    calls.clear()
    jax.make_jaxpr(jax.grad(lambda x: Counted()(x).sum()))(X)
    assert len(calls) == 1
