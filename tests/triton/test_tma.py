"""Attention by the tensor memory accelerator: its values interpreted, what it is compiled to, and when it runs."""

import collections
import dataclasses
import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest


pytest.importorskip("triton", reason="Triton is not installed")

import triton

from eqxcallback import ops, xla
from eqxcallback.ops.attention import (
    _triton,
    _triton_backward_tma as attention_backward,
    _triton_tiles as tiles,
    _triton_tma,
)
from eqxcallback.ops.attention._operands import OPTIONAL
from eqxcallback.ops.attention._triton_forward_tma import attention_forward_tma
from eqxcallback.testing import emulated

from ..gpu_launch.cuda_programs import attributes
from ..ops.attention import by_tma
from ..ops.attention.options import exact_with_lse, inputs
from ..ops.table import normal
from ..software_gpu.driver import Driver
from .compiled import SHARED_MEMORY, _compiled, loops


pytestmark = pytest.mark.usefixtures("triton_cache")


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    monkeypatch.setenv("EQXCALLBACK_CUDA_ARCH", "sm_90")


@pytest.fixture
def interpreted(monkeypatch):
    """An error where another kernel would run."""
    monkeypatch.setattr(by_tma.MODULE, "_attention", emulated(by_tma.OP))


@pytest.fixture
def small_tiles(monkeypatch):
    """Some blocks see nothing, some all."""
    choice = tiles._choice

    def small(tile, size, **more):
        chosen = choice(tile, size, **more)
        return dataclasses.replace(chosen, constants=chosen.constants | {"BLOCK_QUERIES": 32, "BLOCK_KEYS": 16})

    monkeypatch.setattr(tiles, "_choice", small)


def check(got, want, dtype):
    error = 2e-5 if dtype == jnp.float32 else 2**-7
    for x, wanted in zip(got, want, strict=True):
        np.testing.assert_allclose(np.asarray(x, np.float32), wanted, rtol=error, atol=error)


@pytest.mark.usefixtures("interpreted", "small_tiles")
@pytest.mark.parametrize("name", by_tma.CALLS)
def test_values(name):
    operands, options = by_tma.operands(name), by_tma.chosen(name)
    got = ops.attention_with_lse(*operands, **options, implementation="triton")
    assert got[0].dtype == operands[0].dtype
    check(got, exact_with_lse(*operands, **options), operands[0].dtype)


@pytest.mark.usefixtures("interpreted")
def test_tiles_of_the_library():
    q, k, v = inputs(65, 200, 2, 1, 128, jnp.bfloat16)
    got = ops.attention_with_lse(q, k, v, causal=True, implementation="triton")
    check(got, exact_with_lse(q, k, v, causal=True), jnp.bfloat16)


@pytest.mark.usefixtures("interpreted", "small_tiles")
def test_examples_that_share_keys():
    q, k, v = inputs(65, 20, 4, 2, 8)
    qs = np.stack([q, -q, 2 * q])

    def attend(q):
        return ops.attention_with_lse(q, k, v, causal=True, implementation="triton")

    got = jax.vmap(attend)(qs)
    for example, q in enumerate(qs):
        check([x[example] for x in got], exact_with_lse(q, k, v, causal=True), jnp.float32)


# The op with other gradients: their kernels have the same tiles here.
PLAIN = dataclasses.replace(by_tma.OP, backward={"cuda": _triton.ATTENTION_BACKWARD})


def gradients(op, operands, options, monkeypatch):
    monkeypatch.setattr(by_tma.MODULE, "_attention", emulated(op))

    def attend(*operands):
        return ops.attention_with_lse(*operands, **options, implementation="triton")

    (out, lse), pull_back = jax.vjp(attend, *operands)
    return pull_back((normal(9, out.shape, out.dtype), normal(10, lse.shape)))


def check_gradients(operands, options, monkeypatch):
    """To the bit: where more is tested, the sums have the same order."""
    got, want = (gradients(op, operands, options, monkeypatch) for op in (by_tma.OP, PLAIN))
    for x, wanted in zip(got, want, strict=True):
        assert np.isfinite(np.asarray(x, np.float32)).all()
        assert np.asarray(x).tobytes() == np.asarray(wanted).tobytes()


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("name", by_tma.DIFFERENTIABLE)
def test_gradients_are_those_of_the_plain_kernels(name, monkeypatch):
    check_gradients(by_tma.operands(name), by_tma.chosen(name), monkeypatch)


