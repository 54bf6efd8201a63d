"""The launcher's calls of the driver, and its errors. The driver is a fake, and runs nothing."""

import concurrent.futures
import ctypes

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc

from .conftest import forget


F32 = jax.ShapeDtypeStruct((4, 8), jnp.float32)


def kernel(**changed):
    fields = {
        "source": "the source {}",
        "entry": "entry",
        "launch": eqxc.Launch(grid=(3, 2), block=(32, 4)),
        "out_type": lambda x, y: F32,
    }
    return eqxc.CudaKernel(**{**fields, **changed})


def call(of, *args, donate=(), **options):
    op = eqxc.Op("op", kernels={"cpu": of})
    return jax.jit(lambda *args: op(*args, **options), donate_argnums=donate)(*args)


@pytest.fixture
def xy():
    return jnp.ones((4, 8)), jnp.zeros((4, 8))


@pytest.fixture(autouse=True)
def _driver(driver, compiler):
    """For all tests here."""


def words(driver):
    return [list(map(int, line.split()[1:])) for line in driver.log if line.startswith("parameters")]


def test_geometry_and_parameters_in_order(driver, xy):
    scalars = {"n": ("int32", lambda x, y, **_: x.size), "scale": "float32"}
    out = call(kernel(scalars=scalars, out_type=lambda x, y, **_: F32), *xy, scale=0.5)
    assert driver.launches == [
        "cuLaunchKernel entry_lowered grid=(3,2,1) block=(32,4,1) shared=0 device=0 stream=(nil)"
    ]
    pointers = [x.unsafe_buffer_pointer() for x in (*xy, out)]
    assert words(driver) == [[*pointers, 32, int(np.float32(0.5).view(np.uint32))]]


def test_scalars_are_in_the_first_bytes_of_their_words(driver):
    scalars = {"a": "float32", "b": "int64", "c": "bool", "d": "float64"}
    of = kernel(scalars=scalars, out_type=lambda x, **_: x)
    call(of, jnp.ones(1), a=1.5, b=-2, c=True, d=0.1)
    as_words = [np.array([1.5, 0], "f4"), np.array([-2]), np.array([1]), np.array([0.1])]
    assert words(driver)[0][2:] == [int(word.view(np.uint64)[0]) for word in as_words]


def test_an_aliased_result_is_the_operand(driver, xy):
    pointer = xy[1].unsafe_buffer_pointer()
    call(kernel(aliases={"y": 0}), *xy, donate=1)
    (given,) = words(driver)
    assert given[1] == given[2] == pointer


def test_a_module_is_loaded_once(driver, xy):
    first, second = (eqxc.Op(name, kernels={"cpu": kernel()}) for name in ("first", "second"))
    f, g = jax.jit(lambda x, y: first(x, y)), jax.jit(lambda x, y: second(x, y) + first(y, x))
    f(*xy)
    f(*xy)
    g(*xy)
    assert len([line for line in driver.log if line.startswith("cuModuleLoadData")]) == 1
    assert len(driver.launches) == 4


def test_a_module_is_unloaded_with_its_last_program(driver, xy):
    before = driver.num_modules
    op = eqxc.Op("op", kernels={"cpu": kernel(source="of its own {}")})
    f = jax.jit(lambda x, y: op(x, y))
    f(*xy)
    assert driver.num_modules == before + 1
    del f
    forget()
    assert driver.num_modules == before
    assert any(line.startswith("cuModuleUnload") for line in driver.log)


def test_one_module_on_each_device(driver):
    of = kernel(source="for devices {}")
    op = eqxc.Op("op", kernels={"cpu": of})
    f = jax.jit(lambda x, y: op(x, y))
    for device in jax.devices()[:3]:
        xy = jax.device_put((jnp.ones((4, 8)), jnp.zeros((4, 8))), device)
        for _ in range(2):
            jax.block_until_ready(f(*xy))
    loaded = [line for line in driver.log if line.startswith("cuModuleLoadData")]
    assert [line.split()[2] for line in loaded] == ["0", "1", "2"]
    used = [line.split()[-2] for line in driver.launches]
    assert used == ["device=0", "device=0", "device=1", "device=1", "device=2", "device=2"]


def test_several_launches_have_the_same_parameters(driver, xy):
    steps = [eqxc.Launch(grid=1, block=64), eqxc.Launch(grid=2, block=128, shared_bytes=1024, entry="second")]
    workspaces = [jax.ShapeDtypeStruct((5,), jnp.float32)]
    call(kernel(launch=steps, workspaces=workspaces), *xy)
    assert [line.split()[1] for line in driver.launches] == ["entry_lowered", "second_lowered"]
    first, second = words(driver)
    assert first == second
    assert len(set(first)) == 4  # x, y, the result, the workspace


