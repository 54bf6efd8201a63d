"""Kernels that say which part of the operands they were given, and programs of them on several devices."""

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

import eqxcallback as eqxc
from eqxcallback import ops
from eqxcallback.ops.norm import _reference as reference

from ..transform.library import SAXPY


# ("forward" or "backward", the shape of x on that device), of each call. Appending is safe in all threads.
calls: list[tuple[str, tuple[int, ...]]] = []


class Scale(eqxc.Layer):
    weight: jax.Array
    vmap_method = "fold"

    def kernel(self, ctx, out, x):
        calls.append(("forward", x.shape))
        np.asarray(out)[...] = np.tanh(np.asarray(x) * np.asarray(self.weight))

    def reference(self, x):
        return jnp.tanh(x * self.weight)


class ScaleBackward(Scale):
    """With a kernel for the gradients."""

    def backward(self, ctx, grads, args, out, cotangents):
        calls.append(("backward", args[0].shape))
        inner = np.asarray(cotangents) * (1 - np.asarray(out) ** 2)
        add(grads[0].weight, inner * np.asarray(args[0]))
        add(grads[1], inner * np.asarray(self.weight))


def add(grad, value):
    """Write a gradient, summed over the leading axes if it has none."""
    if grad is not None:
        array = np.asarray(grad)
        array[...] = value.sum(tuple(range(value.ndim - array.ndim)))


scale_rows = eqxc.Op(
    "scale_rows",
    {"cpu": eqxc.NativeKernel("ScaleRows", SAXPY)},
    lambda x, weight, *, shared: x * weight,
    vmap_method="broadcast_all",
)


@dataclasses.dataclass(frozen=True)
class Lane:
    """One function of a weight and a vector: by a kernel, and in pure JAX."""

    name: str
    call: Callable[..., Any]
    reference: Callable[..., Any]
    per_gradient: int = 0  # calls of kernels, where calls are recorded, for one device and one gradient

    def __str__(self):
        return self.name


def tanh(weight, x):
    return jnp.tanh(x * weight)


LANES = [
    Lane("python", lambda weight, x: Scale(weight)(x), tanh, 1),
    Lane("python-backward", lambda weight, x: ScaleBackward(weight)(x), tanh, 2),
    Lane("native", lambda weight, x: scale_rows(x, weight, shared=False), lambda weight, x: x * weight),
    Lane(
        "package",
        lambda weight, x: ops.rms_norm(x, weight),
        lambda weight, x: reference.rms_norm(x, jnp.asarray(weight), eps=1e-5),
    ),
]


def twice(function):
    """Over two axes of x."""
    return jax.vmap(jax.vmap(function, (None, 0)), (None, 0))


def squares(function):
    return lambda *args: jnp.sum(function(*args) ** 2)


def normal(*shape) -> Any:
    return np.random.default_rng(shape).standard_normal(shape).astype(np.float32)


def mesh_of(*sizes, names="ab", kind=AxisType.Auto, devices=None):
    return jax.make_mesh(sizes, tuple(names[: len(sizes)]), axis_types=(kind,) * len(sizes), devices=devices)


def put(x, mesh, *spec) -> Any:
    return jax.device_put(x, jax.NamedSharding(mesh, jax.P(*spec)))


@dataclasses.dataclass(frozen=True)
class Ran:
    """A compiled program, and what happened when it ran."""

    values: Any
    calls: Counter
    gathers: int
    sums: int


def run(function, *args, **options) -> Ran:
    """**Arguments:** `options` are of `jax.jit`."""
    program = jax.jit(function, **options).lower(*args).compile()
    text = program.as_text()
    calls.clear()
    values = jax.block_until_ready(program(*args))
    return Ran(values, Counter(calls), _count(text, "all-gather"), _count(text, "all-reduce"))


def _count(text, operation):
    return text.count(f" {operation}(") + text.count(f" {operation}-start(")


def assert_close(got, want, rtol=2e-5, atol=2e-5):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=rtol, atol=atol)


def run_and_compare(function, lane, *args, **options) -> Ran:
    """`function(f)`, a function of `f`, with the kernel for `f`, and in pure JAX on one device."""
    ran = run(function(lane.call), *args, **options)
    on_one = jax.tree.map(np.asarray, args)
    assert_close(ran.values, jax.jit(function(lane.reference), **options)(*on_one))
    return ran


def spec_of(array) -> Any:
    """Without the axes at the end that are whole."""
    spec = list(array.sharding.spec)
    while spec and spec[-1] is None:
        spec.pop()
    return jax.P(*spec)
