"""Kernels that fail on one device of several. Those that meet in a collective run in a process that may be killed."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc

from .layers import Scale, mesh_of, normal, put, twice


class Broken(Scale):
    def kernel(self, ctx, out, x):
        if ctx.device_ordinal == 2:
            raise ValueError("device two is broken")
        super().kernel(ctx, out, x)


class Poisoned(Broken):
    on_error = "poison"


@pytest.mark.parametrize("wrap", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_the_error_of_one_device(wrap):
    """Without a collective the others do not wait for it. The error shows the parts that the kernel had."""
    x = put(normal(4, 2, 3), mesh_of(4), "a")
    call = wrap(lambda x: twice(lambda w, x: Broken(w)(x))(normal(3), x))
    for _ in range(2):
        with pytest.raises(eqxc.KernelError, match="device two is broken") as caught, eqxc.raising():
            jax.block_until_ready(call(x))
        assert isinstance(caught.value.original, ValueError)
        assert caught.value.operands == "(float32[3], float32[2,3]) -> (float32[2,3])"
        assert caught.value.layer == "Broken"
    with pytest.raises(jax.errors.JaxRuntimeError, match="device two is broken"):
        jax.block_until_ready(call(x))
    # JAX keeps the tokens of a failed program until the devices run another one with callbacks.
    jax.block_until_ready(jax.jit(lambda x: twice(lambda w, x: Scale(w)(x))(normal(3), x))(x))
    jax.effects_barrier()


def test_poison_without_a_collective():
    """NaN where the kernel failed, and the values of the others."""
    x = put(normal(4, 2, 3), mesh_of(4), "a")
    call, results = jax.jit(lambda x: twice(lambda w, x: Poisoned(w)(x))(normal(3), x)), []
    with pytest.raises(eqxc.KernelError, match="device two is broken") as caught, eqxc.raising():
        results.append(jax.block_until_ready(call(x)))
    assert isinstance(caught.value.original, ValueError)
    want = np.tanh(normal(3) * normal(4, 2, 3))
    want[2] = np.nan
    np.testing.assert_allclose(results[0], want, rtol=1e-5)
    with eqxc.raising():  # it was raised once
        pass


def test_poison_of_integers():
    class Count(eqxc.Layer):
        vmap_method = "fold"
        on_error = "poison"

        def kernel(self, ctx, out, x):
            out[0].write(np.full(out[0].shape, 7, np.int32))
            out[1].write(np.asarray(x))
            if ctx.device_ordinal == 1:
                raise ValueError("after writing")

        def reference(self, x):
            return jnp.full(x.shape, 7, jnp.int32), x

    results = []
    with pytest.raises(eqxc.KernelError, match="after writing"), eqxc.raising():
        results += jax.block_until_ready(jax.jit(jax.vmap(Count()))(put(normal(4, 3), mesh_of(4), "a")))
    numbers, values = results
    np.testing.assert_array_equal(numbers[:, 0], [7, 0, 7, 7])
    np.testing.assert_array_equal(np.isnan(values[:, 0]), [False, True, False, False])


# The devices meet in a collective, which the failing one must reach.
PROGRAM = """
import os, sys
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
import jax, jax.numpy as jnp, numpy as np, eqxcallback as eqxc

class Poisoned(eqxc.Layer):
    weight: jax.Array
    on_error = "poison"
    vmap_method = "fold"

    def kernel(self, ctx, out, x):
        if ctx.device_ordinal == 3 and where == "forward":
            raise ValueError("device three is broken")
        out.write(np.asarray(x) * np.asarray(self.weight))

    def reference(self, x):
        return x * self.weight

    def backward(self, ctx, grads, args, out, cotangents):
        if ctx.device_ordinal == 3 and where == "backward":
            raise ValueError("device three is broken")
        for grad, value in ((grads[0].weight, np.asarray(cotangents) * np.asarray(args[0])),
                            (grads[1], np.asarray(cotangents) * np.asarray(self.weight))):
            if grad is not None:
                array = np.asarray(grad)
                array[...] = value.sum(0) if value.ndim > array.ndim else value

mesh = jax.make_mesh((8,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
x = jax.device_put(np.ones((16, 3), np.float32), jax.NamedSharding(mesh, jax.P("a")))
layer = Poisoned(np.ones(3, np.float32))
rows = lambda layer, x: jax.vmap(layer)(x)
total = lambda layer, x: rows(layer, x).sum()
loop = lambda layer, x: jax.lax.scan(lambda c, _: (rows(layer, c) + c.sum() / 1000, None), x, None, length=3)[0].sum()
psum = jax.shard_map(lambda l, x: jax.lax.psum(total(l, x), "a"), mesh=mesh, in_specs=(jax.P(), jax.P("a")), out_specs=jax.P())
programs = {
    "forward": [total, psum, loop, jax.grad(lambda l, x: total(l, x) ** 2)],
    "backward": [jax.grad(lambda l, x: total(l, x) ** 2), jax.grad(psum)],
}
for where, functions in programs.items():
    for function in functions:
        for _ in range(2):
            program = jax.jit(function)
            try:
                with eqxc.raising():
                    result = jax.block_until_ready(program(layer, x))
            except eqxc.KernelError as error:
                assert str(error.original) == "device three is broken", error
                assert error.layer == "Poisoned"
            else:
                raise AssertionError("nothing was raised")
            assert all(np.isnan(leaf).all() for leaf in jax.tree.leaves(result)), result
where = ""
assert float(jax.jit(psum)(layer, x)) == 48.0  # and all is well again
print("finished")
"""


def test_poison_lets_a_collective_finish():
    result = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=90, check=False)
    assert result.returncode == 0, result.stderr
    assert "finished" in result.stdout
