"""Norms, forward and backward, on a CPU."""

import dataclasses
import functools
import itertools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ..ops.table import DTYPES, normal
from . import kernels
from .checking import ROWS, SEEDS, check, want, want_gradients
from .kernels import F32, results


EPS = 1e-5


def test_blocks_of_the_smallest_gpu(monkeypatch):
    x = np.zeros((10_000, 4096), np.float32)

    def parts():
        (launch, _) = kernels.norm_backward(x, x[0], None, x, x, center=False).launches
        return launch.grid[0]

    monkeypatch.setattr(
        jax,
        "local_devices",
        lambda backend: [SimpleNamespace(core_count=n, compute_capability="8.0") for n in (148, 108)],
    )
    here = parts()
    monkeypatch.undo()
    assert here * 132 == parts() * 108


def norm(x, weight, bias, center):
    if center:
        x = x - jnp.mean(x, axis=-1, keepdims=True)
    y = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + EPS)
    if weight is not None:
        y = y * jnp.broadcast_to(weight, y.shape)
    return y if bias is None else y + jnp.broadcast_to(bias, y.shape)


@dataclasses.dataclass(frozen=True)
class Norm:
    center: bool
    has_weight: bool = False
    has_bias: bool = False

    def __str__(self):
        parts = ["layer_norm" if self.center else "rms_norm", "weight" * self.has_weight, "bias" * self.has_bias]
        return "-".join(part for part in parts if part)

    def example(self, shape, dtype) -> Any:
        """`x, weight, bias`. The mean of `x` is not near 0: it matters whether it is taken off."""
        weight = normal(2, shape[-1:]) if self.has_weight else None
        bias = normal(3, shape[-1:]) if self.has_bias else None
        return normal(1, shape, dtype) + np.asarray(0.5, dtype), weight, bias

    def forward(self, x, weight, bias):
        return kernels.norm(x, weight, bias, center=self.center)

    def backward(self, x, weight, bias, dout, needed: Any = kernels.ALL, out: Any = None):
        out = np.full_like(x, np.nan) if out is None else out  # it is not read
        return kernels.norm_backward(x, weight, bias, out, dout, center=self.center, needed=needed)

    def wanted(self, x, weight, bias):
        return want(_reference(self), *(array for array in (x, weight, bias) if array is not None))

    def wanted_gradients(self, dout, *args):
        """`None` for those of absent arguments."""
        gradients = iter(want_gradients(_reference(self), dout, *(array for array in args if array is not None)))
        return [None if array is None else next(gradients) for array in args]


@functools.cache
def _reference(which: Norm) -> Any:
    """`norm` of the arrays that there are."""

    def of(x, *parameters):
        left = iter(parameters)
        weight = next(left) if which.has_weight else None
        return norm(x, weight, next(left) if which.has_bias else None, which.center)

    return of


def check_gradients(got, expected, needed, terms):
    for i, (mine, gradient) in enumerate(zip(got, expected, strict=True)):
        if gradient is None or i not in needed:
            assert mine is None
        else:
            check(mine, gradient, terms, scale=16.0)


ALL = [Norm(*flags) for flags in itertools.product([False, True], repeat=3)]
RMS_NORM, LAYER_NORM = Norm(False, True), Norm(True, True, True)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
by_norm = pytest.mark.parametrize("which", ALL, ids=str)
USUAL = {"rms_norm": RMS_NORM, "layer_norm": LAYER_NORM}
by_usual_norm = pytest.mark.parametrize("which", USUAL.values(), ids=str)


@by_dtype
@by_norm
@pytest.mark.parametrize("shape", [(3, 264), (2, 1001)], ids=str)
def test_forward(shape, which, dtype):
    args = which.example(shape, dtype)
    (got,) = results(which.forward(*args))
    check(got, which.wanted(*args), shape[-1])


@pytest.mark.parametrize("row", [row for op in USUAL for row in ROWS[op]], ids=str)
def test_forward_of_any_size(row):
    which, (shape,) = USUAL[row.make.__name__], row.arguments
    for dtype in DTYPES:
        args = which.example(shape, dtype)
        expected = which.wanted(*args)
        if shape == (1, 1) and which.center:
            expected = args[2].reshape(shape)  # the reference divides rounding errors
        check(results(which.forward(*args), seed=3)[0], expected, shape[-1])


@by_dtype
@by_norm
@pytest.mark.parametrize("shape", [(19, 40), (3, 1001)], ids=str)
def test_backward(shape, which, dtype):
    args, dout = which.example(shape, dtype), normal(9, shape, dtype)
    got = results(which.backward(*args, dout))
    check_gradients(got, which.wanted_gradients(dout, *args), kernels.ALL, shape[-1] + shape[0])


# The device says whether the sums of a block fit into shared memory: of 8,200 columns two take 64 KiB and more.
@by_usual_norm
@pytest.mark.parametrize(("arch", "most"), [("sm_75", 64 << 10), ("sm_80", 96 << 10)])
def test_sums_in_either_memory(arch, most, which, monkeypatch):
    monkeypatch.setenv("EQXCALLBACK_CUDA_ARCH", arch)
    args, dout = which.example((5, 8200), F32), normal(9, (5, 8200))
    call = which.backward(*args, dout)
    wanted = 4 * 8200 * (1 + which.has_bias)
    assert call.launches[0].shared_bytes == (wanted if wanted <= most else 0)
    check_gradients(results(call), which.wanted_gradients(dout, *args), kernels.ALL, 8205)


