"""Probe the machine at the moment of a measurement: its copy bandwidth, and its bf16 products."""

import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

from .._rows import Row, Setting
from .._timing import Runner


COPY = "copy"


@functools.cache
def copy_runner(setting: Setting) -> tuple[Callable[[], Runner], float]:
    """A contestant that reads an array and writes one, of 256 MiB each, and how many bytes that is. It is compiled once for all
    rows."""
    x = jnp.ones(1 << (12 if setting.tiny else 27), jnp.bfloat16)
    make = functools.cache(lambda: setting.clock.runner(lambda x: x + 1, x)._replace(result=None))
    return make, 2.0 * x.nbytes


def measure(setting: Setting) -> Iterator[Row]:
    copy, copied = copy_runner(setting)
    yield Row("copy", "GB/s", copied, setting.race({COPY: copy}))
    size = 64 if setting.tiny else 8192
    a, b = (jax.random.normal(jax.random.key(i), (size, size), jnp.bfloat16) for i in range(2))
    product = setting.race({"XLA": lambda: setting.clock.runner(jnp.matmul, a, b)})
    yield Row("bf16 product of random numbers", "TFLOP/s", 2.0 * size**3, product)
