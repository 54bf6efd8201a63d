"""Group norm of groups that several blocks share, launched as on a GPU, on the CPU."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np

from eqxcallback import ops
from eqxcallback.ops.norm import _reference

from ..ops.table import normal
from ..software_gpu.ops import on_software_gpu


def test_large_groups(software_gpu, monkeypatch):
    """Two launches forward. Those of the gradients make the moments anew: two more, `dx`, and the sums of the parameters."""
    module = importlib.import_module("eqxcallback.ops.norm._group_norm")
    monkeypatch.setattr(module, "_group_norm", on_software_gpu(module._group_norm))
    x, weight, bias, ct = normal(1, (1, 4, 8200)), normal(2, (4,)), normal(3, (4,)), normal(4, (1, 4, 8200))

    def pulled(norm, *args):
        out, pull = jax.vjp(lambda *args: norm(*args, groups=2, eps=1e-5), *args)
        return out, *pull(jnp.asarray(ct))

    got = jax.jit(lambda *args: pulled(ops.group_norm, *args))(x, weight, bias)
    want = jax.jit(lambda *args: pulled(_reference.group_norm, *args))(x, weight, bias)
    for result, expected in zip(got, want, strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
    assert ["block=(256,1,1)" in launch for launch in software_gpu.launches] == [True] * 5 + [False]
