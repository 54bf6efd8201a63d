"""Triton kernels for a device: a binary for devices that are known by name, and portable PTX for all others."""

import re

import jax
import jax.numpy as jnp
import pytest


pytest.importorskip("triton", reason="Triton is not installed")

import eqxcallback as eqxc
from eqxcallback import ops
from eqxcallback.backends import most_shared_bytes

from ..testing.triton_kernels import row_sums, sums_of


pytestmark = pytest.mark.usefixtures("triton_cache")


def image(monkeypatch, arch: str) -> bytes:
    monkeypatch.setenv("EQXCALLBACK_CUDA_ARCH", arch)
    op, x = sums_of(row_sums), jax.ShapeDtypeStruct((3, 10), jnp.float32)
    text = jax.jit(op).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    match = re.search(r'images = dense<"0x([0-9A-F]+)">', text)
    assert match is not None
    return bytes.fromhex(match[1])


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121"])
def test_known_by_name(arch, monkeypatch):
    assert image(monkeypatch, arch)[:4] == b"\x7fELF"


@pytest.mark.parametrize(
    ("arch", "target"),
    [("compute_80", "80"), ("compute_86", "86"), ("compute_90", "89"), ("sm_110", "89"), ("sm_999", "89")],
)
def test_portable_code(arch, target, monkeypatch):
    """From sm_90 on, Triton's PTX has instructions of one architecture alone: a B200 refuses that of an H100."""
    assert f".target sm_{target}\n".encode() in image(monkeypatch, arch).replace(b",", b"\n")


@pytest.mark.parametrize("size", [128, 256])
@pytest.mark.parametrize("arch", ["compute_80", "compute_90", "compute_100"])
def test_portable_code_fits_on_every_gpu_that_runs_it(arch, size, monkeypatch):
    """One of sm_120 has less shared memory than one of sm_90."""
    monkeypatch.setenv("EQXCALLBACK_CUDA_ARCH", arch)
    x = jax.ShapeDtypeStruct((1, 1024, 4, size), jnp.bfloat16)
    loss = lambda q, k, v: ops.attention(q, k, v, causal=True, implementation="triton").astype(jnp.float32).sum()
    text = jax.jit(jax.grad(loss, (0, 1, 2))).trace(x, x, x).lower(lowering_platforms=("cuda",)).as_text()
    geometries = re.findall(r"geometry = (?:array<i64: |dense<\[?)([^>\]]*)", text)
    shared = [int(number) for geometry in geometries for number in geometry.split(",")[6::8]]
    assert max(shared) > 0
    assert max(shared) <= most_shared_bytes(arch)


def test_an_old_one(monkeypatch):
    """JAX runs on it, and Triton does not: another kernel runs, unless Triton's was chosen."""
    monkeypatch.setenv("EQXCALLBACK_CUDA_ARCH", "sm_75")
    x = jax.ShapeDtypeStruct((7, 2, 16), jnp.float32)
    calls = eqxc.inspect(jax.grad(lambda x: ops.attention(x, x, x).sum()), x, platform="cuda").calls
    assert [call.lane for call in calls] == ["jax", "jax"]
    reasons = {reason for call in calls for _, reason in call.passed_over}
    assert "Triton compiles for sm_80 and newer, and not for sm_75." in reasons
    chosen = jax.jit(sums_of(row_sums).using("triton"))
    with pytest.raises(ValueError, match=r"expected arch to be sm_80 or newer; got sm_75\."):
        chosen.trace(jax.ShapeDtypeStruct((3, 7), jnp.float32)).lower(lowering_platforms=("cuda",))
