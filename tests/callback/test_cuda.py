"""The GPU side of the python lane on a machine without one: the lowering, and the handler itself on a made-up frame."""

import ctypes

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from .fake_gpu import BF16, F32, F64, INTERNAL, OK, S4, UNIMPLEMENTED, handler, run_on_fake_gpu
from .kernels import add_one, callback_like


X = jnp.zeros((4, 8))


def lower_for_cuda(f, *args, **jit_options):
    return jax.jit(f, **jit_options).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def test_lowering():
    text = lower_for_cuda(callback_like(add_one, X), X)
    assert "custom_call @eqxcallback_python(" in text
    assert "key = " in text
    assert "output_operand_aliases" not in text


def test_lowering_with_capture():
    text = lower_for_cuda(callback_like(add_one, X, command_buffer_compatible=True), X)
    assert "custom_call @eqxcallback_python_captured(" in text
    on_cpu = jax.jit(callback_like(add_one, X, command_buffer_compatible=True)).lower(X).as_text()
    assert "custom_call @eqxcallback_python(" in on_cpu


def test_lowering_with_aliases_and_donation():
    f = callback_like(add_one, X, input_output_aliases={0: 0})
    text = lower_for_cuda(f, X, donate_argnums=0)
    assert (
        "output_operand_aliases = [#stablehlo.output_operand_alias<output_tuple_indices = [], operand_index = 0" in text
    )
    assert "tf.aliasing_output = 0" in text


def test_lowering_with_an_effect():
    assert "has_side_effect = true" in lower_for_cuda(callback_like(add_one, X, has_side_effect=True), X)


def test_lowering_for_both_platforms():
    """JAX's own callback raises NotImplementedError."""
    f = jax.jit(callback_like(add_one, X)).trace(X)
    text = f.lower(lowering_platforms=("cpu", "cuda")).as_text()
    assert text.count("custom_call @eqxcallback_python(") == 2


def test_platform_dependent():
    def f(x):
        return jax.lax.platform_dependent(x, cuda=callback_like(add_one, X), default=lambda x: x + 1)

    assert "eqxcallback_python" in lower_for_cuda(f, X)
    assert "eqxcallback_python" not in jax.jit(f).lower(X).as_text()
    np.testing.assert_array_equal(jax.jit(f)(X), X + 1)


class Memory:
    """An array as a GPU library makes it of `__cuda_array_interface__`, on the host memory that is really behind it."""

    def __init__(self, interface):
        (pointer, _), shape = interface["data"], interface["shape"]
        count = int(np.prod(shape))
        self.array = np.ctypeslib.as_array((ctypes.c_float * count).from_address(pointer)).reshape(shape)


@pytest.mark.parametrize("target", ["eqxcallback_python", "eqxcallback_python_captured"])
def test_the_handler(fake_xla, target):
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    seen = {}

    def callback(ctx, out, x):
        seen.update(
            stream=ctx.stream, ordinal=ctx.device_ordinal, platform=ctx.platform, stage=ctx.stage, repr=repr(ctx)
        )
        seen.update(inner=x.__cuda_array_interface__, outer=out.__cuda_array_interface__, device=x.__dlpack_device__())
        Memory(out.__cuda_array_interface__).array[...] = Memory(x.__cuda_array_interface__).array + 1

    code, message, out = run_on_fake_gpu(fake_xla, callback, x, F32, target=target)
    assert (code, message) == (OK, "")
    np.testing.assert_array_equal(out, x + 1)
    assert (seen["stream"], seen["ordinal"], seen["platform"]) == (0xABC0, 3, "cuda")
    assert seen["repr"] == f"ExecutionContext(platform=cuda, device_ordinal=3, stream={0xABC0})"
    assert seen["device"] == (2, 3)
    interface = {"shape": (2, 3), "typestr": "<f4", "strides": None, "version": 3, "stream": None}
    assert seen["inner"] == {**interface, "data": (x.ctypes.data, True)}
    assert seen["outer"] == {**interface, "data": (out.ctypes.data, False)}