@pytest.mark.usefixtures("small_tiles")
def test_gradients_of_keys_that_examples_share(monkeypatch):
    q, k, v = inputs(65, 37, 2, 1, 8, jnp.bfloat16)
    qs = np.stack([q, -q])

    def gradients_of(op):
        monkeypatch.setattr(by_tma.MODULE, "_attention", emulated(op))

        def loss(qs, k, v):
            out = jax.vmap(lambda q: ops.attention(q, k, v, causal=True, implementation="triton"))(qs)
            return (out.astype(jnp.float32) * normal(9, out.shape)).sum()

        return jax.grad(loss, (0, 1, 2))(qs, k, v)

    for x, wanted in zip(gradients_of(by_tma.OP), gradients_of(PLAIN), strict=True):
        assert np.asarray(x).tobytes() == np.asarray(wanted).tobytes()


@pytest.mark.usefixtures("interpreted")
def test_gradients_are_those_of_the_definition():
    q, k, v = inputs(65, 20, 2, 1, 8)

    def loss(implementation):
        return lambda q: (ops.attention(q, k, v, implementation=implementation) ** 2).sum()

    got, want = (jax.grad(loss(kind))(q) for kind in ("triton", "reference"))
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


def test_gradients_of_f32_are_those_of_the_plain_kernels(monkeypatch):
    """They have no such kernel."""
    operands = inputs(65, 20, 2, 1, 8)
    both = {"cuda": (_triton_tma.ATTENTION_BACKWARD_TMA, _triton.ATTENTION_BACKWARD)}
    got = gradients(dataclasses.replace(by_tma.OP, backward=both), operands, {}, monkeypatch)
    for x, wanted in zip(got, gradients(PLAIN, operands, {}, monkeypatch), strict=True):
        assert np.asarray(x).tobytes() == np.asarray(wanted).tobytes()


def made_for(arch, size, dtype):
    """The kernel of a causal call of many queries and keys."""
    q = jax.ShapeDtypeStruct((4096, 4, size), dtype)
    settings = dict(_triton_tma._choose(arch, q, (q, q), causal=True, scale=1.0))
    warps, stages = settings.pop("num_warps"), settings.pop("num_stages")
    constants = tuple(settings.items())
    return _compiled(attention_forward_tma, arch, np.dtype(dtype).name, constants, OPTIONAL, warps, stages)


@pytest.mark.parametrize(
    ("arch", "size", "dtype"),
    [(90, 128, jnp.bfloat16), (90, 80, jnp.float16), (90, 96, jnp.float32), (100, 128, jnp.bfloat16)],
    ids=lambda x: x if isinstance(x, int) else np.dtype(x).name,
)
def test_compiled(arch, size, dtype):
    made = made_for(arch, size, dtype)
    print(f"{made.registers} registers, {made.spilled} bytes spilled, {made.shared} bytes shared")  # shown by -rP
    assert "cp.async.bulk.tensor" in made.ptx
    assert "cp.async.c" not in made.ptx  # of one thread's own bytes
    assert made.spilled == 0
    assert made.shared <= SHARED_MEMORY[arch]
    assert made.tensor_memory <= 512
    if dtype != jnp.float32:
        assert "setmaxnreg" in made.ptx  # warps that copy leave their registers to those that compute
        assert arch != 90 or not made.warnings


KEYS, QUERIES = _triton_tma.ATTENTION_BACKWARD_TMA.then


def made_for_gradients(step, arch, size, dtype, causal=True, absent=()):
    """The same, of the gradients, of which some are `absent`."""
    q = jax.ShapeDtypeStruct((4096, 4, size), dtype)
    settings = dict(step.choose(arch, (q, (q, q)), (q, (q, q)), causal=causal))
    warps, stages = settings.pop("num_warps"), settings.pop("num_stages")
    absent = (*OPTIONAL, *(f"d{name}" for name in OPTIONAL), *absent)
    kernel = getattr(attention_backward, step.name)
    return _compiled(kernel, arch, np.dtype(dtype).name, tuple(settings.items()), absent, warps, stages)