def test_many_parameters(driver):
    args = [jnp.full((1,), i, jnp.float32) for i in range(60)]
    scalars = {f"s{i}": ("int32", lambda *_, i=i: i) for i in range(40)}
    call(kernel(out_type=lambda *args: jax.ShapeDtypeStruct((1,), jnp.float32), scalars=scalars), *args)
    assert words(driver)[0][60:][1:] == list(range(40))
    assert words(driver)[0][:4] == [arg.unsafe_buffer_pointer() for arg in args[:4]]


def test_large_shared_memory_is_asked_for(driver, xy):
    call(kernel(launch=eqxc.Launch(grid=1, block=32, shared_bytes=100_000)), *xy)
    assert "cuFuncSetAttribute entry_lowered 100000" in driver.log


def shared_as_its_operand(source):
    """A kernel with a KiB of shared memory for each element."""
    launch = eqxc.Launch(grid=1, block=32, shared_bytes=lambda x: 1024 * x.size)
    return eqxc.Op("op", kernels={"cpu": kernel(source=source, launch=launch, out_type=lambda x: x)})


def raised(driver):
    return [line.split()[-1] for line in driver.log if line.startswith("cuFuncSetAttribute")]


# The second is less than any kernel may have unasked.
@pytest.mark.parametrize("smaller", [60, 20])
def test_two_calls_of_a_kernel_in_one_program_have_the_memory_of_the_larger(driver, smaller):
    op, sizes = shared_as_its_operand(f"one program, {smaller} {{}}"), (100, smaller, 90)
    f = jax.jit(lambda *xs: [op(x) for x in xs])
    for _ in range(2):
        jax.block_until_ready(f(*map(jnp.ones, sizes)))
    launched = [line.split("shared=")[1].split()[0] for line in driver.launches]
    assert sorted(launched) == sorted(str(1024 * size) for size in 2 * sizes)
    assert len([line for line in driver.log if line.startswith("cuModuleLoadData")]) == 1
    assert max(map(int, raised(driver))) == 102_400 == int(raised(driver)[-1])


@pytest.mark.parametrize("smaller", [60, 20])
def test_two_programs_of_a_kernel_have_the_memory_of_the_larger(driver, smaller):
    op = shared_as_its_operand(f"two programs, {smaller} {{}}")
    larger, other = (jax.jit(lambda x: op(x)).lower(jnp.ones(size)).compile() for size in (100, smaller))
    for program, size in ((larger, 100), (other, smaller), (larger, 100)):
        jax.block_until_ready(program(jnp.ones(size)))
    assert len(driver.launches) == 3
    assert len([line for line in driver.log if line.startswith("cuModuleLoadData")]) == 1
    assert raised(driver) == ["102400"]


def test_each_device_is_asked_for_shared_memory(driver):
    op = shared_as_its_operand("two devices {}")
    f = jax.jit(lambda x: op(x))
    for device in jax.devices()[:2]:
        for size in (100, 60):
            jax.block_until_ready(f(jax.device_put(jnp.ones(size), device)))
    assert raised(driver) == ["102400"] * 2


def test_memory_that_the_device_lacks_leaves_other_calls_whole(driver):
    op = shared_as_its_operand("too much {}")
    f = jax.jit(lambda x: op(x))
    text = r"op\[cuda\]: cuFuncSetAttribute\(entry_lowered, 307200 bytes of shared memory\) failed: invalid argument"
    for size in (100, 300, 100, 110):
        if size == 300:
            with pytest.raises(jax.errors.JaxRuntimeError, match=text):
                jax.block_until_ready(f(jnp.ones(size)))
        else:
            jax.block_until_ready(f(jnp.ones(size)))
    assert raised(driver) == ["102400", "112640"]


def test_an_empty_grid_launches_nothing(driver, xy):
    call(kernel(launch=eqxc.Launch(grid=(4, 0), block=32)), *xy)
    assert driver.launches == []


