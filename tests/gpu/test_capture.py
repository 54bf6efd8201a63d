"""Programs that XLA records into command buffers: replayed with other inputs and buffers, and what `inspect` says is true."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc
from eqxcallback import ops

from .conftest import require_gpu


pytestmark = pytest.mark.gpu

require_gpu()

import cupy  # noqa: E402


SIZE = 1000
F32 = jax.ShapeDtypeStruct((SIZE,), jnp.float32)
NEVER = {"xla_gpu_enable_command_buffer": ""}


def add_one_op(name="add_one"):
    """Make an op from a source of its own, so that nobody has loaded it before."""
    source = f"""
    // {name}
    extern "C" __global__ void entry(const float* x, float* out, int n) {{
      int i = blockIdx.x * blockDim.x + threadIdx.x;
      if (i < n) out[i] = x[i] + 1;
    }}"""
    launch = eqxc.Launch(grid=lambda x: -(-x.size // 256), block=256)
    kernel = eqxc.CudaKernel(source, "entry", launch, scalars={"n": ("int32", lambda x: x.size)})
    return eqxc.Op(name, kernels={"cuda": kernel}, reference=lambda x: x + 1, vmap_method="fold")


class Counted:
    """A callback that adds one with CuPy, and counts how often Python runs it."""

    def __init__(self, **options):
        self.runs = 0

        def add_one(ctx, out, x):
            self.runs += 1
            with ctx:
                cupy.add(x.cupy(), 1, out=out.cupy())

        self.call = eqxc.buffer_callback(add_one, F32, command_buffer_compatible=True, **options)


def repeated(call, times):
    def program(x):
        for _ in range(times):
            x = call(x)
        return x

    return program


def check_calls(program, times, calls=12):
    """With buffers that were used before, and with others."""
    kept = [jnp.full(SIZE, float(i)) for i in range(calls)]  # all alive: no two at the same address
    for i in range(calls):
        x = kept[0] if i < calls // 2 else kept[i]
        np.testing.assert_array_equal(program(x), np.asarray(x) + times)


@pytest.mark.parametrize("times", [1, 2, 5, 8])
@pytest.mark.parametrize("smallest", [None, 1])
def test_kernels_are_replayed_on_the_right_buffers(times, smallest):
    options = {} if smallest is None else {"xla_gpu_graph_min_graph_size": smallest}
    program = jax.jit(repeated(add_one_op(), times), compiler_options=options)
    check_calls(program, times)


def test_a_kernel_that_is_first_run_while_it_is_recorded():
    """Its image was loaded before, where loading is allowed, and in the context in which it runs."""
    program = eqxc.jit_captured(lambda x: add_one_op("never loaded before")(x))
    np.testing.assert_array_equal(program(jnp.zeros(SIZE)), np.ones(SIZE))


@pytest.mark.parametrize("times", [1, 5])
def test_what_inspect_says_is_true(times):
    """A callback that is recorded runs less often than its program, one that is not runs each time."""
    counted = Counted()
    for fn in (jax.jit(repeated(counted.call, times)), eqxc.jit_captured(repeated(counted.call, times))):
        report = eqxc.inspect(fn, jnp.zeros(SIZE))
        (captured,) = {call.captured for call in report.calls}
        assert report.platform == "cuda"
        counted.runs, calls = 0, 20
        x = jnp.zeros(SIZE)
        for _ in range(calls):
            np.testing.assert_array_equal(fn(x), np.full(SIZE, times))
        if captured:
            assert counted.runs < calls * times
        else:
            assert counted.runs == calls * times


def test_callbacks_are_replayed_on_the_right_buffers():
    counted = Counted()
    check_calls(eqxc.jit_captured(repeated(counted.call, 3)), 3)
    assert counted.runs >= 3


def test_a_callback_that_may_not_be_recorded_runs_each_time():
    runs = []

    def add_one(ctx, out, x):
        runs.append(None)
        with ctx:
            cupy.add(x.cupy(), 1, out=out.cupy())

    plain = eqxc.buffer_callback(add_one, F32)
    op = add_one_op()
    program = eqxc.jit_captured(lambda x: op(plain(op(x))))
    check_calls(program, 3, calls=10)
    assert len(runs) == 10


@pytest.mark.parametrize("loops", [True, False])
def test_loops(loops):
    op = add_one_op()

    @eqxc.jit_captured(loops=loops)
    def program(x):
        return jax.lax.fori_loop(0, 100, lambda _, x: op(x) * 1.0, x)

    check_calls(program, 100)


def test_a_loop_that_ends_by_what_it_computes():
    op = add_one_op()
    program = eqxc.jit_captured(lambda x, end: jax.lax.while_loop(lambda x: x.sum() < end, op, x))
    for end in (0.0, 10.5, 3.0, 40.0):
        got = program(jnp.zeros(SIZE), jnp.float32(end * SIZE))
        np.testing.assert_array_equal(got, np.full(SIZE, np.ceil(end)))


def test_python_in_a_loop_of_one_graph():
    counted = Counted()
    program = eqxc.jit_captured(lambda x: jax.lax.fori_loop(0, 50, lambda _, x: counted.call(x), x))
    (call,) = eqxc.inspect(program, jnp.zeros(SIZE)).calls
    counted.runs = 0
    check_calls(program, 50)
    if "one graph for all iterations" in call.captured_reason:
        assert counted.runs < 12 * 50


def test_branches():
    one, two = add_one_op(), repeated(add_one_op(), 2)
    program = eqxc.jit_captured(lambda which, x: jax.lax.cond(which, one, two, x))
    for which in (True, False, False, True):
        np.testing.assert_array_equal(program(jnp.array(which), jnp.zeros(SIZE)), np.full(SIZE, 1 if which else 2))


def test_a_donated_carry_across_calls():
    """As a program that generates: the cache is replayed where it lies."""

    @eqxc.jit_captured(donate="all")
    def step(cache, position):
        row = jnp.full((1, 4, 64), position, jnp.float32)
        return ops.cache_append(cache, row, position), position + 1

    cache, position = jnp.zeros((50, 4, 64)), jnp.int32(0)
    addresses = {cache.unsafe_buffer_pointer()}
    for _ in range(50):
        cache, position = step(cache, position)
        addresses.add(cache.unsafe_buffer_pointer())
    np.testing.assert_array_equal(cache[:, 0, 0], np.arange(50))
    assert len(addresses) == 1


def block(x, weight, cache, position):
    """All kinds of our kernels, in CUDA C++ and in Triton."""
    y = ops.rms_norm(x, weight)
    qkv = y.reshape(32, 3, 4, 64)
    table = ops.rotary_table(jnp.arange(32), 64)
    q = ops.rotary_embedding(qkv[:, 0], *table)
    k = ops.rotary_embedding(qkv[:, 1], *table)
    attended = ops.attention(q, k, qkv[:, 2], causal=True)
    cache = ops.cache_append(cache, k, position)
    last = ops.decode_attention(q[-1], cache, cache, position + 32)
    gated = ops.swiglu(ops.layer_norm(y.astype(jnp.float32)).astype(y.dtype))
    loss = ops.softmax_cross_entropy(gated, jnp.arange(32))
    return attended, last, gated, loss, cache


def test_all_our_kernels_in_one_graph():
    """The same bits as without graphs, call after call."""
    plain = jax.jit(block, compiler_options=NEVER)
    program = eqxc.jit_captured(block)
    weight = jnp.linspace(0.5, 1.5, 768)
    cache = jax.random.normal(jax.random.key(9), (200, 4, 64), jnp.bfloat16)

    def args_of(i):
        return jax.random.normal(jax.random.key(i), (32, 768), jnp.bfloat16), weight, cache, jnp.int32(10 * i)

    for i in range(4):
        args = args_of(i)
        for got, want in zip(program(*args), plain(*args), strict=True):
            np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))
    report = eqxc.inspect(program, *args_of(0))
    assert {call.captured for call in report.calls} == {True}, str(report)
    assert {call.captured for call in eqxc.inspect(plain, *args_of(0)).calls} == {False}


def test_gradients_in_one_graph():
    def loss(x, weight):
        y = ops.rms_norm(x, weight).reshape(64, 4, 64)
        return (ops.attention(y, y, y, causal=True).astype(jnp.float32) ** 2).sum()

    gradients = jax.grad(loss, (0, 1))
    plain, program = jax.jit(gradients, compiler_options=NEVER), eqxc.jit_captured(gradients)
    for i in range(3):
        x = jax.random.normal(jax.random.key(i), (64, 256), jnp.bfloat16)
        for got, want in zip(program(x, jnp.ones(256)), plain(x, jnp.ones(256)), strict=True):
            np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))


def test_two_programs_in_turns():
    first, second = (eqxc.jit_captured(repeated(add_one_op(name), 6)) for name in ("first", "second"))
    x = jnp.zeros(SIZE)
    for i in range(10):
        x = (second if i % 2 else first)(x)
    np.testing.assert_array_equal(x, np.full(SIZE, 60))