@by_usual_norm
@pytest.mark.parametrize("factor", [2.0**40, 2.0**63, 2.0**66, 2.0**100, 2.0**124])
def test_rows_whose_squares_overflow(factor, which):
    """Their norm is that of the small row, and its derivative is inverse to their size."""
    shape = (3, 257)
    (x, weight, bias), dout = which.example(shape, F32), normal(9, shape)
    factors = np.array([[1.0], [factor], [factor]], np.float32)
    small, large = (x, weight, bias), (x * factors, weight, bias)
    check(results(which.forward(*large))[0], which.wanted(*small), shape[-1])
    dx, *others = results(which.backward(*large, dout))
    expected = which.wanted_gradients(dout, *small)
    check_gradients([dx * factors, *others], expected, kernels.ALL, sum(shape))


@by_usual_norm
def test_a_row_of_one_large_value(which):
    x = np.full((2, 70), 3e38, np.float32)
    weight, bias = (None if parameter is None else parameter[:70] for parameter in which.example((2, 70), F32)[1:])
    y: Any = 0.0 if which.center else weight
    want = np.broadcast_to(y if bias is None else y + bias, x.shape)
    check(results(which.forward(x, weight, bias))[0], want, 70)


@by_norm
@pytest.mark.parametrize("shape", [(19, 40), (3, 257)], ids=str)
def test_gradients_that_are_not_needed(shape, which):
    """Each set of them. A pointer for one that is not needed is null: to write there ends the process."""
    args, dout = which.example(shape, F32), normal(9, shape)
    expected = which.wanted_gradients(dout, *args)
    there = [i for i, array in enumerate(args) if array is not None]
    for count in range(1, len(there)):
        for needed in itertools.combinations(there, count):
            call = which.backward(*args, dout, needed=needed)
            sums = sum(i > 0 for i in needed)
            assert call.workspaces[0][0][1] == sums
            assert len(call.launches) == (2 if sums else 1)
            for options in ({}, {"misaligned": True}):
                check_gradients(results(call, **options), expected, needed, sum(shape))


# The sums of 25,003 columns, or twice 12,800, are too large for shared memory.
@pytest.mark.parametrize(
    ("which", "shape"),
    [
        *((RMS_NORM, shape) for shape in ((1, 5), (300, 33), (3, 4096), (2, 25_003))),
        *((LAYER_NORM, shape) for shape in ((700, 8), (2, 12_800))),
    ],
    ids=str,
)
def test_backward_of_any_size(shape, which):
    args, dout = which.example(shape, F32), normal(9, shape)
    got = results(which.backward(*args, dout), seed=5)
    check_gradients(got, which.wanted_gradients(dout, *args), kernels.ALL, shape[-1] + shape[0])


@by_usual_norm
def test_the_order_of_threads_does_not_matter(which):
    args = which.example((7, 1000), F32)
    for call in (which.forward(*args), which.backward(*args, args[0])):
        first, *others = ([x.tobytes() for x in results(call, seed) if x is not None] for seed in SEEDS)
        for other in others:
            assert first == other


@by_dtype
@by_usual_norm
def test_any_alignment_and_number_of_parts(which, dtype):
    args = which.example((19, 40), dtype)
    (got,) = results(which.forward(*args), misaligned=True)
    check(got, which.wanted(*args), 40)
    call = which.backward(*args, args[0])
    (rows, size, _, *more), (first, second) = call.scalars, call.launches
    (((_, *sums), sums_dtype),) = call.workspaces
    expected = which.wanted_gradients(args[0], *args)
    for parts in (1, 3):
        other = dataclasses.replace(
            call,
            launches=[dataclasses.replace(first, grid=(parts,)), second],
            scalars=[rows, size, parts, *more],
            workspaces=[((parts, *sums), sums_dtype)],
        )
        check_gradients(results(other, misaligned=True), expected, kernels.ALL, 60)


@by_norm
def test_no_rows(which):
    args = which.example((0, 40), F32)
    assert results(which.forward(*args))[0].shape == (0, 40)
    for parameter, gradient in zip(args[1:], results(which.backward(*args, args[0]))[1:], strict=True):
        if parameter is None:
            assert gradient is None
        else:
            np.testing.assert_array_equal(gradient, np.zeros(40))


@by_dtype
def test_values_at_the_edges(dtype):
    big = 1e18 if dtype != np.float16 else 6e4
    x = normal(1, (6, 40), dtype)
    x[0], x[1] = big, 0
    x[2, 3], x[3, 5], x[4, 39] = np.nan, np.inf, -np.inf
    args = x, np.ones(40, np.float32), None
    for which, first in ((RMS_NORM, 0), (Norm(True, True), 1)):
        check(results(which.forward(*args))[0][first:], which.wanted(*args)[first:], 40)
