"""Functions of the TVM-FFI ABI in XLA's plan for a GPU."""

import pytest

import eqxcallback as eqxc

from ..tvm_ffi import library
from .programs import ONE, calls_of


@pytest.mark.parametrize("compatible", [True, False])
def test_what_is_declared_decides(compatible):
    library.build()
    kernel = eqxc.TvmFfiKernel(library.PATH, "saxpy", ("x", "x", "out", 2.0), command_buffer_compatible=compatible)
    op = eqxc.Op("saxpy", kernels={"cuda": kernel}, reference=lambda x: 3.0 * x)
    assert calls_of(op, **ONE) == [compatible]
