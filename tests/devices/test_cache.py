"""The persistent cache of compiled programs, with programs that are split: found again, and never the wrong function."""

import json
import os
import subprocess
import sys

import jax
import pytest

from ..persistent_cache import COUNT_HITS
from ..transform.library import SAXPY


# Compiles programs and prints their results, and how many of them were in the cache.
PROGRAM = (
    COUNT_HITS
    + """
import json, os, sys
import jax, jax.numpy as jnp, numpy as np, eqxcallback as eqxc


mesh = jax.make_mesh((4,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
split = jax.NamedSharding(mesh, jax.P("a"))
x = jax.device_put(np.ones((8, 3), np.float32), split)
shapes = []


class Scale(eqxc.Layer):
    weight: jax.Array
    vmap_method = "fold"

    def kernel(self, ctx, out, x):
        shapes.append(x.shape)
        out.write(np.asarray(x) * np.asarray(self.weight) * FACTOR)

    def reference(self, x):
        return x * self.weight * FACTOR

    def backward(self, ctx, grads, args, out, cotangents):
        if grads[0].weight is not None:
            value = np.asarray(cotangents) * np.asarray(args[0]) * FACTOR
            grads[0].weight.write(value.sum(0))


def closure(factor):
    def kernel(ctx, out, x):
        out.write(np.asarray(x) * np.float32(factor))

    return eqxc.Op("closure", {"cpu": eqxc.PythonKernel(kernel, lambda x: x)}, vmap_method="fold")


def effect(factor):
    def kernel(ctx, out, x):
        out.write(np.asarray(x) * np.float32(factor))

    return eqxc.buffer_callback(kernel, jax.ShapeDtypeStruct((8, 3), jnp.float32), has_side_effect=True)


FACTOR = np.float32(sys.argv[3])
w = np.full(3, 2, np.float32)
kernels = {"cpu": eqxc.NativeKernel("Saxpy", os.environ["SAXPY"])}
saxpy = eqxc.Op("saxpy", kernels, lambda x, y, *, a: a * x + y, vmap_method="broadcast_all")
lane = sys.argv[2]
functions = {
    "native": [
        (lambda w, x: jax.vmap(lambda x: saxpy(x, w, a=float(FACTOR)))(x)),
        jax.grad(lambda w, x: (jax.vmap(lambda x: saxpy(x, w, a=3.0))(x) ** 2).sum()),
    ],
    "python": [
        (lambda w, x: jax.vmap(Scale(w))(x)),
        jax.grad(lambda w, x: jax.vmap(Scale(w))(x).sum()),
        *(lambda w, x, f=closure(float(f)): jax.vmap(f)(x) + w[None] for f in sys.argv[4:]),
        *(lambda w, x, f=effect(float(f)): f(x) + w[None] for f in sys.argv[4:]),
    ],
}[lane]
hits.clear()
programs = [jax.jit(function).lower(w, x).compile() for function in functions]
found = len(hits)
results = [np.asarray(program(w, x)).ravel()[0].item() for program in programs]
assert set(shapes) <= {(2, 3)}, shapes
print(json.dumps({"results": results, "hits": found}))
"""
)


def run(folder, *arguments):
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4", "SAXPY": str(SAXPY)}
    command = [sys.executable, "-c", PROGRAM, str(folder), *arguments]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_native_programs(tmp_path):
    want = [5.0, 8 * 2 * 5.0]
    assert run(tmp_path, "native", "3") == {"results": want, "hits": 0}
    assert run(tmp_path, "native", "3") == {"results": want, "hits": 2}
    # An attribute of one of them is another.
    assert run(tmp_path, "native", "4") == {"results": [6.0, want[1]], "hits": 1}


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="JAX 0.10 never caches programs that own host callbacks")
def test_python_programs_are_found(tmp_path):
    want = [6.0, 24.0, 7.0, 9.0, 7.0, 9.0]
    assert run(tmp_path, "python", "3", "5", "7") == {"results": want, "hits": 0}
    assert run(tmp_path, "python", "3", "5", "7") == {"results": want, "hits": 6}
    # The body changed, and the closures came in another order: the same programs call what is there now.
    assert run(tmp_path, "python", "4", "7", "5") == {"results": [8.0, 32.0, 9.0, 7.0, 9.0, 7.0], "hits": 6}


@pytest.mark.skipif(jax.__version_info__ >= (0, 11), reason="JAX 0.11 caches programs that own host callbacks")
def test_python_programs_are_right_where_they_are_not_found(tmp_path):
    want = [6.0, 24.0, 7.0, 9.0, 7.0, 9.0]
    for _ in range(2):
        assert run(tmp_path, "python", "3", "5", "7") == {"results": want, "hits": 0}
