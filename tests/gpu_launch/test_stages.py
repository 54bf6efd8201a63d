"""The handlers for CUDA themselves, called in stages as XLA calls them on a GPU, over the fake driver."""

import ctypes
import pathlib
import subprocess

import jax
import numpy as np
import pytest

from eqxcallback import _ext


TARGETS = ["eqxcallback_launch", "eqxcallback_launch_captured"]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    path = tmp_path_factory.mktemp("stages") / "stages.so"
    source = str(pathlib.Path(__file__).with_name("stages.cc"))
    include = f"-I{jax.ffi.include_dir()}"  # the headers of the jaxlib that runs
    subprocess.run(["g++", "-std=c++17", "-O1", "-shared", "-fPIC", "-w", include, source, "-o", str(path)], check=True)
    return ctypes.CDLL(str(path))


@pytest.fixture(params=TARGETS)
def run(request, library):
    """`run(stage)`: its error, or `""`."""
    bundle = _ext.gpu_launch_targets()[request.param]["CUDA"]
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    x, out = np.zeros(3, np.float32), np.zeros(3, np.float32)

    def stage(name, *, image="image 2 usual", grid=(4, 1, 1), block=(32, 1, 1), stream=0xABC0, device=2):
        number = ["instantiate", "initialize", "execute"].index(name)
        geometry = np.array([*grid, *block, 0, 0], np.int64)
        image = f"{image} {request.param}" if image else image  # programs of other tests may have it loaded
        message = ctypes.create_string_buffer(1000)
        library.run_stage(
            *(
                ctypes.c_void_p(pointer(bundle[name], None)),
                number,
                image.encode(),
                ctypes.c_void_p(geometry.ctypes.data),
            ),
            *(ctypes.c_void_p(x.ctypes.data), ctypes.c_void_p(out.ctypes.data), ctypes.c_uint64(stream), device),
            *(message, ctypes.c_size_t(len(message))),
        )
        return message.value.decode()

    stage.__dict__["pointers"] = [x.ctypes.data, out.ctypes.data]
    return stage


def test_loaded_before_it_runs(run, driver):
    assert run("instantiate", image="image 2 stages") == ""
    assert driver.log == []  # compiling a program needs no driver
    assert run("initialize") == ""
    # For the thread, and for as long as the module is there.
    assert [line.split()[0] for line in driver.log] == [*["cuDevicePrimaryCtxRetain"] * 2, "cuModuleLoadData"]
    for _ in range(2):
        assert run("execute") == ""
    assert driver.launches == ["cuLaunchKernel entry grid=(4,1,1) block=(32,1,1) shared=0 device=2 stream=0xabc0"] * 2
    words = [list(map(int, line.split()[1:])) for line in driver.log if line.startswith("parameters")]
    assert words == [run.pointers] * 2
    assert sum(line.startswith("cuModuleLoadData") for line in driver.log) == 1


def test_a_context_that_its_owner_releases(run, driver):
    """As XLA does when its backends are cleared. With a context that nobody retains, the driver would unload its modules."""
    context = ctypes.c_void_p()
    assert driver.library.cuDevicePrimaryCtxRetain(ctypes.byref(context), 2) == 0
    driver.library.cuCtxSetCurrent(context)
    assert run("instantiate", image="image 2 released") == ""
    assert run("initialize") == run("execute") == ""
    modules = driver.num_modules
    assert driver.library.cuDevicePrimaryCtxRelease_v2(2) == 0
    assert driver.num_modules == modules
    assert run("execute") == ""
    assert len(driver.launches) == 2


def test_each_device_on_its_own_stream(run, driver):
    run("instantiate", image="image 2 devices")
    for device in (0, 3):
        driver.reopen()  # a thread of XLA's that has the context of that device
        assert run("initialize", device=device) == ""
        assert run("execute", device=device, stream=0x100 + device) == ""
    assert [line.split("device=")[1] for line in driver.launches] == ["0 stream=0x100", "3 stream=0x103"]


def test_without_initialize_it_is_loaded_when_it_runs(run, driver):
    run("instantiate", image="image 2 late")
    assert run("execute") == ""
    assert len(driver.launches) == 1


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"grid": (-1, 1, 1)}, "expected a geometry of 32 bits"),
        ({"grid": (2**32, 1, 1)}, "expected a geometry of 32 bits"),
        ({"image": ""}, "expected images of these sizes"),
    ],
)
def test_attributes_are_checked_when_a_program_is_compiled(run, wrong, text):
    assert text in run("instantiate", **wrong)


def test_as_many_parameters_as_the_kernel_has(run, driver):
    """The driver would read further ones from wherever."""
    run("instantiate", image="image 3 parameters")
    assert run("initialize") == ""
    assert "a test: entry has 3 parameters; the call gives it 2" in run("execute")
    assert driver.launches == []


def test_errors(run, driver):
    run("instantiate", image="image 2 errors")
    driver.fail("cuModuleLoadData", 209)
    assert "a test: cuModuleLoadData failed" in run("initialize")
    driver.fail("cuLaunchKernel", 2)
    assert "a test: cuLaunchKernel(entry, grid (4, 1, 1), block (32, 1, 1)" in run("execute")
    driver.remove()
    assert "a test: there is no CUDA driver" in run("initialize")
