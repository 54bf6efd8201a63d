"""Every op under `vmap` of each operand, and every derivative, against the reference."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqxcallback import ops

from . import table
from .families import tagged
from .linear.cases import blocks
from .table import DTYPES, floating, normal, together


F32 = DTYPES[0]
# Batches of two ranks: axes of the user's own, which an operand may lack, and those of vmap.
CASES = {str(row): row(F32) for row in tagged("mapped")}
by_case = pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
DERIVED = {str(row): CASES[str(row)] for row in tagged("derived")}
by_op = pytest.mark.parametrize("case", DERIVED.values(), ids=list(DERIVED))


def stacked(x, size, axis):
    """`size` different examples like `x`, along `axis`."""
    if x.dtype in (np.uint8, np.int8):  # rows in another order
        examples = [np.roll(x, i, axis=0) for i in range(size)]
    elif x.dtype == np.int32:
        examples = [x + i - 1 for i in range(size)]
    elif x.dtype == np.bool_:
        examples = [np.roll(x, i, axis=-1) for i in range(size)]
    elif x.dtype == np.uint32:  # random keys
        examples = [x + np.uint32(i) for i in range(size)]
    else:
        examples = [x + normal(i, x.shape, x.dtype, 0.5) for i in range(size)]
    return np.stack(examples, axis=axis)


# The share of the largest derivative by which others may differ. A GPU has some.
OF_LARGEST = 0.0


def choices(n, *options):
    return [c for c in itertools.product(*[options] * n) if any(axis is not None for axis in c)]


def some(items, count):
    return [items[i] for i in np.random.default_rng(0).permutation(len(items))[:count]]


def check_together(case, calls):
    """Compare the op and its reference in several calls, each of which is how functions are mapped, and operands."""
    maps, args = zip(*calls, strict=True)
    got, want = (
        table.quickly_compiled(together(tuple(mapped(f) for mapped in maps)))(args) for f in (case.op, case.reference)
    )
    for one, exact in zip(got, want, strict=True):
        table.tolerate(one, np.asarray(exact), case.terms)


def batches(args, mapped):
    """Two examples of each operand that is mapped."""
    return [x if axis is None else stacked(x, 2, 0) for x, axis in zip(args, mapped, strict=True)]


@by_case
def test_vmap_of_each_operand(case):
    """Two examples, like the user's own batches: an axis that is taken for another one would fit."""
    every = some(choices(len(case.args), 0, None), 7)
    check_together(
        case, [(functools.partial(jax.vmap, in_axes=mapped), batches(case.args, mapped)) for mapped in every]
    )


@by_case
def test_nested_vmap(case):
    """The outer and the inner `vmap` map different operands, along other axes."""
    every = list(itertools.product(choices(len(case.args), 0, None), repeat=2))

    def nested(f, outer, inner):
        return jax.vmap(jax.vmap(f, inner), outer)

    check_together(
        case,
        [
            (functools.partial(nested, outer=outer, inner=inner), batches(batches(case.args, inner), outer))
            for outer, inner in some(every, 4)
        ],
    )


@by_op
def test_other_axes(case):
    axes = [x.ndim if i % 2 else -1 for i, x in enumerate(case.args)]
    args = [stacked(x, 3, axis) for x, axis in zip(case.args, axes, strict=True)]
    got = table.quickly_compiled(jax.vmap(case.op, axes, out_axes=-1))(*args)
    want = table.quickly_compiled(jax.vmap(case.reference, axes, out_axes=-1))(*args)
    table.tolerate(got, np.asarray(want), case.terms)


@by_op
def test_derivatives(case):
    """Forward and reverse, first and second, alone and mapped."""
    numbers = floating(case.args)
    weights = normal(9, case.want().shape)

    def loss(f):
        return lambda *args: (jnp.asarray(weights) * jnp.sin(f(*args))).sum()

    def of(f):
        gradients = jax.value_and_grad(loss(f), numbers)
        tangents = tuple(
            normal(i, x.shape) if i in numbers else np.zeros(x.shape, jax.dtypes.float0)
            for i, x in enumerate(case.args)
        )
        return lambda *args: (
            gradients(*args),
            jax.jvp(f, args, tangents),
            jax.jvp(jax.grad(loss(f)), args, tangents),
            jax.vmap(jax.grad(loss(f)))(*(jnp.stack([x, x]) for x in args)),
        )

    got = table.quickly_compiled(of(case.op))(*case.args)
    want = table.quickly_compiled(of(case.reference))(*case.args)

    def close(got, want):
        of_largest = OF_LARGEST * float(np.abs(want).max(initial=0))
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=max(2e-5, of_largest))

    jax.tree.map(close, got, want)


