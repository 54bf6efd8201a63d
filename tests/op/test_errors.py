"""What `Op` refuses, when it is declared and when it is called, and what it says."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc


X = np.ones(3, np.float32)
F32 = jax.ShapeDtypeStruct((3,), jnp.float32)
KERNEL = eqxc.NativeKernel("rms_norm")
TYPED = eqxc.NativeKernel("rms_norm", out_type=lambda x, **_: F32)


def op(kernels: Any = None, reference: Any = lambda x, y=None, **_: x, batching: Any = "sequential"):
    return eqxc.Op("norm", {"cpu": KERNEL} if kernels is None else kernels, reference, batching)


def aliased(aliases: Any):
    return eqxc.NativeKernel("f", aliases=aliases)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: op({"gpu": KERNEL}),
            ValueError,
            r"Op\(norm\): expected the keys of kernels to be of \('cpu', 'cuda', 'rocm'\); got 'gpu'",
        ),
        (
            lambda: op({"cpu": "rms_norm"}),
            TypeError,
            r"Op\(norm\): expected a kernel for cpu; got 'rms_norm' of type str",
        ),
        (
            lambda: op(reference=None),
            ValueError,
            r"the kernel for cpu needs an out_type, because there is no reference",
        ),
        (lambda: op(reference=3), TypeError, r"Op\(norm\): expected reference to be a function; got 3"),
        (lambda: op({}, None), ValueError, r"Op\(norm\): expected a kernel or a reference; got neither"),
        (
            lambda: op(batching="expand"),
            ValueError,
            r"batching to be one of \('fold', 'sequential', .*'broadcast_all'\), or a mapping; got 'expand'",
        ),
        (
            lambda: op(batching={"x": "sequential"}),
            ValueError,
            r"Op\(norm\): expected batching\['x'\] to be one of \('batched', 'either', 'shared'\); got 'sequential'",
        ),
        (
            lambda: op(batching={"z": "shared"}),
            ValueError,
            r"Op\(norm\): batching has 'z', which is not a parameter of the op; there are x, y",
        ),
        (
            lambda: op({"cpu": TYPED}, None, {"z": "shared"}),
            ValueError,
            r"batching has 'z', which is not a parameter of the op; there are x\.",
        ),
        (
            lambda: op({"cpu": aliased([0])}),
            TypeError,
            r"Op\(norm\): .* to be a mapping; got list",
        ),
        (
            lambda: op({"cpu": aliased({1.0: 0})}),
            TypeError,
            r"a flat index \(int\) or a name \(str\)",
        ),
        (lambda: op({"cpu": aliased({"x": -1})}), ValueError, r"non-negative .* the output -1"),
        (lambda: op({"cpu": aliased({True: 0})}), TypeError, r"got True of type bool"),
    ],
)
def test_a_wrong_declaration(make, error, message):
    with pytest.raises(error, match=message):
        make()


def with_type(out_type, reference=None):
    return op({"cpu": eqxc.NativeKernel("rms_norm", out_type=out_type)}, reference)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: op()(X, eps=X),
            TypeError,
            r"Op\(norm\): expected the option eps to be static and hashable; got ndarray\. Arrays are passed by position",
        ),
        (lambda: op()(X, eps=jnp.ones(3)), TypeError, r"the option eps to be static and hashable; got ArrayImpl"),
        (lambda: op()(X, a=1, eps=[1]), TypeError, r"the option eps to be static and hashable; got list"),
        (lambda: op()(X, eps=(1, [2])), TypeError, r"the option eps to be static and hashable; got tuple"),
        (lambda: jax.jit(lambda e: op()(X, eps=e))(1.0), TypeError, r"the option eps to be static .* got \w*Tracer"),
        (lambda: op()("x"), TypeError, r"not a valid JAX type"),
        (lambda: op(reference=lambda x: x)(X, X), TypeError, r"takes 1 positional argument but 2 were given"),
        (lambda: op(reference=lambda x, *, eps: x)(X), TypeError, r"missing 1 required keyword-only argument: 'eps'"),
        (
            lambda: with_type(lambda x: 3)(X),
            TypeError,
            r"Op\(norm\): the out_type for cpu has result = 3 of type int; expected `shape` and `dtype`, as of a jax\.Shape",
        ),
        (lambda: with_type(lambda x: {"a": (F32, "f32")})(X), TypeError, r"has result\['a'\]\[1\] = 'f32' of type str"),
        (
            lambda: with_type(lambda x: F32, lambda x: x[:2])(X),
            ValueError,
            r"Op\(norm\): expected one type of results from all; the reference has result of type float32\[2\], and the "
            r"out_type for cpu has result of type float32\[3\]",
        ),
        (
            lambda: op({"cpu": TYPED, "cuda": eqxc.NativeKernel("f", out_type=lambda x: (F32, F32))}, None)(X),
            ValueError,
            r"the out_type for cpu has result of type float32\[3\], and the out_type for cuda has result\[0\] .*, result\[1\]",
        ),
        (
            lambda: op({"cpu": TYPED, "cuda": eqxc.NativeKernel("f", out_type=lambda x: ())}, None)(X),
            ValueError,
            r"the out_type for cuda has none",
        ),
    ],
)
def test_a_wrong_call(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_a_wrong_call_is_wrong_again():
    """An error is not taken for a plan."""
    wrong = with_type(lambda x: 3)
    for _ in range(2):
        with pytest.raises(TypeError, match="the out_type for cpu has result"):
            wrong(X)
