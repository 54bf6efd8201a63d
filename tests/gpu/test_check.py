"""`eqxcallback.testing.check`, the whole of it, on a real GPU."""

from typing import Any

import jax
import pytest

import eqxcallback as eqxc

from .checked import CALLS, normal
from .conftest import require_gpu


pytestmark = pytest.mark.gpu

require_gpu()

import cupy  # noqa: E402


@pytest.mark.parametrize("name", CALLS)
def test_an_op(name):
    op, args, options = CALLS[name]()
    report = eqxc.testing.check(op, *args, **options)
    assert report.passed, str(report)


class Scale(eqxc.Layer):
    """In CuPy, without a gradient of its own."""

    weight: jax.Array
    vmap_method = "fold"
    command_buffer_compatible = True

    def kernel(self, ctx, out, x):
        weight: Any = self.weight  # here it is a Buffer
        with ctx:
            cupy.multiply(x.cupy(), weight.cupy(), out=out.cupy())

    def reference(self, x):
        return x * self.weight


def test_a_layer_in_cupy():
    report = eqxc.testing.check(Scale(normal(40)), normal(40, seed=1), capture=True)
    assert report.passed, str(report)
    assert report["capture"].result == "ok"
