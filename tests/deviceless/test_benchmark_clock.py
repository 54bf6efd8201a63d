"""Programs that the GPU benchmarks time in the place of single calls: XLA for GPUs keeps every call, one after the other."""

import re

import jax
import jax.numpy as jnp
import pytest

import eqxcallback as eqxc
from benchmarks.gpu.repeated import repeated
from benchmarks.gpu.timing import wait_op
from eqxcallback import ops, xla


CALLS = 5
X, WEIGHT = jax.ShapeDtypeStruct((64, 512), jnp.float32), jax.ShapeDtypeStruct((512,), jnp.float32)


def compiled(f, *args):
    options = dict(eqxc.jit_captured(f).compiler_options)
    return xla.compile_deviceless(repeated(f, CALLS), [args, args], compiler_options=options)


@pytest.mark.parametrize(
    ("f", "args", "thunk"),
    [
        (lambda x: x + 1, (X,), "kCustomKernel"),
        (lambda x, weight: ops.rms_norm(x, weight), (X, WEIGHT), "kCustomCall"),
    ],
    ids=["of XLA", "ours"],
)
def test_calls_of_two_sets_are_not_merged(f, args, thunk):
    """All are in one command buffer, nothing is copied, and the sets take turns."""
    plan = compiled(f, *args)
    inside = [line for line in plan.thunks.splitlines() if line.startswith(" ") and thunk in line]
    outside = [line for line in plan.thunks.splitlines() if re.match(r"\d+: ", line)]
    assert len(inside) == CALLS
    assert len(outside) == 1
    assert "kCommandBuffer" in outside[0]
    assert "kCopy" not in plan.thunks
    entry = plan.hlo_text[plan.hlo_text.index("\nENTRY") :]
    assert len(re.findall(r" (?:fusion|custom-call)\(", entry)) == CALLS


def test_without_the_barriers_they_are_merged():
    """Else the test above would show nothing."""
    program = lambda sets: [sets[i % 2][0] + 1 for i in range(CALLS)]
    plan = xla.compile_deviceless(program, [(X,), (X,)])
    entry = plan.hlo_text[plan.hlo_text.index("\nENTRY") :]
    assert len(re.findall(r" (?:fusion|custom-call|add)\(", entry)) < CALLS


def test_what_keeps_the_device_busy_is_a_kernel():
    (call,) = eqxc.inspect(jax.jit(wait_op()), jnp.int32(5), platform="cuda").calls
    assert call.lane == "native"
