"""Launches with attributes, on a driver that checks and records them, and runs nothing."""

import jax
import jax.numpy as jnp
import pytest

import eqxcallback as eqxc
from eqxcallback.backends import _triton
from eqxcallback.backends._step import Program, Step, check_scratch


X = jnp.ones((4, 8))


@pytest.fixture(autouse=True)
def _driver(driver, compiler):
    """For all tests here."""


def call(kernel, *args, **options):
    op = eqxc.Op("op", kernels={"cpu": kernel}, reference=lambda x, **_: x)
    return jax.block_until_ready(jax.jit(lambda *args: op(*args, **options))(*args))


def kernel(*launches, **changed):
    return eqxc.CudaKernel("the source {}", "entry", launches, **changed)


def parameters(driver):
    return [line.split()[1:] for line in driver.log if line.startswith("parameters")]


@pytest.mark.parametrize(
    ("asked", "attributes"),
    [
        ({"cluster": (2, 3)}, "cluster=(2,3,1)"),
        ({"cluster": lambda x: (x.shape[0], 3)}, "cluster=(4,3,1)"),
        ({"cooperative": True}, "cooperative=1"),
        ({"programmatic": True}, "programmatic=1"),
        ({"cluster": 2, "cooperative": True, "programmatic": True}, "cooperative=1 cluster=(2,1,1) programmatic=1"),
    ],
)
def test_attributes(driver, asked, attributes):
    call(kernel(eqxc.Launch((8, 6), 32, **asked), eqxc.Launch((8, 6), 64)), X)
    first, second = driver.launches
    stream = "shared=0 device=0 stream=(nil)"
    assert first == f"cuLaunchKernelEx entry_lowered grid=(8,6,1) block=(32,1,1) {stream} {attributes}"
    assert second == f"cuLaunchKernel entry_lowered grid=(8,6,1) block=(64,1,1) {stream}"
    assert len({tuple(words) for words in parameters(driver)}) == 1


def test_an_error_of_the_driver(driver):
    driver.fail("cuLaunchKernelEx", 912)
    text = r"cuLaunchKernelEx\(entry_lowered, grid .*, 0 bytes of shared memory, clusters of \(2, 1, 1\)"
    with pytest.raises(jax.errors.JaxRuntimeError, match=rf"op\[cuda\]: {text}, programmatic\) failed"):
        call(kernel(eqxc.Launch((8, 6), 32, cluster=2, programmatic=True)), X)


@pytest.mark.parametrize(
    ("asked", "error", "text"),
    [
        ({"cluster": 17}, ValueError, r"entry: expected cluster to have 1 to 16 blocks; got \(17, 1, 1\)\."),
        (
            {"cluster": 3},
            ValueError,
            r"entry: expected grid to be a multiple of cluster, \(3, 1, 1\); got \(8, 6, 1\)\.",
        ),
        (
            {"cluster": 2, "arch": "sm_80"},
            ValueError,
            r"expected arch to be sm_90 or newer, for clusters .*; got sm_80\.",
        ),
        ({"cluster": -1}, TypeError, "Launch: expected cluster to be an integer or up to three"),
        ({"cooperative": 1}, TypeError, "Launch: expected cooperative to be True or False; got 1"),
    ],
)
def test_what_is_refused_when_a_program_is_lowered(asked, error, text):
    changed = {"arch": asked.pop("arch")} if "arch" in asked else {}
    with pytest.raises(error, match=text):
        call(kernel(eqxc.Launch((8, 6), 32, **asked), **changed), X)


def test_attributes_make_another_kernel():
    plain, cluster = (kernel(eqxc.Launch(8, 32, cluster=size)) for size in (1, 2))
    assert plain == kernel(eqxc.Launch(8, 32)) != cluster


def test_scratch_memory_of_a_compiler(driver, monkeypatch):
    """Each launch has its own part: one that is launched programmatically begins before the one ahead has ended."""
    steps = [
        Step.checked(0, "f", "f", grid=2, block=32, shared_bytes=0, scratch_bytes=size, programmatic=size > 0)
        for size in (200, 0, 56, 128)
    ]
    monkeypatch.setattr(_triton, "compiled", lambda *_: Program((b"image 5 scratch",), tuple(steps), 2))
    of = eqxc.TritonKernel("nowhere:f", grid=2, scalars={"n": ("int32", lambda x: x.size)})
    out = call(of, X)
    found = [list(map(int, words)) for words in parameters(driver)]
    assert [words[:3] + words[4:] for words in found] == [
        [X.unsafe_buffer_pointer(), out.unsafe_buffer_pointer(), 32, 0]
    ] * 4
    begin = found[0][3]
    assert begin not in (0, *found[0][:2])
    assert [words[3] - begin for words in found] == [0, 256, 256, 384]


def test_scratch_memory_that_xla_does_not_have():
    check_scratch(128, "f")
    with pytest.raises(
        ValueError, match=r"f: expected scratch memory at multiples of 128 bytes.*; the compiler wants 256"
    ):
        check_scratch(256, "f")
