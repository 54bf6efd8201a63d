"""Kernels in Python keep to what CuPy has: its functions and their parameters, its loops, and no arrays of NumPy among its own.

They run here on NumPy, which refuses what CuPy refuses. CuPy itself computes nothing without a GPU.
"""

import functools
import inspect

import jax
import ml_dtypes
import numpy as np
import pytest

from eqxcallback import _ext, ops
from eqxcallback.ops import _numpy

from . import table
from .families import tagged
from .test_host import chosen, close


cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
pytestmark = pytest.mark.any_jax_version

BF16 = np.dtype(ml_dtypes.bfloat16)


class CupyArray(np.ndarray):
    """Refuses what CuPy's arrays refuse."""

    def __array_ufunc__(self, ufunc, method, *inputs, out=(), **options):
        for x in (*inputs, *out):
            if isinstance(x, np.ndarray) and not isinstance(x, CupyArray):
                raise TypeError(f"{ufunc.__name__} of an array of NumPy and one of CuPy")
            if getattr(x, "dtype", None) == BF16:
                raise TypeError(f"{ufunc.__name__} has no loop for bfloat16 in CuPy")
        inputs, out = ([np.asarray(x) if isinstance(x, np.ndarray) else x for x in arrays] for arrays in (inputs, out))
        return _as_cupy(getattr(ufunc, method)(*inputs, **({"out": tuple(out)} if out else {}), **options))

    def __setitem__(self, index, value):
        if isinstance(value, np.ndarray) and not isinstance(value, CupyArray):
            raise TypeError("an array of NumPy in one of CuPy")
        super().__setitem__(index, value)


def _as_cupy(result):
    if isinstance(result, (tuple, list)):
        return type(result)(map(_as_cupy, result))
    return np.asarray(result).view(CupyArray) if isinstance(result, (np.ndarray, np.generic)) else result


class Cupy:
    """NumPy in the place of `cupy`, with the functions and the parameters that CuPy has."""

    errstate = np.errstate  # which our own code asks of NumPy
    ndarray = np.ndarray

    def __getattr__(self, name):
        mine, real = getattr(np, name), getattr(cupy, name)
        if not callable(mine) or isinstance(mine, type):
            return mine

        @functools.wraps(mine)
        def call(*args, **options):
            if not isinstance(real, cupy.ufunc):
                inspect.signature(real).bind(*args, **options)
            return _as_cupy(mine(*args, **options))

        return call


@pytest.fixture
def on_cupy(monkeypatch):
    numpy = _ext.Buffer.numpy
    monkeypatch.setattr(_ext.Buffer, "numpy", lambda buffer: numpy(buffer).view(CupyArray))
    monkeypatch.setattr(_numpy, "np", Cupy())
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.parametrize("dtype", [BF16, np.dtype(np.float32)], ids=str)
@pytest.mark.parametrize("row", tagged("python"), ids=str)
def test_values(row, dtype, on_cupy):
    case = row(dtype)
    close(chosen(case.op, "python")(*case.args), table.quickly_compiled(case.reference)(*case.args))


def test_weights_of_16_bits(on_cupy):
    x, weight, bias = (table.normal(i, (2, 17)[i > 1 :], BF16) for i in (1, 2, 3))
    norm = functools.partial(ops.layer_norm, weight=weight, bias=bias)
    close(norm(x, implementation="python"), norm(x, implementation="reference"))


def test_what_cupy_lacks_is_refused(on_cupy):
    x = np.ones((2, 3), BF16).view(CupyArray)
    with pytest.raises(TypeError, match="no loop for bfloat16"):
        np.add(x, x)
    with pytest.raises(TypeError, match="array of NumPy and one of CuPy"):
        np.add(x.astype(np.float32), np.ones(3))
    with pytest.raises(TypeError, match="unexpected keyword argument 'initial'"):
        _numpy.np.max(x, initial=0)