@pytest.mark.parametrize(
    ("failing", "code", "text"),
    [
        ("cuInit", 100, "cuInit failed"),
        ("cuModuleLoadData", 209, r"NO_BINARY_FOR_GPU\). The kernel was compiled for another architecture"),
        ("cuModuleLoadData", 222, "The compiler is newer than the driver"),
        ("cuModuleLoadData", 218, "The image is damaged, or its compiler is newer than the driver"),
        ("cuLaunchKernel", 700, "A kernel that ran before has done this.*CUDA_LAUNCH_BLOCKING=1"),
        ("cuModuleGetFunction", 500, r"cuModuleGetFunction\(entry_lowered\) failed: .*CUDA_ERROR_NOT_FOUND"),
        ("cuLaunchKernel", 900, "not allowed while XLA records a command buffer"),
        (
            "cuLaunchKernel",
            2,
            r"cuLaunchKernel\(entry_lowered, grid \(3, 2, 1\), block \(32, 4, 1\), 0 bytes.*out of memory",
        ),
        ("cuLaunchKernel", 999, r"unknown error \(999\)"),
        ("cuDevicePrimaryCtxRetain", 101, "cuDevicePrimaryCtxRetain failed"),
    ],
)
def test_errors_of_the_driver(driver, xy, failing, code, text):
    of = kernel(source=f"fails with {code} in {failing} {{}}")
    driver.reopen()
    driver.fail(failing, code)
    with pytest.raises(jax.errors.JaxRuntimeError, match=rf"op\[cuda\]: .*{text}"):
        jax.block_until_ready(call(of, *xy))
    jax.block_until_ready(call(of, *xy))  # the next call is not hurt
    assert len(driver.launches) == 1


def test_loading_and_unloading_leave_a_capture_whole(driver, xy):
    """As where Python's garbage collector frees a program inside of a kernel that is recorded."""
    cuda, before = driver.library, driver.num_modules
    context, stream, graph, memory = (ctypes.c_void_p() for _ in range(4))
    cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
    cuda.cuCtxSetCurrent(context)
    cuda.cuStreamCreate(ctypes.byref(stream), 1)  # as XLA makes them
    cuda.cuStreamBeginCapture_v2(stream, 0)  # refuses what any thread does
    op = eqxc.Op("op", kernels={"cpu": kernel(source="captured {}")})
    f = jax.jit(lambda x, y: op(x, y))
    jax.block_until_ready(f(*xy))
    assert driver.num_modules == before + 1
    del f
    forget()
    assert driver.num_modules == before
    assert cuda.cuStreamEndCapture(stream, ctypes.byref(graph)) == 0
    cuda.cuGraphDestroy(graph)
    # What others do is refused as before.
    cuda.cuStreamBeginCapture_v2(stream, 0)
    assert cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(16)) == 900
    assert cuda.cuStreamEndCapture(stream, ctypes.byref(graph)) == 901
    cuda.cuStreamDestroy_v2(stream)


def test_without_a_driver(driver, xy):
    driver.remove()
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"op\[cuda\]: there is no CUDA driver: .*nowhere.so"):
        jax.block_until_ready(call(kernel(source="no driver {}"), *xy))


def test_a_block_that_is_too_large_is_refused_when_the_program_is_lowered(xy):
    with pytest.raises(ValueError, match=r"op\[cuda\]: entry.*: expected block to have 1 to 1024 threads"):
        call(kernel(launch=eqxc.Launch(grid=1, block=2048)), *xy)


def test_from_8_threads_at_once(driver, xy):
    of = kernel(source="threads {}")
    f = jax.jit(lambda x, y: eqxc.Op("op", kernels={"cpu": of})(x, y))
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for _ in pool.map(lambda _: jax.block_until_ready(f(*xy)), range(64)):
            pass
    assert len(driver.launches) == 64
    assert len([line for line in driver.log if line.startswith("cuModuleLoadData")]) == 1


def test_under_vmap_the_geometry_is_of_the_whole_batch(driver):
    of = kernel(launch=eqxc.Launch(grid=lambda x, y: x.shape[0], block=32), out_type=lambda x, y: x)
    op = eqxc.Op("op", kernels={"cpu": of}, vmap_method="fold")
    x = jnp.ones((5, 3, 4, 8))
    jax.jit(jax.vmap(jax.vmap(lambda x, y: op(x, y))))(x, x)
    (line,) = driver.launches
    assert "grid=(15,1,1)" in line


def test_no_memory_grows(driver, xy):
    import resource

    of = kernel()
    f = jax.jit(lambda x, y: eqxc.Op("op", kernels={"cpu": of})(x, y))

    def calls(count):
        for _ in range(count):
            jax.block_until_ready(f(*xy))
        driver.reset()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    calls(2000)
    before = calls(2000)
    assert calls(20_000) - before < 30_000  # kB: the driver's own log has 4 MB for each 20,000
