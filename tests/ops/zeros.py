"""Operands of which only the type counts."""

from typing import Any

import jax.numpy as jnp
import numpy as np


def f32(*shape) -> Any:
    return np.zeros(shape, np.float32)


def bf16(*shape) -> Any:
    return jnp.zeros(shape, jnp.bfloat16)


def f16(*shape) -> Any:
    return np.zeros(shape, np.float16)


def i32(*shape) -> Any:
    return np.zeros(shape, np.int32)


def c64(*shape) -> Any:
    return np.zeros(shape, np.complex64)


def u8(*shape) -> Any:
    return np.zeros(shape, np.uint8)
