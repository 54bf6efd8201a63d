"""`eqxcallback.inspect`: the calls of a program, before and after it is compiled."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc
from eqxcallback import ops


X = jnp.ones(3)


class Scale(eqxc.Layer):
    weight: jax.Array

    def kernel(self, ctx, out, x):
        np.multiply(x, self.weight, out=np.asarray(out))

    def reference(self, x):
        return x * self.weight

    def backward(self, ctx, grads, args, out, cotangents):
        pass


def test_forward():
    report = eqxc.inspect(lambda x: ops.rms_norm(Scale(X)(x)), X)
    scale, norm = report.calls
    assert (scale.op, scale.kind, scale.lane, scale.target) == ("Scale", "forward", "python", "eqxcallback_python")
    assert (norm.op, norm.kind, norm.lane, norm.target) == ("rms_norm", "forward", "native", "eqxcallback_rms_norm")
    assert scale.operands == ("float32[3]", "float32[3]")
    assert scale.results == ("float32[3]",)


@pytest.mark.parametrize("platform", ["gpu", "CPU", 3])
def test_unknown_platforms(platform):
    with pytest.raises(
        ValueError, match=r"expected platform to be one of \('cpu', 'cuda', 'rocm', 'tpu'\) or None; got"
    ):
        eqxc.inspect(jnp.sin, X, platform=platform)