def test_device_memory_is_not_for_numpy(fake_xla):
    def callback(ctx, out, x):
        for use in (np.asarray, lambda b: b.numpy()):
            with pytest.raises(TypeError, match=r"in the memory of a cuda device. Use buffer.cupy\(\)"):
                use(out)
        with pytest.raises(BufferError, match="copy=True would allocate"):
            x.__dlpack__(stream=ctx.stream, copy=True)
        with pytest.raises(BufferError, match=r"read-only, .* Pass max_version=\(1, 0\)\.$"):
            x.__dlpack__(stream=ctx.stream)

    code, message, _ = run_on_fake_gpu(fake_xla, callback, np.zeros(1, np.float32), F32)
    assert (code, message) == (OK, "")


def test_dlpack_wants_the_same_stream(fake_xla):
    def callback(ctx, out, x):
        for stream in (
            1,
            None,
        ):  # by None, too, a consumer means the legacy default stream, for which XLA's do not wait
            with pytest.raises(BufferError, match="the consumer works on another stream than XLA"):
                out.__dlpack__(stream=stream)
        with pytest.raises(TypeError, match="expected `stream` to be a number or None"):
            out.__dlpack__(stream="main")
        for stream in (ctx.stream, -1):
            assert "dltensor" in repr(out.__dlpack__(stream=stream))

    code, message, _ = run_on_fake_gpu(fake_xla, callback, np.zeros(1, np.float32), F32)
    assert (code, message) == (OK, "")


def test_bfloat16_has_its_own_dtype(fake_xla):
    seen = []

    def callback(ctx, out, x):
        seen.append((x.dtype, x.__cuda_array_interface__["typestr"]))

    run_on_fake_gpu(fake_xla, callback, np.zeros(2, ml_dtypes.bfloat16), BF16)
    assert seen == [(np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.bfloat16).str)]


def test_packed_types_are_refused(fake_xla):
    code, message, _ = run_on_fake_gpu(fake_xla, add_one, np.zeros(4, np.uint8), S4, shape=(8,))
    assert code == UNIMPLEMENTED
    assert message.startswith("eqxcallback: int4 is packed several to a byte on a GPU")


def test_unknown_types_are_refused(fake_xla):
    code, message, _ = run_on_fake_gpu(fake_xla, add_one, np.zeros(4, np.uint8), 99)
    assert code == UNIMPLEMENTED
    assert "element type number 99 is not known" in message


def test_errors(fake_xla):
    def broken(ctx, out, x):
        raise ValueError("no")

    code, message, _ = run_on_fake_gpu(fake_xla, broken, np.zeros(4, np.float64), F64)
    assert code == INTERNAL
    assert "broken failed; python lane, (float64[4]) -> (float64[4])" in message


def test_the_trait_belongs_to_the_captured_handler(fake_xla):
    assert fake_xla.is_captured(handler("eqxcallback_python")) == 0
    assert fake_xla.is_captured(handler("eqxcallback_python_captured")) == 1


def test_watchers_copy_through_the_driver(fake_xla, monkeypatch):
    """`debug.tap` and `debug.call`, whose functions get arrays on the host: on XLA's stream, and waiting for it."""
    from eqxcallback.debug import _host

    calls = []

    class Driver:
        def cuMemcpyDtoHAsync_v2(self, to, source, size, stream):  # noqa: N802 - CUDA's name
            calls.append(("to the host", stream.value))
            ctypes.memmove(to, source.value, size.value)
            return 0

        def cuMemcpyHtoDAsync_v2(self, to, source, size, stream):  # noqa: N802
            calls.append(("to the device", stream.value))
            ctypes.memmove(to.value, source, size.value)
            return 0

        def cuStreamSynchronize(self, stream):  # noqa: N802
            calls.append(("wait", stream.value))
            return 0

    monkeypatch.setattr(_host, "_driver", Driver)

    def callback(ctx, out, x):
        array = _host.copy_to_host(ctx, x)
        assert array.flags.owndata
        _host.copy_from_host(ctx, out, array * 2)

    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    code, message, out = run_on_fake_gpu(fake_xla, callback, x, F32)
    assert (code, message) == (OK, "")
    np.testing.assert_array_equal(out, 2 * x)
    assert calls == [(what, 0xABC0) for what in ("to the host", "wait", "to the device", "wait")]
    monkeypatch.setattr(Driver, "cuStreamSynchronize", lambda self, stream: 700)
    code, message, _ = run_on_fake_gpu(fake_xla, callback, x, F32)
    assert code == INTERNAL
    assert "the CUDA driver could not copy a value (CUresult 700)" in message
