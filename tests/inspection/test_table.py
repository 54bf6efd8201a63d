"""The text of an inspection."""

import jax
import jax.numpy as jnp
import pytest

import eqxcallback as eqxc
from eqxcallback import ops

from .layers import AddOne, Scale


def step(cache, x):
    cache = ops.cache_append(cache, Scale(jnp.ones(2))(x)[None], 0)
    return jax.lax.scan(lambda c, _: (AddOne()(c), None), cache, length=3)[0]


COMPILED = """\
step: 3 external calls, compiled for cpu

op            kind     lane    target                    times  path
Scale         forward  python  eqxcallback_python        1      jit(step)/Scale
    (float32[2], float32[2]) -> (float32[2])
cache_append  forward  native  eqxcallback_cache_append  1      jit(step)/cache_append
    (float32[8,2], float32[1,2], int32[]) -> (float32[8,2])
    operand 0 -> result 0: copied (not donated)
AddOne        forward  python  eqxcallback_python        3      jit(step)/scan/AddOne
    (float32[8,2]) -> (float32[8,2])
    operand 0 -> result 0: in place

captured: no, a CPU has no command buffers"""

LOWERED = """\
step: 3 external calls, lowered for cuda
    not compiled: JAX's CUDA plugin is not installed

op            kind     lane    target                       times  path
Scale         forward  python  eqxcallback_python           1      jit(step)/Scale
    (float32[2], float32[2]) -> (float32[2])
    captured: no, not declared command_buffer_compatible
cache_append  forward  native  eqxcallback_launch_captured  1      jit(step)/cache_append
    (float32[8,2], float32[1,2], int32[]) -> (float32[8,2])
    launch cache_append: 1 block of 256 threads
    operand 0 -> result 0: unknown until compiled (not donated)
    captured: unknown, declared compatible: XLA decides
AddOne        forward  python  eqxcallback_python           3      jit(step)/scan/AddOne
    (float32[8,2]) -> (float32[8,2])
    operand 0 -> result 0: unknown until compiled
    captured: no, not declared command_buffer_compatible"""


@pytest.mark.parametrize(("platform", "text"), [(None, COMPILED), ("cuda", LOWERED)])
def test_table(platform, text, without_plugin):
    assert str(eqxc.inspect(step, jnp.ones((8, 2)), jnp.ones(2), platform=platform)) == text


def test_lines_are_not_long():
    def deep(x, depth=12):
        if depth == 0:
            return Scale(jnp.ones(2))(x)
        with jax.named_scope(f"a_scope_of_depth_{depth}"):
            return deep(x, depth - 1)

    lines = str(eqxc.inspect(deep, jnp.ones(2))).splitlines()
    assert max(map(len, lines)) <= 120
    assert any(line.endswith("a_scope_of_depth_1/Scale") and "..." in line for line in lines)