@pytest.mark.parametrize(
    ("step", "arch", "size", "dtype"),
    [
        (KEYS, 90, 80, jnp.float16),
        *[(step, arch, 128, jnp.bfloat16) for step in (KEYS, QUERIES) for arch in (90, 100)],
    ],
    ids=lambda x: x.name if x in (KEYS, QUERIES) else x if isinstance(x, int) else np.dtype(x).name,
)
def test_compiled_gradients(step, arch, size, dtype):
    made = made_for_gradients(step, arch, size, dtype)
    print(f"{made.registers} registers, {made.spilled} bytes spilled, {made.shared} bytes shared")  # shown by -rP
    assert "cp.async.bulk.tensor" in made.ptx
    assert "cp.async.c" not in made.ptx
    assert "setmaxnreg" in made.ptx
    assert made.spilled <= 16  # outside of the loop, with Triton 3.6
    assert made.shared <= SHARED_MEMORY[arch]
    assert made.tensor_memory <= 512
    assert arch != 90 or not made.warnings


# Instructions of the loop where no pair is asked, and where each is, by Triton. The plain kernels' are in test_compiled.py.
INSTRUCTIONS = {
    KEYS: {"3.6": (330, 426), "3.9": (352, 436)},
    QUERIES: {"3.6": (246, 312), "3.9": (277, 344)},
}


@pytest.mark.parametrize("step", INSTRUCTIONS, ids=lambda step: step.name)
def test_instructions_of_gradients(step):
    version = ".".join(triton.__version__.split(".")[:2])
    if version not in INSTRUCTIONS[step]:
        pytest.skip(f"nobody has counted what Triton {version} makes of it")
    bodies = [loops(made_for_gradients(step, 90, 128, jnp.bfloat16, causal))[0] for causal in (False, True)]
    assert tuple(map(len, bodies)) == INSTRUCTIONS[step][version]
    assert not any("LDL" in line or "STL" in line for body in bodies for line in body)


def test_what_nobody_asks_for_is_not_computed():
    some, both = (made_for_gradients(KEYS, 90, 128, jnp.bfloat16, absent=absent) for absent in (("dk",), ()))
    assert some.ptx.count("wgmma.mma_async.sync") < both.ptx.count("wgmma.mma_async.sync")


# For a test that reads the program and one that launches it: 2 blocks of each of 8 heads, which have three descriptors.
TYPES = [jax.ShapeDtypeStruct((2, rows, heads, 64), jnp.bfloat16) for rows, heads in ((200, 4), (300, 2), (300, 2))]


def attend():
    """A function of its own each time, of which nothing is traced."""
    return jax.jit(lambda q, k, v: ops.attention(q, k, v, causal=True))


def test_scratch_memory(monkeypatch):
    monkeypatch.setattr(by_tma.MODULE, "_attention", by_tma.OP)
    program = attend().trace(*TYPES).lower(lowering_platforms=("cuda",))
    launch = attributes(program)
    assert launch["entries"] == "attention_forward_tma"
    assert launch["geometry"].tolist()[:6] == [16, 1, 1, 384, 1, 1]
    assert f"tensor<{16 * 3 * 128}xui8>" in program.as_text()


@pytest.fixture
def driver():
    yield Driver()
    xla.launch_with("")  # the system's


def test_launch(driver, monkeypatch):
    """On a driver that runs nothing."""
    on_cpu = dataclasses.replace(by_tma.OP, kernels={"cpu": _triton_tma.ATTENTION_TMA}, backward=None)
    monkeypatch.setattr(by_tma.MODULE, "_attention", on_cpu)
    jax.block_until_ready(attend()(*(jnp.zeros(x.shape, x.dtype) for x in TYPES)))
    (launch,) = driver.launches
    assert "cuLaunchKernel attention_forward_tma grid=(16,1,1) block=(384,1,1) shared=" in launch


