"""A user's kernels in Triton on a real GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc

from .conftest import require_gpu


pytestmark = pytest.mark.gpu

require_gpu()

import triton  # noqa: E402
import triton.language as tl  # noqa: E402


@triton.jit
def saxpy(x, y, out, n, a, BLOCK: tl.constexpr):  # noqa: N803
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, a * tl.load(x + i, mask=i < n) + tl.load(y + i, mask=i < n), mask=i < n)


@triton.jit
def sum_rows(x, out, sums, rows, size, BLOCK: tl.constexpr):  # noqa: N803
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    tl.store(sums + row, tl.sum(tl.load(x + row * size + i, mask=i < size, other=0.0)))


@triton.jit
def divide_rows(x, out, sums, rows, size, BLOCK: tl.constexpr):  # noqa: N803
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    value = tl.load(x + row * size + i, mask=i < size) / tl.load(sums + row)
    tl.store(out + row * size + i, value, mask=i < size)


@triton.jit
def multiply(a, b, out, BLOCK: tl.constexpr, STAGES: tl.constexpr):  # noqa: N803
    rows = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for start in tl.range(0, 512, BLOCK, num_stages=STAGES):  # pyright: ignore[reportGeneralTypeIssues]
        left = tl.load(a + rows[:, None] * 512 + start + rows[None, :])
        right = tl.load(b + (start + rows[:, None]) * BLOCK + rows[None, :])
        total = tl.dot(left, right, total)
    tl.store(out + rows[:, None] * BLOCK + rows[None, :], total)


def saxpy_op(**changed):
    fields = {
        "grid": lambda x, y, *, a, BLOCK: triton.cdiv(x.size, BLOCK),  # noqa: N803
        "scalars": {"n": ("int32", lambda x, y, *, a: x.size), "a": "float32"},
        "constexprs": {"BLOCK": 256},
    }
    return eqxc.Op(
        "saxpy",
        kernels={"cuda": eqxc.TritonKernel(saxpy, **{**fields, **changed})},
        reference=lambda x, y, *, a: a * x + y,
        vmap_method={"x": "broadcast_all", "y": "broadcast_all"},
    )


@pytest.mark.parametrize("size", [1, 999, 1024, 100_000])
def test_values(size):
    """Sizes that are a multiple of 16 are compiled for loads of several elements."""
    x, y = jnp.arange(float(size)), jnp.ones(size)
    op = saxpy_op()
    np.testing.assert_allclose(jax.jit(lambda x, y: op(x, y, a=0.5))(x, y), 0.5 * np.asarray(x) + 1, rtol=1e-6)


def test_batches_and_gradients():
    op = saxpy_op()
    x, y = jnp.arange(3000.0).reshape(3, 1000), jnp.ones((3, 1000))
    np.testing.assert_allclose(
        jax.jit(jax.vmap(lambda x, y: op(x, y, a=0.5)))(x, y), 0.5 * np.asarray(x) + 1, rtol=1e-6
    )
    gradient = jax.jit(jax.grad(lambda x: op(x, y[0], a=0.5).sum()))(x[0])
    np.testing.assert_array_equal(gradient, np.full(1000, 0.5))


@pytest.mark.parametrize(("warps", "block"), [(1, 32), (8, 4096)])
def test_warps_and_constants_that_are_chosen(warps, block):
    seen = []

    def choose(arch, x, y, *, a):
        seen.append(arch)
        return {"BLOCK": block, "num_warps": warps}

    op = saxpy_op(choose=choose)
    x = jnp.arange(5000.0)
    np.testing.assert_allclose(jax.jit(lambda x: op(x, x, a=0.5))(x), 1.5 * np.asarray(x), rtol=1e-6)
    capability = str(jax.devices("gpu")[0].compute_capability).replace(".", "")
    assert set(seen) == {int(capability)}


def test_several_launches_and_a_workspace():
    fields = {
        "grid": lambda x, BLOCK: x.shape[0],  # noqa: N803
        "constexprs": {"BLOCK": lambda x: triton.next_power_of_2(x.shape[1])},
    }
    kernel = eqxc.TritonKernel(
        sum_rows,
        out_type=lambda x: x,
        scalars={"rows": ("int32", lambda x: x.shape[0]), "size": ("int32", lambda x: x.shape[1])},
        workspaces=lambda x: [jax.ShapeDtypeStruct(x.shape[:1], jnp.float32)],
        then=[eqxc.TritonKernel(divide_rows, **fields)],
        **fields,
    )
    op = eqxc.Op("shares", kernels={"cuda": kernel})
    x = jax.random.uniform(jax.random.key(0), (300, 777)) + 0.5
    np.testing.assert_allclose(jax.jit(lambda x: op(x))(x), x / x.sum(1, keepdims=True), rtol=1e-5)


def test_tensor_cores_and_shared_memory():
    """More than 48 KiB, which has to be asked for."""
    kernel = eqxc.TritonKernel(
        multiply,
        grid=1,
        constexprs={"BLOCK": 128, "STAGES": 3},
        out_type=lambda a, b: jax.ShapeDtypeStruct((128, 128), jnp.float32),
    )
    op = eqxc.Op("multiply", kernels={"cuda": kernel})
    a, b = (
        jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i, shape in enumerate(((128, 512), (512, 128)))
    )
    want = np.asarray(a, np.float32) @ np.asarray(b, np.float32)
    np.testing.assert_allclose(jax.jit(lambda a, b: op(a, b))(a, b), want, rtol=1e-4, atol=1e-3)


def test_captured():
    op = saxpy_op()

    @eqxc.jit_captured
    def program(x, y):
        return jax.lax.fori_loop(0, 10, lambda _, x: op(x, y, a=1.0), x)

    for i in range(4):
        x = jnp.full(1000, float(i))
        np.testing.assert_array_equal(program(x, jnp.ones(1000)), np.full(1000, i + 10))
