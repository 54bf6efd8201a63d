"""CuPy in the python lane, without a GPU: real arrays over memory that is the host's, and a stand-in for its streams.

What computes is in tests/gpu/test_cupy.py.
"""

import sys
import types

import ml_dtypes
import numpy as np
import pytest

import eqxcallback as eqxc

from .fake_gpu import F32, OK, run_on_fake_gpu


# As XLA numbers them.
DTYPES = {
    **{"bool": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint8": 6, "uint16": 7, "uint32": 8, "uint64": 9},
    **{"float16": 10, "float32": F32, "float64": 12, "bfloat16": 16, "complex64": 15, "complex128": 18},
    **{"float8_e5m2": 19, "float8_e4m3fn": 20, "float8_e4m3b11fnuz": 23, "float8_e5m2fnuz": 24, "float8_e4m3fnuz": 25},
    **{"float8_e4m3": 28, "float8_e3m4": 29, "float8_e8m0fnu": 33},
}


def run(fake_xla, body, x=None, dtype=F32, **options):
    """The error's text, if there is one."""
    code, message, _ = run_on_fake_gpu(fake_xla, body, np.zeros(3, np.float32) if x is None else x, dtype, **options)
    assert (code == OK) == (message == "")
    return message


@pytest.fixture
def cupy():
    return pytest.importorskip("cupy", reason="CuPy is not installed: it comes with the extras cuda12 and cuda13")


# Arrays.


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("shape", [(2, 3), (), (0, 3)], ids=str)
def test_arrays(fake_xla, cupy, name, shape):
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    x = np.ones(shape, dtype)
    seen = []

    def callback(ctx, out, x):
        for buffer in (out, x):
            array = buffer.cupy()
            assert type(array) is cupy.ndarray
            assert (array.dtype, array.shape, array.nbytes) == (dtype, shape, buffer.nbytes)
            assert array.flags.c_contiguous
            assert array.device.id == ctx.device_ordinal
            if buffer.size:
                assert array.strides == buffer.strides
            seen.append((array.data.ptr, buffer._address))

    assert run(fake_xla, callback, x, DTYPES[name]) == ""
    assert len(seen) == 2
    assert all(pointer == address for pointer, address in seen)


def test_an_array_that_is_kept_holds_its_buffer(fake_xla, cupy):
    kept = []
    assert run(fake_xla, lambda ctx, out, x: kept.append((x, x.cupy()))) == ""
    buffer, array = kept[0]
    assert array.data.mem._owner is buffer
    with pytest.raises(RuntimeError, match="after its kernel returned"):
        buffer.cupy()


def test_on_a_cpu():
    with pytest.raises(TypeError, match=r"in the memory of a CPU. Use buffer.numpy\(\)"):
        eqxc.Buffer(np.zeros(3)).cupy()


# Streams.


def test_the_stream_protocol(fake_xla):
    seen = []
    assert run(fake_xla, lambda ctx, out, x: seen.append(ctx.__cuda_stream__()), stream=0xABC0) == ""
    assert seen == [(0, 0xABC0)]


def test_the_stream_as_one_of_cupy(fake_xla, cupy):
    seen = []

    def callback(ctx, out, x):
        stream = ctx.cupy_stream()
        seen.append((type(stream), stream.ptr))

    assert run(fake_xla, callback) == ""
    assert seen == [(cupy.cuda.Stream, 0xABC0)]


class StandIn:
    """In place of CuPy's streams and devices: says when each is entered and left."""

    def __init__(self, events, name):
        self.events, self.name = events, name

    def __enter__(self):
        self.events.append(f"enter {self.name}")
        if self.name in self.events[0]:
            raise RuntimeError(f"cannot enter {self.name}")
        return self

    def __exit__(self, kind, error, trace):
        self.events.append(f"leave {self.name}" + ("" if kind is None else f" by {kind.__name__}"))


@pytest.fixture
def events(monkeypatch):
    """The first one is what fails to be entered, or nothing."""
    log = [""]

    def from_external(stream):
        version, address = stream.__cuda_stream__()
        assert version == 0
        return StandIn(log, f"stream {address:#x}")

    cuda = types.SimpleNamespace(
        Device=lambda ordinal: StandIn(log, f"device {ordinal}"),
        Stream=types.SimpleNamespace(from_external=from_external),
    )
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(cuda=cuda))
    return log


ENTER, LEAVE = ["enter device 3", "enter stream 0xabc0"], ["leave stream 0xabc0", "leave device 3"]


def test_entering(fake_xla, events):
    def callback(ctx, out, x):
        with ctx as entered:
            assert entered is ctx
            events.append("body")

    assert run(fake_xla, callback) == ""
    assert events[1:] == [*ENTER, "body", *LEAVE]


def test_nested(fake_xla, events):
    def callback(ctx, out, x):
        with ctx, ctx:
            events.append("body")
        with ctx:
            events.append("again")

    assert run(fake_xla, callback) == ""
    assert events[1:] == [*ENTER, *ENTER, "body", *LEAVE, *LEAVE, *ENTER, "again", *LEAVE]


def test_an_exception_passes(fake_xla, events):
    def callback(ctx, out, x):
        with ctx:
            raise ValueError("no")

    assert "ValueError: no" in run(fake_xla, callback)
    assert events[1:] == [*ENTER, *(f"{leave} by ValueError" for leave in LEAVE)]


def test_a_stream_that_cannot_be_entered(fake_xla, events):
    events[0] = "stream 0xabc0"
    assert "cannot enter stream" in run(fake_xla, lambda ctx, out, x: ctx.__enter__())
    assert events[1:] == [*ENTER, "leave device 3"]


def test_a_device_that_cannot_be_entered(fake_xla, events):
    events[0] = "device 3"
    assert "cannot enter device" in run(fake_xla, lambda ctx, out, x: ctx.__enter__())
    assert events[1:] == ENTER[:1]


def test_left_more_often_than_entered(fake_xla, events):
    assert "left more often than entered" in run(fake_xla, lambda ctx, out, x: ctx.__exit__(None, None, None))


def test_a_context_that_is_never_left_is_not_that_of_the_next_call(fake_xla, events):
    seen = []

    def callback(ctx, out, x):
        seen.append(id(ctx))
        if len(seen) == 1:
            ctx.__enter__()
        else:
            ctx.__exit__(None, None, None)

    assert run(fake_xla, callback) == ""
    assert "left more often than entered" in run(fake_xla, callback)


@pytest.mark.parametrize("use", ["with", "cupy_stream", "cupy"])
def test_without_cupy(fake_xla, monkeypatch, use):
    monkeypatch.setitem(sys.modules, "cupy", None)

    def callback(ctx, out, x):
        if use == "with":
            with ctx:
                pass
        elif use == "cupy_stream":
            ctx.cupy_stream()
        else:
            out.cupy()

    who = "Buffer.cupy" if use == "cupy" else "ExecutionContext"
    text = run(fake_xla, callback)
    assert f"ImportError: {who}: CuPy cannot be imported. Install eqxcallback[cuda12] or eqxcallback[cuda13]" in text


def test_on_a_cpu_there_is_nothing_to_enter(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    ctx = eqxc.ExecutionContext()
    with ctx as entered, ctx:
        assert entered is ctx
    with pytest.raises(ValueError, match="no"), ctx:
        raise ValueError("no")
    for use in (ctx.cupy_stream, ctx.__cuda_stream__):
        with pytest.raises(TypeError, match="this call is on a CPU, which has no stream"):
            use()
