"""`check` of every layer in every dtype and implementation."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc
from eqxcallback import nn

from .drop_ins import ONE_OF_EACH
from .parts import DTYPES, KEY, apart, filled, floats, widened


pytestmark = pytest.mark.any_jax_version


@dataclasses.dataclass(frozen=True)
class Example:
    """`call(make(implementation, dtype), *args(dtype))`."""

    make: Callable[..., Any]
    args: Callable[..., tuple[Any, ...]]
    call: Callable[..., Any] = lambda layer, *args: layer(*args)


def drop_in(case: Any) -> Example:
    def make(implementation: Any, dtype: Any) -> Any:
        return filled(lambda: case.make(dtype=dtype, implementation=implementation), dtype)

    return Example(make, case.inputs)


def of(cls: Any, *sizes: Any, shapes: Any, **options: Any) -> Example:
    def make(implementation: Any, dtype: Any) -> Any:
        return filled(lambda: cls(*sizes, dtype=dtype, implementation=implementation, **options), dtype)

    return Example(make, lambda dtype: floats(dtype, *shapes))


def quantized(encoding: Any) -> Example:
    def make(implementation: Any, dtype: Any) -> Any:
        linear = nn.Linear(64, 5, dtype=dtype, key=KEY)
        return nn.QuantizedLinear.from_linear(linear, encoding=encoding, implementation=implementation)

    return Example(make, lambda dtype: floats(dtype, (64,)))


def loss(make: Any, size: int) -> Example:
    return Example(make, lambda dtype: (*floats(dtype, (size,)), jnp.int32(3)))


SMOOTH: Any = {"label_smoothing": 0.1, "z_loss": 0.01, "ignore_index": -1}
MASK = np.random.default_rng(0).random((2, 5, 3)) < 0.6

EXAMPLES = {
    **{case.name: drop_in(case) for case in ONE_OF_EACH},
    "MultiheadAttention": of(nn.MultiheadAttention, 2, 6, key=KEY, shapes=[(5, 6), (3, 6), (3, 6)]),
    "MultiheadAttention-masked": Example(
        of(nn.MultiheadAttention, 2, 6, key=KEY, shapes=()).make,
        lambda dtype: (*floats(dtype, (5, 6), (3, 6), (3, 6)), jnp.asarray(MASK)),
    ),
    "GroupedQueryAttention": of(
        nn.GroupedQueryAttention, 4, 8, num_kv_heads=2, window=3, rope_theta=100.0, key=KEY, shapes=[(5, 8)]
    ),
    "FusedAddRMSNorm": of(nn.FusedAddRMSNorm, (3, 5), shapes=[(3, 5), (3, 5)]),
    "SwiGLU": of(nn.SwiGLU, 5, 7, 3, use_bias=True, key=KEY, shapes=[(5,)]),
    "GEGLU": of(nn.GEGLU, 5, 7, 3, key=KEY, shapes=[(5,)]),
    "SoftmaxCrossEntropy": loss(
        lambda implementation, dtype: nn.SoftmaxCrossEntropy(**SMOOTH, implementation=implementation), 7
    ),
    "FusedLinearCrossEntropy": loss(of(nn.FusedLinearCrossEntropy, 5, 7, True, **SMOOTH, key=KEY, shapes=()).make, 5),
    **{f"QuantizedLinear-{encoding}": quantized(encoding) for encoding in ("Q4_1", "Q8_0", "int8")},
    # Of a cache, the implementation is that of a call.
    "KVCache": Example(
        lambda implementation, dtype: (nn.KVCache(7, 2, 6, dtype), implementation),
        lambda dtype: floats(dtype, (4, 6), (3, 2, 6), (3, 2, 6)),
        lambda cache, q, k, v: cache[0].append(k, v).attend(q, implementation=cache[1]),
    ),
}
# Without a kernel in C++: their products are XLA's.
NOT_NATIVE = {"Embedding", "FusedLinearCrossEntropy"}


def reference(example: Example, plain: Any, dtype: Any) -> Callable[..., Any]:
    """A call of the layer `plain` in f32 on the same values, rounded once."""
    _, whole = apart(plain)

    def call(arrays: list[Any], *args: Any) -> Any:
        out = example.call(whole(widened(arrays)), *widened(args))
        is_loss = out.shape == () if isinstance(out, jax.Array) else False
        return out if is_loss else jax.tree.map(lambda x: x.astype(dtype), out)

    return call


@pytest.mark.parametrize("implementation", ["reference", "native", "python"])
@pytest.mark.parametrize("name", EXAMPLES)
def test_check(name, implementation):
    example = EXAMPLES[name]
    # The others compute f16 as they compute bf16, and references in f32 are what they are compared with.
    dtypes = {"native": DTYPES.values(), "python": (jnp.float32, jnp.bfloat16), "reference": (jnp.bfloat16,)}
    for dtype in dtypes[implementation]:
        arrays, whole = apart(example.make(implementation, dtype))
        args = example.args(dtype)
        call = lambda arrays, *args: example.call(whole(arrays), *args)  # noqa: B023
        if implementation == "native" and name in NOT_NATIVE:
            with pytest.raises(ValueError, match="to be one that there is a kernel of: auto, reference"):
                jax.eval_shape(call, arrays, *args)
            continue
        plain = example.make("reference", jnp.float32)
        eqxc.testing.check(
            call,
            arrays,
            *args,
            reference=reference(example, plain, dtype),
            only=["reference", *(["grad"] if dtype == jnp.float32 and implementation != "reference" else [])],
        )


def check_rows(name, implementation, **options):
    example = EXAMPLES[name]

    def of(implementation):
        arrays, whole = apart(example.make(implementation, jnp.float32))
        return lambda arrays, *args: example.call(whole(arrays), *args), arrays

    (call, arrays), (defined, _) = of(implementation), of("reference")
    eqxc.testing.check(call, arrays, *example.args(jnp.float32), reference=defined, **options)


# Those that take seconds.
SLOW = ["dtypes", "hessian", "nested vmap", "odd shapes", "threads", "sharded jit", "shard_map", "export"]


@pytest.mark.parametrize("name", EXAMPLES)
def test_quick_rows(name):
    """Check what a user gets against the layer on the references of its ops."""
    check_rows(name, "auto", skip=SLOW)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["reference", "native", "python"])
@pytest.mark.parametrize("name", EXAMPLES)
def test_every_row(name, implementation):
    if implementation == "native" and name in NOT_NATIVE:
        implementation = "auto"
    check_rows(name, implementation)
