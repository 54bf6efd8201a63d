"""Attention by the tensor memory accelerator (TMA): the op with that kernel alone, and calls that it takes."""

import dataclasses
import importlib
from typing import Any

import jax.numpy as jnp

from eqxcallback.ops.attention import _triton_tma

from .options import inputs


# `eqxcallback.ops.attention` is the function as well, which hides the module.
MODULE = importlib.import_module("eqxcallback.ops.attention._attention")

OP = dataclasses.replace(
    MODULE._attention,
    kernels={"cuda": _triton_tma.ATTENTION_TMA},
    backward={"cuda": _triton_tma.ATTENTION_BACKWARD_TMA},
)

# Queries, keys, heads, heads of keys, size, dtype, and options. The last block is not full, and some queries see nothing.
CALLS: dict[str, tuple[Any, ...]] = {
    "causal": (81, 81, 2, 2, 32, jnp.float32, {"causal": True}),
    "more queries than keys": (70, 37, 4, 2, 80, jnp.bfloat16, {"causal": True}),
    "more keys than queries": (65, 130, 2, 1, 40, jnp.float16, {"causal": True}),
    "all keys": (67, 50, 2, 2, 20, jnp.float32, {}),
    "negative scale": (66, 33, 1, 1, 64, jnp.bfloat16, {"scale": -0.7}),
    "one key": (65, 1, 1, 1, 96, jnp.float16, {"causal": True}),
    "short heads": (65, 20, 1, 1, 4, jnp.float32, {"scale": 3.0}),
    "groups": (67, 50, 4, 2, 24, jnp.bfloat16, {}),
}
# Those whose gradients have such a kernel too.
DIFFERENTIABLE = [name for name, (*_, dtype, _) in CALLS.items() if dtype != jnp.float32]


def operands(name: str) -> tuple[Any, ...]:
    return inputs(*CALLS[name][:-1])


def chosen(name: str) -> dict[str, Any]:
    return CALLS[name][-1]
