"""Changes to a kernel's functions that make it another kernel."""

import os
import subprocess
import sys

import beartype
import jax
import jaxtyping

import eqxcallback as eqxc
from eqxcallback.backends._description import description


def described(grid):
    source = "__global__ void nothing() {}"
    return description(eqxc.CudaKernel(source=source, entry="nothing", launch=eqxc.Launch(grid, 32)), "op")


def test_a_check_of_annotations_does_not():
    def grid(x: int) -> int:
        return x + 1

    assert described(jaxtyping.jaxtyped(typechecker=beartype.beartype)(grid)) == described(grid)


def test_it_is_the_same_in_each_process():
    """Descriptions of functions of JAX that have rules, and are wrapped by JAX."""
    first, second = (
        subprocess.run(
            [sys.executable, "-c", DESCRIBE],
            env=os.environ | {"PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout.split()
        for seed in ("1", "2")
    )
    assert first == second
    assert len(set(first)) == len(first) == 8


DESCRIBE = """
from eqxcallback.backends._description import description
from eqxcallback.ops.attention import _jax as attention
from eqxcallback.ops.linear import _jax as linear
from eqxcallback.ops.loss import _jax as loss

kernels = [
    attention.ATTENTION, attention.ATTENTION_BACKWARD, linear.INT8_LINEAR, linear.QUANTIZED_LINEAR,
    *loss.LINEAR_CROSS_ENTROPY.values(), *loss.LINEAR_CROSS_ENTROPY_BACKWARD.values(),
]
described = [description(kernel, "op").split()[1] for kernel in kernels]
print(*described)
"""


def test_a_rule_of_a_derivative_is_a_part():
    def described_with(rule):
        function = jax.custom_jvp(lambda x: x)
        function.defjvp(rule)
        return description(eqxc.JaxKernel(lambda x: function(x)), "op")

    first, second = (lambda p, t: (p[0], t[0])), (lambda p, t: (p[0], 2 * t[0]))
    assert described_with(first) == described_with(first) != described_with(second)