def test_what_it_does_not_take(monkeypatch):
    def said(queries=100, keys=90, size=64, dtype=jnp.bfloat16, operand="", kernel=_triton_tma.ATTENTION_TMA, **more):
        q, k = (jax.ShapeDtypeStruct((rows, 4, size), dtype) for rows in (queries, keys))
        optional = [jax.ShapeDtypeStruct((), jnp.int32) if name == operand else None for name in OPTIONAL]
        options = {"causal": True, "scale": 1.0, "window": 0, "soft_cap": 0.0, "dropout": 0.0} | more
        types = collections.namedtuple("Types", ["q", "kv", *OPTIONAL])(q, (k, k), *optional)
        return kernel.supports(types, **options)

    assert said() is True
    assert said(causal=False, scale=-2.0) is True
    assert said(dtype=jnp.float32, size=96) is True
    assert said(dtype=jnp.float16, size=256) is True
    assert said(window=3) == "it has no window"
    assert said(soft_cap=3.0) == "it has no soft_cap"
    for name in OPTIONAL:
        assert said(operand=name) == f"it has no {name}"
    assert said(scale=0.0) == "scale has to be another number than 0"
    assert said(size=20) == "heads have to be a multiple of 16 bytes long; they are 20 numbers of 16 bits"
    assert said(dtype=jnp.float32, size=20) is True
    assert said(dtype=jnp.float32, size=100) == "heads have to be no longer than 96 in f32; they are 100"
    assert said(size=264) == "heads have to be no longer than 256; they are 264"
    assert said(queries=64) == "there have to be 65 queries or more; there are 64"
    assert said(keys=0) == "no array may be empty; q has the shape (100, 4, 64), and k (0, 4, 64)"
    assert said(dtype=jnp.float64) == "q has to be float32, bfloat16 or float16; it is float64"
    gradients = functools.partial(said, kernel=_triton_tma.ATTENTION_BACKWARD_TMA)
    assert gradients() is True
    assert gradients(size=80, dtype=jnp.float16) is True
    assert gradients(dtype=jnp.float32) == "q has to be bfloat16 or float16; it is float32"
    assert gradients(size=136) == "heads have to be no longer than 128; they are 136"
    assert gradients(window=3) == "it has no window"
    assert gradients(queries=64) == "there have to be 65 queries or more; there are 64"
    monkeypatch.setenv("EQXCALLBACK_CUDA_ARCH", "sm_103")
    assert gradients(size=56) is True
    assert gradients(size=80) == "on sm_103 heads have to be one tile; those of 80 are two"
    for arch, is_known in (
        ("sm_90a", True),
        ("sm_100", True),
        ("sm_89", False),
        ("sm_120", False),
        ("compute_90", False),
    ):
        monkeypatch.setenv("EQXCALLBACK_CUDA_ARCH", arch)
        wanted = True if is_known else f"the architecture has to be one of sm_90, sm_100, sm_103; it is {arch}"
        assert said() == wanted


CHOSEN = """
import jax
import jax.numpy as jnp

from eqxcallback import ops, xla

def chosen(f):
    x = jax.ShapeDtypeStruct((100, 4, 64), jnp.bfloat16)
    for site in xla.call_sites(jax.make_jaxpr(f)(x), "cuda"):
        choice = site.params["call"].choice("cuda")
        print(choice.kernel.name, *(step.name for step in choice.kernel.kernel.then), *choice.reasons)


chosen(lambda x: ops.attention(x, x, x, window=3))
chosen(jax.grad(lambda x: ops.attention(x, x, x, causal=True).astype(jnp.float32).sum()))
chosen(jax.grad(lambda x: ops.attention(x, x, x, deterministic=False).astype(jnp.float32).sum()))
"""


def test_it_runs_where_it_is_asked_for():
    assert _triton_tma.ASKED_FOR == _triton_tma.GRADIENTS_ASKED_FOR == ()
    environment = os.environ | {"EQXCALLBACK_ATTENTION_TMA": "1", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", CHOSEN]
    made = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.splitlines()
    assert made == [
        "attention_forward attention_join ('triton kernel attention_forward_tma', 'it has no window') "
        "('jax kernel attention_by_cudnn', 'cuDNN: a window has to be causal')",
        "attention_forward_tma",
        "attention_backward_rows attention_backward_keys_tma attention_backward_queries_tma",
        "attention_forward_tma",
        "attention_backward_rows attention_backward_keys attention_backward_end attention_backward_slopes "
        "attention_backward_bias "
        "('jax kernel gradients_by_cudnn', 'cuDNN: EQXCALLBACK_CUDA_ARCH describes the GPU, and not whether it has cuDNN')",
    ]
