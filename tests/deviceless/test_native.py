"""Handlers of a user's library for CUDA."""

import ctypes

import jax
import numpy as np
import pytest
from jax.errors import JaxRuntimeError

import eqxcallback as eqxc
from eqxcallback import xla

from .programs import ONE, X, calls_of, library, reports, thunks


def op(symbol):
    kernel = eqxc.NativeKernel(symbol, library=library(), aliases={"x": 0})
    return eqxc.Op(symbol.lower(), kernels={"cuda": kernel}, reference=lambda x: x + 1.0)


@pytest.mark.parametrize(("symbol", "compatible"), [("Captured", True), ("Plain", False)])
def test_the_trait_decides(symbol, compatible):
    assert calls_of(op(symbol), donate_argnums=0, **ONE) == [compatible]


def test_reports():
    captured, plain = op("Captured"), op("Plain")
    first, second = reports(eqxc.jit_captured(lambda x: plain(captured(x)), donate="all"))
    assert first == (True, "recorded into a command buffer of 1 thunk")
    assert second == (
        False,
        "its handler is not registered as compatible with command buffers (kCmdBufferCompatible)",
    )
    (alone,) = reports(jax.jit(captured, donate_argnums=0))
    assert alone[1].startswith("its run has 1 thunk; XLA records those of at least 5 ")


@pytest.fixture(scope="module")
def checked():
    handlers = ctypes.CDLL(str(library()))
    bundle = {"instantiate": jax.ffi.pycapsule(handlers.Check), "execute": jax.ffi.pycapsule(handlers.LaunchChecked)}
    jax.ffi.register_ffi_target("eqxcallback_test_checked", bundle, platform="CUDA")
    return lambda x, block: jax.ffi.ffi_call("eqxcallback_test_checked", x)(x, block=np.int64(block))


def test_errors_of_instantiate_are_those_of_the_compile(checked):
    assert calls_of(lambda x: checked(x, 1024), **ONE) == [True]
    with pytest.raises(JaxRuntimeError, match=r"INVALID_ARGUMENT.*block is too large"):
        calls_of(lambda x: checked(x, 1025))
    report = eqxc.inspect(lambda x: checked(x, 1025), X, platform="cuda")
    assert (report.stage, report.calls[0].captured) == ("lowered", None)
    assert "block is too large" in report.not_compiled


def test_exported_programs():
    captured = op("Captured")
    exported = eqxc.export(lambda x: captured(captured(x)), platforms=["cuda"])(X)
    program = jax.export.deserialize(exported.serialize()).call
    compiled = xla.compile_deviceless(jax.jit(program, donate_argnums=0), X, compiler_options=ONE)
    assert [thunk.kind for thunk in thunks(compiled)] == ["kCommandBuffer", "kCustomCall", "kCustomCall"]
