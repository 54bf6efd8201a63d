"""The kernels in Python against the references: every op, dtype, way to batch and derivative."""

import functools
import importlib
import inspect
import itertools
import pickle
import pkgutil
import re
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import eqxcallback as eqxc
from eqxcallback import PythonKernel, ops

from . import table
from .attention.cases import of_pairs
from .families import tagged
from .table import normal


pytestmark = pytest.mark.any_jax_version

F32, BF16, F16, F64 = (np.dtype(dtype) for dtype in (np.float32, ml_dtypes.bfloat16, np.float16, np.float64))
TOLERANCES = {F32: 2e-6, BF16: 2.0**-7, F16: 2.0**-9, F64: 1e-12}


# Of each function, with operands of a dtype. No two sizes are equal.
ROWS = tagged("python")


@functools.cache
def chosen(op, implementation):
    """One function for each: JAX compiles it once."""
    return functools.partial(op, implementation=implementation)


def close(got, want, factor=1.0):
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (g.dtype, g.shape) == (w.dtype, w.shape)
        if g.dtype == jax.dtypes.float0:
            continue
        tolerance = factor * TOLERANCES.get(np.dtype(g.dtype), 0)
        g, w = np.asarray(g, np.float64), np.asarray(w, np.float64)
        largest = np.max(np.abs(w), initial=1, where=np.isfinite(w))
        np.testing.assert_allclose(g, w, rtol=tolerance, atol=tolerance * largest)


def test_every_op_has_one():
    tested = {getattr(case.op, "func", case.op) for case in (row(F32) for row in ROWS)} - {of_pairs}
    takes = {
        value
        for value in vars(ops).values()
        if inspect.isfunction(value) and {"implementation", "options"} & set(inspect.signature(value).parameters)
    }
    assert tested == takes


@pytest.mark.parametrize("dtype", [F32, BF16, F16, F64], ids=str)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_values(row, dtype, x64):
    case = row(dtype)
    if dtype == F64 and "quantized" in row.name:
        with pytest.raises(ValueError, match="float32, bfloat16 or float16"):
            case.op(*case.args, implementation="python")
        return
    before = [arg.tobytes() for arg in case.args]
    got = chosen(case.op, "python")(*case.args)
    close(got, table.quickly_compiled(case.reference)(*case.args))
    assert [arg.tobytes() for arg in case.args] == before


# Kernels see batches as an op's modes say: examples are few, so that each has several maps.


def maps(count):
    every = [axes for axes in itertools.product((0, None), repeat=count) if 0 in axes]
    return [every[i] for i in np.random.default_rng(0).permutation(len(every))[:3]]


def stacked(x):
    if x.dtype == np.uint8:  # blocks: rows in another order
        return np.stack([x, np.roll(x, 1, axis=0)])
    if x.dtype in (np.int32, np.int8):
        return np.stack([x, x - 1])
    return np.stack([x, x + normal(7, x.shape, x.dtype, 0.5)])


@pytest.mark.parametrize("row", tagged("python mapped"), ids=str)
def test_vmap(row):
    """One map of some operands, and two of different ones."""
    case = row(F32)
    args = [arg[:5] if arg.shape[:1] == (1027,) else arg for arg in case.args]
    outer, inner = maps(len(args))[0], maps(len(args))[-1]
    once = [arg if axis is None else stacked(arg) for arg, axis in zip(args, inner, strict=True)]
    twice = [arg if axis is None else stacked(arg) for arg, axis in zip(once, outer, strict=True)]

    def both(function):
        one = jax.vmap(function, inner)
        return table.quickly_compiled(lambda once, twice: (one(*once), jax.vmap(one, outer)(*twice)))(once, twice)

    close(both(chosen(case.op, "python")), both(case.reference))


@pytest.mark.parametrize("row", tagged("python derived"), ids=str)
def test_gradients(row):
    case = row(F32)
    numbers = tuple(i for i, arg in enumerate(case.args) if arg.dtype == F32)

    def loss(f):
        return lambda *args: sum(jnp.sin(out).sum() for out in jax.tree.leaves(f(*args)))

    got, want = (
        table.quickly_compiled(jax.grad(loss(f), numbers))(*case.args)
        for f in (chosen(case.op, "python"), case.reference)
    )
    close(got, want, factor=10)


@pytest.mark.parametrize("row", tagged("python checked"), ids=str)
def test_check(row):
    case = row(F32)
    rows = ("inputs untouched", "outputs written", "reference", "aliasing")

    def named(*args):
        return chosen(case.op, "python")(*args)

    eqxc.testing.check(named, *case.args, reference=case.reference, only=rows)


def test_sums_and_caches_are_in_place():
    """A donated residual becomes the sum, a donated cache the longer one."""
    x, residual, cache, row = (jnp.ones(shape) for shape in ((3, 5), (3, 5), (7, 2), (1, 2)))
    steps: list[Any] = [
        # JAX gives what is donated to the first result of its type.
        (lambda x, r: ops.add_rms_norm(x, r, implementation="python")[::-1], 1, (x, residual)),
        (lambda c, r: ops.cache_append(c, r, 2, implementation="python"), 0, (cache, row)),
    ]
    for step, donated, args in steps:
        pointer = args[donated].unsafe_buffer_pointer()
        out = jax.tree.leaves(jax.jit(step, donate_argnums=donated)(*args))[0]
        assert out.unsafe_buffer_pointer() == pointer


MODULES = [
    importlib.import_module(name)
    for _, name, _ in pkgutil.walk_packages(ops.__path__, "eqxcallback.ops.")
    if name.rpartition(".")[2].startswith("_numpy")
]
KERNELS = {
    f"{module.__name__}.{name}": value
    for module in MODULES
    for name, value in vars(module).items()
    if isinstance(value, PythonKernel)
}


@pytest.mark.parametrize("name", sorted(KERNELS))
def test_another_process_finds_it_by_name(name):
    """As exported programs do."""
    kernel = KERNELS[name].body
    assert pickle.loads(pickle.dumps(kernel)) is kernel


# On a GPU the bodies run with CuPy: here it is only known which of its functions they call.


def test_bodies_use_what_cupy_has():
    cupy = pytest.importorskip("cupy")
    called = set()
    for module in MODULES:
        called |= set(re.findall(r"xp\.(\w+)\(", inspect.getsource(module)))
    assert {"where", "exp"} <= called
    assert [name for name in called if not hasattr(cupy, name)] == []
