"""The calls of `eqxcallback.testing.check` on a real GPU. `tests/test_gpu_check.py` tries these calls without one."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from . import saxpy


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def _ours(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"eqxcallback.ops.{module}"), name)


def _rms_norm() -> Any:
    return _ours("norm._norm", "_rms_norm"), (normal(3, 40), normal(40)), {"eps": 1e-5, "center": False}


def _attention() -> Any:
    q, k, v = normal(5, 4, 16), normal(7, 2, 16, seed=1), normal(7, 2, 16, seed=2)
    options = {"causal": True, "scale": 0.25, "window": 0, "soft_cap": 0.0, "dropout": 0.0}
    return _ours("attention._attention", "_attention"), (q, (k, v)), options


def _of_a_user() -> Any:
    return saxpy.op(), (jnp.arange(130.0), jnp.sin(jnp.arange(130.0))), {"a": 3.0}


# An op, its arguments and its options: all of these, since what an op is called with has no defaults.
CALLS: Mapping[str, Callable[[], Any]] = {"rms_norm": _rms_norm, "attention": _attention, "saxpy": _of_a_user}