@by_op
def test_definitions_against_finite_differences(case, x64):
    """In f64, so that a wrong derivative is not taken for a rounding error."""
    numbers = floating(case.args)
    args = [np.asarray(x, np.float64) if i in numbers else x for i, x in enumerate(case.args)]
    f = table.quickly_compiled(lambda *args: case.reference(*args).astype(jnp.float64).sum())
    gradients = table.quickly_compiled(jax.grad(lambda *args: case.reference(*args).astype(jnp.float64).sum(), numbers))
    for index, gradient in zip(numbers, gradients(*args), strict=True):
        direction = normal(index, args[index].shape, np.float64)
        step = 1e-4 if case.args[-1].dtype != np.uint8 else 1.0  # linear, and computed in f32
        ends = [f(*args[:index], args[index] + sign * step * direction, *args[index + 1 :]) for sign in (1, -1)]
        np.testing.assert_allclose(np.sum(gradient * direction), (ends[0] - ends[1]) / (2 * step), rtol=1e-5, atol=1e-6)


def calls(f, *args):
    """The types of the operands of each of our custom calls in a program, and how many loops it has."""
    text = jax.jit(f).lower(*args).as_text()
    lines = [line for line in text.splitlines() if "custom_call @eqxcallback_" in line]
    types = [line.split(" : (")[1].split(")")[0].replace("tensor<", "").replace(">", "").split(", ") for line in lines]
    return types, text.count("stablehlo.while")


@pytest.mark.parametrize(
    ("f", "axes", "args", "operands", "loops"),
    [
        (ops.rms_norm, (0, None), (normal(1, (7, 5)), normal(2, (5,))), ["7x5xf32", "5xf32"], 0),
        (ops.rms_norm, (0, 0), (normal(1, (7, 5)), normal(2, (7, 5))), ["7x5xf32", "7x5xf32"], 0),
        (
            lambda q, k: ops.attention(q, k, k),
            (0, None),
            (normal(1, (7, 3, 2, 4)), normal(2, (5, 1, 4))),
            ["7x3x2x4xf32", "5x1x4xf32", "5x1x4xf32"],
            0,
        ),
        (
            lambda q, k, n: ops.decode_attention(q, k, k, n),
            (0, None, 0),
            (normal(1, (7, 2, 4)), normal(2, (5, 1, 4)), np.arange(7, dtype=np.int32)),
            ["7x2x4xf32", "5x1x4xf32", "5x1x4xf32", "7xi32"],
            0,
        ),
        (
            ops.rotary_embedding,
            (0, None, None),
            (normal(1, (7, 3, 2, 4)), normal(2, (3, 2)), normal(3, (3, 2))),
            ["7x3x2x4xf32", "3x2xf32", "3x2xf32"],
            0,
        ),
        (
            ops.cache_append,
            (0, 0, None),
            (normal(1, (7, 3, 2)), normal(2, (7, 1, 2)), np.int32(1)),
            ["7x3x2xf32", "7x1x2xf32", "i32"],
            0,
        ),
        (
            lambda x, blocks: ops.quantized_linear(x, blocks, encoding="Q8_0"),
            (0, None),
            (normal(1, (7, 32)), blocks(1, 3, 32, "Q8_0")),
            ["7x32xf32", "3x34xui8"],
            0,
        ),
        (
            lambda x, blocks: ops.quantized_linear(x, blocks, encoding="Q8_0"),
            (None, 0),
            (normal(1, (4, 32)), np.stack([blocks(i, 3, 32, "Q8_0") for i in range(5)])),
            ["4x32xf32", "5x3x34xui8"],
            0,
        ),
    ],
)
def test_what_the_kernel_gets_under_vmap(f, axes, args, operands, loops):
    """One call for all examples, and what they share stays one."""
    assert calls(jax.vmap(f, axes), *args) == ([operands], loops)
