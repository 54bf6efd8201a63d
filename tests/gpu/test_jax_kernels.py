"""XLA's results on a real GPU where no kernel of ours supports a call, against the definitions on the CPU, in f32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqxcallback import ops
from eqxcallback.ops.loss import _jax as loss_kernels

from ..ops.attention import options
from ..ops.linear.cases import blocks
from ..ops.table import kernels_of, normal, wide
from .conftest import require_gpu
from .values import BF16, F32, tolerate_products


pytestmark = pytest.mark.gpu

require_gpu()


def check(function, args, terms):
    """The values and the gradients of `function(implementation)`."""
    numbers = tuple(i for i, arg in enumerate(args) if arg.dtype in (F32, BF16))

    def with_gradients(implementation):
        def sum_of(*args):
            return jnp.sum(function(implementation)(*args).astype(jnp.float32))

        return jax.jit(lambda *args: (function(implementation)(*args), *jax.grad(sum_of, numbers)(*args)))

    # A window of all keys before a query is causal, and nothing else.
    assert set(kernels_of(with_gradients("auto"), *args)) in ({"jax"}, {"triton"})
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        want = jax.tree.map(np.asarray, with_gradients("reference")(*map(wide, args)))
    with jax.default_matmul_precision("highest"):  # else f32 is TF32, as in all of JAX
        results = with_gradients("auto")(*args)
    for got, exact in zip(results, want, strict=True):
        # A gradient in f32 is of values that were rounded as the operands are.
        tolerate_products(np.asarray(got).astype(args[0].dtype), exact, terms)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("name", options.NAMES)
def test_attention(name, dtype):
    chosen = options.options(150, 70, 4)[name]
    check(
        lambda implementation: lambda q, k, v: ops.attention(q, k, v, **chosen, implementation=implementation),
        options.inputs(150, 70, 4, 2, 16, dtype),
        140,
    )


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize(
    "chosen",
    [{}, {"label_smoothing": 0.1, "z_loss": 0.01, "soft_cap": 20.0}, {"reduction": "sum"}],
    ids=str,
)
@pytest.mark.parametrize("rows", [1024, 24], ids=["a chunk", "chunks"])
def test_linear_cross_entropy(rows, chosen, dtype, monkeypatch):
    if rows < 64:
        monkeypatch.setattr(loss_kernels, "_ROWS", rows)
        monkeypatch.setattr(loss_kernels, "_LOGITS", rows * 1000)
    labels = np.arange(64) % 50
    check(
        lambda implementation: (
            lambda x, weight: ops.linear_cross_entropy(x, weight, labels, **chosen, implementation=implementation)
        ),
        (normal(1, (64, 128), dtype), normal(2, (5000, 128), dtype, 0.1)),
        5000,
    )


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("activations", ["exact", "int8"])
def test_int8_linear(activations, dtype):
    weight = np.random.default_rng(1).integers(-128, 128, (260, 256), np.int8)
    check(
        lambda implementation: (
            lambda x, scale: ops.int8_linear(x, weight, scale, activations=activations, implementation=implementation)
        ),
        (normal(1, (100, 256), dtype), np.abs(normal(2, (260,), scale=0.01))),
        256,
    )


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("encoding", ["Q4_1", "Q8_0"])
def test_quantized_linear(encoding, dtype):
    weight = blocks(2, 260, 256, encoding)
    check(
        lambda implementation: (
            lambda x: ops.quantized_linear(x, weight, encoding=encoding, implementation=implementation)
        ),
        (normal(1, (100, 256), dtype),),
        256,
    )
