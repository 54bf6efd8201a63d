"""The shared memory that calls ask for is what a block of the device may have. Nothing runs."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks.gpu import kernels
from benchmarks.programs import PROGRAMS, Program, struct
from eqxcallback import ops
from eqxcallback.backends import most_shared_bytes

from .cuda_programs import all_attributes


@pytest.mark.parametrize(
    ("arch", "kib"),
    [
        ("sm_61", 48),
        ("sm_70", 96),
        ("sm_75", 64),
        ("sm_80", 163),
        ("sm_86", 99),
        ("sm_90a", 227),
        ("sm_120", 99),
        ("sm_130", 99),  # nobody knows it yet: as the last one
        ("compute_75", 64),
        ("compute_80", 99),  # what sm_86 has, which runs it
        ("compute_61", 48),
    ],
)
def test_as_nvidia_says(arch, kib):
    assert most_shared_bytes(arch) == kib << 10


def _norms(size):
    """Norms of a large row, whose sums for the gradients of parameters take 4 and 8 bytes for each column."""
    x, parameter = struct(64, size), struct(size, dtype=jnp.float32)
    return {
        f"rms_norm of {size}": Program(ops.rms_norm, (x, parameter), differentiable=(0, 1)),
        f"layer_norm of {size}": Program(ops.layer_norm, (x, parameter, parameter), differentiable=(0, 1, 2)),
        f"add_rms_norm of {size}": Program(
            lambda x, residual, weight: sum(ops.add_rms_norm(x, residual, weight)),  # both of its results
            (x, x, parameter),
            differentiable=(0, 1, 2),
        ),
    }


LARGE_NORMS = {name: program for size in (8192, 12_288, 24_576) for name, program in _norms(size).items()}
# Triton's kernels have tiles of their own for each device.
OURS = [name for name in PROGRAMS if not name.startswith("attention")]


def shared_bytes(program):
    """Return the dynamic shared memory of each launch."""
    lowered = jax.jit(program.function).trace(*program.args).lower(lowering_platforms=("cuda",))
    return [int(n) for call in all_attributes(lowered) for n in call["geometry"].reshape(-1, 8)[:, 6]]


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("arch", ["sm_75", "sm_86", "compute_80"])
def test_calls_ask_for_no_more_than_the_device_has(arch, monkeypatch):
    monkeypatch.setenv("EQXCALLBACK_CUDA_ARCH", arch)
    large = [(name, program.gradients) for name, program in LARGE_NORMS.items()]
    for name, program in [*kernels.programs(large=True, names=OURS), *large]:
        every = shared_bytes(program)
        assert every, name
        assert max(every) <= most_shared_bytes(arch), name


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize(("arch", "kib"), [("sm_75", 0), ("sm_80", 96)])
def test_sums_that_do_not_fit_are_in_device_memory(arch, kib, monkeypatch):
    """By a real compiler: the gradients of a layer norm of 12,288 columns."""
    monkeypatch.setenv("EQXCALLBACK_CUDA_ARCH", arch)
    forward, backward, summing = shared_bytes(LARGE_NORMS["layer_norm of 12288"].gradients)
    assert (forward, backward, summing) == (0, kib << 10, 0)
