"""Several Python threads, and callbacks that run JAX themselves, on several devices at once."""

import subprocess
import sys


# Callbacks run JAX on their own device, on another one, and on all in turn; threads call programs that are split. What hangs
# is killed. A callback may not run a program that is itself split over devices whose callbacks do the same: JAX's hang, too.
PROGRAM = """
import os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
import threading
from concurrent.futures import ThreadPoolExecutor
import jax, jax.numpy as jnp, numpy as np, equinox as eqx, eqxcallback as eqxc

mesh = jax.make_mesh((8,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
split = jax.NamedSharding(mesh, jax.P("a"))

class Scale(eqxc.Layer):
    weight: jax.Array
    vmap_method = "fold"

    def kernel(self, ctx, out, x):
        out.write(np.asarray(x) * np.asarray(self.weight))

    def reference(self, x):
        return x * self.weight

    def backward(self, ctx, grads, args, out, cotangents):
        for grad, value in ((grads[0].weight, np.asarray(cotangents) * np.asarray(args[0])),
                            (grads[1], np.asarray(cotangents) * np.asarray(self.weight))):
            if grad is not None:
                array = np.asarray(grad)
                array[...] = value.sum(0) if value.ndim > array.ndim else value

class RunsJax(Scale):
    where: str = eqx.field(static=True, default="own")

    def kernel(self, ctx, out, x):
        value = np.array(x)
        number = ctx.device_ordinal
        for i in {"own": [number], "next": [(number + 1) % 8], "all": range(8)}[self.where]:
            value = np.asarray(jax.jit(lambda v: v + 0)(jax.device_put(value, jax.devices()[i])))
        out.write(value * np.asarray(self.weight))

x = np.arange(48, dtype=np.float32).reshape(16, 3)
X = jax.device_put(x, split)
w = np.arange(1, 4, dtype=np.float32)
rows = lambda layer, x: jax.vmap(layer)(x)

for where in ("own", "next", "all"):
    for _ in range(3):
        np.testing.assert_allclose(jax.jit(rows)(RunsJax(w, where), X), x * w)
        np.testing.assert_allclose(rows(RunsJax(w, where), X), x * w)

loss = jax.jit(jax.grad(lambda layer, x: (rows(layer, x) ** 2).sum(), (0, 1)))

def work(seed):
    layer = Scale(w * np.float32(seed))
    own = jax.jit(lambda layer, x: rows(layer, x) + seed)  # lowered and compiled while others are
    for _ in range(8):
        np.testing.assert_allclose(own(layer, X), x * w * seed + seed, rtol=1e-5)
        of_layer, of_x = loss(layer, X)
        np.testing.assert_allclose(of_layer.weight, 2 * seed * w * (x ** 2).sum(0), rtol=1e-4)
        np.testing.assert_allclose(of_x, 2 * x * (w * seed) ** 2, rtol=1e-4)
        np.testing.assert_allclose(rows(layer, X), x * w * seed, rtol=1e-5)
    return True

with ThreadPoolExecutor(6) as pool:
    assert all(pool.map(work, range(1, 7)))
print("finished")
"""


def test_threads_and_callbacks_that_run_jax():
    result = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=95, check=False)
    assert result.returncode == 0, result.stderr[-4000:]
    assert "finished" in result.stdout
