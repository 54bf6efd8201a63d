"""The handler for CUDA, called as XLA calls it on a GPU, and programs for CUDA that call functions of TVM-FFI."""

import ctypes
import pathlib
import re
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqxcallback import Op, TvmFfiKernel, _ext, available_backends

from . import library
from .library import saxpy_reference, tvm_ffi


STREAM, DEVICE = 0xABC0, 2


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """`run(name, *arguments)`: the numbers that the function has written, and its error, or `""`."""
    path = tmp_path_factory.mktemp("frame") / "frame.so"
    source = str(pathlib.Path(__file__).with_name("frame.cc"))
    include = f"-I{jax.ffi.include_dir()}"  # the headers of the jaxlib that runs
    subprocess.run(["g++", "-std=c++17", "-O1", "-shared", "-fPIC", "-w", include, source, "-o", str(path)], check=True)
    run_frame = ctypes.CDLL(str(path)).run_frame
    assert available_backends()["tvm_ffi"] is True  # handlers know the runtime from now on
    module = tvm_ffi.load_module(library.PATH)

    def call(name, *arguments, captured=False, process=_ext.c_call_process):
        function, out, message = module.get_function(name), np.zeros(5, np.int64), ctypes.create_string_buffer(1000)
        numbers = np.array([0, *(number for argument in arguments for number in argument)], np.int64)
        run_frame(
            ctypes.c_void_p(_ext.tvm_ffi_handlers()["cuda captured" if captured else "cuda"]),
            *(ctypes.c_int64(function.__chandle__()), ctypes.c_int64(process)),
            *(ctypes.c_void_p(numbers.ctypes.data), ctypes.c_size_t(len(numbers)), ctypes.c_void_p(out.ctypes.data)),
            *(ctypes.c_uint64(STREAM), DEVICE, message, ctypes.c_size_t(len(message))),
        )
        return out.tolist(), message.value.decode()

    return call


OUT = (0, 0, 0)  # see csrc/ffi/tvm_ffi_call.cc
AS_POINTER = (6, 0, 0)


@pytest.mark.parametrize("captured", [False, True])
def test_the_stream_and_the_device(run, captured):
    where = tvm_ffi.device("cuda", DEVICE)
    with tvm_ffi.use_raw_stream(where, 0x77):
        assert run("surroundings", OUT, captured=captured) == ([0, 0, STREAM, 2, DEVICE], "")
        assert run("raises_an_object", OUT)[1] == "RuntimeError: the one that is kept"
        assert tvm_ffi.get_raw_stream(where) == 0x77  # as it was


def test_the_stream_as_an_argument(run):
    pointer, error = run("describe_pointer", AS_POINTER, OUT)
    assert error == ""
    assert pointer[0] == STREAM


def test_a_function_in_the_memory_of_another_process(run):
    _, error = run("surroundings", OUT, process=_ext.c_call_process + 1)
    assert error.startswith("the program calls a function in the memory of another process; make it again in this one")


def test_what_a_program_for_cuda_says():
    """The handler that it calls is part of a name. tests/deviceless/ has what XLA makes of that."""
    texts, x = [], jnp.ones((4, 8))
    for compatible in (True, False):
        kernel = TvmFfiKernel(library.PATH, "saxpy", library.SAXPY, command_buffer_compatible=compatible)
        op = Op("saxpy", kernels={"cuda": kernel}, reference=saxpy_reference)
        traced = jax.jit(lambda x, op=op: op(x, x, a=2.0)).trace(x)
        texts.append(traced.lower(lowering_platforms=("cuda",)).as_text())
    targets = {name for text in texts for name in re.findall(r"@(eqxcallback_saxpy_[0-9a-f]{16})", text)}
    assert len(targets) == 2
